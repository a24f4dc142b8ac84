"""Accepts jobs (NLM-1, NLM-5). Only the ledger decides, however many backends share it:

- A stored result of this epoch is returned again, whether or not its callback was delivered. Nothing is executed.
- A job in flight in this epoch is answered as the first time. Nothing is executed.
- After an ERROR without a result, or with a newer epoch, the job is executed again. Older executions are cancelled, and
  the ledger refuses what they still write.
- An epoch older than the newest known one is refused.

After submitting, the intake reads the ledger again. So if two requests with different epochs arrive at once, at least
one of them sees the other.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from trellis.artifacts.payloads import read_payload
from trellis.engine import tracing
from trellis.engine.errors import IdempotencyMismatch, JobNotFound
from trellis.engine.jobs import CANCEL_GRACE_S_DEFAULT, Actor, CancelMode, JobId, Mismatch, NewJob, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import JobFilter
from trellis.http_server.problems import Problem
from trellis.lifecycles.nlm_job import NLM_JOB, OPEN
from trellis.net.guard import GuardedClient
from trellis.net.targets import read_target, url_for_message
from trellis.nlm_backend.delivery import COMPLETE, FAILED, complete_notice, failed_notice
from trellis.nlm_backend.driver import GIVEN_UP, artifact_in_journal, fault_in_journal
from trellis.nlm_backend.errors import CallbackForeign, DeadlineOver, DeadlineTooFar, ExecutionsSpent, StaleEpoch
from trellis.nlm_backend.limits import ProviderCircuit
from trellis.nlm_backend.metrics import ExecutionDepth, Metrics
from trellis.nlm_backend.orders import ProcessRequest, StoredOrder, execution_id, read_execution_id, type_of

WAITING_MAX = 1_000
"""Maximum number of jobs waiting or running, over all processes of one ledger."""
KNOWN_MAX = 100
"""Maximum number of executions of one job that are read, newest first."""
EXECUTIONS_MAX = 20
"""Maximum number of executions of one job in one epoch."""
DEADLINE_DAYS_MAX = 2
DAY_S = 86_400.0
DONE = "DONE"
EXPIRED = "DEADLINE"
"""The code of an execution that ended without a reported one: the sweep found its deadline over."""

_log = log_of("trellis.nlm_backend")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionAccepted:
    """The execution is accepted, now or earlier."""

    job_id: str
    estimated_seconds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionFinished:
    """The outcome of an execution. `result` has the content of its callback."""

    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KnownExecution:
    """One execution in the ledger."""

    id: JobId
    epoch: int
    execution: int
    state: str

    @property
    def is_open(self) -> bool:
        """Whether the execution has not ended."""
        return self.state in OPEN


def decide_intake(known: Sequence[KnownExecution], request: ProcessRequest) -> KnownExecution | int:
    """Returns the known execution that answers the request, or the number of the new one that is needed.

    Raises StaleEpoch, ExecutionsSpent.
    """
    newest = max((one.epoch for one in known), default=request.epoch)
    if newest > request.epoch:
        raise StaleEpoch(job_id=request.job_id, known=newest, epoch=request.epoch)
    same = sorted((one for one in known if one.epoch == request.epoch), key=lambda one: one.execution)
    for one in same:
        if one.is_open or one.state == DONE:
            return one
    spent = same[-1].execution if same else 0
    if spent >= EXECUTIONS_MAX:
        raise ExecutionsSpent(job_id=request.job_id, executions=spent, epoch=request.epoch)
    return spent + 1


@dataclass(frozen=True, kw_only=True)
class JobIntake:
    """Implements POST /jobs/process."""

    ledger: Ledger
    actor: Actor
    outgoing: GuardedClient
    trusted: frozenset[str]
    """Origins that receive artifacts and our tokens."""
    circuit: ProviderCircuit
    metrics: Metrics
    concurrency: int
    waiting_max: int = WAITING_MAX
    cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT

    async def take(self, request: ProcessRequest, *, correlation_id: str) -> ExecutionAccepted | ExecutionFinished:
        """Answers the request. Raises IntakeRefused, InputError, OutgoingError, Problem 503, LedgerError."""
        known = await self._known(request.job_id)
        match decide_intake(known, request):
            case KnownExecution() as one:
                await self._cancel_older(request)
                return await self._again(one, request)
            case int(execution):
                last = _last(known, request.epoch)
                if last is not None and await self._has_result(last):
                    return await self._again(last, request)
                return await self._execute(request, execution, correlation_id)

    async def look(self, job_id: str, epoch: int) -> ExecutionAccepted | ExecutionFinished | None:
        """Returns the state of the last execution of this epoch; None if there is none. Starts nothing."""
        last = _last(await self._known(job_id), epoch)
        return None if last is None else await self._stands(last, await self._order(last.id))

    async def cancel(self, job_id: str, epoch: int) -> int | None:
        """Cancels the open executions of this epoch: softly at first, hard after the grace period.

        Returns how many were open; None if the epoch is unknown.
        """
        of_epoch = [one for one in await self._known(job_id) if one.epoch == epoch]
        opened = [one for one in of_epoch if one.is_open]
        for one in opened:
            request_id, cause = RequestId(f"cancel:{one.id}"), "the orchestration layer has no use for it any more"
            await self.ledger.cancel(
                self.actor, one.id, CancelMode.SOFT, request_id, grace_s=self.cancel_grace_s, cause=cause
            )
            _log.info("cancelled", execution=one.id)
        return len(opened) if of_epoch else None

    async def depth(self, *, exact: bool = False) -> ExecutionDepth:
        """How many executions wait and are held. `exact` counts them now, also if they are many."""
        return ExecutionDepth.of(await self.ledger.queues(exact=exact))

    async def _known(self, job_id: str) -> list[KnownExecution]:
        where = JobFilter(lifecycle=NLM_JOB.name, parent_id=JobId(job_id))
        page = await self.ledger.jobs(where, limit=KNOWN_MAX)
        executions = [(job, *read_execution_id(job.job_id)) for job in page.jobs]
        return [
            KnownExecution(job.job_id, epoch, number, job.state)
            for job, of, epoch, number in executions
            if of == job_id
        ]

    async def _again(self, one: KnownExecution, request: ProcessRequest) -> ExecutionAccepted | ExecutionFinished:
        order = await self._order(one.id)
        if order.fingerprint != request.fingerprint:
            raise IdempotencyMismatch(key=one.id, job_id=request.job_id)
        return await self._stands(one, order)

    async def _has_result(self, one: KnownExecution) -> bool:
        """Whether an execution that ended in ERROR left an artifact, because only its callback was not delivered."""
        stands = await self._stands(one, await self._order(one.id))
        return isinstance(stands, ExecutionFinished) and stands.result["status"] == COMPLETE

    async def _stands(self, one: KnownExecution, order: StoredOrder) -> ExecutionAccepted | ExecutionFinished:
        """Returns the outcome or state of an execution.

        A stored outcome is returned at once, even before its callback is delivered.
        """
        last: dict[str, Any] = {}
        if not one.is_open:
            last = json.loads((await self.ledger.events(one.id))[-1].data or b"{}")
        if one.state == DONE:
            return ExecutionFinished(result=last)
        journal = await self.ledger.read_journal(one.id)
        fault, staged = fault_in_journal(journal), artifact_in_journal(journal)
        if fault is not None:
            return ExecutionFinished(result=failed_notice(order, fault))
        if staged is not None and (one.is_open or last.get("code") == GIVEN_UP):
            return ExecutionFinished(result=complete_notice(order, staged))
        if one.is_open:
            return ExecutionAccepted(job_id=order.job_id, estimated_seconds=order.estimated_seconds)
        error = {"code": last.get("code", EXPIRED), "message": last.get("message", "It ended without a word.")}
        return ExecutionFinished(
            result={"job_id": order.job_id, "epoch": order.epoch, "status": FAILED, "error": error}
        )

    async def _order(self, id_: JobId) -> StoredOrder:
        job = await self.ledger.job(id_)
        if job is None:
            raise JobNotFound(job_id=id_)
        return StoredOrder.read(job.payload or b"")

    async def _execute(self, request: ProcessRequest, execution: int, correlation_id: str) -> ExecutionAccepted:
        self._check(request)
        left_s = await self._left_s(request)
        order = StoredOrder.of(request, execution=execution, estimated_seconds=await self._room())
        id_ = execution_id(*order.scope)
        job = NewJob(
            job_id=id_,
            type=type_of(read_target(request.callback_url).origin),
            lifecycle=NLM_JOB.name,
            payload=order.to_bytes(),
            deadline_s=left_s,
            concurrency_key=f"nlm-job:{request.job_id}",  # one execution of a job at a time, even after crashes
            fingerprint=request.fingerprint,
            id_is_given=True,
            correlation_id=correlation_id,
            trace=tracing.here(),
            parent_id=JobId(request.job_id),
        )
        (answer,) = await self.ledger.submit(self.actor, [job])
        if isinstance(answer, Mismatch):
            raise IdempotencyMismatch(key=id_, job_id=request.job_id)
        await self._cancel_older(request)
        if not answer.created:
            order = await self._order(id_)
        return ExecutionAccepted(job_id=request.job_id, estimated_seconds=order.estimated_seconds)

    async def _cancel_older(self, request: ProcessRequest) -> None:
        """Cancels executions that a newer epoch replaced. Raises StaleEpoch if this request itself is replaced."""
        known = await self._known(request.job_id)
        newest = max((one.epoch for one in known), default=request.epoch)
        for one in known:
            if one.epoch < newest and one.is_open:
                cause = f"epoch {newest} took over"
                await self.ledger.cancel(
                    self.actor, one.id, CancelMode.HARD, RequestId(f"superseded:{one.id}"), grace_s=0.0, cause=cause
                )
                _log.info("superseded", execution=one.id, by_epoch=newest)
        if newest > request.epoch:
            raise StaleEpoch(job_id=request.job_id, known=newest, epoch=request.epoch)

    def _check(self, request: ProcessRequest) -> None:
        """Checks the request locally. Raises PayloadInvalid, UrlRefused, AddressRefused, CallbackForeign."""
        read_payload(request.job_type, request.payload)
        self.outgoing.check(request.context_snapshot_url)
        self.outgoing.check(request.callback_url)
        if read_target(request.callback_url).origin not in self.trusted:
            raise CallbackForeign(url=url_for_message(request.callback_url))

    async def _left_s(self, request: ProcessRequest) -> float:
        now = await self.ledger.now()
        left_s = (request.deadline - now).total_seconds()
        deadline, at = request.deadline.isoformat(), now.isoformat()
        if left_s <= 0.0:
            raise DeadlineOver(deadline=deadline, now=at)
        if left_s > DEADLINE_DAYS_MAX * DAY_S:
            raise DeadlineTooFar(deadline=deadline, now=at, days=DEADLINE_DAYS_MAX)
        return left_s

    async def _room(self) -> int:
        """Returns the estimated seconds until one more job would be done. Raises Problem 503."""
        closed_s = self.circuit.closed_for_s()
        if closed_s > 0:
            raise _full("The NLM provider does not answer now; send it again later.", closed_s)
        depth = await self.depth(exact=True)
        waiting = depth.waiting + depth.under_way
        before_it_s = ceil(max(1.0, (waiting // self.concurrency + 1) * self.metrics.typical_s))
        if waiting >= self.waiting_max:
            raise _full(f"{waiting} jobs wait here already; send it again later.", self.metrics.typical_s)
        return before_it_s


def _last(known: Sequence[KnownExecution], epoch: int) -> KnownExecution | None:
    return max((one for one in known if one.epoch == epoch), key=lambda one: one.execution, default=None)


def _full(detail: str, after_s: float) -> Problem:
    return Problem("OVERLOADED", detail, headers={"Retry-After": str(max(1, ceil(after_s)))})
