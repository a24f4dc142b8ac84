"""Whether it is a step's turn: the steps of one parent and workflow go by their number, and steps of one number together (BUS-8).

A step waits while one with a lower number has not ended. A retry stands for the step it does again, so a step that failed and is tried
again has not ended. One that ended badly for good ends all that come after it. Compensations are no steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from trellis.bus.families import Families, Standing
from trellis.bus.requests import COMPENSATES, JobRequest
from trellis.engine.records import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class NotYet:
    """A step before it has not ended."""

    step_index: int
    job_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Never:
    """A step before it ended badly, for good."""

    step_index: int
    job_id: str
    state: str


Turn: TypeAlias = NotYet | Never | None
"""None: it is its turn."""


def turn_of(step_index: int, steps: Sequence[Standing]) -> Turn:
    """Whether a step with this number may go, all being where they are."""
    before = sorted((step for step in steps if step.index < step_index), key=lambda step: step.index)
    failed = next((step for step in before if step.failed), None)
    if failed is not None:
        return Never(step_index=failed.index, job_id=failed.job.job_id, state=failed.job.state)
    waits_for = next((step for step in before if step.open), None)
    return NotYet(step_index=waits_for.index, job_id=waits_for.job.job_id) if waits_for else None


def in_order(request: JobRequest) -> bool:
    """Whether it has a turn to wait for at all."""
    return bool(request.step_of and request.workflow_id and request.step_index and COMPENSATES not in request.labels)


@dataclass(kw_only=True)
class Turns:
    """Whose turn it is, as one pass sees it: the steps of a workflow are read once, and once more after some were put aside."""

    families: Families
    _steps: dict[tuple[str, str], list[Standing]] = field(default_factory=dict[tuple[str, str], list[Standing]])
    _aside: dict[tuple[str, str], list[tuple[Job, JobRequest]]] = field(
        default_factory=dict[tuple[str, str], list[tuple[Job, JobRequest]]]
    )

    async def of(self, request: JobRequest) -> Turn:
        """Whether it is this job's turn."""
        if not in_order(request):
            return None
        key = (request.step_of, request.workflow_id)
        if key not in self._steps:
            self._steps[key] = await self.families.steps(*key)
        return turn_of(request.step_index, self._steps[key])

    def put_aside(self, job: Job, request: JobRequest) -> None:
        """The job rests now because it is not its turn."""
        self._aside.setdefault((request.step_of, request.workflow_id), []).append((job, request))

    async def missed(self) -> list[Job]:
        """Those put aside whose turn had come before they rested: whoever lets steps go did not find them resting."""
        found: list[Job] = []
        for key, aside in self._aside.items():
            steps = await self.families.steps(*key)
            found += [job for job, request in aside if not isinstance(turn_of(request.step_index, steps), NotYet)]
        self._aside.clear()
        return found
