"""What a run reads by itself, and what only an explicit request brings."""

import pytest

from tests.storage.memory.rig import AGENT, AT, RUN, another, append, applied, commit_tree, replace
from trellis.engine.errors import OptionInvalid
from trellis.storage.memory.errors import MemoryDamaged, MemoryMissing, MemoryOverLimit, MemoryVersionNotFound
from trellis.storage.memory.layout import DeepPart, ReadMode
from trellis.storage.memory.repository import MemoryRepository, open_memory
from trellis.storage.memory.verification import verify


@pytest.mark.requirement("PIPE-4", "PIPE-5", "D23")
def test_basic_reads_two_files_and_wide_three_and_neither_reads_layer_2(memory: MemoryRepository):
    applied(
        memory,
        replace("snapshot.md", "Archive of twelve violins."),
        replace("open_loops.md", "- [ ] a: why?"),
        replace("facts.md", "- Stainer worked in Absam."),
        append("decisions.md", "## Secret decision"),
        append(f"runs/{RUN}.md", "secret notes"),
        proposal_id="p1",
    )
    basic, wide = memory.read(AGENT), memory.read(AGENT, ReadMode.WIDE)
    assert basic.content == {"snapshot.md": "Archive of twelve violins.\n", "open_loops.md": "- [ ] a: why?\n"}
    assert wide.content == {**basic.content, "facts.md": "- Stainer worked in Absam.\n"}
    assert (basic.token_count, wide.token_count) == (9 + 5, 9 + 5 + 9)
    assert (basic.version, basic.last_run_id, basic.last_update) == (1, RUN, AT)
    assert "secret" not in str((basic, wide)).lower()


def test_the_same_head_gives_the_same_result(memory: MemoryRepository):
    first = applied(memory, append("facts.md", "- a"), proposal_id="p1")
    views = [another(memory).read(AGENT, ReadMode.WIDE) for _ in range(2)]
    assert views[0] == views[1]
    assert views[0].commit == first.commit


def test_an_agent_without_memory_reads_empty_text(memory: MemoryRepository):
    view = memory.read("newcomer")
    assert (view.version, view.commit, view.token_count) == (0, None, 0)
    assert view.content == {"snapshot.md": "", "open_loops.md": ""}
    assert memory.read_deep("newcomer", DeepPart.RUNS).items == ()


@pytest.mark.requirement("PIPE-4", "D23")
def test_memory_over_its_limit_is_refused_and_not_cut(memory: MemoryRepository):
    half = b"x" * (2_051 * 3)
    path = f"memory/{AGENT}"
    commit_tree(memory, [(f"{path}/snapshot.md", 0o100644, half), (f"{path}/open_loops.md", 0o100644, half)])
    with pytest.raises(MemoryOverLimit) as refused:
        memory.read(AGENT)
    assert (refused.value.data["tokens"], refused.value.data["limit"]) == (4_102, 4_100)
    commit_tree(memory, [(f"{path}/open_loops.md", 0o100644, half[:-6])])
    assert memory.read(AGENT).token_count == 4_100
    commit_tree(memory, [(f"{path}/facts.md", 0o100644, b"x" * 8_101 * 3)])
    with pytest.raises(MemoryOverLimit):
        memory.read(AGENT, ReadMode.WIDE)


@pytest.mark.requirement("D23")
def test_layer_2_comes_in_pages_newest_first(memory: MemoryRepository):
    applied(memory, append("decisions.md", "# Decisions"), proposal_id="p0")
    for number in range(1, 8):
        applied(memory, append("decisions.md", f"## Decision {number}\n\nBecause."), proposal_id=f"p{number}")
    first = memory.read_deep(AGENT, DeepPart.DECISIONS)
    assert [item.text for item in first.items] == [f"## Decision {n}\n\nBecause.\n" for n in (7, 6, 5, 4, 3)]
    second = memory.read_deep(AGENT, DeepPart.DECISIONS, before=first.more)
    assert [item.text.split("\n")[0] for item in second.items] == ["## Decision 2", "## Decision 1", "# Decisions"]
    assert second.more is None
    (day,) = memory.read_deep(AGENT, DeepPart.TIMELINE).items
    assert day.name == "2026-11-15"
    assert day.text.count("\n- ") == 8


def test_a_page_of_layer_2_is_bounded_in_tokens_and_takes_whole_pieces(memory: MemoryRepository):
    for number in (1, 2, 3):
        run = f"run_2026-11-1{number}_abcdef"
        applied(memory, append(f"runs/{run}.md", "x" * 299), proposal_id=f"p{number}", run_id=run)
    page = memory.read_deep(AGENT, DeepPart.RUNS, tokens_max=250)
    assert [item.name for item in page.items] == ["run_2026-11-13_abcdef", "run_2026-11-12_abcdef"]
    rest = memory.read_deep(AGENT, DeepPart.RUNS, tokens_max=250, before=page.more)
    assert [item.name for item in rest.items] == ["run_2026-11-11_abcdef"]
    with pytest.raises(MemoryOverLimit):
        memory.read_deep(AGENT, DeepPart.RUNS, tokens_max=99)
    with pytest.raises(OptionInvalid):
        memory.read_deep(AGENT, DeepPart.RUNS, before="../../secret")
    with pytest.raises(OptionInvalid):
        memory.read_deep(AGENT, DeepPart.RUNS, limit=0)


def test_an_old_version_can_be_shown(memory: MemoryRepository):
    for number in (1, 2, 3):
        applied(memory, replace("snapshot.md", f"state {number}"), proposal_id=f"p{number}")
        applied(memory, replace("snapshot.md", "other"), proposal_id=f"q{number}", agent_id=f"other-{number}")
    shown = memory.show(AGENT, 2)
    assert (shown.version, shown.content["snapshot.md"]) == (2, "state 2\n")
    assert memory.show(AGENT, 0).content["snapshot.md"] == ""
    for version in (4, -1):
        with pytest.raises(MemoryVersionNotFound):
            memory.show(AGENT, version)


def test_memory_reading_uses_the_given_token_counter(tmp_path):
    memory = open_memory(tmp_path / "m.git", counter=lambda text: len(text.split()))
    applied(memory, replace("snapshot.md", "four words are here"), proposal_id="p1")
    assert memory.read(AGENT).token_count == 4


def test_folder_that_is_no_memory_repository_is_refused(tmp_path):
    with pytest.raises(MemoryMissing):
        open_memory(tmp_path / "absent", create=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(MemoryMissing):
        open_memory(tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_an_empty_folder_becomes_a_repository_and_stays_one(tmp_path):
    (tmp_path / "m.git").mkdir()
    applied(open_memory(tmp_path / "m.git"), replace("snapshot.md", "x"), proposal_id="p1")
    assert open_memory(str(tmp_path / "m.git")).read(AGENT).version == 1


def test_damaged_content_is_named(memory: MemoryRepository):
    applied(memory, replace("snapshot.md", "state"), proposal_id="p1")
    commit_tree(memory, [(f"memory/{AGENT}/meta.json", 0o100644, b'{"version": "seven"}')])
    with pytest.raises(MemoryDamaged, match=r"meta\.json"):
        memory.read(AGENT)
    commit_tree(memory, [(f"memory/{AGENT}/snapshot.md", 0o100644, b"\xff")])
    with pytest.raises(MemoryDamaged, match="not UTF-8"):
        memory.read(AGENT)
    commit_tree(memory, [(f"memory/{AGENT}/snapshot.md", 0o100644, b"x" * ((1 << 20) + 1))])
    with pytest.raises(MemoryDamaged, match="bytes"):
        memory.read(AGENT)


@pytest.mark.parametrize("memory_kind", ["local"])
def test_a_missing_or_torn_object_is_named(memory: MemoryRepository):
    applied(memory, replace("snapshot.md", "state"), proposal_id="p1")
    commit = memory.read(AGENT).commit
    assert commit
    place = memory.path / "objects" / commit[:2] / commit[2:]
    place.chmod(0o644)
    whole = place.read_bytes()
    place.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MemoryDamaged, match=commit):
        memory.read(AGENT)
    assert verify(memory).findings
    place.unlink()
    with pytest.raises(MemoryDamaged, match="missing"):
        memory.read(AGENT)
