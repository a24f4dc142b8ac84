"""Jobs and those that follow from them: children, retries, compensations.

What a request says never changes and is remembered; where a job stands is read each time. A retry stands for the job that it does again,
so a job that is to be done again has not come to its end, whether its retry is made already or not. Of several that do one job again, which
happens when two operators ask at once, one that succeeded stands for it, else one that has not ended: so what has succeeded stays so.
"""

from dataclasses import dataclass, field

from trellis.bus.ends.derived import RETRY_ID
from trellis.bus.ends.retrying import is_retry_due, retry_of
from trellis.bus.ends.standing import CANCELLED, RETRYABLE_ENDS, SUCCEEDED, EffectiveJob
from trellis.bus.ends.workflow import WorkflowCache, WorkflowKey
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.requests import RETRY_OF, JobRequest
from trellis.bus.topics import Topics
from trellis.engine.jobs import ATTEMPTS_MAX, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.ownership import has_worked_on, submitter_of
from trellis.engine.principal_names import party_of
from trellis.engine.recent import LruCache
from trellis.engine.records import Event, Job, JobFilter, JobPlace
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB

PAGE = 500
CHILDREN_MAX = 100_000
REMEMBERED_MAX = 20_000
REMEMBERED_BYTES_MAX = 4_096
"""Larger requests are read each time."""

_log = log_of("trellis.bus.ends.families")


@dataclass(kw_only=True)
class JobTree:
    """Reads them from the ledger."""

    ledger: Ledger
    topics: Topics
    remembered: WorkflowCache = field(default_factory=WorkflowCache)
    """The steps of workflows, for `Workflows`."""
    _requests: LruCache[str, JobRequest] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))
    _parties: LruCache[str, str] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))

    def learn(self, job_id: JobId, payload: bytes) -> JobRequest | None:
        """The request in this payload, remembered; None when it cannot be read."""
        try:
            request = JobRequest.read(payload)
        except BusRequestInvalid:
            return None  # whoever validates the job ends it
        if len(payload) <= REMEMBERED_BYTES_MAX:
            self._requests[job_id] = request
        else:
            self._requests.drop(job_id)
        return request

    async def request(self, job_id: str) -> JobRequest | None:
        """What was asked with this job; None when there is no such job on the bus."""
        known = self._requests.get(job_id)
        if known is not None:
            return known
        job = await self.ledger.job(JobId(job_id))
        return None if job is None else self.request_in(job)

    def request_in(self, job: Job, *, anew: bool = False) -> JobRequest | None:
        """What was asked with this job, which was read with its payload; None when it is none on the bus.

        `anew` when it may be another job under the id of one that was removed.
        """
        known = None if anew else self._requests.get(job.job_id)
        if known is not None or job.lifecycle != BUS_JOB.name or job.payload is None:
            return known
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

    async def key_of(self, step: JobRequest) -> WorkflowKey:
        """The workflow that a step belongs to."""
        return step.step_of, step.workflow_id, step.tenant, await self.party(step)

    async def party(self, request: JobRequest) -> str:
        """Whose job it is: the party of its submitter (`principal_names.party_of`). Who does a job again does it for the same party."""
        for job_id in reversed(await self.incarnations(request.job_id, request)):
            if (known := self._parties.get(job_id)) is not None:
                return known
            if (job := await self.ledger.job(JobId(job_id))) is not None:
                return await self.party_in(job)
        return ""

    def learn_party(self, accepted: Event) -> None:
        """Remember whose job it is that was accepted with this event."""
        if accepted.role is not Role.RECONCILER:  # what that makes is whose the job before it is
            self._parties[accepted.job_id] = party_of(accepted.actor)

    async def party_in(self, job: Job) -> str:
        """The same, of a job that was read anew and does none again."""
        self._parties[job.job_id] = party = party_of(await submitter_of(self.ledger, job))
        return party

    async def is_linked(self, parent: Job, request: JobRequest) -> bool:
        """Whether a job is its parent's: of the same party, or made by a worker of the parent. What others hang there is not."""
        own, above = await self.party(request), self.request_in(parent)
        if own == (await self.party_in(parent) if above is None else await self.party(above)):
            return True
        return has_worked_on(await self.ledger.events(parent.job_id), own)

    async def is_cancelled(self, request: JobRequest, step_of: str) -> bool:
        """Whether the bus-job that this one is a step of was cancelled; no job is not, nor is another party's."""
        job = await self.ledger.job(JobId(step_of)) if step_of else None
        if job is None or job.lifecycle != BUS_JOB.name or job.state != CANCELLED:
            return False
        return await self.is_linked(job, request)

    async def incarnations(self, job_id: str, request: JobRequest) -> list[str]:
        """The job, and those that it did again, the first one last."""
        found = [job_id]
        current: JobRequest | None = request
        for _ in range(ATTEMPTS_MAX):
            before = "" if current is None else current.labels.get(RETRY_OF, "")
            if not before or before in found:
                break
            found.append(before)
            current = await self.request(before)
        return found

    async def compensation(self, job_id: JobId) -> EffectiveJob | None:
        """What undoes this job, through its last retry; None when nothing does yet."""
        for child in await self.children(job_id):
            request = await self.request(child.job_id) if child.compensates == job_id else None
            if request is not None and not request.is_retry:
                return await self.effective_step(child, request, step_of="")
        return None

    async def effective_job(self, job: Job) -> EffectiveJob | None:
        """A job through its last retry; None when its request cannot be read."""
        request = await self.request(job.job_id)
        return None if request is None else await self.effective_step(job, request, step_of=request.step_of)

    async def effective_step(self, job: Job, request: JobRequest, *, step_of: str) -> EffectiveJob:
        """A job through its last retry; nobody wants it done again when the job that it is a step of was cancelled."""
        waiting, ends = [(job, request)], list[EffectiveJob]()
        for _ in range(ATTEMPTS_MAX):
            if not waiting:
                break
            one = await self._end_or_retries(*waiting.pop(), step_of)
            if isinstance(one, list):
                waiting += reversed(one)
            elif one.job.state == SUCCEEDED:
                return one
            else:
                ends.append(one)
        return next((end for end in ends if end.open), ends[0] if ends else EffectiveJob(job=job, request=request))

    async def _end_or_retries(
        self, job: Job, request: JobRequest, step_of: str
    ) -> EffectiveJob | list[tuple[Job, JobRequest]]:
        """Those that do this job again, newest first, or how it stands itself."""
        if job.place is not JobPlace.ENDED or job.state not in RETRYABLE_ENDS:
            return EffectiveJob(job=job, request=request)
        alike = [child for child in await self.children(job.job_id) if child.type == job.type]
        again = [(one, await self.request(one.job_id)) for one in alike if RETRY_ID.search(one.job_id)]
        retries = [(child, said) for child, said in again if said is not None and said.is_retry]
        if retries:
            return retries
        due = await self._is_to_be_retried(job, request) and not await self.is_cancelled(request, step_of)
        return EffectiveJob(job=job, request=request, to_be_retried=due)

    async def _is_to_be_retried(self, job: Job, request: JobRequest) -> bool:
        events = await self.ledger.events(job.job_id)
        if not is_retry_due(job, request, events, self.topics.of(job.type)):
            return False
        for made in retry_of(job, request, events[-1], self.topics):
            there = await self.ledger.job(made.job_id)
            said = None if there is None else self.request_in(there)
            if there is None or (said is not None and said.labels.get(RETRY_OF) == job.job_id):
                return True
        return False  # its ids are other jobs, and it can never be made


@dataclass(kw_only=True)
class DescendantJobs:
    """The jobs below some roots, as far as they were found: which of them are the roots' own, through all that is between."""

    families: JobTree
    roots: frozenset[str]
    _parents: dict[str, str] = field(default_factory=dict[str, str])
    _own: dict[str, bool] = field(default_factory=dict[str, bool])

    def add(self, job_id: str, parent: str) -> None:
        """This job hangs below that one."""
        self._parents[job_id] = parent

    async def is_whole_to(self, job_id: str) -> bool:
        """Whether every link from a root down to this job was made by the owner of what it hangs below, or by a worker of that."""
        path = [job_id]
        while path[-1] not in self.roots and path[-1] not in self._own:
            path.append(self._parents[path[-1]])
        own = self._own.get(path[-1], True)
        for parent, child in zip(reversed(path), list(reversed(path))[1:], strict=False):
            own = own and await self._is_link(parent, child)
            self._own[child] = own
        return own

    async def _is_link(self, parent: str, child: str) -> bool:
        above, request = await self.families.ledger.job(JobId(parent)), await self.families.request(child)
        if above is None or request is None:
            return above is None  # its parent was removed: nobody else can have it
        return await self.families.is_linked(above, request)
