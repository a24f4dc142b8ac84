"""An applied proposal is exactly one commit, whatever happens around it."""

import contextlib
import json
import os
from datetime import timedelta

import pytest

from tests.storage.memory.rig import (
    AGENT,
    AT,
    BRANCH,
    KINDS,
    RUN,
    another,
    append,
    applied,
    apply,
    close,
    commit_tree,
    open_address,
    open_kind,
    replace,
    same_host,
)
from trellis.engine.errors import OptionInvalid
from trellis.storage.memory import layout as memory_layout
from trellis.storage.memory.bare_repository import BareRepository
from trellis.storage.memory.errors import MemoryBusy, MemoryUnavailable, ProposalReused, UpdatesRefused
from trellis.storage.memory.layout import AlreadyApplied, Committed, DeepPart, ReadMode, VersionConflict
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.updates import ProblemCode
from trellis.storage.memory.verification import verify


def commits(memory: MemoryRepository) -> int:
    return verify(memory).commits


@pytest.mark.requirement("D23", "AUTH-6")
def test_applied_proposal_is_one_memory_commit_that_names_it(memory: MemoryRepository, git):
    outcome = applied(
        memory,
        replace("snapshot.md", "Twelve violins."),
        append("facts.md", "- Absam"),
        proposal_id="prop_2026-11-15_0123456789ab",
        reason="Two labels agree.\n\nProposal-Id: forged",
        auto_approved=True,
    )
    assert commits(memory) == 1
    said = git("log", "-1", "--format=%an|%cn|%aI|%B", outcome.commit)
    assert said == (
        "Olena|apply-engine|2026-11-15T12:00:00+00:00|"
        f"memory-update: {AGENT} / {RUN} / prop_2026-11-15_0123456789ab\n\n"
        "Files: facts.md, snapshot.md\n"
        "Reason: Two labels agree.\n  Proposal-Id: forged\n\n"
        "Proposal-Id: prop_2026-11-15_0123456789ab\n"
        f"Run-Id: {RUN}\n"
        "Auto-approved: true\n"
        "Memory-Version: 1\n\n"
    )
    trailers = git("log", "-1", "--format=%(trailers:key=Proposal-Id,valueonly)", outcome.commit).split()
    assert trailers == ["prop_2026-11-15_0123456789ab"]


@pytest.mark.requirement("D23")
def test_meta_timeline_and_marker_are_in_the_same_commit(memory: MemoryRepository, git):
    applied(memory, replace("open_loops.md", "- [ ] a: x\n- [ ] b: y"), proposal_id="p1", auto_approved=True)
    changed = git("show", "--name-only", "--format=", "main").split()
    assert [name.removeprefix(f"memory/{AGENT}/") for name in changed] == [
        ".applied/f6/p1.json",
        "meta.json",
        "open_loops.md",
        "timeline/2026-11-15.md",
    ]
    assert json.loads(git("show", f"main:memory/{AGENT}/meta.json")) == {
        "agentId": AGENT,
        "version": 1,
        "lastUpdate": "2026-11-15T12:00:00Z",
        "lastRunId": RUN,
        "snapshotTokenCount": 0,
        "openLoopsTokenCount": 8,
        "factsTokenCount": 0,
        "openLoopsCount": 2,
        "schemaVersion": "1.0",
    }
    assert git("show", f"main:memory/{AGENT}/timeline/2026-11-15.md") == (
        f"# 2026-11-15\n\n- 12:00:00Z v1 {RUN} / p1, auto-approved: open_loops.md replace — The label inside was read again.\n"
    )


@pytest.mark.requirement("PIPE-11")
def test_a_proposal_applied_again_finds_its_commit(memory: MemoryRepository):
    first = applied(memory, append("facts.md", "- a"), proposal_id="p1")
    applied(memory, append("facts.md", "- b"), proposal_id="p2")
    applied(memory, append("facts.md", "- c"), proposal_id="p1", agent_id="other")
    again = apply(another(memory), append("facts.md", "- a"), proposal_id="p1", version=0)
    assert again == AlreadyApplied(commit=first.commit, version=1)
    assert commits(memory) == 3


def test_a_proposal_id_used_for_other_updates_is_refused(memory: MemoryRepository):
    applied(memory, append("facts.md", "- a"), proposal_id="p1")
    with pytest.raises(ProposalReused):
        apply(memory, append("facts.md", "- b"), proposal_id="p1")
    assert commits(memory) == 1


@pytest.mark.requirement("D23")
def test_a_stale_expected_version_is_a_conflict_and_writes_nothing(memory: MemoryRepository):
    applied(memory, append("facts.md", "- a"), proposal_id="p1", version=0)
    for expected in (0, 2):
        outcome = apply(memory, append("facts.md", "- b"), proposal_id="p2", version=expected)
        assert outcome == VersionConflict(expected=expected, current=1)
    assert commits(memory) == 1
    assert applied(memory, append("facts.md", "- b"), proposal_id="p2", version=1).version == 2


def test_commit_to_another_agents_memory_is_no_conflict(memory: MemoryRepository):
    applied(memory, append("facts.md", "- a"), proposal_id="p1", agent_id="one")
    applied(memory, append("facts.md", "- b"), proposal_id="p2", agent_id="two")
    assert applied(memory, append("facts.md", "- c"), proposal_id="p3", agent_id="one", version=1).version == 2
    assert memory.read("two", ReadMode.WIDE).content["facts.md"] == "- b\n"


def test_the_same_proposals_give_the_same_bytes(tmp_path):
    heads = []
    for kind in KINDS:
        memory = open_kind(kind, tmp_path / f"{kind}.git")
        applied(memory, replace("snapshot.md", "Так"), proposal_id="p1")
        heads.append(applied(memory, append("facts.md", "- b"), proposal_id="p2", at=AT + timedelta(days=1)).commit)
    assert heads[0] == heads[1]


def test_updates_that_do_not_fit_are_refused_with_every_problem(memory: MemoryRepository):
    with pytest.raises(UpdatesRefused) as refused:
        apply(memory, append("meta.json", "x"), append("facts.md", "<script>"), proposal_id="p1")
    codes = [problem.code for problem in refused.value.data["problems"]]  # pyright: ignore[reportAttributeAccessIssue,reportGeneralTypeIssues]
    assert codes == [ProblemCode.FILE_NOT_ALLOWED, ProblemCode.TEXT_UNSAFE]
    assert commits(memory) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"run_id": "run/../x"},
        {"run_id": ""},
        {"proposal_id": "p.1"},
        {"proposal_id": "p\nRun-Id: x"},
        {"proposal_id": "x" * 129},
        {"author": "Mallory <m@example.org>"},
        {"author": "two\nlines"},
        {"author": " "},
        {"reason": ""},
        {"reason": "x" * 2_001},
        {"reason": "a\0b"},
        {"reason": "<script>"},
        {"at": AT.replace(tzinfo=None)},
        {"at": AT.replace(year=1969)},
    ],
)
def test_fields_of_a_memory_commit_are_checked(memory: MemoryRepository, wrong: dict):
    with pytest.raises(OptionInvalid):
        apply(memory, append("facts.md", "x"), **{"proposal_id": "p1", **wrong})
    assert commits(memory) == 0


def test_a_full_day_goes_on_in_a_second_part(memory: MemoryRepository):
    for number in range(60):
        applied(memory, replace("snapshot.md", str(number)), proposal_id=f"p{number}", reason="x" * 200)
    days = memory.read_deep(AGENT, DeepPart.TIMELINE).items
    assert [day.name for day in days] == ["2026-11-15.p003", "2026-11-15.p002", "2026-11-15"]
    assert all(day.token_count <= memory_layout.TIMELINE_TOKENS_MAX for day in days)
    assert sum(day.text.count("\n- ") for day in days) == 60


def test_the_oldest_run_leaves_a_full_folder_and_stays_in_git(memory: MemoryRepository, monkeypatch, git):
    monkeypatch.setitem(memory_layout.FOLDER_FILES_MAX, "runs", 2)
    names = [f"run_2026-11-1{number}_abcdef" for number in (2, 3, 1, 4)]
    for number, run in enumerate(names):
        applied(memory, append(f"runs/{run}.md", "notes"), proposal_id=f"p{number}", run_id=run)
    kept = [item.name for item in memory.read_deep(AGENT, DeepPart.RUNS).items]
    assert kept == ["run_2026-11-14_abcdef", "run_2026-11-13_abcdef"]
    assert "Evicted: runs/run_2026-11-11_abcdef.md" in git("log", "-1", "--format=%B")
    assert git("show", f"main~2:memory/{AGENT}/runs/run_2026-11-12_abcdef.md") == "notes\n"


def test_an_evicted_loop_is_named_in_its_commit(memory: MemoryRepository, git):
    applied(memory, replace("open_loops.md", "- [ ] a: x\n- [ ] b: y"), proposal_id="p1")
    applied(memory, close("a", "done"), proposal_id="p2")
    applied(memory, close("b", "done"), proposal_id="p3", at=AT + timedelta(days=8))
    assert "Evicted: a\n" in git("log", "-1", "--format=%B")


def test_files_outside_of_memory_stay_unchanged(memory: MemoryRepository, git):
    commit_tree(memory, [("README.md", 0o100644, b"read me"), ("logic/x/current.md", 0o100755, b"logic")])
    applied(memory, append("facts.md", "- a"), proposal_id="p1")
    assert git("show", "main:README.md") == "read me"
    assert "100755" in git("ls-tree", "main", "logic/x/")


# -- a git beside us ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_kind", ["local"])
def test_memory_lives_on_after_git_has_packed_everything(memory: MemoryRepository, git, sound):
    first = applied(memory, append("facts.md", "- a"), proposal_id="p1")
    git("gc", "--prune=now", "--quiet")
    assert not (memory.path / BRANCH.decode()).exists()
    assert memory.read(AGENT, ReadMode.WIDE).content["facts.md"] == "- a\n"
    applied(memory, append("facts.md", "- b"), proposal_id="p2")
    git("gc", "--prune=now", "--quiet")
    assert apply(memory, append("facts.md", "- a"), proposal_id="p1") == AlreadyApplied(commit=first.commit, version=1)
    sound()


@pytest.mark.parametrize("memory_kind", ["local"])
def test_a_branch_moved_meanwhile_is_not_overwritten(memory: MemoryRepository, monkeypatch):
    """Somebody commits after ours was built and before the branch moves: ours is built again on top."""
    applied(memory, append("facts.md", "- a"), proposal_id="p1")
    write, pushed = BareRepository.write, []

    def write_late(self, objects):
        write(self, objects)
        if not pushed:
            pushed.append(commit_tree(memory, [("README.md", 0o100644, b"pushed")]))

    monkeypatch.setattr(BareRepository, "write", write_late)
    applied(memory, append("facts.md", "- b"), proposal_id="p2")
    assert memory.read(AGENT, ReadMode.WIDE).content["facts.md"] == "- a\n- b\n"
    assert verify(memory).commits == 3
    assert verify(memory).findings == (f"commit {pushed[0].decode()}: no proposal explains it",)


@pytest.mark.parametrize("memory_kind", ["local"])
def test_a_branch_that_never_rests_is_given_up(memory: MemoryRepository, monkeypatch):
    write = BareRepository.write
    moves = iter(range(100))

    def write_late(self, objects):
        write(self, objects)
        commit_tree(memory, [("README.md", 0o100644, str(next(moves)).encode())])

    monkeypatch.setattr(BareRepository, "write", write_late)
    with pytest.raises(MemoryBusy, match="moved 8 times"):
        apply(memory, append("facts.md", "- b"), proposal_id="p2")
    assert memory.read(AGENT).version == 0


@pytest.mark.parametrize("memory_kind", ["local"])
def test_the_lock_of_another_git_is_respected(memory: MemoryRepository):
    applied(memory, append("facts.md", "- a"), proposal_id="p1")
    lock = memory.path / f"{BRANCH.decode()}.lock"
    lock.write_text("")
    with pytest.raises(MemoryBusy, match="another git"):
        apply(memory, append("facts.md", "- b"), proposal_id="p2")
    assert lock.exists()
    lock.unlink()
    assert isinstance(apply(memory, append("facts.md", "- b"), proposal_id="p2"), Committed)


def test_a_writer_that_never_gets_its_turn_gives_up(memory: MemoryRepository):
    pauses: list[float] = []
    waiting = open_address(same_host(memory), pause=pauses.append)
    with memory._bare.locked(), pytest.raises(MemoryBusy, match="no turn"):
        apply(waiting, append("facts.md", "- a"), proposal_id="p1")
    assert sum(pauses) == pytest.approx(15.0)


@pytest.mark.parametrize("memory_kind", ["local"])
@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
def test_a_disk_that_refuses_leaves_the_memory_as_it_was(memory: MemoryRepository, monkeypatch, sound, call: str):
    applied(memory, append("facts.md", "- a"), proposal_id="p1")

    def refuse(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(MemoryUnavailable, match="No space left"):
            apply(memory, append("facts.md", "- b"), proposal_id="p2")
    assert memory.read(AGENT).version == 1
    assert applied(memory, append("facts.md", "- b"), proposal_id="p2").version == 2
    assert not list((memory.path / "objects").glob("tmp_*"))
    sound()


# -- the compare-and-set alone -----------------------------------------------------------------------------------


def interleaved(memory: MemoryRepository, monkeypatch) -> list[object]:
    """Without the writers' lock, a second commit runs whole between the first one's reading and its move."""
    monkeypatch.setattr(BareRepository, "locked", lambda self: contextlib.nullcontext())
    write, outcomes = BareRepository.write, []

    def write_late(self, objects):
        write(self, objects)
        if not outcomes:
            outcomes.append(None)
            outcomes[0] = apply(memory, append("facts.md", "- inner"), proposal_id="inner", version=0)

    monkeypatch.setattr(BareRepository, "write", write_late)
    return [apply(memory, append("facts.md", "- outer"), proposal_id="outer", version=0), *outcomes]


@pytest.mark.parametrize("memory_kind", ["local"])
@pytest.mark.requirement("D23")
def test_without_the_lock_the_compare_and_set_still_loses_nothing(memory: MemoryRepository, monkeypatch):
    outer, inner = interleaved(memory, monkeypatch)
    assert isinstance(inner, Committed)
    assert outer == VersionConflict(expected=0, current=1)
    assert memory.read(AGENT, ReadMode.WIDE).content["facts.md"] == "- inner\n"


@pytest.mark.parametrize("memory_kind", ["local"])
def test_mutant_a_move_without_compare_loses_an_update(memory: MemoryRepository, monkeypatch):
    move = BareRepository.move_branch
    monkeypatch.setattr(BareRepository, "move_branch", lambda self, _old, new: move(self, self.branch(), new))
    outer, inner = interleaved(memory, monkeypatch)
    assert isinstance(inner, Committed)
    assert isinstance(outer, Committed)
    assert memory.read(AGENT, ReadMode.WIDE).content["facts.md"] == "- outer\n"
