"""What a draft's target names: a text of the snapshot, an entity, a file of memory, or a text that is still to be made. Nothing is guessed:
a name that fits two things names neither.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trellis.agents.definition import SafeOutput
from trellis.agents.drafting import DEFINITION_FILE
from trellis.artifacts.snapshot import Snapshot
from trellis.artifacts.structuring.entities import SURE_MIN, EntityFinder
from trellis.nlm.blocks import blocks
from trellis.storage.memory.layout import LAYER_1

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
