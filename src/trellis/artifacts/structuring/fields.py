"""The fields of a draft: its texts by path, one field by its path, and the whole of it in a plain form. The draft itself stays as it came."""

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, cast

TEXTS_MAX = 200
ONE_LINE = frozenset({"action", "target", "summary", "title", "operation", "section"})
"""Fields that a person reads on one line."""
FIRST = ("summary", "title", "text", "content", "body", "description")
"""What says most about a draft, in this order."""
CITATIONS = "citations"
NO_PROSE = frozenset({"action", "target", "operation", CITATIONS})


def texts_of(draft: Mapping[str, Any]) -> dict[str, str]:
    """The texts that say something, by path, those that say most first. Citations are others' words and not among them."""
    found = [(path, text) for path, text in _walk("", draft) if text.strip() and path.partition(".")[0] not in NO_PROSE]
    found.sort(key=lambda pair: FIRST.index(top) if (top := pair[0].partition(".")[0]) in FIRST else len(FIRST))
    return dict(found[:TEXTS_MAX])


def every_text(draft: Mapping[str, Any]) -> dict[str, str]:
    """Every text by its path, in the draft's order, the empty ones too."""
    return dict(list(_walk("", draft))[:TEXTS_MAX])


def value_at(draft: Mapping[str, Any], path: str) -> object:
    """The value at a path such as `content.text` or `tags.0`; None when there is none. A field named with the dots comes first."""
    if path in draft:
        return draft[path]
    value: object = draft
    for name in path.split("."):
        if isinstance(value, dict):
            value = cast("dict[str, object]", value).get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(cast("list[object]", value)):
            value = cast("list[object]", value)[int(name)]
        else:
            return None
    return value


def is_empty(value: object) -> bool:
    """Whether a value says nothing; zero and false say something."""
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())


def normalised(value: object, name: str = "") -> Any:
    """The same value with its texts in one form: composed letters, plain line ends, no white space around, one line where one is read."""
    if isinstance(value, dict):
        return {key: normalised(inner, key) for key, inner in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [normalised(inner, name) for inner in cast("list[object]", value)]
    if not isinstance(value, str):
        return value
    text = unicodedata.normalize("NFC", value).replace("\r\n", "\n").replace("\r", "\n").strip()
    return " ".join(text.split()) if name in ONE_LINE else text


def _walk(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in cast("dict[str, object]", value).items():
            yield from _walk(f"{path}.{name}" if path else name, inner)
    elif isinstance(value, list):
        for at, inner in enumerate(cast("list[object]", value)):
            yield from _walk(f"{path}.{at}", inner)
