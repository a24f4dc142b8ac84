"""The files of the local object store in the order of their keys, from any key on: what its listings are made of.

A page of a listing begins where the last one ended, and a folder has no order on disk: to go on in it, all of it must be read. So
the walk keeps the next names of a large folder while that stays the same, and a whole listing reads the folder once for each
`WINDOW` names and not once for each page.
"""

import bisect
import heapq
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from trellis.storage.folders import Folders
from trellis.storage.names import NameKind, read_name
from trellis.storage.objects import PAGE_MAX

FOLDER_SETTLED_NS = 2_000_000_000
"""What is younger than this may change again within one tick of its time stamps; nothing about it is kept."""
WINDOW = 20_000
WINDOWS_KEPT = 16
WORTH_KEEPING = 64
"""A folder with fewer names is read again as fast."""

_key = attrgetter("key")


@dataclass(frozen=True, slots=True)
class WalkEntry:
    """Something in the folder that a listing still has to look at; `key` is all of its key that is known."""

    path: tuple[bytes, ...]
    key: str
    kind: NameKind


@dataclass(frozen=True, slots=True)
class _FolderWindow:
    """The first places of a folder that may hold keys from `low` on, in their order; `whole` if none follow."""

    identity: tuple[int, ...]
    low: str
    places: list[WalkEntry]
    whole: bool

    def serves(self, low: str) -> bool:
        """Whether it says what comes first from there on."""
        return self.low <= low and (self.whole or low < self.places[-1].key)

    def since(self, low: str) -> Iterator[WalkEntry]:
        """The places from there on."""
        start = bisect.bisect_left(self.places, low, key=_key)
        # A folder whose keys begin as `low` does is at most one, and right before it: no other name shares all of its beginning.
        if start and _reaches(self.places[start - 1], low):
            start -= 1
        return (self.places[index] for index in range(start, len(self.places)))


class FolderWalk:
    """Walks the folder, from several threads if need be."""

    def __init__(self, folders: Folders, now_ns: Callable[[], int]) -> None:
        self._folders = folders
        self._now_ns = now_ns
        self._kept: OrderedDict[tuple[bytes, ...], _FolderWindow] = OrderedDict()
        self._lock = threading.Lock()

    def places(self, prefix: str, after: str | None) -> Iterator[WalkEntry]:
        """Every file whose key begins so and is greater: depth first, each folder in the order of its pieces."""
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
                kept = self._kept_for(folder.path, identity)
                if kept is not None and kept.serves(low):
                    return kept
                settled = now - changed_at > FOLDER_SETTLED_NS
                size = WINDOW if settled else PAGE_MAX
                places = heapq.nsmallest(size + 1, _read(fd, folder, low), key=_key)
        except FileNotFoundError:
            return _FolderWindow((), low, [], whole=True)  # it was emptied and removed meanwhile
        window = _FolderWindow(identity, low, places[:size], whole=len(places) <= size)
        if settled and len(places) >= WORTH_KEEPING:
            self._keep(folder.path, window)
        return window

    def _kept_for(self, path: tuple[bytes, ...], identity: tuple[int, ...]) -> _FolderWindow | None:
        with self._lock:
            window = self._kept.get(path)
            if window is None or window.identity != identity:
                return None
            self._kept.move_to_end(path)
            return window

    def _keep(self, path: tuple[bytes, ...], window: _FolderWindow) -> None:
        with self._lock:
            self._kept[path] = window
            self._kept.move_to_end(path)
            while len(self._kept) > WINDOWS_KEPT:
                self._kept.popitem(last=False)


def _state(fd: int) -> tuple[tuple[int, ...], int]:
    """What changes whenever the names in a folder do, and when they last did."""
    found = os.fstat(fd)
    identity = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
    return identity, max(found.st_mtime_ns, found.st_ctime_ns)


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
    """Whether it is a folder in which `low` lies."""
    return place.kind is not NameKind.FILE and low.startswith(place.key)


def _is_wanted(place: WalkEntry, prefix: str, after: str | None) -> bool:
    """Whether the listing needs this object, or anything in this folder."""
    if place.kind is NameKind.FILE:
        return place.key.startswith(prefix) and (after is None or place.key > after)
    reaches = place.key.startswith(prefix) or prefix.startswith(place.key)
    return reaches and (after is None or place.key > after or after.startswith(place.key))
