"""What a process remembers of what it saw last: so many entries, and the one not used for longest goes first."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A bounded memory. Whatever is forgotten can be read again, or is only done once more."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """What is known under this key."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Know this from now on."""
        self._kept[key] = value
        self._kept.move_to_end(key)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def drop(self, key: K) -> None:
        """Know nothing of it any more."""
        self._kept.pop(key, None)
