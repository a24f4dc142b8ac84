"""The repository of memory in the object store, which any host can serve: no host holds the only copy.

One small document, the head, says which commit is current and which packs hold the history. A change is one pack under
a new key, then a conditional put of the head: of any number of writers on any hosts, exactly one moves it from one
version to the next, and the others read again and redo theirs on top. The change is acknowledged after that put.

A host keeps a replica, a bare repository on its own disk, as a cache. It may be lost at any time: the next call fetches
it again. It is not synced, and so it is emptied after the machine was started again. Every read asks for the head first
(one request), so a reader sees each change that was acknowledged before.

- A writer that dies before it moves the head leaves one pack that nobody names, until `collector` removes it. A writer
  that loses a race removes its own. A pack that the head has named stays for good, also when a larger one replaces it.
- Packs are joined as changes come: every 32nd change writes a pack of 32 changes in place of one, every 256th one of
  256, every 1,024th one of 1,024. So a new host fetches at most 41 packs, and one more for each 1,024 changes.
"""

import asyncio
import contextlib
import os
import random
import re
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock, local
from typing import Annotated, Any, Literal, TypeVar

from dulwich.object_store import DiskObjectStore
from dulwich.objects import ObjectID, ShaFile
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trellis.engine.event_loop_thread import EventLoopStopped, EventLoopThread
from trellis.engine.private_files import sync_folder
from trellis.storage.memory import packs
from trellis.storage.memory.bare_repository import (
    BRANCH,
    REF,
    BareRepository,
    check_repository,
    host_lock,
    id_of_identity,
    make_repository,
    unavailable_on_os_error,
)
from trellis.storage.memory.errors import MemoryBusy, MemoryDamaged, MemoryMissing, MemoryUnavailable
from trellis.storage.memory.history import walk
from trellis.storage.memory_place import place_of
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import CREATE, ObjectStore, PutCondition, PutStored, StoreError, if_match

JOINED = (1_024, 256, 32)
"""Sizes of joined packs, in changes. One that would be larger than PACK_BYTES_MAX is not made."""
FETCHED_AT_ONCE = 8
"""Packs that are fetched at the same time, and held in memory together."""
ATTEMPTS_MAX = 64
"""How often a change is rebuilt because a writer on another host was faster."""
PAUSE_S_MAX = 0.01

_TURN = "trellis.turn"
_STATE = "trellis.replica"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Where Linux says which start of the machine this is. Where it does not exist, replicas are synced."""
_PACK_NAME = re.compile(r"([0-9]{12,15})-([0-9]{1,15})-([0-9a-f]{40})\.pack")
_CommitName = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]

T = TypeVar("T")


class StoredPack(BaseModel):
    """A pack that the head names: the changes `first` to `last` of the history, which ends with `commit`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int = Field(ge=1)
    last: int = Field(ge=1)
    commit: _CommitName

    @property
    def name(self) -> str:
        return f"{self.last:012}-{self.last - self.first + 1}-{self.commit}.pack"

    @classmethod
    def of_name(cls, name: str) -> "StoredPack | None":
        """The pack with this name; None if no pack is called so."""
        parts = _PACK_NAME.fullmatch(name)
        if parts is None:
            return None
        last = int(parts[1])
        try:
            return cls(first=last - int(parts[2]) + 1, last=last, commit=parts[3])
        except ValidationError:
            return None


class SharedHead(BaseModel):
    """The head document: the current commit, how many changes led to it, and the packs that hold them all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    identity: str
    """What makes this repository the one that it is, also after it was moved."""
    number: int = Field(default=0, ge=0)
    """Commits from the first one to this one, along first parents."""
    commit: _CommitName | None = None
    importing: bool = False
    """An import is under way; nobody else may read or write."""
    packs: tuple[StoredPack, ...] = ()

    @property
    def repository(self) -> str:
        """The id of the repository."""
        return id_of_identity(self.identity)

    @property
    def head(self) -> ObjectID | None:
        return None if self.commit is None else ObjectID(self.commit.encode())

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"

    def moved_to(self, pack: StoredPack) -> "SharedHead":
        """The head after this pack was added. Packs that it replaces are no longer named."""
        kept = tuple(one for one in self.packs if one.last < pack.first)
        return self.model_copy(update={"number": pack.last, "commit": pack.commit, "packs": (*kept, pack)})

    def joined_firsts(self) -> list[int]:
        """Where the pack of the next change may begin: the longest span first, the change alone last."""
        number = self.number + 1
        spans = [size for size in JOINED if number % size == 0]
        return [self._first_after(number - size) for size in spans] + [number]

    def _first_after(self, number: int) -> int:
        """The first change after this one that no pack covers together with it. Packs overlap nowhere."""
        return max((one.last for one in self.packs if one.first <= number), default=number) + 1


@dataclass(frozen=True, slots=True)
class FetchedHead:
    """The head document as it was read, with the etag for replacing it."""

    head: SharedHead
    etag: str


class SharedStore:
    """Head and packs in the object store, for threads. Raises MemoryUnavailable if the store does not answer."""

    def __init__(self, objects: ObjectStore, prefix: str) -> None:
        self._objects = objects
        self._thread: tuple[int, EventLoopThread] | None = None
        self._starting = Lock()
        self._closed = False
        self.prefix = prefix
        self.head_key = object_key(*prefix.split("/"), "head.json")

    @property
    def packs_folder(self) -> str:
        """What the keys of all packs begin with."""
        return f"{object_key(*self.prefix.split('/'), 'packs')}/"

    def first_pack_key(self, number: int) -> str:
        """A key before those of all packs that end with this change or a later one, and behind all others."""
        return f"{self.packs_folder}{number:012}"

    def pack_key(self, pack: StoredPack) -> str:
        """The key of a pack."""
        return object_key(*self.prefix.split("/"), "packs", pack.name)

    def fetch(self) -> FetchedHead | None:
        """The head document; None if there is none. Raises MemoryDamaged."""
        stored = self.run(self._objects.get(self.head_key))
        if stored is None:
            return None
        try:
            return FetchedHead(SharedHead.model_validate_json(stored.body), stored.etag)
        except ValidationError as error:
            reason = f"it is no head of a memory ({error.error_count()} errors)"
            raise MemoryDamaged(where=self.head_key, reason=reason) from error

    def put_head(self, head: SharedHead, replaced: FetchedHead | None) -> FetchedHead | None:
        """Replace the head that was read, or create the first one. Returns None if another one is there."""
        when: PutCondition = CREATE if replaced is None else if_match(replaced.etag)
        answer = self.run(self._objects.put(self.head_key, head.to_bytes(), when=when))
        return FetchedHead(head, answer.etag) if isinstance(answer, PutStored) else None

    def put_pack(self, pack: StoredPack, body: bytes) -> None:
        """Store a pack. The same pack may be stored again: equal names have equal objects."""
        self.run(self._objects.put(self.pack_key(pack), body))

    def get_packs(self, wanted: Sequence[StoredPack]) -> list[bytes]:
        """The bytes of these packs. Raises MemoryDamaged, naming the one that is missing."""

        async def get() -> list[bytes]:
            keys = [self.pack_key(pack) for pack in wanted]
            stored = await asyncio.gather(*map(self._objects.get, keys))
            for key, one in zip(keys, stored, strict=True):
                if one is None:
                    raise _no_pack(key)
            return [one.body for one in stored if one is not None]

        return self.run(get())

    def check_packs(self, named: Sequence[StoredPack]) -> None:
        """Raise MemoryDamaged, naming the first pack that the object store does not have."""

        async def check() -> None:
            for start in range(0, len(named), FETCHED_AT_ONCE):
                keys = [self.pack_key(pack) for pack in named[start : start + FETCHED_AT_ONCE]]
                for key, info in zip(keys, await asyncio.gather(*map(self._objects.head, keys)), strict=True):
                    if info is None:
                        raise _no_pack(key)

        self.run(check())

    def drop_pack(self, pack: StoredPack) -> None:
        """Remove a pack that no head has named or can name. Nothing is wrong if that fails."""
        with contextlib.suppress(MemoryUnavailable):
            self.run(self._objects.delete(self.pack_key(pack)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call of the store. Every process has an event loop of its own for them."""
        with self._starting:
            if self._closed:
                work.close()
                raise MemoryUnavailable(reason="this process closed it")
            if self._thread is None or self._thread[0] != os.getpid():
                self._thread = (os.getpid(), EventLoopThread("trellis-memory"))
            thread = self._thread[1]
        try:
            return thread.run(work)
        except StoreError as error:
            raise MemoryUnavailable(reason=str(error)) from error
        except EventLoopStopped as error:
            raise MemoryUnavailable(reason="this process closed it") from error

    def close(self) -> None:
        """End the thread of this store. Calls that are under way, and later ones, raise MemoryUnavailable."""
        with self._starting:
            self._closed = True
            if self._thread is not None and self._thread[0] == os.getpid():
                self._thread[1].stop()
            self._thread = None


class SharedRepository:
    """One branch of a repository in the object store, for any number of threads, processes and hosts."""

    attempts_max = ATTEMPTS_MAX

    def __init__(
        self, store: SharedStore, replica: BareRepository, pause: Callable[[float], None], *, importing: bool = False
    ) -> None:
        self.store = store
        self._importing = importing
        self.replica = replica
        self.path = replica.path
        self._pause = pause
        self._read = local()

    @property
    def place(self) -> str:
        """Where the memory is, as the setting says it."""
        return place_of(self.store.prefix)

    def identity(self, new_id: Callable[[], str]) -> str:  # noqa: ARG002 - it always has one
        """What makes this repository the one that it is."""
        return self.fetched().head.identity

    def check(self) -> None:
        """Raise MemoryMissing unless the object store has a memory here."""
        self.fetched()

    def checked_packs(self) -> str:
        """What the object store has, after every pack that the head names was looked for. Raises MemoryDamaged."""
        head = self.fetched().head
        self.store.check_packs(head.packs)
        return f"{head.number} changes in {len(head.packs)} packs"

    def fetched(self) -> FetchedHead:
        """The head now. Raises MemoryMissing, and MemoryBusy during an import."""
        fetched = self.store.fetch()
        if fetched is None:
            raise MemoryMissing(path=self.place, reason=f"the object store has no {self.store.head_key}")
        if fetched.head.importing and not self._importing:
            raise MemoryBusy(
                reason="an import is under way, or was broken off; `trellis memory import` goes on with it"
            )
        return fetched

    def branch(self) -> ObjectID | None:
        """The current commit, after the replica has it; None before the first one."""
        before = self._state()
        fetched = self.fetched()
        self._bring(fetched.head, before)
        self._read.fetched = fetched
        return fetched.head.head

    def numbered_commits(self, above: int) -> tuple[int, dict[int, str]]:
        """The number of the newest change, and by number the commit of each change above this one."""
        head = self.branch()
        fetched: FetchedHead = self._read.fetched
        number = fetched.head.number
        with self.replica.objects() as objects:
            newest = islice(walk(objects, head), max(0, number - above))
            return number, {number - back: name.decode() for back, (name, _) in enumerate(newest)}

    def objects(self) -> contextlib.AbstractContextManager[DiskObjectStore]:
        """The replica's objects, for reading."""
        return self.replica.objects()

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Hold the turn of this host's writers. Writers of other hosts are not held off: the head decides."""
        self._ready_replica()
        with host_lock(self.path, _TURN, self._pause):
            yield

    def publish(self, objects: Sequence[ShaFile], old: ObjectID | None, new: ObjectID) -> bool:
        """Make `new` the current commit, durably. Returns False if the current one is no longer `old`.

        The head is the one that this thread read last. A put whose answer is lost is looked up by its commit.
        """
        fetched: FetchedHead = self._read.fetched
        if fetched.head.head != old:
            return False
        pack, body = self._pack_of(fetched.head, objects, new)
        self.store.put_pack(pack, body)
        try:
            stored = self.store.put_head(fetched.head.moved_to(pack), fetched)
        except MemoryUnavailable:
            if self._commit_at(pack.last) != new:
                raise  # the put may still happen: the pack stays
            return True
        if stored is None:
            now = self._commit_at(pack.last)
            if now is not None and now != new:  # another change has this number, so no head can name the pack any more
                self.store.drop_pack(pack)
                self._pause(random.uniform(0, PAUSE_S_MAX))  # noqa: S311 - spreads writers, nothing secret
            return now == new  # if it is ours, it was stored and only the answer was lost
        with contextlib.suppress(MemoryUnavailable, MemoryBusy):  # the next call brings what is missing here
            self._keep(stored.head, [body], before=fetched.head)
        return True

    def sync_branch(self) -> None:
        """Does nothing: the object store answers a put when it is durable."""

    def close(self) -> None:
        """Close what belongs to this process. The replica stays."""
        self.store.close()

    # -- packs -----------------------------------------------------------------------------------------------------

    def _pack_of(self, head: SharedHead, objects: Sequence[ShaFile], new: ObjectID) -> tuple[StoredPack, bytes]:
        """The pack of the next change, joined with earlier ones where that is due and it does not become too large."""
        own = {item.id: (item.type_num, item.as_raw_string()) for item in objects}
        for first in head.joined_firsts():
            contents = {**self._contents(head, first), **own}
            if sum(len(content) for _, content in contents.values()) <= packs.PACK_BYTES_MAX or contents == own:
                pack = StoredPack(first=first, last=head.number + 1, commit=new.decode())
                return pack, packs.encode(contents.values())
        raise AssertionError("a change alone always has a pack")

    def _contents(self, head: SharedHead, first: int) -> dict[ObjectID, tuple[int, bytes]]:
        """The objects of the changes from `first` to the head, from the replica."""
        if head.head is None or first > head.number:
            return {}
        with self.replica.objects() as objects:
            span = islice(walk(objects, head.head), head.number - first + 2)
            names = [name for name, _ in span]
            base = names[-1] if len(names) == head.number - first + 2 else None
            return {name: next(packs.raw(objects, [name])) for name in packs.introduced(objects, head.head, base)}

    def _commit_at(self, number: int) -> ObjectID | None:
        """The commit that has this number in the history as it is now; None if the history has not come so far."""
        head = self.branch()
        newest: FetchedHead = self._read.fetched
        back = newest.head.number - number
        if back < 0:
            return None
        with self.replica.objects() as objects:
            return next((name for name, _ in islice(walk(objects, head), back, None)), None)

    # -- the replica -----------------------------------------------------------------------------------------------

    def _bring(self, head: SharedHead, before: SharedHead | None) -> None:
        """Bring the replica to this head, if it is behind. `before` is where the replica was when the head was read."""
        if before is not None:
            self._check_direction(before, head)
            if before.number == head.number:
                return
        self._ready_replica()
        if before is None:
            self._clear_torn()
        known = 0 if before is None else before.number
        missing = [pack for pack in head.packs if pack.last > known]
        for start in range(0, len(missing), FETCHED_AT_ONCE):
            some = missing[start : start + FETCHED_AT_ONCE]
            bodies = self.store.get_packs(some)
            for pack, body in zip(some, bodies, strict=True):
                self._check_pack(pack, body)
            with self.replica.locked():
                self._write(bodies)
        if before is None or self._leads_to(head, before):
            self._keep(head, [], before)
        else:
            self._forget(before)
            self._bring(head, None)

    def _check_direction(self, before: SharedHead, head: SharedHead) -> None:
        if before.identity != head.identity:
            reason = f"the cache {self.path} is of another memory; set TRELLIS_MEMORY_CACHE to a folder of its own"
            raise MemoryUnavailable(reason=reason)
        if head.number < before.number or (head.number == before.number and head.commit != before.commit):
            reason = (
                f"it says change {head.number} and this host has seen change {before.number} ({before.commit}); if the "
                f"object store was restored from a backup, remove the cache {self.path}"
            )
            raise MemoryDamaged(where=self.store.head_key, reason=reason)

    def _leads_to(self, head: SharedHead, before: SharedHead) -> bool:
        """Whether `before` is part of the history of this head, which the replica now has from there on.

        It is not if the object store was restored from a backup and writers of other hosts went on from that.
        """
        if before.head is None:
            return True
        with self.replica.objects() as objects, contextlib.suppress(MemoryDamaged):  # a commit between is missing
            back = head.number - before.number
            return any(name == before.head for name, _ in islice(walk(objects, head.head), back, back + 1))
        return False

    def _forget(self, state: SharedHead) -> None:
        """Let the next call fetch all packs, unless another process has brought the replica on."""
        with self.replica.locked(), unavailable_on_os_error():
            if self._state() == state:
                self._replace_state(b"")

    def _check_pack(self, pack: StoredPack, body: bytes) -> None:
        try:
            names = {item.id for item in packs.decode(body)}
        except ValueError as error:
            raise MemoryDamaged(where=self.store.pack_key(pack), reason=str(error)) from error
        if pack.commit.encode() not in names:
            raise MemoryDamaged(where=self.store.pack_key(pack), reason=f"it does not hold commit {pack.commit}")

    def _keep(self, head: SharedHead, bodies: Sequence[bytes], before: SharedHead | None) -> None:
        """Let the replica's branch name this head, unless another process was faster."""
        with self.replica.locked():
            now = self._state()
            at, expected = (0 if state is None else state.number for state in (now, before))
            if now is not None and now.number >= head.number:
                return
            if at < expected or (bodies and at != expected):
                return  # what lies between is missing here; the next call fetches all of it
            self._write(bodies)
            self._write_state(head)
            if head.head is not None:
                self.replica.move_branch(self.replica.branch(), head.head)

    def _write(self, bodies: Iterable[bytes]) -> None:
        """Write the objects of packs. Needs the replica's lock. Large packs stay packs."""
        for body in bodies:
            objects = list(islice(packs.decode(body), 64))
            if len(objects) < 64:
                self.replica.write(objects)
                continue
            self.replica.write_pack(body)

    def _ready_replica(self) -> None:
        if not (self.path / "HEAD").is_file():
            make_repository(self.path)
        check_repository(self.path)

    def _clear_torn(self) -> None:
        """Remove what the replica has from before the machine was started again: a loss of power may have torn it.

        The first line of the state says that this was done. The file's name is synced: a folder that has a history and
        no state is no replica, and nothing of it is removed.
        """
        with self.replica.locked(), unavailable_on_os_error():
            place = self.path / _STATE
            if not place.exists() and any(
                (self.path / name).exists() for name in (BRANCH, REF.decode(), "packed-refs")
            ):
                reason = (
                    f"{self.path} is a git repository and no cache of this memory; set TRELLIS_MEMORY_CACHE to a "
                    "folder of its own"
                )
                raise MemoryUnavailable(reason=reason)
            if place.exists() and place.read_bytes().partition(b"\n")[0] == _boot_id():
                return
            self.replica.clear()
            self._replace_state(b"")
            sync_folder(self.path)

    def _state(self) -> SharedHead | None:
        """The newest head whose objects the replica has; None if there is none."""
        try:
            boot, _, head = (self.path / _STATE).read_bytes().partition(b"\n")
            return SharedHead.model_validate_json(head) if boot == _boot_id() else None
        except (OSError, ValidationError):
            return None

    def _write_state(self, head: SharedHead) -> None:
        with unavailable_on_os_error():
            self._replace_state(head.model_copy(update={"packs": ()}).to_bytes())

    def _replace_state(self, state: bytes) -> None:
        temporary = self.path / f"{_STATE}.new"
        temporary.write_bytes(_boot_id() + b"\n" + state)
        temporary.replace(self.path / _STATE)


def _no_pack(key: str) -> MemoryDamaged:
    return MemoryDamaged(where=key, reason="the object store has no such pack")


def _boot_id() -> bytes:
    """Which start of the machine this is: after a loss of power, files that were not synced may be torn."""
    return BOOT_ID.read_bytes().strip() if BOOT_ID.exists() else b"any"
