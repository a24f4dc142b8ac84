"""Writes audit records to the object store: segments of many events, and records of administrative acts."""

import json
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

from trellis.documents import audit, ids
from trellis.documents.errors import RecordInvalid
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.admin_acts import ACTS_MAX, AdminAct, NewAct
from trellis.engine.errors import TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import RecordedEvent
from trellis.storage.objects.store import ObjectStore, StoreError

# Audit segments: immutable JSON-lines objects with the records of many events (D35).
#
# Each event is in exactly one segment, and no lock is needed for that. The events of a day have one order, that of the
# feed. A segment is named by its first event and written create-only. The next segment begins with the first event that
# is in none. So writers that start from the same position, even without knowing of each other, compute the same name. A
# writer that finds the name taken takes over the content of that segment and continues behind it. If the object of that
# name is something else, the first event gets a separate object.
#
# A ledger that was set back (a restored dump, a failover to a standby that lacked the last commits) meets segments with
# events that it lost. It never reaches those, and may give their ids to other events. So an event counts as recorded
# only with the same line, and what the end of the feed has not brought is no longer waited for.
#
# A feed position may be stored only when the writer is `settled`: everything before the position is in a segment, and
# no segment reaches beyond it.

EVENTS_MAX = 5_000
BYTES_MAX = 8 * 1024 * 1024
"""Largest size of a segment; a single longer line gets a segment to itself."""
SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class SegmentLine:
    """The record of one event as a line of a segment."""

    event_id: str
    at: datetime
    body: bytes


OnConflict = Callable[[str, SegmentLine], Awaitable[None]]
"""Called with the key of a conflicting object and the line that should have been first in it."""
OnForeign = Callable[[str, str], Awaitable[None]]
"""Called with the key of a segment and the id of the first event in it that the ledger does not have like that."""


def line_of(record: RecordedEvent) -> SegmentLine:
    return SegmentLine(record.event.id, record.event.ts, audit.to_line(record))


class SegmentWriter:
    """Collects lines and writes them as segments.

    `create` writes bytes if the key is free, and returns what is stored there.
    """

    def __init__(
        self, create: Callable[[str, bytes], Awaitable[bytes]], aside: OnConflict, tell_foreign: OnForeign
    ) -> None:
        self._create = create
        self._aside = aside
        self._tell_foreign = tell_foreign
        self._days: dict[date, deque[SegmentLine]] = {}
        self._ahead: dict[str, tuple[str, bytes]] = {}
        """By event id the key and the line of events in another writer's segment that the feed has not reached yet."""
        self._foreign: dict[str, str] = {}
        """By key of a segment an event in it that the ledger has not, or otherwise. Not told yet."""
        self.waiting = 0
        self.bytes_waiting = 0

    @property
    def settled(self) -> bool:
        """Whether no line waits, and no event found in another writer's segment is still ahead in the feed."""
        return not self.waiting and not self._ahead

    @property
    def full(self) -> bool:
        """Whether enough lines wait for a full segment."""
        return self.waiting >= EVENTS_MAX or self.bytes_waiting >= BYTES_MAX

    def add(self, line: SegmentLine) -> None:
        """Queue a line, unless another writer's segment has it. Lines are added once each, in feed order."""
        key, there = self._ahead.pop(line.event_id, ("", b""))
        if _is_record_of(there, line):
            return
        if key:
            self._foreign.setdefault(key, line.event_id)
        self._days.setdefault(line.at.astimezone(UTC).date(), deque()).append(line)
        self.waiting += 1
        self.bytes_waiting += len(line.body)

    async def write(self) -> int:
        """Write all waiting lines. Returns how many segments were written. Raises StoreUnavailable."""
        written = 0
        for day in sorted(self._days):
            lines = self._days[day]
            while lines:
                written += await self._write_one(lines)
            del self._days[day]
        return written

    async def feed_ended(self) -> None:
        """The end of the feed was read after the last `write`: what it did not bring is in no ledger any more.

        Whoever wrote those events had read them in the feed, which only grows. Raises StoreUnavailable.
        """
        for event_id, (key, _) in self._ahead.items():
            self._foreign.setdefault(key, event_id)
        self._ahead.clear()
        while self._foreign:
            key = next(iter(self._foreign))
            await self._tell_foreign(key, self._foreign[key])
            del self._foreign[key]

    async def _write_one(self, lines: deque[SegmentLine]) -> bool:
        piece = _next_segment(lines)
        key = ids.segment_key(piece[0].at, piece[0].event_id)
        body = b"".join(line.body + b"\n" for line in piece)
        there = await self._create(key, body)
        recorded = {line.event_id: line.body for line in piece} if there is body else _lines_of(key, there, piece[0])
        if not recorded:
            await self._aside(key, piece[0])
            recorded = {piece[0].event_id: piece[0].body}
        self._pass_over(lines, key, recorded)
        return there is body

    def _pass_over(self, lines: deque[SegmentLine], key: str, recorded: dict[str, bytes]) -> None:
        """Remove lines that are in a segment. Its further events are remembered until the feed reaches them."""
        while lines and _is_record_of(recorded.get(lines[0].event_id, b""), lines[0]):
            line = lines.popleft()
            del recorded[line.event_id]
            self.waiting -= 1
            self.bytes_waiting -= len(line.body)
        self._ahead |= {event_id: (key, line) for event_id, line in recorded.items()}


def _is_record_of(there: bytes, line: SegmentLine) -> bool:
    """Whether these bytes of a segment are the line, perhaps in an older format. No bytes are none."""
    return there == line.body or (bool(there) and audit.is_older(there, line.event_id))


def _lines_of(key: str, there: bytes, first: SegmentLine) -> dict[str, bytes]:
    """The lines of a segment by event id; none if the object does not begin with this line."""
    try:
        stored = dict(zip(event_ids(key, there), filter(None, there.split(b"\n")), strict=True))
    except RecordInvalid:
        return {}
    return stored if _is_record_of(next(iter(stored.values()), b""), first) else {}


def _next_segment(lines: deque[SegmentLine]) -> list[SegmentLine]:
    piece: list[SegmentLine] = []
    size = 0
    for line in lines:
        size += len(line.body) + 1
        if piece and (len(piece) >= EVENTS_MAX or size > BYTES_MAX):
            break
        piece.append(line)
    return piece


# --- reading ---------------------------------------------------------------------------------------------------------


def lines(key: str, body: bytes) -> list[dict[str, Any]]:
    """The records of a segment; raises RecordInvalid."""
    try:
        records = [json.loads(line) for line in body.split(b"\n") if line]
    except ValueError as error:
        raise RecordInvalid(event=key, problem=str(error)) from error
    if not all(isinstance(one, dict) for one in records):
        raise RecordInvalid(event=key, problem="a line is no record")
    return records


def event_ids(key: str, body: bytes) -> list[str]:
    """The event ids in a segment, in order; raises RecordInvalid."""
    return [str(record.get("event_id")) for record in lines(key, body)]


# Publishes the audit records of administrative acts: one create-only object each, made from the ledger (OBS-1, D35).
#
# A rebuild holds the projector's subscription, so it publishes the record of its own act. If it cannot, the next
# projector does.

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
    listed = RebuildRecord()
    for key in keys:
        listed.wrote(key)
    return listed.written


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
