"""The object store in a local folder: every object is a file with the object's bytes.

The etag is the hash of the bytes. So people may read and edit the files with any tool: an edited file has another etag.
Files and folders with names that this store would not create are not objects and are left alone. `folders` documents
what holds when a process dies between system calls.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TypeVar

from trellis.engine.recent_entries import LruCache
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.file_systems import is_on_local_disk
from trellis.storage.objects.folders import FOLDER_SETTLED_NS, Folders, FolderWalk, WalkEntry
from trellis.storage.objects.group_puts import READ_FLAGS, GroupPuts, store_error
from trellis.storage.objects.keys import checked_key, checked_page, file_path, is_key
from trellis.storage.objects.probe import prove_conditional_writes
from trellis.storage.objects.store import (
    OBJECT_BYTES_MAX,
    OVERWRITE,
    PAGE_MAX,
    ObjectInfo,
    ObjectPage,
    ObjectPut,
    ObjectTooLarge,
    PutAnswer,
    PutCondition,
    PutRefused,
    PutStored,
    StoredObject,
    StoreError,
    count_failed_puts,
    measured_store,
)

THREADS = 4
ETAGS_KEPT = 20_000
RECENT_MAX = 2_048
"""How many small objects that were read lately are kept."""
RECENT_BYTES_MAX = 16 * 1024
"""A larger object is not kept, and always read in a thread."""
RECENT_SETTLED_NS = 100_000_000
"""How old a small file on a local disk is at least when its times say whether it was changed since.

Linux stamps files with the time of its last tick, of which it makes 100 to 1,000 a second.
"""
COARSE_NS = 1_000_000
"""Times that are multiples of this may come from a file system that keeps whole seconds."""
READ_AT_ONCE_MAX = 1024 * 1024
"""A larger file is hashed in chunks."""

T = TypeVar("T")


@partial(measured_store, counted={"put_many": count_failed_puts})
class LocalObjects:
    """Objects in a folder. Any number of processes may use the same one."""

    def __init__(
        self,
        path: Path,
        *,
        new_name: Callable[[], str],
        now_ns: Callable[[], int],
        object_bytes_max: int = OBJECT_BYTES_MAX,
    ) -> None:
        self._folders = Folders(path, new_name)
        self._folders.sweep()
        self._new_name = new_name
        self._bytes_max = object_bytes_max
        self._now_ns = now_ns
        self._etags = _Etags(now_ns)
        self._walk = FolderWalk(self._folders, now_ns)
        self._root = os.fsencode(path.absolute())
        self._is_on_local_disk = is_on_local_disk(path)
        """Whether files may be opened on the event loop. On a network file system every call may hang."""
        self._recent = LruCache[str, _RecentObject](RECENT_MAX)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="objects")
        self._puts = GroupPuts(self._folders, self._etag, object_bytes_max, self._threads.submit)
        self._url = path.absolute().as_uri()

    @property
    def url(self) -> str:
        return self._url

    async def get(self, key: str) -> StoredObject | None:
        if not self._is_on_local_disk:
            read = await self._run("get", checked_key(key), partial(self._get, key, _read))
            return None if read is None else read[0]
        kept = self._recent.get(key)
        if kept is not None and kept.is_unchanged():
            return kept.stored
        checked_key(key)
        began_ns = self._now_ns()
        try:
            read = self._get(key, _read_from_memory)
        except OSError:
            read = await self._run("get", key, partial(self._get, key, _read))
        if read is None:
            return None
        stored, file_status = read
        if stored.size <= RECENT_BYTES_MAX and _is_settled(file_status, began_ns):
            path = b"/".join((self._root, *file_path(key)))
            self._recent[key] = _RecentObject(stored, path, _identity(file_status))
        return stored

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._run("head", checked_key(key), partial(self._info, file_path(key), key))

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        checked_key(key)
        if len(body) > self._bytes_max:
            raise ObjectTooLarge(key=key, size=len(body), limit=self._bytes_max)
        ((answer,),) = await self._put_together([[ObjectPut(key, body, when)]])
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def put_many(self, sequences: Sequence[Sequence[ObjectPut]]) -> list[list[PutAnswer]]:
        return await self._put_together(sequences)

    async def _put_together(self, sequences: Sequence[Sequence[ObjectPut]]) -> list[list[PutAnswer]]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._puts.put_many, sequences)

    async def list(self, prefix: str, *, after: str | None = None, limit: int = PAGE_MAX) -> ObjectPage:
        checked_page(prefix, after, limit)
        return await self._run("list", prefix, partial(self._list, prefix, after, limit))

    async def delete(self, key: str) -> bool:
        return await self._run("delete", checked_key(key), partial(self._delete, key))

    async def probe(self) -> None:
        """Check that conditional writes work in this folder: not every file system supports links and locks."""
        await prove_conditional_writes(self, self._new_name())

    async def close(self) -> None:
        """Wait for running operations and close the folder."""
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        self._folders.close()

    async def _run(self, verb: str, key: str, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except OSError as error:
            raise store_error(error, verb, key) from error

    # -- in a thread ---------------------------------------------------------------------------------------------

    def _get(self, key: str, read: Callable[[int, int, int], bytes]) -> tuple[StoredObject, os.stat_result] | None:
        """An object, its bytes read by `read` from an open file with this size and limit; None if there is none."""
        path = file_path(key)
        try:
            fd, file_status = _checked_file(self._folders.open_file(path, READ_FLAGS))
        except FileNotFoundError:
            return None
        try:
            if file_status.st_size > self._bytes_max:
                raise ObjectTooLarge(key=key, size=file_status.st_size, limit=self._bytes_max)
            body = read(fd, file_status.st_size, self._bytes_max)
        finally:
            os.close(fd)
        if len(body) > self._bytes_max:  # the file has grown since
            raise ObjectTooLarge(key=key, size=len(body), limit=self._bytes_max)
        stored = StoredObject(key=key, body=body, etag=sha256(body), size=len(body), modified_at=_time(file_status))
        return stored, file_status

    def _info(self, path: tuple[bytes, ...], key: str) -> ObjectInfo | None:
        try:
            return self._look_at_open(self._folders.open_file(path, READ_FLAGS), key)
        except FileNotFoundError:
            return None

    def _look(self, folder: int, name: bytes, key: str) -> ObjectInfo:
        return self._look_at_open(os.open(name, READ_FLAGS, dir_fd=folder), key)

    def _look_at_open(self, fd: int, key: str) -> ObjectInfo:
        """The metadata of the object whose file is open. Closes it."""
        fd, file_status = _checked_file(fd)
        try:
            etag = self._etags.of(fd, file_status)
        finally:
            os.close(fd)
        return ObjectInfo(key=key, etag=etag, size=file_status.st_size, modified_at=_time(file_status))

    def _etag(self, folder: int, name: bytes) -> str | None:
        try:
            fd, file_status = _checked_file(os.open(name, READ_FLAGS, dir_fd=folder))
        except FileNotFoundError:
            return None
        try:
            return self._etags.of(fd, file_status)
        finally:
            os.close(fd)

    def _delete(self, key: str) -> bool:
        path = file_path(key)
        was_there = True
        try:
            with self._folders.folder(path[:-1]) as folder, self._folders.lock(key):
                try:
                    os.unlink(path[-1], dir_fd=folder)
                except FileNotFoundError:
                    was_there = False
                os.fsync(folder)
        except FileNotFoundError:
            return False
        if was_there:
            self._folders.prune(path[:-1])
        return was_there

    def _list(self, prefix: str, after: str | None, limit: int) -> ObjectPage:
        infos = tuple(islice(self._listed(prefix, after), limit + 1))
        return ObjectPage(infos[:limit], more=len(infos) > limit)

    def _listed(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        places = (place for place in self._walk.places(prefix, after) if is_key(place.key))
        for path, files in groupby(places, key=lambda place: place.path[:-1]):
            with contextlib.suppress(FileNotFoundError), self._folders.folder(path) as folder:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        yield self._look_at(folder, file)

    def _look_at(self, folder: int, file: WalkEntry) -> ObjectInfo:
        """Like `_look`, without opening a file whose hash is cached."""
        file_status = os.stat(file.path[-1], dir_fd=folder, follow_symlinks=False)
        etag = self._etags.known(file_status)
        if etag is None:
            return self._look(folder, file.path[-1], file.key)
        return ObjectInfo(key=file.key, etag=etag, size=file_status.st_size, modified_at=_time(file_status))


@dataclass(frozen=True, slots=True)
class _RecentObject:
    """An object as it was read, and the file that had its bytes."""

    stored: StoredObject
    path: bytes
    identity: tuple[int, ...]

    def is_unchanged(self) -> bool:
        """Whether the file is still the same.

        One system call in the thread of the caller: that costs a tenth of a read in another thread.
        """
        try:
            file_status = os.stat(self.path, follow_symlinks=False)  # noqa: PTH116 - a path in bytes
            return _identity(file_status) == self.identity
        except OSError:
            return False


class _Etags:
    """Caches the hash of a file while its inode, size and times stay the same."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._kept = LruCache[tuple[int, ...], str](ETAGS_KEPT)
        self._lock = threading.Lock()

    def known(self, status: os.stat_result) -> str | None:
        """The cached etag of an unchanged file; None if there is none."""
        with self._lock:
            return self._kept.get(_identity(status))

    def is_settled(self, status: os.stat_result) -> bool:
        """Whether the file's times say whether it was changed since: not if it was written a moment ago."""
        return self._now_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > FOLDER_SETTLED_NS

    def of(self, fd: int, status: os.stat_result) -> str:
        """The etag of an open file."""
        known = self.known(status)
        if known is not None:
            return known
        settled = self.is_settled(status)
        etag = _digest_of(fd, status.st_size)
        if settled:
            with self._lock:
                self._kept[_identity(status)] = etag
        return etag


def _checked_file(fd: int) -> tuple[int, os.stat_result]:
    """An open file and its metadata. If it is something else, it is closed; raises OSError."""
    file_status = os.fstat(fd)
    if not stat.S_ISREG(file_status.st_mode):
        os.close(fd)
        raise OSError(errno.EISDIR, "what is there is no regular file")
    return fd, file_status


def _read(fd: int, size: int, most: int) -> bytes:
    """Read a whole file that had this size.

    One that has grown since, because a person writes to it, is read to its end.

    A read may return less than requested; only an empty read means the end. Reads at most `most` + 1 bytes.
    """
    body = b""
    while len(body) <= most and (piece := os.read(fd, min(most, max(size, 2 * len(body))) + 1 - len(body))):
        body += piece
        if len(body) == size:
            break
    if len(body) < size:
        raise OSError(errno.EIO, f"it ends after {len(body)} of {size} bytes")
    return body


def _is_settled(status: os.stat_result, began_ns: int) -> bool:
    """Whether the times of a small file, which was read since `began_ns`, will say whether it is changed after that.

    They say it soon where they are fine: it is written within one tick, where the hash of a large file may be taken
    while a single long write goes on. So `_Etags` waits longer. A read may take longer than the time waited for, and the
    file may be written meanwhile: the time before it counts.
    """
    settled_ns = RECENT_SETTLED_NS if status.st_ctime_ns % COARSE_NS else FOLDER_SETTLED_NS
    return began_ns - max(status.st_mtime_ns, status.st_ctime_ns) > settled_ns


def _read_from_memory(fd: int, size: int, most: int) -> bytes:  # noqa: ARG001 - the form of `_read`
    """Read a small file that the system has in memory. Raises OSError if it has not, or if the file is not small.

    So the event loop never waits for the disk here, and a poll of a small document costs no thread.
    """
    if size > RECENT_BYTES_MAX or not hasattr(os, "RWF_NOWAIT"):
        raise OSError(errno.EAGAIN, "not read at once")
    buffer = bytearray(size + 1)
    if os.preadv(fd, [buffer], 0, os.RWF_NOWAIT) != size:
        raise OSError(errno.EAGAIN, "it has grown since, or a part is on the disk")
    return bytes(buffer[:size])


def _digest_of(fd: int, size: int) -> str:
    if size <= READ_AT_ONCE_MAX:
        return sha256(_read(fd, size, OBJECT_BYTES_MAX))
    with os.fdopen(os.dup(fd), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _time(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime, UTC)
