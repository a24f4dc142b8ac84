"""The store in a folder: plain files that people can read, and nothing torn, lost or left over."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.servers.ready_python import ready_python
from tests.storage.test_keys import legal_keys
from tests.storage.test_store import keys_of
from trellis.storage.objects import folders, local
from trellis.storage.objects.file_systems import MOUNTS, file_system_type, links_unnamed_files
from trellis.storage.objects.folders import FOLDER_SETTLED_NS, Folders
from trellis.storage.objects.local import RECENT_SETTLED_NS, LocalObjects
from trellis.storage.objects.open import open_objects, random_name
from trellis.storage.objects.store import CREATE, PutRefused, PutStored, StoreRefused, StoreUnavailable, if_match

ROOT = Path(__file__).resolve().parents[2]


@contextlib.asynccontextmanager
async def opened(path: Path, now_ns: Callable[[], int] = lambda: 0) -> AsyncIterator[LocalObjects]:
    store = LocalObjects(path, new_name=random_name, now_ns=now_ns)
    try:
        yield store
    finally:
        await store.close()


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def scratch_files(path: Path) -> list[str]:
    return names_in(path / ".trellis" / "scratch")


async def test_objects_are_plain_files_under_their_own_names(tmp_path: Path):
    async with opened(tmp_path) as store:
        await store.put("agents/archivist-violin/_agent.md", b"# Archivist")
        await store.put("agents/скрипка/notes.txt", b"1")
    assert (tmp_path / "agents/archivist-violin/_agent.md").read_bytes() == b"# Archivist"
    assert (tmp_path / "agents/скрипка/notes.txt").read_bytes() == b"1"


async def test_a_file_that_a_person_edits_is_a_new_version(tmp_path: Path):
    async with opened(tmp_path) as store:
        first = await store.put("agents/a/_agent.md", b"status: draft")
        (tmp_path / "agents/a/_agent.md").write_bytes(b"status: ready")
        info = await store.head("agents/a/_agent.md")
        assert info is not None
        assert await store.put("agents/a/_agent.md", b"x", when=if_match(first.etag or "")) == PutRefused(info.etag)
        (tmp_path / "agents/a/sources").mkdir()
        (tmp_path / "agents/a/sources/new.md").write_bytes(b"note")
        assert await keys_of(store) == ["agents/a/_agent.md", "agents/a/sources/new.md"]


async def test_a_remembered_hash_is_used_only_while_the_file_is_the_same(tmp_path: Path):
    file = tmp_path / "k.txt"
    async with opened(tmp_path, now_ns=lambda: file.stat().st_ctime_ns + FOLDER_SETTLED_NS + 1) as store:
        await store.put("k.txt", b"one")
        for body in (b"two", b"six"):
            before, was = await store.head("k.txt"), file.stat()
            assert before is not None
            assert before == await store.head("k.txt")
            file.write_bytes(body)
            while file.stat().st_ctime_ns == was.st_ctime_ns or file.stat().st_mtime_ns != was.st_mtime_ns:
                os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))  # as a copying tool would; the tick must pass
            after, found = await store.head("k.txt"), await store.get("k.txt")
            assert after is not None
            assert found is not None
            assert after.etag == found.etag != before.etag


@pytest.fixture
def file_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every file that was read."""
    reads: list[int] = []
    read = local._read  # pyright: ignore[reportPrivateUsage]

    def counted(fd: int, size: int, most: int) -> bytes:
        reads.append(size)
        return read(fd, size, most)

    monkeypatch.setattr(local, "_read", counted)
    return reads


async def test_an_object_read_again_is_as_its_file_is_now(tmp_path: Path, file_reads: list[int]):
    file = tmp_path / "k.txt"
    async with opened(tmp_path, now_ns=lambda: time.time_ns() + FOLDER_SETTLED_NS + 1) as store:
        await store.put("k.txt", b"one")
        first = await store.get("k.txt")
        assert first is not None
        assert (first.body, await store.get("k.txt"), file_reads) == (b"one", first, [3])
        was = file.stat()
        file.write_bytes(b"two")
        while file.stat().st_ctime_ns == was.st_ctime_ns:
            os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        second = await store.get("k.txt")
        assert second is not None
        assert second.body == b"two"
        file.rename(tmp_path / "other.txt")
        assert await store.get("k.txt") is None


async def reads_of_three(path: Path, file_reads: list[int], age_ns: int) -> list[int]:
    """The reads for three gets of an object that is this old."""
    file = path / "k.txt"
    async with opened(path, now_ns=lambda: file.stat().st_ctime_ns + age_ns) as store:
        await store.put("k.txt", b"one")
        file_reads.clear()
        for _ in range(3):
            await store.get("k.txt")
    return list(file_reads)


@pytest.mark.parametrize("age_ns, reads", [(RECENT_SETTLED_NS, 3), (RECENT_SETTLED_NS + 1, 1)])
async def test_an_object_written_a_moment_ago_is_read_each_time(
    tmp_path: Path, file_reads: list[int], monkeypatch: pytest.MonkeyPatch, age_ns: int, reads: int
):
    monkeypatch.setattr(local, "COARSE_NS", 1 << 62)  # whatever the digits of the time
    assert await reads_of_three(tmp_path, file_reads, age_ns) == [3] * reads


async def test_an_object_is_read_again_if_it_settled_only_while_it_was_read(
    tmp_path: Path, file_reads: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Whoever wrote to the file meanwhile, in the same tick as before, would not be noticed."""
    monkeypatch.setattr(local, "COARSE_NS", 1 << 62)
    file = tmp_path / "k.txt"
    async with opened(tmp_path, now_ns=lambda: file.stat().st_ctime_ns + RECENT_SETTLED_NS + len(file_reads)) as store:
        await store.put("k.txt", b"one")
        file_reads.clear()
        for _ in range(3):
            await store.get("k.txt")
    assert file_reads == [3, 3]


@pytest.mark.parametrize("age_ns, reads", [(FOLDER_SETTLED_NS, 3), (FOLDER_SETTLED_NS + 1, 1)])
async def test_an_object_on_a_file_system_that_keeps_seconds_is_read_each_time_for_longer(
    tmp_path: Path, file_reads: list[int], monkeypatch: pytest.MonkeyPatch, age_ns: int, reads: int
):
    monkeypatch.setattr(local, "COARSE_NS", 1)  # every time looks like one without digits
    assert await reads_of_three(tmp_path, file_reads, age_ns) == [3] * reads


async def test_local_store_leaves_foreign_files_alone(tmp_path: Path):
    async with opened(tmp_path) as store:
        await store.put("a/b.md", b"1")
        (tmp_path / "README").write_text("a file without a dot is no object")
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "config.txt").write_text("hidden")
        (tmp_path / "folder.with.dots").mkdir()
        (tmp_path / "folder.with.dots" / "x.md").write_text("not ours")
        (tmp_path / "a" / "bad\\name.md").write_text("not a key")
        os.mkfifo(tmp_path / "a" / "pipe.md")
        assert await keys_of(store) == ["a/b.md"]
        with pytest.raises(StoreRefused, match="regular file"):
            await store.get("a/pipe.md")
        with pytest.raises(StoreRefused):
            await store.put("README/x", b"1")


async def test_no_link_in_the_folder_leads_out_of_it(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.md").write_text("secret")
    async with opened(tmp_path / "objects") as store:
        (tmp_path / "objects" / "link").symlink_to(outside)
        (tmp_path / "objects" / "file.md").symlink_to(outside / "secret.md")
        assert await keys_of(store) == []
        for key in ("link/secret.md", "file.md"):
            with pytest.raises(StoreRefused):
                await store.get(key)
            with pytest.raises(StoreRefused):
                await store.put(key, b"x", when=CREATE)
        with pytest.raises(StoreRefused):
            await store.delete("link/secret.md")
        await store.put("file.md", b"replaces the link")
    assert (outside / "secret.md").read_text() == "secret"
    assert names_in(outside) == ["secret.md"]


@settings(max_examples=60, deadline=None)
@given(keys=st.lists(legal_keys, min_size=1, max_size=5, unique=True))
def test_every_legal_key_works_and_stays_in_the_folder(tmp_path_factory: pytest.TempPathFactory, keys: list[str]):
    parent = tmp_path_factory.mktemp("any")

    async def use() -> None:
        async with opened(parent / "objects") as store:
            for key in keys:
                assert isinstance(await store.put(key, key.encode(), when=CREATE), PutStored)
            for key in keys:
                found = await store.get(key)
                assert found is not None
                assert found.body == key.encode()
            assert await keys_of(store, limit=2) == sorted(keys)
            for key in keys:
                assert await store.delete(key)
            assert await keys_of(store) == []

    asyncio.run(use())
    assert names_in(parent) == ["objects"]
    assert names_in(parent / "objects") == [".trellis"]


async def test_local_store_leaves_no_scratch_files(tmp_path: Path):
    async with opened(tmp_path) as store:
        first = await store.put("k", b"1", when=CREATE)
        await store.put("k", b"2", when=CREATE)
        await store.put("k", b"3", when=if_match(first.etag or ""))
        await store.put("k", b"4", when=if_match(first.etag or ""))
        await store.put("k", b"5")
        assert scratch_files(tmp_path) == []


@pytest.mark.parametrize("proc_is_there", [True, False])
async def test_a_new_object_has_no_scratch_name_where_the_system_can_name_an_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proc_is_there: bool
):
    if not links_unnamed_files(tmp_path):
        pytest.skip("the file system of this folder gives every file a name first")
    if not proc_is_there:
        monkeypatch.setattr(folders, "_OPEN_DESCRIPTOR", b"/proc/missing/%d")
    named: list[int] = []

    def write(fd: int, body: bytes) -> None:
        named.append(len(scratch_files(tmp_path)))
        os.write(fd, body)

    monkeypatch.setattr(folders, "_write", write)
    async with opened(tmp_path) as store:
        first = await store.put("agents/a/k.md", b"1", when=CREATE)
        assert await store.put("agents/a/k.md", b"2", when=CREATE) == PutRefused(first.etag)
        await store.put("agents/a/k.md", b"3", when=if_match(first.etag or ""))
        assert (tmp_path / "agents/a/k.md").read_bytes() == b"3"
        assert scratch_files(tmp_path) == []
    assert named == ([0, 0, 1] if proc_is_there else [1, 1, 1])


@pytest.mark.skipif(shutil.which("lsattr") is None, reason="nothing here shows the attributes of a file")
def test_on_ext4_new_files_lie_apart_from_what_is_around_the_store():
    """Without a journal ext4 looks through every inode near a new file that was freed lately."""
    if file_system_type(ROOT, MOUNTS.read_text()) != "ext4":
        pytest.skip("this checkout is on another file system")
    with tempfile.TemporaryDirectory(prefix=".store-", dir=ROOT) as path:
        for _ in range(2):  # made, and opened again
            Folders(Path(path), lambda: "name").close()
        shown = subprocess.run(["lsattr", "-d", f"{path}/.trellis"], capture_output=True, text=True, check=True)
    assert "T" in shown.stdout.split()[0]


def test_unnamed_files_are_not_near_versions_that_are_replaced(tmp_path: Path):
    if not links_unnamed_files(tmp_path):
        pytest.skip("the file system of this folder gives every file a name first")
    with contextlib.closing(Folders(tmp_path, lambda: "name")) as store:
        for write, folder in ((store.write_unnamed, "locks"), (store.write_scratch, "scratch")):
            file = write(b"1")
            assert Path(f"/proc/self/fd/{file.fd}").readlink().parent == tmp_path / ".trellis" / folder
            store.drop_scratch(file)


async def test_opening_sweeps_what_dead_writers_left_and_spares_the_living(tmp_path: Path):
    async with opened(tmp_path):
        (tmp_path / ".trellis" / "scratch" / "left-over").write_bytes(b"half")
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-c", _SCRATCH_HOLDER, str(tmp_path)]
        writer = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
        assert writer.stdout is not None
        living = (await writer.stdout.readline()).decode().strip()
        async with opened(tmp_path):
            assert scratch_files(tmp_path) == [living]
        writer.kill()
        await writer.communicate()
        async with opened(tmp_path):
            assert scratch_files(tmp_path) == []


_SCRATCH_HOLDER = """
import sys
from pathlib import Path
from trellis.storage.objects.folders import Folders
file = Folders(Path(sys.argv[1]), lambda: "living").write_scratch(b"x")
print(file.name.decode(), flush=True)
sys.stdin.read()
"""


async def test_counting_by_if_match_in_many_processes_loses_no_step(tmp_path: Path):
    async with opened(tmp_path) as store:
        await store.put("count", b"0")
        command = [ready_python(), "-c", _COUNTER, str(tmp_path), "25"]
        workers = [await asyncio.create_subprocess_exec(*command, cwd=ROOT) for _ in range(4)]
        assert [await worker.wait() for worker in workers] == [0] * 4
        found = await store.get("count")
        assert found is not None
        assert found.body == b"100"


_COUNTER = """
import asyncio, sys
from pathlib import Path
from trellis.storage.objects.store import PutStored, if_match
from trellis.storage.objects.open import open_objects

async def main():
    store = await open_objects(Path(sys.argv[1]).as_uri())
    for _ in range(int(sys.argv[2])):
        while True:
            found = await store.get("count")
            more = str(int(found.body) + 1).encode()
            if isinstance(await store.put("count", more, when=if_match(found.etag)), PutStored):
                break
    await store.close()

asyncio.run(main())
"""


async def test_creating_one_key_in_many_processes_has_one_winner(tmp_path: Path):
    command = [ready_python(), "-c", _CREATOR, str(tmp_path), "40"]
    pipe = asyncio.subprocess.PIPE
    workers = [await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe) for _ in range(4)]
    won = [line for worker in workers for line in (await worker.communicate())[0].decode().split()]
    assert sorted(won, key=int) == [str(number) for number in range(40)]


_CREATOR = """
import asyncio, os, sys
from pathlib import Path
from trellis.storage.objects.store import CREATE, PutStored
from trellis.storage.objects.open import open_objects

async def main():
    store = await open_objects(Path(sys.argv[1]).as_uri())
    for number in range(int(sys.argv[2])):
        if isinstance(await store.put(f"{number}/x.json", str(os.getpid()).encode(), when=CREATE), PutStored):
            print(number)
    await store.close()

asyncio.run(main())
"""


async def test_a_writer_that_holds_a_lock_too_long_is_not_waited_for_forever(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(folders, "LOCK_WAIT_S", 0.05)
    async with opened(tmp_path) as store:
        await store.put("k", b"1")
        holder = folders.Folders(tmp_path, random_name)
        with holder.lock("k"), pytest.raises(StoreUnavailable, match="lock"):
            await store.put("k", b"2")
        holder.close()
        assert isinstance(await store.put("k", b"2"), PutStored)
        assert scratch_files(tmp_path) == []


async def test_a_folder_that_cannot_be_one_is_refused_with_the_reason(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreRefused, match="File exists"):
        await open_objects((tmp_path / "file").as_uri())


async def test_a_disk_that_is_full_changes_nothing(tmp_path: Path, monkeypatch):
    def full(fd: int, body: bytes) -> None:
        os.write(fd, body[:1])
        raise OSError(28, "No space left on device")

    async with opened(tmp_path) as store:
        await store.put("k", b"before")
        monkeypatch.setattr(folders, "_write", full)
        with pytest.raises(StoreUnavailable, match="No space left"):
            await store.put("k", b"after")
        found = await store.get("k")
        assert found is not None
        assert found.body == b"before"
        assert scratch_files(tmp_path) == []
