"""The task behind an artifact: its one question, the call that asks it, the stored answer, and its usable part."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pydantic

from trellis.artifacts.content import STORABLE, JobType, StoredModel
from trellis.artifacts.drafts.draft_rules import texts_of
from trellis.artifacts.drafts.entities import with_unknown
from trellis.artifacts.drafts.phrases import clipped, filled_sentence
from trellis.artifacts.payloads import (
    SNAPSHOT_BYTES_MAX,
    BriefPayload,
    PreprocessPayload,
    QueuePayload,
    ResearchPayload,
    Snapshot,
    SourceRef,
    SourceText,
    read_payload,
)
from trellis.engine.text import storable
from trellis.nlm import extractive
from trellis.nlm.citations import ANSWER_CHARS_MAX, CITATIONS_MAX, EXCERPT_CHARS_MAX, verify
from trellis.nlm.passages import sentences
from trellis.nlm.provider import (
    PASSAGES_MAX,
    QUESTION_CHARS_MAX,
    SOURCES_MAX,
    AnswerFlag,
    Citation,
    Language,
    NlmAnswer,
    NlmGarbage,
    NlmProvider,
    NlmQuestion,
    NlmSource,
    NlmTimeout,
    NlmUsage,
    language_of,
)
from trellis.nlm.words import stems, words

# The data of the stages: task, question and answer. Each is stored as bytes between stages.
#
# The same task gives the same question, and the same question and answer give the same draft, byte for byte. A stage
# that is repeated after a crash therefore produces nothing new.

PROMPT_BYTES_MAX = SNAPSHOT_BYTES_MAX + 64 * 1024
"""The question is added to the content of the snapshot."""
ANSWERED_BYTES_MAX = 2 * 1024 * 1024
FLAGS_MAX = 2 * CITATIONS_MAX
FLAG_CHARS_MAX = 300
MODEL_CHARS_MAX = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuringTask:
    """One execution of a queue job, as the NLM backend receives it."""

    job_type: JobType
    payload: Mapping[str, Any]
    snapshot: Snapshot

    def asked(self) -> QueuePayload:
        """Returns the payload as the model of its type. Raises PayloadInvalid."""
        return read_payload(self.job_type, self.payload)


class StructuringPrompt(StoredModel):
    """The one question of a task, with its sources."""

    what: ClassVar[str] = "prompt"
    bytes_max: ClassVar[int] = PROMPT_BYTES_MAX

    question: Annotated[str, pydantic.Field(min_length=1, max_length=QUESTION_CHARS_MAX), STORABLE]
    sources: Annotated[tuple[SourceText, ...], pydantic.Field(max_length=SOURCES_MAX)]
    language: Language
    max_passages: Annotated[int, pydantic.Field(ge=1, le=PASSAGES_MAX)]

    def corpus(self) -> tuple[NlmSource, ...]:
        return tuple(NlmSource(source.ref, source.text) for source in self.sources)

    def to_question(self) -> NlmQuestion:
        return NlmQuestion(
            text=self.question, sources=self.corpus(), language=self.language, max_passages=self.max_passages
        )


class StoredCitation(pydantic.BaseModel):
    """A citation that was verified in its source."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    ref: SourceRef
    excerpt: Annotated[str, pydantic.Field(min_length=1, max_length=EXCERPT_CHARS_MAX), STORABLE]
    start: Annotated[int, pydantic.Field(ge=0)]
    end: Annotated[int, pydantic.Field(ge=0)]


class StoredAnswer(StoredModel):
    """A provider's answer with its verified citations."""

    what: ClassVar[str] = "answer"
    bytes_max: ClassVar[int] = ANSWERED_BYTES_MAX

    text: Annotated[str, pydantic.Field(max_length=ANSWER_CHARS_MAX), STORABLE]
    citations: Annotated[tuple[StoredCitation, ...], pydantic.Field(max_length=CITATIONS_MAX)] = ()
    flags: Annotated[
        tuple[Annotated[str, pydantic.Field(max_length=FLAG_CHARS_MAX), STORABLE], ...],
        pydantic.Field(max_length=FLAGS_MAX),
    ] = ()
    confident: bool = False
    model: Annotated[str, pydantic.Field(max_length=MODEL_CHARS_MAX), STORABLE] = ""
    input_tokens: Annotated[int, pydantic.Field(ge=0)] = 0
    output_tokens: Annotated[int, pydantic.Field(ge=0)] = 0

    @classmethod
    def from_answer(cls, answer: NlmAnswer) -> "StoredAnswer":
        return cls(
            text=answer.text,
            citations=tuple(
                StoredCitation(ref=one.ref, excerpt=one.excerpt, start=one.start, end=one.end)
                for one in answer.citations
            ),
            flags=tuple((storable(flag) or "")[:FLAG_CHARS_MAX] for flag in answer.flags[:FLAGS_MAX]),
            confident=answer.confident,
            model=(storable(answer.model) or "")[:MODEL_CHARS_MAX],
            input_tokens=max(0, answer.usage.input_tokens),
            output_tokens=max(0, answer.usage.output_tokens),
        )

    def to_answer(self) -> NlmAnswer:
        return NlmAnswer(
            text=self.text,
            citations=tuple(Citation(one.ref, one.excerpt, one.start, one.end) for one in self.citations),
            flags=self.flags,
            confident=self.confident,
            usage=NlmUsage(input_tokens=self.input_tokens, output_tokens=self.output_tokens),
            model=self.model,
        )


# The one question of a task, and the one call that asks it.
#
# A question consists of words of the payload, with only stop words added: any other word would affect every ranking.
# Answers of every provider are verified here.

PASSAGES = 8
GIST_CHARS_MAX = 300
NAMES_MAX = 10


def build_prompt(task: StructuringTask) -> StructuringPrompt:
    """Builds the question and chooses its sources. Raises PayloadInvalid."""
    payload = task.asked()
    question = _question(task, payload)
    return StructuringPrompt(
        question=clipped(question, QUESTION_CHARS_MAX),
        sources=tuple(sorted(_sources(task, payload), key=lambda source: source.ref)),
        language=_language(payload),
        max_passages=PASSAGES,
    )


async def ask_provider(provider: NlmProvider, prompt: StructuringPrompt, *, deadline_s: float) -> StoredAnswer:
    """Asks the provider once, within `deadline_s`. Raises NlmError."""
    if deadline_s <= 0.0:
        raise NlmTimeout(provider=provider.name, reason="no time was left to ask")
    question = prompt.to_question()
    try:
        async with asyncio.timeout(deadline_s):
            prepared = await provider.prepare(question.sources)
            try:
                answer = await provider.query(prepared, question, deadline_s=deadline_s)
            finally:
                await provider.release(prepared)
    except TimeoutError:
        raise NlmTimeout(provider=provider.name, reason=f"{deadline_s:g} s were not enough") from None
    answer = verify(answer, prepared.sources)
    if not answer.text.strip() and AnswerFlag.NO_ANSWER not in answer.flags:
        raise NlmGarbage(provider=provider.name, reason="the answer is empty")
    return StoredAnswer.from_answer(answer)


def _question(task: StructuringTask, payload: QueuePayload) -> str:
    match payload:
        case ResearchPayload():
            return "\n".join((payload.query, *payload.constraints.focus))
        case BriefPayload():
            entities = with_unknown(task.snapshot.entities, payload.entity_refs)
            named = [entity.name for entity in entities if entity.slug in payload.entity_refs][:NAMES_MAX]
            about = clipped(payload.vision_text, GIST_CHARS_MAX)
            return (
                f"{filled_sentence(_language(payload), 'describe', names=', '.join(named))} {about}" if named else about
            )
        case PreprocessPayload():
            texts = " ".join(texts_of(payload.proposal_draft).values()) or "?"
            return filled_sentence(_language(payload), "look_up", text=clipped(texts, GIST_CHARS_MAX))


def _language(payload: QueuePayload) -> Language:
    match payload:
        case ResearchPayload():
            return payload.constraints.language or language_of(payload.query)
        case BriefPayload():
            return payload.style_guide.language or language_of(payload.vision_text)
        case PreprocessPayload():
            return language_of(" ".join(texts_of(payload.proposal_draft).values()))


def _sources(task: StructuringTask, payload: QueuePayload) -> tuple[SourceText, ...]:
    if isinstance(payload, ResearchPayload) and payload.sources:
        return tuple(source for source in task.snapshot.sources if source.ref in payload.sources)
    return task.snapshot.sources


# Decides which part of a provider's answer is usable. Its own words count only if the cited sources support them.
#
# A model's sentence is kept if every word with a digit and at least half of its words occur in the cited passages. In a
# language other than the passages', words cannot be compared: then only words with digits decide, and the draft is
# tagged `translated`. Everything else is dropped, and the draft says so. The extractive provider has no words of its
# own.

SHARE_MIN = 0.5
AROUND_CHARS = 600
"""How many characters around a citation count as its passage."""
OWN_WORDS_CHARS_MAX = 4_000
_MARK = re.compile(r"\s*\[\d{1,3}\]")


@dataclass(frozen=True, slots=True)
class GroundedAnswer:
    """The usable part of an answer."""

    citations: tuple[Citation, ...]
    own_words: str
    refused: bool
    """Whether a model read the sources and gave no answer that can be shown from them."""
    unproven: bool
    """Whether it did give an answer, which was dropped because no quotation of it stands in a source."""
    dropped: bool
    """Whether words of the provider were dropped."""
    by_model: bool
    """Whether a model chose the citations. The extractive provider only ranks words, which structuring does better."""
    tags: tuple[str, ...]

    def says(self, part: str) -> bool:
        """Whether the provider's own words address a part of the question."""
        wanted, own = set(stems(part)), set(stems(self.own_words))
        return bool(wanted) and len(wanted & own) >= SHARE_MIN * len(wanted)


def ground_answer(answer: NlmAnswer, sources: tuple[NlmSource, ...]) -> GroundedAnswer:
    """Returns the verified citations, and the provider's sentences that they support."""
    verified = verify(answer, sources)
    own = verified.model != extractive.NAME and AnswerFlag.NO_ANSWER not in verified.flags
    text = _MARK.sub("", verified.text) if own else ""
    own_sentences = [one.shown for one in sentences(text, 0, len(text))]
    evidence = _evidence(verified.citations, {source.ref: source.text for source in sources})
    foreign = bool(evidence) and all(language_of(one) is not language_of(verified.text) for one in evidence)
    kept = [sentence for sentence in own_sentences if evidence and _is_carried(sentence, evidence, foreign=foreign)]
    own_words = " ".join(kept)[:OWN_WORDS_CHARS_MAX]
    dropped = len(kept) < len(own_sentences)
    tags = (
        *(("ungrounded-dropped",) if dropped else ()),
        *(("translated",) if foreign and kept else ()),
        *(("citations-dropped",) if _lost_citations(verified.flags) else ()),
        *(("sources-cut",) if AnswerFlag.SOURCES_CUT in verified.flags else ()),
    )
    by_model = verified.model != extractive.NAME
    refused = not verified.citations and by_model
    unproven = refused and AnswerFlag.NO_ANSWER not in verified.flags
    return GroundedAnswer(verified.citations, own_words, refused, unproven, dropped, by_model, tags)


def _evidence(citations: tuple[Citation, ...], texts: dict[str, str]) -> list[str]:
    """Returns each citation with the text around it."""
    return [
        texts[one.ref][max(0, one.start - AROUND_CHARS) : one.end + AROUND_CHARS]
        for one in citations
        if one.ref in texts
    ]


def _is_carried(sentence: str, evidence: list[str], *, foreign: bool) -> bool:
    held = {word for text in evidence for word in words(text)}
    if any(word not in held for word in words(sentence) if any(letter.isdigit() for letter in word)):
        return False
    own = stems(sentence)
    carried = {stem for text in evidence for stem in stems(text)}
    return foreign or sum(stem in carried for stem in own) >= SHARE_MIN * len(own)


def _lost_citations(flags: tuple[str, ...]) -> bool:
    lost = (AnswerFlag.NOT_FOUND, AnswerFlag.TOO_SHORT, AnswerFlag.CITATIONS_CUT)
    return any(flag.partition(":")[0] in lost for flag in flags)
