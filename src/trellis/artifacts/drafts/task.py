"""The task behind an artifact: its one question, the call that asks it, and the stored answer."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pydantic

from trellis.agents.offline.phrases import language_of
from trellis.artifacts.content import STORABLE, JobType, StoredModel
from trellis.artifacts.drafts.draft_rules import texts_of
from trellis.artifacts.drafts.entities import with_unknown
from trellis.artifacts.drafts.phrases import clipped, filled_sentence
from trellis.artifacts.payloads import BriefPayload, PreprocessPayload, QueuePayload, ResearchPayload, read_payload
from trellis.artifacts.snapshot import SNAPSHOT_BYTES_MAX, Snapshot, SourceRef, SourceText
from trellis.engine.text import storable
from trellis.nlm.citations import ANSWER_CHARS_MAX, CITATIONS_MAX, EXCERPT_CHARS_MAX, verify
from trellis.nlm.errors import NlmError, NlmGarbage, NlmTimeout
from trellis.nlm.provider import (
    PASSAGES_MAX,
    QUESTION_CHARS_MAX,
    SOURCES_MAX,
    AnswerFlag,
    Citation,
    Language,
    NlmAnswer,
    NlmProvider,
    NlmQuestion,
    NlmSource,
    NlmUsage,
)

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
    agent_slug: str
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
        """The sources in the form a provider takes."""
        return tuple(NlmSource(source.ref, source.text) for source in self.sources)

    def to_question(self) -> NlmQuestion:
        """The question in the form a provider takes."""
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
        """Builds the stored form of a verified answer."""
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
        """Returns the answer in the form providers return."""
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
    """Asks the provider once, within `deadline_s`. Raises NlmError; `is_transient` says whether a retry may help."""
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


def is_transient(error: NlmError) -> bool:
    """Whether the same job may succeed later. Unlike an agent's tool, a job can be executed again after a timeout."""
    return error.retries or isinstance(error, NlmTimeout)


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
            said = " ".join(texts_of(payload.proposal_draft).values()) or "?"
            return filled_sentence(_language(payload), "look_up", text=clipped(said, GIST_CHARS_MAX))


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
