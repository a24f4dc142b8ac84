"""Brings a memory from one place to another with the same commits: import to the object store, export to a folder."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dulwich.object_store import BaseObjectStore
from dulwich.objects import ObjectID

from trellis.engine.private_files import sync_folder
from trellis.storage.memory import packs
from trellis.storage.memory.bare_repository import KEY as RECORD_KEY
from trellis.storage.memory.bare_repository import (
    BareRepository,
    MemoryRecord,
    check_repository,
    id_of_identity,
    make_repository,
    record_memory,
    recorded,
    rename_unless_taken,
    repository_identity,
    sync_tree,
    unavailable_on_os_error,
)
from trellis.storage.memory.errors import ExportRefused, ImportRefused, MemoryOfAnother
from trellis.storage.memory.history import walk
from trellis.storage.memory.repository import MemoryRepository, open_shared_memory
from trellis.storage.memory.shared_repository import JOINED, FetchedHead, SharedHead, SharedStore, StoredPack
from trellis.storage.memory.verification import verify
from trellis.storage.memory_place import SharedMemory, place_of
from trellis.storage.objects.store import ObjectStore

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """A memory that was imported or exported: its newest commit, and how many lead to it."""

    commit: str | None
    commits: int


class MemoryImport:
    """The import of a repository on a disk to the object store. It may be broken off and run again at any time.

    Writers of the source wait meanwhile. The object store's memory is of no use to others until everything was read
    back and checked. At the end the instance is recorded as having its memory there, and the source refuses every use:
    a process that still has its path would go on with a history of its own.
    """

    def __init__(self, source: Path, objects: ObjectStore, prefix: str, *, new_id: Callable[[], str]) -> None:
        self._path = source.absolute()
        self._objects = objects
        self._prefix = prefix
        self._store = SharedStore(objects, prefix)
        self._new_id = new_id

    def run(self, on_progress: Progress = lambda _: None) -> TransferReport:
        """Import, or go on with an import. Raises ImportRefused, MemoryOfAnother, MemoryMissing and MemoryDamaged."""
        check_repository(self._path)
        source = BareRepository(self._path, time.sleep)
        try:
            with source.locked(moved=True):
                return self._imported(source, on_progress)
        finally:
            self._store.close()

    def _imported(self, source: BareRepository, on_progress: Progress) -> TransferReport:
        identity = source.identity(self._new_id)
        repository = id_of_identity(identity)
        known = self._store.run(recorded(self._objects))
        if known is not None and known.repository != repository:
            raise MemoryOfAnother(path=self._path, key=RECORD_KEY)
        with source.objects() as objects:
            chain = first_parents(objects, source.read_branch())
            fetched = self._begun(identity, chain)
            while fetched.head.importing and fetched.head.number < len(chain):
                pack, body = next_pack(objects, chain, fetched.head.number)
                self._store.put_pack(pack, body)
                fetched = self._moved(fetched.head.moved_to(pack), fetched)
                on_progress(fetched.head.number)
        if fetched.head.importing:
            self._check(fetched.head)
        self._store.run(record_memory(self._objects, MemoryRecord(repository=repository, place=self._place)))
        source.mark_moved(self._place)  # before the other one may be used: at no moment both accept a change
        if fetched.head.importing:
            self._moved(fetched.head.model_copy(update={"importing": False}), fetched)
        return TransferReport(commit=chain[-1].decode() if chain else None, commits=len(chain))

    def _begun(self, identity: str, chain: Sequence[ObjectID]) -> FetchedHead:
        """The head of this import. Raises ImportRefused if the object store has something else there."""
        fetched = self._store.fetch()
        if fetched is None:
            return self._moved(SharedHead(identity=identity, importing=True), None)
        head = fetched.head
        if head.identity != identity:
            raise self._refused("another memory is there; choose another prefix, TRELLIS_MEMORY=objects:PREFIX")
        if head.importing and (head.number == 0 or chain[: head.number][-1:] == [head.head]):
            return fetched
        if not head.importing and head.number >= len(chain) and self._has(chain):
            return fetched  # it was imported before, and may have gone on since
        raise self._refused("the memory there has another history; nothing of it was changed")

    def _has(self, chain: Sequence[ObjectID]) -> bool:
        """Whether the memory in the object store has the whole history of the source."""
        with tempfile.TemporaryDirectory() as scratch, closing(self._copy(scratch)) as memory:
            newest = memory.head()
            with memory.objects() as objects:
                return not chain or any(name == chain[-1] for name, _ in walk(objects, newest))

    def _moved(self, head: SharedHead, replaced: FetchedHead | None) -> FetchedHead:
        stored = self._store.put_head(head, replaced)
        if stored is None:
            raise self._refused("somebody else changed the memory there meanwhile; another import may be running")
        return stored

    def _check(self, head: SharedHead) -> None:
        """Read everything back into a new replica and check it."""
        with tempfile.TemporaryDirectory() as scratch, closing(self._copy(scratch)) as memory:
            report = verify(memory)
        if report.damage:
            raise self._refused(f"what was read back is damaged: {report.damage[0]}")
        if not report.complete or report.commits != head.number:
            raise self._refused(f"{report.commits} of {head.number} commits could be read back")

    def _copy(self, scratch: str) -> MemoryRepository:
        place = SharedMemory(prefix=self._prefix, cache=Path(scratch) / "copy.git")
        return open_shared_memory(self._objects, place, importing=True)

    @property
    def _place(self) -> str:
        return place_of(self._prefix)

    def _refused(self, reason: str) -> ImportRefused:
        return ImportRefused(path=self._path, place=self._place, reason=reason)


def export_memory(
    memory: MemoryRepository, target: Path, identity: str, on_progress: Progress = lambda _: None
) -> TransferReport:
    """Make a plain bare git repository of a memory at a path where nothing is. It appears whole or not at all.

    `identity` is the memory's, which the new repository gets too. Raises ExportRefused.
    """
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportRefused(path=target, reason="something is there; choose another folder")
    head = memory.head()
    with unavailable_on_os_error():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            copy = BareRepository(Path(scratch) / target.name, time.sleep)
            make_repository(copy.path)
            with memory.objects() as objects, copy.locked():
                chain = first_parents(objects, head)
                number = 0
                while number < len(chain):
                    pack, body = next_pack(objects, chain, number)
                    copy.write_pack(body)
                    number = pack.last
                    on_progress(number)
                if head is not None:
                    copy.move_branch(None, head)
            repository_identity(copy.path, lambda: identity)
            sync_tree(copy.path)
            if not rename_unless_taken(copy.path, target):
                raise ExportRefused(path=target, reason="somebody else made something there meanwhile")
            sync_folder(target.parent)
    return TransferReport(commit=None if head is None else head.decode(), commits=len(chain))


def first_parents(objects: BaseObjectStore, head: ObjectID | None) -> list[ObjectID]:
    """The commits that led to this one, along first parents, the oldest first."""
    return [name for name, _ in walk(objects, head)][::-1]


def next_pack(objects: BaseObjectStore, chain: Sequence[ObjectID], number: int) -> tuple[StoredPack, bytes]:
    """The pack that goes on after `number` commits of a chain: as many as fit into one, and at most 1,024."""
    size = min(JOINED[0] - number % JOINED[0], len(chain) - number)
    base = chain[number - 1] if number else None
    while True:
        last = chain[number + size - 1]
        body = packs.encode(packs.raw(objects, packs.introduced(objects, last, base)))
        if len(body) <= packs.PACK_BYTES_MAX or size == 1:
            return StoredPack(first=number + 1, last=number + size, commit=last.decode()), body
        size //= 2
