"""Durable files below one folder: writing them, and walking through them in key order."""

import bisect
import contextlib
import errno
import fcntl
import hashlib
import heapq
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import attrgetter
from pathlib import Path

from trellis.engine.private_files import PRIVATE_FOLDER, file_mode, folder_mode, share
from trellis.engine.recent_entries import LruCache
from trellis.storage.objects.file_systems import links_unnamed_files, spread_apart
from trellis.storage.objects.keys import NameKind, read_name
from trellis.storage.objects.open_below import OPEN_FOLDER, open_below
from trellis.storage.objects.parallel_sync import sync_all
from trellis.storage.objects.store import PAGE_MAX

# The file operations of the local object store. Invariants:
# - Every step down the tree uses a file descriptor and follows no links, so nothing outside the folder is reached.
# - A file becomes visible only after its bytes are synced: it is written under a scratch name, synced, and then linked
#   or renamed; then the folder is synced. After a kill between any two calls, either the old file or the new one is
#   there.
# - Before a write into a folder, or a statement about its content, the folder and every folder above it are synced. So
#   nothing relies on what a killed process left unsynced.
# - A scratch file with a name is locked by its writer while the writer lives. Unlocked ones can be swept.
# - A file that will be linked, not renamed, needs no scratch name. Where the file system allows, it gets its first name
#   when it becomes visible, and the system itself removes it if its writer dies before.
# - Locks are `flock`s on a fixed set of files. They hold across threads and processes and end with their owner.

OWN_FOLDER = b".trellis"
SCRATCH = b"scratch"
LOCKS = b"locks"
LOCK_FILES = 256
LOCK_WAIT_S = 10.0
LOCK_POLL_S = (0.001, 0.02)
SCRATCH_TRIES = 8
SWEEP_MAX = 10_000
SYNCED_MAX = 10_000
ABOVE_AT_ONCE = 64
"""Most folders that are opened to sync what leads to others."""

_MAKE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE_UNNAMED = os.O_WRONLY | getattr(os, "O_TMPFILE", 0) | os.O_CLOEXEC
_OPEN_DESCRIPTOR = b"/proc/self/fd/%d"
"""Where Linux shows an open file, so that it can be given a name."""
_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class FolderToWrite:
    """An open subfolder, and the folders on the way to it that a power cut might still take away.

    `unsynced` has their paths and their inodes. `Folders.sync_above` makes them safe.
    """

    names: tuple[bytes, ...]
    fd: int
    unsynced: tuple[tuple[tuple[bytes, ...], tuple[int, int]], ...]


@dataclass(frozen=True, slots=True)
class ScratchFile:
    """A file that readers do not see yet: its name in the scratch folder, if it has one, and its open descriptor."""

    name: bytes | None
    fd: int


class Folders:
    """A folder, and the hidden subfolder with scratch files and locks."""

    def __init__(self, path: Path, new_name: Callable[[], str]) -> None:
        path = path.absolute()
        missing = [above for above in path.parents if not above.exists()]
        path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        self._new_name = new_name
        self._path = path
        self._above = (path.parent, *(above.parent for above in missing))
        """Folders to sync before the first write, so that the root folder itself is not lost."""
        self._synced: dict[tuple[bytes, ...], tuple[int, int]] = {}
        """Folders that are synced with all folders above them, and their inodes.

        The inode is compared because another process may remove and recreate a folder.
        """
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        top = os.fstat(self._root).st_mode
        self._file_mode, self._folder_mode = file_mode(top), folder_mode(top)
        try:
            own = self._made(self._root, OWN_FOLDER)
            try:
                spread_apart(own)
                self._scratch = self._made(own, SCRATCH)
                self._locks = self._made(own, LOCKS)
            finally:
                os.close(own)
        except OSError:
            os.close(self._root)
            raise

    def close(self) -> None:
        for fd in (self._root, self._scratch, self._locks):
            os.close(fd)

    @contextlib.contextmanager
    def folder(self, names: Sequence[bytes]) -> Generator[int]:
        """Open a subfolder by its path; raises FileNotFoundError."""
        fd = self._open(names)
        try:
            yield fd
        finally:
            os.close(fd)

    def open_file(self, names: Sequence[bytes], flags: int) -> int:
        """Open a file by its path; raises FileNotFoundError."""
        return open_below(self._root, names, flags)

    def _open(self, names: Sequence[bytes]) -> int:
        return open_below(self._root, names, OPEN_FOLDER)

    def open_to_write(self, names: tuple[bytes, ...], *, make: bool) -> "FolderToWrite":
        """Open a subfolder for writes. Raises FileNotFoundError if it does not exist and `make` is False."""
        with contextlib.suppress(FileNotFoundError):
            fd = self._open(names)
            if self._synced.get(names) == _identity(fd):
                return FolderToWrite(names, fd, ())
            os.close(fd)
        for above in self._above:
            _sync_path(above)
        self._above = ()
        first, fd = self._open_deepest_synced(names)
        unsynced = list[tuple[tuple[bytes, ...], tuple[int, int]]]()
        for depth in range(first + 1, len(names) + 1):
            above = fd
            try:
                fd = self._step(above, names[:depth], make=make)
            finally:
                os.close(above)
            identity = _identity(fd)
            if self._synced.get(names[:depth]) != identity:
                unsynced.append((names[:depth], identity))
        if not names:
            self._keep(names, _identity(fd))
        return FolderToWrite(names, fd, tuple(unsynced))

    def _open_deepest_synced(self, names: tuple[bytes, ...]) -> tuple[int, int]:
        """Open the last folder above this one that is synced with all folders above it, or the top folder.

        Returns its depth and its descriptor.
        """
        for depth in reversed(range(1, len(names))):
            if names[:depth] in self._synced:
                with contextlib.suppress(FileNotFoundError):
                    fd = self._open(names[:depth])
                    if self._synced.get(names[:depth]) == _identity(fd):
                        return depth, fd
                    os.close(fd)
        return 0, self._open(())

    def _step(self, above: int, names: tuple[bytes, ...], *, make: bool) -> int:
        """Open the next folder down."""
        try:
            return os.open(names[-1], OPEN_FOLDER, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
            self._synced.pop(names, None)  # a new folder may reuse the inode of a removed one
            return self._made(above, names[-1])

    def sync_above(
        self, folders: "Iterable[FolderToWrite]", files: Sequence[int] = ()
    ) -> tuple[dict[tuple[bytes, ...], OSError], list[OSError | None]]:
        """Sync what leads to these folders, each folder once, and at the same time some open files.

        Returns what went wrong, by the path of the lost folder, and for each file. A folder that a deletion removed
        meanwhile is left out: nothing can be put into what was below it.
        """
        above: dict[tuple[bytes, ...], dict[tuple[bytes, ...], tuple[int, int]]] = {}
        for names, identity in (entry for folder in folders for entry in folder.unsynced):
            above.setdefault(names[:-1], {})[names] = identity
        problems: dict[tuple[bytes, ...], OSError] = {}
        of_files = list[OSError | None]()
        paths = list(above)
        for first in range(0, max(1, len(paths)), ABOVE_AT_ONCE):
            there = dict[tuple[bytes, ...], int]()
            with contextlib.ExitStack() as stack:
                for names in paths[first : first + ABOVE_AT_ONCE]:
                    try:
                        there[names] = stack.enter_context(self.folder(names))
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        problems |= dict.fromkeys(above[names], error)
                results = sync_all([*there.values(), *(() if first else files)])
            of_files += results[len(there) :]
            for names, problem in zip(there, results, strict=False):
                if problem is not None:
                    problems |= dict.fromkeys(above[names], problem)
                    continue
                for below, identity in above[names].items():
                    self._keep(below, identity)
        return problems, of_files

    def _made(self, above: int, name: bytes) -> int:
        """Open the folder with this name; create it if needed."""
        try:
            os.mkdir(name, self._folder_mode, dir_fd=above)
        except FileExistsError:
            return os.open(name, OPEN_FOLDER, dir_fd=above)
        fd = os.open(name, OPEN_FOLDER, dir_fd=above)
        share(fd, self._folder_mode)
        return fd

    def _keep(self, names: tuple[bytes, ...], identity: tuple[int, int]) -> None:
        if len(self._synced) >= SYNCED_MAX:
            self._synced.clear()
        self._synced[names] = identity

    @cached_property
    def _links_unnamed(self) -> bool:
        """Whether files without a name can be linked here. Tried once, before the first file that is to be linked."""
        if not hasattr(os, "O_TMPFILE") or not links_unnamed_files(self._path):
            return False
        name = self._new_name().encode()
        try:
            file = ScratchFile(None, os.open(b".", _MAKE_UNNAMED, self._file_mode, dir_fd=self._scratch))
            try:
                self.link(file, self._scratch, name)
            finally:
                self.drop_scratch(file)
            os.unlink(name, dir_fd=self._scratch)
        except OSError:
            return False
        return True

    def write_unnamed(self, body: bytes) -> "ScratchFile":
        """A new file with these bytes, for `link` alone. It is not synced.

        It has no name where the file system allows that: making and removing a scratch name costs more than the link.
        Its inode is near the folder of the locks, which nothing leaves: scratch files become versions that are replaced,
        and the inodes that they free would be looked through (`spread_apart`).
        """
        if not self._links_unnamed:
            return self.write_scratch(body)
        file = ScratchFile(None, os.open(b".", _MAKE_UNNAMED, self._file_mode, dir_fd=self._locks))
        try:
            share(file.fd, self._file_mode)
            _write(file.fd, body)
        except OSError:
            self.drop_scratch(file)
            raise
        return file

    def write_scratch(self, body: bytes) -> "ScratchFile":
        """A new file with these bytes, for `link` and `replace`. It is not synced, and locked until it is dropped."""
        for _ in range(SCRATCH_TRIES):
            name = self._new_name().encode()
            file = ScratchFile(name, os.open(name, _MAKE_FILE, self._file_mode, dir_fd=self._scratch))
            try:
                share(file.fd, self._file_mode)
                if _try_lock(file.fd) and os.fstat(file.fd).st_nlink:
                    _write(file.fd, body)
                    return file
            except OSError:
                self.drop_scratch(file)
                raise
            self.drop_scratch(file)  # a sweep locked it first
        raise OSError(errno.EBUSY, "scratch files are swept faster than they are made")

    def drop_scratch(self, file: "ScratchFile", *, renamed: bool = False) -> None:
        """Close a scratch file, and delete its name, if it has one, unless it was renamed."""
        try:
            if file.name is not None and not renamed:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.name, dir_fd=self._scratch)
        finally:
            os.close(file.fd)

    def link(self, file: "ScratchFile", folder: int, name: bytes) -> None:
        """Make the file visible under a free name; raises FileExistsError. The folder is not synced."""
        if file.name is None:
            os.link(_OPEN_DESCRIPTOR % file.fd, name, dst_dir_fd=folder, follow_symlinks=True)
            return
        os.link(file.name, name, src_dir_fd=self._scratch, dst_dir_fd=folder, follow_symlinks=False)

    def replace(self, file: "ScratchFile", folder: int, name: bytes) -> None:
        """Make the file, which has a name, visible in place of an existing one. The folder is not synced."""
        assert file.name is not None, "a file without a name cannot be renamed"
        os.replace(file.name, name, src_dir_fd=self._scratch, dst_dir_fd=folder)

    @contextlib.contextmanager
    def lock(self, key: str) -> Generator[None]:
        """Hold the exclusive lock of this key, across threads and processes; raises TimeoutError."""
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:2]) % LOCK_FILES
        fd = os.open(b"%02x" % number, _OPEN_LOCK, self._file_mode, dir_fd=self._locks)
        try:
            with contextlib.suppress(PermissionError):  # created by another user of the group
                share(fd, self._file_mode)
            _wait_for(fd)
            yield
        finally:
            os.close(fd)

    def prune(self, names: Sequence[bytes]) -> None:
        """Remove the folder if it is empty, and then empty folders above it."""
        with contextlib.suppress(OSError):  # not empty, or another process removed it first
            for depth in reversed(range(len(names))):
                with self.folder(names[:depth]) as above:
                    os.rmdir(names[depth], dir_fd=above)
                # Another process may make the folder again, unsynced, and the system may give it the same inode.
                self._synced.pop(tuple(names[: depth + 1]), None)

    def sweep(self) -> int:
        """Remove the scratch files of dead writers. Returns how many."""
        swept = 0
        with os.scandir(self._scratch) as entries:
            names = [entry.name for entry in islice(entries, SWEEP_MAX)]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._scratch)
                try:
                    if _try_lock(fd):
                        os.unlink(name, dir_fd=self._scratch)
                        swept += 1
                finally:
                    os.close(fd)
        return swept


def _identity(fd: int) -> tuple[int, int]:
    file_status = os.fstat(fd)
    return file_status.st_dev, file_status.st_ino


def _sync_path(path: Path) -> None:
    with contextlib.suppress(PermissionError):  # a folder without read permission cannot be synced
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write(fd: int, body: bytes) -> None:
    rest = memoryview(body)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(fd: int) -> None:
    """Poll, because a blocking `flock` has no timeout and its holder may be a stopped process."""
    deadline = time.monotonic() + LOCK_WAIT_S
    pause, longest = LOCK_POLL_S
    while not _try_lock(fd):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another writer has held the lock of this key for {LOCK_WAIT_S:g} s")
        time.sleep(pause)
        pause = min(pause * 2, longest)


# Walking through the files of the local object store in key order, from any key on. Listings are built on it.
#
# Each page of a listing starts where the last one ended, but folders are unordered on disk, so continuing means reading
# the whole folder. The walk therefore caches the next names of a large folder while it stays unchanged. A full listing
# then reads the folder once per `WINDOW` names, not once per page.

FOLDER_SETTLED_NS = 2_000_000_000
"""Anything modified more recently may change again within one tick of its timestamp, so it is not cached."""
WINDOW = 20_000
WINDOWS_KEPT = 16
WORTH_KEEPING = 64
"""A folder with fewer names is not cached: reading it again is as fast."""

_key = attrgetter("key")


@dataclass(frozen=True, slots=True)
class WalkEntry:
    """An entry that a listing still has to visit. `key` is the part of its key that is known."""

    path: tuple[bytes, ...]
    key: str
    kind: NameKind


@dataclass(frozen=True, slots=True)
class _FolderWindow:
    """The first entries of a folder that may hold keys from `low` on, in order.

    `whole` if there are no further ones.
    """

    identity: tuple[int, ...]
    low: str
    places: list[WalkEntry]
    whole: bool

    def serves(self, low: str) -> bool:
        """Whether it contains the first entry from `low` on."""
        return self.low <= low and (self.whole or low < self.places[-1].key)

    def since(self, low: str) -> Iterator[WalkEntry]:
        """The entries from `low` on."""
        start = bisect.bisect_left(self.places, low, key=_key)
        # At most one folder can be a prefix of `low`, and it comes right before.
        if start and _reaches(self.places[start - 1], low):
            start -= 1
        return (self.places[index] for index in range(start, len(self.places)))


class FolderWalk:
    """Walks through the folder. Thread-safe."""

    def __init__(self, folders: Folders, now_ns: Callable[[], int]) -> None:
        self._folders = folders
        self._now_ns = now_ns
        self._kept = LruCache[tuple[bytes, ...], _FolderWindow](WINDOWS_KEPT)
        self._lock = threading.Lock()

    def places(self, prefix: str, after: str | None) -> Iterator[WalkEntry]:
        """Every file whose key begins with `prefix` and is greater than `after`, in key order, depth first."""
        walks = [self._below(WalkEntry((), "", NameKind.FOLDER), prefix, after)]
        while walks:
            place = next(walks[-1], None)
            if place is None:
                walks.pop()
            elif place.kind is NameKind.FILE:
                yield place
            else:
                walks.append(self._below(place, prefix, after))

    def _below(self, folder: WalkEntry, prefix: str, after: str | None) -> Iterator[WalkEntry]:
        low = prefix if after is None else max(prefix, after)
        last: str | None = None
        while True:
            window = self._window(folder, low)
            for place in window.since(low):
                if place.key > prefix and not place.key.startswith(prefix):
                    return
                if place.key != last and _is_wanted(place, prefix, after):
                    yield place
            if window.whole:
                return
            low = last = window.places[-1].key

    def _window(self, folder: WalkEntry, low: str) -> _FolderWindow:
        now = self._now_ns()
        try:
            with self._folders.folder(folder.path) as fd:
                identity, changed_at = _state(fd)
                with self._lock:
                    kept = self._kept.get(folder.path)
                if kept is not None and kept.identity == identity and kept.serves(low):
                    return kept
                settled = now - changed_at > FOLDER_SETTLED_NS
                size = WINDOW if settled else PAGE_MAX
                places = heapq.nsmallest(size + 1, _read(fd, folder, low), key=_key)
        except FileNotFoundError:
            return _FolderWindow((), low, [], whole=True)  # it was removed meanwhile
        window = _FolderWindow(identity, low, places[:size], whole=len(places) <= size)
        if settled and len(places) >= WORTH_KEEPING:
            with self._lock:
                self._kept[folder.path] = window
        return window


def _state(fd: int) -> tuple[tuple[int, ...], int]:
    """A value that changes whenever the names in a folder do, and the time of the last change."""
    file_status = os.fstat(fd)
    identity = (file_status.st_dev, file_status.st_ino, file_status.st_mtime_ns, file_status.st_ctime_ns)
    return identity, max(file_status.st_mtime_ns, file_status.st_ctime_ns)


def _read(fd: int, folder: WalkEntry, low: str) -> Iterator[WalkEntry]:
    with os.scandir(fd) as entries:
        for entry in entries:
            raw = os.fsencode(entry.name)
            name = read_name(raw)
            if name is None:
                continue
            place = WalkEntry((*folder.path, raw), folder.key + name.piece, name.kind)
            is_right = entry.is_file if name.kind is NameKind.FILE else entry.is_dir
            if (place.key >= low or _reaches(place, low)) and is_right(follow_symlinks=False):
                yield place


def _reaches(place: WalkEntry, low: str) -> bool:
    """Whether this is a folder that would contain `low`."""
    return place.kind is not NameKind.FILE and low.startswith(place.key)


def _is_wanted(place: WalkEntry, prefix: str, after: str | None) -> bool:
    """Whether the listing needs this object, or anything in this folder."""
    if place.kind is NameKind.FILE:
        return place.key.startswith(prefix) and (after is None or place.key > after)
    reaches = place.key.startswith(prefix) or prefix.startswith(place.key)
    return reaches and (after is None or place.key > after or after.startswith(place.key))
