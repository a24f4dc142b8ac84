"""Keys of objects: what an object may be called, and the file names that keys have on disk."""

import unicodedata
from dataclasses import dataclass
from enum import StrEnum

from trellis.engine.errors import OptionInvalid
from trellis.storage.objects.store import PAGE_MAX, KeyInvalid

# Keys: the one place that says what an object may be called, and that makes keys out of parts.
#
# A key is relative, of segments between `/`. No segment is empty, `.` or `..`; no character is a control character, a
# backslash or half of a surrogate pair; the whole is at most 1024 bytes of UTF-8. So a key cannot climb, cannot be absolute,
# and means the same in a folder, in a bucket and in a URL. The order of keys is the order of their code points, which is
# the order of their UTF-8 bytes.

KEY_BYTES_MAX = 1024


def object_key(*parts: str) -> str:
    """A key out of whole segments; a part that holds a `/` is refused, so that no part can become two."""
    for part in parts:
        if "/" in part:
            raise KeyInvalid(key=_shown("/".join(parts)), reason=f"the part {_shown(part)!r} holds a slash")
    return checked_key("/".join(parts))


def checked_key(key: str) -> str:
    """The key itself; raises KeyInvalid."""
    reason = _problem(key)
    if reason is not None:
        raise KeyInvalid(key=_shown(key), reason=reason)
    return key


def is_key(key: str) -> bool:
    """Whether it is one."""
    return _problem(key) is None


def checked_prefix(prefix: str) -> str:
    """The beginning of a key: empty, or a key, or a key cut off at any place; raises KeyInvalid."""
    whole, _, rest = prefix.rpartition("/")
    reason = _problem(whole) if "/" in prefix else None
    reason = reason or (_problem(rest) if rest not in {"", ".", ".."} else None) or _too_long(prefix)
    if reason is not None:
        raise KeyInvalid(key=_shown(prefix), reason=f"as the beginning of keys: {reason}")
    return prefix


def checked_page(prefix: str, after: str | None, limit: int) -> None:
    """What a listing is asked for; raises KeyInvalid, OptionInvalid."""
    checked_prefix(prefix)
    if after is not None:
        checked_key(after)
    if not 1 <= limit <= PAGE_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"a page has 1 to {PAGE_MAX} objects")


def _problem(key: str) -> str | None:
    if len(key) > KEY_BYTES_MAX:
        return f"it has {len(key)} characters and {KEY_BYTES_MAX} bytes is the limit"
    plain = key.isascii() and key.isprintable() and "\\" not in key  # nearly every key, and far sooner said
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
    """Short enough for a message."""
    return key if len(key) <= 200 else f"{key[:200]}…"


# What keys are called on disk: natural names wherever possible, and a name for every legal key.
#
# A segment is its own file or folder name, with three exceptions that any name can be read back from:
# - `%` is written `%25`, and a dot at the beginning `%2E`: hidden names are the store's own;
# - an object without a dot gets `%file`, a folder with one gets `%dir`, so that the keys `a` and `a/b` never want one name;
# - a segment too long for a file system goes on inside a folder `…%more`.
#
# Parts of long segments are cut where their own beginning says, so no name is the beginning of another's cut, and walking
# each folder in the order of the pieces walks all keys in byte order.

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
