"""What goes through the making of an artifact: the task, the one question, and the answer to it. Each is kept as bytes between stages.

The same task gives the same question, and the same question with the same answer gives the same draft, byte for byte: a stage that
is done again after a crash does nothing new.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pydantic

from trellis.artifacts.content import JobType
from trellis.artifacts.payloads import QueuePayload, read_payload
from trellis.artifacts.snapshot import SNAPSHOT_BYTES_MAX, Snapshot, SourceRef, SourceText
from trellis.artifacts.stored import STORABLE, StoredModel
from trellis.engine.text import storable
from trellis.nlm.citations import ANSWER_CHARS_MAX, CITATIONS_MAX, EXCERPT_CHARS_MAX
from trellis.nlm.provider import (
    PASSAGES_MAX,
    QUESTION_CHARS_MAX,
    SOURCES_MAX,
    Citation,
    Language,
    NlmAnswer,
    NlmQuestion,
    NlmSource,
    NlmUsage,
)

PROMPT_BYTES_MAX = SNAPSHOT_BYTES_MAX + 64 * 1024
"""The question comes on top of what the snapshot holds."""
ANSWERED_BYTES_MAX = 2 * 1024 * 1024
FLAGS_MAX = 2 * CITATIONS_MAX
FLAG_CHARS_MAX = 300
MODEL_CHARS_MAX = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuringTask:
    """One execution of a queue job, as the NLM backend has it."""

    job_type: JobType
    agent_slug: str
    payload: Mapping[str, Any]
    snapshot: Snapshot

    def asked(self) -> QueuePayload:
        """The payload as its type says; raises PayloadInvalid."""
        return read_payload(self.job_type, self.payload)


class StructuringPrompt(StoredModel):
    """The one question, and what it is asked of."""

    what: ClassVar[str] = "prompt"
    bytes_max: ClassVar[int] = PROMPT_BYTES_MAX

    question: Annotated[str, pydantic.Field(min_length=1, max_length=QUESTION_CHARS_MAX), STORABLE]
    sources: Annotated[tuple[SourceText, ...], pydantic.Field(max_length=SOURCES_MAX)]
    language: Language
    max_passages: Annotated[int, pydantic.Field(ge=1, le=PASSAGES_MAX)]

    def corpus(self) -> tuple[NlmSource, ...]:
        """The sources as a provider takes them."""
        return tuple(NlmSource(source.ref, source.text) for source in self.sources)

    def to_question(self) -> NlmQuestion:
        """As a provider takes it."""
        return NlmQuestion(
            text=self.question, sources=self.corpus(), language=self.language, max_passages=self.max_passages
        )


class StoredCitation(pydantic.BaseModel):
    """A citation that was found in its source."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    ref: SourceRef
    excerpt: Annotated[str, pydantic.Field(min_length=1, max_length=EXCERPT_CHARS_MAX), STORABLE]
    start: Annotated[int, pydantic.Field(ge=0)]
    end: Annotated[int, pydantic.Field(ge=0)]


class StoredAnswer(StoredModel):
    """What the provider said, with the citations that its sources hold."""

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
        """A verified answer in the form in which it is kept."""
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
        """As providers give it."""
        return NlmAnswer(
            text=self.text,
            citations=tuple(Citation(one.ref, one.excerpt, one.start, one.end) for one in self.citations),
            flags=self.flags,
            confident=self.confident,
            usage=NlmUsage(input_tokens=self.input_tokens, output_tokens=self.output_tokens),
            model=self.model,
        )
