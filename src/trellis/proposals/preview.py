"""Previews of proposals: a unified diff of the current target against the proposed one.

A comment or tag is stored as an annotation, a separate object. Its diff shows that object, not the text it is about.
Lines end at a newline only. Other Unicode line breaks stay inside their line, where the reviewer's tool can show them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from trellis.agents import sources
from trellis.documents.errors import TargetRefused
from trellis.proposals import proposal
from trellis.proposals.apply import update_of
from trellis.proposals.proposal import apply_change, file_change, is_changed
from trellis.storage.memory import MemoryRepository
from trellis.storage.memory.markdown import unified_diff
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.store import ObjectStore

ENDED = frozenset({"applied", "rejected", "expired"})
READS_AT_ONCE = 8
"""Number of targets read concurrently for a list of proposals."""


async def diff_of(
    document: Mapping[str, Any], *, objects: ObjectStore, memory: MemoryRepository, now: datetime
) -> str | None:
    """The diff; None if the proposal changes no text or is already applied, rejected or expired.

    Raises TargetRefused, UpdatesRefused.
    """
    content = document["content"]
    if document["status"] in ENDED or not ({"change", "updates"} & content.keys()):
        return None
    if document["action"] == proposal.MEMORY_UPDATE:
        updates = [update_of(one) for one in content["updates"]]
        run_id = document["source"]["run_id"] or document["id"]
        return await asyncio.to_thread(memory.preview, document["agent_slug"], updates, run_id=run_id, at=now)
    change = file_change(document["agent_slug"], document)
    if document["action"] in sources.ANNOTATION_KINDS:
        annotation = sources.annotation_of(dict(document), approved_by="", approved_at=now)
        return unified_diff("", change.text, None, sources.annotation_key(document["agent_slug"], annotation))
    there = await objects.get(change.key)
    before = None if there is None else there.body
    after = _text(apply_change(change, before))
    return unified_diff(_text(before or b""), after, None if before is None else change.key, change.key)


async def conflict_of(document: Mapping[str, Any], *, objects: ObjectStore) -> str | None:
    """Why applying the proposal would be refused now; None if its target is unchanged. Raises TargetRefused."""
    if document["status"] in ENDED or "change" not in document["content"]:
        return None
    change = file_change(document["agent_slug"], document)
    there = await objects.get(change.key)
    if there is not None and is_changed(change, document["target_hash"], there.body):
        return None
    if (None if there is None else sha256(there.body)) == document["target_hash"]:
        return None
    return f"{change.key} has changed since this was proposed, so it can no longer be applied: reject it and run the agent again"


async def conflicts_of(documents: Sequence[Mapping[str, Any]], *, objects: ObjectStore) -> dict[str, str]:
    """The conflict of each proposal that can no longer be applied, by proposal id."""
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def look(document: Mapping[str, Any]) -> str | None:
        async with gate:
            try:
                return await conflict_of(document, objects=objects)
            except TargetRefused as error:
                return str(error)

    found = await asyncio.gather(*(look(document) for document in documents))
    return {document["id"]: told for document, told in zip(documents, found, strict=True) if told is not None}


def _text(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")
