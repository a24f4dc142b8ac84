"""Jobs and those that follow from them: children, retries, steps of a workflow, compensations.

What a request says never changes and is remembered; where a job stands is read each time. A retry stands for the job that it does again,
so a job that is to be done again has not come to its end, whether its retry is made already or not.
"""

from dataclasses import dataclass, field

from trellis.bus.ends.retrying import RETRIED, is_wanted
from trellis.bus.errors import RequestInvalid
from trellis.bus.requests import COMPENSATES, JobRequest
from trellis.bus.topics import Topics
from trellis.engine.jobs import ATTEMPTS_MAX, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent import Recent
from trellis.engine.records import Job, JobFilter, Place
from trellis.lifecycles.bus_job import BUS_JOB

PAGE = 500
CHILDREN_MAX = 100_000
REMEMBERED_MAX = 20_000
REMEMBERED_BYTES_MAX = 4_096
"""Larger requests are read each time."""
SUCCEEDED = "SUCCEEDED"
CANCELLED = "CANCELLED"
WAITING = frozenset({"PENDING", "SCHEDULED"})

_log = log_of("trellis.bus.ends.families")


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A job through its last retry: where it stands, and whether that is its end."""

    job: Job
    request: JobRequest
    to_be_retried: bool = False

    @property
    def index(self) -> int:
        """Which step it is."""
        return self.request.step_index

    @property
    def open(self) -> bool:
        """Whether something will still come of it."""
        return self.job.place is not Place.ENDED or self.to_be_retried

    @property
    def failed(self) -> bool:
        """Whether it came to a bad end for good."""
        return not self.open and self.job.state != SUCCEEDED

    @property
    def waiting(self) -> bool:
        """Whether no worker has it."""
        return self.job.state in WAITING

    @property
    def resting(self) -> bool:
        """Whether it waits for a time or a person, or for its turn."""
        return self.job.state == "SCHEDULED" and self.job.place is Place.RESTING


@dataclass(kw_only=True)
class Families:
    """Reads them from the ledger."""

    ledger: Ledger
    topics: Topics
    _requests: Recent[str, JobRequest] = field(default_factory=lambda: Recent(REMEMBERED_MAX))

    def learn(self, job_id: JobId, payload: bytes) -> JobRequest | None:
        """The request in this payload, remembered; None when it cannot be read."""
        try:
            request = JobRequest.read(payload)
        except RequestInvalid:
            return None  # whoever validates the job ends it
        if len(payload) <= REMEMBERED_BYTES_MAX:
            self._requests[job_id] = request
        return request

    async def request(self, job_id: str) -> JobRequest | None:
        """What was asked with this job; None when there is no such job on the bus."""
        known = self._requests.get(job_id)
        if known is not None:
            return known
        job = await self.ledger.job(JobId(job_id))
        if job is None or job.lifecycle != BUS_JOB.name or job.payload is None:
            return None
        return self.learn(job.job_id, job.payload)

    async def children(self, job_id: str) -> list[Job]:
        """Every bus-job whose parent this is: steps, retries and compensations."""
        where, cursor = JobFilter(lifecycle=BUS_JOB.name, parent_id=JobId(job_id)), None
        found: list[Job] = []
        while len(found) < CHILDREN_MAX:
            page = await self.ledger.jobs(where, limit=PAGE, cursor=cursor)
            found += page.jobs
            cursor = page.cursor
            if cursor is None:
                return found
        _log.error("too_many_children", job_id=job_id, looked_at=len(found))
        return found

    async def is_cancelled(self, job_id: str) -> bool:
        """Whether this bus-job was cancelled; no job is not."""
        job = await self.ledger.job(JobId(job_id)) if job_id else None
        return job is not None and job.lifecycle == BUS_JOB.name and job.state == CANCELLED

    async def steps(self, parent: str, workflow_id: str, tenant: str) -> list[Standing]:
        """The steps of one workflow of one parent, each through its last retry; what another tenant hung there is none of them."""
        found: list[Standing] = []
        wanted = not await self.is_cancelled(parent)
        for job in await self.children(parent):
            request = await self.request(job.job_id)
            if request is None or request.workflow_id != workflow_id or request.tenant != tenant:
                continue
            if not request.is_retry and COMPENSATES not in request.labels:
                found.append(await self.standing(job, request, wanted=wanted))
        return found

    async def compensation(self, job_id: JobId) -> Standing | None:
        """What undoes this job, through its last retry; None when nothing does yet."""
        for child in await self.children(job_id):
            request = await self.request(child.job_id) if child.compensates == job_id else None
            if request is not None and not request.is_retry:
                return await self.standing(child, request, wanted=True)
        return None

    async def stands_as(self, job: Job) -> Standing | None:
        """A job through its last retry; None when its request cannot be read."""
        request = await self.request(job.job_id)
        if request is None:
            return None
        return await self.standing(job, request, wanted=not await self.is_cancelled(request.step_of))

    async def standing(self, job: Job, request: JobRequest, *, wanted: bool) -> Standing:
        """A job through its last retry; `wanted` false: nobody wants it done again."""
        for _ in range(ATTEMPTS_MAX):
            if job.place is not Place.ENDED or job.state not in RETRIED:
                break
            retry = await self._retry(job.job_id)
            if retry is None:
                due = wanted and await self._is_to_be_retried(job, request)
                return Standing(job=job, request=request, to_be_retried=due)
            job, request = retry
        return Standing(job=job, request=request)

    async def _retry(self, job_id: JobId) -> tuple[Job, JobRequest] | None:
        for child in await self.children(job_id):
            request = await self.request(child.job_id)
            if request is not None and request.is_retry:
                return child, request
        return None

    async def _is_to_be_retried(self, job: Job, request: JobRequest) -> bool:
        events = await self.ledger.events(job.job_id)
        return bool(events) and is_wanted(job, request, events[-1], self.topics.of(job.type))
