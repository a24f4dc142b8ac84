"""The tree of jobs: a job with its children, retries, compensations and workflow steps, and how the whole stands."""

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from trellis.auth.ownership import has_worked_on, submitter_of
from trellis.auth.principals import party_of
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.outcomes.linked_jobs import RETRY_ID, is_retry_due, retry_of
from trellis.bus.requests import RETRY_OF, JobRequest
from trellis.bus.topics import Topics
from trellis.engine.jobs import ATTEMPTS_MAX, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import Event, Job, JobFilter, JobPlace
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB

# Where a job stands. A retry stands for the job that it does again.

SUCCEEDED = "SUCCEEDED"
CANCELLED = "CANCELLED"
WAITING_STATES = frozenset({"PENDING", "SCHEDULED"})
RETRYABLE_ENDS = frozenset({"FAILED", "TIMEOUT", "DENIED"})
"""Ends after which a job may be done again under another id, by itself or by an operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveJob:
    """A job through its last retry: where it stands, and whether that is its end."""

    job: Job
    request: JobRequest
    to_be_retried: bool = False

    @property
    def open(self) -> bool:
        """Whether something will still come of it."""
        return self.job.place is not JobPlace.ENDED or self.to_be_retried

    @property
    def failed(self) -> bool:
        """Whether it came to a bad end for good."""
        return not self.open and self.job.state != SUCCEEDED

    @property
    def waiting(self) -> bool:
        """Whether no worker has it."""
        return self.job.state in WAITING_STATES

    @property
    def resting(self) -> bool:
        """Whether it waits for a time or a person, or for its turn."""
        return self.job.state == "SCHEDULED" and self.job.place is JobPlace.SCHEDULED


# What a process remembers of the steps of workflows, so that the end of one step is not paid for by reading all. Pure.
#
# Only what cannot change is kept as settled: a step that has succeeded, itself or by a retry, has succeeded for good, and one that was
# cancelled has failed for good. One that failed, timed out or was denied may be run again by an operator at any time: it is looked at each
# time, or given up by somebody who hears of it when it is done again. Every other step is as it was when it was last looked at. When a
# child is removed from the ledger of which more is known than that it succeeded, its family is forgotten: another job may have its id.

STEPS_MAX = 100_000
"""Children that a process remembers over all parents, unless one parent alone has more."""

WorkflowKey: TypeAlias = tuple[str, str, str, str]
"""The parent, the workflow, the tenant and the party of steps that go in order: what another party hangs below the same parent, under
the same names, is a workflow of its own (`engine/ownership`)."""


@dataclass(frozen=True, order=True, slots=True)
class WorkflowStep:
    """What never changes of a step."""

    index: int
    job_id: JobId


@dataclass(frozen=True, kw_only=True, slots=True)
class StepState:
    """A step through its last retry, as it was seen."""

    index: int
    job_id: JobId
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowFrontier:
    """What holds up the steps of one workflow: the lowest that failed for good, and the lowest that has not ended.

    A step above one that failed may be open and one above an open step may have failed without being told here: it makes no difference
    to the steps below, and those above it do not go.
    """

    failed: StepState | None = None
    open: StepState | None = None


@dataclass(frozen=True, order=True, slots=True)
class UndoableStep:
    """A step that can be undone; the greatest is undone first."""

    index: int
    succeeded_at: float
    job_id: JobId


@dataclass(kw_only=True, slots=True)
class Workflow:
    """The steps of one workflow of one parent."""

    unsettled: list[WorkflowStep] = field(default_factory=list[WorkflowStep])
    """In their order: all that can still stand otherwise, but for those that were given up."""
    failed: StepState | None = None
    """The lowest that failed for good."""
    given_up: dict[WorkflowStep, StepState] = field(default_factory=dict[WorkflowStep, StepState])
    """They have failed, unless an operator runs them again."""
    unseen: list[WorkflowStep] = field(default_factory=list[WorkflowStep])
    """They had failed when they were first read, and nobody has looked yet whether they are done again."""
    undoable: list[JobId] = field(default_factory=list[JobId])
    """They succeeded and have a template, and nobody has looked yet when that was."""
    to_undo: list[UndoableStep] = field(default_factory=list[UndoableStep])
    undoing: set[JobId] = field(default_factory=set[JobId])
    """Those of them whose compensations are made, and have not ended as far as anybody has looked."""
    undone: dict[JobId, UndoableStep] = field(default_factory=dict[JobId, UndoableStep])
    """Their compensations have ended, unless an operator runs one again."""

    def settle(self, step: WorkflowStep, standing: EffectiveJob) -> bool:
        """Whether it cannot stand otherwise any more; it is not looked at again then."""
        good = standing.job.state == SUCCEEDED
        if not good and (standing.job.job_id != step.job_id or standing.job.state != CANCELLED):
            return False
        self.drop(step)
        if not good:
            self.fail(step_state(step, standing))
        elif standing.request.compensation is not None:
            self.undoable.append(standing.job.job_id)
        return True

    def fail(self, one: StepState) -> None:
        """It failed for good."""
        if self.failed is None or one.index < self.failed.index:
            self.failed = one

    def is_unsettled(self, step: WorkflowStep) -> bool:
        """Whether it has to be looked at."""
        place = bisect_left(self.unsettled, step)
        return self.unsettled[place : place + 1] == [step]

    def drop(self, step: WorkflowStep) -> None:
        """Nothing will come of it any more."""
        if self.is_unsettled(step):
            del self.unsettled[bisect_left(self.unsettled, step)]

    def give_up(self, step: WorkflowStep, one: StepState) -> None:
        """It has failed and is not done again, as far as anybody has heard."""
        self.drop(step)
        self.given_up[step] = one

    def take_up(self, step: WorkflowStep) -> None:
        """It is done again."""
        if self.given_up.pop(step, None) is not None:
            insort(self.unsettled, step)

    def has_undone(self, one: UndoableStep) -> None:
        """Its compensation has ended."""
        self.to_undo.remove(one)
        self.undoing.discard(one.job_id)
        self.undone[one.job_id] = one

    def undo_again(self, job_id: JobId) -> None:
        """What undoes this step is done again."""
        one = self.undone.pop(job_id, None)
        if one is not None:
            insort(self.to_undo, one)
            self.undoing.add(job_id)

    def lose(self, gone: set[JobId]) -> bool:
        """Jobs were removed. Whether what is left does not depend on them."""
        self.undoable = [job_id for job_id in self.undoable if job_id not in gone]
        held = {step.job_id for step in (*self.unsettled, *self.given_up)} | {one.job_id for one in self.to_undo}
        return gone.isdisjoint(held | self.undone.keys()) and (self.failed is None or self.failed.job_id not in gone)

    def lowest_failed(self) -> StepState | None:
        """The lowest of all that have failed."""
        found = [*([] if self.failed is None else [self.failed]), *self.given_up.values()]
        return min(found, key=lambda one: one.index, default=None)

    def at(self, index: int) -> list[WorkflowStep]:
        """The unsettled steps of this number."""
        return self.unsettled[self._place(index) : self._place(index + 1)]

    def after(self, index: int) -> list[WorkflowStep]:
        """The unsettled steps above this number."""
        return self.unsettled[self._place(index + 1) :]

    def _place(self, index: int) -> int:
        return bisect_left(self.unsettled, index, key=lambda step: step.index)


def step_state(step: WorkflowStep, standing: EffectiveJob) -> StepState:
    """Where it stands, in few words."""
    return StepState(index=step.index, job_id=standing.job.job_id, state=standing.job.state)


@dataclass(kw_only=True, slots=True)
class ChildJobs:
    """The children of one parent."""

    mark: str | None = None
    """What the ledger calls those that are known."""
    known: dict[int, JobId] = field(default_factory=dict[int, JobId])
    """By their numbers in the ledger."""
    workflows: dict[tuple[str, str, str], Workflow] = field(default_factory=dict[tuple[str, str, str], Workflow])

    def lose(self, numbers: set[int]) -> bool:
        """Those with these numbers were removed. False when something else that is known may be wrong now."""
        gone = {self.known.pop(number) for number in numbers}
        unharmed = [workflow.lose(gone) for workflow in self.workflows.values()]
        return all(unharmed) and gone.isdisjoint(self.known.values())

    def forget(self) -> None:
        """Know nothing of them any more."""
        self.mark = None
        self.known.clear()
        self.workflows.clear()


@dataclass(kw_only=True)
class WorkflowCache:
    """Families by their parents, at most STEPS_MAX children; the one not asked for longest goes first."""

    steps_max: int = STEPS_MAX
    _kept: "OrderedDict[str, ChildJobs]" = field(default_factory=OrderedDict[str, ChildJobs])
    _sizes: dict[str, int] = field(default_factory=dict[str, int])
    _total: int = 0

    def of(self, parent: str) -> ChildJobs:
        """What is known of the children of this parent, perhaps nothing yet; it may grow until it is `measured`."""
        family = self._kept.setdefault(parent, ChildJobs())
        self._kept.move_to_end(parent)
        return family

    def get(self, key: WorkflowKey) -> Workflow | None:
        """A workflow that is remembered."""
        family = self._kept.get(key[0])
        return None if family is None else family.workflows.get(key[1:])

    def measured(self, parent: str, family: ChildJobs) -> None:
        """It has so many children now; others are forgotten when that is too many."""
        if self._kept.get(parent) is family:
            size = 1 + len(family.known)
            self._total += size - self._sizes.get(parent, 0)
            self._sizes[parent] = size
        while len(self._kept) > 1 and self._total > self.steps_max:
            self.drop(next(iter(self._kept)))

    def drop(self, parent: str) -> None:
        """Know nothing of them any more."""
        self._kept.pop(parent, None)
        self._total -= self._sizes.pop(parent, 0)

    def clear(self) -> None:
        """Know nothing any more."""
        self._kept.clear()
        self._sizes.clear()
        self._total = 0


# Jobs and those that follow from them: children, retries, compensations.
#
# What a request says never changes and is remembered; where a job stands is read each time. A retry stands for the job that it does again,
# so a job that is to be done again has not come to its end, whether its retry is made already or not. Of several that do one job again, which
# happens when two operators ask at once, one that succeeded stands for it, else one that has not ended: so what has succeeded stays so.

PAGE = 500
CHILDREN_MAX = 100_000
REMEMBERED_MAX = 20_000
REMEMBERED_BYTES_MAX = 4_096
"""Larger requests are read each time."""

_log = log_of("trellis.bus.outcomes.job_tree")


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
