"""Rules of a draft: its fields, its target, and whether it keeps the rules that came with it."""

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
    ValidationRule,
    pattern,
)
from trellis.artifacts.snapshot import Snapshot
from trellis.nlm.passages import blocks
from trellis.nlm.provider import Language
from trellis.storage.memory.layout import LAYER_1

# The fields of a draft: its texts by path, one field by its path, and the whole of it in a plain form. The draft itself stays as it came.
#
# A draft is read in three forms: plain fields (`summary`, `text`, `reasoning`), as an agent drafts it (`agents.output`: the same, with
# `change`, `citations` and `flags`), and as a proposal is published (`runs.proposals`: `content.summary`, `content.change.text`, or for the
# memory `content.updates.0.content` with `content.grounds.0.reasoning`). What a published proposal says of itself, such as its id and its
# approval, is no text of the draft.

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


# What a draft's target names: a text of the snapshot, an entity, a file of memory, or a text that is still to be made. Nothing is guessed:
# a name that fits two things names neither.

FOUND_MAX = 5
LOGIC_FILE = "pseudocode.md"
"""Where approved logic goes, whatever the draft of an agent called it (`runs.targets`)."""
LAYER_1_FILES = frozenset(LAYER_1)
_NEW = re.compile(r"(?:notes|sources|artifacts)(?:/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}){1,5}\.(?:md|txt|json)")
_MAKES = frozenset({SafeOutput.PROPOSE_NOTE, SafeOutput.PROPOSE_SUMMARY, SafeOutput.PROPOSE_ARTIFACT})


class TargetKind(StrEnum):
    """What a name stands for."""

    SOURCE = "source"
    MEMORY = "memory"
    ENTITY = "entity"
    NEW = "new"
    DEFINITION = "definition"


@dataclass(frozen=True, slots=True)
class ResolvedTarget:
    """What a name means; `title` is how people call it."""

    kind: TargetKind
    ref: str
    title: str

    def to_dict(self) -> dict[str, Any]:
        """As the enriched draft shows it."""
        return {"kind": self.kind.value, "ref": self.ref, "title": self.title}


class TargetResolver:
    """Everything that a snapshot lets a draft name."""

    def __init__(self, snapshot: Snapshot, known: EntityFinder) -> None:
        self._agent = f"agents/{snapshot.agent_slug}/"
        self._known = known
        self._refs = {
            source.ref: (TargetKind.SOURCE, source.title or _heading(source.text)) for source in snapshot.sources
        }
        self._refs |= {file.ref: (TargetKind.MEMORY, _heading(file.text)) for file in snapshot.memory.files}
        self._entity_refs = {entity.slug: entity.ref for entity in snapshot.entities}

    def resolve(self, name: str, action: object = None) -> list[ResolvedTarget]:
        """All that a name may mean: one is an answer, none and several are not."""
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
        """Entities that the whole of the name stands for."""
        found = [match for match in self._known.matches(name, fuzzy=False) if match.confidence >= SURE_MIN]
        whole = [match for match in found if match.text.strip() == name.strip(" .,;:«»\"'")]
        return [ResolvedTarget(TargetKind.ENTITY, match.slug, self._known.names[match.slug]) for match in whole]

    def text_of(self, resolved: ResolvedTarget) -> str:
        """The ref of the text that a change would touch: an entity's own text if it has one in the snapshot."""
        about = self._entity_refs.get(resolved.ref) if resolved.kind is TargetKind.ENTITY else None
        return about if about is not None and about in self._refs else resolved.ref


def prose(resolved: list[ResolvedTarget]) -> str:
    """Several meanings in a sentence."""
    return ", ".join(one.ref for one in resolved[:FOUND_MAX])


def _special(name: str, action: object) -> ResolvedTarget | None:
    """A file that the snapshot need not hold."""
    # A published proposal changes several files of the memory at once: `open_loops.md+snapshot.md`.
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
    """The first heading of a text."""
    first = next((block.headings for block in blocks(text) if block.headings), ())
    return first[0] if first else ""


# Whether a draft keeps the rules that came with it: a pure decision, one issue for each rule that does not hold.

SHOWN_CHARS_MAX = 300
_SOURCE_KINDS = frozenset({TargetKind.SOURCE, TargetKind.MEMORY, TargetKind.NEW, TargetKind.DEFINITION})


def rule_violation(
    rule: ValidationRule, draft: Mapping[str, Any], names: TargetResolver, language: Language
) -> Issue | None:
    """What is wrong by one rule; None when it holds. A field that is not there breaks only `required`."""
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
    found = names.resolve(value, action)
    if len(found) != 1:
        return False
    match to:
        case ResolvesTo.SOURCE:
            return found[0].kind in _SOURCE_KINDS
        case ResolvesTo.ENTITY:
            return found[0].kind is TargetKind.ENTITY
        case ResolvesTo.ANY:
            return True
