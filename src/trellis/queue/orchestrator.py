"""The orchestration layer's side of the job queue: accepts jobs, drives them, and ends those that failed for good (JQ-6, JQ-7, D10).

One job per agent is kept by the ledger (the concurrency key `queue-job:<slug>`), and so is who drives a job (its lease). Any number of
processes may do this at once: every step here has an id of its own, and the second one finds it made.
"""

from dataclasses import dataclass
from datetime import timedelta

from trellis.artifacts.content import JobType
from trellis.engine.holding import Holder
from trellis.engine.jobs import CancelMode, JobId, Move, RequestId
from trellis.engine.logs import log_of
from trellis.engine.records import Job, JobFilter
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.queue.documents import BACKOFF
from trellis.queue.driver import Driver
from trellis.queue.ending import fail_for_good
from trellis.queue.errors import RequestUnreadable, StageHopeless
from trellis.queue.requests import QueueRequest, data_of
from trellis.queue.retrying import FINAL_REST_S_MIN
from trellis.storage.objects import StoreError

PENDING, QUEUED = "PENDING", "QUEUED"
FIRST, *OTHERS = (kind.value for kind in JobType)
PAGE = 100
PAGES_MAX = 100
BATCH_MAX = 100
"""How many jobs one pass accepts, and how many it ends."""
CAUSE_CHARS_MAX = 500

_log = log_of("trellis.queue")


@dataclass(kw_only=True)
class QueueOrchestrator(Holder[Driver]):
    """Claims queue jobs and drives them. One pass accepts what waits for that, ends what is over, then claims for the free room."""

    type: str = FIRST
    also: tuple[str, ...] = tuple(OTHERS)
    lifecycle: str = QUEUE_JOB.name
    name: str = "queue-orchestrator"

    async def accept(self) -> int:
        """PENDING → QUEUED for what passes, oldest first; then end what a driver left in its last backoff."""
        accepted = 0
        for job in (await self._all(PENDING))[-1 : -BATCH_MAX - 1 : -1]:
            accepted += await self._accept(job.job_id)
        await self._end_failed()
        return accepted

    async def _accept(self, job_id: JobId) -> bool:
        """Whether it is QUEUED now. What cannot be done is ended, with the reason; what cannot be said now waits for the next pass."""
        job = await self.ledger.job(job_id)
        if job is None or job.state != PENDING:
            return False
        try:
            request = QueueRequest.read(job_id, job.payload or b"")
            await self.driver.assembly.check(request)
        except StoreError as error:
            _log.warning("not_validated", job_id=job_id, error=str(error))
            return False
        except (RequestUnreadable, StageHopeless) as error:
            await self._refuse(job_id, str(error))
            return False
        move = Move(job_id=job_id, target=QUEUED, request_id=RequestId(f"accept:{job_id}"), cause="validated")
        await self.ledger.move(self.actor, move)
        return True

    async def _refuse(self, job_id: JobId, reason: str) -> None:
        """The one way out of PENDING beside QUEUED that the lifecycle declares: the job rests in FAILED, and an operator may requeue it."""
        _log.warning("job_refused", job_id=job_id, reason=reason)
        cause = f"not accepted: {reason}"[:CAUSE_CHARS_MAX]
        request = RequestId(f"refuse:{job_id}")
        await self.ledger.cancel(self.actor, job_id, CancelMode.HARD, request, grace_s=0.0, cause=cause)

    async def _end_failed(self) -> None:
        """A backoff that no timer is to end belongs to an error that no other attempt would mend: its holder died before FAILED."""
        horizon = await self.ledger.now() + timedelta(seconds=FINAL_REST_S_MIN)
        left = [job for job in await self._all(BACKOFF) if job.due_at is not None and job.due_at > horizon]
        for job in left[:BATCH_MAX]:
            last = (await self.ledger.events(job.job_id))[-1]
            facts = data_of(last.data)
            if last.version == job.version and "error" in facts:
                window_s = self.driver.options.operator_window_s
                await fail_for_good(self.ledger, self.actor, job.job_id, job.version, facts, window_s=window_s)

    async def drain(self) -> None:
        """Let go of everything. A job that is let go of has lost its lease when that is over, and its next attempt begins elsewhere."""
        await super().drain()
        await self.driver.backend.close()

    async def _all(self, state: str) -> list[Job]:
        """Every job in a state, newest first; mostly there is none."""
        where, found, cursor = JobFilter(lifecycle=QUEUE_JOB.name, state=state), list[Job](), None
        for _ in range(PAGES_MAX):
            page = await self.ledger.jobs(where, limit=PAGE, cursor=cursor)
            found += page.jobs
            cursor = page.cursor
            if cursor is None:
                break
        return found
