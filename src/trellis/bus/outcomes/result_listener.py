"""Receives the reports of workers and records them in the worker's name (D28).

The ledger decides whether a report counts, never the order of arrival. A report costs one read of the held lease
(shared by reports that arrive together), one read of the job's events when this process neither dispatched the attempt
nor has seen it (shared too), and one turn. A sender that asked is answered after the ledger has answered. When the
ledger does not answer, the error is raised, and a durable bus redelivers the report.
"""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trellis.bus.messages import (
    ACCEPTED,
    NOT_BEGUN,
    PROGRESS,
    REFUSED,
    RESULT,
    START_STEP,
    STOP,
    Dispatch,
    JobProgress,
    JobResult,
    Status,
)
from trellis.bus.outcomes.attempts import (
    GIVE_BACKS_MAX,
    PROGRESS_STATUSES,
    REQUEUING_VERDICTS,
    AttemptCache,
    AttemptIdentity,
    ReportRefusal,
    ReportVerdict,
    StopNotifier,
    WorkerLiveness,
    WorkerReport,
    give_backs,
    is_retryable,
    refusal_of_stale,
    report_of_result,
    report_that_ended,
    storable_text,
    verdict_on,
)
from trellis.bus.outcomes.linked_jobs import COMPENSATION_ID
from trellis.bus.outcomes.publisher import BusPublisher
from trellis.bus.port import Bus, BusSubscription, ReceivedPacket
from trellis.bus.requests import read_wire_id
from trellis.bus.topics import Topics
from trellis.engine import tracing
from trellis.engine.batches import Batcher
from trellis.engine.clock import Clock
from trellis.engine.jobs import (
    CLAIM_MAX,
    JOB_ID_PATTERN,
    Actor,
    Advance,
    DeadLetterReason,
    Epoch,
    HeldLease,
    JobId,
    Lease,
    LeaseLost,
    Move,
    Moved,
    ReasonCode,
    Renewed,
    RequestId,
    Stage,
    StepApplied,
    Turn,
)
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import JobPlace
from trellis.lifecycles import Role, Trigger
from trellis.lifecycles.bus_job import BUS_JOB

GROUP = "trellis"
HEARTBEAT_EVERY_S = 2.0
"""Minimum interval between heartbeats of one job that are written to the ledger, in seconds."""
RESULT_REFUSED_SIGNAL = "job_result_refused"
REMEMBERED_MAX = 20_000
WORKER_ID_CHARS_MAX = 200
LEDGER_CALLS_MAX = 64
"""Reports processed concurrently."""

_JOB_ID = re.compile(JOB_ID_PATTERN)
_log = log_of("trellis.bus.results.result_listener")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReportedAttempt:
    """The attempt that a report is about, and the worker that sent it."""

    job_id: JobId
    epoch: Epoch
    wire_id: str
    worker_id: str
    dispatch: Dispatch | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportAnswer:
    """The answer to a report: the job's status, and whether the report was accepted."""

    status: Status
    message: str


def refuse_report(status: Status, why: str) -> ReportAnswer:
    """The answer to a report that changes nothing, with the reason."""
    return ReportAnswer(status=status, message=f"{REFUSED}: {why}")


UNKNOWN_ATTEMPT = refuse_report(Status.UNSPECIFIED, "there is no such job here")


@dataclass(kw_only=True)
class ResultListener:
    """Subscribes to results and progress. Any number of processes share the work."""

    ledger: Ledger
    bus: Bus
    topics: Topics
    workers: WorkerLiveness
    clock: Clock
    name: str
    """Name of this process, where it acts as scheduler or reconciler."""
    attempts: AttemptCache
    stopping: StopNotifier
    wake: Callable[[], None] | None = None
    """Called when a job is ready again."""
    has_room: Callable[[], None] | None = None
    """Called when a worker has room again."""
    publisher: BusPublisher | None = None
    """The publisher of this process: it publishes recorded successes at once, and reads the feed for other ends."""
    _listening: list[BusSubscription] = field(default_factory=list[BusSubscription])
    _remarked: LruCache[tuple[str, str, str, str], bool] = field(init=False)
    _beaten: LruCache[str, float] = field(init=False)
    _looks: Batcher[JobId, HeldLease | None] = field(init=False)
    _renewals: Batcher[Lease, Renewed | LeaseLost] = field(init=False)
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._remarked, self._beaten = LruCache(REMEMBERED_MAX), LruCache(REMEMBERED_MAX)
        self._looks = Batcher(self._held, lambda _: 1, CLAIM_MAX)
        self._renewals = Batcher(self._renew_all, lambda _: 1, CLAIM_MAX)
        self._room = asyncio.Semaphore(LEDGER_CALLS_MAX)

    async def start(self) -> None:
        """Subscribe. Results that arrived while there was no subscriber are delivered too."""
        self._listening.append(
            await self.bus.listen(RESULT, self.handle_result, group=GROUP, durable=True, echoes=False)
        )
        self._listening.append(await self.bus.listen(PROGRESS, self.handle_progress, group=GROUP))

    async def stop(self) -> None:
        while self._listening:
            await self._listening.pop().stop()

    async def handle_result(self, received: ReceivedPacket) -> None:
        """Handle one result. Raises LedgerError when the ledger does not answer."""
        result = received.packet.body
        if not isinstance(result, JobResult) or received.packet.sender_id == self.bus.sender_id:
            return
        if result.status in PROGRESS_STATUSES:
            alive = JobProgress(
                job_id=result.job_id, status=result.status, result_ptr=result.result_ptr, dispatch=result.dispatch
            )
            await self._handle_report(received, alive)
            return
        worker_id = result.worker_id or received.packet.sender_id
        reported = _reported_attempt(result.job_id, worker_id, result.dispatch)
        async with self._room:
            answer = await self._settle(reported, result, forged=worker_id != received.packet.sender_id)
        await _reply(received, result.job_id, answer)

    async def handle_progress(self, received: ReceivedPacket) -> None:
        """Handle one progress report, or one request to start. Raises LedgerError when the ledger does not answer."""
        progress = received.packet.body
        if isinstance(progress, JobProgress) and received.packet.sender_id != self.bus.sender_id:
            await self._handle_report(received, progress)

    async def _handle_report(self, received: ReceivedPacket, progress: JobProgress) -> None:
        reported = _reported_attempt(progress.job_id, received.packet.sender_id, progress.dispatch)
        async with self._room:
            answer = await self._progress(reported, progress)
        await _reply(received, progress.job_id, answer)

    async def works_on(self, wire_id: str, worker_id: str) -> None:
        """Record that a sender named this attempt other than by a report.

        It counts as a heartbeat if the attempt was dispatched to this worker, or if the sender is a live worker of the
        topic: any sender can name a wire id.
        """
        reported = _reported_attempt(wire_id, worker_id, None)
        async with self._room:
            hold = None if reported is None else await self._looks.put(reported.job_id)
            if hold is None or not await self._may_have(hold, worker_id):
                return
            await self._progress(reported, JobProgress(job_id=wire_id))

    async def _may_have(self, hold: HeldLease, worker_id: str) -> bool:
        """Whether the worker may have the attempt.

        Either it was dispatched to this worker, or to the topic's own subject and the worker serves the topic.
        """
        attempt = await self.attempts.of(hold)
        if attempt is not None and attempt.worker:
            return attempt.worker == worker_id
        return self.workers.serves(worker_id, hold.type, self.topics.of(hold.type))

    # --- results --------------------------------------------------------------------------------------------------

    async def _settle(self, reported: _ReportedAttempt | None, result: JobResult, *, forged: bool) -> ReportAnswer:
        if reported is None:
            _log.warning(
                "unknown_job",
                job_id=storable_text(result.job_id),
                worker_id=storable_text(result.worker_id),
                said=result.status.name,
            )
            return UNKNOWN_ATTEMPT
        report = report_of_result(result, result.dispatch.dispatch_id if result.dispatch else "")
        job = await self.ledger.job(reported.job_id) if tracing.is_on() else None
        if job is None:
            return await self._judge(reported, report, forged=forged)
        about = {**tracing.of_job(job), "trellis.epoch": reported.epoch, "trellis.status": report.status}
        with tracing.carried(job.trace, f"job.result {job.type}", about, kind=tracing.CONSUMER) as span:
            answer = await self._judge(reported, report, forged=forged)
            span.note({"trellis.answer": answer.message})
        return answer

    async def _judge(self, reported: _ReportedAttempt, report: WorkerReport, *, forged: bool) -> ReportAnswer:
        hold = await self._looks.put(reported.job_id)
        if hold is None or hold.lease.epoch != reported.epoch:
            return await self._refuse(reported, report, None)
        attempt = await self.attempts.identity(hold)
        objection = ReportRefusal.FOREIGN if forged else ReportRefusal.STALE
        if attempt is not None and not forged:
            objection = attempt.objection(reported.worker_id, reported.dispatch)
        if objection is not None:
            return await self._refuse(reported, report, objection)
        return await self._apply_verdict(
            reported, hold, replace(report, dispatch=_finished_dispatch(attempt, reported.worker_id))
        )

    async def _apply_verdict(self, reported: _ReportedAttempt, hold: HeldLease, report: WorkerReport) -> ReportAnswer:
        topic = self.topics.of(hold.type)
        meant = verdict_on(report, topic, hold, await self._given_back(hold, report))
        if meant is ReportVerdict.SUCCEED:
            did = await self._succeeded(reported, hold, report)
        elif meant is ReportVerdict.CANCEL:
            did = await self._cancelled(hold, report)
        elif meant in REQUEUING_VERDICTS:
            step = Advance(
                hold.lease,
                hold.state,
                Trigger.RETRY,
                delay_s=topic.backoff_s,
                spare_attempt=meant is ReportVerdict.GIVE_BACK,
                cause=report.problem,
                data=report.body,
            )
            did = await self._turn(Actor(role=Role.SCHEDULER, name=self.name), (step,)) is not None
        else:
            did = await self._end(reported, hold, await self._failure(hold, report)) is not None
        if not did:
            return await self._on_refused_step(reported, hold, report)
        self._has_settled(reported)
        if meant in REQUEUING_VERDICTS and self.wake is not None:
            self.wake()
        if meant is not ReportVerdict.SUCCEED and self.publisher is not None:
            self.publisher.wake()
        status = Status.SCHEDULED if meant in REQUEUING_VERDICTS else _STATUS_OF_VERDICT[meant]
        return ReportAnswer(status=status, message=ACCEPTED)

    async def _succeeded(self, reported: _ReportedAttempt, hold: HeldLease, report: WorkerReport) -> bool:
        """Record a success and have it published: at once if this process publishes, otherwise from the feed."""
        publisher, body = self.publisher, report.body
        ending = None if publisher is None or report.error_code else publisher.ending(reported.job_id)
        version: int | None = None
        try:
            step = Advance(hold.lease, "RUNNING", Trigger.COMPLETE, data=body, result=body)
            version = await self._end(reported, hold, step)
        finally:
            if ending is not None and version is None:
                ending.drop()
        if version is None:
            return False
        if ending is not None:
            ending.publish(version, report, hold.correlation_id)
        elif publisher is not None:
            publisher.wake()
        return True

    async def _given_back(self, hold: HeldLease, report: WorkerReport) -> int:
        """How often workers returned the job unstarted; 0 unless it was dispatched often enough for that to matter."""
        if report.error_code != NOT_BEGUN or hold.lease.epoch <= GIVE_BACKS_MAX:
            return 0
        return give_backs(await self.ledger.events(hold.lease.job_id))

    async def _on_refused_step(self, reported: _ReportedAttempt, hold: HeldLease, report: WorkerReport) -> ReportAnswer:
        """Handle a refused transition: the attempt changed since it was read.

        If it was started or a cancel was requested meanwhile, which each happen once, the report is judged again.
        Otherwise the attempt is over.
        """
        now = await self._looks.put(reported.job_id)
        if now is not None and now.lease == hold.lease and (now.state, now.cancel) != (hold.state, hold.cancel):
            return await self._judge(reported, report, forged=False)
        return await self._refuse(reported, report, None, tried=True)

    async def _end(self, reported: _ReportedAttempt, hold: HeldLease, step: Advance) -> int | None:
        """Record the end of an attempt, and its start if that is not recorded yet. As `_turn`."""
        steps = (*_start(hold, reported, {"seen_by": "result"}), step)
        return await self._turn(Actor(role=Role.WORKER, name=reported.worker_id), steps)

    async def _failure(self, hold: HeldLease, report: WorkerReport) -> Advance:
        death = await self._dead_letter_reason(hold.lease.job_id, report)
        again = is_retryable(report, self.topics.of(hold.type))
        return Advance(
            hold.lease,
            "RUNNING",
            Trigger.FAIL,
            cause=report.problem,
            data=report.judged(retryable=again),
            death=death,
            unless_cancelled=again,
        )

    async def _dead_letter_reason(self, job_id: JobId, report: WorkerReport) -> DeadLetterReason | None:
        """The dead letter reason of a failed compensation, which a person must look at (D36); None for other jobs."""
        job = await self.ledger.job(job_id) if COMPENSATION_ID.search(job_id) else None
        if job is None or job.compensates is None:
            return None
        error = report.problem or report.status
        return DeadLetterReason(reason_code=ReasonCode.COMPENSATION_FAILED, stage=Stage.EXEC, last_error=error)

    async def _cancelled(self, hold: HeldLease, report: WorkerReport) -> bool:
        """Record that the worker stopped on request; only if the job has not changed meanwhile."""
        move = Move(
            job_id=hold.lease.job_id,
            target="CANCELLED",
            request_id=RequestId(f"stopped:{hold.lease.job_id}@{hold.lease.epoch}"),
            version=hold.version,
            cause="soft cancel: the worker stopped",
            data=report.body,
        )
        moved = await self.ledger.move(Actor(role=Role.RECONCILER, name=self.name), move)
        return isinstance(moved, Moved) and not moved.repeated

    async def _turn(self, actor: Actor, steps: tuple[Advance, ...]) -> int | None:
        """The version of the job after these steps; None unless all were applied, and by this call.

        A repeated step may be another process's.
        """
        version: int | None = None
        for outcome in (await self.ledger.turn(Turn(actor=actor, advances=steps))).outcomes:
            if not isinstance(outcome, StepApplied) or outcome.repeated:
                return None
            version = outcome.version
        return version

    def _has_settled(self, reported: _ReportedAttempt) -> None:
        self.workers.settled(reported.wire_id)
        if self.has_room is not None:
            self.has_room()

    async def _refuse(
        self, reported: _ReportedAttempt, report: WorkerReport, why: ReportRefusal | None, *, tried: bool = False
    ) -> ReportAnswer:
        """Refuse a report. Nothing changes, and the job's readers can see the report.

        An exact repeat of an accepted report is accepted.

        `tried` means that this report itself may have made the transition, if the ledger had to repeat its call.
        """
        job = await self.ledger.job(reported.job_id)
        if job is None or job.lifecycle != BUS_JOB.name:
            _log.warning("unknown_job", job_id=reported.job_id, worker_id=reported.worker_id, said=report.status)
            return UNKNOWN_ATTEMPT
        events = await self.ledger.events(reported.job_id)
        ended = job.place is JobPlace.ENDED
        kind = why or refusal_of_stale(events, reported.epoch, report, ended=ended)
        status = Status[job.state]
        before = report_that_ended(events, reported.epoch)
        again = kind is ReportRefusal.DUPLICATE and before == report
        if why is None:
            self._has_settled(reported)
        if not (again and tried):
            await self._annotate_refusal(reported, report, kind, job.state, ended=ended)
        return ReportAnswer(status=status, message=ACCEPTED) if again else refuse_report(status, kind.value)

    async def _annotate_refusal(
        self, reported: _ReportedAttempt, report: WorkerReport, kind: ReportRefusal, state: str, *, ended: bool
    ) -> None:
        _log.warning(
            "late_result" if ended else "result_refused",
            job_id=reported.job_id,
            epoch=reported.epoch,
            kind=kind.value,
            state=state,
            said=report.status,
            worker_id=reported.worker_id,
        )
        once = (reported.wire_id, reported.worker_id, kind.value, report.status)
        if self._remarked.get(once):
            return
        refusal = {
            "kind": kind.value,
            "status": report.status,
            "state": state,
            "worker_id": reported.worker_id,
            "epoch": reported.epoch,
            "execution_ms": report.execution_ms,
            "error_code": report.error_code,
            "error_message": report.error_message,
            "result_ptr": report.result_ptr,
        }
        by = Actor(role=Role.RECONCILER, name=self.name)
        await self.ledger.annotate(by, reported.job_id, RESULT_REFUSED_SIGNAL, json.dumps(refusal).encode())
        self._remarked[once] = True

    # --- progress -------------------------------------------------------------------------------------------------

    async def _progress(self, reported: _ReportedAttempt | None, progress: JobProgress) -> ReportAnswer:
        if reported is None:
            return UNKNOWN_ATTEMPT
        hold = await self._looks.put(reported.job_id)
        attempt = None if hold is None or hold.lease.epoch != reported.epoch else await self.attempts.identity(hold)
        if hold is None or attempt is None:
            return await self._answer_not_now(reported)
        objection = attempt.objection(reported.worker_id, reported.dispatch)
        if objection is not None:
            _log.info("progress_refused", job_id=reported.job_id, kind=objection.value, worker_id=reported.worker_id)
            return refuse_report(Status[hold.state], objection.value)
        if hold.cancel:
            await self.stopping.tell(hold, attempt)
        asks = progress.step_id == START_STEP
        if hold.state == "DISPATCHED" and (asks or progress.status in {Status.RUNNING, Status.UNSPECIFIED}):
            return await self._begin(reported, hold, attempt, progress.message if asks else None)
        if asks:
            return _may_go_on(attempt, reported, progress.message)
        return await self._keep(reported, hold, progress)

    async def _begin(
        self, reported: _ReportedAttempt, hold: HeldLease, attempt: AttemptIdentity, token: str | None
    ) -> ReportAnswer:
        """Record the start that a report implies or, with a token, requests.

        Of concurrent requests exactly one starts.
        """
        data = {"seen_by": "progress"} if token is None else {"token": storable_text(token)}
        actor = Actor(role=Role.WORKER, name=reported.worker_id)
        outcome = (await self.ledger.turn(Turn(actor=actor, advances=_start(hold, reported, data)))).outcomes[0]
        if isinstance(outcome, LeaseLost):
            return await self._answer_not_now(reported)
        if outcome.repeated:
            started = await self.attempts.read(hold) or attempt
        else:
            started = self.attempts.began(hold, attempt, reported.worker_id, data.get("token", ""))
        return _may_go_on(started, reported, started.token if token is None else token)

    async def _keep(self, reported: _ReportedAttempt, hold: HeldLease, progress: JobProgress) -> ReportAnswer:
        """Renew the lease, up to the maximum length of an attempt. Frequent heartbeats are not written."""
        going = ReportAnswer(status=Status[hold.state], message=STOP if hold.cancel else ACCEPTED)
        topic, now = self.topics.of(hold.type), self.clock.monotonic()
        last = self._beaten.get(reported.wire_id)
        if last is not None and now < last + min(HEARTBEAT_EVERY_S, topic.lease_s / 3):
            return going
        attempt = await self.attempts.of(hold)
        if attempt is None:
            return await self._answer_not_now(reported)
        longest_s = attempt.may_take_s(topic)
        if (await self.ledger.now() - attempt.dispatched_at).total_seconds() > longest_s:
            # Not STOP: no cancel was requested, and the job continues with its next attempt.
            return refuse_report(going.status, f"an attempt may take {longest_s:g} s")
        self._beaten[reported.wire_id] = now
        renewed = await self._renewals.put(hold.lease)
        if isinstance(renewed, LeaseLost):
            return await self._answer_not_now(reported)
        if progress.step_id or progress.percent or progress.message:
            await self.ledger.signal(hold.lease, [("job_heartbeat", _progress_signal(reported, progress))])
        return going

    async def _answer_not_now(self, reported: _ReportedAttempt) -> ReportAnswer:
        """The answer about an attempt that is no longer current."""
        job = await self.ledger.job(reported.job_id)
        if job is None or job.lifecycle != BUS_JOB.name:
            return UNKNOWN_ATTEMPT
        self._has_settled(reported)
        _log.info(
            "progress_refused",
            job_id=reported.job_id,
            epoch=reported.epoch,
            state=job.state,
            worker_id=reported.worker_id,
        )
        why = ReportRefusal.LATE if job.place is JobPlace.ENDED else ReportRefusal.STALE
        return refuse_report(Status[job.state], why.value)

    # --- batched ledger calls -------------------------------------------------------------------------------------

    async def _held(self, job_ids: Sequence[JobId]) -> list[HeldLease | None]:
        holds = {hold.lease.job_id: hold for hold in await self.ledger.holds(list(dict.fromkeys(job_ids)))}
        return [holds.get(job_id) for job_id in job_ids]

    async def _renew_all(self, leases: Sequence[Lease]) -> list[Renewed | LeaseLost]:
        return await self.ledger.renew(Actor(role=Role.RECONCILER, name=self.name), leases)


_STATUS_OF_VERDICT = {
    ReportVerdict.SUCCEED: Status.SUCCEEDED,
    ReportVerdict.FAIL: Status.FAILED,
    ReportVerdict.CANCEL: Status.CANCELLED,
}


def _reported_attempt(job_id: str, worker_id: str, dispatch: Dispatch | None) -> _ReportedAttempt | None:
    """The attempt that a report names; None if it cannot be one of ours."""
    named = read_wire_id(job_id)
    if (
        named is None
        or not _JOB_ID.match(named[0])
        or not 0 < len(worker_id) <= WORKER_ID_CHARS_MAX
        or storable_text(worker_id) != worker_id
    ):
        return None
    return _ReportedAttempt(job_id=named[0], epoch=named[1], wire_id=job_id, worker_id=worker_id, dispatch=dispatch)


def _finished_dispatch(attempt: AttemptIdentity | None, worker_id: str) -> Dispatch | None:
    """The dispatch that a report ends, with the worker that had it, even if none was assigned."""
    return None if attempt is None else replace(attempt.dispatch, worker_id=attempt.assigned or worker_id)


def _start(hold: HeldLease, reported: _ReportedAttempt, details: dict[str, str]) -> tuple[Advance, ...]:
    """The start of an attempt that was not reported as started, in its worker's name."""
    if hold.state != "DISPATCHED":
        return ()
    data = {"status": Status.RUNNING.name, "worker_id": reported.worker_id, **details}
    if reported.dispatch is not None and reported.dispatch.dispatch_id:
        data["dispatch_id"] = reported.dispatch.dispatch_id
    return (Advance(hold.lease, "DISPATCHED", Trigger.START, data=json.dumps(data).encode()),)


def _may_go_on(attempt: AttemptIdentity, reported: _ReportedAttempt, token: str) -> ReportAnswer:
    """Whether the attempt was started by this very request: its worker and token must match. Tokens are unique."""
    if attempt.starter == reported.worker_id and attempt.token == storable_text(token):
        return ReportAnswer(status=Status.RUNNING, message=ACCEPTED)
    return refuse_report(Status.RUNNING, "started already")


def _progress_signal(reported: _ReportedAttempt, progress: JobProgress) -> bytes:
    data = {
        "percent": min(100, max(0, progress.percent)),
        "step_id": storable_text(progress.step_id),
        "message": storable_text(progress.message),
        "worker_id": reported.worker_id,
    }
    return json.dumps(data).encode()


async def _reply(received: ReceivedPacket, job_id: str, answer: ReportAnswer) -> None:
    if received.wants_answer:
        await received.answer(JobProgress(job_id=job_id, status=answer.status, message=answer.message))
