"""Many puts at once: in order within a sequence, independent of other sequences, on a folder and on a real S3 server."""

import asyncio
import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.storage.conftest import CREDENTIALS
from tests.storage.test_local import opened, scratch_files
from trellis.engine.metrics import STORE_ERRORS, process_metrics
from trellis.storage.objects import folders, group_puts, parallel_sync
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import (
    CREATE,
    OVERWRITE,
    PUTS_AT_ONCE,
    KeyInvalid,
    ObjectPut,
    ObjectStore,
    ObjectTooLarge,
    PutRefused,
    PutStored,
    StoreUnavailable,
    if_match,
    put_one_by_one,
)


async def bodies(store: ObjectStore, *keys: str) -> list[bytes | None]:
    stored = [await store.get(key) for key in keys]
    return [None if one is None else one.body for one in stored]


def kinds(answers: Sequence[Sequence[object]]) -> list[list[type]]:
    return [[type(answer) for answer in sequence] for sequence in answers]


async def test_every_object_of_many_sequences_is_stored_with_the_etag_that_was_answered(store: ObjectStore):
    sequences = [
        [
            ObjectPut(f"runs/{n}/steps/1.json", b"step%d" % n, CREATE),
            ObjectPut(f"runs/{n}/status.json", b"%d" % n, CREATE),
        ]
        for n in range(20)
    ]
    answers = await store.put_many(sequences)
    for sequence, given in zip(sequences, answers, strict=True):
        for put, answer in zip(sequence, given, strict=True):
            there = await store.get(put.key)
            assert there is not None
            assert (there.body, PutStored(there.etag)) == (put.body, answer)


async def test_a_sequence_ends_where_a_put_is_refused_and_the_others_go_on(store: ObjectStore):
    await store.put("a/2", b"there")
    answers = await store.put_many(
        [
            [ObjectPut("a/1", b"1", CREATE), ObjectPut("a/2", b"2", CREATE), ObjectPut("a/3", b"3", CREATE)],
            [ObjectPut("b/1", b"1", CREATE), ObjectPut("b/2", b"2", if_match("gone")), ObjectPut("b/3", b"3", CREATE)],
            [ObjectPut("c/1", b"1", CREATE)],
        ]
    )
    assert kinds(answers) == [[PutStored, PutRefused], [PutStored, PutRefused], [PutStored]]
    assert await bodies(store, "a/1", "a/2", "a/3", "b/1", "b/2", "b/3", "c/1") == [
        b"1",
        b"there",
        None,
        b"1",
        None,
        None,
        b"1",
    ]


async def test_versions_of_one_key_in_a_sequence_replace_each_other(store: ObjectStore):
    (answers,) = await store.put_many(
        [
            [
                ObjectPut("k", b"1", CREATE),
                ObjectPut("other", b"o", CREATE),
                ObjectPut("k", b"2", None),
                ObjectPut("k", b"3", None),
            ]
        ]
    )
    assert [type(one) for one in answers] == [PutStored] * 4
    there = await store.get("k")
    assert there is not None
    assert (there.body, PutStored(there.etag)) == (b"3", answers[3])
    (again,) = await store.put_many([[ObjectPut("k", b"4", if_match(there.etag)), ObjectPut("k", b"5", None)]])
    assert [type(one) for one in again] == [PutStored] * 2
    assert await bodies(store, "k") == [b"5"]


async def test_the_version_before_a_refused_put_is_stored_though_a_later_one_was_to_replace_it(store: ObjectStore):
    await store.put("taken", b"there")
    (answers,) = await store.put_many(
        [[ObjectPut("k", b"1", CREATE), ObjectPut("taken", b"mine", CREATE), ObjectPut("k", b"2", None)]]
    )
    assert [type(one) for one in answers] == [PutStored, PutRefused]
    there = await store.get("k")
    assert there is not None
    assert (there.body, PutStored(there.etag)) == (b"1", answers[0])


async def test_a_version_that_somebody_else_wrote_first_is_not_replaced_by_any_of_a_sequence(store: ObjectStore):
    first = await store.put("k", b"1")
    await store.put("k", b"theirs")
    (answers,) = await store.put_many([[ObjectPut("k", b"2", if_match(first.etag or "")), ObjectPut("k", b"3", None)]])
    assert [type(one) for one in answers] == [PutRefused]
    assert await bodies(store, "k") == [b"theirs"]


async def test_wrong_keys_and_sizes_are_answers_too(store_url: str):
    store = await open_objects(store_url, credentials=CREDENTIALS, object_bytes_max=10)
    answers = await store.put_many(
        [[ObjectPut("../up", b"1", CREATE)], [ObjectPut("k", b"x" * 11, CREATE)], [ObjectPut("fine", b"1", OVERWRITE)]]
    )
    assert kinds(answers) == [[KeyInvalid], [ObjectTooLarge], [PutStored]]
    await store.close()


async def test_more_puts_than_one_group_takes_are_all_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group_puts, "GROUP_MAX", 3)
    async with opened(tmp_path) as store:
        await store.put("b/2", b"there")
        sequences = [
            [ObjectPut(f"{name}/{n}", b"%d" % n, CREATE) for n in range(5)]
            + [ObjectPut(f"{name}/s", b"%d" % n, None if n else CREATE) for n in range(5)]
            for name in "abc"
        ]
        answers = await store.put_many(sequences)
        assert kinds(answers) == [[PutStored] * 10, [PutStored, PutStored, PutRefused], [PutStored] * 10]
        assert await bodies(store, "a/s", "b/1", "b/3", "b/s", "c/s") == [b"4", b"1", None, None, b"4"]
        assert scratch_files(tmp_path) == []


async def test_a_full_disk_fails_one_put_and_the_rest_of_its_sequence_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = folders._write

    def full(fd: int, body: bytes) -> None:
        if body == b"big":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(fd, body)

    monkeypatch.setattr(folders, "_write", full)
    async with opened(tmp_path) as store:
        answers = await store.put_many(
            [
                [ObjectPut("a/1", b"1", CREATE), ObjectPut("a/2", b"big", CREATE), ObjectPut("a/3", b"3", CREATE)],
                [ObjectPut("b/1", b"1", CREATE)],
            ]
        )
        assert kinds(answers) == [[PutStored, StoreUnavailable], [PutStored]]
        assert await bodies(store, "a/1", "a/2", "a/3", "b/1") == [b"1", None, None, b"1"]
        assert scratch_files(tmp_path) == []


@pytest.mark.requirement("D14")
@pytest.mark.parametrize("failing", ["file", "folder"])
async def test_what_could_not_be_synced_is_not_answered_as_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
):
    def synced(fds: list[int]) -> list[OSError | None]:
        paths = [Path(f"/proc/self/fd/{fd}").readlink() for fd in fds]
        sizes = [os.fstat(fd).st_size for fd in fds]
        bad = [
            size == len(b"unlucky") if failing == "file" else path == tmp_path / "b"
            for path, size in zip(paths, sizes, strict=True)
        ]
        return [OSError(errno.EIO, "Input/output error") if one else None for one in bad]

    async with opened(tmp_path) as store:
        for module in (folders, group_puts):
            monkeypatch.setattr(module, "sync_all", synced)
        answers = await store.put_many(
            [[ObjectPut("a/1", b"1", CREATE)], [ObjectPut("b/1", b"unlucky", CREATE), ObjectPut("a/2", b"2", CREATE)]]
        )
        assert kinds(answers) == [[PutStored], [StoreUnavailable]]
        if failing == "file":  # nothing that might be torn after a power cut is visible, and nothing after it
            assert await bodies(store, "a/1", "b/1", "a/2") == [b"1", None, None]


@pytest.mark.requirement("D14")
async def test_bytes_are_synced_with_the_folders_above_before_they_are_visible_and_their_folders_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two waits for the disk: one for new files and what leads to new folders, one for the folders."""
    seen: list[tuple[set[Path], list[str]]] = []
    own = tmp_path / ".trellis"

    def synced(fds: list[int]) -> list[OSError | None]:
        links = [Path(f"/proc/self/fd/{fd}").readlink() for fd in fds]
        seen.append(
            (
                {own if own in link.parents else link for link in links},
                sorted(path.name for path in tmp_path.glob("[ab]/*")),
            )
        )
        return parallel_sync.sync_all(fds)

    async with opened(tmp_path) as store:
        await store.put("a/0.json", b"0")
        for module in (folders, group_puts):
            monkeypatch.setattr(module, "sync_all", synced)
        await store.put_many([[ObjectPut("a/1.json", b"1", CREATE)], [ObjectPut("b/2.json", b"2", CREATE)]])
    assert seen == [({own, tmp_path}, ["0.json"]), ({tmp_path / "a", tmp_path / "b"}, ["0.json", "1.json", "2.json"])]


def open_files() -> list[str]:
    return [os.fspath(link.resolve()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


async def test_replaced_files_do_not_stay_open(tmp_path: Path):
    async with opened(tmp_path) as store:
        for number in range(5):
            await store.put_many([[ObjectPut(f"k{n}", b"%d" % number, OVERWRITE)] for n in range(20)])
    assert [path for path in open_files() if path.startswith(str(tmp_path))] == []


@pytest.mark.parametrize("way", ["together", "one after the other"])
def test_files_are_synced_and_an_error_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str):
    if way == "one after the other":
        monkeypatch.setattr(parallel_sync._contexts, "take", lambda: None)
    fds = [os.open(tmp_path / str(n), os.O_CREAT | os.O_WRONLY) for n in range(parallel_sync.SYNCS_MAX + 10)]
    reading, writing = os.pipe()  # a pipe cannot be synced
    problems = parallel_sync.sync_all([*fds, writing])
    assert problems[:-1] == [None] * len(fds)
    assert problems[-1] is not None
    assert problems[-1].errno == errno.EINVAL
    for fd in (*fds, reading, writing):
        os.close(fd)


async def test_puts_one_by_one_wait_for_a_server_at_most_so_many_at_once():
    under_way, most = 0, 0

    async def put(key: str, body: bytes, *, when: object) -> PutStored:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(3):
            await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, int), 10)
        under_way -= 1
        return PutStored(key)

    answers = await put_one_by_one(put, [[ObjectPut(str(n), b"", CREATE)] for n in range(PUTS_AT_ONCE * 3)])
    assert answers == [[PutStored(str(n))] for n in range(PUTS_AT_ONCE * 3)]
    assert most == PUTS_AT_ONCE


async def test_failed_puts_are_counted_once_however_they_were_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The alert on a store that does not answer reads this count."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def errors() -> dict[tuple[str, ...], float]:
        return {one.labels: one.value for one in process_metrics.samples() if one.metric is STORE_ERRORS}

    before = errors()
    monkeypatch.setattr(folders, "_write", full)
    async with opened(tmp_path) as store:
        await store.put_many([[ObjectPut(f"a/{n}", b"1", CREATE)] for n in range(3)])
        with pytest.raises(StoreUnavailable):
            await store.put("b", b"1")
    label = ("put", StoreUnavailable.code)
    assert errors() == before | {label: before.get(label, 0) + 4}


async def test_a_folder_that_a_deletion_removed_before_the_sync_costs_no_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sync_above, races = folders.Folders.sync_above, [True]

    def racing(self: folders.Folders, to_sync: Iterable[folders.FolderToWrite], files: Sequence[int] = ()) -> Any:
        some = list(to_sync)
        if races:
            races.clear()
            self.prune(some[0].names)  # as the deletion of another process does with an empty folder
        return sync_above(self, some, files)

    monkeypatch.setattr(folders.Folders, "sync_above", racing)
    async with opened(tmp_path) as store:
        answers = await store.put_many([[ObjectPut("a/b/c", b"1", CREATE)], [ObjectPut("x/y", b"2", CREATE)]])
        assert kinds(answers) == [[PutStored], [PutStored]]
        assert await bodies(store, "a/b/c", "x/y") == [b"1", b"2"]


async def test_a_folder_that_cannot_be_opened_to_sync_it_fails_its_own_puts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = folders.Folders.folder

    def too_many_files(self: folders.Folders, names: Sequence[bytes]) -> AbstractContextManager[int]:
        if names and names[0] == b"a":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return folder(self, names)

    async with opened(tmp_path) as store:
        monkeypatch.setattr(folders.Folders, "folder", too_many_files)
        answers = await store.put_many([[ObjectPut("a/b/c", b"1", CREATE)], [ObjectPut("x/y", b"2", CREATE)]])
        assert kinds(answers) == [[StoreUnavailable], [PutStored]]


async def test_a_sequence_ends_at_a_refused_put_also_when_a_later_one_replaces_it(store: ObjectStore):
    await store.put("k", b"of somebody else")
    sequence = [ObjectPut("k", b"1", if_match("0" * 64)), ObjectPut("mid", b"m", CREATE), ObjectPut("k", b"2", None)]
    assert kinds(await store.put_many([sequence])) == [[PutRefused]]
    assert await bodies(store, "k", "mid") == [b"of somebody else", None]


async def test_large_groups_are_written_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Several at once could take every descriptor of the process."""
    write, at_work, most = group_puts.GroupPuts._write, set[object](), list[int]()

    def watched(self: group_puts.GroupPuts, group: Any, etags: Any) -> Any:
        mine = object()
        at_work.add(mine)
        most.append(len(at_work))
        try:
            return write(self, group, etags)
        finally:
            at_work.discard(mine)

    monkeypatch.setattr(group_puts.GroupPuts, "_write", watched)
    async with opened(tmp_path) as store:
        calls = [[[ObjectPut(f"{call}/{n}", b"1", CREATE)] for n in range(20)] for call in range(8)]
        await asyncio.gather(*(store.put_many(call) for call in calls))
    assert (len(most), max(most)) == (8, 1)
