"""The workflow of one run: its four steps as activities, in order.

The process that holds the run's lease in the ledger executes the steps. It announces itself with the signal
`taken-up`, which names its lease's epoch and its own task queue. The workflow gives each step to the newest holder that
it knows. Temporal keeps the progress, the timers of retries and the time limits. The ledger keeps the record.

Invariants:
- A step goes only to a process that held the run's lease when it announced itself. That process refuses it
  (`LEFT`) if the lease is no longer its own.
- When no process takes the steps, the workflow asks the ledger whether the run has ended, and ends itself if so.
- The code is replayed from histories that older versions wrote. A change of the order of commands needs
  `workflow.patched`; `tests/temporal/test_replay.py` replays a stored history.
"""

import asyncio
from dataclasses import dataclass, replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError

RUN_WORKFLOW = "trellis.run"
TAKEN_UP = "taken-up"
STEP_ACTIVITY = "trellis.step"
ENDED_ACTIVITY = "trellis.run-has-ended"
LEFT = "LEFT"
"""Type of the failure of a step whose process does not hold the run's lease any more."""

FIRST_LOOK_S = 5.0
LOOK_S_MAX = 3_600.0
"""Longest pause between two questions whether a run that no process holds has ended."""
LOOK_TIMEOUT_S = 10.0

SAME_EPOCH = "holder-of-the-same-epoch"
"""The patch since which an announcement with the known epoch and another queue counts."""


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Limits that Temporal enforces for the activity of a step. The process itself ends a late step earlier (RUN-6)."""

    attempt_s: float
    """One try, with its publication."""
    heartbeat_s: float
    """A process that is silent for this long is taken for dead."""
    pickup_s: float
    """A process that does not begin a step within this time is taken for dead."""


@dataclass(frozen=True, kw_only=True)
class RunHolder:
    """The process that holds the run's lease."""

    epoch: int
    queue: str
    """The task queue that only this process polls."""


@dataclass(frozen=True, kw_only=True)
class RunInput:
    """A run, as its workflow is started."""

    run_id: str
    steps: int
    done: int
    """Steps that the ledger has counted already."""
    limits: StepLimits
    holder: RunHolder | None = None
    """The holder that an earlier execution of the same workflow knew."""


@dataclass(frozen=True, kw_only=True)
class StepTask:
    """One step of one run, for the process that holds this epoch of the run's lease."""

    run_id: str
    epoch: int
    number: int


@workflow.defn(name=RUN_WORKFLOW)
class RunWorkflow:
    """Executes the steps of one run."""

    def __init__(self) -> None:
        self._holder: RunHolder | None = None
        self._tried: RunHolder | None = None
        """The process that a step was given to last."""
        self._left: RunHolder | None = None
        """The last process that answered that it does not hold the run any more."""

    @workflow.signal(name=TAKEN_UP)
    def taken_up(self, holder: RunHolder) -> None:
        """A process took the run up. An older announcement that arrives late changes nothing.

        Two processes have the same epoch only if the ledger was restored from a backup between their claims. The first
        is gone then: its lease is no longer in the ledger.
        """
        known = self._holder
        is_other = known is not None and holder.epoch == known.epoch and holder.queue != known.queue
        if known is None or holder.epoch > known.epoch or (is_other and workflow.patched(SAME_EPOCH)):
            self._holder = holder

    @workflow.run
    async def run(self, run: RunInput) -> int:
        """Execute the steps that are left. Returns how many steps were done when the workflow ended."""
        if run.holder is not None and (self._holder is None or run.holder.epoch > self._holder.epoch):
            self._holder = run.holder
        await workflow.wait_condition(lambda: self._holder is not None)
        for number in range(run.done + 1, run.steps + 1):
            while not await self._execute(run, number):
                if not await self._goes_on(run):
                    return number - 1
                if workflow.info().is_continue_as_new_suggested():
                    workflow.continue_as_new(replace(run, done=number - 1, holder=self._holder))
        return run.steps

    async def _execute(self, run: RunInput, number: int) -> bool:
        """Give the step to the newest holder. False if that process did not do it."""
        holder = self._holder
        assert holder is not None
        step = workflow.start_activity(
            STEP_ACTIVITY,
            StepTask(run_id=run.run_id, epoch=holder.epoch, number=number),
            task_queue=holder.queue,
            summary=f"step {number}",
            start_to_close_timeout=timedelta(seconds=run.limits.attempt_s),
            heartbeat_timeout=timedelta(seconds=run.limits.heartbeat_s),
            schedule_to_start_timeout=timedelta(seconds=run.limits.pickup_s),
            retry_policy=RetryPolicy(initial_interval=timedelta(seconds=1), backoff_coefficient=2.0),
        )
        step.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # also if nobody waits for it
        self._tried = holder
        newer = asyncio.ensure_future(workflow.wait_condition(lambda: self._holder != holder))
        try:
            await workflow.wait([step, newer], return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                return False
            await step
        except ActivityError as error:
            if self._holder != holder:  # another process holds the run now, and the old one settles nothing
                return False
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.type != LEFT:
                raise cause from error
            if isinstance(cause, ApplicationError):
                self._left = holder
            return False
        finally:
            newer.cancel()
            step.cancel()
        return True

    async def _goes_on(self, run: RunInput) -> bool:
        """Wait for a process that may hold the run. False if the run has ended."""
        pause_s = FIRST_LOOK_S
        while self._holder == self._tried:
            if await self._has_ended(run):
                return False
            if self._left != self._tried:  # the process was silent and may still hold the run
                return True
            try:
                await workflow.wait_condition(lambda: self._holder != self._tried, timeout=timedelta(seconds=pause_s))
            except TimeoutError:
                pause_s = min(pause_s * 2.0, LOOK_S_MAX)
        return True

    async def _has_ended(self, run: RunInput) -> bool:
        """Whether the ledger says that the run has ended. Any orchestrator process answers."""
        return await workflow.execute_activity(
            ENDED_ACTIVITY,
            run.run_id,
            result_type=bool,
            start_to_close_timeout=timedelta(seconds=LOOK_TIMEOUT_S),
        )
