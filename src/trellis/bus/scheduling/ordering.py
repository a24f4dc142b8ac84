"""Whether it is a step's turn: the steps of one parent and workflow go by their number, and steps of one number together (BUS-8).

A step waits while one with a lower number has not ended. A retry stands for the step it does again, so a step that failed and is tried
again has not ended. One that ended badly for good ends all that come after it. Compensations are no steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from trellis.bus.ends.families import Families, Standing
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """What holds up the steps of one workflow: the lowest that failed for good, and the lowest that has not ended."""

    failed: Standing | None
    open: Standing | None

    def turn_of(self, step_index: int) -> Turn:
        """Whether a step with this number may go."""
        if self.failed is not None and self.failed.index < step_index:
            return Never(step_index=self.failed.index, job_id=self.failed.job.job_id, state=self.failed.job.state)
        if self.open is not None and self.open.index < step_index:
            return NotYet(step_index=self.open.index, job_id=self.open.job.job_id)
        return None


def front_of(steps: Sequence[Standing]) -> Front:
    """Where a workflow stands, all its steps being where they are."""
    failed = min((step for step in steps if step.failed), key=_index, default=None)
    return Front(failed=failed, open=min((step for step in steps if step.open), key=_index, default=None))


def _index(step: Standing) -> int:
    return step.index


def in_order(request: JobRequest) -> bool:
    """Whether it has a turn to wait for at all."""
    return bool(request.step_of and request.workflow_id and request.step_index and COMPENSATES not in request.labels)


@dataclass(kw_only=True)
class Turns:
    """Whose turn it is, as one pass sees it: the steps of a workflow are read once, and once more after some were put aside."""

    families: Families
    _fronts: dict[tuple[str, str, str], Front] = field(default_factory=dict[tuple[str, str, str], Front])
    _aside: dict[tuple[str, str, str], list[tuple[Job, JobRequest]]] = field(
        default_factory=dict[tuple[str, str, str], list[tuple[Job, JobRequest]]]
    )

    async def of(self, request: JobRequest) -> Turn:
        """Whether it is this job's turn."""
        if not in_order(request):
            return None
        key = (request.step_of, request.workflow_id, request.tenant)
        if key not in self._fronts:
            self._fronts[key] = front_of(await self.families.steps(*key))
        return self._fronts[key].turn_of(request.step_index)

    def put_aside(self, job: Job, request: JobRequest) -> None:
        """The job rests now because it is not its turn."""
        self._aside.setdefault((request.step_of, request.workflow_id, request.tenant), []).append((job, request))

    async def missed(self) -> list[Job]:
        """Those put aside whose turn had come before they rested: whoever lets steps go did not find them resting."""
        found: list[Job] = []
        for key, aside in self._aside.items():
            front = front_of(await self.families.steps(*key))
            found += [job for job, request in aside if not isinstance(front.turn_of(request.step_index), NotYet)]
        self._aside.clear()
        return found
