"""What a queue job is made from: its payload by job type, and the context snapshot of one execution."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import pydantic
import pydantic_core

from trellis.artifacts.content import (
    REF_CHARS_MAX,
    STORABLE,
    TITLE_CHARS_MAX,
    IssueSeverity,
    JobType,
    Slug,
    StoredInvalid,
    StoredModel,
    problems_of,
)
from trellis.engine.errors import PayloadInvalid
from trellis.engine.text import is_storable
from trellis.nlm.provider import CORPUS_CHARS_MAX, SOURCE_CHARS_MAX, SOURCES_MAX, Language, NlmSource

# The context snapshot of one execution of a queue job: the agent's memory, the entities, and the sources to cite.
#
# The orchestration layer writes a snapshot once, and the NLM backend reads it. Each ref names exactly one text, so a
# citation is unambiguous. The texts together fit a provider's limit, so every readable snapshot can be asked about.

SNAPSHOT_BYTES_MAX = 8 * 1024 * 1024
MEMORY_FILES_MAX = 20
MEMORY_CHARS_MAX = 200_000
ENTITIES_MAX = 200
ALIASES_MAX = 20
NAME_CHARS_MAX = 200


def _check_printable(ref: str) -> str:
    if not ref.strip() or not ref.isprintable():
        raise ValueError("a ref is printable text")
    return ref


SourceRef = Annotated[
    str, pydantic.Field(min_length=1, max_length=REF_CHARS_MAX), STORABLE, pydantic.AfterValidator(_check_printable)
]
EntitySlug = Annotated[Slug, pydantic.AfterValidator(_check_printable)]
EntityName = Annotated[str, pydantic.Field(min_length=1, max_length=NAME_CHARS_MAX), STORABLE]


class _StrictPayload(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class MemoryFile(_StrictPayload):
    """One file of the agent's memory, such as `memory/open_loops.md`."""

    ref: SourceRef
    text: Annotated[str, pydantic.Field(max_length=MEMORY_CHARS_MAX), STORABLE]


class MemorySnapshot(_StrictPayload):
    """The agent's memory at one version. `version` is None if it has no memory yet."""

    version: Annotated[str, pydantic.Field(max_length=100), STORABLE] | None = None
    files: Annotated[tuple[MemoryFile, ...], pydantic.Field(max_length=MEMORY_FILES_MAX)] = ()


class SnapshotEntity(_StrictPayload):
    """An entity of the request. An unknown one has its slug as name. `ref` is the text about it."""

    slug: EntitySlug
    name: EntityName
    aliases: Annotated[tuple[EntityName, ...], pydantic.Field(max_length=ALIASES_MAX)] = ()
    ref: SourceRef | None = None


class SourceText(_StrictPayload):
    """A text that may be cited."""

    ref: SourceRef
    text: Annotated[str, pydantic.Field(max_length=SOURCE_CHARS_MAX), STORABLE]
    title: Annotated[str, pydantic.Field(max_length=TITLE_CHARS_MAX), STORABLE] | None = None


class SnapshotInvalid(StoredInvalid):
    """This is no {what}: {problems}."""


class Snapshot(StoredModel):
    """The context from which a queue job is answered.

    `Snapshot.of(…)` takes plain values. Like `read`, it raises SnapshotInvalid.
    """

    what: ClassVar[str] = "context snapshot"
    bytes_max: ClassVar[int] = SNAPSHOT_BYTES_MAX
    invalid: ClassVar[type[StoredInvalid]] = SnapshotInvalid

    job_id: Annotated[str, pydantic.Field(min_length=1, max_length=200), STORABLE]
    epoch: Annotated[int, pydantic.Field(ge=0)]
    agent_slug: EntitySlug
    memory: MemorySnapshot = MemorySnapshot()
    entities: Annotated[tuple[SnapshotEntity, ...], pydantic.Field(max_length=ENTITIES_MAX)] = ()
    sources: Annotated[tuple[SourceText, ...], pydantic.Field(max_length=SOURCES_MAX)] = ()

    @pydantic.model_validator(mode="after")
    def _check_references(self) -> Self:
        refs = [*(source.ref for source in self.sources), *(file.ref for file in self.memory.files)]
        if len(set(refs)) != len(refs):
            raise ValueError("two texts have the same ref; give each its own")
        slugs = [entity.slug for entity in self.entities]
        if len(set(slugs)) != len(slugs):
            raise ValueError("two entities have the same slug; give each its own")
        if sum(len(source.text) for source in self.sources) > CORPUS_CHARS_MAX:
            raise ValueError(f"the sources together have more than {CORPUS_CHARS_MAX} characters")
        return self

    def corpus(self) -> tuple[NlmSource, ...]:
        return tuple(NlmSource(source.ref, source.text) for source in self.sources)


# Payloads of queue jobs by job type (D34, JQ-13). Everything is bounded; unknown fields and rules are refused.
#
#     RESEARCH             {query, sources[]?, constraints?}
#     BRIEF                {vision_text, entity_refs[], style_guide?}
#     PROPOSAL_PREPROCESS  {proposal_draft, validation_rules[]?}
#
# A rule is {"field": "target", "rule": …, "value": …, "severity": …}. A nested field is written "content.text".
# `required` has no value. `max_chars` has a number. `matches` has a pattern that may match anywhere (use ^ and $ for
# the whole text). `one_of` has a list. `resolves` has "source", "entity" or "any". Matching time is linear in the text
# for every pattern: look-around and back-references are not supported.

PAYLOAD_BYTES_MAX = 256 * 1024
QUERY_CHARS_MAX = 2_000
VISION_CHARS_MAX = 20_000
ENTITY_REFS_MAX = 50
SECTIONS_MAX = 20
SECTIONS_DEFAULT = 6
TOPICS_MAX = 20
TOPIC_CHARS_MAX = 200
WORDS_MIN = 30
WORDS_MAX = 2_000
WORDS_DEFAULT = 350
DRAFT_FIELDS_MAX = 100
DRAFT_BYTES_MAX = 128 * 1024
DRAFT_DEPTH_MAX = 8
FIELD_CHARS_MAX = 200
RULES_MAX = 50
PATTERNS_MAX = 10
PATTERN_CHARS_MAX = 200
PATTERN_REPEATS_MAX = 100
CHOICES_MAX = 50

_REPEATS = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def _check_has_word(text: str) -> str:
    if not any(letter.isalnum() for letter in text):
        raise ValueError("write at least one word")
    return text


HAS_WORD = pydantic.AfterValidator(_check_has_word)
Topic = Annotated[str, pydantic.Field(max_length=TOPIC_CHARS_MAX), STORABLE, HAS_WORD]
FieldName = Annotated[str, pydantic.Field(min_length=1, max_length=FIELD_CHARS_MAX), STORABLE]


class ResearchConstraints(_StrictPayload):
    """Constraints on a research brief. Its default language is the query's."""

    language: Language | None = None
    max_sections: Annotated[int, pydantic.Field(ge=1, le=SECTIONS_MAX)] = SECTIONS_DEFAULT
    focus: Annotated[tuple[Topic, ...], pydantic.Field(max_length=TOPICS_MAX)] = ()
    """Topics to cover besides the query. A topic that no source covers becomes an open question."""
    exclude: Annotated[tuple[Topic, ...], pydantic.Field(max_length=TOPICS_MAX)] = ()
    """Topics not to quote: sentences that contain all words of one of these are left out."""


class ResearchPayload(_StrictPayload):
    """A question to the agent's sources, or to some of them."""

    query: Annotated[str, pydantic.Field(max_length=QUERY_CHARS_MAX), STORABLE, HAS_WORD]
    sources: Annotated[tuple[SourceRef, ...], pydantic.Field(max_length=SOURCES_MAX)] = ()
    """Refs of sources. Empty: all sources of the agent."""
    constraints: ResearchConstraints = ResearchConstraints()


class StyleGuide(_StrictPayload):
    """How a brief is written: at most `words` long, and without the topics in `avoid`."""

    words: Annotated[int, pydantic.Field(ge=WORDS_MIN, le=WORDS_MAX)] = WORDS_DEFAULT
    language: Language | None = None
    title: Annotated[str, pydantic.Field(max_length=TOPIC_CHARS_MAX), STORABLE, HAS_WORD] | None = None
    avoid: Annotated[tuple[Topic, ...], pydantic.Field(max_length=TOPICS_MAX)] = ()


class BriefPayload(_StrictPayload):
    """A vision text and the entities it is about. Entities that the text names are included too."""

    vision_text: Annotated[str, pydantic.Field(max_length=VISION_CHARS_MAX), STORABLE, HAS_WORD]
    entity_refs: Annotated[tuple[EntitySlug, ...], pydantic.Field(max_length=ENTITY_REFS_MAX)]
    style_guide: StyleGuide = StyleGuide()


class ResolvesTo(StrEnum):
    """What a field may refer to."""

    SOURCE = "source"
    ENTITY = "entity"
    ANY = "any"


class _ValidationRuleBase(_StrictPayload):
    field: FieldName
    severity: IssueSeverity = IssueSeverity.ERROR


class RequiredRule(_ValidationRuleBase):
    """The field is present and not empty."""

    rule: Literal["required"]


class MaxCharsRule(_ValidationRuleBase):
    """The field has at most `value` characters."""

    rule: Literal["max_chars"]
    value: Annotated[int, pydantic.Field(ge=1, le=DRAFT_BYTES_MAX)]


class MatchesRule(_ValidationRuleBase):
    """The pattern matches somewhere in the field."""

    rule: Literal["matches"]
    value: Annotated[str, pydantic.Field(min_length=1, max_length=PATTERN_CHARS_MAX), STORABLE]

    @pydantic.field_validator("value")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        repeats = math.prod(int(most or least) for least, most in _REPEATS.findall(value))
        if repeats > PATTERN_REPEATS_MAX:
            raise ValueError(f"the pattern repeats something more than {PATTERN_REPEATS_MAX} times")
        try:
            pattern(value)
        except pydantic_core.SchemaError:
            raise ValueError("this is no pattern without look-around and back-references") from None
        return value


class OneOfRule(_ValidationRuleBase):
    """The field equals one of the values."""

    rule: Literal["one_of"]
    value: Annotated[
        tuple[Annotated[str, pydantic.Field(max_length=TOPIC_CHARS_MAX), STORABLE] | bool | int | float, ...],
        pydantic.Field(min_length=1, max_length=CHOICES_MAX),
    ]


class ResolvesRule(_ValidationRuleBase):
    """The field names a source or an entity of the snapshot."""

    rule: Literal["resolves"]
    value: ResolvesTo = ResolvesTo.ANY


ValidationRule = Annotated[
    RequiredRule | MaxCharsRule | MatchesRule | OneOfRule | ResolvesRule, pydantic.Field(discriminator="rule")
]


class PreprocessPayload(_StrictPayload):
    """A proposal draft, in plain or published form, and the rules to check it against."""

    proposal_draft: Annotated[dict[FieldName, Any], pydantic.Field(min_length=1, max_length=DRAFT_FIELDS_MAX)]
    validation_rules: Annotated[tuple[ValidationRule, ...], pydantic.Field(max_length=RULES_MAX)] = ()

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if _depth(self.proposal_draft) > DRAFT_DEPTH_MAX:
            raise ValueError(f"proposal_draft is nested deeper than {DRAFT_DEPTH_MAX} levels")
        if not all(is_storable(text) for text in _texts(self.proposal_draft)):
            raise ValueError("proposal_draft holds a zero byte or half a surrogate pair, which is no text")
        if len(json.dumps(self.proposal_draft, ensure_ascii=False).encode()) > DRAFT_BYTES_MAX:
            raise ValueError(f"proposal_draft has more than {DRAFT_BYTES_MAX} bytes")
        if sum(isinstance(rule, MatchesRule) for rule in self.validation_rules) > PATTERNS_MAX:
            raise ValueError(f"there are more than {PATTERNS_MAX} patterns in validation_rules")
        return self


QueuePayload = ResearchPayload | BriefPayload | PreprocessPayload

PAYLOAD_MODELS: Mapping[JobType, type[QueuePayload]] = MappingProxyType(
    {
        JobType.RESEARCH: ResearchPayload,
        JobType.BRIEF: BriefPayload,
        JobType.PROPOSAL_PREPROCESS: PreprocessPayload,
    }
)


EXAMPLES: Mapping[JobType, Mapping[str, Any]] = MappingProxyType(
    {
        JobType.RESEARCH: {
            "query": "At which relative humidity must TS-02 be kept?",
            "constraints": {"language": "en", "max_sections": 3, "focus": ["deed of loan"]},
        },
        JobType.BRIEF: {
            "vision_text": "A visitor should learn how the archive keeps TS-02 from drying out.",
            "entity_refs": ["TS-02"],
            "style_guide": {"words": 120, "language": "en"},
        },
        JobType.PROPOSAL_PREPROCESS: {
            "proposal_draft": {
                "target": "sources/06-humidity-and-storage.md",
                "summary": "Compare the sensor of cabinet C",
                "text": "Compare the sensor of cabinet C with a salt reference.",
            },
            "validation_rules": [
                {"field": "target", "rule": "resolves", "value": "source"},
                {"field": "text", "rule": "max_chars", "value": 40, "severity": "warning"},
            ],
        },
    }
)
"""One working example per type, for the demonstration garden."""


def read_payload(job_type: JobType, payload: Mapping[str, Any]) -> QueuePayload:
    """Returns the payload as the model of its type. Raises PayloadInvalid, an InputError."""
    try:
        body = json.dumps(dict(payload), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise PayloadInvalid(type=job_type.value, detail="it holds something that JSON cannot.") from None
    if len(body) > PAYLOAD_BYTES_MAX:
        detail = f"it has {len(body)} bytes and the limit is {PAYLOAD_BYTES_MAX}."
        raise PayloadInvalid(type=job_type.value, detail=detail)
    try:
        return PAYLOAD_MODELS[job_type].model_validate_json(body)
    except pydantic.ValidationError as error:
        detail = problems_of(error, PAYLOAD_MODELS[job_type])
        raise PayloadInvalid(type=job_type.value, detail=f"{detail}.") from None


@lru_cache(maxsize=100)
def pattern(value: str) -> pydantic.TypeAdapter[str]:
    """Compiles the pattern of a `matches` rule. Uses Rust's regex engine, linear in the text. Raises SchemaError."""
    return pydantic.TypeAdapter(Annotated[str, pydantic.StringConstraints(pattern=value)])


def _children(value: object) -> list[object]:
    """Returns the values in a dict or list."""
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []


def _depth(value: object) -> int:
    """Returns the nesting depth of lists and dicts. The JSON parser bounds it before this function does."""
    inside = _children(value)
    return 1 + max(map(_depth, inside)) if inside else 0


def _texts(value: object) -> Iterator[str]:
    """Yields every text in a value, including field names."""
    inside = _children(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from cast("dict[str, object]", value)
    for inner in inside:
        yield from _texts(inner)
