"""Publishes the audit records of administrative acts: one create-only object each, made from the ledger (OBS-1, D35).

A rebuild holds the projector's subscription, so it publishes the record of its own act. If it cannot, the next
projector does.
"""

import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from trellis.documents import audit, ids
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.admin_acts import ACTS_MAX, AdminAct, NewAct
from trellis.engine.errors import TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.storage.objects.store import ObjectStore, StoreError

KEYS_MAX = 1_000
KEYS_CHARS_MAX = 200_000
"""Limits on the object keys that a rebuild's act lists: their number, and their total length.

Further objects are only counted.
"""
ERROR_CHARS_MAX = 500
PAGES_MAX = 20
"""The most pages of acts that one call reads while none of them can be published."""

_log = log_of("trellis.projector")


class ActRecorder:
    """Publishes acts of one ledger.

    An existing object with other bytes stays, is reported once, and stops no other act. So does an act that cannot be
    written as a record.
    """

    def __init__(self, ledger: Ledger, actor: Actor, publisher: DocumentPublisher) -> None:
        self._ledger = ledger
        self._actor = actor
        self._publisher = publisher
        self.differing: set[str] = set()
        """Keys of objects that differ from the act's record."""
        self._unwritable: set[str] = set()
        self._after = 0

    async def publish_new(self) -> int:
        """Publish acts without a record, up to the first page of which one was written. The next call goes on there.

        Returns how many records were written. Raises StoreUnavailable.
        """
        written = 0
        for _ in range(PAGES_MAX):
            page = await self._ledger.acts(after=self._after, unpublished=True)
            written += await self._publish_page(page)
            self._after = page[-1].no if len(page) == ACTS_MAX else 0
            if written or not self._after:
                break
        return written

    async def publish_all(self) -> int:
        """Publish every act whose record the store lacks, including acts marked as published.

        Returns how many were written.
        """
        written, last = 0, 0
        while page := await self._ledger.acts(after=last):
            written += await self._publish_page(page)
            last = page[-1].no
        return written

    async def _publish_page(self, page: list[AdminAct]) -> int:
        written = sum([await self._publish(act) for act in page])
        published = [act for act in page if act.id not in self._unwritable and _key(act) not in self.differing]
        if published:
            await self._ledger.acts_published(self._actor, published)
        return written

    async def _publish(self, act: AdminAct) -> bool:
        try:
            body, key = audit.act_to_bytes(act), _key(act)
        except (RecursionError, UnicodeError, ValueError) as error:
            if act.id not in self._unwritable:
                self._unwritable.add(act.id)
                _log.error("act_not_published", event_id=act.id, error=str(error)[:ERROR_CHARS_MAX])
            return False
        there = await self._publisher.create(key, body)
        if there != body and key not in self.differing:
            self.differing.add(key)
            _log.error("act_differs", key=key, event_id=act.id)
        return there is body


def _key(act: AdminAct) -> str:
    return ids.audit_key(act.at, act.id)


@dataclass(kw_only=True)
class RebuildRecord:
    """What a running rebuild has done so far."""

    written: list[str] = field(default_factory=list[str])
    """Keys of the objects it wrote, within the limits of an act."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    _chars: int = 0

    def wrote(self, key: str) -> None:
        """Note that an object was written."""
        self._chars += len(key)
        if len(self.written) < KEYS_MAX and self._chars <= KEYS_CHARS_MAX:
            self.written.append(key)


@asynccontextmanager
async def recorded_rebuild(
    ledger: Ledger, objects: ObjectStore, actor: Actor, event: str, cause: str | None
) -> AsyncGenerator[RebuildRecord]:
    """Record a rebuild as an act when it ends. A failed one is recorded with its error."""
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
    """The first of these keys, within the limits of an act."""
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
