"""A proposal to apply, with everything that a test does not care about filled in."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from dulwich.object_store import BaseObjectStore
from dulwich.objects import Blob, Commit, ObjectID, ShaFile, Tree
from dulwich.refs import Ref
from dulwich.repo import Repo

from tests.servers.seaweedfs import ACCESS_KEY, SECRET_KEY
from trellis.storage.memory.bare_repository import BareRepository
from trellis.storage.memory.layout import AlreadyApplied, Committed, VersionConflict
from trellis.storage.memory.repository import MemoryRepository, open_memory, open_shared_memory
from trellis.storage.memory.shared_repository import SharedHead, SharedRepository
from trellis.storage.memory.updates import Operation, Update
from trellis.storage.memory_place import SharedMemory
from trellis.storage.objects.address import s3_credentials
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore

AGENT = "archivist-violin"
RUN = "run_2026-11-15_120000_abcdef"
AT = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)
BRANCH = Ref(b"refs/heads/main")
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


KINDS = ("local", "shared")
_replicas = count(1)


def open_kind(kind: str, path: Path, **options: Any) -> MemoryRepository:
    """A memory of this kind: a repository at `path`, or one in an object store beside it whose replica is there."""
    if kind == "local":
        return open_memory(path, **options)
    return open_address(f"{path.with_name('objects').as_uri()} {path}", **options)


def open_address(address: str, **options: Any) -> MemoryRepository:
    """The memory that another process names: a path, or the address of an object store and the path of a replica."""
    url, _, cache = address.rpartition(" ")
    if not url:
        return open_memory(cache, **options)
    return shared_in(asyncio.run(open_objects(url, credentials=s3_credentials(ENVIRONMENT))), Path(cache), **options)


def shared_in(objects: ObjectStore, cache: Path, **options: Any) -> MemoryRepository:
    """The memory in this object store, with its replica at `cache`; the first call creates it."""
    memory = open_shared_memory(objects, SharedMemory(prefix="memory", cache=cache), **options)
    store = shared(memory).store
    if store.fetch() is None:
        store.put_head(SharedHead(identity="rig"), None)
    return memory


def shared(memory: MemoryRepository) -> SharedRepository:
    assert isinstance(memory._bare, SharedRepository)
    return memory._bare


def address_of(memory: MemoryRepository) -> str:
    """How another process opens this memory: a shared one as another host does, with a replica of its own."""
    if isinstance(memory._bare, BareRepository):
        return str(memory.path)
    return f"{memory._bare.store._objects.url} {memory.path.with_name(f'replica-{next(_replicas)}.git')}"


def same_host(memory: MemoryRepository) -> str:
    """How another process of this host opens this memory: a shared one with the same replica."""
    if isinstance(memory._bare, BareRepository):
        return str(memory.path)
    return f"{memory._bare.store._objects.url} {memory.path}"


def another(memory: MemoryRepository, **options: Any) -> MemoryRepository:
    """The same memory, opened again: a shared one on another host."""
    return open_address(address_of(memory), **options)


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


def commit_tree(
    memory: MemoryRepository, entries: Sequence[tuple[str, int, ShaFile | bytes]], message: str = "by hand"
) -> ObjectID:
    """A commit of somebody else: these entries, each a path with its mode, over what the branch has."""
    new: list[ShaFile] = []
    head = memory._bare.branch()
    with memory._bare.objects() as objects:
        root: Tree | None = None if head is None else _tree(objects, new, _commit(objects, head).tree)
        for name, mode, content in entries:
            root = _placed(objects, new, root, name.split("/"), mode, content)
    assert root is not None
    commit = Commit()
    commit.tree = root.id
    commit.parents = [] if head is None else [head]
    commit.author = commit.committer = b"Somebody <somebody@example.org>"
    commit.author_time = commit.commit_time = int(AT.timestamp())
    commit.author_timezone = commit.commit_timezone = 0
    commit.message = message.encode()
    new.append(commit)
    if isinstance(memory._bare, SharedRepository):
        assert memory._bare.publish(new, head, commit.id)
        return commit.id
    with Repo(memory.path, bare=True) as repo:  # as git does it: no lock of ours is held
        for item in new:
            repo.object_store.add_object(item)
        repo.refs[BRANCH] = commit.id
    return commit.id


def _placed(
    objects: BaseObjectStore,
    new: list[ShaFile],
    tree: Tree | None,
    names: list[str],
    mode: int,
    content: ShaFile | bytes,
) -> Tree:
    tree = Tree() if tree is None else tree
    first, rest = names[0].encode(), names[1:]
    if rest:
        inner = _tree(objects, new, tree[first][1]) if first in tree else None
        tree.add(first, 0o040000, _placed(objects, new, inner, rest, mode, content).id)
    elif isinstance(content, bytes) and mode == 0o160000:
        tree.add(first, mode, ObjectID(content))
    else:
        blob = Blob.from_string(content) if isinstance(content, bytes) else content
        new.append(blob)
        tree.add(first, mode, blob.id)
    new.append(tree.copy())
    return tree


def _commit(objects: BaseObjectStore, name: ObjectID) -> Commit:
    stored = objects[name]
    assert isinstance(stored, Commit)
    return stored


def _tree(objects: BaseObjectStore, new: list[ShaFile], name: ObjectID) -> Tree:
    stored = next((item for item in new if item.id == name), None) or objects[name]
    assert isinstance(stored, Tree)
    return stored.copy()  # pyright: ignore[reportReturnType]
