"""Whether it is a step's turn: the steps of one parent and workflow go by their number, and steps of one number together (BUS-8).

Only steps of one owner or tenant are counted together: nobody holds up another's workflow.

A step waits while one with a lower number has not ended. A retry stands for the step it does again, so a step that failed and is tried
again has not ended. One that ended badly for good ends all that come after it. Compensations are no steps.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from trellis.bus.ends.families import JobTree
from trellis.bus.ends.workflow import WorkflowFrontier, WorkflowKey
from trellis.bus.ends.workflows import WorkflowReader
from trellis.bus.requests import COMPENSATES, JobRequest
from trellis.engine.records import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNotDue:
    """A step before it has not ended."""

    step_index: int
    job_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDoomed:
    """A step before it ended badly, for good."""

    step_index: int
    job_id: str
    state: str


StepTurn: TypeAlias = StepNotDue | StepDoomed | None
"""None: it is its turn."""


def turn_of(front: WorkflowFrontier, step_index: int) -> StepTurn:
    """Whether a step with this number may go."""
    failed, waits_for = front.failed, front.open
    if failed is not None and failed.index < step_index:
        return StepDoomed(step_index=failed.index, job_id=failed.job_id, state=failed.state)
    if waits_for is not None and waits_for.index < step_index:
        return StepNotDue(step_index=waits_for.index, job_id=waits_for.job_id)
    return None


def is_ordered_step(request: JobRequest) -> bool:
    """Whether it has a turn to wait for at all."""
    return bool(request.step_of and request.workflow_id and request.step_index and COMPENSATES not in request.labels)


@dataclass(kw_only=True)
class StepOrder:
    """Whose turn it is, as one pass sees it: a workflow is looked at once, and once more after some steps were put aside."""

    families: JobTree
    _workflows: WorkflowReader = field(init=False)
    _fronts: dict[WorkflowKey, WorkflowFrontier] = field(default_factory=dict[WorkflowKey, WorkflowFrontier])
    _aside: dict[WorkflowKey, list[tuple[Job, JobRequest]]] = field(
        default_factory=dict[WorkflowKey, list[tuple[Job, JobRequest]]]
    )

    def __post_init__(self) -> None:
        self._workflows = WorkflowReader(families=self.families)

    async def of(self, request: JobRequest) -> StepTurn:
        """Whether it is this job's turn."""
        if not is_ordered_step(request):
            return None
        key = await self.families.key_of(request)
        if key not in self._fronts:
            self._fronts[key] = await self._workflows.front(key)
        return turn_of(self._fronts[key], request.step_index)

    async def put_aside(self, job: Job, request: JobRequest) -> None:
        """The job rests now because it is not its turn."""
        self._aside.setdefault(await self.families.key_of(request), []).append((job, request))

    async def missed(self) -> list[Job]:
        """Those put aside whose turn had come before they rested: whoever lets steps go did not find them resting."""
        found: list[Job] = []
        for key, aside in self._aside.items():
            front = await self._workflows.front(key)
            found += [job for job, request in aside if not isinstance(turn_of(front, request.step_index), StepNotDue)]
        self._aside.clear()
        return found
