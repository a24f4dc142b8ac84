"""The orchestrator of the job queue: accepts queue jobs and drives each through its stages to its end."""

import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar

from trellis.agents.errors import AgentError
from trellis.artifacts.content import ARTIFACT_TYPE_OF_JOB_TYPE, JobType
from trellis.artifacts.registry import ArtifactRegistry
from trellis.artifacts.rows import STAGED, ArtifactRow, journal_entry
from trellis.documents.errors import AgentNotRunnable, TooManyWaiting
from trellis.documents.run_documents import RunRequest
from trellis.engine.clock import within
from trellis.engine.errors import InvalidTransition, LedgerError
from trellis.engine.jobs import Actor, CancelMode, Claimed, JobId, Move, Moved, RequestId
from trellis.engine.lease_runner import LeaseRunner, LeaseRunnerReport
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Job, JobFilter
from trellis.engine.restoration import RELEASED_CAUSE
from trellis.engine.retry_policy import storable
from trellis.engine.step_runner import DriveStopped, JobDrive, StepRunner
from trellis.lifecycles import Phase, Trigger
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN
from trellis.research import errors
from trellis.research.backend_client import (
    Callback,
    ExecutionBackend,
    ExecutionRequest,
    JobFailedAnswer,
    JobFinished,
    error_of_failure,
    first_callback,
)
from trellis.research.context import ContextAssembler
from trellis.research.errors import ContextUnavailable, RequestUnreadable, StageError, StageHopeless
from trellis.research.queue_job import BACKOFF, QueueRequest, callback_url, data_of, run_of, snapshot_url
from trellis.research.retry_policy import FINAL_REST_S_MIN, FailForGood, on_stage_error
from trellis.runs.orchestration import OrchestrationLayer, TriggerKind
from trellis.storage.objects.canonical_json import timestamp
from trellis.storage.objects.store import ObjectStore, StoreError

# The last transition of a permanently failed job: out of its backoff to FAILED, where an operator has a window to act
# (D8).
#
# The driver that scheduled the backoff makes this transition too, and may die in between. That backoff lasts far longer
# than any other, so no timer gives the job another attempt. The orchestrator's next check then makes the transition
# instead. The transition is idempotent.

FAILED = "FAILED"
CAUSE_CHARS_MAX = 200


async def fail_for_good(
    ledger: Ledger, actor: Actor, job_id: JobId, version: int, facts: Mapping[str, Any], *, window_s: float
) -> str:
    """Moves a job out of the backoff with this version. Returns the state it is in then."""
    error = facts["error"]
    move = Move(
        job_id=job_id,
        target=FAILED,
        request_id=RequestId(f"final:{job_id}:{version}"),
        version=version,
        delay_s=window_s,
        cause=f"{error['code']}: {error['message']}"[:CAUSE_CHARS_MAX],
        data=json.dumps(dict(facts), ensure_ascii=False).encode(),
    )
    answer = await ledger.move(actor, move)
    return answer.target if isinstance(answer, Moved) else answer.state


# The run of a requeued job (D20).
#
# A run that has ended stays closed. When a job of such a run is requeued, a new run of the same agent starts, with the
# same parameters and with `retry_of` in its manifest. The job keeps its id, and earlier records keep the old run. The
# run starts once per generation, however often the job is claimed in it. A job that never belonged to a run keeps the
# run id that was made for it.


async def run_of_generation(
    ledger: Ledger, layer: OrchestrationLayer, job_id: JobId, generation: int, request: QueueRequest
) -> str:
    """Returns the run of this generation, starting it if necessary. Raises StageError."""
    if generation == 0:
        return request.run_id
    events = await ledger.events(job_id)
    before, now = run_of(request, events, generation=generation - 1), run_of(request, events)
    if now != before:
        return now
    run = await ledger.job(JobId(before))
    if run is None or run.payload is None or run.lifecycle != RUN.name:
        return before
    if RUN.by_name[run.state].phase is not Phase.ENDED:
        return before
    try:
        trigger = await layer.trigger(
            request.agent_slug,
            RunRequest.read(run.payload).params,
            kind=TriggerKind.EVENT,
            key=f"requeue:{job_id}:{generation}",
            retry_of=before,
            correlation_id=None if run.correlation_id == run.job_id else run.correlation_id,
        )
    except TooManyWaiting as error:
        raise ContextUnavailable(detail=str(error)) from error
    except (AgentNotRunnable, AgentError) as error:
        raise StageHopeless(detail=str(error)) from error
    return trigger.job_id


# Drives one queue job through its stages, under a lease (document 000 §1; JQ-5, JQ-9, D7, D8, D15, D38, D41).
#
# Invariants: the output of each stage exists before the transition that counts it. The snapshot exists before
# NOTEBOOKLM_CALL, a callback for this attempt before ARTIFACT_WRITE, and verified bytes in the journal before COMPLETE,
# which finalizes the artifact in the same transaction. Every failure becomes one error, and `retry_policy` decides what
# follows. A driver that dies leaves a job whose lease expires: the next attempt starts with the next epoch, and
# whatever the old one still does is refused. A driver that shuts down releases its job, and that attempt does not
# count. A driver that ends without a result tells the backend, which then need not continue.

CONTEXT, CALL, WRITE = "CONTEXT_ASSEMBLY", "NOTEBOOKLM_CALL", "ARTIFACT_WRITE"
ERROR_CHARS_MAX = 2_000
NOT_EXECUTING_ERRORS = (
    errors.RateLimited,
    errors.BackendRefused,
    errors.StageHopeless,
    errors.NlmFailed,
    errors.ExecutionForgotten,
)
"""Errors after which the backend has certainly not started the execution, or has ended it."""

_log = log_of("trellis.queue")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueDriverOptions:
    """Time limits of the stages."""

    execution_s: float = 600.0
    """One execution, from its claim to COMPLETE (D41)."""
    context_s: float = 30.0
    write_s: float = 30.0
    look_s: float = 0.25
    """Interval of the first checks for a callback. Later checks are less frequent."""
    look_s_max: float = 1.0
    ask_again_s: float = 10.0
    """If no callback came for this long, ask the backend about the execution."""
    operator_window_s: float = 900.0
    """How long a failed job waits for an operator (D8)."""
    let_go_s: float = 2.0
    """How long a process that shuts down tries to release a job. After that, its lease expires."""
    stop_s: float = 2.0
    """How long to try to tell the backend that the result is no longer needed."""


@dataclass(kw_only=True)
class QueueDriver(StepRunner):
    """Drives claimed queue jobs. `draw` returns numbers in [0, 1) for the jitter."""

    objects: ObjectStore
    assembly: ContextAssembler
    artifacts: ArtifactRegistry
    layer: OrchestrationLayer
    backend: ExecutionBackend
    gateway: str
    """Where snapshots are read and callbacks are sent: `http://host:port`."""
    draw: Callable[[], float]
    options: QueueDriverOptions
    leaving: bool = False
    """Whether this process releases all its jobs. Set before the drives are cancelled."""
    span = "queue.drive"

    def begin(self, claimed: Claimed) -> "_QueueDrive":
        return _QueueDrive(self, claimed)


class _QueueDrive(JobDrive[tuple[ArtifactRow, datetime], StageError]):
    """One attempt of one job, held by one driver."""

    failures = StageError
    left = "job_left"

    def __init__(self, driver: QueueDriver, claimed: Claimed) -> None:
        super().__init__(driver, claimed, _log.bind(job_id=claimed.lease.job_id, epoch=claimed.lease.epoch))
        self._driver = driver
        began, options = driver.clock.monotonic(), driver.options
        self._ends_at = began + options.execution_s
        self._deadline_at = None if claimed.deadline_s is None else began + claimed.deadline_s
        self._unfinished: ExecutionRequest | None = None
        """The execution that the backend may still be working on."""

    # --- the stages --------------------------------------------------------------------------------------------------

    async def work(self) -> tuple[ArtifactRow, datetime]:
        """Runs all stages up to the verified and stored artifact.

        Returns the artifact and when its writing began. Raises StageError, DriveStopped.
        """
        request, options = self._request(), self._driver.options
        execution = await self._in_time(self._assemble(request), options.context_s, errors.ContextTimeout)
        callback = await self._in_time(self._called(execution), 0.0, errors.CallbackMissing)
        began = await self._driver.ledger.now()
        row = await self._in_time(self._verified(request, callback), options.write_s, errors.ArtifactUnwritten)
        return row, began

    def _request(self) -> QueueRequest:
        try:
            return QueueRequest.read(self._job_id, self._claimed.payload)
        except errors.RequestUnreadable as error:
            raise errors.StageHopeless(detail=str(error)) from error

    async def _assemble(self, request: QueueRequest) -> ExecutionRequest:
        """Writes the snapshot and builds the request for the backend."""
        driver, epoch = self._driver, self._lease.epoch
        began = await driver.ledger.now()
        digest = await driver.assembly.assemble(request, self._job_id, epoch)
        run_id = await run_of_generation(driver.ledger, driver.layer, self._job_id, self._claimed.generation, request)
        now, url = await driver.ledger.now(), snapshot_url(driver.gateway, self._job_id, epoch)
        facts = {"run_id": run_id, "snapshot_url": url, "sha256": digest, **_times(began, now)}
        await self._step("snapshot_ready", CALL, facts)
        return ExecutionRequest(
            job_id=self._job_id,
            epoch=epoch,
            request=request,
            context_snapshot_url=url,
            callback_url=callback_url(driver.gateway, self._job_id),
            deadline=now + timedelta(seconds=self._left_s()),
            correlation_id=self._claimed.correlation_id,
        )

    async def _called(self, execution: ExecutionRequest) -> Callback | JobFinished:
        """Has the backend execute the job and waits for the outcome."""
        began = await self._driver.ledger.now()
        result = await self._executed(execution)
        if isinstance(result, Callback) and result.error is not None and result.status == "FAILED":
            raise error_of_failure(result.error.code, result.error.message)
        facts = {"artifact_id": result.artifact_id, "sha256": result.sha256, "size": result.size}
        await self._step("response_received", WRITE, {**facts, **_times(began, await self._driver.ledger.now())})
        return result

    async def _executed(self, execution: ExecutionRequest) -> Callback | JobFinished:
        """Returns the outcome of the execution.

        Until it is known, the backend may be working on it, even if its answer was lost.
        """
        self._unfinished = execution
        try:
            answer = await self._driver.backend.process(execution)
            result = answer if isinstance(answer, JobFinished) else await self._awaited(execution)
        except NOT_EXECUTING_ERRORS:
            self._unfinished = None
            raise
        self._unfinished = None
        return result

    async def _awaited(self, execution: ExecutionRequest) -> Callback | JobFinished:
        """Waits for the callback of this attempt. If none comes for a while, asks the backend about the execution."""
        driver, options = self._driver, self._driver.options
        seen, look_s = set[str](), options.look_s
        ask_at = driver.clock.monotonic() + options.ask_again_s
        while True:
            callback = await self._stored_callback(seen)
            if callback is not None:
                return callback
            if driver.clock.monotonic() >= ask_at:
                finished = await self._looked_up(execution)
                if finished is not None:
                    return finished
                ask_at = driver.clock.monotonic() + options.ask_again_s
            await driver.clock.sleep(look_s)
            look_s = min(options.look_s_max, look_s * 1.5)

    async def _stored_callback(self, seen: set[str]) -> Callback | None:
        try:
            return await first_callback(self._driver.objects, self._job_id, self._lease.epoch, seen)
        except StoreError as error:  # the end of the execution bounds how long this may last
            _log.warning("callbacks_unreadable", job_id=self._job_id, error=str(error))
            return None

    async def _looked_up(self, execution: ExecutionRequest) -> JobFinished | None:
        """Asks the backend about the execution; None if it is running or the answer is unclear.

        Raises the error the execution failed with, or ExecutionForgotten.
        """
        try:
            answer = await self._driver.backend.look(execution)
        except errors.ExecutionForgotten:
            raise
        except StageError as error:
            _log.warning("nlm_backend_unclear", job_id=self._job_id, code=error.shown_code, error=str(error))
            return None
        if isinstance(answer, JobFailedAnswer):
            raise error_of_failure(answer.error.code, answer.error.message)
        return answer if isinstance(answer, JobFinished) else None

    async def _verified(self, request: QueueRequest, result: Callback | JobFinished) -> ArtifactRow:
        """Checks that the staged artifact is the announced one, and stores its bytes in the ledger's journal (JQ-5)."""
        try:
            row = await self._driver.artifacts.row(result.artifact_id or "")
            body = None if row is None else await self._driver.artifacts.staged_bytes(row.artifact_id)
        except StoreError as error:
            raise errors.ArtifactUnwritten(detail=str(error)) from error
        if row is None or body is None:
            raise errors.ArtifactMismatch(detail=f"artifact {result.artifact_id} is not staged")
        problem = self._mismatch(request, result, row, body)
        if problem is not None:
            raise errors.ArtifactMismatch(detail=f"artifact {row.artifact_id} {problem}")
        await self.keep(journal_entry(row.artifact_id), body)
        return row

    def _mismatch(
        self, request: QueueRequest, result: Callback | JobFinished, row: ArtifactRow, body: bytes
    ) -> str | None:
        if (row.job_id, row.epoch) != (self._job_id, self._lease.epoch):
            return f"is of job {row.job_id} in epoch {row.epoch}"
        if row.state != STAGED:
            return f"is {row.state}"
        if row.type is not ARTIFACT_TYPE_OF_JOB_TYPE[request.job_type]:
            return f"is a {row.type.value}, and a {request.job_type.value} yields a {ARTIFACT_TYPE_OF_JOB_TYPE[request.job_type].value}"
        if (row.sha256, row.size) != (result.sha256, result.size) or not row.is_of(body):
            return "has other bytes than were announced"
        return None

    # --- the ends ----------------------------------------------------------------------------------------------------

    async def complete(self, verified: tuple[ArtifactRow, datetime]) -> str | None:
        """Finalizes the artifact and completes the job, in one transaction."""
        row, began = verified
        artifact = {"artifact_id": row.artifact_id, "type": row.type.value, "sha256": row.sha256, "size": row.size}
        facts = {**artifact, **_times(began, await self._driver.ledger.now())}
        try:
            await self.advance(
                Trigger.COMPLETE,
                facts,
                result=json.dumps(artifact, ensure_ascii=False).encode(),
                finalizes=row.artifact_id,
            )
        except InvalidTransition as error:  # nothing was written: the artifact is no longer staged
            return await self.fail(errors.ArtifactUnwritten(detail=str(error)))
        return "COMPLETE"

    async def stop(self) -> str | None:
        """Obeys a soft cancel. The ledger turns this release into the requested cancel."""
        await self.advance(Trigger.RETRY, {"stage": self._state}, cause="stopped on request")
        return "FAILED"

    async def interrupted(self) -> None:
        """Releases the job to other processes at once, without counting the attempt, if this process shuts down.

        If the ledger does not answer in time, the lease expires instead.
        """
        if not self._driver.leaving:
            return
        options, about = self._driver.options, {"job_id": self._job_id, "stage": self._state}
        letting_go = self.advance(Trigger.RETRY, {"stage": self._state}, cause=RELEASED_CAUSE, spare_attempt=True)
        try:
            await within(self._driver.clock, options.let_go_s, letting_go)
        except DriveStopped:
            return  # it has ended, or another process holds it
        except (LedgerError, TimeoutError) as error:
            _log.warning("not_given_back", error=str(error) or f"no answer within {options.let_go_s:g} s", **about)

    async def close(self) -> None:
        """Tells the backend that its result is no longer needed. Best effort: nothing depends on it."""
        execution, driver = self._unfinished, self._driver
        if execution is None:
            return
        try:
            await within(driver.clock, driver.options.stop_s, driver.backend.stop(execution))
        except (StageError, TimeoutError) as error:
            problem = str(error) or f"no answer within {driver.options.stop_s:g} s"
            _log.warning("nlm_backend_not_told", job_id=self._job_id, epoch=execution.epoch, error=problem)

    async def fail(self, error: StageError) -> str | None:
        """Backs off, or ends in FAILED at once."""
        verdict = on_stage_error(error, self._claimed.attempt, self._claimed.max_attempts, self._driver.draw())
        code, text = error.shown_code, storable(str(error))[:ERROR_CHARS_MAX]
        final = isinstance(verdict, FailForGood)
        facts = {"error": {"code": code, "message": text}, "stage": self._state, "permanent": not error.retries}
        delay_s = verdict.rest_s if isinstance(verdict, FailForGood) else verdict.delay_s
        about = {"job_id": self._job_id, "stage": self._state, "attempt": self._claimed.attempt, "code": code}
        _log.warning("stage_failed", error=text, final=final, again_in_s=None if final else delay_s, **about)
        version = await self.advance(Trigger.RETRY, facts, cause=f"{code}: {text}"[:CAUSE_CHARS_MAX], delay_s=delay_s)
        if not final:
            return "RETRY_BACKOFF"
        driver = self._driver
        return await fail_for_good(
            driver.ledger, driver.actor, self._job_id, version, facts, window_s=driver.options.operator_window_s
        )

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _in_time(self, work: Coroutine[Any, Any, ResultT], limit_s: float, late: type[StageError]) -> ResultT:
        """Awaits the work, bounded by its own limit (if any), the end of the execution and the job's deadline."""
        left_s = max(0.0, self._left_s())
        patience_s = min(limit_s, left_s) if limit_s else left_s
        stage = self._state
        return await self.in_time(
            f"queue.stage {stage}",
            patience_s,
            work,
            late=lambda: self._too_late(stage, limit_s, late),
            unexpected=self._unexpected,
        )

    def _unexpected(self, error: Exception) -> StageError:
        _log.exception("stage_raised", job_id=self._job_id, stage=self._state)
        return errors.StageError(detail=f"{self._state}: {type(error).__name__}: {error}"[:ERROR_CHARS_MAX])

    def _too_late(self, stage: str, limit_s: float, late: type[StageError]) -> StageError:
        now, options = self._driver.clock.monotonic(), self._driver.options
        if self._deadline_at is not None and self._deadline_at <= now:
            return errors.DeadlinePassed(detail=f"the job's deadline was over in {stage}")
        if self._ends_at <= now:
            return late(detail=f"{stage} was not over when the execution had taken {options.execution_s:g} s")
        return late(detail=f"{stage} took more than {limit_s:g} s")

    def _left_s(self) -> float:
        ends = self._ends_at if self._deadline_at is None else min(self._ends_at, self._deadline_at)
        return ends - self._driver.clock.monotonic()

    async def _step(self, trigger: str, stage: str, facts: Mapping[str, Any]) -> None:
        await self.advance(trigger, facts)
        self._state = stage


def _times(began: datetime, ended: datetime) -> dict[str, str]:
    return {"started_at": timestamp(began), "finished_at": timestamp(max(began, ended))}


# The orchestrator of the job queue: accepts jobs, drives them, and ends permanently failed ones (JQ-6, JQ-7, D10).
#
# The ledger ensures that one job per agent runs at a time (concurrency key `queue-job:<slug>`) and that one process
# drives it (its lease). Any number of processes may do this in parallel: every move has its own request id, so a second
# one has no effect.

PENDING, QUEUED = "PENDING", "QUEUED"
FIRST, *OTHERS = (kind.value for kind in JobType)
ACCEPT_BATCH_MAX = 100
"""How many jobs one pass accepts."""
LOOK_EVERY_S = 30.0
"""How often to check for jobs left in their last backoff, which happens if a driver dies between two transitions."""
LOOK_PAGE = 100
LOOK_PAGES_MAX = 20
"""How many pages of backoffs one check reads. The next check continues after them, and wraps around."""
REFUSAL_CHARS_MAX = 500

_log = log_of("trellis.queue")


@dataclass(kw_only=True)
class QueueOrchestrator(LeaseRunner[QueueDriver]):
    """Claims queue jobs and drives them.

    One pass accepts pending jobs, ends permanently failed ones, then claims for the free capacity.
    """

    type: str = FIRST
    also: tuple[str, ...] = tuple(OTHERS)
    lifecycle: str = QUEUE_JOB.name
    name: str = "queue-orchestrator"
    _look_at: float = field(default=float("-inf"))
    _looked_to: str | None = None

    async def accept(self) -> int:
        """Moves jobs from PENDING to QUEUED, oldest first. Then ends jobs that a driver left in their last backoff."""
        where = JobFilter(lifecycle=QUEUE_JOB.name, state=PENDING)
        waiting = await self.ledger.jobs(where, limit=ACCEPT_BATCH_MAX, oldest_first=True)
        accepted = 0
        for job in waiting.jobs:
            accepted += await self._accept(job.job_id)
        await self._end_failed()
        return accepted

    def pause_s(self, report: LeaseRunnerReport) -> float:
        """No pause while there is more to accept."""
        return 0.0 if report.accepted == ACCEPT_BATCH_MAX else super().pause_s(report)

    async def _accept(self, job_id: JobId) -> bool:
        """Queues a job whose request is readable. Returns whether it is QUEUED now.

        Any other problem, for example with its agent, fails the job in the stage where it matters.
        """
        job = await self.ledger.job(job_id)
        if job is None or job.state != PENDING:
            return False
        try:
            QueueRequest.read(job_id, job.payload or b"")
        except RequestUnreadable as error:
            await self._refuse(job_id, str(error))
            return False
        move = Move(job_id=job_id, target=QUEUED, request_id=RequestId(f"accept:{job_id}"), cause="validated")
        await self.ledger.move(self.actor, move)
        return True

    async def _refuse(self, job_id: JobId, reason: str) -> None:
        """Cancels a job whose request is unreadable: the only other way out of PENDING that the lifecycle declares."""
        _log.warning("job_refused", job_id=job_id, reason=reason)
        cause = f"not accepted: {reason}"[:REFUSAL_CHARS_MAX]
        request = RequestId(f"refuse:{job_id}")
        await self.ledger.cancel(self.actor, job_id, CancelMode.HARD, request, grace_s=0.0, cause=cause)

    async def _end_failed(self) -> None:
        """Moves jobs to FAILED whose driver died before it could.

        A backoff that no timer should end belongs to a permanent error.
        """
        if self.clock.monotonic() < self._look_at:
            return
        horizon = await self.ledger.now() + timedelta(seconds=FINAL_REST_S_MIN)
        for job in await self._backing_off():
            if job.due_at is not None and job.due_at > horizon:
                await self._end(job)
        self._look_at = self.clock.monotonic() + LOOK_EVERY_S

    async def _backing_off(self) -> list[Job]:
        """Returns jobs in backoff, continuing after the last check. Starts again after the end is reached."""
        where, jobs = JobFilter(lifecycle=QUEUE_JOB.name, state=BACKOFF), list[Job]()
        for _ in range(LOOK_PAGES_MAX):
            page = await self.ledger.jobs(where, limit=LOOK_PAGE, cursor=self._looked_to, oldest_first=True)
            jobs += page.jobs
            self._looked_to = page.cursor
            if page.cursor is None:
                break
        return jobs

    async def _end(self, job: Job) -> None:
        last = (await self.ledger.events(job.job_id))[-1]
        facts = data_of(last)
        if last.version == job.version and "error" in facts:
            window_s = self.driver.options.operator_window_s
            await fail_for_good(self.ledger, self.actor, job.job_id, job.version, facts, window_s=window_s)

    async def drain(self) -> None:
        """Releases every job at once, without counting the attempts (`QueueDriver.leaving`)."""
        self.driver.leaving = True
        try:
            await super().drain()
        finally:
            self.driver.leaving = False
        await self.driver.backend.close()
