"""Nothing leaves the folder of its agent, whatever a caller asks or somebody else committed."""

import pytest
from dulwich.objects import Tree
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.memory.rig import AGENT, append, applied, apply, commit_tree
from trellis.storage.memory.errors import AgentIdInvalid, MemoryDamaged
from trellis.storage.memory.layout import AGENT_ID, DeepPart, tokens_max
from trellis.storage.memory.repository import MemoryRepository


@pytest.mark.parametrize(
    "agent_id",
    ["", "-a", "A", "a/b", "..", ".", ".git", "a.b", "a\0", "a\n", "a b", "ä", "a" * 64, "../other", "git~1"],
)
def test_an_agent_id_is_a_plain_name(memory: MemoryRepository, agent_id: str):
    for call in (
        lambda: memory.read(agent_id),
        lambda: memory.read_deep(agent_id, DeepPart.RUNS),
        lambda: memory.history(agent_id),
        lambda: memory.show(agent_id, 1),
        lambda: memory.diff(agent_id, 0, 1),
        lambda: apply(memory, append("facts.md", "x"), proposal_id="p1", version=0, agent_id=agent_id),
    ):
        with pytest.raises(AgentIdInvalid):
            call()


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("abrunsfct./\\~:\0\n -_Amd"), max_size=20))
def test_every_name_that_is_taken_stays_inside(name: str):
    if tokens_max(name) is not None:
        parts = name.split("/")
        assert len(parts) <= 2
        assert all(part not in {"", ".", ".."} and not part.startswith(".") for part in parts)
    if AGENT_ID.fullmatch(name):
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize(
    "path,mode,content",
    [
        ("snapshot.md", 0o120000, b"../../../../etc/passwd"),
        ("notes", 0o160000, b"1" * 40),
        ("runs", 0o120000, b"../other/runs"),
        (".git", 0o100644, b"x"),
        (".GIT", 0o100644, b"x"),
        ("git~1", 0o100644, b"x"),
        (".g\u200cit", 0o100644, b"x"),
        ("..", 0o100644, b"x"),
        ("a\\b", 0o100644, b"x"),
    ],
)
def test_links_submodules_and_git_names_are_refused(memory: MemoryRepository, path: str, mode: int, content: bytes):
    applied(memory, append("facts.md", "- a"), proposal_id="p1")
    commit_tree(memory, [(f"memory/{AGENT}/{path}", mode, content)])
    with pytest.raises(MemoryDamaged):
        memory.read(AGENT)
    with pytest.raises(MemoryDamaged):
        apply(memory, append("facts.md", "- b"), proposal_id="p2", version=1)


@pytest.mark.parametrize("path", ["memory", f"memory/{AGENT}"])
def test_a_link_in_place_of_a_folder_is_refused(memory: MemoryRepository, path: str):
    commit_tree(memory, [(path, 0o120000, b"/etc")])
    with pytest.raises(MemoryDamaged):
        memory.read(AGENT)
    with pytest.raises(MemoryDamaged):
        apply(memory, append("facts.md", "- b"), proposal_id="p2", version=0)


def test_a_folder_in_place_of_a_file_is_refused(memory: MemoryRepository):
    commit_tree(memory, [(f"memory/{AGENT}/snapshot.md", 0o040000, Tree())])
    with pytest.raises(MemoryDamaged, match="a folder is there"):
        memory.read(AGENT)
