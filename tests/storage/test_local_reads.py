"""Reading the store in a folder: whole objects or an error, and listings that cost what they show."""

import asyncio
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.storage.test_local import opened
from tests.storage.test_store import CLASHING, ODD_KEYS, fill, keys_of
from trellis.storage.objects import file_systems, folders, local
from trellis.storage.objects.local import LocalObjects
from trellis.storage.objects.open import random_name
from trellis.storage.objects.store import ObjectTooLarge, StoreUnavailable

LATE_NS = 1 << 62
"""A time at which every file has settled."""


# -- whole objects -----------------------------------------------------------------------------------------------


def in_pieces(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object] = lambda _: None) -> None:
    """Reads give less than is asked for, as on network file systems; `before` is told how many there were."""
    read, reads = os.read, iter(range(1_000))

    def some(fd: int, size: int) -> bytes:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return read(fd, size)  # another thread of this process, which hears of changes
        before(next(reads))
        return read(fd, min(size, 7))

    monkeypatch.setattr(local.os, "read", some)


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 14, 20])
async def test_an_object_that_is_read_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int):
    async with opened(tmp_path) as store:
        stored = await store.put("k.json", b"abcdefghijklmnopqrstuvwxyz"[:size])
        in_pieces(monkeypatch)
        found, info = await store.get("k.json"), await store.head("k.json")
        assert found is not None
        assert info is not None
        assert found.body == b"abcdefghijklmnopqrstuvwxyz"[:size]
        assert found.etag == info.etag == stored.etag


async def test_a_file_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with opened(tmp_path) as store:
        await store.put("k.json", b"0123456789")
        in_pieces(monkeypatch, lambda reads: os.truncate(tmp_path / "k.json", 8) if reads else None)
        with pytest.raises(StoreUnavailable, match="ends after 8 of 10 bytes"):
            await store.get("k.json")


async def test_a_file_that_grows_over_the_bound_is_refused_and_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = LocalObjects(tmp_path, new_name=random_name, now_ns=lambda: 0, object_bytes_max=10)
    await store.put("k.json", b"0123")
    in_pieces(monkeypatch, lambda reads: reads or (tmp_path / "k.json").write_bytes(b"0123456789ab"))
    with pytest.raises(ObjectTooLarge):
        await store.get("k.json")
    await store.close()


# -- which thread opens files ------------------------------------------------------------------------------------

MOUNTS = """22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:41 / /srv/shared rw,relatime shared:5 master:1 - nfs4 files:/export rw,vers=4.2
31 30 8:1 / /srv/shared/my\\040disk rw - xfs /dev/sda1 rw
32 27 0:42 / /data rw - ext4 /dev/vdb rw
33 27 0:43 / /data rw - fuse.sshfs someone@files: rw
"""


@pytest.mark.parametrize(
    "path, type_",
    [
        ("/srv", "ext4"),
        ("/srv/shared2", "ext4"),
        ("/srv/shared", "nfs4"),
        ("/srv/shared/objects", "nfs4"),
        ("/srv/shared/my disk/objects", "xfs"),
        ("/data/objects", "fuse.sshfs"),
    ],
)
def test_a_folder_is_on_the_file_system_mounted_last_and_nearest_above_it(path: str, type_: str):
    assert file_systems.file_system_type(Path(path), MOUNTS) == type_


def test_a_folder_is_not_taken_for_local_where_the_system_lists_no_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "none")
    assert not file_systems.is_on_local_disk(tmp_path)
    assert not file_systems.links_unnamed_files(tmp_path)


@pytest.mark.parametrize("type_, may_be", [("ext4", True), ("xfs", True), ("btrfs", False), ("nfs4", False)])
def test_a_file_is_named_after_its_sync_only_where_the_file_system_keeps_its_bytes_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: str, may_be: bool
):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"27 1 254:0 / / rw,relatime - {type_} /dev/vda rw\n", encoding="utf-8")
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
    assert file_systems.links_unnamed_files(tmp_path) is may_be


async def test_a_network_folder_that_hangs_does_not_stop_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mounts = tmp_path / "mounts"
    mounts.write_text("33 27 0:43 / / rw - nfs4 files:/export rw\n")
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
    store = LocalObjects(tmp_path / "objects", new_name=random_name, now_ns=lambda: LATE_NS)
    await store.put("k.json", b"{}")
    hanging, answered = threading.Event(), threading.Event()
    open_below_, stat_ = folders.open_below, local._RecentObject.is_unchanged

    def hang(call: Callable[..., Any]) -> Callable[..., Any]:
        def hung(*given: Any, **named: Any) -> Any:
            hanging.set()
            assert answered.wait(5), "the event loop waits for the file"
            return call(*given, **named)

        return hung

    for _ in range(2):  # the second read might look only at the file's status
        hanging.clear()
        answered.clear()
        monkeypatch.setattr(folders, "open_below", hang(open_below_))
        monkeypatch.setattr(local._RecentObject, "is_unchanged", hang(stat_))
        reading = asyncio.ensure_future(store.get("k.json"))
        assert await asyncio.to_thread(hanging.wait, 10)
        answered.set()
        read = await reading
        assert read is not None
        assert read.body == b"{}"
    monkeypatch.undo()
    await store.close()


# -- listings ----------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often folders were read, by name, and files opened."""
    seen: Counter[str] = Counter()
    scandir, open_ = os.scandir, os.open

    def counted_scandir(fd: Any) -> Any:
        seen[Path(f"/proc/self/fd/{fd}").readlink().name] += 1
        return scandir(fd)

    def counted_open(path: Any, *args: Any, **kwargs: Any) -> int:
        seen["files opened"] += bytes(path).endswith(b".json") if isinstance(path, bytes) else 0
        return open_(path, *args, **kwargs)

    monkeypatch.setattr(os, "scandir", counted_scandir)
    monkeypatch.setattr(os, "open", counted_open)
    return seen


def make_files(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(name)


@pytest.mark.parametrize("window, reads", [(20_000, 1), (100, 4)])
async def test_a_folder_is_not_read_again_for_each_page(
    tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch, window: int, reads: int
):
    monkeypatch.setattr(folders, "WINDOW", window)
    names = [f"{number:03}.json" for number in range(300)]
    make_files(tmp_path / "audit" / "day", names)
    async with opened(tmp_path, now_ns=lambda: LATE_NS) as store:
        assert await keys_of(store, "audit/", limit=10) == [f"audit/day/{name}" for name in names]
        assert calls["day"] <= reads
        assert calls["files opened"] <= 2 * len(names)
        before = calls["files opened"]
        await keys_of(store, "audit/", limit=100)
        assert calls["files opened"] == before, "their hashes are known"


async def test_a_page_shows_what_was_put_and_removed_since_the_last(tmp_path: Path):
    names = [f"{number:03}.json" for number in range(0, 200, 2)]
    folder = tmp_path / "day"
    make_files(folder, names)
    async with opened(tmp_path, now_ns=lambda: LATE_NS) as store:
        os.utime(folder, ns=(0, 0))  # whatever changes it now, its time will be another
        assert (await store.list("day/", limit=50)).items[-1].key == "day/098.json"
        await store.put("day/101.json", b"new")
        await store.delete("day/102.json")
        page = await store.list("day/", after="day/098.json", limit=3)
        assert [info.key for info in page.items] == ["day/100.json", "day/101.json", "day/104.json"]


async def test_a_folder_that_has_just_changed_is_read_again(tmp_path: Path, calls: Counter[str]):
    make_files(tmp_path / "day", [f"{number:03}.json" for number in range(100)])
    async with opened(tmp_path, now_ns=lambda: (tmp_path / "day").stat().st_mtime_ns) as store:
        await keys_of(store, "day/", limit=50)
        assert calls["day"] == 2, "within one tick of the clock its time may not tell of a change"


@pytest.mark.parametrize("now_ns", [0, LATE_NS], ids=["new", "settled"])
async def test_a_listing_is_the_same_through_the_smallest_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now_ns: int
):
    for name, value in (("WINDOW", 2), ("PAGE_MAX", 2), ("WORTH_KEEPING", 0)):
        monkeypatch.setattr(folders, name, value)
    keys = sorted({*CLASHING, *ODD_KEYS, *(f"a/{letter}/x" for letter in "abcdef"), "m" * 300, "m" * 250 + "/n"})
    async with opened(tmp_path, now_ns=lambda: now_ns) as store:
        await fill(store, keys)
        for limit in (1, 3):
            assert await keys_of(store, limit=limit) == keys
        for start in ("a", "a/", "a/b", "a/c/", "m", "m" * 236, "m" * 250, "n", ".", "b/2"):
            assert await keys_of(store, start, limit=2) == [key for key in keys if key.startswith(start)]
            for after in [*keys, "a/b!", "m" * 240]:
                found = [info.key for info in (await store.list(start, after=after)).items]
                assert found == [key for key in keys if key.startswith(start) and key > after]
