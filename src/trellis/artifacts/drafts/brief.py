"""Builds a brief (BRIEF): what the sources say about the things in a vision text.

The vision decides the subjects: entities it names count like the requested ones, and sentences that share words with it
come first. The body consists of the sources' own sentences, grouped by entity, as many as the style guide allows. If
the vision names nothing, the body is what the sources say about it. If they say nothing at all, the vision itself is
the body. Sentences are always whole. The only generated sentence says which entities no source mentions.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from trellis.agents.definition import SLUG
from trellis.agents.offline.comparison import names_in
from trellis.artifacts.content import ITEMS_MAX, ArtifactDraft, ArtifactType
from trellis.artifacts.drafts.entities import SURE_MIN, EntityFinder, NamedItems, with_unknown
from trellis.artifacts.drafts.material import (
    SourceMaterial,
    SourceQuotes,
    SourceSentence,
    build_draft,
    parts_of,
    sentences_text,
)
from trellis.artifacts.drafts.phrases import ABOUT, clipped, filled_sentence
from trellis.artifacts.drafts.task import GroundedAnswer, StructuringPrompt, StructuringTask
from trellis.artifacts.payloads import BriefPayload, SnapshotEntity
from trellis.nlm.passages import passages
from trellis.nlm.provider import Language, NlmSource, language_of
from trellis.nlm.words import stems

TITLE_CHARS_MAX = 60
TITLE_CUT_CHARS_MAX = 40
TITLE_WORDS_MAX = 6
"""A first sentence of the vision with at most this many words is used as title, if other sentences follow."""
OWN_WORDS_SHARE = 0.4
ENTITIES_TOLD_MAX = 20
MENTION_SCORE = 2.0
HEADING_SCORE = 1.0
ROW_SHARE = 0.8
OPEN_SHARE = 0.5
ROWS_UNTIL = 0.85
"""List items and table rows are added only until this share of the length is used: prose is preferred."""
CELLS_MIN = 2
STEMS_MIN = 3
LANGUAGE_BONUS = 1.25
"""Score factor for a sentence in the language of the brief."""


@dataclass(frozen=True, slots=True)
class _EntitySentences:
    """The source sentences about one entity, best first."""

    name: str
    sentences: tuple[SourceSentence, ...]


def build_brief(
    task: StructuringTask, payload: BriefPayload, prompt: StructuringPrompt, grounded: GroundedAnswer
) -> ArtifactDraft:
    """Builds the brief, never longer than its style guide allows."""
    style = payload.style_guide
    material = SourceMaterial(prompt.corpus(), exclude=style.avoid)
    named = material.names(payload.vision_text, task.snapshot.entities)
    entities = _entities(task, payload, named, material)
    known = EntityFinder(entities)
    slugs = _entity_slugs(payload, entities, known, named)
    wanted = [entity for entity in entities if entity.slug in slugs][:ENTITIES_TOLD_MAX]
    abouts = _sentences_by_entity(material, wanted, known, payload.vision_text, prompt.language)
    if not any(about.sentences for about in abouts):
        abouts += _answers(material, payload.vision_text, named)
    room = style.words
    told_of = any(about.sentences for about in abouts)
    paragraphs = [] if told_of else [_sentences_within(_vision(payload), room)]
    paragraphs += [
        _sentences_within(_sentences(grounded.own_words), min(room - _words(paragraphs), int(room * OWN_WORDS_SHARE)))
    ]
    silent = [about.name for about in abouts if not about.sentences]
    note = filled_sentence(prompt.language, "known_by_slug", names=", ".join(silent)) if silent else ""
    note = note if len(note.split()) <= room - _words(paragraphs) else ""
    chosen = _chosen(material, abouts, room - _words(paragraphs) - len(note.split()))
    paragraphs += [_paragraph(about, sentence) for about, sentence in zip(abouts, chosen, strict=True) if sentence]
    title = style.title or _title(payload.vision_text, _names(abouts))
    body = "\n\n".join(paragraph for paragraph in (*paragraphs, note) if paragraph) or title
    quotes = SourceQuotes()
    quotes.cite(grounded.citations if grounded.by_model else ())
    for sentence in (one for some in chosen for one in some):
        quotes.add(sentence.ref, sentence.excerpt)
    occurring = known.occurring(body)
    content = {
        "title": title,
        "body": body,
        "entity_map": {slug: known.written(slug, body) for slug in occurring[:ITEMS_MAX]},
        "word_count": len(body.split()),
    }
    return build_draft(
        ArtifactType.BRIEF,
        content,
        quotes,
        tags=["brief", *(["sources-silent"] if silent or not told_of else []), *grounded.tags, prompt.language],
        entity_refs=occurring,
    )


def _entities(
    task: StructuringTask, payload: BriefPayload, named: NamedItems, material: SourceMaterial
) -> tuple[SnapshotEntity, ...]:
    """Returns requested entities, known ones, and items that the vision names by a number that occurs in a source."""
    known = with_unknown(task.snapshot.entities, payload.entity_refs)
    written = {
        one for entity in known for form in (entity.name, entity.slug, *entity.aliases) for one in names_in(form)
    }
    numbers = sorted(number for number in named.numbers - written if SLUG.fullmatch(number))
    there = [number for number in numbers if material.speaks_of(NamedItems(frozenset({number})))]
    return (*known, *(SnapshotEntity(slug=number, name=number) for number in there))


def _entity_slugs(
    payload: BriefPayload, entities: Sequence[SnapshotEntity], known: EntityFinder, named: NamedItems
) -> frozenset[str]:
    """Returns the slugs of the entities that the brief is about."""
    numbered = (entity.slug for entity in entities if entity.slug in named.numbers)
    return frozenset((*payload.entity_refs, *known.occurring(payload.vision_text), *numbered))


def _answers(material: SourceMaterial, vision: str, named: NamedItems) -> list[_EntitySentences]:
    """Returns source sentences about a vision that names none of the sources' entities."""
    chosen = [one for part in parts_of(vision) for one in material.find(_topic(part) or part, named).chosen]
    best = [one.source for one in sorted(chosen, key=lambda one: one.order)]
    around = (one for fitting in best for one in material.passage(fitting))
    fitting = dict.fromkeys(one for one in (*best, *around) if not one.is_open)
    return [_EntitySentences("", tuple(fitting))] if fitting else []


def _topic(text: str) -> str:
    """Returns the topic that a sentence names; in Ukrainian with the preposition before it, which decides the case."""
    about = ABOUT.search(text)
    if about is None:
        return ""
    return text[about.end() if about[0].isascii() else about.start() :].strip(" .:,;")


def _words(paragraphs: Sequence[str]) -> int:
    return sum(len(paragraph.split()) for paragraph in paragraphs)


def _title(vision: str, names: Sequence[str]) -> str:
    """Chooses the title.

    In this order: the vision's heading or short first sentence, its topic, the names of its entities, its first words.
    """
    first_passage = next(iter(passages(NlmSource("vision", vision))), None)
    first = vision if first_passage is None else next(iter((*first_passage.headings, first_passage.sentences[0].shown)))
    is_title = first_passage is not None and (bool(first_passage.headings) or len(first_passage.sentences) > 1)
    if is_title and len(first.split()) <= TITLE_WORDS_MAX:
        return clipped(first, TITLE_CHARS_MAX).rstrip(".")
    topic = _topic(first)
    topic = topic if 1 < len(topic.split()) <= 2 * TITLE_WORDS_MAX else ", ".join(names)
    short = topic if any(letter.isalnum() for letter in topic) else first
    cut = clipped(short[:1].upper() + short[1:], TITLE_CHARS_MAX if short is topic else TITLE_CUT_CHARS_MAX)
    return cut.rstrip(".") or clipped(vision, TITLE_CHARS_MAX)


def _names(abouts: Sequence[_EntitySentences]) -> list[str]:
    """Returns the names for the title. A group without a name is called by the heading of its best sentence."""
    return [
        name
        for about in abouts
        if about.sentences and (name := about.name or next(iter(about.sentences[0].headings[-1:]), ""))
    ]


def _sentences(text: str) -> list[str]:
    return [sentence.shown for passage in passages(NlmSource("text", text)) for sentence in passage.sentences]


def _vision(payload: BriefPayload) -> list[str]:
    """Returns the vision's sentences, without those about topics that the style guide avoids."""
    avoided = [frozenset(stems(topic)) for topic in payload.style_guide.avoid]
    vision = _sentences(payload.vision_text) or [payload.vision_text]
    return [one for one in vision if not any(topic and topic <= frozenset(stems(one)) for topic in avoided)]


def _sentences_within(candidates: Sequence[str], words_max: int) -> str:
    """Returns the first sentences that fit. If not even the first one fits, it is cut at the last word that does."""
    kept: list[str] = []
    left = words_max
    for sentence in candidates:
        if len(sentence.split()) > left:
            break
        kept.append(sentence)
        left -= len(sentence.split())
    if candidates and not kept and words_max > 0:
        return " ".join(candidates[0].split()[:words_max]).rstrip(" ,;:-") + "…"
    return " ".join(kept)


def _sentences_by_entity(
    material: SourceMaterial, wanted: Sequence[SnapshotEntity], known: EntityFinder, vision: str, language: Language
) -> list[_EntitySentences]:
    """Assigns to each entity the sentences that name it or are under a heading that does. Each is assigned once."""
    scored: dict[str, list[tuple[float, SourceSentence]]] = {entity.slug: [] for entity in wanted}
    refs = {entity.slug: entity.ref for entity in wanted}

    @cache
    def under(heading: str) -> frozenset[str]:
        return _named(known, heading, refs)

    for sentence in material.all():
        relevance = _relevance_by_entity(sentence, known, refs, under(" / ".join(sentence.headings[-1:])))
        if not relevance or not _says_more_than_a_name(sentence):
            continue
        share = 1.0 + material.share(sentence, vision)
        kind = (ROW_SHARE if sentence.sentence.row else 1.0) * (OPEN_SHARE if sentence.is_open else 1.0)
        bonus = LANGUAGE_BONUS if language_of(sentence.shown) is language else 1.0
        for slug, score in relevance.items():
            scored[slug].append((score * share * kind * bonus, sentence))
    taken: set[tuple[str, int]] = set()
    by_entity: list[_EntitySentences] = []
    for entity in wanted:
        best = sorted(scored[entity.slug], key=lambda pair: (-pair[0], pair[1].place))
        own = tuple({one.shown: one for _, one in reversed(best) if one.place not in taken}.values())[::-1]
        taken |= {one.place for one in own}
        named = known.written(entity.slug, "\n".join((*own[0].headings, own[0].shown)) if own else "")
        by_entity.append(_EntitySentences(named, own))
    return by_entity


def _relevance_by_entity(
    sentence: SourceSentence, known: EntityFinder, refs: Mapping[str, str | None], headed: Collection[str]
) -> dict[str, float]:
    """Scores how much a sentence is about each entity."""
    relevance = dict.fromkeys(headed, HEADING_SCORE)
    for slug, ref in refs.items():
        # The source about an entity may have parts about other entities.
        if ref == sentence.ref and not names_in(" ".join((*sentence.headings[-1:], sentence.shown))):
            relevance[slug] = relevance.get(slug, 0.0) + HEADING_SCORE
    for slug in _named(known, sentence.shown, refs):
        relevance[slug] = relevance.get(slug, 0.0) + MENTION_SCORE
    return relevance


def _named(known: EntityFinder, text: str, slugs: Collection[str]) -> frozenset[str]:
    """Returns which of these entities a text names with high confidence."""
    matches = known.matches(text, fuzzy=False)
    return frozenset(match.slug for match in matches if match.slug in slugs and match.confidence >= SURE_MIN)


def _chosen(material: SourceMaterial, abouts: Sequence[_EntitySentences], words_max: int) -> list[list[SourceSentence]]:
    """Takes sentences from each entity in turn, each with the ones it depends on, while they fit. None is cut."""
    chosen: list[list[SourceSentence]] = [[] for _ in abouts]
    taken: set[tuple[str, int]] = set()
    left = words_max - sum(len(about.name.split()) for about in abouts if about.sentences)
    least = int(words_max * (1.0 - ROWS_UNTIL))
    for rows in (False, True):
        of_kind = [[sentence for sentence in about.sentences if sentence.sentence.row is rows] for about in abouts]
        for rank in range(max(map(len, of_kind), default=0)):
            for sentence, own in (
                (some[rank], own) for some, own in zip(of_kind, chosen, strict=True) if rank < len(some)
            ):
                run = [one for one in ([sentence] if rows else material.led(sentence)) if one.place not in taken]
                # The list mark of an item, or the mark for omitted text before the run, counts as a word.
                size = sum(len(one.shown.split()) + rows for one in run) + (not rows)
                if sentence in run and size <= left and not (rows and left < least):
                    own.extend(run)
                    taken |= {one.place for one in run}
                    left -= size
    return chosen


def _says_more_than_a_name(sentence: SourceSentence) -> bool:
    """Whether a sentence says more than a name.

    A row needs content beyond its first cell (a dash is none). A sentence needs at least `STEMS_MIN` words.
    """
    if not sentence.sentence.row:
        others = (word for word in sentence.shown.split() if not names_in(word))
        return len([stem for stem in stems(" ".join(others)) if len(stem) > 1]) >= STEMS_MIN
    cells = [cell.rpartition(": ")[2] for cell in sentence.shown.split("; ")]
    return len(cells) == 1 or sum(any(letter.isalnum() for letter in cell) for cell in cells) >= CELLS_MIN


def _paragraph(about: _EntitySentences, chosen: Sequence[SourceSentence]) -> str:
    """Formats the sentences about one entity: prose before lists, each in the order of the sources."""
    ordered = sorted(chosen, key=lambda one: (one.sentence.row, one.place))
    gap = "\n" if ordered[0].sentence.row else " "
    return f"{about.name}:{gap}{sentences_text(ordered)}" if about.name else sentences_text(ordered)
