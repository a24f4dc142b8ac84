"""An address says where a store is, all of it, and never who we are."""

from pathlib import Path

import pytest

from trellis.storage.objects.address import S3Address, S3Credentials, read_address, s3_credentials
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import StoreUrlInvalid


def test_a_folder_is_named_by_its_whole_path(tmp_path: Path):
    odd = tmp_path / "with space & ґанок"
    assert read_address(odd.as_uri()) == odd


def test_a_bucket_has_a_prefix_an_endpoint_and_a_region():
    assert read_address("s3://garden-agents") == S3Address(bucket="garden-agents")
    address = read_address("s3://garden/a/b%20c?endpoint=http://127.0.0.1:8333/&region=eu-west-1")
    assert address == S3Address(bucket="garden", prefix="a/b c", endpoint="http://127.0.0.1:8333", region="eu-west-1")
    assert isinstance(address, S3Address)
    assert read_address(address.url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "garden",
        "http://garden",
        "file://relative/path",
        "file:relative",
        "file:///",
        "file:///a%00b",
        "file:///a?b=c",
        "file:///a#b",
        "s3://",
        "s3://UPPER",
        "s3://ab",
        "s3://garden/../x",
        "s3://garden/a//b",
        "s3://garden?endpoint=ftp://x",
        "s3://garden?endpoint=http://user:canary@host",
        "s3://garden?secret_access_key=canary",
        "s3://key:canary@garden/x",
        "s3://key:canary@[",
    ],
)
async def test_invalid_store_url_is_refused_without_repeating_its_secret(url: str):
    with pytest.raises(StoreUrlInvalid) as refused:
        await open_objects(url)
    assert "canary" not in f"{refused.value} {refused.value.data}"
    assert "file:///" in str(refused.value)


def test_credentials_come_from_the_usual_variables():
    assert s3_credentials({}) is None
    assert s3_credentials({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": ""}) is None
    found = s3_credentials({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "canary", "AWS_SESSION_TOKEN": "canary"})
    assert found == S3Credentials(access_key_id="a", secret_access_key="canary", session_token="canary")
    assert "canary" not in repr(found)
