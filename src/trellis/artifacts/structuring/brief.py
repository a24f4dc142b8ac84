"""A brief: what somebody has in mind, and what the sources say about the entities it is about (BRIEF).

Sentences of the vision come first, then those of the sources, entity by entity, as many as the style guide has room for. All of
them are whole, and none is ours but the one that says which entities no source speaks of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trellis.agents.offline.wording import language_of
from trellis.artifacts.content import ITEMS_MAX, ArtifactType, Draft
from trellis.artifacts.payloads import BriefPayload
from trellis.artifacts.snapshot import Entity
from trellis.artifacts.structuring.entities import SURE_MIN, Known, with_unknown
from trellis.artifacts.structuring.grounding import Grounded
from trellis.artifacts.structuring.material import Material, Told
from trellis.artifacts.structuring.task import Prompt, Task
from trellis.artifacts.structuring.telling import Quotes, drafted, told_text
from trellis.artifacts.structuring.wording import clipped, say
from trellis.nlm.passages import passages
from trellis.nlm.provider import Language, Source
from trellis.nlm.words import stems

TITLE_CHARS_MAX = 100
VISION_SHARE = 0.45
"""How much of the body the vision may take while the sources have something to say."""
OWN_WORDS_SHARE = 0.4
ENTITIES_TOLD_MAX = 20
MENTION_SCORE = 2.0
HEADING_SCORE = 1.0
ROW_SHARE = 0.8
OPEN_SHARE = 0.5
ROWS_UNTIL = 0.85
"""Items and rows are added until this much of the room is used: a brief is prose where there is prose."""
CELLS_MIN = 2
LANGUAGE_BONUS = 1.25
"""What it is worth that a sentence is in the brief's language."""


@dataclass(frozen=True, slots=True)
class _About:
    """What the sources say about one entity, the best first."""

    name: str
    told: tuple[Told, ...]


def brief(task: Task, payload: BriefPayload, prompt: Prompt, grounded: Grounded) -> Draft:
    """The brief, never longer than its style guide wants."""
    style = payload.style_guide
    entities = with_unknown(task.snapshot.entities, payload.entity_refs)
    known = Known(entities)
    material = Material(prompt.corpus(), exclude=style.avoid)
    wanted = [entity for entity in entities if entity.slug in payload.entity_refs][:ENTITIES_TOLD_MAX]
    abouts = _abouts(material, wanted, known, payload.vision_text, prompt.language)
    vision = _vision(payload)
    room = style.words
    spare = room if not any(about.told for about in abouts) else int(room * VISION_SHARE)
    paragraphs = [_fitted(vision, spare)]
    own = _fitted(_sentences(grounded.own_words), min(room - _words(paragraphs), int(room * OWN_WORDS_SHARE)))
    paragraphs += [own]
    silent = [about.name for about in abouts if not about.told]
    note = say(prompt.language, "known_by_slug", names=", ".join(silent)) if silent else ""
    note = note if len(note.split()) <= room - _words(paragraphs) else ""
    chosen = _chosen(abouts, room - _words(paragraphs) - len(note.split()))
    paragraphs += [_paragraph(about, told) for about, told in zip(abouts, chosen, strict=True) if told]
    body = "\n\n".join(paragraph for paragraph in (*paragraphs, note) if paragraph) or _title(payload.vision_text)
    quotes = Quotes()
    quotes.cite(grounded.citations)
    for told in (one for some in chosen for one in some):
        quotes.add(told.ref, told.excerpt)
    occurring = known.occurring(body)
    content = {
        "title": style.title or _title(payload.vision_text),
        "body": body,
        "entity_map": {slug: known.written(slug, body) for slug in occurring[:ITEMS_MAX]},
        "word_count": len(body.split()),
    }
    return drafted(
        ArtifactType.BRIEF,
        content,
        quotes,
        tags=["brief", *(["sources-silent"] if silent else []), *grounded.tags, prompt.language],
        entity_refs=occurring,
    )


def _words(paragraphs: Sequence[str]) -> int:
    return sum(len(paragraph.split()) for paragraph in paragraphs)


def _title(vision: str) -> str:
    """The vision's first heading or sentence."""
    found = next(iter(passages(Source("vision", vision))), None)
    first = vision if found is None else next(iter((*found.headings, found.sentences[0].shown)))
    return clipped(first, TITLE_CHARS_MAX).rstrip(".") or clipped(vision, TITLE_CHARS_MAX)


def _sentences(text: str) -> list[str]:
    return [sentence.shown for passage in passages(Source("text", text)) for sentence in passage.sentences]


def _vision(payload: BriefPayload) -> list[str]:
    """The vision's sentences, without those that the style guide wants avoided."""
    avoided = [frozenset(stems(topic)) for topic in payload.style_guide.avoid]
    said = _sentences(payload.vision_text) or [payload.vision_text]
    return [one for one in said if not any(topic and topic <= frozenset(stems(one)) for topic in avoided)]


def _fitted(said: Sequence[str], words_max: int) -> str:
    """The first sentences that fit; of a first one that does not fit, as many words as do."""
    kept: list[str] = []
    left = words_max
    for sentence in said:
        if len(sentence.split()) > left:
            break
        kept.append(sentence)
        left -= len(sentence.split())
    if said and not kept and words_max > 0:
        return " ".join(said[0].split()[:words_max]).rstrip(" ,;:-") + "…"
    return " ".join(kept)


def _abouts(
    material: Material, wanted: Sequence[Entity], known: Known, vision: str, language: Language
) -> list[_About]:
    """For each entity the sentences that name it or stand under a heading that does; each sentence for one entity."""
    scored: dict[str, list[tuple[float, Told]]] = {entity.slug: [] for entity in wanted}
    for told in material.all():
        if told.sentence.row and not _is_telling(told):
            continue
        for slug, score in _speaks_of(told, known, {entity.slug: entity.ref for entity in wanted}).items():
            share = 1.0 + material.share(told, vision)
            kind = (ROW_SHARE if told.sentence.row else 1.0) * (OPEN_SHARE if told.is_open else 1.0)
            bonus = LANGUAGE_BONUS if language_of(told.shown) is language else 1.0
            scored[slug].append((score * share * kind * bonus, told))
    taken: set[tuple[str, int]] = set()
    made: list[_About] = []
    for entity in wanted:
        best = sorted(scored[entity.slug], key=lambda pair: (-pair[0], pair[1].place))
        mine = tuple({one.shown: one for _, one in reversed(best) if one.place not in taken}.values())[::-1]
        taken |= {one.place for one in mine}
        named = known.written(entity.slug, "\n".join((*mine[0].headings, mine[0].shown)) if mine else "")
        made.append(_About(named, mine))
    return made


def _speaks_of(told: Told, known: Known, wanted: dict[str, str | None]) -> dict[str, float]:
    """How much a sentence is about each entity."""
    found = {slug: HEADING_SCORE for slug, ref in wanted.items() if ref == told.ref}
    for text, score in ((" / ".join(told.headings[-1:]), HEADING_SCORE), (told.shown, MENTION_SCORE)):
        for match in known.matches(text, fuzzy=False):
            if match.slug in wanted and match.confidence >= SURE_MIN:
                found[match.slug] = found.get(match.slug, 0.0) + score
    return found


def _chosen(abouts: Sequence[_About], words_max: int) -> list[list[Told]]:
    """Sentences in turn from each entity, as long as they fit; what does not fit is left out, not cut."""
    chosen: list[list[Told]] = [[] for _ in abouts]
    left = words_max - sum(len(about.name.split()) for about in abouts if about.told)
    least = int(words_max * (1.0 - ROWS_UNTIL))
    for rows in (False, True):
        of_kind = [[told for told in about.told if told.sentence.row is rows] for about in abouts]
        for rank in range(max(map(len, of_kind), default=0)):
            for told, mine in (
                (some[rank], mine) for some, mine in zip(of_kind, chosen, strict=True) if rank < len(some)
            ):
                size = len(told.shown.split()) + rows
                if size <= left and not (rows and left < least):
                    mine.append(told)
                    left -= size
    return chosen


def _is_telling(told: Told) -> bool:
    """Whether a row says more than its first cell: a dash is no word."""
    cells = [cell.rpartition(": ")[2] for cell in told.shown.split("; ")]
    return len(cells) == 1 or sum(any(letter.isalnum() for letter in cell) for cell in cells) >= CELLS_MIN


def _paragraph(about: _About, chosen: Sequence[Told]) -> str:
    """What is said about one entity, prose before lists, each in the order of the sources."""
    ordered = sorted(chosen, key=lambda one: (one.sentence.row, one.place))
    gap = "\n" if ordered[0].sentence.row else " "
    return f"{about.name}:{gap}{told_text(ordered)}"
