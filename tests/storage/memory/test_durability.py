"""What a commit rests on is on the disk before it is told: the order of the calls that make it so."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage.memory.rig import append, applied, apply
from trellis.storage.memory import bare_repository
from trellis.storage.memory.repository import MemoryRepository

LOCAL = pytest.mark.parametrize("memory_kind", ["local"])
Trace = list[tuple[str, str]]
BRANCH = "refs/heads/main"


@pytest.fixture
def traced(memory: MemoryRepository, monkeypatch) -> Callable[[], Trace]:
    """Every sync and every rename from now on, by path inside the repository."""
    trace: Trace = []
    fsync, replace = os.fsync, os.replace

    def relative(path: str | os.PathLike[str]) -> str:
        return os.path.relpath(path, memory.path)

    def traced_fsync(handle: int) -> None:
        trace.append(("sync", relative(Path(f"/proc/self/fd/{handle}").readlink())))
        fsync(handle)

    def traced_replace(source: str | Path, target: str | Path, **options) -> None:
        trace.append(("rename", f"{relative(source)} {relative(target)}"))
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    return lambda: trace


def not_durable(trace: Trace) -> list[str]:
    """What a loss of power could take although it was acknowledged."""
    found: list[str] = []
    moved = next(n for n, (call, what) in enumerate(trace) if call == "rename" and what.endswith(f" {BRANCH}"))
    before, after = trace[:moved], trace[moved + 1 :]
    for number, (call, what) in enumerate(before):
        if call == "rename":
            source, target = what.split()
            if ("sync", source) not in before[:number]:
                found.append(f"{target}: renamed before its content was synced")
            if ("sync", os.path.dirname(target)) not in before[number:]:  # noqa: PTH120
                found.append(f"{target}: its name is not synced before the branch moves")
    if ("sync", "objects") not in before:
        found.append("objects: new folders are not synced before the branch moves")
    if ("sync", "trellis.ref") not in before:
        found.append("the branch moves before its new content is synced")
    if ("sync", "refs/heads") not in after:
        found.append("the move of the branch is not synced")
    return found


@LOCAL
def test_memory_commit_is_on_disk_before_it_is_acknowledged(memory: MemoryRepository, traced):
    applied(memory, append("facts.md", "- a"), proposal_id="p1")
    trace = traced()
    assert sum(call == "rename" for call, _ in trace) >= 9
    assert not_durable(trace) == []


@LOCAL
@pytest.mark.parametrize("skipped", ["sync_folder", "sync_branch", "write"])
def test_mutant_a_skipped_sync_is_found(memory: MemoryRepository, traced, monkeypatch, skipped: str):
    if skipped == "sync_folder":
        monkeypatch.setattr(bare_repository, "sync_folder", lambda folder: None)
    elif skipped == "sync_branch":
        monkeypatch.setattr(bare_repository.BareRepository, "sync_branch", lambda self: None)
    else:
        late = bare_repository.BareRepository.write

        def write(self, objects):
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", lambda handle: None)
                late(self, objects)

        monkeypatch.setattr(bare_repository.BareRepository, "write", write)
    applied(memory, append("facts.md", "- a"), proposal_id="p1")
    assert not_durable(traced())


@LOCAL
def test_answer_that_depends_on_an_unsynced_move_syncs_it(memory: MemoryRepository, traced):
    applied(memory, append("facts.md", "- a"), proposal_id="p1")
    traced().clear()
    apply(memory, append("facts.md", "- a"), proposal_id="p1")
    assert traced() == [("sync", "refs/heads")]


def test_the_repository_itself_is_synced_when_it_is_made(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def traced_fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    bare_repository.make_repository(tmp_path / "m.git")
    assert {"HEAD", "config", "objects", "heads", "refs", tmp_path.name} <= set(synced)
