"""`trellis audit verify`: compares the audit chain with the object store and with the ledger.

- Blocks: none is missing, each is named by the hash in the next one, and the newest by the ledger.
- Object store: every sealed record is there once, unchanged, under its own key and in order; every other record is one
  that the ledger has and that is not sealed yet.
- Ledger: every event up to the newest block, and every administrative act, is as it was sealed, and no event is missing
  whose job retention did not remove.

Records are compared by the hash of their bytes, so any change is found. What cannot be found here is a change of all
three sides at once: a head that was kept elsewhere (`--head`) proves that the chain still extends it.

Memory is bounded for any number of records: they are sorted in a temporary file.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from trellis.documents import audit, audit_log, ids
from trellis.documents.audit_chain import (
    NLM_CHAIN,
    NO_BLOCK,
    ChainBlock,
    SealedRecord,
    acts_of_next_block,
    is_block_of,
    sealed_act,
    sealed_event,
)
from trellis.documents.errors import RecordInvalid
from trellis.engine.admin_acts import RETAINED, AdminAct
from trellis.engine.ledger import Ledger
from trellis.engine.records import AuditHead, Event
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.connection import open_scratch_database
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.store import ObjectStore, listed_pages

VIOLATIONS_MAX = 1_000
PAGE = 500
READS_AT_ONCE = 16
LATER = 1 << 62
"""The place of what is not sealed yet: after everything that is."""
FIELDS_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedLedger:
    """A ledger with the name of its chain. A ledger that cannot be opened from here is None."""

    chain: str
    ledger: Ledger | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditViolation:
    """One difference: which record, where it was looked for, and what differs."""

    place: str
    """`chain`, `objects` or `ledger`."""
    detail: str
    event_id: str | None = None
    position: str | None = None
    """The feed position at which the event was sealed."""
    block: int | None = None
    key: str | None = None
    """The object that is concerned."""
    order: int = LATER
    """Where the record stands in the chain; the first violation has the lowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainCount:
    """How much one chain has sealed."""

    chain: str
    blocks: int
    sealed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """Result of a verification. `violations` begins with the first bad record of the chain."""

    blocks: int = 0
    sealed: int = 0
    chains: tuple[ChainCount, ...] = ()
    """The same for each chain that has blocks."""
    unsealed: int = 0
    """Number of events in the ledger that no block has yet."""
    unproven: int = 0
    """Number of records that no block has and that cannot be judged: they are older than the chain, or of a ledger that
    cannot be opened from here."""
    unproven_sha256: str | None = None
    """Hash over the ids and hashes of the records that are older than the chain, without those of NLM jobs. It stays the
    same while nobody changes, adds or removes one. None if there are none."""
    restarts: tuple[int, ...] = ()
    """Numbers of the blocks with which the chain began again after the object store was lost."""
    found: int = 0
    violations: tuple[AuditViolation, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was changed, removed, inserted or reordered."""
        return not self.found


Progress = Callable[[str, int], None]
"""Callback that receives what is being compared and how much was so far."""


async def verify_audit(
    ledgers: Sequence[AuditedLedger],
    objects: ObjectStore,
    *,
    anchor: str | None = None,
    unproven: str | None = None,
    on_progress: Progress = lambda _what, _count: None,
) -> AuditReport:
    """Compare the chains of these ledgers with the object store and the ledgers.

    `anchor` is the hash of a block that somebody kept: one of the blocks must have it. `unproven` is an
    `unproven_sha256` that somebody kept: it must be the same. Raises StoreUnavailable.
    """
    with closing(_Comparison(objects, on_progress)) as comparison:
        heads = {one.chain: None if one.ledger is None else await one.ledger.audit_head() for one in ledgers}
        for one in ledgers:
            await comparison.read_chain(one.chain, heads[one.chain], one.ledger)
        comparison.check_anchor(anchor)
        await comparison.read_records()
        for one in ledgers:
            if one.ledger is not None:
                await comparison.read_ledger(one.chain, one.ledger)
        unread = {one.chain for one in ledgers if one.ledger is None}
        for one in ledgers:
            if one.ledger is not None:
                await comparison.read_newer_blocks(one.chain, one.ledger)
        comparison.check_older_records(unproven)
        return comparison.report(unread)


_AUDIT_QUERIES = NamedQueries("trellis.documents:audit_verification.sql")


@dataclass(frozen=True, slots=True)
class _StoredRecord:
    """A record of the object store: its line, and the hash of the bytes that lie there."""

    event_id: str
    ts: str
    day: str
    sha256: str
    line: bytes
    fields: dict[str, Any]


@dataclass(slots=True)
class _Chain:
    """What is known of one chain after its blocks were read."""

    head: AuditHead | None
    began: dict[int, str] = field(default_factory=dict[int, str])
    """When the chain began to seal a rebuilt ledger, by the number of the feed. Events before were restored."""
    acts_before: str = ""
    """The time up to which retention removed administrative acts from the ledger."""


class _Comparison:
    """One verification. Used by one task at a time."""

    def __init__(self, objects: ObjectStore, on_progress: Progress) -> None:
        self._objects = objects
        self._on_progress = on_progress
        self._db = open_scratch_database(_AUDIT_QUERIES.create_tables)
        self._chains: dict[str, _Chain] = {}
        self._hashes: set[str] = set()
        self._violations: list[AuditViolation] = []
        self._found = 0
        self._counts: dict[str, ChainCount] = {}
        self._blocks = self._sealed = self._unsealed = self._records = 0
        self._restarts: list[int] = []
        self._all_rebuilt_listed = True
        self._unproven_sha256: str | None = None
        self._late = ""
        """When the chain of an instance with earlier records began. Whether those were changed cannot be judged."""

    def close(self) -> None:
        """Close the database, which deletes its file."""
        self._db.close()

    def _add(self, **facts: Any) -> None:
        self._found += 1
        if len(self._violations) < VIOLATIONS_MAX:
            self._violations.append(AuditViolation(**facts))

    def _add_sealed(self, order: int | None, **facts: Any) -> None:
        """Report a violation about the record at this place of the chain. None: it is not sealed."""
        if order is not None:
            *_, position, block = self._db.execute(_AUDIT_QUERIES.record_at, (order,)).fetchall()[0]
            facts |= {"position": position, "block": block, "order": order}
        self._add(**facts)

    # --- the chain -----------------------------------------------------------------------------------------------

    async def read_chain(self, name: str, head: AuditHead | None, ledger: Ledger | None) -> None:
        """Read the blocks of a chain in order, and compare the last one with the ledger's head.

        If a running sealer has added blocks meanwhile, they count as well.
        """
        chain = self._chains[name] = _Chain(head)
        number, previous, position, feed = 0, NO_BLOCK, cast("str | None", None), 1
        async for key, body in self._block_bodies(name):
            try:
                block = ChainBlock.read(key, body)
            except RecordInvalid as error:
                self._add(place="chain", key=key, detail=str(error), order=self._sealed)
                return
            if head is not None and ledger is not None and number == head.number:
                head = chain.head = await self._check_next(name, key, block, head, ledger)
                if number == head.number:
                    continue
            self._late = max(self._late, block.at if block.late else "")
            if block.restarts and not number:
                number, previous, self._restarts = block.number - 1, block.previous, [*self._restarts, block.number]
            problem = _problem(block, key == ids.block_key(name, block.number), number, previous)
            if problem is None and block.feed == feed and block.start != position and not block.restarts:
                problem = f"it begins after position {block.start}, and the block before it ended at {position}"
            if problem is not None:
                self._add(place="chain", block=number + 1, key=key, detail=problem, order=self._sealed)
                return
            if (block.feed != feed or block.late) and not block.restarts:
                chain.began[block.feed] = block.at
            self._add_block(name, block)
            number, previous, position, feed = block.number, sha256(body), block.end, block.feed
            self._hashes.add(previous)
            self._on_progress("blocks read", self._blocks)
        if ledger is not None:
            self._compare_head(name, head, number, previous)

    async def _block_bodies(self, name: str) -> AsyncGenerator[tuple[str, bytes]]:
        """The blocks of a chain in order, also those that are written meanwhile."""
        last: str | None = None
        more = True
        while more:
            more = False
            async for key, body in self._bodies(
                f"{ids.chain_folder(name)}/", lambda key: is_block_of(key, name), after=last
            ):
                last, more = key, True
                yield key, body

    async def _check_next(self, name: str, key: str, block: ChainBlock, head: AuditHead, ledger: Ledger) -> AuditHead:
        """Check an object that lies beyond the newest block. Returns the newest block as it is now.

        Only the next block may lie there, written and not yet stored as the newest, with what the ledger has unsealed.
        """
        problem = None
        if key != ids.block_key(name, head.number + 1):
            problem = f"the newest block of the ledger is {head.number}, and no sealer writes beyond the next one"
        elif block.previous != head.sha256:
            problem = f"block {block.number} does not follow the newest block of the ledger"
        elif await acts_of_next_block(ledger, head, block) is None:
            problem = f"block {block.number} differs from what the ledger has not sealed yet"
        latest = await ledger.audit_head() or head
        if problem is not None and latest.number <= head.number:
            self._add(place="chain", block=block.number, key=key, detail=problem)
        return latest if latest.number > head.number else head

    async def read_newer_blocks(self, name: str, ledger: Ledger) -> None:
        """Read the blocks that were added during the verification: a record in them is not unknown."""
        latest = await ledger.audit_head()
        if latest is None or not self._db.execute(_AUDIT_QUERIES.any_stray).fetchall():
            return
        head = self._chains[name].head
        number, previous = (0, NO_BLOCK) if head is None else (head.number, head.sha256)
        while number < latest.number:
            number += 1
            key = ids.block_key(name, number)
            stored = await self._objects.get(key)
            try:
                block = ChainBlock.read(key, b"" if stored is None else stored.body)
            except RecordInvalid as error:
                self._add(place="chain", key=key, block=number, detail=str(error))
                return
            problem = _problem(block, True, number - 1, previous)
            if problem is not None:
                self._add(place="chain", key=key, block=number, detail=problem)
                return
            previous = sha256(b"" if stored is None else stored.body)
            for one in block.records:
                self._db.execute(_AUDIT_QUERIES.forget_stray, (one.event_id, one.day, one.sha256))
        if head is not None and number > head.number and previous != latest.sha256:
            detail = f"block {number} has the hash {previous} and the ledger has {latest.sha256} as the newest"
            self._add(place="chain", block=number, key=ids.block_key(name, number), detail=detail)

    def _compare_head(self, name: str, head: AuditHead | None, number: int, previous: str) -> None:
        where = f"the chain {name}" if name else "the chain"
        if head is None and number:
            self._add(place="ledger", detail=f"{where} has {number} blocks and the ledger has no newest block")
        elif head is not None and number < head.number:
            key = ids.block_key(name, number + 1)
            detail = f"block {number + 1} is missing: the newest block of the ledger is {head.number}"
            self._add(place="chain", block=number + 1, key=key, detail=detail, order=self._sealed)
        elif head is not None and head.sha256 != previous:
            detail = f"block {number} has the hash {previous} and the ledger has {head.sha256} as the newest"
            self._add(place="chain", block=number, key=ids.block_key(name, number), detail=detail, order=self._sealed)

    def _add_block(self, name: str, block: ChainBlock) -> None:
        self._db.execute("BEGIN")
        for one in block.records:
            job = None if one.position is None else one.event_id.rpartition("-")[0]
            row = (name, block.number, block.feed, one.event_id, one.day, one.sha256, one.position, job)
            self._db.execute(_AUDIT_QUERIES.add_sealed, row)
        self._db.execute("COMMIT")
        before = self._counts.get(name, ChainCount(chain=name, blocks=0, sealed=0))
        self._counts[name] = replace(before, blocks=before.blocks + 1, sealed=before.sealed + len(block.records))
        self._blocks += 1
        self._sealed += len(block.records)

    def check_anchor(self, anchor: str | None) -> None:
        """Check that one of the blocks has the hash that somebody kept."""
        if anchor is not None and anchor not in self._hashes:
            detail = f"no block has the hash {anchor}: this chain does not extend the head that was kept"
            self._add(place="chain", detail=detail, order=-1)

    def check_older_records(self, expected: str | None) -> None:
        """Hash the records that are older than the chain, and check that it is the hash that somebody kept."""
        digest, count = hashlib.sha256(), 0
        for row in self._db.execute(_AUDIT_QUERIES.unproven, {"late": self._late, "elsewhere": NLM_JOB.name}):
            digest.update(json.dumps(row).encode())
            count += 1
        self._unproven_sha256 = digest.hexdigest() if count else None
        if expected is not None and self._unproven_sha256 != expected:
            now = f"have the hash {self._unproven_sha256}" if count else "are gone"
            detail = f"the records that are older than the chain {now}, and the hash that was kept is {expected}"
            self._add(place="objects", detail=detail)

    # --- the object store ----------------------------------------------------------------------------------------

    async def read_records(self) -> None:
        """Compare every audit record of the object store with the blocks."""
        folder = f"{ids.AUDIT_FOLDER}/"
        async for key, body in self._bodies(folder, lambda key: not key.startswith(f"{ids.CHAIN_FOLDER}/")):
            self._db.execute("BEGIN")
            if key.endswith(audit_log.SUFFIX):
                self._read_segment(key, body)
            else:
                self._read_single(key, body)
            self._db.execute("COMMIT")
            self._on_progress("records read", self._records)
        async for key, _ in self._bodies(f"{ids.CHAIN_FOLDER}/", lambda key: not self._is_block(key)):
            self._add(place="chain", key=key, detail="it is no block of a chain")

    def _is_block(self, key: str) -> bool:
        return any(is_block_of(key, name) for name in self._chains)

    async def _bodies(
        self, prefix: str, wanted: Callable[[str], bool], *, after: str | None = None
    ) -> AsyncGenerator[tuple[str, bytes]]:
        async for page in listed_pages(self._objects, prefix, after=after):
            keys = [info.key for info in page.items if wanted(info.key)]
            for few in (keys[start : start + READS_AT_ONCE] for start in range(0, len(keys), READS_AT_ONCE)):
                for stored in await asyncio.gather(*map(self._objects.get, few)):
                    if stored is not None:
                        yield stored.key, stored.body

    def _read_single(self, key: str, body: bytes) -> None:
        line = audit.body_to_line(body)
        record = None if line is None else _stored(line)
        if record is None:
            event_id = key.rpartition("/")[2].removesuffix(".json")
            self._add_unreadable(key, event_id, "it is not written as an audit record is")
            return
        self._take(key, record)
        day = f"{ids.AUDIT_FOLDER}/{record.day}/{record.event_id}"
        if key not in {f"{day}.json", f"{day}.{sha256(body)[:16]}.json"}:
            self._add_at(record, key, "the record lies under the name of another one")

    def _read_segment(self, key: str, body: bytes) -> None:
        lines = body.split(b"\n")
        if lines.pop() != b"" or not lines:
            self._add_unreadable(key, None, "the segment does not end with a whole line")
        first, last, low = True, -1, -1
        for line in lines:
            record = _stored(line)
            if record is None:
                self._add_unreadable(key, None, "a line of the segment is not written as an audit record is")
                continue
            order = self._take(key, record)
            if record.day != key.split("/")[1]:
                self._add_at(record, key, "the segment is of another day than the record")
            if first and key != _segment_key(record):
                self._add_at(record, key, "the segment does not begin with the event that its name says")
            first = False
            if order is not None and order < last:
                self._add_at(record, key, "the lines of the segment are not in the order of the events")
            if order is not None:
                last, low = max(last, order), order if low < 0 else min(low, order)
        if low >= 0:
            self._db.execute(_AUDIT_QUERIES.add_segment, (key, key.split("/")[1], low, last))

    def _add_unreadable(self, key: str, event_id: str | None, detail: str) -> None:
        day = key.split("/")[1]
        sealed = self._db.execute(_AUDIT_QUERIES.find_other, (event_id or "", day, "")).fetchall()
        order = sealed[0][0] if sealed else None
        self._add_sealed(order, place="objects", event_id=event_id, key=key, detail=detail)

    def _take(self, key: str, record: _StoredRecord) -> int | None:
        """Note where a record lies. Returns its place in the chain, if the order of its segment can be judged by it."""
        self._records += 1
        which = (record.event_id, record.day, self._sealed_hash(record))
        rows = self._db.execute(_AUDIT_QUERIES.find, which).fetchall()
        self._note_act(record.fields, rows[0][4] if rows else None, rows[0][0] if rows else LATER)
        if not rows:
            self._db.execute(
                _AUDIT_QUERIES.add_stray,
                (key, *which, record.ts, record.line, cast("str | None", record.fields.get("lifecycle"))),
            )
            return None
        order, feed, met, _, chain = rows[0]
        if met:
            self._add_at(record, key, "the record is there twice")
        self._db.execute(_AUDIT_QUERIES.mark_met, which)
        if audit.is_of_act(record.fields):
            self._db.execute(_AUDIT_QUERIES.note_act, (record.ts, *which))
        began = self._chains[chain].began.get(feed)
        return None if began is not None and record.ts < began else order

    def _sealed_hash(self, record: _StoredRecord) -> str:
        """The hash with which the record is sealed.

        A record that is older than the chain may lie there in an older format. It was sealed from the ledger, in today's.
        """
        if record.ts < self._late and record.fields.get("format") == audit.FIRST_FORMAT:
            today = sha256(audit.compact({**record.fields, "format": audit.FORMAT}))
            if self._db.execute(_AUDIT_QUERIES.find, (record.event_id, record.day, today)).fetchall():
                return today
        return record.sha256

    def _note_act(self, fields: dict[str, Any], chain: str | None, order: int = LATER) -> None:
        """Note what an administrative act says about the records: what retention removed, what a rebuild wrote.

        An act that is neither sealed nor in a ledger belongs to no chain and proves no removal.
        """
        if not audit.is_of_act(fields):
            return
        written = fields.get("objects_written")
        if isinstance(written, list):
            keys = cast("list[str]", written)
            self._all_rebuilt_listed &= len(keys) < audit_log.KEYS_MAX
            for key in keys:
                self._db.execute(_AUDIT_QUERIES.add_rebuilt, (str(key),))
        if fields["event"] == RETAINED and chain is not None:
            self._note_retention(fields, chain, order)

    def _note_retention(self, fields: dict[str, Any], name: str, order: int) -> None:
        """Note which jobs and acts a pass of retention removed from the ledger of this chain."""
        for job in cast("list[str]", fields.get("jobs", [])):
            self._db.execute(_AUDIT_QUERIES.add_removed, (str(job), order))
        chain = self._chains[name]
        chain.acts_before = max(chain.acts_before, str(fields.get("acts_before") or ""))

    # --- the ledger ----------------------------------------------------------------------------------------------

    async def read_ledger(self, name: str, ledger: Ledger) -> None:
        """Compare every event and every act of a ledger with the blocks of its chain."""
        head = self._chains[name].head
        position: str | None = None
        while (page := await ledger.feed(position, limit=PAGE)).events:
            places = {event.id: place for event, place in zip(page.events, page.positions, strict=True)}
            recorded = await ledger.recorded(page.events)
            self._db.execute("BEGIN")
            for record in recorded:
                sealed = sealed_event(record, places.pop(record.event.id))
                self._compare(name, head, sealed, audit.to_line(record))
            self._db.execute("COMMIT")
            if places:  # An event that is there no longer was removed with its job between the two reads.
                there = {event.id for event in (await ledger.feed(position, limit=PAGE)).events}
                for event in page.events:
                    if event.id in places and event.id in there:
                        self._add_bare(event, places[event.id])
            position = page.position
            self._on_progress("events compared", self._records)
        await self._read_acts(name, ledger)
        self._find_missing(name, head)

    def _add_bare(self, event: Event, position: str) -> None:
        detail = "the event is there and the job that it belongs to is not"
        self._add(place="ledger", event_id=event.id, position=position, detail=detail)

    def _compare(self, name: str, head: AuditHead | None, sealed: SealedRecord, line: bytes) -> None:
        which = (sealed.event_id, sealed.day, sealed.sha256)
        rows = self._db.execute(_AUDIT_QUERIES.find, which).fetchall()
        position = sealed.position
        if not rows:
            if head is not None and head.position is not None and position is not None and position <= head.position:
                self._add_changed(name, sealed, line)
                return
            self._unsealed += 1
            self._db.execute(_AUDIT_QUERIES.forget_stray, which)
            return
        self._db.execute(_AUDIT_QUERIES.mark_in_ledger, (*which, name))
        if head is not None:
            own = [row for row in rows if row[1] == head.feed]
            if own and all(row[3] != position for row in own):
                detail = f"the event was sealed at this position and is now at {position}"
                self._add_sealed(own[0][0], place="ledger", event_id=sealed.event_id, detail=detail)
        if not rows[0][2]:
            self._add_changed_object(sealed, line, rows[0][0])

    def _add_changed(self, name: str, sealed: SealedRecord, line: bytes) -> None:
        """Report an event or act of the ledger that was not sealed as it is now."""
        other = self._db.execute(_AUDIT_QUERIES.find_other, (sealed.event_id, sealed.day, name)).fetchall()
        if not other:
            detail = "no block has this event, and the blocks go beyond its position"
            self._add(place="ledger", event_id=sealed.event_id, position=sealed.position, detail=detail)
            return
        order = other[0][0]
        *which, _, _ = self._db.execute(_AUDIT_QUERIES.record_at, (order,)).fetchall()[0]
        self._db.execute(_AUDIT_QUERIES.mark_in_ledger, (*which, name))
        detail = "the ledger has another record of it than the one that was sealed"
        stray = self._db.execute(_AUDIT_QUERIES.strays_of, (sealed.event_id, sealed.day)).fetchall()
        if stray:
            detail += f", and so has the object store; they differ in {_difference(stray[0][1], line)}"
        self._add_sealed(order, place="ledger", event_id=sealed.event_id, detail=detail)

    def _add_changed_object(self, sealed: SealedRecord, line: bytes, order: int) -> None:
        """Report a record that the ledger still has and the object store has not, or not so."""
        stray = self._db.execute(_AUDIT_QUERIES.strays_of, (sealed.event_id, sealed.day)).fetchall()
        key, detail = None, "the record is missing"
        if stray:
            key, there = stray[0]
            detail = f"the record is not the one that was sealed: it differs in {_difference(there, line)}"
            self._db.execute(_AUDIT_QUERIES.forget_stray_at, (key, sealed.event_id))
        self._add_sealed(order, place="objects", event_id=sealed.event_id, key=key, detail=detail)
        self._db.execute(_AUDIT_QUERIES.mark_met, (sealed.event_id, sealed.day, sealed.sha256))

    async def _read_acts(self, name: str, ledger: Ledger) -> None:
        last = 0
        while page := await ledger.acts(after=last):
            last = page[-1].no
            self._db.execute("BEGIN")
            for act in page:
                self._compare_act(name, act)
            self._db.execute("COMMIT")

    def _compare_act(self, name: str, act: AdminAct) -> None:
        sealed, line = sealed_act(act), audit.act_to_line(act)
        if self._db.execute(_AUDIT_QUERIES.find_other, (sealed.event_id, sealed.day, name)).fetchall():
            if self._db.execute(_AUDIT_QUERIES.find, (sealed.event_id, sealed.day, sealed.sha256)).fetchall():
                self._compare(name, None, sealed, line)
            else:
                self._add_changed(name, sealed, line)
            return
        self._note_act(audit.act_document(act), name)
        self._db.execute(_AUDIT_QUERIES.forget_stray, (sealed.event_id, sealed.day, sealed.sha256))

    def _find_missing(self, name: str, head: AuditHead | None) -> None:
        feed = 0 if head is None else head.feed
        events = self._db.execute(_AUDIT_QUERIES.missing_events, (name, feed, VIOLATIONS_MAX)).fetchall()
        for order, event_id in events:
            detail = "the event is missing, and retention did not remove its job"
            self._add_sealed(order, place="ledger", event_id=event_id, detail=detail)
        which = {"chain": name, "feed": feed, "before": self._chains[name].acts_before, "limit": VIOLATIONS_MAX}
        for order, event_id in self._db.execute(_AUDIT_QUERIES.missing_acts, which).fetchall():
            detail = "the administrative act is missing, and retention did not remove it"
            self._add_sealed(order, place="ledger", event_id=event_id, detail=detail)

    # --- the result ----------------------------------------------------------------------------------------------

    def report(self, unread: set[str]) -> AuditReport:
        """The result. `unread` names chains whose ledger could not be opened."""
        judged = {"late": self._late, "elsewhere": NLM_JOB.name if NLM_CHAIN in unread else None}
        unproven: int = self._db.execute(_AUDIT_QUERIES.count_unproven, judged).fetchall()[0][0]
        strays = self._db.execute(_AUDIT_QUERIES.strays, {**judged, "limit": VIOLATIONS_MAX}).fetchall()
        for key, event_id, order in strays:
            detail = "no block has this record, and the ledger does not have it either"
            if order is not None:
                detail = "the record is not the one that was sealed"
            self._add_sealed(order, place="objects", event_id=event_id, key=key, detail=detail)
        changed = {event_id for _, event_id, order in strays if order is not None}
        for order, event_id in self._db.execute(_AUDIT_QUERIES.missing_objects, (VIOLATIONS_MAX,)).fetchall():
            if event_id not in changed:
                self._add_sealed(order, place="objects", event_id=event_id, detail="the record is missing")
        if self._all_rebuilt_listed:
            for key, order in self._db.execute(_AUDIT_QUERIES.overlapping, (VIOLATIONS_MAX,)).fetchall():
                self._add(place="objects", key=key, detail="the segment holds a line of another segment", order=order)
        return AuditReport(
            blocks=self._blocks,
            sealed=self._sealed,
            chains=tuple(self._counts.values()),
            unsealed=self._unsealed,
            unproven=unproven,
            unproven_sha256=self._unproven_sha256,
            restarts=tuple(self._restarts),
            found=self._found,
            violations=tuple(sorted(self._violations, key=lambda one: one.order)),
        )

    def _add_at(self, record: _StoredRecord, key: str, detail: str) -> None:
        rows = self._db.execute(_AUDIT_QUERIES.find, (record.event_id, record.day, record.sha256)).fetchall()
        order = rows[0][0] if rows else None
        self._add_sealed(order, place="objects", event_id=record.event_id, key=key, detail=detail)


def _problem(block: ChainBlock, named_right: bool, number: int, previous: str) -> str | None:  # noqa: FBT001 - a fact
    """What is wrong with a block after the block with this number and hash."""
    if not named_right or block.number != number + 1:
        return f"block {number + 1} is missing: there is block {block.number} in its place"
    if block.previous != previous:
        return f"it follows a block with the hash {block.previous}, and block {number} has {previous}"
    return None


def _stored(line: bytes) -> _StoredRecord | None:
    """A record from its line; None if the line is none."""
    try:
        fields = cast("dict[str, Any]", json.loads(line))
        event_id, ts = fields["event_id"], fields["ts"]
        if not isinstance(event_id, str) or not isinstance(ts, str) or len(ts) < len("YYYY-MM-DD"):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return _StoredRecord(event_id, ts, ts[:10].replace("-", ""), sha256(line), line, fields)


def _segment_key(first: _StoredRecord) -> str:
    time = first.ts[11:26].replace(":", "").replace(".", "")
    return f"{ids.AUDIT_FOLDER}/{first.day}/segments/{time}-{first.event_id}{audit_log.SUFFIX}"


def _difference(there: bytes, line: bytes) -> str:
    """The names of the fields in which two records differ."""
    one, other = cast("dict[str, Any]", json.loads(there)), cast("dict[str, Any]", json.loads(line))
    names = [name for name in {**one, **other} if name not in one or name not in other or one[name] != other[name]]
    shown = ", ".join(names[:FIELDS_SHOWN]) or "the order of its fields"
    return f"{shown} and more" if len(names) > FIELDS_SHOWN else shown
