"""The orchestration layer's side of the job queue: accepts jobs, drives them, and ends those that failed for good (JQ-6, JQ-7, D10).

One job per agent is kept by the ledger (the concurrency key `queue-job:<slug>`), and so is who drives a job (its lease). Any number of
processes may do this at once: every step here has an id of its own, and the second one finds it made.
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
"""How often one looks for what a driver left in its last backoff: that takes a driver that died between two steps."""
LOOK_PAGE = 100
LOOK_PAGES_MAX = 20
"""How many backoffs one look goes through; the next one goes on after them, and round."""
CAUSE_CHARS_MAX = 500

_log = log_of("trellis.queue")


@dataclass(kw_only=True)
class QueueOrchestrator(LeaseRunner[QueueDriver]):
    """Claims queue jobs and drives them. One pass accepts what waits for that, ends what is over, then claims for the free room."""

    type: str = FIRST
    also: tuple[str, ...] = tuple(OTHERS)
    lifecycle: str = QUEUE_JOB.name
    name: str = "queue-orchestrator"
    _look_at: float = field(default=float("-inf"))
    _looked_to: str | None = None

    async def accept(self) -> int:
        """PENDING → QUEUED, oldest first; then end what a driver left in its last backoff."""
        where = JobFilter(lifecycle=QUEUE_JOB.name, state=PENDING)
        waiting = await self.ledger.jobs(where, limit=ACCEPT_BATCH_MAX, oldest_first=True)
        accepted = 0
        for job in waiting.jobs:
            accepted += await self._accept(job.job_id)
        await self._end_failed()
        return accepted

    def pause_s(self, report: LeaseRunnerReport) -> float:
        """At once while there is more to accept, too."""
        return 0.0 if report.accepted == ACCEPT_BATCH_MAX else super().pause_s(report)

    async def _accept(self, job_id: JobId) -> bool:
        """Whether it is QUEUED now. A request that can be read is: whatever else is wrong, its agent for one, fails where it is used."""
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
        """What cannot even be read: the one way out of PENDING beside QUEUED that the lifecycle declares."""
        _log.warning("job_refused", job_id=job_id, reason=reason)
        cause = f"not accepted: {reason}"[:CAUSE_CHARS_MAX]
        request = RequestId(f"refuse:{job_id}")
        await self.ledger.cancel(self.actor, job_id, CancelMode.HARD, request, grace_s=0.0, cause=cause)

    async def _end_failed(self) -> None:
        """A backoff that no timer is to end belongs to an error that no other attempt would mend: its holder died before FAILED."""
        if self.clock.monotonic() < self._look_at:
            return
        horizon = await self.ledger.now() + timedelta(seconds=FINAL_REST_S_MIN)
        for job in await self._backing_off():
            if job.due_at is not None and job.due_at > horizon:
                await self._end(job)
        self._look_at = self.clock.monotonic() + LOOK_EVERY_S

    async def _backing_off(self) -> list[Job]:
        """Those after where the last look ended; the next look begins anew when this one came to the end."""
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
        """Let go of everything. A job that is let go of is given back at once, and its attempt does not count (`QueueDriver.leaving`)."""
        self.driver.leaving = True
        try:
            await super().drain()
        finally:
            self.driver.leaving = False
        await self.driver.backend.close()
