"""The fields of a draft: its texts by path, one field by its path, and the whole of it in a plain form. The draft itself stays as it came.

A draft is read in three forms: plain fields (`summary`, `text`, `reasoning`), as an agent drafts it (`agents.output`: the same, with
`change`, `citations` and `flags`), and as a proposal is published (`runs.proposals`: `content.summary`, `content.change.text`, or for the
memory `content.updates.0.content` with `content.grounds.0.reasoning`). What a published proposal says of itself, such as its id and its
approval, is no text of the draft.
"""

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, cast

TEXTS_MAX = 200
ONE_LINE = frozenset({"action", "target", "summary", "title", "operation", "section"})
"""Fields that a person reads on one line."""
FIRST = ("summary", "title", "text", "content", "body", "description")
"""What says most about a draft, in this order."""
CITATIONS = "citations"
CONTENT = "content"
NO_PROSE = frozenset({"action", "target", "operation", CITATIONS})
SIGNS = NO_PROSE | frozenset({"flags", "type", "file", "section", "loop_id", "run_id"})
"""Fields inside a published proposal that no person wrote to be read."""
PATHS: Mapping[str, tuple[str, ...]] = {
    "action": ("action",),
    "summary": ("summary", "content.summary"),
    "text": ("text", "content.text", "content.change.text", "content.updates.*.content"),
    "reasoning": ("reasoning", "content.reasoning", "content.grounds.*.reasoning"),
    CITATIONS: (CITATIONS, "content.citations", "content.grounds.*.citations"),
}
"""Where the forms of a draft have what a proposal needs."""


def values_at(draft: Mapping[str, Any], name: str) -> dict[str, object]:
    """The values of a field, by path, wherever the draft's form has it."""
    found: dict[str, object] = {}
    for path in PATHS[name]:
        before, many, after = path.partition(".*.")
        listed = value_at(draft, before) if many else None
        size = len(cast("list[object]", listed)) if isinstance(listed, list) else 0
        paths = [f"{before}.{at}.{after}" for at in range(min(size, TEXTS_MAX))] if many else [path]
        found |= {one: value for one in paths if (value := value_at(draft, one)) is not None}
    return found


def is_published(draft: Mapping[str, Any]) -> bool:
    """Whether a draft has the form of a published proposal."""
    return isinstance(draft.get(CONTENT), dict) and bool(
        {"change", "updates"}.intersection(cast("dict[str, object]", draft[CONTENT]))
    )


def is_cited(path: str) -> bool:
    """Whether a path lies in citations: others' words."""
    return CITATIONS in path.split(".")


def texts_of(draft: Mapping[str, Any]) -> dict[str, str]:
    """The texts that say something, by path, those that say most first. Citations are others' words and not among them."""
    published = is_published(draft)
    found = [(path, text) for path, text in _walk("", draft) if text.strip() and _is_prose(path, published=published)]
    found.sort(key=lambda pair: _rank(pair[0], published=published))
    return dict(found[:TEXTS_MAX])


def _is_prose(path: str, *, published: bool) -> bool:
    names = path.split(".")
    if published:
        return names[0] == CONTENT and SIGNS.isdisjoint(names)
    # An agent's own draft says in `change` how the text is meant, in one word.
    return names[0] not in NO_PROSE and path not in {"change", "flags", "section", "loop_id"} and names[0] != "flags"


def _rank(path: str, *, published: bool) -> int:
    name = path.rpartition(".")[2] if published else path.partition(".")[0]
    return FIRST.index(name) if name in FIRST else len(FIRST)


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
