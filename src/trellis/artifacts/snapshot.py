"""The context snapshot of one execution of a queue job: the agent's memory, the entities, and the sources to cite.

The orchestration layer writes a snapshot once, and the NLM backend reads it. Each ref names exactly one text, so a
citation is unambiguous. The texts together fit a provider's limit, so every readable snapshot can be asked about.
"""

from typing import Annotated, ClassVar, Self

import pydantic

from trellis.artifacts.content import REF_CHARS_MAX, STORABLE, TITLE_CHARS_MAX, Slug, StoredInvalid, StoredModel
from trellis.nlm.provider import CORPUS_CHARS_MAX, SOURCE_CHARS_MAX, SOURCES_MAX, NlmSource

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


class _SnapshotPart(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class MemoryFile(_SnapshotPart):
    """One file of the agent's memory, such as `memory/open_loops.md`."""

    ref: SourceRef
    text: Annotated[str, pydantic.Field(max_length=MEMORY_CHARS_MAX), STORABLE]


class MemorySnapshot(_SnapshotPart):
    """The agent's memory at one version. `version` is None if it has no memory yet."""

    version: Annotated[str, pydantic.Field(max_length=100), STORABLE] | None = None
    files: Annotated[tuple[MemoryFile, ...], pydantic.Field(max_length=MEMORY_FILES_MAX)] = ()


class SnapshotEntity(_SnapshotPart):
    """An entity of the request. An unknown one has its slug as name. `ref` is the text about it."""

    slug: EntitySlug
    name: EntityName
    aliases: Annotated[tuple[EntityName, ...], pydantic.Field(max_length=ALIASES_MAX)] = ()
    ref: SourceRef | None = None


class SourceText(_SnapshotPart):
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
    def _means_one_thing(self) -> Self:
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
        """The sources in the form a provider takes."""
        return tuple(NlmSource(source.ref, source.text) for source in self.sources)
