"""Pointers: what can be followed, and what never can."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import fakeredis
import pytest
from redis.asyncio import Redis

from trellis.bus.errors import (
    PointerChanged,
    PointerGone,
    PointerInvalid,
    PointerTooLarge,
    PointerUnavailable,
    PointerUnknown,
)
from trellis.bus.pointers import (
    BYTES_MAX,
    OBJECTS,
    REDIS,
    PointerPart,
    Pointers,
    RedisPointerStore,
    digest_in,
    make_pointers,
)
from trellis.engine.errors import OptionInvalid, SettingsInvalid
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore


@pytest.fixture
async def objects(tmp_path: Path) -> AsyncGenerator[ObjectStore]:
    store = await open_objects(f"file://{tmp_path / 'objects'}")
    yield store
    await store.close()


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
async def pointers(objects: ObjectStore, redis_url: str) -> AsyncGenerator[Pointers]:
    made = make_pointers(objects, redis_url)
    yield made
    await made.close()


@pytest.mark.requirement("BUS-9")
@pytest.mark.parametrize("scheme", [OBJECTS, REDIS])
async def test_written_bytes_are_read_back_and_equal_bytes_have_the_same_pointer(pointers: Pointers, scheme: str):
    for body in (b"", b'{"n":1}', os.urandom(3000)):
        first = await pointers.put(body, part=PointerPart.CONTEXT, scheme=scheme)
        again = await pointers.put(body, part=PointerPart.CONTEXT, scheme=scheme)
        assert (first, await pointers.read(first)) == (again, body)
        assert first.startswith(f"{scheme}://ctx")
    assert first != await pointers.put(b"other", part=PointerPart.CONTEXT, scheme=scheme)
    assert await pointers.read(await pointers.write("job-1@2", b"result", scheme=scheme)) == b"result"


@pytest.mark.requirement("BUS-9", "D53")
@pytest.mark.parametrize(
    "pointer, refusal",
    [
        ("s3://bucket/key", PointerUnknown),
        ("file:///etc/passwd", PointerUnknown),
        ("http://169.254.169.254/latest", PointerUnknown),
        ("OBJECTS://ctx/x", PointerUnknown),
        ("", PointerInvalid),
        ("ctx:1", PointerInvalid),
        ("objects://", PointerInvalid),
        ("objects://../agents/archivist/_agent.md", PointerInvalid),
        ("objects://ctx/../../audit/x", PointerInvalid),
        ("objects:///etc/passwd", PointerInvalid),
        ("objects://ctx/a\\..\\b", PointerInvalid),
        ("objects://ctx/\x00", PointerInvalid),
        ("objects://" + "a" * 3000, PointerInvalid),
        ("redis://", PointerInvalid),
        ("objects://ctx/nothing", PointerGone),
        ("redis://ctx:nothing", PointerGone),
        ("redis://elsewhere.example:6379/0", PointerGone),
    ],
)
async def test_foreign_pointer_is_not_followed(pointers: Pointers, pointer: str, refusal: type[Exception]):
    with pytest.raises(refusal):
        await pointers.read(pointer)


@pytest.mark.requirement("BUS-9")
async def test_no_pointer_leads_to_an_object_outside_the_folder_of_the_bus(pointers: Pointers, objects: ObjectStore):
    await objects.put("agents/secret.md", b"secret")
    for key in ("agents/secret.md", "../agents/secret.md", "./../agents/secret.md"):
        with pytest.raises((PointerGone, PointerInvalid)):
            await pointers.read(f"objects://{key}")


async def test_too_much_is_neither_written_nor_fetched(objects: ObjectStore):
    whole, server = b"y" * BYTES_MAX, fakeredis.FakeAsyncRedis()  # the server in a thread cannot carry so much
    pointers = make_pointers(objects, None)
    pointers.register(REDIS, RedisPointerStore(server))
    await objects.put("bus/res/large", whole + b"y")
    await server.set("res/large", whole + b"y")
    for scheme in (OBJECTS, REDIS):
        with pytest.raises(PointerTooLarge):
            await pointers.put(whole + b"y", part=PointerPart.RESULT, scheme=scheme)
        assert await pointers.read(await pointers.put(whole, part=PointerPart.RESULT, scheme=scheme)) == whole
        with pytest.raises(PointerTooLarge):
            await pointers.read(f"{scheme}://res/large")
    await pointers.close()


def client_of(url: str) -> Redis:
    return Redis.from_url(url)


@pytest.mark.requirement("BUS-9")
async def test_a_redis_key_is_taken_literally_as_the_sdk_writes_it(pointers: Pointers, redis_url: str):
    client = client_of(redis_url)
    await client.set("res:job-1@3", b'{"sum":5}')
    await client.lpush("a-list", "x")
    assert await pointers.read("redis://res:job-1@3") == b'{"sum":5}'
    with pytest.raises(PointerInvalid):
        await pointers.read("redis://a-list")
    await client.aclose()


async def test_repeated_write_of_a_pointer_extends_its_retention_and_never_shortens_it(
    pointers: Pointers, redis_url: str
):
    client = client_of(redis_url)
    key = (await pointers.put(b"kept", part=PointerPart.CONTEXT, scheme=REDIS, keep_s=1000)).removeprefix("redis://")
    await pointers.put(b"kept", part=PointerPart.CONTEXT, scheme=REDIS, keep_s=10)
    assert await client.pttl(key) > 900_000
    await pointers.put(b"kept", part=PointerPart.CONTEXT, scheme=REDIS, keep_s=5000)
    assert await client.pttl(key) > 4_000_000
    await client.aclose()


@pytest.mark.requirement("BUS-9")
@pytest.mark.parametrize(
    "refusal",
    [
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    ],
    ids=lambda refusal: refusal.split()[0],
)
async def test_temporary_refusal_of_redis_is_not_blamed_on_the_pointer(refusal: str):
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(f"-{refusal}\r\n".encode())
        writer.close()

    server = await asyncio.start_server(refuses, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    made = make_pointers(None, url)
    with pytest.raises(PointerUnavailable):
        await made.read("redis://ctx:1")
    await made.close()
    server.close()


async def test_unavailable_redis_is_reported_on_read(objects: ObjectStore, free_port: int):
    made = make_pointers(objects, f"redis://127.0.0.1:{free_port}/0")
    with pytest.raises(PointerUnavailable):
        await made.read("redis://ctx:1")
    with pytest.raises(PointerUnavailable):
        await made.put(b"x", part=PointerPart.CONTEXT, scheme=REDIS)
    await made.close()


def test_a_scheme_is_registered_once_and_by_a_proper_name(objects: ObjectStore):
    made = make_pointers(objects, None)
    assert made.schemes == (OBJECTS,)
    with pytest.raises(OptionInvalid):
        made.register(OBJECTS, made._stores[OBJECTS])
    with pytest.raises(OptionInvalid):
        made.register("Not A Scheme", made._stores[OBJECTS])
    with pytest.raises(SettingsInvalid):
        make_pointers(objects, "memcached://nowhere")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.requirement("BUS-9")
async def test_pointer_to_a_result_reads_no_other_object_of_the_store(pointers: Pointers, redis_url: str):
    async with Redis.from_url(redis_url) as server:
        for key in ("res:job-1@1", "session:1", "resident", "ctx:job-1"):
            await server.set(key, key)
    assert await pointers.read("redis://res:job-1@1", part=PointerPart.RESULT) == b"res:job-1@1"
    for key in ("session:1", "resident", "ctx:job-1", "res"):
        with pytest.raises(PointerInvalid, match="only what is kept as res"):
            await pointers.read(f"redis://{key}", part=PointerPart.RESULT)
    context = await pointers.put(b"x", part=PointerPart.CONTEXT)
    for pointer in (context, "objects://resident/x", "objects://res/../ctx/x"):
        with pytest.raises(PointerInvalid):
            await pointers.read(pointer, part=PointerPart.RESULT)


@pytest.mark.parametrize("url", ["redis://:hunter/2@host", "redis://me:hun#ter@host:1", "rdis://:hunter2@host"])
def test_an_address_of_redis_that_is_none_is_refused_without_its_password(url: str):
    with pytest.raises(SettingsInvalid) as refused:
        make_pointers(None, url)
    assert "hun" not in str(refused.value)


@pytest.mark.requirement("BUS-9", "D45")
@pytest.mark.parametrize("part", list(PointerPart))
async def test_bytes_that_do_not_have_the_digest_in_their_name_are_refused(
    pointers: Pointers, objects: ObjectStore, redis_url: str, part: PointerPart
):
    kept = await pointers.put(b"as it was judged", part=part)
    await objects.put(f"bus/{kept.removeprefix('objects://')}", b"as somebody wants it")
    in_redis = await pointers.put(b"as it was judged", part=part, scheme=REDIS)
    async with Redis.from_url(redis_url) as server:
        await server.set(in_redis.removeprefix("redis://"), b"as somebody wants it")
    for pointer in (kept, in_redis):
        with pytest.raises(PointerChanged):
            await pointers.read(pointer, part=part)
        with pytest.raises(PointerChanged):
            await pointers.read(pointer)
        assert digest_in(pointer) is not None


@pytest.mark.requirement("BUS-9")
async def test_a_payload_that_is_swapped_while_it_lies_aside_is_refused(pointers: Pointers, objects: ObjectStore):
    kept = await pointers.put(b"first", part=PointerPart.CONTEXT)
    key = kept.removeprefix("objects://")
    await objects.delete(f"bus/{key}")
    await objects.put(f"bus-aside/{key}", b"second")
    with pytest.raises(PointerChanged):
        await pointers.read(kept)
