"""The audit chain: seals published audit records in blocks, each of which contains the hash of the block before it.

- A block is an immutable object, `audit/chain/<number>.json`. It lists records in feed order, each with the SHA-256 of
  its bytes. Its own SHA-256 stands in the next block, and that of the newest block in the ledger.
- Only published records are sealed, so the record of every sealed event is in the object store.
- The newest block is replaced in the ledger by a conditional write. Of two processes that seal at the same time one
  gets the number; the other takes over the block that is there, after comparing it with the ledger.
- A process that dies between writing a block and storing it as the newest loses nothing: the next one takes it over.
- An instance has one chain. The NLM backend, which has a ledger of its own, has another one in the same object store.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, cast

from trellis.documents import audit, ids
from trellis.documents.errors import DocumentDiffers, RecordInvalid
from trellis.engine.admin_acts import ACTS_MAX, AdminAct
from trellis.engine.clock import Clock
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import AuditHead, Event, RecordedEvent
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.store import CREATE, ObjectStore, PutStored, listed_pages

FORMAT = 1
"""Version of the block format; increases with every change."""
INSTANCE_CHAIN = ""
NLM_CHAIN = "nlm"
NO_BLOCK = "0" * 64
"""The hash that the first block names as its predecessor."""
PAGE = 500
QUEUED_MAX = 20_000
"""The most records that wait in memory for their block. Beyond it they are read from the ledger."""

_log = log_of("trellis.audit_chain")


@dataclass(frozen=True, slots=True)
class SealedRecord:
    """One record in a block: of which event or act, of which day, the hash of its line, and its feed position."""

    event_id: str
    day: str
    """`YYYYMMDD` of the record's time. A job id, and so an event id, may be used again on a later day."""
    sha256: str
    position: str | None
    """None for an administrative act, which is not in the feed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainBlock:
    """One block: a range of the feed, and the administrative acts that were published meanwhile."""

    number: int
    previous: str
    feed: int
    at: str
    start: str | None
    """The position after which its events begin."""
    end: str | None
    records: tuple[SealedRecord, ...]
    restarts: bool = False
    """Whether the blocks before it were lost with the object store, which a rebuild then made again."""
    late: bool = False
    """Whether it is the first block of an instance that had published records before. Those of jobs that had left the
    ledger by then are in no block."""

    def to_bytes(self) -> bytes:
        """The block as it is stored: the same block always gives the same bytes."""
        fields = {
            "format": FORMAT,
            "number": self.number,
            "previous": self.previous,
            "feed": self.feed,
            "at": self.at,
            "from": self.start,
            "to": self.end,
            "count": len(self.records),
            **({"restarts": True} if self.restarts else {}),
            **({"late": True} if self.late else {}),
            "records": [[one.event_id, one.day, one.sha256, one.position] for one in self.records],
        }
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def read(cls, key: str, body: bytes) -> "ChainBlock":
        """Parse a block. Raises RecordInvalid, also for bytes that no block has."""
        try:
            fields = cast("dict[str, Any]", json.loads(body))
            records = tuple(SealedRecord(*map(_text_or_none, one)) for one in fields["records"])  # type: ignore[arg-type]
            block = cls(
                number=fields["number"],
                previous=fields["previous"],
                feed=fields["feed"],
                at=fields["at"],
                start=fields["from"],
                end=fields["to"],
                records=records,
                restarts=fields.get("restarts", False),
                late=fields.get("late", False),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecordInvalid(event=key, problem=f"it is no block of the audit chain: {error}") from error
        if block.to_bytes() != body:
            raise RecordInvalid(event=key, problem="it is not written as a block of the audit chain is")
        return block


def _text_or_none(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError("a field of a record is no text")
    return value


def day_of(at: datetime) -> str:
    """The day of a record, as its folder is named."""
    there = at.astimezone(UTC)
    return f"{there.year:04}{there.month:02}{there.day:02}"


def sealed_event(record: RecordedEvent, position: str) -> SealedRecord:
    """An event as a block lists it."""
    return sealed_line(record.event, audit.to_line(record), position)


def sealed_line(event: Event, line: bytes, position: str) -> SealedRecord:
    """An event whose line is known, as a block lists it."""
    return SealedRecord(event.id, day_of(event.ts), sha256(line), position)


def sealed_act(act: AdminAct) -> SealedRecord:
    """An administrative act as a block lists it."""
    return SealedRecord(act.id, day_of(act.at), sha256(audit.act_to_line(act)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SealOptions:
    """How often blocks are cut."""

    seal_s: float = 10.0
    """How long a published record waits for others to share its block."""
    records_max: int = 1_000
    """Most events in a block."""
    final_s: float = 5.0
    """How long a process that ends goes on sealing. The next one seals the rest."""


@dataclass(kw_only=True)
class AuditSealer:
    """Seals what a projector has published. The projector calls it after it has stored its position.

    While nothing is published it asks the ledger nothing.
    """

    ledger: Ledger
    actor: Actor
    objects: ObjectStore
    clock: Clock
    chain: str = INSTANCE_CHAIN
    options: SealOptions = field(default_factory=SealOptions)
    head: AuditHead | None = None
    """The newest block, as far as this process knows."""
    _acts_wait: bool = True
    _read_up_to: str | None = None
    """Where sealed events end. Beyond the newest block only positions without events follow."""
    _due_at: float | None = None
    _queue: deque[SealedRecord] = field(default_factory=deque[SealedRecord])
    """Published records in feed order that need not be read from the ledger again."""
    _queued_from: str | None = None
    _queued_to: str | None = None

    async def begin(self) -> AuditHead:
        """Read the newest block. A ledger without one continues the chain of the object store, or begins one."""
        head = await continue_chain(self.ledger, self.objects, self.actor, self.chain)
        self.head, self._read_up_to, self._acts_wait, self._due_at = head, head.position, True, None
        self._queue.clear()
        self._queued_from = self._queued_to = None
        return head

    def note(self, start: str | None, end: str, records: Sequence[SealedRecord]) -> None:
        """Take over the records of a page of the feed that is being published: all events between two positions.

        Records that are not taken over, because too many wait or the process began with them, are read from the ledger.
        """
        if self._queued_to is None or start != self._queued_to or len(self._queue) + len(records) > QUEUED_MAX:
            self._queue.clear()
            self._queued_from = start or ""
        self._queue.extend(records)
        self._queued_to = end

    def act_published(self) -> None:
        """Note that the record of an administrative act was written."""
        self._acts_wait = True

    async def seal(self, up_to: str | None, *, at_once: bool = False) -> int:
        """Seal published acts, and events up to this position: at most one block, when it is due. Returns how many.

        Raises StoreUnavailable, DocumentDiffers.
        """
        if self.head is None:
            await self.begin()
        if not self._acts_wait and (up_to or "") <= (self._read_up_to or ""):
            self._due_at = None
            return 0
        if self._due_at is None:
            self._due_at = self.clock.monotonic() + self.options.seal_s
        if not at_once and self.clock.monotonic() < self._due_at:
            return 0
        try:
            return await self._seal_block(up_to)
        except DocumentDiffers:
            self._due_at = self.clock.monotonic() + self.options.seal_s  # looked at again, but not in every pass
            raise

    async def seal_before_end(self, up_to: str | None) -> None:
        """Seal what is published, without waiting for more, for at most `final_s`. The next process seals the rest."""
        ends_at = self.clock.monotonic() + self.options.final_s
        while await self.seal(up_to, at_once=True) and self.clock.monotonic() < ends_at:
            pass

    async def _seal_block(self, up_to: str | None) -> int:
        head = self.head
        assert head is not None, "begin() has read it"
        acts = await self.ledger.acts(unsealed=True)
        events, end = await self._next_events(head.position, up_to)
        if not events and not acts:
            self._acts_wait, self._read_up_to, self._due_at = False, end, None
            return 0
        block = _next_block(head, [*map(sealed_act, acts), *events], at=await self.ledger.now(), end=end)
        body = block.to_bytes()
        if not isinstance(await self.objects.put(self._key(block), body, when=CREATE), PutStored):
            block, body, acts = await self._take_over(head, self._key(block))
        if not await self._append(block, body, head, acts):
            await self.begin()  # another process was faster; what it sealed is not sealed again
            return 1
        self._acts_wait = len(acts) == ACTS_MAX
        if len(events) < self.options.records_max and not self._acts_wait:
            self._due_at = None
        return 1

    def _key(self, block: ChainBlock) -> str:
        return ids.block_key(self.chain, block.number)

    async def _next_events(self, after: str | None, up_to: str | None) -> tuple[list[SealedRecord], str | None]:
        """The next events to seal: those that were taken over, and others from the ledger."""
        limit, begins = self.options.records_max, self._queued_from
        if up_to is None or begins is None or self._queued_to is None:
            return await _events(self.ledger, after, up_to, limit)
        if (after or "") < begins:
            records, end = await _events(self.ledger, after, min(up_to, begins), limit)
            if records or (end or "") < begins:
                return records, end
            after = begins  # no event lies between the newest block and what was taken over
        while self._queue and (self._queue[0].position or "") <= (after or ""):
            self._queue.popleft()
        if (after or "") >= self._queued_to:
            return await _events(self.ledger, after, up_to, limit)
        records = [one for one in islice(self._queue, limit) if (one.position or "") <= up_to]
        return records, records[-1].position if len(records) == limit else min(up_to, self._queued_to)

    async def _take_over(self, head: AuditHead, key: str) -> tuple[ChainBlock, bytes, list[AdminAct]]:
        """The block that another process wrote under the next number, if the ledger confirms it.

        Raises DocumentDiffers for anything else under that key.
        """
        there = await self.objects.get(key)
        try:
            block = ChainBlock.read(key, b"" if there is None else there.body)
        except RecordInvalid as error:
            raise DocumentDiffers(key=key) from error
        acts = await acts_of_next_block(self.ledger, head, block)
        if acts is None:
            latest = await self.ledger.audit_head()
            if latest is None or latest.number == head.number:
                raise DocumentDiffers(key=key)
        return block, b"" if there is None else there.body, acts or []

    async def _append(self, block: ChainBlock, body: bytes, head: AuditHead, acts: Sequence[AdminAct]) -> bool:
        new = _head_of(block, body)
        if not await self.ledger.extend_audit_chain(self.actor, new, after=head, acts=acts):
            return False
        self.head, self._read_up_to = new, block.end
        return True


async def _events(
    ledger: Ledger, after: str | None, up_to: str | None, limit: int
) -> tuple[list[SealedRecord], str | None]:
    """The next events up to a position, at most `limit`, and the position they reach."""
    sealed: list[SealedRecord] = []
    while up_to is not None and (after or "") < up_to and len(sealed) < limit:
        page = await ledger.feed(after, limit=min(PAGE, limit - len(sealed)))
        places = {event.id: place for event, place in zip(page.events, page.positions, strict=True) if place <= up_to}
        records = await ledger.recorded([event for event in page.events if event.id in places])
        sealed += [sealed_event(record, places[record.event.id]) for record in records]
        if len(places) < len(page.events) or not page.events:
            return sealed, up_to
        after = page.position
    return sealed, after


async def acts_of_next_block(ledger: Ledger, head: AuditHead, block: ChainBlock) -> list[AdminAct] | None:
    """The acts of a block that is to follow the newest one. None if it differs from what the ledger has unsealed."""
    acts: list[AdminAct] = []
    last = 0
    while page := await ledger.acts(after=last, unsealed=True):
        acts += [act for act in page if sealed_act(act) in block.records]
        last = page[-1].no
    # One more than the block has, so that a block that leaves out an event is found.
    events, _ = await _events(ledger, head.position, block.end, len(block.records) - len(acts) + 1)
    same = (head.number + 1, head.sha256, head.feed, head.position)
    is_next = (block.number, block.previous, block.feed, block.start) == same
    return acts if is_next and block.records == (*map(sealed_act, acts), *events) else None


def _next_block(
    head: AuditHead,
    records: Sequence[SealedRecord],
    *,
    at: datetime,
    end: str | None,
    restarts: bool = False,
    late: bool = False,
) -> ChainBlock:
    return ChainBlock(
        number=head.number + 1,
        previous=head.sha256,
        feed=head.feed,
        at=audit.timestamp(at),
        start=head.position,
        end=end,
        records=tuple(records),
        restarts=restarts,
        late=late,
    )


def _head_of(block: ChainBlock, body: bytes) -> AuditHead:
    return AuditHead(number=block.number, sha256=sha256(body), position=block.end, feed=block.feed)


async def continue_chain(ledger: Ledger, objects: ObjectStore, actor: Actor, chain: str = INSTANCE_CHAIN) -> AuditHead:
    """The newest block of a ledger. A ledger without one continues the chain of the object store, or begins one.

    A ledger that was lost and rebuilt continues: its events have new positions and are sealed once more.
    """
    head = await ledger.audit_head()
    if head is not None:
        return head
    last = await last_block(objects, chain)
    first = AuditHead(number=0, sha256=NO_BLOCK, position=None)
    if last is not None:
        body, block = last
        first = replace(_head_of(block, body), position=None, feed=block.feed + 1)
    elif (await objects.list(f"{ids.AUDIT_FOLDER}/", limit=1)).items:
        first = await _begin_late(ledger, objects, first, chain)
    if await ledger.extend_audit_chain(actor, first, after=None):
        return first
    head = await ledger.audit_head()
    assert head is not None, "another process stored it"
    return head


async def _begin_late(ledger: Ledger, objects: ObjectStore, before: AuditHead, chain: str) -> AuditHead:
    """Write the first block of an instance that has published records before, which says so."""
    body = _next_block(before, (), at=await ledger.now(), end=None, late=True).to_bytes()
    key = ids.block_key(chain, 1)
    if not isinstance(await objects.put(key, body, when=CREATE), PutStored):
        there = await objects.get(key)
        body = b"" if there is None else there.body
    return _head_of(ChainBlock.read(key, body), body)


async def restart_chain(ledger: Ledger, objects: ObjectStore, actor: Actor, chain: str = INSTANCE_CHAIN) -> None:
    """Begin again after the object store, and every block with it, was lost. Otherwise change nothing.

    The new block names the hash of the lost one, which the ledger has. Everything in the ledger is sealed again.
    """
    head = await ledger.audit_head()
    if head is None or not head.number or await last_block(objects, chain) is not None:
        return
    anew = replace(head, feed=head.feed + 1, position=None)
    block = _next_block(anew, (), at=await ledger.now(), end=None, restarts=True)
    body = block.to_bytes()
    await objects.put(ids.block_key(chain, block.number), body, when=CREATE)
    await ledger.extend_audit_chain(actor, _head_of(block, body), after=head)


async def last_block(objects: ObjectStore, chain: str) -> tuple[bytes, ChainBlock] | None:
    """The block with the highest number in the object store, with its bytes. Raises RecordInvalid."""
    last = None
    async for page in listed_pages(objects, f"{ids.chain_folder(chain)}/"):
        own = [info.key for info in page.items if is_block_of(info.key, chain)]
        last = own[-1] if own else last
    newest = None if last is None else await objects.get(last)
    return None if newest is None else (newest.body, ChainBlock.read(newest.key, newest.body))


def is_block_of(key: str, chain: str) -> bool:
    """Whether an object of the folder of chains belongs to this chain."""
    return key.rpartition("/")[0] == ids.chain_folder(chain)
