"""Where an artifact's bytes lie: the url of a document leads to the stored object, in a folder and in a bucket."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore
import pytest
from obstore.store import S3Store

from tests.artifacts.desk import desk_in
from tests.servers.seaweedfs import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, SeaweedServer
from tests.storage.conftest import CREDENTIALS, s3_url, seaweedfs
from trellis.storage.objects.address import object_url
from trellis.storage.objects.store import KeyInvalid

__all__ = ["s3_url", "seaweedfs"]


@pytest.mark.requirement("ART-6", "ART-7")
async def test_in_a_bucket_the_url_is_what_the_endpoint_serves(tmp_path: Path, s3_url: str, seaweedfs: SeaweedServer):
    async with desk_in(tmp_path, s3_url, credentials=CREDENTIALS) as desk:
        made = await desk.finalized()
        await desk.publish()
        document = await desk.artifacts.read(made.artifact_id)
        assert document is not None
        url = document["url"]
        assert url.startswith(f"{seaweedfs.endpoint}/{BUCKET}/")
        bucket = S3Store(
            BUCKET,
            config={
                "endpoint": seaweedfs.endpoint,
                "region": REGION,
                "access_key_id": ACCESS_KEY,
                "secret_access_key": SECRET_KEY,
            },
            client_options={"allow_http": True},
        )
        place = unquote(urlsplit(url).path).removeprefix(f"/{BUCKET}/")
        body = bytes((await obstore.get_async(bucket, place)).bytes())
        assert made.row.is_of(body)
        await desk.collector().run_once()
        assert await desk.keys() == [made.row.key]


@pytest.mark.parametrize(
    "store, key, url",
    [
        ("file:///a%20b/objects", "projects/x/y.json", "file:///a%20b/objects/projects/x/y.json"),
        ("s3://garden/?region=eu-west-1", "p/y.json", "https://s3.eu-west-1.amazonaws.com/garden/p/y.json"),
        (
            "s3://garden/some/prefix?endpoint=http://h:9000",
            "p/ж.json",
            "http://h:9000/garden/some/prefix/p/%D0%B6.json",
        ),
    ],
)
def test_an_address_and_a_key_make_a_url(store: str, key: str, url: str):
    assert object_url(store, key) == url


@pytest.mark.parametrize("key", ["../x", "/x", "a//b", "a/../b", ""])
@pytest.mark.parametrize("store", ["file:///objects", "s3://garden/p?endpoint=http://h:9000"])
def test_invalid_object_key_has_no_url(store: str, key: str):
    with pytest.raises(KeyInvalid):
        object_url(store, key)
