"""Rules for a proposal draft: how its fields are read, what its target means, and which validation rules it breaks."""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import pydantic

from trellis.agents.definition import SafeOutput
from trellis.agents.drafts import DEFINITION_FILE
from trellis.artifacts.content import Issue
from trellis.artifacts.drafts.entities import SURE_MIN, EntityFinder
from trellis.artifacts.drafts.phrases import clipped, filled_sentence
from trellis.artifacts.payloads import (
    MatchesRule,
    MaxCharsRule,
    OneOfRule,
    RequiredRule,
    ResolvesRule,
    ResolvesTo,
    Snapshot,
    ValidationRule,
    pattern,
)
from trellis.nlm.passages import blocks
from trellis.nlm.provider import Language
from trellis.storage.memory.layout import LAYER_1

# Fields of a draft: its texts by path, one value by its path, and the draft in a normalised form. The draft never
# changes.
#
# A draft has one of three forms: plain fields (`summary`, `text`, `reasoning`); as an agent writes it (`agents.run_io`:
# the same, with `change`, `citations` and `flags`); or as a proposal is published (`runs.proposals`: `content.summary`,
# `content.change.text`, or for the memory `content.updates.0.content` with `content.grounds.0.reasoning`). Metadata of
# a published proposal, such as its id and its approval, is no text of the draft.

TEXTS_MAX = 200
ONE_LINE = frozenset({"action", "target", "summary", "title", "operation", "section"})
"""Fields that are shown on one line."""
FIRST = ("summary", "title", "text", "content", "body", "description")
"""Fields that say most about a draft, most important first."""
CITATIONS = "citations"
CONTENT = "content"
NO_PROSE = frozenset({"action", "target", "operation", CITATIONS})
SIGNS = NO_PROSE | frozenset({"flags", "type", "file", "section", "loop_id", "run_id"})
"""Fields of a published proposal that are not prose."""
PATHS: Mapping[str, tuple[str, ...]] = {
    "action": ("action",),
    "summary": ("summary", "content.summary"),
    "text": ("text", "content.text", "content.change.text", "content.updates.*.content"),
    "reasoning": ("reasoning", "content.reasoning", "content.grounds.*.reasoning"),
    CITATIONS: (CITATIONS, "content.citations", "content.grounds.*.citations"),
}
"""Paths of each field in the three forms of a draft."""


def values_at(draft: Mapping[str, Any], name: str) -> dict[str, object]:
    """Returns the values of a field by path, in whichever form the draft has."""
    values: dict[str, object] = {}
    for path in PATHS[name]:
        before, many, after = path.partition(".*.")
        listed = value_at(draft, before) if many else None
        size = len(cast("list[object]", listed)) if isinstance(listed, list) else 0
        paths = [f"{before}.{at}.{after}" for at in range(min(size, TEXTS_MAX))] if many else [path]
        values |= {one: value for one in paths if (value := value_at(draft, one)) is not None}
    return values


def is_published(draft: Mapping[str, Any]) -> bool:
    """Whether a draft has the form of a published proposal."""
    return isinstance(draft.get(CONTENT), dict) and bool(
        {"change", "updates"}.intersection(cast("dict[str, object]", draft[CONTENT]))
    )


def is_cited(path: str) -> bool:
    """Whether a path is inside citations, which are quoted words."""
    return CITATIONS in path.split(".")


def texts_of(draft: Mapping[str, Any]) -> dict[str, str]:
    """Returns the prose texts by path, most important first, without citations."""
    published = is_published(draft)
    texts = [(path, text) for path, text in _walk("", draft) if text.strip() and _is_prose(path, published=published)]
    texts.sort(key=lambda pair: _rank(pair[0], published=published))
    return dict(texts[:TEXTS_MAX])


def _is_prose(path: str, *, published: bool) -> bool:
    names = path.split(".")
    if published:
        return names[0] == CONTENT and SIGNS.isdisjoint(names)
    # In an agent's own draft, `change` names the kind of change in one word.
    return names[0] not in NO_PROSE and path not in {"change", "flags", "section", "loop_id"} and names[0] != "flags"


def _rank(path: str, *, published: bool) -> int:
    name = path.rpartition(".")[2] if published else path.partition(".")[0]
    return FIRST.index(name) if name in FIRST else len(FIRST)


def every_text(draft: Mapping[str, Any]) -> dict[str, str]:
    """Returns every text by its path, in the draft's order, including empty ones."""
    return dict(list(_walk("", draft))[:TEXTS_MAX])


def value_at(draft: Mapping[str, Any], path: str) -> object:
    """Returns the value at a path such as `content.text` or `tags.0`; None if absent.

    A field whose own name is the dotted path takes precedence.
    """
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
    """Whether a value is empty. Zero and false are not."""
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())


def normalised(value: object, name: str = "") -> Any:
    """Normalises the texts in a value.

    Unicode NFC, LF line ends, no surrounding white space, and a single line for fields in `ONE_LINE`.
    """
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


# What the target of a draft means: a text of the snapshot, an entity, a memory file, or a text still to be created. An
# ambiguous name resolves to nothing.

FOUND_MAX = 5
LOGIC_FILE = "pseudocode.md"
"""The file that approved logic is written to, whatever an agent's draft called it (`runs.targets`)."""
LAYER_1_FILES = frozenset(LAYER_1)
_NEW = re.compile(r"(?:notes|sources|artifacts)(?:/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}){1,5}\.(?:md|txt|json)")
_MAKES = frozenset({SafeOutput.PROPOSE_NOTE, SafeOutput.PROPOSE_SUMMARY, SafeOutput.PROPOSE_ARTIFACT})


class TargetKind(StrEnum):
    """What a target is."""

    SOURCE = "source"
    MEMORY = "memory"
    ENTITY = "entity"
    NEW = "new"
    DEFINITION = "definition"


@dataclass(frozen=True, slots=True)
class ResolvedTarget:
    """What a name means. `title` is its name for people."""

    kind: TargetKind
    ref: str
    title: str

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "ref": self.ref, "title": self.title}


class TargetResolver:
    """Resolves names that a draft may use, from the snapshot."""

    def __init__(self, snapshot: Snapshot, known: EntityFinder) -> None:
        self._agent = f"agents/{snapshot.agent_slug}/"
        self._known = known
        self._refs = {
            source.ref: (TargetKind.SOURCE, source.title or _heading(source.text)) for source in snapshot.sources
        }
        self._refs |= {file.ref: (TargetKind.MEMORY, _heading(file.text)) for file in snapshot.memory.files}
        self._entity_refs = {entity.slug: entity.ref for entity in snapshot.entities}

    def resolve(self, name: str, action: object = None) -> list[ResolvedTarget]:
        """Returns everything a name may mean. Only a single result counts as resolved."""
        plain = " ".join(name.split()).removeprefix(self._agent)
        if plain in self._refs:
            return [self._text(plain)]
        if special := _special(plain, action):
            return [special]
        by_name = [self._text(ref) for ref in self._refs if _is_called(ref, plain)]
        by_title = [self._text(ref) for ref, (_, title) in self._refs.items() if _is_titled(title, plain)]
        return (by_name or by_title or self._entities(plain))[: FOUND_MAX + 1]

    def _text(self, ref: str) -> ResolvedTarget:
        kind, title = self._refs[ref]
        return ResolvedTarget(kind, ref, title or ref)

    def _entities(self, name: str) -> list[ResolvedTarget]:
        """Returns the entities that the whole name stands for."""
        matches = [match for match in self._known.matches(name, fuzzy=False) if match.confidence >= SURE_MIN]
        whole = [match for match in matches if match.text.strip() == name.strip(" .,;:«»\"'")]
        return [ResolvedTarget(TargetKind.ENTITY, match.slug, self._known.names[match.slug]) for match in whole]

    def text_of(self, resolved: ResolvedTarget) -> str:
        """Returns the ref of the text that a change would touch: for an entity, its own text if it has one."""
        about = self._entity_refs.get(resolved.ref) if resolved.kind is TargetKind.ENTITY else None
        return about if about is not None and about in self._refs else resolved.ref


def prose(resolved: list[ResolvedTarget]) -> str:
    """Lists several meanings in a sentence."""
    return ", ".join(one.ref for one in resolved[:FOUND_MAX])


def _special(name: str, action: object) -> ResolvedTarget | None:
    """Resolves a file that the snapshot need not contain."""
    # A published proposal may change several memory files at once: `open_loops.md+snapshot.md`.
    if action == SafeOutput.MEMORY_UPDATE and set(name.split("+")) <= LAYER_1_FILES:
        return ResolvedTarget(TargetKind.MEMORY, name, name)
    if action == SafeOutput.LOGIC_UPDATE and name in {DEFINITION_FILE, LOGIC_FILE}:
        return ResolvedTarget(TargetKind.DEFINITION, name, name)
    if isinstance(action, str) and action in _MAKES and _NEW.fullmatch(name):
        return ResolvedTarget(TargetKind.NEW, name, name)
    return None


def _is_called(ref: str, name: str) -> bool:
    """Whether a ref ends in this name: `04-repairs.md`, `04-repairs` and `repairs` all name `sources/04-repairs.md`."""
    last = ref.rpartition("/")[2].casefold()
    bare = last.rpartition(".")[0] or last
    wanted = name.casefold()
    return wanted in {last, bare, bare.lstrip("0123456789-_. ")} or ref.casefold().endswith(f"/{wanted}")


def _is_titled(title: str, name: str) -> bool:
    parts = (title, *title.split("/"))
    return any(part.strip().casefold() == name.casefold() for part in parts if part.strip())


def _heading(text: str) -> str:
    """Returns the first heading of a text."""
    first = next((block.headings for block in blocks(text) if block.headings), ())
    return first[0] if first else ""


# Validation rules: pure functions, one issue for each rule that is broken.

SHOWN_CHARS_MAX = 300
_SOURCE_KINDS = frozenset({TargetKind.SOURCE, TargetKind.MEMORY, TargetKind.NEW, TargetKind.DEFINITION})


def rule_violation(
    rule: ValidationRule, draft: Mapping[str, Any], names: TargetResolver, language: Language
) -> Issue | None:
    """Checks one rule. Returns None if it holds. A missing field breaks only `required`."""
    value = value_at(draft, rule.field)
    message = _message(rule, value, draft.get("action"), names, language)
    return Issue(field=rule.field, severity=rule.severity, message=message) if message else None


def _message(
    rule: ValidationRule, value: object, action: object, names: TargetResolver, language: Language
) -> str | None:
    if is_empty(value) and not isinstance(rule, RequiredRule):
        return None
    return None if _holds(rule, value, action, names) else _complaint(rule, value, language)


def _holds(rule: ValidationRule, value: object, action: object, names: TargetResolver) -> bool:
    match rule:
        case RequiredRule():
            return not is_empty(value)
        case MaxCharsRule():
            return not isinstance(value, str) or len(value) <= rule.value
        case MatchesRule():
            return _matches(rule.value, value)
        case OneOfRule():
            return any(type(value) is type(choice) and value == choice for choice in rule.value)
        case ResolvesRule():
            return isinstance(value, str) and _resolves(rule.value, value, action, names)


def _complaint(rule: ValidationRule, value: object, language: Language) -> str:
    match rule:
        case RequiredRule():
            return filled_sentence(language, "rule_required")
        case MaxCharsRule():
            return filled_sentence(language, "rule_max_chars", limit=rule.value, size=len(str(value)))
        case MatchesRule():
            return filled_sentence(language, "rule_matches", pattern=rule.value)
        case OneOfRule():
            return filled_sentence(
                language, "rule_one_of", choices=clipped(", ".join(map(str, rule.value)), SHOWN_CHARS_MAX)
            )
        case ResolvesRule():
            return filled_sentence(language, "rule_resolves", kind=filled_sentence(language, f"kind_{rule.value}"))


def _matches(wanted: str, value: object) -> bool:
    try:
        pattern(wanted).validate_python(value, strict=True)
    except pydantic.ValidationError:
        return False
    return True


def _resolves(to: ResolvesTo, value: str, action: object, names: TargetResolver) -> bool:
    entity = names.resolve(value, action)
    if len(entity) != 1:
        return False
    match to:
        case ResolvesTo.SOURCE:
            return entity[0].kind in _SOURCE_KINDS
        case ResolvesTo.ENTITY:
            return entity[0].kind is TargetKind.ENTITY
        case ResolvesTo.ANY:
            return True
