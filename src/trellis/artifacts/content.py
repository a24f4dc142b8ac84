"""The content of artifacts by type, and models that are stored as bytes."""

import json
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

import pydantic

from trellis.engine.errors import InputError
from trellis.engine.field_names import fields_beside
from trellis.engine.text import is_storable, no_such_field
from trellis.storage.objects.canonical_json import encode

# Models stored as bytes: equal models give equal bytes, and reading returns what was written.
#
# Reading refuses invalid documents with one error class per kind of document. It never parses more bytes than its
# bound.

PROBLEMS_MAX = 5


def _check_storable(text: str) -> str:
    if not is_storable(text):
        raise ValueError("it holds a zero byte or half a surrogate pair, which is no text")
    return text


STORABLE = pydantic.AfterValidator(_check_storable)
"""Text that every ledger can store. Checked after length bounds, so that their messages count characters."""


def problems_of(error: pydantic.ValidationError, model: type[pydantic.BaseModel] | None = None) -> str:
    """Describes validation errors in one line, without the values. `model` is what the value should be."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)[:PROBLEMS_MAX]
    return "; ".join(_problem(one["loc"], one["type"], one["msg"], model) for one in errors)


def _problem(loc: tuple[int | str, ...], kind: str, message: str, model: type[pydantic.BaseModel] | None) -> str:
    if kind == "extra_forbidden":
        return no_such_field(loc, fields_beside(model, loc), separator="/")
    return f"{'/'.join(map(str, loc)) or 'all of it'}: {message.removeprefix('Value error, ')}"


class StoredInvalid(InputError):
    """This is no {what}: {problems}."""


class StoredModel(pydantic.BaseModel):
    """A model with a name for error messages and a size limit in bytes."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    what: ClassVar[str]
    bytes_max: ClassVar[int]
    invalid: ClassVar[type[StoredInvalid]] = StoredInvalid

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Decodes the model. Raises `invalid`."""
        return cls._parsed(cls._bounded(body))

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Builds the model from these values, as if they came from JSON. Raises `invalid`."""
        try:
            return cls._parsed(json.dumps(fields, ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError, RecursionError):
            raise cls.invalid(what=cls.what, problems="it holds something that JSON cannot") from None

    def to_bytes(self) -> bytes:
        """Encodes the model in its canonical form. Raises `invalid` if it is too large."""
        return self._bounded(encode(self.model_dump(mode="json")))

    @classmethod
    def _bounded(cls, body: bytes) -> bytes:
        if len(body) > cls.bytes_max:
            problems = f"it has {len(body)} bytes and the limit is {cls.bytes_max}"
            raise cls.invalid(what=cls.what, problems=problems)
        return body

    @classmethod
    def _parsed(cls, body: bytes) -> Self:
        try:
            return cls.model_validate_json(body)
        except pydantic.ValidationError as error:
            raise cls.invalid(what=cls.what, problems=problems_of(error, cls)) from None


# The content of each artifact type (document 000, 3.2; ART-2, JQ-13). Everything is bounded; invalid content is
# refused.

TITLE_CHARS_MAX = 500
TEXT_CHARS_MAX = 200_000
LINE_CHARS_MAX = 4_000
REF_CHARS_MAX = 500
ITEMS_MAX = 200
DRAFT_FIELDS_MAX = 200

Ref = Annotated[str, pydantic.Field(min_length=1, max_length=REF_CHARS_MAX)]
Line = Annotated[str, pydantic.Field(min_length=1, max_length=LINE_CHARS_MAX)]
Slug = Annotated[str, pydantic.Field(min_length=1, max_length=200)]


class ArtifactType(StrEnum):
    """What an artifact is."""

    RESEARCH_BRIEF = "RESEARCH_BRIEF"
    BRIEF = "BRIEF"
    PREPROCESSED_PROPOSAL = "PREPROCESSED_PROPOSAL"


class JobType(StrEnum):
    """What a queue job asks for."""

    RESEARCH = "RESEARCH"
    BRIEF = "BRIEF"
    PROPOSAL_PREPROCESS = "PROPOSAL_PREPROCESS"


ARTIFACT_TYPE_OF_JOB_TYPE: Mapping[JobType, ArtifactType] = MappingProxyType(
    {
        JobType.RESEARCH: ArtifactType.RESEARCH_BRIEF,
        JobType.BRIEF: ArtifactType.BRIEF,
        JobType.PROPOSAL_PREPROCESS: ArtifactType.PREPROCESSED_PROPOSAL,
    }
)
"""The only artifact type that each job type produces (JQ-13)."""


class ContentInvalid(InputError):
    """The content is no {type}: {problems}."""


class _StrictContent(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Section(_StrictContent):
    """A section of a research brief. `sources` are refs of the artifact's sources."""

    heading: Annotated[str, pydantic.Field(min_length=1, max_length=TITLE_CHARS_MAX)]
    body: Annotated[str, pydantic.Field(min_length=1, max_length=TEXT_CHARS_MAX)]
    sources: Annotated[tuple[Ref, ...], pydantic.Field(max_length=ITEMS_MAX)]


class ResearchBrief(_StrictContent):
    """What the sources say about a question."""

    title: Annotated[str, pydantic.Field(min_length=1, max_length=TITLE_CHARS_MAX)]
    summary: Annotated[str, pydantic.Field(min_length=1, max_length=TEXT_CHARS_MAX)]
    sections: Annotated[tuple[Section, ...], pydantic.Field(max_length=ITEMS_MAX)]
    conclusions: Annotated[tuple[Line, ...], pydantic.Field(max_length=ITEMS_MAX)]
    open_questions: Annotated[tuple[Line, ...], pydantic.Field(max_length=ITEMS_MAX)]


class Brief(_StrictContent):
    """A short text with the entities it names."""

    title: Annotated[str, pydantic.Field(min_length=1, max_length=TITLE_CHARS_MAX)]
    body: Annotated[str, pydantic.Field(min_length=1, max_length=TEXT_CHARS_MAX)]
    entity_map: Annotated[
        dict[Slug, Annotated[str, pydantic.Field(max_length=TITLE_CHARS_MAX)]], pydantic.Field(max_length=ITEMS_MAX)
    ]
    word_count: Annotated[int, pydantic.Field(ge=0, le=TEXT_CHARS_MAX)]

    @pydantic.model_validator(mode="after")
    def _check_word_count(self) -> "Brief":
        words = len(self.body.split())
        if self.word_count != words:
            raise ValueError(f"word_count is {self.word_count} and the body has {words} words")
        return self


class IssueSeverity(StrEnum):
    """The severity of an issue in a draft."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Issue(_StrictContent):
    """A problem in a field of a draft."""

    field: Annotated[str, pydantic.Field(min_length=1, max_length=REF_CHARS_MAX)]
    severity: IssueSeverity
    message: Line


class EntityMatch(_StrictContent):
    """A text in the draft that names a known entity."""

    text: Annotated[str, pydantic.Field(min_length=1, max_length=LINE_CHARS_MAX)]
    entity_id: Slug
    confidence: Annotated[float, pydantic.Field(ge=0.0, le=1.0)]


class PreprocessedProposal(_StrictContent):
    """A draft as submitted, the same draft enriched, and the findings."""

    original: Annotated[dict[str, Any], pydantic.Field(max_length=DRAFT_FIELDS_MAX)]
    enriched: Annotated[dict[str, Any], pydantic.Field(max_length=DRAFT_FIELDS_MAX)]
    issues: Annotated[tuple[Issue, ...], pydantic.Field(max_length=ITEMS_MAX)]
    entity_matches: Annotated[tuple[EntityMatch, ...], pydantic.Field(max_length=ITEMS_MAX)]


class ArtifactSource(_StrictContent):
    """Where something comes from, in the source's own words."""

    ref: Ref
    excerpt: Annotated[str, pydantic.Field(min_length=1, max_length=LINE_CHARS_MAX)]


MODELS: Mapping[ArtifactType, type[pydantic.BaseModel]] = MappingProxyType(
    {
        ArtifactType.RESEARCH_BRIEF: ResearchBrief,
        ArtifactType.BRIEF: Brief,
        ArtifactType.PREPROCESSED_PROPOSAL: PreprocessedProposal,
    }
)


class ArtifactDraft(_StrictContent):
    """What the NLM backend makes of an answer: all of an artifact that is not the registry's."""

    type: ArtifactType
    entity_refs: Annotated[tuple[Slug, ...], pydantic.Field(max_length=ITEMS_MAX)] = ()
    tags: Annotated[
        tuple[Annotated[str, pydantic.Field(min_length=1, max_length=100)], ...], pydantic.Field(max_length=50)
    ] = ()
    content: dict[str, Any]
    sources: Annotated[tuple[ArtifactSource, ...], pydantic.Field(max_length=ITEMS_MAX)] = ()


def checked_content(type_: ArtifactType, content: Mapping[str, Any], refs: frozenset[str]) -> dict[str, Any]:
    """Returns the content as it is stored. Raises ContentInvalid.

    A section may cite only refs of the artifact's sources.
    """
    try:
        model = MODELS[type_].model_validate(dict(content))
    except pydantic.ValidationError as error:
        raise ContentInvalid(type=type_.value, problems=problems_of(error, MODELS[type_])) from None
    if isinstance(model, ResearchBrief):
        missing = sorted({ref for section in model.sections for ref in section.sources} - refs)
        if missing:
            problems = f"a section cites {missing[0]!r}, which is not among the artifact's sources"
            raise ContentInvalid(type=type_.value, problems=problems)
    return model.model_dump(mode="json")
