"""What became of a memory can be read: commits, differences, and what no proposal explains."""

import hashlib

import pytest
from dulwich.objects import Commit

from tests.storage.memory.rig import AGENT, AT, RUN, append, applied, apply, commit_tree, replace
from trellis.engine.errors import OptionInvalid
from trellis.storage.memory import history as memory_history
from trellis.storage.memory.errors import MemoryDamaged, MemoryVersionNotFound
from trellis.storage.memory.layout import AppliedMarker, ChangeKind, CommittedFileChange
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.updates import digest
from trellis.storage.memory.verification import verify


@pytest.mark.requirement("AUTH-6")
def test_the_history_of_a_memory_shows_who_changed_what_and_why(memory: MemoryRepository):
    applied(memory, append("facts.md", "- a\n- b"), proposal_id="p1", reason="First\nsecond line")
    applied(memory, append("facts.md", "- x"), proposal_id="p2", agent_id="other")
    second = applied(memory, replace("facts.md", "- a\n- c\n- d"), proposal_id="p3", auto_approved=True, author="Юлія")
    newest, oldest = memory.history(AGENT).entries
    assert (newest.commit, newest.version, newest.proposal_id, newest.run_id) == (second.commit, 2, "p3", RUN)
    assert (newest.author, newest.auto_approved, newest.at) == ("Юлія", True, AT)
    assert newest.files == (
        CommittedFileChange(file="facts.md", kind=ChangeKind.CHANGED, added=2, removed=1),
        CommittedFileChange(file="timeline/2026-11-15.md", kind=ChangeKind.CHANGED, added=1, removed=0),
    )
    assert (oldest.reason, oldest.auto_approved) == ("First\nsecond line", False)
    assert oldest.files[0] == CommittedFileChange(file="facts.md", kind=ChangeKind.ADDED, added=2, removed=0)


def test_history_comes_in_pages(memory: MemoryRepository):
    for number in range(1, 6):
        applied(memory, replace("snapshot.md", str(number)), proposal_id=f"p{number}")
        applied(memory, replace("snapshot.md", str(number)), proposal_id=f"q{number}", agent_id="other")
    seen, before = [], None
    while True:
        page = memory.history(AGENT, limit=2, before=before)
        seen += [entry.version for entry in page.entries]
        if (before := page.more) is None:
            break
    assert seen == [5, 4, 3, 2, 1]
    assert memory.history("nobody").entries == ()


def test_a_page_looks_at_a_bounded_number_of_commits(memory: MemoryRepository, monkeypatch):
    applied(memory, replace("snapshot.md", "x"), proposal_id="p1")
    for number in range(4):
        applied(memory, replace("snapshot.md", str(number)), proposal_id=f"q{number}", agent_id="other")
    monkeypatch.setattr(memory_history, "SCAN_MAX", 3)
    first = memory.history(AGENT)
    assert (first.entries, first.more is None) == ((), False)
    second = memory.history(AGENT, before=first.more)
    assert [entry.proposal_id for entry in second.entries] == ["p1"]


def test_a_cursor_that_is_no_commit_is_refused(memory: MemoryRepository):
    for wrong in ("../../../etc/passwd", "HEAD", "x" * 40):
        with pytest.raises(OptionInvalid):
            memory.history(AGENT, before=wrong)  # pyright: ignore[reportArgumentType]
    applied(memory, replace("snapshot.md", "x"), proposal_id="p1")
    with memory._bare.objects() as objects:
        no_commits = [name.decode() for name in objects if not isinstance(objects[name], Commit)]
    assert no_commits
    for unknown in ("0" * 40, "a" * 40, *no_commits):
        with pytest.raises(OptionInvalid):
            memory.history(AGENT, before=unknown)  # pyright: ignore[reportArgumentType]


@pytest.mark.requirement("AUTH-6")
def test_a_change_that_no_proposal_explains_shows(memory: MemoryRepository):
    applied(memory, replace("snapshot.md", "x"), proposal_id="p1")
    assert verify(memory).findings == ()
    foreign = commit_tree(
        memory, [(f"memory/{AGENT}/facts.md", 0o100644, b"- smuggled\n")], "Reason: trust me"
    ).decode()
    newest = memory.history(AGENT).entries[0]
    assert (newest.commit, newest.proposal_id, newest.version, newest.author) == (foreign, None, None, "Somebody")
    assert newest.files == (CommittedFileChange(file="facts.md", kind=ChangeKind.ADDED, added=1, removed=0),)
    assert verify(memory).findings == (f"commit {foreign}: no proposal explains it",)


def test_a_forged_commit_has_no_place_among_the_versions(memory: MemoryRepository):
    applied(memory, replace("snapshot.md", "x"), proposal_id="p1")
    message = f"memory-update: {AGENT} / {RUN} / p9\n\nReason: x\n\nProposal-Id: p9\nMemory-Version: 7\n"
    commit_tree(memory, [(f"memory/{AGENT}/facts.md", 0o100644, b"- smuggled\n")], message)
    assert any("makes version 7" in finding for finding in verify(memory).findings)
    assert any("p9 is not marked" in finding for finding in verify(memory).findings)


@pytest.mark.requirement("AUTH-4")
def test_a_difference_is_of_layer_1_unless_asked(memory: MemoryRepository):
    applied(memory, append("facts.md", "- a"), append("decisions.md", "## Keep"), proposal_id="p1")
    applied(memory, append("facts.md", "- b"), replace("snapshot.md", "s"), proposal_id="p2")
    assert memory.diff(AGENT, 1, 2) == (
        "--- v1/facts.md\n+++ v2/facts.md\n@@ -1 +1,2 @@\n - a\n+- b\n--- /dev/null\n+++ v2/snapshot.md\n@@ -0,0 +1 @@\n+s\n"
    )
    assert memory.diff(AGENT, 2, 2) == ""
    assert "decisions.md" not in memory.diff(AGENT, 0, 2)
    assert "+## Keep" in memory.diff(AGENT, 0, 2, deep=True)
    with pytest.raises(MemoryVersionNotFound):
        memory.diff(AGENT, 1, 3)


def test_a_check_of_part_of_the_history_says_so(memory: MemoryRepository):
    for number in range(3):
        applied(memory, replace("snapshot.md", str(number)), proposal_id=f"p{number}")
    assert (verify(memory, 2).commits, verify(memory, 2).complete, verify(memory, 2).findings) == (2, False, ())


@pytest.mark.parametrize("memory_kind", ["local"])
def test_a_changed_object_is_found_by_its_name(memory: MemoryRepository, git):
    applied(memory, replace("snapshot.md", "true"), proposal_id="p1")
    applied(memory, replace("snapshot.md", "false"), proposal_id="p2")
    old, new = (
        memory.path / "objects" / name[:2] / name[2:]
        for name in (
            git("rev-parse", f"{revision}:memory/{AGENT}/snapshot.md").strip() for revision in ("main~1", "main")
        )
    )
    old.chmod(0o644)
    old.write_bytes(new.read_bytes())
    verified = verify(memory)
    assert [finding for finding in verified.findings if "ChecksumMismatch" in finding], verified
    new.unlink()
    assert [finding for finding in verify(memory).findings if "missing" in finding]


def test_a_link_anywhere_is_found(memory: MemoryRepository):
    commit_tree(memory, [("logic/x", 0o120000, b"/etc")])
    assert any("is no file and no folder" in finding for finding in verify(memory).findings)


def test_a_marker_without_its_commit_is_damage(memory: MemoryRepository):
    applied(memory, replace("snapshot.md", "x"), proposal_id="p1")
    updates = [append("facts.md", "- a")]
    marker = AppliedMarker(version=2, updates_digest=digest(updates)).to_bytes()
    folder = hashlib.sha256(b"p2").hexdigest()[:2]
    commit_tree(memory, [(f"memory/{AGENT}/.applied/{folder}/p2.json", 0o100644, marker)])
    with pytest.raises(MemoryDamaged, match="no commit names it"):
        apply(memory, *updates, proposal_id="p2")
