"""Keys: the one place that says what an object may be called, and that makes keys out of parts.

A key is relative, of segments between `/`. No segment is empty, `.` or `..`; no character is a control character, a
backslash or half of a surrogate pair; the whole is at most 1024 bytes of UTF-8. So a key cannot climb, cannot be absolute,
and means the same in a folder, in a bucket and in a URL. The order of keys is the order of their code points, which is
the order of their UTF-8 bytes.
"""

import unicodedata

from trellis.engine.errors import OptionInvalid
from trellis.storage.objects import PAGE_MAX, KeyInvalid

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
