"""Object keys: which keys are valid, and the file names of keys on disk."""

import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from trellis.engine.errors import OptionInvalid
from trellis.storage.objects.store import PAGE_MAX, KeyInvalid

# Validating keys, and building them from parts. No other module does.
#
# A key is relative, with segments separated by `/`. No segment is empty, `.` or `..`. No character is a control
# character, a backslash or half of a surrogate pair. A key has at most 1024 bytes of UTF-8. So a key cannot climb or be
# absolute, and means the same in a folder, a bucket and a URL. Keys are ordered by code points, which equals the order
# of their UTF-8 bytes.

KEY_BYTES_MAX = 1024


def object_key(*parts: str) -> str:
    """A key from whole segments. A part with a `/` is refused, so that it cannot become two segments."""
    for part in parts:
        if "/" in part:
            raise KeyInvalid(key=_shown("/".join(parts)), reason=f"the part {_shown(part)!r} holds a slash")
    return checked_key("/".join(parts))


def checked_key(key: str) -> str:
    """The key; raises KeyInvalid."""
    reason = _problem(key)
    if reason is not None:
        raise KeyInvalid(key=_shown(key), reason=reason)
    return key


def is_key(key: str) -> bool:
    """Whether this is a valid key."""
    return _problem(key) is None


def checked_prefix(prefix: str) -> str:
    """The prefix of a key: empty, a key, or a key cut off anywhere; raises KeyInvalid."""
    whole, _, rest = prefix.rpartition("/")
    reason = _problem(whole) if "/" in prefix else None
    reason = reason or (_problem(rest) if rest not in {"", ".", ".."} else None) or _too_long(prefix)
    if reason is not None:
        raise KeyInvalid(key=_shown(prefix), reason=f"as the beginning of keys: {reason}")
    return prefix


def checked_page(prefix: str, after: str | None, limit: int) -> None:
    """Validate the arguments of a listing; raises KeyInvalid, OptionInvalid."""
    checked_prefix(prefix)
    if after is not None:
        checked_key(after)
    if not 1 <= limit <= PAGE_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"a page has 1 to {PAGE_MAX} objects")


def _problem(key: str) -> str | None:
    if len(key) > KEY_BYTES_MAX:
        return f"it has {len(key)} characters and {KEY_BYTES_MAX} bytes is the limit"
    plain = key.isascii() and key.isprintable() and "\\" not in key  # fast path for nearly every key
    problems = () if plain else (_bad_character(character) for character in key)
    return next(filter(None, problems), None) or _bad_segment(key.split("/")) or _too_long(key)


def _bad_character(character: str) -> str | None:
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "it is not valid Unicode"
    if kind == "Cc":
        return f"it holds the control character {character!r}"
    return "it holds a backslash; separate segments with /" if character == "\\" else None


def _bad_segment(segments: list[str]) -> str | None:
    if "" in segments:
        return "it is empty or has an empty segment (a / at the beginning, at the end or doubled)"
    return "it has the segment . or .." if "." in segments or ".." in segments else None


def _too_long(key: str) -> str | None:
    size = len(key.encode())
    return f"it has {size} bytes and {KEY_BYTES_MAX} is the limit" if size > KEY_BYTES_MAX else None


def _shown(key: str) -> str:
    """The key, shortened for a message."""
    return key if len(key) <= 200 else f"{key[:200]}…"


# File names of keys on disk: the segment's own name where possible, and a name for every valid key.
#
# A segment is its own file or folder name, with three reversible exceptions:
# - `%` is written `%25`, and a leading dot `%2E`: hidden names are reserved for the store.
# - An object without a dot gets `%file`, and a folder with one gets `%dir`, so that the keys `a` and `a/b` do not
#   collide.
# - A segment too long for a file system continues inside a folder `…%more`.
#
# Long segments are cut at positions that depend only on the text before the cut. So no name is a prefix of another
# one's cut, and walking each folder in the order of its pieces visits all keys in byte order.

CUT_BYTES = 236
"""A part ends with the character that reaches this length: at most 239 bytes, or 244 with `%more`, of the usual 255."""
CUT_WEIGHT_MAX = 4
"""The most bytes that a character adds to a name."""
FOLDERS_KEPT = 4_096
"""How many segments of folders are kept with their names."""


class NameKind(StrEnum):
    """What a name on disk represents."""

    FILE = "%file"
    FOLDER = "%dir"
    MORE = "%more"


@dataclass(frozen=True, slots=True)
class StoredName:
    """A parsed name on disk: its piece of the key, and its kind."""

    text: str
    kind: NameKind

    @property
    def piece(self) -> str:
        """The part of the key that this name adds."""
        return self.text + "/" if self.kind is NameKind.FOLDER else self.text


def file_path(key: str) -> tuple[bytes, ...]:
    """The folder names and the file name of a validated key, from the store's folder down."""
    *folders, last = key.split("/")
    names = [name for folder in folders for name in _folder_names(folder)]
    return (*names, *_segment(last, NameKind.FILE))


@lru_cache(FOLDERS_KEPT)
def _folder_names(segment: str) -> tuple[bytes, ...]:
    """The names of a folder's segment, kept because the keys of a run share theirs."""
    return tuple(_segment(segment, NameKind.FOLDER))


def read_name(name: bytes) -> StoredName | None:
    """Parse a name on disk; None for one that this store would not create."""
    try:
        written = name.decode()
    except UnicodeDecodeError:
        return None
    if len(name) == len(written) < CUT_BYTES and written and written[0] != "." and "%" not in written:
        return StoredName(
            written, NameKind.FILE if "." in written else NameKind.FOLDER
        )  # fast path for nearly every name
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
    """Where the part that fills a name ends; None if the whole segment fits."""
    if len(segment) * CUT_WEIGHT_MAX < CUT_BYTES:  # fast path for nearly every segment
        return None
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
