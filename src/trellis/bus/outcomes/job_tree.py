"""The tree of jobs: a job with its children, retries, compensations and workflow steps, and their combined state.

The content of a request never changes and is cached; the state of a job is read each time. A retry stands for the job
that it retries. So a job that is to be retried has not ended, whether its retry exists yet or not. When a job has
several retries, which happens when two operators requeue it at once, one that succeeded stands for it, else one that
has not ended. So a job that has succeeded stays so.
"""

import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from trellis.auth.ownership import has_worked_on, submitter_of
from trellis.auth.principals import party_of
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.outcomes.attempts import storable_text
from trellis.bus.outcomes.linked_jobs import RETRY_ID, derived_ids, is_retry_due, retry_of, submit_under_free_id
from trellis.bus.requests import FIRST_PARENT, REQUEUE_CAUSE, RETRY_ATTEMPT, RETRY_OF, JobRequest, new_bus_job
from trellis.bus.topics import Topics
from trellis.engine.errors import IdempotencyMismatch, InvalidTransition
from trellis.engine.jobs import ATTEMPTS_MAX, Actor, JobId, Mismatch, RequestId, RequestKey, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import Event, Job, JobFilter, JobPlace
from trellis.engine.request_keys import SUBMIT_ANSWERS
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB

# The effective state of a job.

SUCCEEDED = "SUCCEEDED"
CANCELLED = "CANCELLED"
WAITING_STATES = frozenset({"PENDING", "SCHEDULED"})
RETRYABLE_ENDS = frozenset({"FAILED", "TIMEOUT", "DENIED"})
"""Ends after which a job may be run again under another id, automatically or by an operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveJob:
    """A job seen through its last retry: its state, and whether that is final."""

    job: Job
    request: JobRequest
    to_be_retried: bool = False

    @property
    def open(self) -> bool:
        """Whether it may still change: it has not ended, or a retry is due."""
        return self.job.place is not JobPlace.ENDED or self.to_be_retried

    @property
    def failed(self) -> bool:
        return not self.open and self.job.state != SUCCEEDED

    @property
    def waiting(self) -> bool:
        """Whether no worker has it."""
        return self.job.state in WAITING_STATES

    @property
    def resting(self) -> bool:
        """Whether it is delayed until a time, a person's decision or its turn."""
        return self.job.state == "SCHEDULED" and self.job.place is JobPlace.SCHEDULED


# Cache of workflow steps, so that the end of one step does not require reading all. Pure.
#
# Only final states are kept as settled. A step that succeeded, itself or by a retry, has succeeded for good, and a
# cancelled step has failed for good. A step that failed, timed out or was denied may be requeued by an operator at any
# time. It is read each time, or given up by a reader that follows the feed and so learns of a requeue. Every other step
# is as it was when last read. When a child is removed from the ledger and more is cached about it than its success, its
# family is dropped from the cache: another job may take its id.

STEPS_MAX = 100_000
"""Maximum number of cached children over all parents, unless one parent alone has more."""

WorkflowKey: TypeAlias = tuple[str, str, str, str]
"""The parent, workflow, tenant and party of ordered steps.

Steps that another party adds below the same parent under the same names form a separate workflow (`engine/ownership`).
"""


@dataclass(frozen=True, order=True, slots=True)
class WorkflowStep:
    """The fields of a step that never change."""

    index: int
    job_id: JobId


@dataclass(frozen=True, kw_only=True, slots=True)
class StepState:
    """The state of a step, seen through its last retry."""

    index: int
    job_id: JobId
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowFrontier:
    """What blocks the steps of one workflow: the lowest step that failed for good, and the lowest that has not ended.

    A step above a failed one may be open, and one above an open step may have failed, without appearing here. That does
    not matter to the steps below, and steps above are not dispatched.
    """

    failed: StepState | None = None
    open: StepState | None = None


@dataclass(frozen=True, order=True, slots=True)
class UndoableStep:
    """A step that can be compensated. The greatest is compensated first."""

    index: int
    succeeded_at: float
    job_id: JobId


@dataclass(kw_only=True, slots=True)
class Workflow:
    """The steps of one workflow of one parent."""

    unsettled: list[WorkflowStep] = field(default_factory=list[WorkflowStep])
    """All steps that can still change, in order, except those given up."""
    failed: StepState | None = None
    """The lowest step that failed for good."""
    given_up: dict[WorkflowStep, StepState] = field(default_factory=dict[WorkflowStep, StepState])
    """Steps that have failed, unless an operator requeues them."""
    unseen: list[WorkflowStep] = field(default_factory=list[WorkflowStep])
    """Steps that had failed when first read; not yet checked for a retry."""
    undoable: list[JobId] = field(default_factory=list[JobId])
    """Jobs that succeeded and have a compensation template; the time of success is not read yet."""
    to_undo: list[UndoableStep] = field(default_factory=list[UndoableStep])
    undoing: set[JobId] = field(default_factory=set[JobId])
    """Jobs in `to_undo` whose compensation exists and has not ended as far as known."""
    undone: dict[JobId, UndoableStep] = field(default_factory=dict[JobId, UndoableStep])
    """Jobs whose compensation has ended, unless an operator requeues it."""

    def settle(self, step: WorkflowStep, effective: EffectiveJob) -> bool:
        """Record a final state. Returns whether it was final; the step is then not read again."""
        good = effective.job.state == SUCCEEDED
        if not good and (effective.job.job_id != step.job_id or effective.job.state != CANCELLED):
            return False
        self.drop(step)
        if not good:
            self.fail(step_state(step, effective))
        elif effective.request.compensation is not None:
            self.undoable.append(effective.job.job_id)
        return True

    def fail(self, step: StepState) -> None:
        if self.failed is None or step.index < self.failed.index:
            self.failed = step

    def is_unsettled(self, step: WorkflowStep) -> bool:
        """Whether the step has to be read again."""
        place = bisect_left(self.unsettled, step)
        return self.unsettled[place : place + 1] == [step]

    def drop(self, step: WorkflowStep) -> None:
        """Remove a step that can no longer change."""
        if self.is_unsettled(step):
            del self.unsettled[bisect_left(self.unsettled, step)]

    def give_up(self, step: WorkflowStep, state: StepState) -> None:
        """Record that a step has failed and no retry is known."""
        self.drop(step)
        self.given_up[step] = state

    def take_up(self, step: WorkflowStep) -> None:
        """Record that a given-up step is being retried."""
        if self.given_up.pop(step, None) is not None:
            insort(self.unsettled, step)

    def has_undone(self, step: UndoableStep) -> None:
        """Record that the compensation of a step has ended."""
        self.to_undo.remove(step)
        self.undoing.discard(step.job_id)
        self.undone[step.job_id] = step

    def undo_again(self, job_id: JobId) -> None:
        """Record that the compensation of a step is being retried."""
        step = self.undone.pop(job_id, None)
        if step is not None:
            insort(self.to_undo, step)
            self.undoing.add(job_id)

    def lose(self, gone: set[JobId]) -> bool:
        """Handle removed jobs. Returns whether the remaining state does not depend on them."""
        self.undoable = [job_id for job_id in self.undoable if job_id not in gone]
        held = {step.job_id for step in (*self.unsettled, *self.given_up)} | {one.job_id for one in self.to_undo}
        return gone.isdisjoint(held | self.undone.keys()) and (self.failed is None or self.failed.job_id not in gone)

    def lowest_failed(self) -> StepState | None:
        """The lowest step that has failed, for good or given up."""
        failed = [*([] if self.failed is None else [self.failed]), *self.given_up.values()]
        return min(failed, key=lambda step: step.index, default=None)

    def at(self, index: int) -> list[WorkflowStep]:
        return self.unsettled[self._place(index) : self._place(index + 1)]

    def after(self, index: int) -> list[WorkflowStep]:
        return self.unsettled[self._place(index + 1) :]

    def _place(self, index: int) -> int:
        return bisect_left(self.unsettled, index, key=lambda step: step.index)


def step_state(step: WorkflowStep, effective: EffectiveJob) -> StepState:
    """The short form of a step's state."""
    return StepState(index=step.index, job_id=effective.job.job_id, state=effective.job.state)


@dataclass(kw_only=True, slots=True)
class ChildJobs:
    """The cached children of one parent."""

    mark: str | None = None
    """The ledger's mark up to which children are known."""
    known: dict[int, JobId] = field(default_factory=dict[int, JobId])
    """Job ids by their number in the ledger."""
    workflows: dict[tuple[str, str, str], Workflow] = field(default_factory=dict[tuple[str, str, str], Workflow])

    def lose(self, numbers: set[int]) -> bool:
        """Handle removed children. False when other cached state may be wrong now."""
        gone = {self.known.pop(number) for number in numbers}
        unharmed = [workflow.lose(gone) for workflow in self.workflows.values()]
        return all(unharmed) and gone.isdisjoint(self.known.values())

    def forget(self) -> None:
        self.mark = None
        self.known.clear()
        self.workflows.clear()


@dataclass(kw_only=True)
class WorkflowCache:
    """Cached families by parent, at most STEPS_MAX children in total. The least recently used is dropped first."""

    steps_max: int = STEPS_MAX
    _kept: "OrderedDict[str, ChildJobs]" = field(default_factory=OrderedDict[str, ChildJobs])
    _sizes: dict[str, int] = field(default_factory=dict[str, int])
    _total: int = 0

    def of(self, parent: str) -> ChildJobs:
        """The cached children of this parent, possibly empty. Call `measured` after adding children."""
        family = self._kept.setdefault(parent, ChildJobs())
        self._kept.move_to_end(parent)
        return family

    def get(self, key: WorkflowKey) -> Workflow | None:
        family = self._kept.get(key[0])
        return None if family is None else family.workflows.get(key[1:])

    def measured(self, parent: str, family: ChildJobs) -> None:
        """Update the family's size, and drop others when the total is too large."""
        if self._kept.get(parent) is family:
            size = 1 + len(family.known)
            self._total += size - self._sizes.get(parent, 0)
            self._sizes[parent] = size
        while len(self._kept) > 1 and self._total > self.steps_max:
            self.drop(next(iter(self._kept)))

    def drop(self, parent: str) -> None:
        self._kept.pop(parent, None)
        self._total -= self._sizes.pop(parent, 0)

    def clear(self) -> None:
        self._kept.clear()
        self._sizes.clear()
        self._total = 0


# The tree of jobs.

PAGE = 500
CHILDREN_MAX = 100_000
REMEMBERED_MAX = 20_000
REMEMBERED_BYTES_MAX = 4_096
"""Larger requests are not cached."""

_log = log_of("trellis.bus.outcomes.job_tree")


@dataclass(kw_only=True)
class JobTree:
    """Reads jobs and their families from the ledger."""

    ledger: Ledger
    topics: Topics
    remembered: WorkflowCache = field(default_factory=WorkflowCache)
    """Cached steps of workflows, for `WorkflowReader`."""
    _requests: LruCache[str, JobRequest] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))
    _parties: LruCache[str, str] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))

    def learn(self, job_id: JobId, payload: bytes) -> JobRequest | None:
        """Parse and cache the request in this payload; None when it cannot be read."""
        try:
            request = JobRequest.read(payload)
        except BusRequestInvalid:
            return None  # validation ends such a job
        if len(payload) <= REMEMBERED_BYTES_MAX:
            self._requests[job_id] = request
        else:
            self._requests.drop(job_id)
        return request

    async def request(self, job_id: str) -> JobRequest | None:
        """The request of this job; None when there is no such bus job."""
        known = self._requests.get(job_id)
        if known is not None:
            return known
        job = await self.ledger.job(JobId(job_id))
        return None if job is None else self.request_in(job)

    def request_in(self, job: Job, *, anew: bool = False) -> JobRequest | None:
        """The request of a job that was read with its payload; None when it is not a bus job.

        `anew` skips the cache, for a job that may have taken the id of a removed one.
        """
        known = None if anew else self._requests.get(job.job_id)
        if known is not None or job.lifecycle != BUS_JOB.name or job.payload is None:
            return known
        return self.learn(job.job_id, job.payload)

    async def children(self, job_id: str) -> list[Job]:
        """Every bus job with this parent: steps, retries and compensations."""
        where, cursor = JobFilter(lifecycle=BUS_JOB.name, parent_id=JobId(job_id)), None
        jobs: list[Job] = []
        while len(jobs) < CHILDREN_MAX:
            page = await self.ledger.jobs(where, limit=PAGE, cursor=cursor)
            jobs += page.jobs
            cursor = page.cursor
            if cursor is None:
                return jobs
        _log.error("too_many_children", job_id=job_id, looked_at=len(jobs))
        return jobs

    async def key_of(self, step: JobRequest) -> WorkflowKey:
        return step.step_of, step.workflow_id, step.tenant, await self.party(step)

    async def party(self, request: JobRequest) -> str:
        """The party of the job's submitter (`principal_names.party_of`).

        A retry belongs to the party of the job that it retries.
        """
        for job_id in reversed(await self.incarnations(request.job_id, request)):
            if (known := self._parties.get(job_id)) is not None:
                return known
            if (job := await self.ledger.job(JobId(job_id))) is not None:
                return await self.party_in(job)
        return ""

    def learn_party(self, accepted: Event) -> None:
        """Cache the party of the job that was accepted with this event."""
        if accepted.role is not Role.RECONCILER:  # its jobs belong to the party of the job before
            self._parties[accepted.job_id] = party_of(accepted.actor)

    async def party_in(self, job: Job) -> str:
        """The party of a job that was just read and is not a retry."""
        self._parties[job.job_id] = party = party_of(await submitter_of(self.ledger, job))
        return party

    async def is_linked(self, parent: Job, request: JobRequest) -> bool:
        """Whether a job belongs to its parent: it is of the same party, or was submitted by a worker of the parent."""
        own, above = await self.party(request), self.request_in(parent)
        if own == (await self.party_in(parent) if above is None else await self.party(above)):
            return True
        return has_worked_on(await self.ledger.events(parent.job_id), own)

    async def is_cancelled(self, request: JobRequest, step_of: str) -> bool:
        """Whether the bus job that this one is a step of was cancelled.

        False without a parent, or for another party's job.
        """
        job = await self.ledger.job(JobId(step_of)) if step_of else None
        if job is None or job.lifecycle != BUS_JOB.name or job.state != CANCELLED:
            return False
        return await self.is_linked(job, request)

    async def incarnations(self, job_id: str, request: JobRequest) -> list[str]:
        """The job and the jobs that it retries, the first one last."""
        job_ids = [job_id]
        current: JobRequest | None = request
        for _ in range(ATTEMPTS_MAX):
            before = "" if current is None else current.labels.get(RETRY_OF, "")
            if not before or before in job_ids:
                break
            job_ids.append(before)
            current = await self.request(before)
        return job_ids

    async def compensation(self, job_id: JobId) -> EffectiveJob | None:
        """The compensation of this job, seen through its last retry; None when there is none yet."""
        for child in await self.children(job_id):
            request = await self.request(child.job_id) if child.compensates == job_id else None
            if request is not None and not request.is_retry:
                return await self.effective_step(child, request, step_of="")
        return None

    async def effective_job(self, job: Job) -> EffectiveJob | None:
        """A job seen through its last retry; None when its request cannot be read."""
        request = await self.request(job.job_id)
        return None if request is None else await self.effective_step(job, request, step_of=request.step_of)

    async def effective_step(self, job: Job, request: JobRequest, *, step_of: str) -> EffectiveJob:
        """A job seen through its last retry. No retry is due when the job that it is a step of was cancelled."""
        waiting, ends = [(job, request)], list[EffectiveJob]()
        for _ in range(ATTEMPTS_MAX):
            if not waiting:
                break
            end_or_retries = await self._end_or_retries(*waiting.pop(), step_of)
            if isinstance(end_or_retries, list):
                waiting += reversed(end_or_retries)
            elif end_or_retries.job.state == SUCCEEDED:
                return end_or_retries
            else:
                ends.append(end_or_retries)
        return next((end for end in ends if end.open), ends[0] if ends else EffectiveJob(job=job, request=request))

    async def _end_or_retries(
        self, job: Job, request: JobRequest, step_of: str
    ) -> EffectiveJob | list[tuple[Job, JobRequest]]:
        """The retries of this job, newest first; without any, its own state."""
        if job.place is not JobPlace.ENDED or job.state not in RETRYABLE_ENDS:
            return EffectiveJob(job=job, request=request)
        alike = [child for child in await self.children(job.job_id) if child.type == job.type]
        again = [(one, await self.request(one.job_id)) for one in alike if RETRY_ID.search(one.job_id)]
        retries = [
            (child, request_of_child)
            for child, request_of_child in again
            if request_of_child is not None and request_of_child.is_retry
        ]
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
            known = None if there is None else self.request_in(there)
            if there is None or (known is not None and known.labels.get(RETRY_OF) == job.job_id):
                return True
        return False  # its retry ids belong to other jobs, so the retry can never be submitted


@dataclass(kw_only=True)
class DescendantJobs:
    """The jobs below some roots, and which of them belong to the roots through an unbroken chain of owners."""

    tree: JobTree
    roots: frozenset[str]
    _parents: dict[str, str] = field(default_factory=dict[str, str])
    _own: dict[str, bool] = field(default_factory=dict[str, bool])

    def add(self, job_id: str, parent: str) -> None:
        self._parents[job_id] = parent

    async def is_whole_to(self, job_id: str) -> bool:
        """Whether the job belongs to a root: every link on the path is made by the parent's owner or its worker."""
        path = [job_id]
        while path[-1] not in self.roots and path[-1] not in self._own:
            path.append(self._parents[path[-1]])
        own = self._own.get(path[-1], True)
        for parent, child in zip(reversed(path), list(reversed(path))[1:], strict=False):
            own = own and await self._is_link(parent, child)
            self._own[child] = own
        return own

    async def _is_link(self, parent: str, child: str) -> bool:
        above, request = await self.tree.ledger.job(JobId(parent)), await self.tree.request(child)
        if above is None or request is None:
            return above is None  # the parent was removed, so it cannot be another party's
        return await self.tree.is_linked(above, request)


# Requeue by an operator: runs an ended job again as a new, linked job with fresh attempts and a fresh deadline (D39).

DIGEST_CHARS = 12
LABELS_NOT_COPIED = frozenset({RETRY_ATTEMPT, REQUEUE_CAUSE})
"""Labels that apply only to the job that ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Successor:
    """What followed a job that failed, timed out or was denied."""

    last: Job | None
    """The last job that retried it; None while the first retry is still to be submitted."""
    due: bool
    """Whether another retry is about to be submitted."""

    @property
    def in_vain(self) -> bool:
        """Whether the retry failed for good too."""
        return (
            not self.due
            and self.last is not None
            and self.last.place is JobPlace.ENDED
            and self.last.state != SUCCEEDED
        )

    @property
    def words(self) -> str:
        """The same for people, as the middle of a sentence."""
        retried = "" if self.last is None else f"it was done again as {self.last.job_id}, which is {self.last.state}"
        soon = "it is about to be done again under another id, in a moment" if self.due else ""
        return "; ".join(filter(None, (retried, soon)))


async def requeue_as_new_job(
    ledger: Ledger,
    actor: Actor,
    job: Job,
    topics: Topics,
    request_id: RequestId,
    *,
    cause: str | None = None,
    key: RequestKey | None = None,
) -> Submitted:
    """Submit the job again as a new one, with a label for the cause. A repeated request creates one job.

    If a retry is due anyway, it is submitted now, under the id it would have. `key` is stored with the new job. Raises
    InvalidTransition, BusRequestInvalid, IdempotencyMismatch.
    """
    stored = None if key is None else await ledger.find_request(key)
    if stored is not None and stored.answer is not None:
        return Submitted(job_id=SUBMIT_ANSWERS.decode(stored.answer)[0].job_id, created=False)
    by = Actor(role=Role.RECONCILER, name=actor.name)  # the only role that may use derived job ids
    if job.state not in RETRYABLE_ENDS:
        raise _refused(job, actor, f"only {', '.join(sorted(RETRYABLE_ENDS))} is run again")
    request = JobRequest.read(job.payload or b"")
    digest = hashlib.sha256(request_id.encode()).hexdigest()[:DIGEST_CHARS]
    labels = {name: value for name, value in request.labels.items() if name not in LABELS_NOT_COPIED}
    labels[RETRY_OF] = job.job_id
    if cause:
        labels[REQUEUE_CAUSE] = storable_text(cause)
    if request.step_of:
        labels[FIRST_PARENT] = request.step_of
    job_id = derived_ids(job.job_id, f".q-{digest}")[0]
    again = None if await ledger.job(job_id) is not None else await find_successor(ledger, job, topics)
    if again is not None and again.due:
        return await _submit_due_retry(ledger, by, again.last or job, topics, key)
    if again is not None and not again.in_vain:
        raise _refused(job, actor, again.words)
    changes = {"job_id": job_id, "parent_job_id": job.job_id, "labels": labels}
    made = JobRequest.read(request.model_copy(update=changes | {"meta": _without_idempotency_key(request)}).body)
    new = new_bus_job(made, topics, trace_id=job.correlation_id, trace=job.trace, compensates=job.compensates)
    (answer,) = await ledger.submit(by, [new], key=key)
    if isinstance(answer, Mismatch):
        raise IdempotencyMismatch(key=answer.key, job_id=answer.job_id)
    return answer


async def find_successor(ledger: Ledger, job: Job, topics: Topics) -> Successor | None:
    """What followed a job, even if that failed too; None when nothing did, or the job ended otherwise."""
    effective = await JobTree(ledger=ledger, topics=topics).effective_job(job)
    if effective is None:
        return None
    last = None if effective.job.job_id == job.job_id else effective.job
    return None if last is None and not effective.to_be_retried else Successor(last=last, due=effective.to_be_retried)


async def _submit_due_retry(
    ledger: Ledger, actor: Actor, job: Job, topics: Topics, key: RequestKey | None
) -> Submitted:
    """Submit the due retry now. The reconciler then finds it: it is the same job."""
    whole, events = await ledger.job(job.job_id), await ledger.events(job.job_id)
    if whole is None or whole.payload is None or not events:
        raise _refused(job, actor, "it was removed meanwhile")
    request = JobRequest.read(whole.payload)
    retry = await submit_under_free_id(ledger, actor, retry_of(whole, request, events[-1], topics), key=key)
    if retry is None:
        raise _refused(job, actor, "the ids of its retry are other jobs")
    return retry


def _refused(job: Job, actor: Actor, reason: str) -> InvalidTransition:
    return InvalidTransition(
        job_id=job.job_id, source=job.state, target="PENDING", actor=actor.role.value, reason=reason
    )


def _without_idempotency_key(request: JobRequest) -> object:
    """The metadata without the idempotency key, which belongs to the job that ended."""
    return None if request.meta is None else request.meta.model_copy(update={"idempotency_key": ""})
