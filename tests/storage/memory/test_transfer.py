"""A memory moves between a folder and the object store, and its commits stay the same."""

import asyncio
import contextlib
import json
import subprocess
from itertools import count
from pathlib import Path

import pytest
from dulwich.objects import Commit

from tests.storage.memory.rig import AGENT, AT, append, applied, apply, commit_tree, shared_in
from trellis.storage.memory import shared_repository, transfer, verification
from trellis.storage.memory.bare_repository import KEY, MemoryRecord, check_belonging, id_of_identity, recorded
from trellis.storage.memory.errors import (
    ExportRefused,
    ImportRefused,
    MemoryBusy,
    MemoryMissing,
    MemoryMoved,
    MemoryOfAnother,
)
from trellis.storage.memory.layout import AlreadyApplied
from trellis.storage.memory.repository import MemoryRepository, open_memory, open_shared_memory
from trellis.storage.memory.shared_repository import FetchedHead, SharedHead, SharedStore
from trellis.storage.memory.transfer import MemoryImport, export_memory
from trellis.storage.memory.verification import verify
from trellis.storage.memory_place import SharedMemory
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore

ids = (f"id-{number}" for number in count(1))


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return asyncio.run(open_objects((tmp_path / "objects").as_uri()))


@pytest.fixture
def source(tmp_path: Path) -> MemoryRepository:
    """A memory of eleven changes, with a commit and a merge that a person made."""
    memory = open_memory(tmp_path / "memory.git")
    for number in range(9):
        applied(memory, append("facts.md", f"- {number}"), proposal_id=f"p{number}")
    commit_tree(memory, [("README.md", 0o100644, b"read me")])
    _merge(memory)
    return memory


def _merge(memory: MemoryRepository) -> None:
    head = memory.head()
    assert head
    with memory.objects() as objects:
        newest = objects[head]
        assert isinstance(newest, Commit)
        side, merge = newest.copy(), newest.copy()
        assert isinstance(side, Commit)
        assert isinstance(merge, Commit)
        side.message, side.parents = b"a branch of its own", []
        merge.message, merge.parents = b"merged", [head, side.id]
    with memory._bare.locked():
        assert memory._bare.publish([side, merge], head, merge.id)


def import_from(path: Path, objects: ObjectStore) -> transfer.TransferReport:
    return MemoryImport(path, objects, "memory", new_id=lambda: next(ids)).run()


def names(memory: MemoryRepository) -> list[bytes]:
    head = memory.head()
    with memory.objects() as objects:
        return list(transfer.first_parents(objects, head))


def test_imported_memory_has_the_same_commits_and_goes_on(source: MemoryRepository, objects: ObjectStore, tmp_path):
    before, facts = names(source), source.read(AGENT)
    report = import_from(source.path, objects)
    assert (report.commits, report.commit) == (11, before[-1].decode())
    memory = shared_in(objects, tmp_path / "replica.git")
    assert (names(memory), memory.read(AGENT)) == (before, facts)
    assert verify(memory).damage == ()
    assert isinstance(apply(memory, append("facts.md", "- 3"), proposal_id="p3"), AlreadyApplied)
    assert applied(memory, append("facts.md", "- later"), proposal_id="later", at=AT).version == 10
    assert git(memory.path, "fsck", "--strict", "--full") == ""


def test_source_of_an_import_refuses_every_use_also_by_who_has_it_open(source: MemoryRepository, objects: ObjectStore):
    import_from(source.path, objects)
    for call in (
        lambda: source.read(AGENT),
        lambda: source.version_conflict(AGENT, expected_version=9, proposal_id="x"),
        lambda: apply(source, append("facts.md", "- x"), proposal_id="x", version=9),
        lambda: open_memory(source.path).history(AGENT),
    ):
        with pytest.raises(MemoryMoved, match="imported to objects:memory and goes on there"):
            call()


@pytest.mark.parametrize("step", ["put_pack", "put_head"])
def test_import_broken_off_at_any_step_goes_on_when_run_again(
    source: MemoryRepository, objects: ObjectStore, tmp_path: Path, monkeypatch, step: str
):
    monkeypatch.setattr(transfer, "JOINED", (4,))
    before, call = names(source), getattr(SharedStore, step)
    broken = 0
    for allowed in count():
        left = iter(range(allowed))

        def die(self, *arguments, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return call(self, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(SharedStore, step, die)
            try:
                import_from(source.path, objects)
            except KeyboardInterrupt:
                broken += 1
                with pytest.raises((MemoryBusy, MemoryMissing)):
                    _opened(objects, tmp_path).read(AGENT)
                with contextlib.suppress(MemoryMoved):  # before the last step neither of the two can be used
                    assert source.read(AGENT).version == 9
                continue
        break
    assert broken >= 1
    assert names(_opened(objects, tmp_path)) == before


def test_at_no_moment_of_an_import_both_memories_accept_a_change(
    source: MemoryRepository, objects: ObjectStore, tmp_path: Path, monkeypatch
):
    put_head = SharedStore.put_head

    def die_after(self: SharedStore, head: SharedHead, replaced: FetchedHead | None):
        stored = put_head(self, head, replaced)
        if not head.importing:
            raise KeyboardInterrupt
        return stored

    with monkeypatch.context() as patched:
        patched.setattr(SharedStore, "put_head", die_after)
        with pytest.raises(KeyboardInterrupt):
            import_from(source.path, objects)
    assert _opened(objects, tmp_path).read(AGENT).version == 9
    with pytest.raises(MemoryMoved):
        source.read(AGENT)
    assert import_from(source.path, objects).commits == 11


def test_repository_with_many_commits_of_persons_is_imported(
    source: MemoryRepository, objects: ObjectStore, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(verification, "FINDINGS_MAX", 3)
    for number in range(4):
        commit_tree(source, [("README.md", 0o100644, f"edition {number}".encode())])
    assert import_from(source.path, objects).commits == 15
    report = verify(_opened(objects, tmp_path))
    assert (report.commits, report.complete, report.damage) == (15, True, ())
    assert (report.unexplained_commits, len(report.unexplained)) == (6, 3)


def _opened(objects: ObjectStore, tmp_path: Path) -> MemoryRepository:
    return open_shared_memory(objects, SharedMemory(prefix="memory", cache=tmp_path / "replica.git"))


def test_import_that_is_run_again_changes_nothing_also_after_the_memory_went_on(
    source: MemoryRepository, objects: ObjectStore, tmp_path: Path
):
    first = import_from(source.path, objects)
    memory = _opened(objects, tmp_path)
    applied(memory, append("facts.md", "- later"), proposal_id="later")
    after = names(memory)
    assert import_from(source.path, objects) == first
    assert names(memory) == after


def test_pack_that_is_lost_on_the_way_is_found_before_the_import_ends(
    source: MemoryRepository, objects: ObjectStore, monkeypatch
):
    """What was stored is read back: a store that forgets is not believed."""
    monkeypatch.setattr(SharedStore, "put_pack", lambda self, pack, body: None)
    with pytest.raises(shared_repository.MemoryDamaged, match="no such pack"):
        import_from(source.path, objects)
    assert source.read(AGENT).version == 9


def test_import_over_another_memory_is_refused(source: MemoryRepository, objects: ObjectStore, tmp_path: Path):
    other = shared_in(objects, tmp_path / "replica.git")
    applied(other, append("facts.md", "- other"), proposal_id="p1")
    with pytest.raises(ImportRefused, match="another memory is there"):
        import_from(source.path, objects)
    assert other.read(AGENT).version == 1
    assert source.read(AGENT).version == 9


def test_import_of_what_is_not_the_instances_memory_is_refused(source: MemoryRepository, objects: ObjectStore):
    asyncio.run(check_belonging(objects, MemoryRecord(repository="the instance's own"), "elsewhere.git"))
    with pytest.raises(MemoryOfAnother, match=KEY):
        import_from(source.path, objects)
    assert source.read(AGENT).version == 9


def test_import_is_recorded_so_that_no_process_goes_on_with_a_folder(source: MemoryRepository, objects: ObjectStore):
    repository = id_of_identity(source.identity(lambda: next(ids)))
    asyncio.run(check_belonging(objects, MemoryRecord(repository=repository), source.path))
    import_from(source.path, objects)
    assert asyncio.run(recorded(objects)) == MemoryRecord(repository=repository, place="objects:memory")
    with pytest.raises(MemoryOfAnother):
        asyncio.run(check_belonging(objects, MemoryRecord(repository=repository), source.path))
    stored = asyncio.run(objects.get(KEY))
    assert stored
    assert json.loads(stored.body)["repository"] != repository, "programs from before compare this field alone"


@pytest.mark.parametrize("imported", [False, True])
def test_export_is_a_plain_repository_with_the_same_commits(
    source: MemoryRepository, objects: ObjectStore, tmp_path: Path, monkeypatch, imported: bool
):
    monkeypatch.setattr(transfer, "JOINED", (4,))
    before = names(source)
    identity = source.identity(lambda: next(ids))
    if imported:
        import_from(source.path, objects)
    memory: MemoryRepository = _opened(objects, tmp_path) if imported else source
    report = export_memory(memory, tmp_path / "exported.git", identity)
    assert report.commits == 11
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(tmp_path / "exported.git"), str(clone))
    assert git(clone, "rev-parse", "HEAD").strip() == before[-1].decode()
    assert git(clone, "fsck", "--strict", "--full", "--no-dangling") == ""
    assert (clone / "README.md").read_text() == "read me"
    exported = open_memory(tmp_path / "exported.git", create=False)
    assert exported.identity(lambda: "none") == identity
    assert applied(exported, append("facts.md", "- x"), proposal_id="x").version == 10
    assert memory.read(AGENT).version == 9


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_export_over_something_is_refused(source: MemoryRepository, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(ExportRefused, match="something is there"):
        export_memory(source, tmp_path / "full", "id")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_empty_memory_is_exported_and_imported(objects: ObjectStore, tmp_path: Path):
    empty = open_memory(tmp_path / "empty.git")
    assert export_memory(empty, tmp_path / "exported.git", "its identity").commits == 0
    assert import_from(tmp_path / "exported.git", objects).commits == 0
    memory = _opened(objects, tmp_path)
    assert applied(memory, append("facts.md", "- a"), proposal_id="p1").version == 1
    assert memory.identity(lambda: "none") == "its identity"
