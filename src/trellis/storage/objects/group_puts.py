"""Writes objects into a local folder in groups, so that many objects share the waits for the disk (ADR 0045).

A group goes through four stages, each for all of its objects before the next one begins:

1. The bytes are written to scratch files, and missing folders are made.
2. The scratch files and the folders above new ones are synced, all at the same time.
3. The files are linked or renamed to their names, in the order of the puts. Readers see them from here on.
4. The folders are synced, each once and all at the same time. Only then is any put of the group answered.

So an answered put survives a power cut, as it does when it is alone, and no reader ever sees a part of an object. A put
that is alone is a group of one.

A file that is replaced stays open until the group is answered. Its blocks are freed when it is closed, and that often
waits for the journal of the file system.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.folders import Folders, FolderToWrite, ScratchFile
from trellis.storage.objects.keys import checked_key, file_path
from trellis.storage.objects.parallel_sync import sync_all
from trellis.storage.objects.store import (
    Create,
    IfMatch,
    ObjectPut,
    ObjectTooLarge,
    PutAnswer,
    PutCondition,
    PutRefused,
    PutStored,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)

GROUP_MAX = 192
"""Most objects in a group. Each has up to three open files while the group is written."""
LARGE_GROUP = 16
"""Groups with more objects than this are written one after the other: all of them together could take every
descriptor of the process."""
REPLACED_MAX = 256
"""Most replaced files that wait to be closed. Those of a further group are closed before it is answered."""
GROUP_BYTES_MAX = 8 * 1024 * 1024
"""A group ends with the object that reaches this size, so that no object waits long for the bytes of others."""
LOOK_FIRST_BYTES = 64 * 1024
"""Before a larger object is created, its name is looked at: if it is taken, the bytes need not be written.

For a smaller one that costs more than it saves, because nearly every name is free.
"""
PLACE_TRIES = 16

_REFUSALS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How a file of the store is opened to be read: no link, and no wait for a pipe."""
_HOLD = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens a file only to keep its inode."""

EtagOf = Callable[[int, bytes], str | None]
"""The etag of the file with this name in an open folder; None if there is none."""


def store_error(error: OSError, verb: str, key: str) -> StoreError:
    """The error of the object store that an error of the file system means."""
    kind = StoreRefused if error.errno in _REFUSALS else StoreUnavailable
    problem = kind(verb=verb, key=key, reason=f"{error.strerror or error}")
    problem.__cause__ = error
    return problem


@dataclass(slots=True)
class _Put:
    """One put of a group on its way to the disk."""

    sequence: int
    key: str
    body: bytes
    etag: str
    path: tuple[bytes, ...]
    when: PutCondition
    folder: FolderToWrite | None = None
    file: ScratchFile | None = None
    is_renamed: bool = False
    is_reached: bool = False
    """Whether every put before it in its sequence was placed."""
    replaced_by: "_Put | None" = None
    """A later put of the same key in the same sequence and group. This one's bytes then need not be written."""
    is_first: bool = True
    """Whether no put of the same key comes before it in its sequence and group."""
    answer: PutAnswer | None = None

    @property
    def name(self) -> bytes:
        return self.path[-1]

    def fail(self, error: OSError) -> None:
        self.answer = store_error(error, "put", self.key)


class GroupPuts:
    """Writes sequences of objects into one folder. Thread-safe."""

    def __init__(
        self, folders: Folders, etag_of: EtagOf, object_bytes_max: int, later: Callable[[Callable[[], None]], object]
    ) -> None:
        """`later` has something done in another thread."""
        self._folders = folders
        self._etag_of = etag_of
        self._bytes_max = object_bytes_max
        self._later = later
        self._replaced = 0
        self._counting = threading.Lock()
        self._large_group = threading.Lock()

    def put_many(self, sequences: Sequence[Sequence[ObjectPut]]) -> list[list[PutAnswer]]:
        """Write the objects; see `ObjectStore.put_many`."""
        answers: list[list[PutAnswer]] = [[] for _ in sequences]
        etags: dict[tuple[int, str], str] = {}
        for group in _groups(sequences):
            open_ones = [(n, put) for n, put in group if not answers[n] or isinstance(answers[n][-1], PutStored)]
            with self._large_group if len(open_ones) > LARGE_GROUP else contextlib.nullcontext():
                puts = self._write(open_ones, etags)
            for one in puts:
                if not answers[one.sequence] or isinstance(answers[one.sequence][-1], PutStored):
                    answers[one.sequence].append(one.answer or PutStored(one.etag))
                    etags[one.sequence, one.key] = one.etag
        return answers

    def _write(self, group: Sequence[tuple[int, ObjectPut]], etags: dict[tuple[int, str], str]) -> list[_Put]:
        writing = _Group(self._folders, self._etag_of, self._bytes_max)
        try:
            puts = list(writing.prepared(group, etags))
            writing.sync_files(puts)
            ended = set[int]()
            for put in puts:
                if put.sequence not in ended:
                    put.is_reached = True
                    writing.place(put)
                if put.answer is not None:
                    ended.add(put.sequence)
            writing.sync_folders(puts)
        finally:
            writing.close()
            self._close_replaced(writing.replaced)
        for put in reversed(puts):
            if put.replaced_by is not None and put.is_reached and put.answer is None:
                self._answer_replaced(put, put.replaced_by)
        return puts

    def _close_replaced(self, fds: Sequence[int]) -> None:
        def close() -> None:
            for fd in fds:
                os.close(fd)
            with self._counting:
                self._replaced -= len(fds)

        with self._counting:
            self._replaced += len(fds)
            is_full = self._replaced > REPLACED_MAX
        if not fds or is_full:
            close()
            return
        try:
            self._later(close)
        except RuntimeError:  # the store is being closed
            close()

    def _answer_replaced(self, put: _Put, by: _Put) -> None:
        """What a later put replaced is stored if that one is. If the sequence ended in between, it is written now."""
        if by.is_reached:
            put.answer = by.answer
        else:
            ((put.answer,),) = self.put_many([[ObjectPut(put.key, put.body, put.when)]])


class _Group:
    """The open files and folders of one group."""

    def __init__(self, folders: Folders, etag_of: EtagOf, bytes_max: int) -> None:
        self._folders = folders
        self._etag_of = etag_of
        self._bytes_max = bytes_max
        self._open: dict[tuple[bytes, ...], FolderToWrite] = {}
        self._removed: list[FolderToWrite] = []
        """Folders that a deletion removed while they were open."""
        self._puts: list[_Put] = []
        self.replaced: list[int] = []
        """Files that were replaced, still open."""

    def prepared(self, group: Sequence[tuple[int, ObjectPut]], etags: dict[tuple[int, str], str]) -> Iterator[_Put]:
        """Write the bytes of every put, up to the first of each sequence that is refused or fails."""
        last: dict[tuple[int, str], _Put] = {}
        ended = set[int]()
        for sequence, one in group:
            if sequence in ended:
                continue
            before = last.get((sequence, one.key))
            when = one.when or (IfMatch(etags[sequence, one.key]) if before is None else before.when)
            put = _Put(sequence, one.key, one.body, sha256(one.body), (), when, is_first=before is None)
            if before is not None and one.when is None:
                before.replaced_by = put
            last[sequence, one.key] = put
            self._puts.append(put)
        for put in self._puts:
            if put.sequence not in ended:
                self._prepare(put)
                yield put
            if put.answer is not None:
                ended.add(put.sequence)

    def _prepare(self, put: _Put) -> None:
        try:
            put.path = file_path(checked_key(put.key))
            if len(put.body) > self._bytes_max:
                raise ObjectTooLarge(key=put.key, size=len(put.body), limit=self._bytes_max)
            put.folder = self._folder(put)
            if isinstance(put.when, Create) and len(put.body) > LOOK_FIRST_BYTES:
                there = self._etag_of(put.folder.fd, put.name)
                if there is not None:
                    put.answer = self._refused(put.folder.fd, put.name, there)
            if put.answer is None and put.replaced_by is None:
                is_linked = isinstance(put.when, Create)
                write = self._folders.write_unnamed if is_linked else self._folders.write_scratch
                put.file = write(put.body)
        except FileNotFoundError:  # the folder of the object to replace does not exist
            put.answer = PutRefused(None)
        except OSError as error:
            put.fail(error)
        except StoreError as error:
            put.answer = error

    def _folder(self, put: _Put) -> FolderToWrite:
        names = put.path[:-1]
        if (there := self._open.get(names)) is not None:
            return there
        make = not isinstance(put.when, IfMatch)
        for _ in range(PLACE_TRIES):
            with contextlib.suppress(FileNotFoundError):  # a deletion removed the empty folder
                self._open[names] = self._folders.open_to_write(names, make=make)
                return self._open[names]
            if not make:
                break
        if not make:
            raise FileNotFoundError(errno.ENOENT, "the folder does not exist")
        raise StoreUnavailable(verb="put", key=put.key, reason="its folder is removed as often as it is made")

    def place(self, put: _Put) -> None:
        """Make the bytes visible under the key, if the condition of the put holds.

        Of a put that a later one replaces, only the condition is checked: a sequence ends where a put is refused.
        """
        if put.answer is not None:
            return
        try:
            if put.file is None:
                self._check(put)
            else:
                put.answer = self._place_in_folder(put, put.file)
        except FileNotFoundError:
            put.answer = PutRefused(None)
        except OSError as error:
            put.fail(error)
        except StoreError as error:
            put.answer = error

    def _place_in_folder(self, put: _Put, file: ScratchFile) -> PutRefused | None:
        for _ in range(PLACE_TRIES):
            folder = self._folder(put)
            if folder is not put.folder:
                self._use(put, folder)
            try:
                return self._place(put, file, folder.fd)
            except FileNotFoundError:
                if isinstance(put.when, IfMatch):
                    raise
                self._removed.append(self._open.pop(folder.names))
        raise StoreUnavailable(verb="put", key=put.key, reason="its folder is removed as often as it is made")

    def _check(self, put: _Put) -> None:
        """Refuse a put whose bytes are not written if its condition does not hold."""
        if put.is_first and isinstance(put.when, IfMatch):
            folder = self._folder(put).fd
            there = self._etag_of(folder, put.name)
            if there != put.when.etag:
                put.answer = self._refused(folder, put.name, there)

    def _use(self, put: _Put, folder: FolderToWrite) -> None:
        """Put into another folder than the prepared one, which a deletion removed."""
        put.folder = folder
        problems, _ = self._folders.sync_above((folder,))
        if problems:
            raise next(iter(problems.values()))

    def _place(self, put: _Put, file: ScratchFile, folder: int) -> PutRefused | None:
        if isinstance(put.when, Create):
            try:
                self._folders.link(file, folder, put.name)
            except FileExistsError:
                return self._refused(folder, put.name, self._etag_of(folder, put.name))
            return None
        with self._folders.lock(put.key):
            if isinstance(put.when, IfMatch):
                there = self._etag_of(folder, put.name)
                if there != put.when.etag:
                    return self._refused(folder, put.name, there)
            if len(self._puts) > 1:
                with contextlib.suppress(OSError):
                    self.replaced.append(os.open(put.name, _HOLD, dir_fd=folder))
            self._folders.replace(file, folder, put.name)
        put.is_renamed = True
        return None

    def _refused(self, folder: int, name: bytes, etag: str | None) -> PutRefused:
        """Refuse a put, after syncing the existing object. Its folder is synced with the others.

        The caller relies on that object, and its writer may have died before syncing it.
        """
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(name, READ_FLAGS, dir_fd=folder)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        return PutRefused(etag)

    def sync_files(self, puts: Sequence[_Put]) -> None:
        """Sync the scratch files, and with them the folders above new ones.

        A put into a folder that cannot be made safe has failed.
        """
        files = [(put, put.file.fd) for put in puts if put.file is not None and put.answer is None]
        problems, results = self._folders.sync_above(self._open.values(), [fd for _, fd in files])
        for (put, _), problem in zip(files, results, strict=True):
            if problem is not None:
                put.fail(problem)
        for put in puts if problems else ():
            lost = [names for names, _ in put.folder.unsynced if names in problems] if put.folder is not None else []
            if lost and not isinstance(put.answer, StoreError):
                put.fail(problems[lost[0]])

    def sync_folders(self, puts: Sequence[_Put]) -> None:
        """Sync the folders of all puts that were placed or refused. A put whose folder cannot be synced has failed."""
        decided = [
            (put, put.folder.fd) for put in puts if put.folder is not None and not isinstance(put.answer, StoreError)
        ]
        fds = list(dict.fromkeys(fd for _, fd in decided))
        problems = dict(zip(fds, sync_all(fds), strict=True))
        for put, fd in decided:
            problem = problems[fd]
            if problem is not None:
                put.fail(problem)

    def close(self) -> None:
        """Drop the scratch files and close the folders."""
        problem: OSError | None = None
        for put in self._puts:
            try:
                if put.file is not None:
                    self._folders.drop_scratch(put.file, renamed=put.is_renamed)
            except OSError as error:
                problem = error
        for folder in (*self._open.values(), *self._removed):
            os.close(folder.fd)
        if problem is not None:
            raise problem


def _groups(sequences: Sequence[Sequence[ObjectPut]]) -> Iterator[list[tuple[int, ObjectPut]]]:
    """The puts with the numbers of their sequences, cut into groups."""
    group, size = list[tuple[int, ObjectPut]](), 0
    for number, sequence in enumerate(sequences):
        for put in sequence:
            group.append((number, put))
            size += len(put.body)
            if len(group) >= GROUP_MAX or size >= GROUP_BYTES_MAX:
                yield group
                group, size = [], 0
    if group:
        yield group
