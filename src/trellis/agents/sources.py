"""The texts that an agent reads: its sources, and the approved annotations beside them."""

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from trellis.agents.definition import ContextOptions, SafeOutput, checked_slug
from trellis.engine.text import is_storable
from trellis.storage.memory.layout import TokenCounter, count_tokens
from trellis.storage.objects.canonical_json import encode, sha256, timestamp
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import ObjectInfo, ObjectStore

# Reads an agent's sources: the files below `agents/{slug}/sources/`, each complete or not at all.
#
# Invariants:
# - The same files give the same sources in the same order: by name, the first `context.max_sources` text files.
# - Together they fit the token budget (D50). A source is never truncated.
# - Every omitted file is reported with its reason.

SOURCES_TOKENS_MAX = 20_000
SOURCE_BYTES_MAX = 256 * 1024
"""A larger file is not fetched."""
LISTED_MAX = 1_000
TEXT_SUFFIXES = (".md", ".txt", ".json")
CHANGEABLE_FOLDERS = ("sources", "notes", "artifacts", "comments")
CHANGEABLE_DEPTH_MAX = 5
CHANGEABLE_NAME_CHARS_MAX = 100
CHANGEABLE_NAME_BYTES_MAX = 200
"""Below the limit of file systems, which have 255."""
CHANGEABLE_EXPECTED = (
    f"files below {', '.join(f'{folder}/' for folder in CHANGEABLE_FOLDERS)} at most {CHANGEABLE_DEPTH_MAX} levels deep,"
    f" with names of at most {CHANGEABLE_NAME_CHARS_MAX} visible characters that begin with a letter, a digit or `_`"
)


def is_changeable(target: str) -> bool:
    """Whether a proposal may be about this file of its agent: never its definition, a run or another proposal."""
    folder, *names = target.split("/")
    within = folder in CHANGEABLE_FOLDERS and 1 <= len(names) <= CHANGEABLE_DEPTH_MAX
    return within and all(map(_is_changeable_name, names))


def _is_changeable_name(name: str) -> bool:
    begins_well = name[:1].isalnum() or name.startswith("_")
    if not begins_well or not name.isprintable() or name != name.strip() or "\\" in name:
        return False
    return len(name) <= CHANGEABLE_NAME_CHARS_MAX and len(name.encode()) <= CHANGEABLE_NAME_BYTES_MAX


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSource:
    """A text the agent may read and cite. `ref` is its path below the agent's folder, `sha256` that of its bytes."""

    ref: str
    text: str
    sha256: str


class OmissionReason(StrEnum):
    """Why a file is not among the sources."""

    NOT_TEXT = "not_text"
    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    OVER_BUDGET = "over_budget"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class OmittedSource:
    """A file that exists and was not read."""

    ref: str
    reason: OmissionReason
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSources:
    """The sources of an agent, and the omitted files. `complete` is False if there are more than LISTED_MAX files."""

    items: tuple[AgentSource, ...]
    left_out: tuple[OmittedSource, ...]
    tokens: int
    complete: bool


async def read_sources(
    objects: ObjectStore,
    slug: str,
    context: ContextOptions,
    *,
    counter: TokenCounter = count_tokens,
    tokens_max: int = SOURCES_TOKENS_MAX,
) -> AgentSources:
    """The agent's sources as they are now."""
    folder = object_key("agents", checked_slug(slug))
    page = await objects.list(f"{folder}/{context.folder}/", limit=LISTED_MAX)
    wanted, left_out = _selected_files(folder, page.items, context.max_sources)
    items: list[AgentSource] = []
    used = 0
    for info in wanted:
        ref = _ref(folder, info)
        stored = await objects.get(info.key)
        if stored is None:
            left_out.append(OmittedSource(ref=ref, reason=OmissionReason.GONE, detail="it was removed meanwhile"))
            continue
        text = _text(stored.body)
        if text is None:
            left_out.append(OmittedSource(ref=ref, reason=OmissionReason.NOT_TEXT, detail="it is not text in UTF-8"))
            continue
        size = counter(text)
        if used + size > tokens_max:
            detail = f"it has {size} tokens, {tokens_max - used} of {tokens_max} were left"
            left_out.append(OmittedSource(ref=ref, reason=OmissionReason.OVER_BUDGET, detail=detail))
            continue
        used += size
        items.append(AgentSource(ref=ref, text=text, sha256=sha256(stored.body)))
    left_out.sort(key=lambda one: one.ref)
    return AgentSources(items=tuple(items), left_out=tuple(left_out), tokens=used, complete=not page.more)


def _selected_files(
    folder: str, listed: tuple[ObjectInfo, ...], max_sources: int
) -> tuple[tuple[ObjectInfo, ...], list[OmittedSource]]:
    """The first text files that are not too large, and the reasons for omitting the others."""
    wanted: list[ObjectInfo] = []
    left_out: list[OmittedSource] = []
    for info in listed:
        ref = _ref(folder, info)
        if not info.key.lower().endswith(TEXT_SUFFIXES):
            detail = f"its name ends in none of {', '.join(TEXT_SUFFIXES)}"
            left_out.append(OmittedSource(ref=ref, reason=OmissionReason.NOT_TEXT, detail=detail))
        elif info.size > SOURCE_BYTES_MAX:
            detail = f"it has {info.size} bytes and the limit is {SOURCE_BYTES_MAX}"
            left_out.append(OmittedSource(ref=ref, reason=OmissionReason.TOO_LARGE, detail=detail))
        elif len(wanted) >= max_sources:
            detail = f"context.max_sources is {max_sources}"
            left_out.append(OmittedSource(ref=ref, reason=OmissionReason.TOO_MANY, detail=detail))
        else:
            wanted.append(info)
    return tuple(wanted), left_out


def _ref(folder: str, info: ObjectInfo) -> str:
    return info.key.removeprefix(f"{folder}/")


def _text(body: bytes) -> str | None:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return text if is_storable(text) else None


# Annotations: approved comments and tags, stored beside the text that they are about (D63).
#
# Invariants:
# - An annotation is a separate object under `agents/{slug}/annotations/`. The text it is about keeps its bytes.
# - It names its author, its date, its proposal and the version of the text.
# - Agents see annotations apart from the sources. Citations are searched in sources only, so no annotation is evidence.

ANNOTATIONS_FOLDER = "annotations"
ANNOTATIONS_MAX = 100
"""Most annotations of one agent that a run reads."""
ANNOTATION_KINDS = {SafeOutput.PROPOSE_COMMENT.value: "comment", SafeOutput.PROPOSE_TAG.value: "tag"}
"""The actions that annotate, each with the kind of its annotation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """An approved comment or tag on a text."""

    kind: str
    target: str
    """The text it is about, as a path below the agent's folder."""
    target_sha256: str
    """The version of the text that it was written about."""
    text: str
    author: str
    """The author of the proposal, such as `agent:archivist-violin`."""
    approved_by: str
    approved_at: str
    proposal_id: str
    run_id: str | None = None

    def to_bytes(self) -> bytes:
        return encode(asdict(self))


def annotation_of(proposal: dict[str, Any], *, approved_by: str, approved_at: datetime) -> Annotation:
    """The annotation that an approved proposal asks for."""
    return Annotation(
        kind=ANNOTATION_KINDS[proposal["action"]],
        target=proposal["target"],
        target_sha256=proposal["target_hash"],
        text=proposal["content"]["change"]["text"],
        author=proposal["source"]["identity"],
        approved_by=approved_by,
        approved_at=timestamp(approved_at),
        proposal_id=proposal["id"],
        run_id=proposal["source"]["run_id"],
    )


def annotation_key(slug: str, annotation: Annotation) -> str:
    """The key of an annotation: grouped by the text it is about, named by its proposal."""
    return object_key(
        "agents", slug, ANNOTATIONS_FOLDER, *annotation.target.split("/"), f"{annotation.proposal_id}.json"
    )


async def read_annotations(objects: ObjectStore, slug: str) -> tuple[Annotation, ...]:
    """The agent's annotations, grouped by text. Objects that hold no annotation are skipped."""
    page = await objects.list(f"{object_key('agents', slug, ANNOTATIONS_FOLDER)}/", limit=ANNOTATIONS_MAX)
    annotations: list[Annotation] = []
    for info in page.items:
        stored = await objects.get(info.key)
        if stored is not None and (annotation := _read_annotation(stored.body)) is not None:
            annotations.append(annotation)
    return tuple(annotations)


def _read_annotation(body: bytes) -> Annotation | None:
    try:
        return Annotation(**json.loads(body))
    except (ValueError, TypeError):
        return None
