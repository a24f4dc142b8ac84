"""The caller's API: submit jobs, wait for results, cancel, requeue, compensate, follow events.

async with connect("sqlite:///trellis.db") as trellis:
    job = await trellis.submit("index.document", doc, idempotency_key="doc-7", priority="interactive")
    done = await job.result(timeout_s=30)
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import pydantic

from trellis.auth.matrices import permit
from trellis.auth.ownership import (
    PrincipalReach,
    acting_or_gateway,
    admitted_submission,
    canceller,
    owner_name,
    permit_on_job,
    scoped_key,
)
from trellis.auth.principals import Principal
from trellis.bus.requests import TopicSubmitOptions
from trellis.engine import tracing
from trellis.engine.clock import Clock
from trellis.engine.dead_letters import dead_letter, operator_reason_code
from trellis.engine.errors import (
    InvalidTransition,
    JobCancelled,
    JobDeadLettered,
    JobFailed,
    JobNotFound,
    NotAllowed,
    OptionInvalid,
    TokenExpired,
)
from trellis.engine.event_data import ArtifactPointer, artifacts_of, reason_of
from trellis.engine.job_batches import checked_batch
from trellis.engine.job_changes import CHANGED_MAX, JobChange, refusal_facts
from trellis.engine.jobs import (
    CANCEL_GRACE_S_DEFAULT,
    Actor,
    CancelMode,
    CancelRequested,
    JobId,
    Moved,
    NewJob,
    NotMoved,
    Priority,
    ReasonCode,
    RequestId,
    SignalSent,
    SubmitOutcome,
    Submitted,
    accepted,
    submit_parts,
)
from trellis.engine.ledger import Ledger
from trellis.engine.option_values import check_choice, check_listed
from trellis.engine.records import Event, FeedPage, Job, JobFilter, Signal
from trellis.lifecycles import LIFECYCLES, Role, State
from trellis.operations.dead_letters import letter_of
from trellis.operations.job_changes import (
    ChangeFilter,
    ChangePreview,
    ChangeTotals,
    ChangeWish,
    JobChanges,
    check_filter,
)
from trellis.worker.app import App, priority_of, refuse_unknown
from trellis.worker.payloads import any_json_bytes, read_as
from trellis.worker.requests import (
    BatchJob,
    SubmitSettings,
    check_batch_jobs,
    new_job,
    new_jobs,
    stored_concurrency_key,
)
from trellis.worker.schedules import JobSchedules, declare_schedules

if TYPE_CHECKING:  # the bus is imported only by callers that submit to it
    from trellis.bus.submitter import BusSubmitter
    from trellis.ledgers.sqlite.submit import OuterConnection

CHANGE_LIMIT_DEFAULT = 10_000
"""How many jobs one change of many takes, unless the call says otherwise."""
SUBMITTING_ROLES = (Role.SUBMITTER, Role.GATEWAY, Role.ORCHESTRATOR, Role.WORKER)
"""Roles allowed by `jobs.create` that lifecycles know, least powerful first. An owner submits through a gateway."""
WAIT_S_FIRST = 0.01
WAIT_S_MAX = 0.25
FEED_PAGE_MAX = 500
SIGNALS_MAX = 1_000


class JobHandle:
    """One submitted job: its `id`, its `type`, and whether this submit `created` it."""

    def __init__(self, trellis: "Trellis", answer: Submitted, type_: str | None, returns: Any) -> None:
        self._trellis = trellis
        self._returns = returns
        self.id = answer.job_id
        self.type = type_
        self.created = answer.created
        """False if an earlier submit with the same key, unique key or id created the job."""
        self.replaced = answer.replaced
        """The waiting job with the same unique key that this submit cancelled."""

    @property
    def outcome(self) -> SubmitOutcome:
        """What the submit did: `created`, `returned` or `replaced`."""
        return Submitted(job_id=self.id, created=self.created, replaced=self.replaced).outcome

    async def status(self) -> Job:
        """Return the current state of the job."""
        return await self._trellis.job(self.id)

    async def events(self) -> list[Event]:
        """Return every event of the job, oldest first."""
        return await self._trellis.events(self.id)

    async def signals(self) -> list[Signal]:
        """Return progress and log lines, oldest first, as long as they are retained."""
        return await self._trellis.signals(self.id)

    async def artifacts(self) -> tuple[ArtifactPointer, ...]:
        """Return the artifacts that the handler named (`ctx.artifact`); empty until the job has succeeded."""
        return artifacts_of(await self.events())

    async def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the job to succeed and return its result, typed if its handler or `returns` is known.

        Raises JobFailed, JobDeadLettered or JobCancelled if it ended otherwise, and TimeoutError if it has not ended.
        """
        job = await self._trellis.wait(self.id, timeout_s)
        if not _state(job).success:
            raise await self._trellis.why(job)
        body = await self._trellis.ledger.result(self.id)
        return None if body is None else self._trellis.read_result(job.type, body, self._returns)

    async def cancel(
        self,
        mode: CancelMode | str = CancelMode.SOFT,
        *,
        cause: str | None = None,
        grace_s: float | None = None,
    ) -> Job:
        """Cancel the job. A soft cancel asks its holder to stop, and becomes hard after the grace period.

        Raises InvalidTransition if the job has ended.
        """
        return await self._trellis.cancel(self.id, mode, cause=cause, grace_s=grace_s)

    async def signal(self, name: str, payload: Any = None, *, key: str | None = None) -> SignalSent:
        """Send a signal to the job, which `ctx.wait_signal` returns. A repeated `key` sends nothing again."""
        return await self._trellis.signal(self.id, name, payload, key=key)


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """A submitted batch."""

    completion: JobHandle
    """The job that starts when all jobs of the batch have ended. Its result is that of the batch."""
    jobs: tuple[JobHandle, ...]
    """The jobs of the batch, in their order."""

    @property
    def created(self) -> bool:
        """False if an earlier submit of the same completion job created the batch."""
        return self.completion.created


class Trellis:
    """One ledger, as seen by one principal. With an `app`, payloads and results are checked against its handlers."""

    def __init__(
        self,
        ledger: Ledger,
        principal: Principal,
        *,
        clock: Clock,
        new_id: Callable[[], str],
        app: App | None = None,
        asking: "Callable[[], AbstractAsyncContextManager[BusSubmitter]] | None" = None,
        accepted: Callable[[], None] | None = None,
        cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT,
        new_job_id: Callable[[], str] | None = None,
    ) -> None:
        """`accepted` is called when a new job on a topic is in the ledger: it wakes a scheduler in the same process.

        `new_job_id` makes the ids of jobs; without it, `new_id` does.
        `cancel_grace_s` is how long a job may continue after a soft cancel, unless the call sets it.
        """
        self._cancel_grace_s = cancel_grace_s
        self.ledger = ledger
        self.principal = principal
        self._clock = clock
        self._new_id = new_id
        self._new_job_id = new_job_id or new_id
        self._app = app
        self._declared = False
        self._asking = asking
        self._accepted = accepted
        self._reach = PrincipalReach(principal=principal, ledger=ledger)
        self._submits_as: Actor | None = None
        """The caller as a submitter, once a submit was permitted. Its roles never change."""

    # --- submit --------------------------------------------------------------------------------------------------

    async def submit(
        self, type_: str, payload: Any = None, *, returns: Any = None, **settings: Unpack[SubmitSettings]
    ) -> JobHandle:
        """Submit one job. Concurrent submits of one process share a transaction."""
        (handle,) = await self._submit(type_, [payload], returns, settings)
        return handle

    async def submit_many(
        self, type_: str, payloads: Sequence[Any], *, returns: Any = None, **settings: Unpack[SubmitSettings]
    ) -> list[JobHandle]:
        """Submit a job for each payload, in transactions of up to SUBMIT_MAX jobs.

        All payloads are checked before the first job is written.
        """
        check_listed("payloads", payloads, "it must be a list of payloads, one for each job")
        for option in ("idempotency_key", "job_id") if len(payloads) != 1 else ():
            if settings.get(option) is not None:
                raise OptionInvalid(option=option, value=settings.get(option), expected="it names one job, not many")
        return await self._submit(type_, payloads, returns, settings)

    async def _submit(
        self, type_: str, payloads: Sequence[Any], returns: Any, settings: SubmitSettings
    ) -> list[JobHandle]:
        actor = self._submitter()
        if self._app is not None:
            await self._declare_new()
        about = {"trellis.type": type_, "trellis.jobs": len(payloads)}
        with tracing.span("job.submit", about, kind=tracing.PRODUCER) as span:
            jobs = new_jobs(type_, payloads, settings, app=self._app, new_id=self._new_job_id)
            if self.principal.by_token:
                jobs = [await self._admitted(job) for job in jobs]
            handles: list[JobHandle] = []
            for part in submit_parts(jobs):
                answers = await self.ledger.submit(actor, part)
                handles += [JobHandle(self, accepted(answer), type_, returns) for answer in answers]
            if span.is_recorded and len(handles) == 1:
                span.note({"trellis.job_id": handles[0].id})
            return handles

    async def submit_batch(
        self, jobs: Sequence[BatchJob], *, on_complete: BatchJob, returns: Any = None, abandon: bool = False
    ) -> "BatchHandle":
        """Submit up to BATCH_MAX jobs, and the completion job that starts once all of them have ended. One transaction.

        However they end, the completion job starts; its handler learns from `ctx.batch` how each has ended. If it has
        an idempotency key or an id and exists already, nothing is submitted, and the first batch is returned. When it
        is cancelled, the jobs that this submit created are cancelled too, unless `abandon` is true. `returns` is the
        type of its result.
        """
        actor = self._submitter()
        await self._declare_new()
        check_batch_jobs(jobs, on_complete)
        about = {"trellis.type": on_complete.type, "trellis.jobs": len(jobs)}
        with tracing.span("job.submit_batch", about, kind=tracing.PRODUCER) as span:
            first, *members = [
                await self._admitted(
                    new_job(one.type, one.payload, one.settings, app=self._app, new_id=self._new_job_id)
                )
                for one in (on_complete, *jobs)
            ]
            batch = checked_batch(first, members, abandon=abandon)
            answer = await self.ledger.submit_batch(actor, batch)
            span.note({"trellis.job_id": answer.completion.job_id})
        completion = JobHandle(self, answer.completion, on_complete.type, returns)
        pairs = zip(answer.members, batch.members, strict=True)  # the same key is refused for other jobs
        return BatchHandle(completion, tuple(JobHandle(self, one, job.type, None) for one, job in pairs))

    async def submit_on(
        self, connection: "OuterConnection", type_: str, payload: Any = None, **settings: Unpack[SubmitSettings]
    ) -> JobHandle:
        """Submit in the transaction that is open on the caller's own connection to this SQLite ledger's file.

        The job exists once the caller commits, and does not if it rolls back. On PostgreSQL, use
        `trellis.integrations.sql`, or call the SQL function `trellis.submit_job` on your connection.
        """
        from trellis.ledgers.sqlite.submit import submit_on  # not loaded by callers of PostgreSQL

        if not hasattr(self.ledger, "submit_on"):
            expected = "this one is for SQLite ledgers; use trellis.integrations.sql on PostgreSQL"
            raise OptionInvalid(option="connection", value=type(connection).__name__, expected=expected)
        actor = self._submitter()
        job = await self._admitted(new_job(type_, payload, settings, app=self._app, new_id=self._new_job_id))
        now_us = round((await self.ledger.now()).timestamp() * 1_000_000)
        (answer,) = submit_on(connection, actor, [job], now_us)
        return JobHandle(self, accepted(answer), type_, None)

    async def submit_topic(
        self,
        topic: str,
        payload: Any = None,
        *,
        idempotency_key: str | None = None,
        correlation_id: str | None = None,
        returns: Any = None,
        **options: Unpack[TopicSubmitOptions],
    ) -> JobHandle:
        """Submit a job on a topic of the bus. Its payload is stored where the topic's workers read it.

        The handle's result is the report of the worker. Its `result_ptr` says where the result itself is stored.
        """
        refuse_unknown(options, tuple(TopicSubmitOptions.__annotations__))
        if self._asking is None:
            raise OptionInvalid(
                option="topic", value=topic, expected="only a connection of `connect` has the bus's settings"
            )
        actor = self._submitter()
        asked_as = None if idempotency_key is None else (f"topic:{owner_name(self.principal)}", idempotency_key)
        async with self._asking() as asking:
            job = await asking.job(
                {"topic": topic, **options},
                payload=payload,
                principal=self.principal,
                correlation_id=correlation_id,
                asked_as=asked_as,
            )
        if asked_as is not None:
            scope, key = asked_as
            job = replace(job, idempotency_key=key, idempotency_scope=scope)
        job = await admitted_submission(self.principal, self.ledger, job)
        (answer,) = await self.ledger.submit(acting_or_gateway(actor, job.lifecycle), [job])
        submitted = accepted(answer)
        if submitted.created and self._accepted is not None:
            self._accepted()
        return JobHandle(self, submitted, topic, returns)

    def handle(self, job_id: str, *, returns: Any = None) -> JobHandle:
        """Return a handle of an existing job."""
        return JobHandle(self, Submitted(job_id=JobId(job_id), created=False), None, returns)

    # --- read ----------------------------------------------------------------------------------------------------

    async def job(self, job_id: str) -> Job:
        """Return one job. Raises JobNotFound, and NotAllowed if the token may not read it."""
        job = await self.ledger.job(JobId(job_id))
        await self._reach.check("jobs.read", JobId(job_id), job)
        if job is None:
            raise JobNotFound(job_id=job_id)
        return job

    async def events(self, job_id: str) -> list[Event]:
        """Return every event of a job, oldest first. Raises NotAllowed."""
        await self._reach.check("jobs.read", JobId(job_id))
        return await self.ledger.events(JobId(job_id))

    async def signals(self, job_id: str) -> list[Signal]:
        """Return progress and log lines of a job, oldest first, as long as they are retained. Raises NotAllowed."""
        await self._reach.check("jobs.read", JobId(job_id))
        return await self.ledger.signals(JobId(job_id), limit=SIGNALS_MAX)

    async def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Wait until the job has ended or only an operator can continue it. Raises TimeoutError."""
        began, pause = self._clock.monotonic(), WAIT_S_FIRST
        while not _is_settled(job := await self.job(job_id)):
            left = None if timeout_s is None else began + timeout_s - self._clock.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"job {job_id} is {job.state} after {timeout_s:g} s")
            await self._clock.sleep(pause if left is None else min(pause, left))
            pause = min(WAIT_S_MAX, pause * 1.5)
        return job

    async def why(self, job: Job) -> JobFailed | JobDeadLettered | JobCancelled:
        """Return why a job did not succeed, from its last event and its dead letter."""
        events = await self.events(job.job_id)
        reason = reason_of(events[-1]) if events else job.state
        if _state(job).dead_letter:
            letter = await letter_of(self.ledger, job)
            code = letter.reason_code.value if letter else "unknown"
            text = (letter.last_error if letter else reason).removeprefix(f"{code}: ")
            return JobDeadLettered(job_id=job.job_id, reason_code=code, reason=text, letter=letter)
        kind = JobCancelled if events and events[-1].type == "job_cancelled" else JobFailed
        return kind(job_id=job.job_id, reason=reason)

    async def feed(
        self, position: str | None = None, *, lifecycle: str | None = None, follow: bool = True
    ) -> AsyncIterator[FeedPage]:
        """Yield every event once, in order, in pages. Store `page.position` to continue from there.

        Without `follow`, it ends after the last event. A token limited to its own jobs gets only their events.
        """
        while True:
            page = await self.ledger.feed(position, limit=FEED_PAGE_MAX, lifecycle=lifecycle)
            position, shown = page.position, await self._reach.page("events.read", page)
            if shown.events:
                yield shown
            elif page.events:
                continue
            elif follow:
                await self._clock.sleep(WAIT_S_MAX)
            else:
                return

    def read_result(self, type_: str, body: bytes, returns: Any) -> Any:
        """Decode a stored result as the type of `returns` or of the handler, else as plain JSON."""
        if returns is not None:
            return read_as(pydantic.TypeAdapter[Any](returns), body, type_)
        if self._app is not None and type_ in self._app:
            return self._app.spec(type_).codec.read_result(body)
        return json.loads(body)

    # --- control -------------------------------------------------------------------------------------------------

    async def cancel(
        self,
        job_id: str,
        mode: CancelMode | str = CancelMode.SOFT,
        *,
        cause: str | None = None,
        grace_s: float | None = None,
    ) -> Job:
        """Cancel a job. Raises InvalidTransition, with the final state, if it has ended.

        `grace_s` is how long the job may continue after a soft cancel before it is ended. Default: from the settings.
        """
        chosen, grace_s = check_choice(CancelMode, "mode", mode), self._cancel_grace_s if grace_s is None else grace_s
        actor = await self._canceller(JobId(job_id))
        answer = await self.ledger.cancel(
            actor, JobId(job_id), chosen, self._request_id(), grace_s=grace_s, cause=cause
        )
        if isinstance(answer, NotMoved):
            raise InvalidTransition(**refusal_facts(answer, actor))
        assert isinstance(answer, Moved | CancelRequested)
        return await self.job(job_id)

    async def signal(self, job_id: str, name: str, payload: Any = None, *, key: str | None = None) -> SignalSent:
        """Send a signal to a job, which `ctx.wait_signal` returns. A repeated `key` sends nothing again.

        Raises JobNotFound, and SignalRefused once the job has ended.
        """
        self._refuse_expired()
        job = await self.ledger.job(JobId(job_id))
        actor = await permit_on_job(self.principal, "jobs.signal", self.ledger, job)
        if job is None:
            raise JobNotFound(job_id=job_id)
        body = any_json_bytes(payload, f"the signal {name}")
        return await self.ledger.send_signal(actor, job.job_id, name, body, signal_key=key)

    async def dead_letter(
        self, job_id: str, *, reason: str, reason_code: ReasonCode | str = ReasonCode.POLICY_VIOLATION
    ) -> Job:
        """Dead-letter a job that has not ended, without a retry. An operator's action. Raises InvalidTransition."""
        actor = self._permitted("jobs.dead-letter")
        code = operator_reason_code(reason_code)
        answer = await dead_letter(
            self.ledger, actor, JobId(job_id), self._request_id(), reason_code=code, reason=reason
        )
        if isinstance(answer, NotMoved):
            raise InvalidTransition(**refusal_facts(answer, actor))
        return await self.job(job_id)

    async def requeue(
        self, jobs: Sequence[str] | JobFilter, *, limit: int = 100, cause: str | None = None
    ) -> list[Moved | NotMoved]:
        """Requeue failed and dead-lettered jobs: each starts its next generation. An operator's action.

        Returns one answer for each job, oldest job first: Moved, or NotMoved with the reason if its state allows no
        requeue. Raises JobNotFound if one of the ids is unknown; then no job is requeued.
        """
        actor = self._permitted("jobs.requeue")
        if not isinstance(jobs, JobFilter):
            check_listed("jobs", jobs, "it must be a list of job ids, or a JobFilter")
        chosen = jobs if isinstance(jobs, JobFilter) else [JobId(job_id) for job_id in jobs]
        return await self.ledger.requeue(actor, chosen, self._request_id(), limit=limit, cause=cause)

    async def change_jobs(
        self,
        change: JobChange | str,
        jobs: Sequence[str] | ChangeFilter,
        *,
        priority: Priority | str | None = None,
        mode: CancelMode | str = CancelMode.SOFT,
        cause: str | None = None,
        limit: int = CHANGE_LIMIT_DEFAULT,
        on_progress: Callable[[ChangeTotals], None] = lambda _: None,
    ) -> ChangeTotals:
        """Cancel, discard, run now or prioritize the named jobs, or those that a filter names, oldest first.

        At most 500 jobs change in one transaction, and `on_progress` is told after each. A job that changed meanwhile is
        skipped and counted. A caller that may change only its own jobs changes those. Raises NotAllowed, InputError.
        """
        changes, wish = self._changes(), self._wish(change, priority, mode, cause)
        if isinstance(jobs, ChangeFilter):
            where = self._stored(jobs)
            return await changes.change_all(wish, where, self._request_id, limit=limit, on_progress=on_progress)
        check_listed("jobs", jobs, "it must be a list of job ids, or a ChangeFilter")
        totals = ChangeTotals()
        for first in range(0, len(jobs), CHANGED_MAX):
            batch = await changes.change_named(wish, jobs[first : first + CHANGED_MAX], self._request_id())
            totals = totals.plus(batch)
            on_progress(totals)
        return totals

    async def preview_change(
        self,
        change: JobChange | str,
        where: ChangeFilter,
        *,
        priority: Priority | str | None = None,
        mode: CancelMode | str = CancelMode.SOFT,
    ) -> ChangePreview:
        """How many jobs such a change would concern, and the oldest of them. Changes nothing."""
        return await self._changes().preview(self._wish(change, priority, mode, None), self._stored(where))

    async def compensate(self, *jobs: str, type_: str | None = None, timeout_s: float | None = None) -> list[JobHandle]:
        """Undo succeeded jobs, newest first, each by its type's compensation or by `type_`. Idempotent.

        Several jobs form a chain: each compensation must succeed before the next one starts.
        """
        originals = sorted([await self.job(job_id) for job_id in jobs], key=lambda job: job.created_at, reverse=True)
        wanted = [(job, await self._compensation(job, type_)) for job in originals]
        handles: list[JobHandle] = []
        for job, undoing in wanted:
            handle = await self._undo(job, undoing)
            handles.append(handle)
            if len(wanted) > 1:
                await handle.result(timeout_s)
        return handles

    async def pause(self, type_: str, *, reason: str | None = None) -> None:
        """Pause a job type: no more of its jobs are claimed. Held jobs continue. The audit record shows `reason`."""
        actor = self._acting(Role.CONTROL_PLANE, action="pause a type")
        await self.ledger.pause(actor, type_, paused=True, cause=reason)

    async def resume(self, type_: str, *, reason: str | None = None) -> None:
        """Resume a job type: its jobs are claimed again. The audit record shows `reason`."""
        actor = self._acting(Role.CONTROL_PLANE, action="resume a type")
        await self.ledger.pause(actor, type_, paused=False, cause=reason)

    async def leave_behind(self, follower: str, *, reason: str | None = None) -> bool:
        """Stop keeping ended jobs for a follower until it reads again. Return False if nothing is kept for it."""
        actor = self._acting(Role.CONTROL_PLANE, action="leave a follower behind")
        return await self.ledger.release_retention(actor, follower, cause=reason)

    async def declare(self, app: App) -> None:
        """Declare an application's job types, with their options, and its schedules, as a worker does when it starts."""
        actor = self._acting(Role.WORKER, Role.CONTROL_PLANE, action="declare the options of a type")
        await self.ledger.declare_types(actor, [spec.declared for spec in app])
        await declare_schedules(self.ledger, actor, owner_name(self.principal), app.schedules())

    @property
    def schedules(self) -> JobSchedules:
        """The schedules of jobs: list, add, change, pause, resume, remove and run them."""
        return JobSchedules(
            ledger=self.ledger,
            permit=self._permitted,
            check_read=self._check_rule,
            owner=owner_name(self.principal),
            new_id=self._new_id,
            bus=self._asking,
            accepted=self._accepted,
        )

    # --- private -------------------------------------------------------------------------------------------------

    def _changes(self) -> JobChanges:
        self._refuse_expired()
        return JobChanges(self.ledger, self.principal)

    def _stored(self, where: ChangeFilter) -> ChangeFilter:
        """The filter with its concurrency key as the ledger stores it. Raises OptionInvalid for another object."""
        check_filter(where)
        return replace(where, concurrency_key=stored_concurrency_key(self.principal, where.concurrency_key))

    def _wish(
        self, change: JobChange | str, priority: Priority | str | None, mode: CancelMode | str, cause: str | None
    ) -> ChangeWish:
        chosen, grace_s = check_choice(JobChange, "change", change), self._cancel_grace_s
        new = None if priority is None else priority_of(priority)
        return ChangeWish(
            change=chosen, mode=check_choice(CancelMode, "mode", mode), grace_s=grace_s, priority=new, cause=cause
        )

    async def _declare_new(self) -> None:
        """Declares, once, the application's types that the ledger does not know.

        A caller without permission leaves that to a worker.
        """
        if self._app is None or self._declared:
            return
        with suppress(NotAllowed):
            actor = self._acting(Role.WORKER, Role.CONTROL_PLANE, action="declare the options of a type")
            await self.ledger.declare_types(actor, [spec.declared for spec in self._app], only_new=True)
        self._declared = True

    def _check_rule(self, rule: str) -> None:
        """Raises NotAllowed unless the rule permits the caller, or the caller has no token and can open the store."""
        if self.principal.by_token:
            self._permitted(rule)

    def _permitted(self, rule: str, among: Sequence[Role] | None = None) -> Actor:
        """Returns the caller as an actor in the first role that the rule permits. Raises NotAllowed or TokenExpired."""
        self._refuse_expired()
        return permit(self.principal, rule, among=among)

    def _submitter(self) -> Actor:
        """Returns the caller in the role in which it submits. Raises NotAllowed or TokenExpired."""
        self._refuse_expired()
        if self._submits_as is None:
            self._submits_as = permit(self.principal, "jobs.create", among=SUBMITTING_ROLES)
        return self._submits_as

    async def _admitted(self, job: NewJob) -> NewJob:
        """Returns the job as this principal may submit it. Raises NotAllowed."""
        submission = await admitted_submission(self.principal, self.ledger, job)
        return await scoped_key(self.ledger, submission, self.principal.name) if self.principal.by_token else submission

    async def _canceller(self, job_id: JobId) -> Actor:
        """Returns the caller in the role in which it may cancel this job. Raises NotAllowed or JobNotFound."""
        self._refuse_expired()
        job = await self.ledger.job(job_id)
        if job is None:
            await permit_on_job(self.principal, "jobs.cancel", self.ledger, None)
            raise JobNotFound(job_id=job_id)
        return await canceller(self.principal, self.ledger, job)

    def _acting(self, *candidates: Role, action: str) -> Actor:
        """Returns the caller in the first of these roles that it has. Raises NotAllowed or TokenExpired."""
        self._refuse_expired()
        return self.principal.acting(*candidates, action=action)

    def _refuse_expired(self) -> None:
        until = self.principal.until
        if until is not None and self._clock.monotonic() >= until:
            raise TokenExpired(
                problem="it expired while this connection was open", remedy="connect again with a new one"
            )

    def _request_id(self) -> RequestId:
        return RequestId(self._new_id())

    async def _compensation(self, job: Job, type_: str | None) -> str:
        if not _state(job).success:
            raise OptionInvalid(
                option="job", value=job.job_id, expected=f"only succeeded jobs are undone, not {job.state}"
            )
        if type_ is None and self._app is not None and job.type in self._app:
            type_ = self._app.spec(job.type).options.compensation
        if type_ is None:
            declared = await self.ledger.declared_types(job.type)
            type_ = next((one.compensation for one in declared if one.lifecycle == job.lifecycle), None)
        if type_ is None:
            raise OptionInvalid(
                option="type_",
                value=None,
                expected=f"{job.type!r} declares no compensation, so name the type that undoes it",
            )
        return type_

    async def _undo(self, job: Job, type_: str) -> JobHandle:
        body = await self.ledger.result(job.job_id)
        payload = {
            "job_id": job.job_id,
            "payload": json.loads(job.payload or b"null"),
            "result": json.loads(body or b"null"),
        }
        return await self.submit(
            type_,
            payload,
            compensates=job.job_id,
            correlation_id=job.correlation_id,
            idempotency_scope="compensation",
            idempotency_key=job.job_id,
        )


def _is_settled(job: Job) -> bool:
    return LIFECYCLES[job.lifecycle].is_settled(job.state)


def _state(job: Job) -> State:
    return LIFECYCLES[job.lifecycle].by_name[job.state]
