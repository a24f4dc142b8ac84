"""Decisions of people about jobs that the safety kernel held (D45).

The job is the only record of the approval. The inbox shows a held job in the shape of a proposal, and a decision there
is a transition of the job.

A decision is about the last hold only. It is refused when the job has changed since. It is bound to the job, to the
policy that the hold named, and to everything the worker would receive. The document of a held job shows the same,
because the function that makes the order builds it. An approved job is ready again, and the kernel is asked once more
before dispatch. A rejected job is DENIED.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, cast

from trellis.bus.documents import decision_of
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.pointers import digest_in
from trellis.bus.requests import JobRequest
from trellis.bus.safety.policy import NotHeld, PolicyDiffers
from trellis.bus.scheduling.dispatch_policy import HOLD_S, approval_bindings, request_within_policy
from trellis.bus.topics import HELD_ACTION
from trellis.documents.errors import NoteTooShort
from trellis.engine.errors import JobNotFound, NotAllowed
from trellis.engine.event_data import data_of
from trellis.engine.jobs import Actor, JobId, Move, Moved, RequestId, RequestKey
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job, JobFilter, JobPage, JobPlace
from trellis.engine.text import storable
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.proposals.proposal import NOTE_CHARS_MAX, NOTE_CHARS_MIN
from trellis.storage.objects.canonical_json import timestamp

INBOX_PREFIX = "approval-"
"""Prefix of a held job's inbox id, before the job id."""
AGENT = "bus"
"""The agent slug shown for held jobs."""
CAUSE_CHARS_MAX = 200
SCAN_PAGE = 200
ROUNDS_MAX = 50
"""Page limit: one page of held jobs scans at most this many pages of `SCAN_PAGE` jobs."""
SCHEDULED_JOBS = JobFilter(lifecycle=BUS_JOB.name, state="SCHEDULED", place=JobPlace.SCHEDULED)
UNDISPATCHED_JOBS = JobFilter(lifecycle=BUS_JOB.name, state="SCHEDULED")
EXPIRED_HOLDS_CURSOR = "over:"
"""Cursor prefix for the second scan: jobs whose hold has run out.

They are ready or blocked by their tenant's limit, and older than a hold lasts.
"""

PEOPLE = frozenset({Role.OWNER, Role.CONTROL_PLANE})
_DECIDED = frozenset({"job_held", "job_approved", "job_denied"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ApprovalPage:
    """A page of held jobs, newest first, and the cursor for the next page."""

    items: tuple[tuple[Job, Sequence[Event]], ...]
    cursor: str | None


def current_hold(job: Job, events: Sequence[Event]) -> Event | None:
    """The event of the hold that a decision would apply to; None when the job does not wait for a person."""
    last = events[-1] if events else None
    if job.state != "SCHEDULED" or last is None or last.type != "job_held" or last.version != job.version:
        return None
    return last


async def decide(
    ledger: Ledger,
    actor: Actor,
    job_id: JobId,
    *,
    approve: bool,
    note: str | None,
    request_id: RequestId,
    policy_hash: str | None = None,
    version: int | None = None,
    key: RequestKey | None = None,
) -> Moved:
    """Record a person's decision about a held job. Repeating a request returns the first answer.

    With `policy_hash` or `version`, the decision applies only if the hold still has that value. Raises NotAllowed,
    JobNotFound, NotHeld, PolicyDiffers, NoteTooShort, IdempotencyMismatch.
    """
    if actor.role not in PEOPLE:
        raise NotAllowed(role=actor.role.value, action="decide about a held job", reason="a person does that")
    note = storable(note.strip()[:NOTE_CHARS_MAX]) if note else None
    if not approve and (note is None or len(note) < NOTE_CHARS_MIN):
        raise NoteTooShort(least=NOTE_CHARS_MIN)
    job = await get_bus_job(ledger, job_id)
    hold = await _hold(ledger, job, request_id)
    decision = _decision(hold)
    if policy_hash is not None and policy_hash != decision.get("policy_hash"):
        raise PolicyDiffers(job_id=job_id, held=decision.get("policy_hash"), given=policy_hash[:64])
    if version is not None and version != hold.version:
        raise NotHeld(job_id=job_id, reason=f"it has version {job.version} and not {version}")
    try:
        bound = approval_bindings(JobRequest.read(job.payload or b""), decision) | {"rule": decision.get("rule", "")}
    except BusRequestInvalid as error:
        raise NotHeld(job_id=job_id, reason=f"its request cannot be read: {error}") from error
    move = Move(
        job_id=job_id,
        target="SCHEDULED" if approve else "DENIED",
        request_id=request_id,
        version=hold.version,
        delay_s=0.0 if approve else None,
        cause=note and note[:CAUSE_CHARS_MAX],
        data=json.dumps({**bound, "note": note}, ensure_ascii=False).encode(),
        key=key,
    )
    answer = await ledger.move(actor, move)
    if isinstance(answer, Moved):
        return answer
    raise NotHeld(job_id=job_id, reason=f"it is {answer.state} now ({answer.reason})")


async def get_bus_job(ledger: Ledger, job_id: JobId) -> Job:
    """A job of the bus lifecycle; raises JobNotFound for any other."""
    job = await ledger.job(job_id)
    if job is None or job.lifecycle != BUS_JOB.name:
        raise JobNotFound(job_id=job_id)
    return job


async def _hold(ledger: Ledger, job: Job, request_id: RequestId) -> Event:
    """The hold that the decision applies to: the current one, or the one this same request has already ended.

    Raises NotHeld.
    """
    events = await ledger.events(job.job_id)
    waits = current_hold(job, events)
    if waits is not None:
        return waits
    event = next((one.event for one in await ledger.recorded(events) if one.request == request_id), None)
    before = next((one for one in events if event is not None and one.version == event.version - 1), None)
    if before is not None and before.type == "job_held":
        return before
    raise NotHeld(job_id=job.job_id, reason=f"it is {job.state}, and {_last_decision_event(events)}")


def _last_decision_event(events: Sequence[Event]) -> str:
    decided = [event for event in events if event.type in _DECIDED]
    match decided[-1].type if decided else "":
        case "job_approved":
            return f"{decided[-1].actor} has approved it"
        case "job_denied":
            return f"{decided[-1].actor} has refused it"
        case "job_held":
            return "it has gone on since it was held"
        case _:
            return "the safety kernel has not held it"


# --- the inbox --------------------------------------------------------------------------------------------------------


async def list_waiting(ledger: Ledger, *, limit: int, cursor: str | None = None) -> ApprovalPage:
    """List jobs that wait for a person, newest first, then jobs whose hold ran out and whose kernel check is still due.

    The scan also reads other delayed jobs, so a page may be short and still have a next page.
    """
    items = list[tuple[Job, Sequence[Event]]]()
    for _ in range(ROUNDS_MAX):
        page = await _candidates(ledger, limit - len(items), cursor)
        for listed in page.jobs:
            events = await ledger.events(listed.job_id)
            job = await ledger.job(listed.job_id) if current_hold(listed, events) is not None else None
            if job is not None:
                items.append((job, events))
        cursor = page.cursor
        if cursor is None or len(items) >= limit:
            break
    return ApprovalPage(items=tuple(items), cursor=cursor)


async def _candidates(ledger: Ledger, room: int, cursor: str | None) -> JobPage:
    """Jobs whose rows suggest that they wait for a person, at most `room` of them."""
    if cursor is None or not cursor.startswith(EXPIRED_HOLDS_CURSOR):
        page = await _scan(partial(ledger.jobs, SCHEDULED_JOBS, cursor=cursor), _may_wait_for_person, room)
        return JobPage(jobs=page.jobs, cursor=page.cursor or EXPIRED_HOLDS_CURSOR)
    before = await ledger.now() - timedelta(seconds=HOLD_S)
    look = partial(
        ledger.jobs, UNDISPATCHED_JOBS, cursor=cursor.removeprefix(EXPIRED_HOLDS_CURSOR) or None, oldest_first=True
    )
    page = await _scan(
        look, lambda job: _may_have_expired_hold(job, before), room, goes_on=lambda last: last.created_at < before
    )
    return JobPage(jobs=page.jobs, cursor=None if page.cursor is None else f"{EXPIRED_HOLDS_CURSOR}{page.cursor}")


async def _scan(
    look: Callable[..., Awaitable[JobPage]],
    fits: Callable[[Job], bool],
    room: int,
    goes_on: Callable[[Job], bool] = lambda _: True,
) -> JobPage:
    page = await look(limit=SCAN_PAGE)
    if sum(map(fits, page.jobs)) > room:  # the cursor must not pass a job that is not shown
        page = await look(limit=room)
    more = page.cursor is not None and goes_on(page.jobs[-1])
    return JobPage(jobs=tuple(filter(fits, page.jobs)), cursor=page.cursor if more else None)


def _may_wait_for_person(job: Job) -> bool:
    """Whether a job's delay is long enough to be a hold. No other delay is as long; the job's events decide."""
    return job.due_at is not None and (job.due_at - job.updated_at).total_seconds() > HOLD_S / 2


def _may_have_expired_hold(job: Job, before: datetime) -> bool:
    """Whether a hold of the job may have run out: unchanged since `before`, and more than accepted and scheduled."""
    return job.updated_at <= before and job.version > 2


def inbox_id(job_id: str) -> str:
    return f"{INBOX_PREFIX}{job_id}"


def job_id_of_inbox_id(inbox: str) -> JobId | None:
    """The job id in an inbox id; None for a proposal."""
    return JobId(inbox.removeprefix(INBOX_PREFIX)) if inbox.startswith(INBOX_PREFIX) else None


def inbox_document(job: Job, events: Sequence[Event]) -> dict[str, Any] | None:
    """A held job in the shape of a proposal, as of the last of these events; None for a job that was never held.

    `content.order` is everything the worker would receive, except what is only known at dispatch (wire id, lease,
    trace). Without `payload_sha256` the payload is stored under a caller's own name and may change after the approval.
    """
    holds = [event for event in events if event.type == "job_held"]
    if not holds:
        return None
    hold, last, decision = holds[-1], events[-1], _decision(holds[-1])
    request = _request(job)
    order = _order(job, decision)
    given: dict[str, Any] = order or {}
    meta: dict[str, Any] = request.get("meta") or {}
    identity: dict[str, Any] = request.get("identity") or {}
    tenant = request.get("tenant_id") or meta.get("tenant_id") or identity.get("tenant_id") or ""
    principal = request.get("principal_id", "")
    ends_at = job.deadline_at or hold.ts + timedelta(seconds=HOLD_S)
    return {
        "id": inbox_id(job.job_id),
        "status": _status(events, hold),
        "created_at": timestamp(hold.ts),
        "updated_at": timestamp(last.ts),
        "expires_at": timestamp(ends_at),
        "agent_slug": AGENT,
        "source": {"type": AGENT, "identity": principal or tenant or "unknown", "run_id": None, "job_id": job.job_id},
        "action": HELD_ACTION,
        "target": job.type,
        "content": {
            "summary": f"{decision.get('rule')}: {decision.get('reason')}",
            "job_id": job.job_id,
            "topic": job.type,
            "tenant": tenant,
            "principal": principal,
            "workflow_id": request.get("workflow_id", ""),
            "adapter_id": request.get("adapter_id", ""),
            "context_ptr": _context(given),
            "env": request.get("env") or {},
            "labels": request.get("labels") or {},
            "risk_tags": meta.get("risk_tags") or [],
            "capability": meta.get("capability", ""),
            "constraints": decision.get("constraints") or {},
            "order": order,
            "payload_sha256": digest_in(_context(given)),
            **{name: decision.get(name, "") for name in ("decision", "rule", "reason", "policy_hash", "job_hash")},
        },
        "target_hash": decision.get("job_hash"),
        "priority": "high",
        "requiresHumanReview": True,
        "approval": _approval(events, hold),
        "apply_result": None,
        "version": last.version,
    }


def _status(events: Sequence[Event], hold: Event) -> str:
    last = events[-1]
    if last.version == hold.version:
        return "pending"
    person = _verdict(events, hold)
    if person is None:
        return "expired"
    return "approved" if person.type == "job_approved" else "rejected"


def _verdict(events: Sequence[Event], hold: Event) -> Event | None:
    """A person's decision on this hold: always the event directly after it."""
    after = next((event for event in events if event.version == hold.version + 1), None)
    if after is None or after.role not in PEOPLE:
        return None
    return after if after.type in _DECIDED else None


def _approval(events: Sequence[Event], hold: Event) -> dict[str, Any] | None:
    person = _verdict(events, hold)
    if person is None:
        return None
    note = data_of(person).get("note")
    return {"decided_by": person.actor, "decided_at": timestamp(person.ts), "decision_note": note}


def _decision(hold: Event) -> dict[str, Any]:
    return decision_of([hold]) or {}


def _order(job: Job, decision: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        request = JobRequest.read(job.payload or b"")
        work = request_within_policy(request, decision.get("constraints") or {}, decision.get("redacted"))
    except BusRequestInvalid:
        return None  # the scheduler ends such a job at dispatch
    return work.model_dump(mode="json", exclude_defaults=True)


def _context(order: Mapping[str, Any]) -> str:
    """The pointer to the payload that the worker would get: the redacted one if the kernel gave one."""
    ref: Mapping[str, Any] = order.get("context_ref") or {}
    return str(order.get("context_ptr") or ref.get("uri", ""))


def _request(job: Job) -> dict[str, Any]:
    read: Any = json.loads(job.payload or b"{}")
    return cast("dict[str, Any]", read) if isinstance(read, dict) else {}
