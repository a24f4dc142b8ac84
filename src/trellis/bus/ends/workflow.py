"""What a process remembers of the steps of workflows, so that the end of one step is not paid for by reading all. Pure.

Only what cannot change is kept as settled: a step that has succeeded, itself or by a retry, has succeeded for good, and one that was
cancelled has failed for good. One that failed, timed out or was denied may be run again by an operator at any time: it is looked at each
time, or given up by somebody who hears of it when it is done again. Every other step is as it was when it was last looked at. When a
child is removed from the ledger of which more is known than that it succeeded, its family is forgotten: another job may have its id.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from trellis.bus.ends.standing import CANCELLED, SUCCEEDED, EffectiveJob
from trellis.engine.jobs import JobId

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
