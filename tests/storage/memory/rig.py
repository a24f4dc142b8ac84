"""A proposal to apply, with everything that a test does not care about filled in."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dulwich.objects import Blob, Commit, ObjectID, ShaFile, Tree
from dulwich.refs import Ref
from dulwich.repo import Repo

from trellis.storage.memory.layout import AlreadyApplied, Committed, VersionConflict
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.updates import Operation, Update

AGENT = "archivist-violin"
RUN = "run_2026-11-15_120000_abcdef"
AT = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)
BRANCH = Ref(b"refs/heads/main")


def append(file: str, content: str, section: str | None = None) -> Update:
    return Update(file=file, operation=Operation.APPEND, content=content, section=section)


def replace(file: str, content: str, section: str | None = None) -> Update:
    return Update(file=file, operation=Operation.REPLACE, content=content, section=section)


def close(loop_id: str, resolution: str) -> Update:
    return Update(file="open_loops.md", operation=Operation.CLOSE, loop_id=loop_id, resolution=resolution)


def apply(
    memory: MemoryRepository,
    *updates: Update,
    proposal_id: str,
    version: int | None = None,
    agent_id: str = AGENT,
    run_id: str = RUN,
    reason: str = "The label inside was read again.",
    auto_approved: bool = False,
    author: str = "Olena",
    at: datetime = AT,
) -> Committed | VersionConflict | AlreadyApplied:
    """Apply a proposal; without `version`, to the memory as it is now."""
    return memory.commit(
        agent_id,
        updates,
        expected_version=memory.read(agent_id).version if version is None else version,
        run_id=run_id,
        proposal_id=proposal_id,
        reason=reason,
        auto_approved=auto_approved,
        author=author,
        at=at,
    )


def applied(memory: MemoryRepository, *updates: Update, proposal_id: str, **rest) -> Committed:
    outcome = apply(memory, *updates, proposal_id=proposal_id, **rest)
    assert isinstance(outcome, Committed)
    return outcome


def commit_tree(path: Path, entries: Sequence[tuple[str, int, ShaFile | bytes]], message: str = "by hand") -> ObjectID:
    """A commit of somebody else: these entries, each a path with its mode, over what the branch has."""
    with Repo(path, bare=True) as repo:
        head = repo.refs.read_ref(BRANCH)
        parent = ObjectID(head) if head else None
        root: Tree | None = None if parent is None else _tree(repo, _commit(repo, parent).tree)
        for name, mode, content in entries:
            root = _placed(repo, root, name.split("/"), mode, content)
        assert root is not None
        commit = Commit()
        commit.tree = root.id
        commit.parents = [] if parent is None else [parent]
        commit.author = commit.committer = b"Somebody <somebody@example.org>"
        commit.author_time = commit.commit_time = int(AT.timestamp())
        commit.author_timezone = commit.commit_timezone = 0
        commit.message = message.encode()
        repo.object_store.add_object(commit)
        repo.refs[BRANCH] = commit.id
        return commit.id


def _placed(repo: Repo, tree: Tree | None, names: list[str], mode: int, content: ShaFile | bytes) -> Tree:
    tree = Tree() if tree is None else tree
    first, rest = names[0].encode(), names[1:]
    if rest:
        below = _placed(repo, _tree(repo, tree[first][1]) if first in tree else None, rest, mode, content)
        tree.add(first, 0o040000, below.id)
    elif isinstance(content, bytes) and mode == 0o160000:
        tree.add(first, mode, ObjectID(content))
    else:
        blob = Blob.from_string(content) if isinstance(content, bytes) else content
        repo.object_store.add_object(blob)
        tree.add(first, mode, blob.id)
    repo.object_store.add_object(tree)
    return tree


def _commit(repo: Repo, name: ObjectID) -> Commit:
    found = repo.object_store[name]
    assert isinstance(found, Commit)
    return found


def _tree(repo: Repo, name: ObjectID) -> Tree:
    found = repo.object_store[name]
    assert isinstance(found, Tree)
    return found
