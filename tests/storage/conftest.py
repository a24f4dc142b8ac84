"""The stores that the one suite runs on: a folder, and a bucket of a real S3 server under a prefix of its own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.servers.seaweedfs import ACCESS_KEY, SECRET_KEY, SeaweedServer, running_seaweedfs
from trellis.storage.objects.address import S3Credentials
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore

CREDENTIALS = S3Credentials(access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY)

_prefixes = count(1)


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[SeaweedServer]:
    with running_seaweedfs() as server:
        asyncio.run(_warm_up(server))
        yield server


async def _warm_up(server: SeaweedServer) -> None:
    """The first object makes the server allocate its volumes, which takes a while."""
    store = await open_objects(server.url("warm-up"), credentials=CREDENTIALS)
    await store.put("k", b"1")


@pytest.fixture
def s3_url(seaweedfs: SeaweedServer) -> str:
    return seaweedfs.url(f"test {next(_prefixes)}/скрипка".replace(" ", "%20"))


@pytest.fixture(params=["local", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return (tmp_path / "objects").as_uri()
    return request.getfixturevalue("s3_url")


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[ObjectStore]:
    opened = await open_objects(store_url, credentials=CREDENTIALS)
    yield opened
    await opened.close()
