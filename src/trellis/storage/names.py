"""What keys are called on disk: natural names wherever possible, and a name for every legal key.

A segment is its own file or folder name, with three exceptions that any name can be read back from:
- `%` is written `%25`, and a dot at the beginning `%2E`: hidden names are the store's own;
- an object without a dot gets `%file`, a folder with one gets `%dir`, so that the keys `a` and `a/b` never want one name;
- a segment too long for a file system goes on inside a folder `…%more`.

Parts of long segments are cut where their own beginning says, so no name is the beginning of another's cut, and walking
each folder in the order of the pieces walks all keys in byte order.
"""

from dataclasses import dataclass
from enum import StrEnum

CUT_BYTES = 236
"""A part ends with the character that reaches this length: at most 239 bytes, with `%more` 244 of the usual 255."""


class NameKind(StrEnum):
    """What a name on disk stands for."""

    FILE = "%file"
    FOLDER = "%dir"
    MORE = "%more"


@dataclass(frozen=True, slots=True)
class StoredName:
    """One name on disk, read: its piece of the key, and what it stands for."""

    text: str
    kind: NameKind

    @property
    def piece(self) -> str:
        """What the keys under this name have in common at this place."""
        return self.text + "/" if self.kind is NameKind.FOLDER else self.text


def file_path(key: str) -> tuple[bytes, ...]:
    """The names of the folders and the file of a checked key, from the store's folder down."""
    *folders, last = key.split("/")
    names = [name for folder in folders for name in _segment(folder, NameKind.FOLDER)]
    return (*names, *_segment(last, NameKind.FILE))


def read_name(name: bytes) -> StoredName | None:
    """What a name on disk stands for; None for one this store would not give."""
    try:
        written = name.decode()
    except UnicodeDecodeError:
        return None
    if len(name) == len(written) < CUT_BYTES and written and written[0] != "." and "%" not in written:
        return StoredName(
            written, NameKind.FILE if "." in written else NameKind.FOLDER
        )  # nearly every name, and far sooner read
    kind = next((kind for kind in NameKind if written.endswith(kind)), None)
    escaped = written.removesuffix(kind) if kind else written
    kind = kind or (NameKind.FILE if "." in escaped else NameKind.FOLDER)
    read = StoredName(escaped.replace("%2E", ".").replace("%25", "%"), kind)
    full = _cut(read.text) == len(read.text) if kind is NameKind.MORE else _cut(read.text) is None
    return read if full and _written(read.text, kind) == name else None


def _segment(segment: str, kind: NameKind) -> list[bytes]:
    names: list[bytes] = []
    while (end := _cut(segment)) is not None:
        names.append(_written(segment[:end], NameKind.MORE))
        segment = segment[end:]
    return [*names, _written(segment, kind)]


def _cut(segment: str) -> int | None:
    """Where the part ends that fills a name; None if all of it fits."""
    size = 0
    for index, character in enumerate(segment):
        size += 3 if character == "%" or (character == "." and not index) else len(character.encode())
        if size >= CUT_BYTES:
            return index + 1
    return None


def _written(text: str, kind: NameKind) -> bytes:
    escaped = text.replace("%", "%25")
    if escaped.startswith("."):
        escaped = "%2E" + escaped[1:]
    plain = (kind is NameKind.FILE and "." in escaped) or (kind is NameKind.FOLDER and escaped and "." not in escaped)
    return (escaped if plain else escaped + kind).encode()
