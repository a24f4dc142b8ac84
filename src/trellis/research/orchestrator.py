"""The orchestrator of the job queue: accepts jobs, drives them, and ends permanently failed ones (JQ-6, JQ-7, D10).

The ledger ensures that one job per agent runs at a time (concurrency key `queue-job:<slug>`) and that one process
drives it (its lease). Any number of processes may do this in parallel: every move has its own request id, so a second
one has no effect.
"""

from dataclasses import dataclass, field
from datetime import timedelta

from trellis.artifacts.content import JobType
from trellis.engine.jobs import CancelMode, JobId, Move, RequestId
from trellis.engine.lease_runner import LeaseRunner, LeaseRunnerReport
from trellis.engine.logs import log_of
from trellis.engine.records import Job, JobFilter
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.research.documents import BACKOFF
from trellis.research.driver import QueueDriver, fail_for_good
from trellis.research.errors import RequestUnreadable
from trellis.research.requests import QueueRequest, data_of
from trellis.research.retry_policy import FINAL_REST_S_MIN

PENDING, QUEUED = "PENDING", "QUEUED"
FIRST, *OTHERS = (kind.value for kind in JobType)
ACCEPT_BATCH_MAX = 100
"""How many jobs one pass accepts."""
LOOK_EVERY_S = 30.0
"""How often to check for jobs left in their last backoff, which happens if a driver dies between two transitions."""
LOOK_PAGE = 100
LOOK_PAGES_MAX = 20
"""How many pages of backoffs one check reads. The next check continues after them, and wraps around."""
CAUSE_CHARS_MAX = 500

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
        cause = f"not accepted: {reason}"[:CAUSE_CHARS_MAX]
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
        where, found = JobFilter(lifecycle=QUEUE_JOB.name, state=BACKOFF), list[Job]()
        for _ in range(LOOK_PAGES_MAX):
            page = await self.ledger.jobs(where, limit=LOOK_PAGE, cursor=self._looked_to, oldest_first=True)
            found += page.jobs
            self._looked_to = page.cursor
            if page.cursor is None:
                break
        return found

    async def _end(self, job: Job) -> None:
        last = (await self.ledger.events(job.job_id))[-1]
        facts = data_of(last.data)
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
