"""Reads the steps of workflows from the ledger, through a cache.

The cost of a read does not grow with the number of steps. The ledger says which steps are new, and each new step is
read once. After that, only steps are read that can still change and that the answer depends on. So a chain of steps is
read about once in its whole life.
"""

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from trellis.bus.outcomes.job_tree import (
    CHILDREN_MAX,
    RETRYABLE_ENDS,
    ChildJobs,
    EffectiveJob,
    JobTree,
    StepState,
    UndoableStep,
    Workflow,
    WorkflowFrontier,
    WorkflowKey,
    WorkflowStep,
    step_state,
)
from trellis.bus.requests import COMPENSATES, JobRequest
from trellis.engine.jobs import JobId
from trellis.engine.logs import log_of
from trellis.engine.records import ChildPage, Job

T = TypeVar("T")

PAGE = 1_000
CONCURRENCY = 16
"""Steps read concurrently."""

_log = log_of("trellis.bus.outcomes.workflows")


async def _no_op() -> None:
    pass


@dataclass(kw_only=True)
class WorkflowReader:
    """Reads workflows. The cache is part of `tree`."""

    tree: JobTree
    between: Callable[[], Awaitable[None]] = _no_op
    """Called from time to time during long reads."""

    # --- for the scheduler ----------------------------------------------------------------------------------------

    async def front(self, key: WorkflowKey) -> WorkflowFrontier:
        """What blocks a workflow, counting every step that is in the ledger now."""
        workflow = await self.workflow(key)
        first = await self._first_unsettled(workflow)
        if first is None:
            return WorkflowFrontier(failed=workflow.failed)
        step, effective = first
        state = step_state(step, effective)
        if not effective.failed:
            return WorkflowFrontier(failed=workflow.failed, open=state)
        return WorkflowFrontier(
            failed=state if workflow.failed is None or state.index < workflow.failed.index else workflow.failed
        )

    # --- for the reconciler, which sees every end and every retry in the feed -------------------------------------

    async def ended(self, workflow: Workflow, steps: set[WorkflowStep]) -> None:
        """Read the steps that have ended, and steps that had failed before they were first read."""
        for step in sorted(steps):
            workflow.take_up(step)
            await self._look_if_unsettled(workflow, step)
        while workflow.unseen:
            await self._look_if_unsettled(workflow, workflow.unseen[-1])
            workflow.unseen.pop()

    async def look(self, workflow: Workflow, step: WorkflowStep) -> EffectiveJob | None:
        """The state of an unsettled step; None when it is now settled or given up."""
        effective = await self._look(workflow, step)
        if effective is not None and effective.failed:
            workflow.give_up(step, step_state(step, effective))
            return None
        return effective

    async def first_open(self, workflow: Workflow) -> StepState | None:
        while (first := await self._first_unsettled(workflow)) is not None:
            step, effective = first
            if not effective.failed:
                return step_state(step, effective)
            workflow.give_up(step, step_state(step, effective))
        return None

    async def again(self, key: WorkflowKey, request: JobRequest) -> None:
        """Record that a job with this request retries a step or compensation of this workflow."""
        workflow = self.tree.remembered.get(key)
        if workflow is None:
            return
        undone = request.labels.get(COMPENSATES)
        if undone is not None:
            workflow.undo_again(JobId(undone))
            return
        first = (await self.tree.incarnations(request.job_id, request))[-1]
        if await self.tree.request(first) is None:
            self.tree.remembered.drop(key[0])  # the step can no longer be identified
        workflow.take_up(WorkflowStep(request.step_index, JobId(first)))

    async def to_undo(self, workflow: Workflow) -> list[UndoableStep]:
        """Steps that succeeded and are not compensated yet.

        Steps with an existing compensation come first, then the others in order of compensation.
        """
        while workflow.undoable:
            job_id = workflow.undoable[-1]
            request, events = await self.tree.request(job_id), await self.tree.ledger.events(job_id)
            success = next((event for event in events if event.type == "job_succeeded"), None)
            if await self.tree.compensation(job_id) is not None:
                workflow.undoing.add(job_id)
            if request is not None and success is not None:
                insort(workflow.to_undo, UndoableStep(request.step_index, success.ts.timestamp(), job_id))
            workflow.undoable.pop()
            await self.between()
        return sorted(workflow.to_undo, key=lambda one: one.job_id in workflow.undoing)[::-1]

    # --- reading --------------------------------------------------------------------------------------------------

    async def workflow(self, key: WorkflowKey) -> Workflow:
        """A workflow, with every step that is in the ledger now."""
        parent, named = key[0], key[1:]
        family = self.tree.remembered.of(parent)
        try:
            await self._complete(parent, family)
        finally:
            self.tree.remembered.measured(parent, family)
        return family.workflows.setdefault(named, Workflow())

    async def _complete(self, parent: str, family: ChildJobs) -> None:
        """Add every child that was created since the last read."""
        while not await self._read_on(parent, family):
            family.forget()

    async def _read_on(self, parent: str, family: ChildJobs) -> bool:
        """Add new children. False when some were removed and other cached state may be wrong."""
        since, mark, there = family.mark, family.mark, None
        fits = more = True
        while more:
            page = await self.tree.ledger.children(JobId(parent), since=since, limit=PAGE)
            there = set[int]() if page.anew else there
            if there is not None:
                there.update(page.numbers)
            fits = await self._take_in_all(family, page) and fits
            since, mark = page.mark, page.mark if fits else mark
            more = len(page.job_ids) == PAGE and (fits if there is None else len(there) < CHILDREN_MAX)
        if there is not None and not family.lose(family.known.keys() - there):
            return False
        family.mark = mark
        if not fits:
            _log.error("too_many_children", job_id=parent, looked_at=len(family.known))
        return True

    async def _take_in_all(self, family: ChildJobs, page: ChildPage) -> bool:
        """Add the children of a page. Returns whether there was room for all of them."""
        new = [child for child in zip(page.numbers, page.job_ids, strict=True) if child[0] not in family.known]
        room = CHILDREN_MAX - len(family.known)
        for start in range(0, min(len(new), room), CONCURRENCY):
            group = new[start : min(start + CONCURRENCY, room)]
            jobs = await gather_all(self.tree.ledger.job(job_id) for _, job_id in group)
            steps = [self._step_in(job) for job in jobs]
            parties = await gather_all(self.tree.party_in(child.job) for child in steps if child is not None)
            for child, party in zip([child for child in steps if child is not None], parties, strict=True):
                self._take_in(family, child, party)
            family.known.update(group)
            await self.between()
        return len(new) <= room

    def _step_in(self, job: Job | None) -> EffectiveJob | None:
        """A child as a step of a workflow; None if it is not one."""
        request = None if job is None else self.tree.request_in(job, anew=True)
        if job is None or request is None or not request.workflow_id:
            return None
        return None if request.is_retry or COMPENSATES in request.labels else EffectiveJob(job=job, request=request)

    def _take_in(self, family: ChildJobs, child: EffectiveJob, party: str) -> None:
        """Add a step to its workflow. Steps of another tenant or party belong to a separate workflow."""
        named = (child.request.workflow_id, child.request.tenant, party)
        workflow = family.workflows.setdefault(named, Workflow())
        step = WorkflowStep(child.request.step_index, child.job.job_id)
        if workflow.settle(step, child):
            return
        insort(workflow.unsettled, step)
        if child.job.state in RETRYABLE_ENDS:
            workflow.unseen.append(step)

    async def _look_if_unsettled(self, workflow: Workflow, step: WorkflowStep) -> None:
        if workflow.is_unsettled(step):
            await self.look(workflow, step)
            await self.between()

    async def _first_unsettled(self, workflow: Workflow) -> tuple[WorkflowStep, EffectiveJob] | None:
        while workflow.unsettled:
            step = workflow.unsettled[0]
            effective = await self._look(workflow, step)
            if effective is not None:
                return step, effective
            await self.between()
        return None

    async def _look(self, workflow: Workflow, step: WorkflowStep) -> EffectiveJob | None:
        """The state of a step; None when it is now settled or gone."""
        job = await self.tree.ledger.job(step.job_id)
        request = None if job is None else self.tree.request_in(job)
        if job is None or request is None:
            workflow.drop(step)
            return None
        effective = await self.tree.effective_step(job, request, step_of=request.step_of)
        return None if workflow.settle(step, effective) else effective


async def gather_all(reads: Iterable[Awaitable[T]]) -> list[T]:
    """Every result, awaited concurrently. If one raises, the others finish first."""
    answers = await asyncio.gather(*reads, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


# Order of workflow steps. Steps of one parent and workflow run in the order of their index; steps of one index run
# together (BUS-8).
#
# Only steps of one owner and tenant are ordered together, so no party can block another's workflow.
#
# A step waits while a step with a lower index has not ended. A retry stands for the step that it retries, so a step
# that failed and is retried has not ended. A step that failed for good ends all later steps. Compensations are not
# steps.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNotDue:
    """An earlier step has not ended."""

    step_index: int
    job_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDoomed:
    """An earlier step failed for good."""

    step_index: int
    job_id: str
    state: str


StepTurn: TypeAlias = StepNotDue | StepDoomed | None
"""None means that it is the step's turn."""


def turn_of(front: WorkflowFrontier, step_index: int) -> StepTurn:
    """Whether a step with this index may be dispatched."""
    failed, waits_for = front.failed, front.open
    if failed is not None and failed.index < step_index:
        return StepDoomed(step_index=failed.index, job_id=failed.job_id, state=failed.state)
    if waits_for is not None and waits_for.index < step_index:
        return StepNotDue(step_index=waits_for.index, job_id=waits_for.job_id)
    return None


def is_ordered_step(request: JobRequest) -> bool:
    """Whether the job is a step that may have to wait for others."""
    return bool(request.step_of and request.workflow_id and request.step_index and COMPENSATES not in request.labels)


@dataclass(kw_only=True)
class StepOrder:
    """The order of steps as one pass sees it.

    Reads each workflow once, and once more after some steps were deferred.
    """

    tree: JobTree
    _workflows: WorkflowReader = field(init=False)
    _fronts: dict[WorkflowKey, WorkflowFrontier] = field(default_factory=dict[WorkflowKey, WorkflowFrontier])
    _aside: dict[WorkflowKey, list[tuple[Job, JobRequest]]] = field(
        default_factory=dict[WorkflowKey, list[tuple[Job, JobRequest]]]
    )

    def __post_init__(self) -> None:
        self._workflows = WorkflowReader(tree=self.tree)

    async def of(self, request: JobRequest) -> StepTurn:
        if not is_ordered_step(request):
            return None
        key = await self.tree.key_of(request)
        if key not in self._fronts:
            self._fronts[key] = await self._workflows.front(key)
        return turn_of(self._fronts[key], request.step_index)

    async def put_aside(self, job: Job, request: JobRequest) -> None:
        """Record that the job was deferred because it is not its turn."""
        self._aside.setdefault(await self.tree.key_of(request), []).append((job, request))

    async def missed(self) -> list[Job]:
        """The deferred jobs whose turn had come before they were deferred. The reconciler did not find them waiting."""
        jobs: list[Job] = []
        for key, aside in self._aside.items():
            front = await self._workflows.front(key)
            jobs += [job for job, request in aside if not isinstance(turn_of(front, request.step_index), StepNotDue)]
        self._aside.clear()
        return jobs
