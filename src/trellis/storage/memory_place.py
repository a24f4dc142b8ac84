"""Where the memory of an instance is: what the setting TRELLIS_MEMORY may say. Imports nothing of git."""

from dataclasses import dataclass
from pathlib import Path

from trellis.engine.errors import SettingsInvalid
from trellis.storage.objects.keys import is_key

OBJECTS = "objects"
"""The value that means the instance's object store; `objects:PREFIX` names the beginning of the keys."""
PREFIX_DEFAULT = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemory:
    """A memory in the object store: the beginning of its keys, and this host's folder for the replica."""

    prefix: str
    cache: Path

    def __str__(self) -> str:
        return place_of(self.prefix)


def place_of(prefix: str) -> str:
    """A memory in the object store, as the setting names it."""
    return f"{OBJECTS}:{prefix}"


def shared_prefix(setting: str) -> str | None:
    """The beginning of the keys, if the setting means the object store; None if it is a path. Raises SettingsInvalid."""
    word, colon, prefix = setting.partition(":")
    if word != OBJECTS:
        return None
    if colon and not is_key(prefix):
        detail = (
            f"{prefix!r} cannot begin a key of the object store; use objects, or objects:PREFIX such as objects:memory"
        )
        raise SettingsInvalid(source="TRELLIS_MEMORY", detail=detail)
    return prefix or PREFIX_DEFAULT
