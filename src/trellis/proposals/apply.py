"""The apply engine: applies approved proposals exactly once, or records why it could not (D22, AUTH-6). Also previews.

Only this engine writes memory and agents' files, and only for approved proposals. If an engine dies, another takes the
proposal up when its lease expires, without asking a person again. Nothing is applied twice: a memory commit names its
proposal, and the digest a file is going to have is journaled before the file is written. If that note was lost with the
ledger, the file's content shows whether the change was made.

A proposal waits for a person if it was refused, if applying it raised an error, or if LOST_MAX engines died with it.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from trellis.agents import sources
from trellis.auth.matrices import permit_actor
from trellis.documents.errors import ApplyRefused, TargetRefused
from trellis.engine import tracing
from trellis.engine.clock import Clock
from trellis.engine.errors import LedgerError, TrellisError
from trellis.engine.jobs import (
    Actor,
    Advance,
    Claim,
    ClaimId,
    JobId,
    Lease,
    LeaseLost,
    Move,
    Moved,
    RequestId,
    RequestKey,
    StepApplied,
    Turn,
    TypeClaim,
)
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import Event, JobFilter
from trellis.lifecycles import Trigger
from trellis.lifecycles.proposal import PROPOSAL
from trellis.nlm.citations import CITATIONS_MAX, has_excerpt
from trellis.proposals import proposal as proposals
from trellis.proposals.proposal import (
    AgentFileChange,
    apply_change,
    file_change,
    grounds_of,
    is_changed,
    quotations_of,
)
from trellis.storage.memory.errors import RepositoryError
from trellis.storage.memory.layout import AlreadyApplied, Committed, VersionConflict
from trellis.storage.memory.markdown import unified_diff
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.updates import Operation, Update
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import CREATE, KeyInvalid, ObjectStore, PutStored, StoreUnavailable, if_match

APPLYING = "applying"
FAILED = "failed"
INTENT = "apply"
"""Journal entry with the digest that a file is going to have."""
ERROR_CHARS_MAX = 1_000
LOST_MAX = 5
"""After this many engines died with a proposal, it waits for a person."""
LOOK_MAX = 100
KNOWN_MAX = 10_000
WAIT_S = 0.05

_log = log_of("trellis.apply")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyOptions:
    """Batch size, lease and polling of the engine."""

    batch: int = 10
    lease_s: float = 30.0
    heartbeat_s: float = 10.0
    poll_s: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyReport:
    """Result of one pass."""

    applied: int = 0
    failed: int = 0


@dataclass(kw_only=True)
class ApplyEngine:
    """The service. Each pass applies approved proposals."""

    ledger: Ledger
    actor: Actor
    objects: ObjectStore
    memory: MemoryRepository
    new_id: Callable[[], str]
    options: ApplyOptions
    name: str = "apply-engine"
    waits_for_events = True
    _known: LruCache[JobId, int] = field(default_factory=lambda: LruCache[JobId, int](KNOWN_MAX))
    """Failed proposals that wait for a person, with the version at which they were checked."""
    _cursor: str | None = None

    async def run_once(self) -> ApplyReport:
        """Retry proposals whose engine died, then apply approved ones, oldest first, each under its own lease.

        Raises NotAllowed, before anything is claimed, for an actor that may not commit.
        """
        permit_actor(self.actor, "memory.commit")
        done = await self._take_up()
        terms = TypeClaim(type=proposals.TYPE, lease_s=self.options.lease_s, heartbeat_s=self.options.heartbeat_s)
        for _ in range(self.options.batch):
            claim = Claim(claim_id=ClaimId(self.new_id()), types=(terms,), lifecycle=PROPOSAL.name)
            claimed = (await self.ledger.turn(Turn(actor=self.actor, claim=claim))).claimed
            if not claimed:
                break
            done += [await self._apply(one.lease, one.payload, one.trace) for one in claimed]
        return ApplyReport(applied=done.count(True), failed=done.count(False))

    async def _take_up(self) -> list[bool | None]:
        """Check one page of the failed proposals, all pages in turn, and retry those whose engine died."""
        where = JobFilter(lifecycle=PROPOSAL.name, state=FAILED)
        page = await self.ledger.jobs(where, limit=LOOK_MAX, cursor=self._cursor)
        self._cursor = page.cursor
        done: list[bool | None] = []
        for job in page.jobs:
            if self._known.get(job.job_id) == job.version:
                continue
            if is_open(await self.ledger.events(job.job_id)):
                done.append(await self._again(job.job_id, RequestId(self.new_id()), version=job.version))
            else:
                self._known[job.job_id] = job.version
        return done

    def pause_s(self, report: ApplyReport) -> float:
        """No pause while there may be more."""
        return 0.0 if report.applied or report.failed else self.options.poll_s

    async def apply_now(self, proposal: JobId, request_id: RequestId, *, key: RequestKey | None = None) -> str:
        """Apply an approved proposal, or a failed one again, on a person's request. Returns its state afterwards.

        `key` is stored with the step that begins it. Raises NotAllowed, IdempotencyMismatch.
        """
        permit_actor(self.actor, "memory.commit")
        await self._again(proposal, request_id, key=key)
        job = await self.ledger.job(proposal)
        return "" if job is None else job.state

    async def _again(
        self, proposal: JobId, request_id: RequestId, *, version: int | None = None, key: RequestKey | None = None
    ) -> bool | None:
        """Whether the proposal was applied; None if another engine took it first."""
        move = Move(
            job_id=proposal,
            target=APPLYING,
            request_id=request_id,
            version=version,
            lease_s=self.options.lease_s,
            heartbeat_s=self.options.heartbeat_s,
            key=key,
        )
        answer = await self.ledger.move(self.actor, move)
        job = await self.ledger.job(proposal)
        if not isinstance(answer, Moved) or answer.lease is None or job is None or job.payload is None:
            return None
        return await self._apply(answer.lease, job.payload, job.trace)

    async def _apply(self, lease: Lease, payload: bytes, trace: str | None) -> bool | None:
        """Whether the proposal was applied; None if another engine holds it now."""
        with tracing.carried(trace, "proposal.apply", {"trellis.job_id": lease.job_id}) as span:
            applied = await self._applied(lease, payload)
            span.note({"trellis.applied": bool(applied)})
            return applied

    async def _applied(self, lease: Lease, payload: bytes) -> bool | None:
        try:
            outcome = await self._do(lease, json.loads(payload))
        except (StoreUnavailable, LedgerError):
            raise  # not the proposal's fault: it is retried
        except _LeaseGone:
            return None
        except TrellisError as error:
            return await self._settle(lease, Trigger.FAIL, {"error": str(error)[:ERROR_CHARS_MAX]})
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one proposal, it is told, and the others go on
            _log.exception("apply_broke", proposal=lease.job_id)
            outcome = {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]}
            return await self._settle(lease, Trigger.FAIL, outcome)
        return await self._settle(lease, Trigger.COMPLETE, outcome)

    async def _settle(self, lease: Lease, trigger: str, data: Mapping[str, Any]) -> bool | None:
        advance = Advance(lease, APPLYING, trigger, data=json.dumps(data, ensure_ascii=False).encode())
        outcome = (await self.ledger.turn(Turn(actor=self.actor, advances=(advance,)))).outcomes[0]
        if isinstance(outcome, LeaseLost):
            _log.warning("apply_refused", proposal=lease.job_id, trigger=trigger, reason="lease lost")
        return trigger == Trigger.COMPLETE if isinstance(outcome, StepApplied) else None

    async def _do(self, lease: Lease, body: Mapping[str, Any]) -> dict[str, Any]:
        if body["action"] == proposals.MEMORY_UPDATE:
            return await self._update_memory(lease.job_id, body)
        if body["action"] in sources.ANNOTATION_KINDS:
            return await self._annotate(lease.job_id, dict(body))
        return await self._change_file(lease, file_change(body["agent_slug"], body), body["target_hash"])

    # --- memory ------------------------------------------------------------------------------------------------------

    async def _update_memory(self, proposal: JobId, body: Mapping[str, Any]) -> dict[str, Any]:
        decision = _decision(await self.ledger.events(proposal))
        content = body["content"]
        answer = await asyncio.to_thread(
            self.memory.commit,
            body["agent_slug"],
            [update_of(one) for one in content["updates"]],
            expected_version=content["expected_version"],
            run_id=body["source"]["run_id"] or proposal,  # a proposal without a run uses its own id
            proposal_id=proposal,
            reason=content.get("summary") or "no reason given",
            auto_approved=decision.target == "auto_approved",
            author=decision.actor,
            at=decision.ts,  # the same for every try, so that every try makes the same commit
        )
        match answer:
            case Committed(commit=commit) | AlreadyApplied(commit=commit):
                return {"git_commit": commit}
            case VersionConflict() as stale:
                raise ApplyRefused(reason=f"conflict: {_stale_text(stale)}")

    # --- annotations -------------------------------------------------------------------------------------------------

    async def _annotate(self, proposal: JobId, body: dict[str, Any]) -> dict[str, Any]:
        """Store a comment or tag beside the text it is about. A retry stores the same bytes."""
        change = file_change(body["agent_slug"], body)
        decision = _decision(await self.ledger.events(proposal))
        annotation = sources.annotation_of(body, approved_by=decision.actor, approved_at=decision.ts)
        key, bytes_ = sources.annotation_key(body["agent_slug"], annotation), annotation.to_bytes()
        if not await self._shows(key, bytes_):
            about = await self.objects.get(change.key)
            if about is None or sha256(about.body) != body["target_hash"]:
                raise ApplyRefused(reason=f"conflict: {change.key} has changed since this was proposed")
            stored = await self.objects.put(key, bytes_, when=CREATE)
            if not isinstance(stored, PutStored) and not await self._shows(key, bytes_):
                raise ApplyRefused(reason=f"conflict: {key} holds something else")
        return {"object_key": key}

    # --- files -------------------------------------------------------------------------------------------------------

    async def _change_file(self, lease: Lease, change: AgentFileChange, expected: str | None) -> dict[str, Any]:
        there = await self.objects.get(change.key)
        before = None if there is None else there.body
        noted = (await self.ledger.read_journal(lease.job_id)).get(INTENT)
        was_written = before is not None and noted is not None and sha256(before) == noted.decode()
        if was_written or (before is not None and is_changed(change, expected, before)):
            return {"object_key": change.key}
        if (None if before is None else sha256(before)) != expected:
            raise ApplyRefused(reason=f"conflict: {change.key} has changed since this was proposed")
        after = apply_change(change, before)
        if isinstance(await self.ledger.journal(lease, INTENT, sha256(after).encode()), LeaseLost):
            raise _LeaseGone
        when = CREATE if there is None else if_match(there.etag)
        stored = await self.objects.put(change.key, after, when=when)
        if not isinstance(stored, PutStored) and not await self._shows(change.key, after):
            raise ApplyRefused(reason=f"conflict: {change.key} was changed at the same moment")
        return {"object_key": change.key}

    async def _shows(self, key: str, body: bytes) -> bool:
        """Whether the object already has these bytes.

        They may come from an engine whose lease expired, or from a put of this engine whose answer was lost.
        """
        there = await self.objects.get(key)
        return there is not None and there.body == body


class _LeaseGone(Exception):
    """The lease was lost to another engine."""


def update_of(update: Mapping[str, Any]) -> Update:
    """One memory update, from its form in a proposal's body."""
    return Update(
        file=update["file"],
        operation=Operation(update["operation"]),
        content=update.get("content") or "",
        section=update.get("section"),
        loop_id=update.get("loop_id"),
        resolution=update.get("resolution"),
    )


def _decision(events: list[Event]) -> Event:
    return [event for event in events if event.target in {"approved", "auto_approved"}][-1]


def is_open(events: Sequence[Event]) -> bool:
    """Whether an engine is applying the proposal, or will do so without a person's decision."""
    last, lost = events[-1], sum(map(_was_lost, events))
    return last.target in {"approved", "auto_approved", APPLYING} or (_was_lost(last) and lost < LOST_MAX)


def _was_lost(event: Event) -> bool:
    """Whether an engine died with the proposal.

    A failing engine records data; a dead one does not, and its lease expires.
    """
    return event.target == FAILED and event.data is None


async def apply_until_settled(
    ledger: Ledger, engine: ApplyEngine | None, clock: Clock, proposal: JobId, patience_s: float
) -> str:
    """Run the engine until the proposal is applied or refused, or `patience_s` is over. Returns the proposal's state.

    If another engine holds the proposal, or died with it, this takes until that lease expires. Without an engine it
    waits for those of other processes.
    """
    ends_at = clock.monotonic() + patience_s
    while is_open(events := await ledger.events(proposal)) and clock.monotonic() < ends_at:
        report = None if engine is None else await engine.run_once()
        if report is None or not (report.applied or report.failed):
            await clock.sleep(WAIT_S)
    return events[-1].target


# Previews of proposals: a unified diff of the current target against the proposed one.
#
# A comment or tag is stored as an annotation, a separate object. Its diff shows that object, not the text it is about.
# Lines end at a newline only. Other Unicode line breaks stay inside their line, where the reviewer's tool can show
# them.

ENDED = frozenset({"applied", "rejected", "expired"})
_NO_LONGER = "so it can no longer be applied: reject it and run the agent again"
READS_AT_ONCE = 8
"""Number of targets read concurrently for a list of proposals."""
PENDING = "pending"
APPROVED = ("approved", "auto_approved", APPLYING)
"""The states of proposals that will be applied without another decision."""
OTHERS_PAGE = 100
"""How many proposals in one state one read takes, of those that are compared with one."""
PENDING_COMPARED_MAX = 1_000
"""How many pending proposals are compared with one to name those that exclude each other. The newest ones are."""


async def diff_of(
    document: Mapping[str, Any], *, objects: ObjectStore, memory: MemoryRepository, now: datetime
) -> str | None:
    """The diff; None if the proposal changes no text or is already applied, rejected or expired.

    Raises TargetRefused, UpdatesRefused.
    """
    content = document["content"]
    if document["status"] in ENDED or not ({"change", "updates"} & content.keys()):
        return None
    if document["action"] == proposals.MEMORY_UPDATE:
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


def has_target(document: Mapping[str, Any]) -> bool:
    """Whether the proposal changes a text that others may change before it is applied."""
    return document["status"] not in ENDED and bool({"change", "updates"} & document["content"].keys())


async def conflict_of(document: Mapping[str, Any], *, objects: ObjectStore, memory: MemoryRepository) -> str | None:
    """Why applying the proposal would be refused now; None if its target is unchanged. Raises TargetRefused."""
    if not has_target(document):
        return None
    if document["action"] == proposals.MEMORY_UPDATE:
        expected, id_ = document["content"]["expected_version"], document["id"]
        stale = await asyncio.to_thread(
            memory.version_conflict, document["agent_slug"], expected_version=expected, proposal_id=id_
        )
        return None if stale is None else f"{_stale_text(stale)}, {_NO_LONGER}"
    change = file_change(document["agent_slug"], document)
    there = await objects.get(change.key)
    if there is not None and is_changed(change, document["target_hash"], there.body):
        return None
    if (None if there is None else sha256(there.body)) == document["target_hash"]:
        return None
    return f"{change.key} has changed since this was proposed, {_NO_LONGER}"


async def source_warnings(document: Mapping[str, Any], *, objects: ObjectStore) -> list[str]:
    """Which quoted sources are gone, or no longer have the quoted words. Such a proposal can still be applied.

    A quotation was compared with the source as the run read it; a person decides about it later.
    """
    quoted: dict[str, list[str]] = {}
    grounds = [] if document["status"] in ENDED else grounds_of(document["content"])
    for citation in [one for ground in grounds for one in quotations_of(ground, "citations")][:CITATIONS_MAX]:
        quoted.setdefault(citation["ref"], []).append(citation["excerpt"])
    warnings: list[str] = []
    for ref, excerpts in quoted.items():
        try:
            there = await objects.get(object_key("agents", document["agent_slug"], *ref.split("/")))
        except KeyInvalid:
            continue
        if there is None:
            warnings.append(f"{ref} is gone: the words quoted from it are from the copy that was read")
        elif not await asyncio.to_thread(_has_all, _text(there.body), excerpts):
            warnings.append(f"{ref} has changed: words quoted from it are no longer in it")
    return warnings


def _has_all(text: str, excerpts: Sequence[str]) -> bool:
    return all(has_excerpt(text, excerpt) for excerpt in excerpts)


def _stale_text(conflict: VersionConflict) -> str:
    return f"the memory was at version {conflict.expected} when this was proposed and is at {conflict.current} now"


async def conflicts_of(
    documents: Sequence[Mapping[str, Any]], *, objects: ObjectStore, memory: MemoryRepository
) -> dict[str, str]:
    """The conflict of each proposal that can no longer be applied, by proposal id."""
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def look(document: Mapping[str, Any]) -> str | None:
        async with gate:
            try:
                return await conflict_of(document, objects=objects, memory=memory)
            except TargetRefused as error:
                return str(error)
            except RepositoryError:  # not known: whoever applies it will see
                return None

    conflicts = await asyncio.gather(*(look(document) for document in documents))
    return {document["id"]: told for document, told in zip(documents, conflicts, strict=True) if told is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusions:
    """Pending proposals of the same version of the same target, of which applying one rules out another."""

    rules_out: tuple[str, ...] = ()
    """Proposals that can no longer be applied once this one is."""
    ruled_out_by: tuple[str, ...] = ()
    """Proposals after which this one can no longer be applied."""


async def exclusions_of(ledger: Ledger, document: Mapping[str, Any]) -> Exclusions:
    """Which pending proposals the proposal rules out, and which rule it out, of the PENDING_COMPARED_MAX newest."""
    if document["status"] != PENDING:
        return Exclusions()
    others = await _others_of_target(ledger, document, PENDING, newest=PENDING_COMPARED_MAX)
    return Exclusions(
        rules_out=tuple(body["id"] for body in others if _rules_out(document, body)),
        ruled_out_by=tuple(body["id"] for body in others if _rules_out(body, document)),
    )


async def approved_rival(ledger: Ledger, document: Mapping[str, Any]) -> str | None:
    """Why a pending proposal cannot be approved yet: another change of the same version is approved and not applied."""
    for state in APPROVED:
        for body in await _others_of_target(ledger, document, state):
            if _rules_out(body, document):
                return f"{body['id']} changes the same version, is approved and not applied yet: wait until it is"
    return None


def _rules_out(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the other proposal of the same target can no longer be applied once the one is.

    A comment or tag is stored beside its target and rules out nothing; a change of the target rules it out. An update
    of memory that fits every version rules out those that fit one, and is ruled out by nothing.
    """
    if one["action"] in sources.ANNOTATION_KINDS:
        return False
    if one["action"] != proposals.MEMORY_UPDATE:
        return one["target_hash"] == other["target_hash"]
    before, needed = (body["content"].get("expected_version") for body in (one, other))
    return needed is not None and before in {None, needed}


async def _others_of_target(
    ledger: Ledger, document: Mapping[str, Any], state: str, *, newest: int | None = None
) -> list[dict[str, Any]]:
    """The other proposals in this state that change the same target, newest first.

    `newest` limits how many proposals in this state are read; None reads all.
    """
    where, cursor, target = JobFilter(lifecycle=PROPOSAL.name, state=state), None, _target_of(document)
    others: list[dict[str, Any]] = []
    read = 0
    while True:
        limit = OTHERS_PAGE if newest is None else min(OTHERS_PAGE, newest - read)
        page = await ledger.jobs(where, limit=limit, cursor=cursor)
        read += len(page.jobs)
        ids = [job.job_id for job in page.jobs if job.job_id != document["id"]]
        payloads = await ledger.payloads(ids)
        bodies = [json.loads(payloads[job_id]) for job_id in ids if job_id in payloads]
        others += [body for body in bodies if _target_of(body) == target]
        cursor = page.cursor
        if cursor is None or read == newest:
            return others


def _target_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """What a proposal changes: a file, or a memory, whose files have one version."""
    is_memory = body["action"] == proposals.MEMORY_UPDATE
    return body["agent_slug"], proposals.MEMORY_UPDATE if is_memory else body["target"]


def _text(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")
