"""One suite, on a folder and on a real S3 server: whatever holds for the port holds for both."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tests.storage.conftest import CREDENTIALS
from trellis.engine.errors import OptionInvalid
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import (
    CREATE,
    KeyInvalid,
    ObjectPage,
    ObjectStore,
    ObjectTooLarge,
    PutRefused,
    PutStored,
    if_match,
)

ODD_KEYS = (
    "a b/c+d&e=f.json",
    "100%/%2e%2e/%2F.md",
    "ключ/скрипка Страдіварі.md",
    ".hidden/.trellis/scratch",
    "...",
    "a:b*c?d\"e'<f>|~^`{g}[h]#",
    "é/é",
    "😀/\u200b\u202e",
    "x ./ y/z ",
    "n" * 255,
    "/".join(["deep"] * 200),
    "ї" * 120 + "/" + "m" * 250 + "/" + "%" * 200,
)
CLASHING = ("a", "a!", "a-b", "a-b/c", "a.json", "a.json/x", "a/b", "a/b/c", "a0", "a0/d", "b!/4", "b/1", "b/2/3", "ї")


async def fill(store: ObjectStore, keys) -> None:
    for key in keys:
        assert isinstance(await store.put(key, key.encode(), when=CREATE), PutStored)


async def keys_of(store: ObjectStore, prefix: str = "", *, limit: int = 1000) -> list[str]:
    """Every key, page by page."""
    keys: list[str] = []
    page = ObjectPage((), more=True)
    while page.more:
        page = await store.list(prefix, after=keys[-1] if keys else None, limit=limit)
        assert len(page.items) <= limit
        keys += [info.key for info in page.items]
    return keys


# -- objects -----------------------------------------------------------------------------------------------------


async def test_object_is_read_back_as_it_was_put(store: ObjectStore):
    before = datetime.now(UTC) - timedelta(seconds=2)
    stored = await store.put("runs/1/status.json", b"{}")
    assert isinstance(stored, PutStored)
    found, info = await store.get("runs/1/status.json"), await store.head("runs/1/status.json")
    assert found is not None
    assert info is not None
    assert (found.key, found.body, found.size) == ("runs/1/status.json", b"{}", 2)
    assert found.etag == info.etag == stored.etag
    assert (info.key, info.size, info.modified_at) == (found.key, 2, found.modified_at)
    assert before <= found.modified_at <= datetime.now(UTC) + timedelta(seconds=2)
    assert (await store.list("runs/")).items == (info,)


async def test_missing_object_is_read_as_none(store: ObjectStore):
    await store.put("a/b", b"1")
    for key in ("a", "a/b/c", "b", "a/bb"):
        assert await store.get(key) is None
        assert await store.head(key) is None
        assert await store.delete(key) is False
    assert await store.list("c") == ObjectPage((), more=False)


async def test_an_empty_object_and_a_large_one_are_objects(store: ObjectStore):
    large = bytes(range(256)) * 40_000
    for key, body in (("empty", b""), ("large.bin", large)):
        await store.put(key, body)
        found = await store.get(key)
        assert found is not None
        assert found.body == body


async def test_equal_etags_mean_equal_bytes(store: ObjectStore):
    etags = [await store.put("k", body) for body in (b"one", b"two", b"one")]
    assert etags[0] == etags[2] != etags[1]


async def test_a_deleted_object_is_gone_and_can_be_created_again(store: ObjectStore):
    await fill(store, ["a/b/c", "a/b/d"])
    assert await store.delete("a/b/c") is True
    assert await store.delete("a/b/c") is False
    assert await keys_of(store) == ["a/b/d"]
    await fill(store, ["a/b/c"])
    assert await keys_of(store) == ["a/b/c", "a/b/d"]


async def test_an_object_over_the_bound_goes_neither_in_nor_out(store: ObjectStore, store_url: str):
    small = await open_objects(store_url, credentials=CREDENTIALS, object_bytes_max=10)
    await small.put("k", b"0123456789")
    with pytest.raises(ObjectTooLarge) as refused:
        await small.put("k", b"0123456789!")
    assert refused.value.data == {"key": "k", "size": 11, "limit": 10}
    await store.put("k", b"0123456789!")
    with pytest.raises(ObjectTooLarge):
        await small.get("k")
    assert (await small.list("")).items[0].size == 11
    await small.close()


# -- conditions --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D14")
async def test_create_puts_only_where_nothing_is(store: ObjectStore):
    first = await store.put("k.json", b"first", when=CREATE)
    assert isinstance(first, PutStored)
    assert await store.put("k.json", b"second", when=CREATE) == PutRefused(first.etag)
    assert await store.put("k.json", b"first", when=CREATE) == PutRefused(first.etag)
    found = await store.get("k.json")
    assert found is not None
    assert found.body == b"first"


@pytest.mark.requirement("D14")
async def test_if_match_puts_only_over_that_version(store: ObjectStore):
    first = await store.put("k", b"first")
    second = await store.put("k", b"second", when=if_match(first.etag or ""))
    assert isinstance(second, PutStored)
    assert await store.put("k", b"third", when=if_match(first.etag or "")) == PutRefused(second.etag)
    assert await store.put("gone", b"x", when=if_match(second.etag)) == PutRefused(None)
    await store.delete("k")
    assert await store.put("k", b"ghost", when=if_match(second.etag)) == PutRefused(None)
    assert await store.head("k") is None


@pytest.mark.requirement("D14")
async def test_exactly_one_of_64_concurrent_creates_of_a_key_wins(store: ObjectStore):
    bodies = [f"writer {number}".encode() for number in range(64)]
    answers = await asyncio.gather(*(store.put("race/one.json", body, when=CREATE) for body in bodies))
    won = [body for answer, body in zip(answers, bodies, strict=True) if isinstance(answer, PutStored)]
    found = await store.get("race/one.json")
    assert found is not None
    assert won == [found.body]
    assert {answer.etag for answer in answers} == {found.etag}


@pytest.mark.requirement("D14")
async def test_concurrent_if_match_counters_lose_no_increment(store: ObjectStore):
    await store.put("count", b"0")

    async def step() -> None:
        while True:
            found = await store.get("count")
            assert found is not None
            more = str(int(found.body) + 1).encode()
            if isinstance(await store.put("count", more, when=if_match(found.etag)), PutStored):
                return

    await asyncio.gather(*(step() for _ in range(16)))
    found = await store.get("count")
    assert found is not None
    assert found.body == b"16"


async def test_readers_never_see_a_mixture(store: ObjectStore):
    bodies = {bytes([letter]) * 300_000 for letter in b"abcd"}
    await store.put("k", min(bodies))

    async def read() -> None:
        for _ in range(15):
            found = await store.get("k")
            assert found is not None
            assert found.body in bodies

    await asyncio.gather(*(store.put("k", body) for body in bodies for _ in range(3)), read(), read())


async def test_writers_and_a_deleter_of_one_folder_do_not_disturb_each_other(store: ObjectStore):
    async def make_and_remove(number: int) -> None:
        for _ in range(8):
            await fill(store, [f"busy/folder/{number}"])
            assert await store.delete(f"busy/folder/{number}")

    await asyncio.gather(*(make_and_remove(number) for number in range(4)))
    assert await keys_of(store) == []


# -- keys and listings -------------------------------------------------------------------------------------------


async def test_odd_keys_are_kept_apart_and_read_back(store: ObjectStore):
    await fill(store, ODD_KEYS)
    for key in ODD_KEYS:
        found = await store.get(key)
        assert found is not None
        assert found.body == key.encode()
    assert await keys_of(store) == sorted(ODD_KEYS)
    for key in ODD_KEYS:
        assert await store.delete(key)
    assert await keys_of(store) == []


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
@pytest.mark.parametrize("probed", [False, True])
async def test_a_listing_is_in_byte_order_whatever_the_pages(store: ObjectStore, limit: int, probed: bool):
    if probed:
        await store.probe()
    await fill(store, CLASHING)
    assert await keys_of(store, limit=limit) == sorted(CLASHING, key=str.encode)


@pytest.mark.parametrize("prefix", ["a", "a/", "a/b", "a-", "a.j", "b", "b/", "ї", "c", "a0/", "a/b/"])
async def test_a_listing_holds_the_keys_that_begin_with_its_prefix(store: ObjectStore, prefix: str):
    await fill(store, CLASHING)
    assert await keys_of(store, prefix, limit=2) == sorted(key for key in CLASHING if key.startswith(prefix))


async def test_listing_continues_after_any_key_existing_or_not(store: ObjectStore):
    await fill(store, CLASHING)
    for after in (*CLASHING, "0", "a ", "a/", "aa", "b", "я"):
        if after.endswith("/"):
            continue
        page = await store.list("", after=after)
        assert [info.key for info in page.items] == sorted(key for key in CLASHING if key > after)


async def test_listing_reports_more_exactly_when_there_is_more(store: ObjectStore):
    await fill(store, ["p/1", "p/2", "q/3"])
    assert (await store.list("p/", limit=1)).more
    assert not (await store.list("p/", limit=2)).more
    assert not (await store.list("p/", after="p/1", limit=1)).more


async def test_invalid_store_request_is_refused_before_the_store_is_asked(store: ObjectStore):
    for key in ("", "/a", "a/", "a//b", "../a", "a/../b", ".", "a\\b", "a\0b", "a\nb", "\ud800", "k" * 1025):
        for call in (store.get(key), store.head(key), store.delete(key), store.put(key, b"")):
            with pytest.raises(KeyInvalid):
                await call
    for prefix in ("/", "a//", "../", "a/../b", "\0"):
        with pytest.raises(KeyInvalid):
            await store.list(prefix)
    for limit in (0, 1001):
        with pytest.raises(OptionInvalid):
            await store.list("", limit=limit)
    assert await keys_of(store) == []


async def test_stores_with_different_prefixes_are_isolated(store: ObjectStore, store_url: str):
    inner_url = store_url.replace("?", "/inner?") if "?" in store_url else store_url + "/inner"
    inner = await open_objects(inner_url, credentials=CREDENTIALS)
    await inner.put("k", b"inner")
    await store.put("k", b"outer")
    assert await keys_of(inner) == ["k"]
    found = await inner.get("k")
    assert found is not None
    assert found.body == b"inner"
    await inner.close()


async def test_the_probe_accepts_the_store_and_leaves_nothing(store: ObjectStore):
    await store.put("kept", b"1")
    await store.probe()
    assert await keys_of(store) == ["kept"]
