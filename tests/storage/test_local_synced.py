"""What the store in a folder says is there is on the disk, also when a process died between a change and its sync."""

import errno
import os
from pathlib import Path

import pytest

from tests.storage.test_local import opened
from trellis.storage.objects import folders, parallel_sync
from trellis.storage.objects.store import CREATE, PutRefused, PutStored, StoreUnavailable, if_match


class Syncs:
    """Every file and folder that is synced, by its path; those that end as `failing` are not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[Path] = []
        self.failing: str | None = None
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._traced)
        monkeypatch.setattr(parallel_sync._contexts, "take", lambda: None)  # so that each sync is a call of its own

    def _traced(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if self.failing is not None and path.name == self.failing:
            raise OSError(errno.EIO, "Input/output error")
        self._sync(fd)
        self.paths.append(path)

    def taken(self) -> list[Path]:
        taken, self.paths = self.paths, []
        return taken


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    return Syncs(monkeypatch)


@pytest.mark.requirement("D14")
@pytest.mark.parametrize("verb", ["create", "match"])
async def test_unsynced_object_is_synced_before_a_conflict_is_reported(tmp_path: Path, syncs: Syncs, verb: str):
    async with opened(tmp_path) as store:
        await store.put("audit/day/first.json", b"1")
        when, key = CREATE, "audit/day/second.json"
        if verb == "match":
            when = if_match((await store.put(key, b"old")).etag or "")
        syncs.failing = "day"
        for _ in range(2):  # the first makes the change, and no second one may rely on it
            with pytest.raises(StoreUnavailable):
                await store.put(key, b"new", when=when)
        assert (tmp_path / key).read_bytes() == b"new"
        syncs.failing = None
        syncs.taken()
        assert isinstance(await store.put(key, b"new", when=when), PutRefused)
        assert {tmp_path / key, tmp_path / "audit/day"} <= set(syncs.taken())


async def test_unsynced_deletion_is_synced_before_the_object_is_reported_missing(tmp_path: Path, syncs: Syncs):
    async with opened(tmp_path) as store:
        await store.put("audit/day/k.json", b"1")
        syncs.failing = "day"
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.delete("audit/day/k.json")
        syncs.failing = None
        syncs.taken()
        assert await store.delete("audit/day/k.json") is False
        assert syncs.taken() == [tmp_path / "audit/day"]


@pytest.mark.requirement("D14")
@pytest.mark.parametrize("verb", ["create", "overwrite", "match"])
async def test_folders_that_another_process_made_are_synced_once_before_a_write(
    tmp_path: Path, syncs: Syncs, verb: str
):
    root = tmp_path / "new" / "objects"
    async with opened(root) as store:
        (root / "agents" / "a").mkdir(parents=True)
        (root / "agents" / "a" / "k.md").write_bytes(b"old")
        found = await store.get("agents/a/k.md")
        assert found is not None
        when = {"match": {"when": if_match(found.etag)}, "create": {"when": CREATE}}.get(verb, {})
        key = "agents/a/new.md" if verb == "create" else "agents/a/k.md"
        syncs.taken()
        assert isinstance(await store.put(key, b"1", **when), PutStored)
        assert {tmp_path, tmp_path / "new", root, root / "agents", root / "agents/a"} <= set(syncs.taken())
        await store.put("agents/a/more.md", b"2", when=CREATE)
        new_file, folder = syncs.taken()
        assert (new_file.parent.parent, folder) == (root / ".trellis", root / "agents/a")


async def test_a_folder_whose_making_was_not_synced_is_synced_by_the_next_write(tmp_path: Path, syncs: Syncs):
    async with opened(tmp_path) as store:
        await store.put("agents/a/k.md", b"1")
        syncs.failing = "agents"
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.put("agents/b/k.md", b"1", when=CREATE)
        syncs.failing = None
        syncs.taken()
        assert isinstance(await store.put("agents/b/k.md", b"1", when=CREATE), PutStored)
        assert tmp_path / "agents" in syncs.taken()


@pytest.mark.requirement("D14")
async def test_a_folder_that_was_made_anew_is_synced_again_before_a_write_below_it(tmp_path: Path, syncs: Syncs):
    async with opened(tmp_path) as store:
        await store.put("agents/a/k.md", b"1")
        await store.put("agents/a/new/k.md", b"1")
        (tmp_path / "agents" / "a").rename(tmp_path / "elsewhere")
        (tmp_path / "agents" / "a").mkdir()
        syncs.taken()
        await store.put("agents/a/runs/k.md", b"1")
        assert {tmp_path / "agents", tmp_path / "agents/a", tmp_path / "agents/a/runs"} <= set(syncs.taken())


async def test_a_new_folder_below_a_synced_one_is_reached_without_opening_every_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps: list[tuple[bytes, ...]] = []
    step = folders.Folders._step

    def counted(self: folders.Folders, above: int, names: tuple[bytes, ...], *, make: bool) -> int:
        steps.append(names)
        return step(self, above, names, make=make)

    monkeypatch.setattr(folders.Folders, "_step", counted)
    async with opened(tmp_path) as store:
        await store.put("agents/a/runs/1/status.json", b"1")
        steps.clear()
        await store.put("agents/a/runs/1/steps/01.json", b"1")
    assert [names[-1] for names in steps] == [b"steps"]


def test_a_folder_that_was_removed_is_synced_again_even_if_it_comes_back_as_the_same_inode(tmp_path: Path):
    """Another process may make it again, and the system may give it the inode of the one that is gone."""
    names = (b"a", b"b")
    store = folders.Folders(tmp_path, lambda: "scratch")
    try:
        made = store.open_to_write(names, make=True)
        store.sync_above([made])
        os.close(made.fd)
        again = store.open_to_write(names, make=False)
        os.close(again.fd)
        assert again.unsynced == ()
        identities = dict(store._synced)
        store.prune(names)
        (tmp_path / "a" / "b").mkdir(parents=True)
        with pytest.MonkeyPatch.context() as patch:
            path_of = {(tmp_path / "a").stat().st_ino: (b"a",), (tmp_path / "a" / "b").stat().st_ino: names}
            patch.setattr(folders, "_identity", lambda fd: identities[path_of[os.fstat(fd).st_ino]])
            back = store.open_to_write(names, make=False)
        os.close(back.fd)
        assert [one for one, _ in back.unsynced] == [(b"a",), names]
    finally:
        store.close()
