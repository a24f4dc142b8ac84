"""Publishes the audit records of administrative acts: one object each, create-only, made of what the ledger recorded (OBS-1, D35).

A rebuild holds the projector's place, so it publishes the act of itself too. What it may not publish, the next projector does.
"""

import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from trellis.documents import audit, ids
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.admin_acts import AdminAct, NewAct
from trellis.engine.errors import TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.storage.objects.store import ObjectStore, StoreError

KEYS_MAX = 1_000
KEYS_CHARS_MAX = 200_000
"""Objects that the act of one rebuild names, and how long their keys may be together; beyond it they are counted only."""
ERROR_CHARS_MAX = 500

_log = log_of("trellis.projector")


class ActRecorder:
    """Publishes acts of one ledger. An object of that name with other bytes stays, is named once, and stops no other act."""

    def __init__(self, ledger: Ledger, actor: Actor, publisher: DocumentPublisher) -> None:
        self._ledger = ledger
        self._actor = actor
        self._publisher = publisher
        self.differing: set[str] = set()
        """Keys where something else is than the record of the act."""

    async def publish_new(self) -> int:
        """Publish the acts that have no record yet; how many records were written. Raises StoreUnavailable."""
        waiting = await self._ledger.acts(unpublished=True)
        written = sum([await self._publish(act) for act in waiting])
        published = [act for act in waiting if _key(act) not in self.differing]
        if published:
            await self._ledger.acts_published(self._actor, published)
        return written

    async def publish_all(self) -> int:
        """Publish every act whose record the store lacks, also those that had one; how many records were written."""
        written, last = 0, 0
        while page := await self._ledger.acts(after=last):
            written += sum([await self._publish(act) for act in page])
            await self._ledger.acts_published(self._actor, [act for act in page if _key(act) not in self.differing])
            last = page[-1].no
        return written

    async def _publish(self, act: AdminAct) -> bool:
        body, key = audit.act_to_bytes(act), _key(act)
        there = await self._publisher.create(key, body)
        if there != body and key not in self.differing:
            self.differing.add(key)
            _log.error("act_differs", key=key, event_id=act.id)
        return there is body


def _key(act: AdminAct) -> str:
    return ids.audit_key(act.at, act.id)


@dataclass(kw_only=True)
class RebuildRecord:
    """What a rebuild did, while it is under way."""

    written: list[str] = field(default_factory=list[str])
    """The objects that it made, by key, as far as the act names them."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    _chars: int = 0

    def wrote(self, key: str) -> None:
        """An object was made."""
        self._chars += len(key)
        if len(self.written) < KEYS_MAX and self._chars <= KEYS_CHARS_MAX:
            self.written.append(key)


@asynccontextmanager
async def recorded_rebuild(
    ledger: Ledger, objects: ObjectStore, actor: Actor, event: str, cause: str | None
) -> AsyncGenerator[RebuildRecord]:
    """Record who rebuilt what and why, when it is over; one that fails is recorded with its error."""
    rebuild = RebuildRecord()
    try:
        yield rebuild
    except TrellisError as error:
        problem = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
        try:
            await _record(ledger, objects, actor, _act(event, cause, rebuild, problem))
        except TrellisError as away:
            _log.error("rebuild_not_recorded", actor=actor.name, act=event, error=str(away))
        raise
    await _record(ledger, objects, actor, _act(event, cause, rebuild, None))


def listed_keys(keys: list[str]) -> list[str]:
    """As many of these keys as an act names."""
    kept, chars = keys[:KEYS_MAX], 0
    for number, key in enumerate(kept):
        chars += len(key)
        if chars > KEYS_CHARS_MAX:
            return kept[:number]
    return kept


def _act(event: str, cause: str | None, rebuild: RebuildRecord, error: str | None) -> NewAct:
    side, _, _ = event.partition(".")
    facts = {"objects_written": rebuild.written, **rebuild.facts, "error": error}
    id_ = f"{event.replace('.', '-')}-{uuid.uuid4().hex}"
    return NewAct(event=event, subject=side, cause=cause, facts=facts, id=id_)


async def _record(ledger: Ledger, objects: ObjectStore, actor: Actor, act: NewAct) -> None:
    await ledger.record_act(actor, act)
    try:
        await ActRecorder(ledger, actor, DocumentPublisher(objects)).publish_new()
    except StoreError as away:
        _log.error("rebuild_not_published", actor=actor.name, act=act.event, error=str(away))
