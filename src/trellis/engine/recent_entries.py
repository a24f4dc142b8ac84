"""A bounded cache of recent entries. The least recently used entry is removed first."""

from collections import OrderedDict
from typing import Generic, TypeVar

REMEMBERED_MAX = 20_000

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A bounded LRU cache. Callers must be able to read a removed entry again, or repeat its work safely."""

    def __init__(self, limit: int = REMEMBERED_MAX) -> None:
        self._limit = limit
        self._kept: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __getitem__(self, key: K) -> V:
        self._kept.move_to_end(key)
        return self._kept[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def get(self, key: K) -> V | None:
        return self[key] if key in self._kept else None

    def drop(self, key: K) -> None:
        """Remove this key, if present."""
        self._kept.pop(key, None)
