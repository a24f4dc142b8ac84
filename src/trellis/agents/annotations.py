"""Annotations: approved comments and tags, stored beside the text that they are about (D63).

Invariants:
- An annotation is a separate object under `agents/{slug}/annotations/`. The text it is about keeps its bytes.
- It names its author, its date, its proposal and the version of the text.
- Agents see annotations apart from the sources. Citations are searched in sources only, so no annotation is evidence.
"""

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from trellis.agents.definition import SafeOutput
from trellis.storage.objects.canonical_json import encode, timestamp
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import ObjectStore

FOLDER = "annotations"
ANNOTATIONS_MAX = 100
"""Most annotations of one agent that a run reads."""
KINDS = {SafeOutput.PROPOSE_COMMENT.value: "comment", SafeOutput.PROPOSE_TAG.value: "tag"}
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
        kind=KINDS[proposal["action"]],
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
    return object_key("agents", slug, FOLDER, *annotation.target.split("/"), f"{annotation.proposal_id}.json")


async def read_annotations(objects: ObjectStore, slug: str) -> tuple[Annotation, ...]:
    """The agent's annotations, grouped by text. Objects that hold no annotation are skipped."""
    page = await objects.list(f"{object_key('agents', slug, FOLDER)}/", limit=ANNOTATIONS_MAX)
    found: list[Annotation] = []
    for info in page.items:
        stored = await objects.get(info.key)
        if stored is not None and (annotation := _read(stored.body)) is not None:
            found.append(annotation)
    return tuple(found)


def _read(body: bytes) -> Annotation | None:
    try:
        return Annotation(**json.loads(body))
    except (ValueError, TypeError):
        return None
