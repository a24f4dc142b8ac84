"""Jobs of every lifecycle: read, cancel, requeue and dead-letter them, and decide about held ones.

Implements DJ-11 to DJ-13, DJ-18, D9, D19, D39, D43, D45, D62. Reads answer with rows of the ledger: the gateway makes
the documents of its interface of them, and commands print more of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from trellis.api.context import LIMIT_DEFAULT, ApiContext
from trellis.api.job_changes import LocalJobChanges
from trellis.api.requests import IdempotentRequest
from trellis.auth.matrices import permit
from trellis.auth.ownership import (
    acting_or_gateway,
    canceller,
    cancelling_roles,
    permit_on_job,
    sees_all,
    visible_among,
)
from trellis.bus.documents import context_pointer, hold_of, result_pointer
from trellis.bus.pointers import PointerPart
from trellis.engine.attempts import EVENTS_OF_END, attempts_made, needs_events
from trellis.engine.dead_letters import dead_letter, operator_reason_code
from trellis.engine.errors import InvalidTransition, JobNotFound, Refused
from trellis.engine.job_changes import CHANGED_MAX, refusal_facts
from trellis.engine.jobs import Actor, CancelMode, JobId, Moved, NotMoved, ReasonCode
from trellis.engine.records import DeadLetter, Event, Job, JobFilter, JobPlace, Signal
from trellis.engine.text import duration
from trellis.lifecycles import LIFECYCLES, Role, Trigger
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB, SUSPENDED_STATE
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.dead_letters import letter_of
from trellis.operations.explain import HOLD_PHRASES, awaited_signal, rate_phrase, timer_phrase, waits_for
from trellis.worker.payloads import any_json_bytes
from trellis.worker.requests import KEY_NAMESPACE

if TYPE_CHECKING:  # `trellis jobs` loads neither HTTP nor the scheduling of the bus
    from trellis.bus.outcomes.job_tree import Successor
    from trellis.http.jobs import JobChangeFilter
    from trellis.http.operation_shapes import JobExplained, JobsChanged, JobsPreview
    from trellis.http.shapes import JobShape, SignalReceipt

WORK = (LEASED_JOB.name, QUEUE_JOB.name, BUS_JOB.name, NLM_JOB.name)
"""The lifecycles of jobs. Runs, proposals, artifacts and inbox entries are in the ledger too, and have listings of their own."""
READ, READ_NLM = "jobs.read", "nlm.read"
SIGNALS_MAX = 20
HOLDS_READ_MAX = 50
ROUNDS_MAX = 10
"""How many ledger pages may be read for one page of a listing that filters some jobs out."""
JSON, BYTES = "application/json", "application/octet-stream"

RowT = TypeVar("RowT")


class JobContentMissing(Refused):
    """{detail}"""

    code = "NOT_FOUND"


class JobHasEnded(InvalidTransition):
    """Job {job_id} has ended already: it is {source} since {since}."""


class NotRequeued(InvalidTransition):
    """Job {job_id} stays {source}: {reason}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPage(Generic[RowT]):
    """Some of the rows; `next_cursor` asks for more, None at the end."""

    items: Sequence[RowT]
    next_cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeJob:
    """A job with everything that the ledger has about it."""

    job: Job
    result: bytes | None
    events: Sequence[Event]
    signals: Sequence[Signal]
    """Its last log lines and signs of progress."""
    letter: DeadLetter | None


class LocalJobs:
    """Jobs on a ledger, with the calls of `client.jobs`."""

    def __init__(self, context: ApiContext, *, among: Collection[str] | None = None) -> None:
        self._context = context
        self._among = among

    def only(self, lifecycles: Collection[str]) -> "LocalJobs":
        """The jobs of these lifecycles; no other is found."""
        return LocalJobs(self._context, among=lifecycles)

    async def list(
        self,
        *,
        lifecycle: str | None = None,
        type_: str | None = None,
        status: str | None = None,
        correlation_id: str | None = None,
        parent_id: str | None = None,
        concurrency_key: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> RowPage[Job]:
        """Jobs that the caller may read, newest first. A page may be short and still have a next one."""
        if lifecycle == NLM_JOB.name:
            permit(self._context.reader, READ_NLM)
        where = JobFilter(
            lifecycle=lifecycle,
            type=type_,
            state=status,
            correlation_id=correlation_id,
            parent_id=None if parent_id is None else JobId(parent_id),
            concurrency_key=concurrency_key,
        )
        jobs: list[Job] = []
        for _ in range(ROUNDS_MAX):
            page = await self._context.ledger.jobs(where, limit=limit - len(jobs), cursor=cursor)
            jobs += await self._shown(page.jobs)
            cursor = page.cursor
            if cursor is None or len(jobs) == limit:
                break
        return RowPage(items=jobs, next_cursor=cursor)

    async def _shown(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Those of these jobs that the reader may see."""
        reader = self._context.reader
        without_nlm = not sees_all(reader, READ_NLM)
        among = [job for job in jobs if self._is_among(job) and not (job.lifecycle == NLM_JOB.name and without_nlm)]
        return await visible_among(reader, READ, self._context.ledger, among)

    def _is_among(self, job: Job) -> bool:
        return self._among is None or job.lifecycle in self._among

    async def find(self, job_id: str, rule: str = READ) -> Job:
        """One job; raises NotAllowed before JobNotFound. NLM jobs are for operators even in a shared ledger (D42)."""
        ledger = self._context.ledger if rule == READ else self._context.changes
        job = await ledger.job(JobId(job_id))
        job = job if job is not None and self._is_among(job) else None
        await permit_on_job(self._context.reader, rule, ledger, job)
        if job is None:
            raise JobNotFound(job_id=job_id)
        if job.lifecycle == NLM_JOB.name and rule == READ:
            permit(self._context.reader, READ_NLM)
        return job

    async def get(self, job_id: str) -> WholeJob:
        """One job with everything that the ledger has about it."""
        job, ledger = await self.find(job_id), self._context.ledger
        return WholeJob(
            job=job,
            result=await ledger.result(job.job_id),
            events=await ledger.events(job.job_id),
            signals=await ledger.signals(job.job_id, limit=SIGNALS_MAX),
            letter=await letter_of(ledger, job),
        )

    async def explain(self, job_id: str) -> "JobExplained":
        from trellis.api.explanations import explanation
        from trellis.http.operation_shapes import JobExplained

        job = await self.find(job_id)
        explained = await explanation(self._context, job, await self.successor(job))
        return JobExplained(job_id=job.job_id, **asdict(explained))

    async def signals(self, job_id: str) -> Sequence[Signal]:
        job = await self.find(job_id)
        return await self._context.ledger.signals(job.job_id, limit=SIGNALS_MAX)

    async def waits(self, jobs: Sequence[Job]) -> dict[JobId, str]:
        """What each of these jobs waits for, in a few words; those that wait for nothing are left out."""
        holds = await self._holds(jobs)
        is_timed = any(job.place is JobPlace.SCHEDULED for job in jobs)
        now = await self._context.ledger.now() if is_timed else None
        reasons = {job.job_id: holds.get(job.job_id) or _waits_for(job, now) for job in jobs}
        return {job_id: text for job_id, text in reasons.items() if text}

    async def attempts_made(self, jobs: Sequence[Job]) -> dict[JobId, int]:
        """How many attempts each of these jobs has made, the present one included."""
        unclear = [job.job_id for job in jobs if needs_events(job)]
        events = await self._context.ledger.events_of(unclear, last=EVENTS_OF_END) if unclear else {}
        return {job.job_id: attempts_made(job, events.get(job.job_id, ())) for job in jobs}

    async def _holds(self, jobs: Sequence[Job]) -> dict[JobId, str]:
        """What jobs on topics wait for, and which ready jobs wait for the rate of their type.

        Events tell what a job on a topic waits for, so only the first ones of a long list are looked up.
        """
        places = {JobPlace.SCHEDULED, JobPlace.READY}
        waiting = [job for job in jobs if job.lifecycle == BUS_JOB.name and job.place in places][:HOLDS_READ_MAX]
        events = await self._context.ledger.events_of([job.job_id for job in waiting]) if waiting else {}
        holds = {job.job_id: hold_of(job, events.get(job.job_id, [])) for job in waiting}
        phrases = {job_id: HOLD_PHRASES.get(hold.kind, hold.kind) for job_id, hold in holds.items() if hold is not None}
        return {**phrases, **await self._rates(jobs)}

    async def _rates(self, jobs: Sequence[Job]) -> dict[JobId, str]:
        """The ready jobs whose type has a rate limit; none for a reader who sees its own jobs only."""
        ready = [job for job in jobs if job.place is JobPlace.READY and job.lifecycle == LEASED_JOB.name]
        if not ready or not sees_all(self._context.reader, READ):
            return {}
        rates = {queue.type: rate_phrase(queue) for queue in await self._context.ledger.queues()}
        return {job.job_id: rate for job in ready if (rate := rates.get(job.type)) is not None}

    async def result(self, job_id: str) -> bytes:
        """The result of a job; raises JobContentMissing."""
        return (await self.typed_result(job_id))[0]

    async def typed_result(self, job_id: str) -> tuple[bytes, str]:
        """The result of a job, and its media type. Of a job on a topic, the bytes at its `result_ptr`."""
        job, ledger = await self.find(job_id), self._context.ledger
        body, media_type = await ledger.result(job.job_id), JSON
        pointer = result_pointer(await ledger.events(job.job_id)) if job.lifecycle == BUS_JOB.name else None
        if pointer is not None:
            pointers = await self._context.pointers()
            body, media_type = await pointers.read(pointer, part=PointerPart.RESULT), BYTES
        if body is None:
            raise JobContentMissing(detail=f"Job {job_id[:200]} is {job.state} and has no result.")
        return body, media_type

    async def context(self, job_id: str) -> bytes:
        """What the worker of a job on a topic is given: the bytes at its pointer. Raises JobContentMissing.

        Who submits a job may write any pointer. What is kept under a name that somebody chose may be another's, and is
        only for those who decide about held jobs.
        """
        job = await self.find(job_id)
        on_topic = job.lifecycle == BUS_JOB.name
        pointer = context_pointer(job, await self._context.ledger.events(job.job_id)) if on_topic else None
        if pointer is None:
            where = "has none" if on_topic else f"is a {job.lifecycle}: its payload is in the job"
            raise JobContentMissing(detail=f"Only a job on a topic has a context; {job_id[:200]} {where}.")
        pointers = await self._context.pointers()
        if not pointers.may_be_kept_here(pointer, part=PointerPart.CONTEXT):
            permit(self._context.reader, "jobs.approve")
        return await pointers.read(pointer, part=PointerPart.CONTEXT)

    # --- changes -----------------------------------------------------------------------------------------------------

    async def cancel(
        self,
        job_id: str,
        *,
        mode: str = "soft",
        reason: str | None = None,
        idempotency_key: str | None = None,
        grace_s: float | None = None,
    ) -> "JobShape":
        """End a job: soft asks its holder to stop, hard ends it now. Raises JobHasEnded, NotAllowed.

        `grace_s` is how long the job may continue after a soft cancel. Default: from the settings.
        """
        request, chosen = self._context.request_of(idempotency_key), CancelMode(mode)
        job, ledger = await self.find(job_id, "jobs.cancel"), self._context.changes
        by_operator = Role.SUBMITTER not in cancelling_roles(job.lifecycle)
        actor = await canceller(self._context.acting(operator=by_operator), ledger, job)
        answer = await ledger.cancel(
            actor,
            job.job_id,
            chosen,
            request.request_id,
            grace_s=self._context.cancel_grace_s if grace_s is None else grace_s,
            cause=reason,
            key=request.change(job.job_id),
        )
        if isinstance(answer, NotMoved):
            raise await self._not_cancelled(job_id, answer, actor)
        request.note(replayed=answer.repeated)
        return _shape(job, answer.target if isinstance(answer, Moved) else answer.state, answer.version)

    async def signal(
        self, job_id: str, name: str, payload: Any = None, *, idempotency_key: str | None = None
    ) -> "SignalReceipt":
        """Send a signal to a job, which `ctx.wait_signal` returns. Raises SignalRefused once the job has ended."""
        from trellis.http.shapes import SignalReceipt

        request = self._context.request_of(idempotency_key)
        job, ledger = await self.find(job_id, "jobs.signal"), self._context.changes
        actor = await permit_on_job(self._context.acting(operator=False), "jobs.signal", ledger, job)
        sent = await ledger.send_signal(
            actor, job.job_id, name, any_json_bytes(payload, f"the signal {name}"), key=request.change(job.job_id)
        )
        request.note(replayed=sent.repeated)
        events = (await ledger.events_of([job.job_id], last=1)).get(job.job_id, [])
        other = awaited_signal(events[-1]) if events else None
        return SignalReceipt(
            job_id=job.job_id,
            name=name,
            status=sent.state,
            created=not sent.repeated,
            waits_for=None if other == name else other,
        )

    async def _not_cancelled(self, job_id: str, answer: NotMoved, actor: Actor) -> InvalidTransition:
        """The error for a job that cannot be cancelled. It tells since when the job has ended, and what followed."""
        job = await self.find(job_id, "jobs.cancel")
        if job.place is not JobPlace.ENDED:
            return InvalidTransition(**refusal_facts(answer, actor))
        ago = duration((await self._context.now() - job.updated_at).total_seconds())
        again = await self.successor(job)
        since = f"{job.updated_at:%Y-%m-%d %H:%M:%S} UTC, {ago} ago" + (f"; {again.words}" if again else "")
        return JobHasEnded(
            job_id=job.job_id, source=job.state, target=answer.target, actor=actor.role.value, since=since
        )

    async def successor(self, job: Job) -> "Successor | None":
        """The job that retries an ended job on a topic; None for other jobs."""
        if job.lifecycle != BUS_JOB.name or job.place is not JobPlace.ENDED:
            return None
        from trellis.bus.outcomes.job_tree import find_successor

        return await find_successor(self._context.ledger, job, self._context.topics())

    async def requeue(
        self, job_id: str, *, reason: str | None = None, idempotency_key: str | None = None
    ) -> "JobShape":
        """Run a failed or dead-lettered job again; a job on a topic as a new, linked one. Raises NotRequeued."""
        request = self._context.request_of(idempotency_key)
        actor, ledger = self._context.permit("jobs.requeue"), self._context.changes
        job = await self.find(job_id, "jobs.requeue")
        if job.lifecycle == BUS_JOB.name:
            from trellis.bus.outcomes.job_tree import requeue_as_new_job

            submitter, topics = acting_or_gateway(actor, job.lifecycle), self._context.topics()
            key = request.change(job.job_id)
            new_job = await requeue_as_new_job(
                ledger, submitter, job, topics, request.request_id, cause=reason, key=key
            )
            request.note(replayed=not new_job.created)
            return _shape(job, BUS_JOB.initial.name, 1).model_copy(update={"job_id": new_job.job_id})
        (answer,) = await ledger.requeue(
            actor, [job.job_id], request.request_id, limit=1, cause=reason, key=request.change(job.job_id)
        )
        if isinstance(answer, NotMoved):
            raise _not_requeued(answer, actor, job, await self._context.now())
        return _moved(job, answer, request)

    async def change(
        self,
        change: str,
        *,
        job_ids: Sequence[str] = (),
        limit: int = CHANGED_MAX,
        cursor: str | None = None,
        mode: str = "soft",
        to_priority: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        **where: "Unpack[JobChangeFilter]",
    ) -> "JobsChanged":
        many, request = LocalJobChanges(self._context), self._context.request_of(idempotency_key)
        wish = many.wish(change, mode=mode, to_priority=to_priority, reason=reason)
        return await many.change(wish, request, where, job_ids=job_ids, limit=limit, cursor=cursor)

    async def preview(
        self, change: str, *, mode: str = "soft", to_priority: str | None = None, **where: "Unpack[JobChangeFilter]"
    ) -> "JobsPreview":
        many = LocalJobChanges(self._context)
        return await many.preview(many.wish(change, mode=mode, to_priority=to_priority), where)

    async def dead_letter(
        self,
        job_id: str,
        *,
        reason: str,
        reason_code: str = ReasonCode.POLICY_VIOLATION.value,
        idempotency_key: str | None = None,
    ) -> "JobShape":
        """End a job that has not ended with a dead letter, without a retry. Raises InvalidTransition, OptionInvalid."""
        request = self._context.request_of(idempotency_key)
        actor, ledger = self._context.permit("jobs.dead-letter"), self._context.changes
        job, code = await self.find(job_id, "jobs.dead-letter"), operator_reason_code(reason_code)
        await request.changed_before(ledger)
        key = request.change(job.job_id)
        answer = await dead_letter(
            ledger, actor, job.job_id, request.request_id, reason_code=code, reason=reason, key=key
        )
        if isinstance(answer, NotMoved):
            raise InvalidTransition(**refusal_facts(answer, actor))
        return _moved(job, answer, request)

    # --- jobs that the safety kernel held ----------------------------------------------------------------------------

    async def approve(
        self,
        job_id: str,
        note: str | None = None,
        *,
        policy_hash: str | None = None,
        idempotency_key: str | None = None,
    ) -> "JobShape":
        """Let a held job go; with `policy_hash` only while it is held under that policy. Raises NotHeld."""
        return await self._decide(job_id, note, policy_hash, idempotency_key, approve=True)

    async def deny(
        self, job_id: str, note: str, *, policy_hash: str | None = None, idempotency_key: str | None = None
    ) -> "JobShape":
        """Refuse a held job, and say why; it is then DENIED. Raises NotHeld, NoteTooShort."""
        return await self._decide(job_id, note, policy_hash, idempotency_key, approve=False)

    async def _decide(
        self, job_id: str, note: str | None, policy_hash: str | None, idempotency_key: str | None, *, approve: bool
    ) -> "JobShape":
        """Takes the id of the job, or its id in the inbox; raises JobNotFound."""
        from trellis.bus import approvals

        request = self._context.request_of(idempotency_key)
        actor, ledger, id_ = self._context.permit("jobs.approve"), self._context.ledger, JobId(job_id)
        if await ledger.job(id_) is None:  # perhaps an inbox id; a job may have such an id itself
            id_ = approvals.job_id_of_inbox_id(job_id) or id_
        job = await approvals.get_bus_job(ledger, id_)
        await request.changed_before(self._context.changes)
        answer = await approvals.decide(
            self._context.changes,
            actor,
            job.job_id,
            approve=approve,
            note=note,
            request_id=request.request_id,
            policy_hash=policy_hash,
            key=request.change(job.job_id),
        )
        return _moved(job, answer, request)


def _moved(job: Job, answer: Moved, request: IdempotentRequest) -> "JobShape":
    """The job as this request moved it, or an earlier one with the same key."""
    request.note(replayed=answer.repeated)
    return _shape(job, answer.target, answer.version)


def _shape(job: Job, status: str, version: int) -> "JobShape":
    """The job as a change left it."""
    from trellis.http.shapes import JobShape

    return JobShape(job_id=job.job_id, lifecycle=job.lifecycle, status=status, type=job.type, version=version)


def _not_requeued(answer: NotMoved, actor: Actor, job: Job, now: datetime) -> NotRequeued:
    """The error for a job that cannot be requeued. It tells when the job goes on by itself."""
    alone, lifecycle = timer_phrase(job, now), LIFECYCLES[job.lifecycle]
    reason = f"it {alone}" if alone else "only failed and dead-lettered jobs are requeued"
    if lifecycle.pull(answer.state, Trigger.REQUEUE) is not None:  # its state allows it: something else does not
        reason = answer.reason
    return NotRequeued(**{**refusal_facts(answer, actor), "reason": reason})


def _waits_for(job: Job, now: datetime | None) -> str:
    """What a job waits for; empty if it is ready, running or ended. Without `now`, the time that is left is not told."""
    match job.place:
        case JobPlace.SCHEDULED:
            left = None if job.due_at is None or now is None else (job.due_at - now).total_seconds()
            who = waits_for(job)
            if job.state == SUSPENDED_STATE and who is None:
                who = "what its handler waits for"
            if left is None:
                return who or ""
            if who is not None and left > 0:
                return f"{who}, for {duration(left)}"
            return f"its time, in {duration(left)}" if left > 0 else "the sweep"
        case JobPlace.BLOCKED:
            return f"key {(job.concurrency_key or '').removeprefix(KEY_NAMESPACE)}"
        case JobPlace.LEASED if job.cancel_requested:
            return "its holder to stop"
        case _:
            return ""
