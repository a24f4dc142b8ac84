"""Drives claimed runs by workflows of a Temporal server.

The ledger decides which run goes next and which process holds it, as with the built-in orchestrator. The process starts
the run's workflow, or announces itself to the workflow that a process before it has started. Temporal then hands the
steps to this process one by one, keeps the delays before retries, and sees when a step or a process is silent for too
long. Each step is executed, journalled and counted by the code of the built-in driver, so the events are the same.

A Temporal server that does not answer delays a run and never fails it by itself: the wait is noted in the run's journal
like a wait for an object store.
"""

import asyncio
import contextvars
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import cast

from temporalio import activity
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory, CancelledError, TerminatedError
from temporalio.service import RPCError, RPCStatusCode

from trellis.documents import ids
from trellis.documents.errors import AgentStopped, StepError, StepHopeless, UpstreamUnavailable, WorkflowCancelled
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import Claimed, JobId
from trellis.engine.records import JobPlace
from trellis.runs.orchestrator import RunDrive, RunDriver, StepAgain, StepTries, step_entry
from trellis.runs.temporal.options import TemporalOptions
from trellis.runs.temporal.workflow import (
    ENDED_ACTIVITY,
    LEFT,
    RUN_WORKFLOW,
    STEP_ACTIVITY,
    TAKEN_UP,
    RunHolder,
    RunInput,
    StepLimits,
    StepTask,
)

AWAY = "the Temporal server does not answer"
REFUSES = "the Temporal server refuses the run's workflow"
NO_STEP = "the run's workflow hands over no step"
REPLACED = "Trellis: replaced by a new workflow of the same run"
"""The reason of a termination that a process asked for itself, so that no process takes it for an operator's."""
NO_ANSWER = {
    RPCStatusCode.CANCELLED,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.UNKNOWN,
}
"""The states of a call to a server that is away or ends while it answers."""
MARGIN_S = 30.0
"""How much later than the process itself Temporal ends a try of a step."""
RETRY_S = 1.0
"""Pause between two tries to reach a Temporal server that is away."""
CANCEL_RPC_S = 2.0
ANNOUNCEMENTS_MAX = 3
"""How often a process announces itself to a workflow that hands over no step, before it starts the workflow anew."""


@dataclass(kw_only=True)
class TemporalRunDriver(RunDriver):
    """Drives claimed runs by workflows. `client` is None while there is no connection."""

    temporal: TemporalOptions
    queue: str
    """The task queue of this process alone."""
    client: Client | None = None
    held: dict[str, "TemporalRunDrive"] = field(default_factory=dict[str, "TemporalRunDrive"])
    """The runs that this process drives, by id."""

    def begin(self, claimed: Claimed) -> "TemporalRunDrive":
        """The drive of a claimed run."""
        return TemporalRunDrive(self, claimed)

    @property
    def limits(self) -> StepLimits:
        """The limits that Temporal enforces for a step."""
        own_s = self.options.step_timeout_s + self.options.wait_noted_s
        return StepLimits(
            attempt_s=own_s + MARGIN_S, heartbeat_s=self.temporal.silence_s, pickup_s=self.temporal.pickup_s
        )

    @activity.defn(name=STEP_ACTIVITY)
    async def step(self, task: StepTask) -> None:
        """Execute, journal and count one step of a run that this process holds."""
        drive = self.held.get(task.run_id)
        if drive is None or drive.epoch != task.epoch:
            raise _left("this process does not hold the run")
        beating = asyncio.ensure_future(self._beat())
        try:
            await drive.execute(task.number)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        """Tell the server, again and again, that this process is alive."""
        while True:
            activity.heartbeat()
            await asyncio.sleep(self.temporal.heartbeat_s)

    @activity.defn(name=ENDED_ACTIVITY)
    async def has_ended(self, run_id: str) -> bool:
        """Whether a run has ended, or is in this ledger no more."""
        try:
            job = await self.ledger.job(JobId(run_id))
        except LedgerError as error:
            raise ApplicationError(error.code, type=error.code, category=ApplicationErrorCategory.BENIGN) from None
        return job is None or job.place is JobPlace.ENDED


class TemporalRunDrive(RunDrive):
    """One run while this process holds its lease and a workflow hands it the steps."""

    def __init__(self, driver: TemporalRunDriver, claimed: Claimed) -> None:
        super().__init__(driver, claimed)
        self._process = driver
        self.epoch = int(claimed.lease.epoch)
        self._all_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tries: dict[int, StepTries] = {}
        self._step: tuple[int, asyncio.Task[None]] | None = None
        """The step that was begun last, with its number, until an activity has returned its outcome."""
        self._turn, self._noting = asyncio.Lock(), asyncio.Lock()
        self._active_at = 0.0
        """When the workflow asked for a step last, or a step ended, by the event loop's clock."""
        self._context = contextvars.copy_context()
        """The drive's trace and correlation id. Activities begin without them, and the steps need them."""

    async def work(self) -> str | None:
        """Let the workflow hand over every step that is not counted yet. Returns the agent's summary."""
        await self._load()
        if self._done:
            await self._until_published(self._done)
        if self._done == len(ids.STEPS):
            return self._summary()
        self._process.held[self._run_id] = self
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({self._all_done, watching}, return_when=asyncio.FIRST_COMPLETED)
            await (self._all_done if self._all_done.done() else watching)
        finally:
            await self._end_step()  # before the run's end is written, as in the built-in driver
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return self._summary()

    async def _end_step(self) -> None:
        """Accept no more steps, and end the one that is being executed."""
        if self._process.held.get(self._run_id) is self:
            del self._process.held[self._run_id]
        if self._step is not None:
            self._step[1].cancel()
            await asyncio.gather(self._step[1], return_exceptions=True)

    async def close(self) -> None:
        """Give the run back."""
        await self._end_step()  # `work` does this too, but may be cancelled in the middle of it
        if self._all_done.done() and not self._all_done.cancelled():
            self._all_done.exception()  # it was raised by `work`, or the drive ended otherwise
        self._all_done.cancel()

    async def stop(self) -> str:
        """End the run as failed, because a cancel was requested. Its workflow is cancelled too."""
        await self._cancel_workflow()  # first: after the run's end the process may be cut off in the middle of it
        return await super().stop()

    async def _cancel_workflow(self) -> None:
        """Cancel the workflow. If the server does not answer, the workflow finds out by itself that the run ended."""
        if self._process.client is None:
            return
        try:
            async with asyncio.timeout(CANCEL_RPC_S):
                await self._process.client.get_workflow_handle(self._workflow_id).cancel()
        except (RPCError, TimeoutError) as error:
            self.log.info("workflow_not_cancelled", error=str(error) or AWAY)

    @property
    def _workflow_id(self) -> str:
        return self._process.temporal.workflow_id(self._run_id)

    # --- the workflow ------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Start the workflow or announce this process to it, and return when it has done all steps.

        A workflow that hands over no step is told again who holds the run. If it knows of a later epoch, because the
        ledger was restored from a backup, it ignores that, and is replaced by a new workflow.

        Raises the error with which the workflow ended if no step of this process caused it.
        """
        unanswered = 0
        while True:
            workflow, active_at = None, self._active_at
            try:
                workflow = await self._announce()
                steps = await self._result_of(workflow)
                if steps is None:
                    unanswered = unanswered + 1 if active_at == self._active_at else 1
                    await self._wait(NO_STEP)
                    if unanswered == ANNOUNCEMENTS_MAX:  # once: a second new workflow would be served no better
                        await workflow.terminate(reason=REPLACED)
                    continue
                if steps == len(ids.STEPS) and self._done == len(ids.STEPS):
                    return
            except RPCError as error:
                # A server that lost its data gets the workflow anew.
                if workflow is None or error.status is not RPCStatusCode.NOT_FOUND:
                    await self._wait(AWAY if error.status in NO_ANSWER else f"{REFUSES}: {error.message}")
            except WorkflowFailureError as error:
                if not _is_replaced(error):
                    raise _ending_of(error) from error
            await asyncio.sleep(RETRY_S)

    async def _result_of(self, workflow: WorkflowHandle[object, int]) -> int | None:
        """How many steps were done when the workflow ended. None if it hands over no step for `pickup_s` or longer."""
        pickup_s, loop = self._process.temporal.pickup_s, asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                async with asyncio.timeout(pickup_s):
                    return await workflow.result()
            except TimeoutError:
                is_executing = self._step is not None and not self._step[1].done()
                if not is_executing and self._active_at < began:
                    return None

    async def _announce(self) -> WorkflowHandle[object, int]:
        """Tell the run's workflow that this process holds the run. A workflow that is not there is started."""
        client, driver = self._process.client, self._process
        if client is None:
            raise RPCError(AWAY, RPCStatusCode.UNAVAILABLE, b"")
        run = RunInput(run_id=self._run_id, steps=len(ids.STEPS), done=self._done, limits=driver.limits)
        workflow = await client.start_workflow(
            RUN_WORKFLOW,
            run,
            id=self._workflow_id,
            task_queue=driver.temporal.queue,
            result_type=int,
            start_signal=TAKEN_UP,
            start_signal_args=[RunHolder(epoch=self.epoch, queue=driver.queue)],
            static_summary=f"{self._request.agent_slug} {self._run_id}",
        )
        return cast("WorkflowHandle[object, int]", workflow)

    # --- the steps ---------------------------------------------------------------------------------------------------

    async def execute(self, number: int) -> None:
        """Execute one step for the workflow: once, however often the workflow asks.

        The server may give up the activity that began a step, because this process was silent for too long. The step goes
        on, and the activity that the workflow asks with next gets its outcome.

        Raises an ApplicationError, which tells the workflow whether and when it asks again. The server gets the code of
        the error and the step's name, not the message: it may quote what only the ledger's readers should know.
        """
        async with self._turn:
            self._active_at = asyncio.get_running_loop().time()
            try:
                if self._all_done.done():  # the run has ended, and the answer to the activity before this one was lost
                    self._all_done.result()
                    return
                await self._outcome_of(number)
            except StepAgain as again:
                raise _retried(again, number) from None
            except asyncio.CancelledError:
                if self._process.held.get(self._run_id) is self:  # the step itself goes on
                    raise
                raise _left("this process gave the run back") from None
            except ApplicationError:
                raise
            except Exception as error:  # noqa: BLE001 - `_note_end` ends the drive with it, as in the built-in driver
                if isinstance(error, StepError) and not isinstance(error, AgentStopped):
                    raise _failed(error, number) from None
                raise _left(f"{type(error).__name__} in step {ids.STEPS[number - 1]}") from None
        if number == len(ids.STEPS) and not self._all_done.done():
            self._all_done.set_result(None)

    async def _outcome_of(self, number: int) -> None:
        """Wait for the step that is being executed or whose outcome no activity has returned; otherwise begin it.

        Raises the step's error. Waits no longer than the server would, and then lets the workflow ask again.
        """
        if self._step is None or self._step[0] != number:
            await self._begin(number)
        assert self._step is not None
        step = self._step[1]
        await asyncio.wait({step}, timeout=self._process.limits.attempt_s)  # unlike `await`, it cancels no step
        if not step.done():
            raise _busy(number)
        self._step = None
        step.result()

    async def _begin(self, number: int) -> None:
        """Begin a step, after the end of one that a workflow before this one began."""
        if self._step is not None:
            before, step = self._step
            await asyncio.wait({step}, timeout=self._process.limits.attempt_s)
            if not step.done():
                raise _busy(before)
            if self._all_done.done():  # that step ended the run
                self._all_done.result()
        begun = asyncio.get_running_loop().create_task(self._execute(number), context=self._context.copy())
        begun.add_done_callback(self._note_end)
        self._step = number, begun

    def _note_end(self, step: "asyncio.Task[None]") -> None:
        """End the drive with the error of a step that is not tried again, also if no activity waits for the step."""
        self._active_at = asyncio.get_running_loop().time()
        error = None if step.cancelled() else step.exception()
        if error is not None and not isinstance(error, StepAgain) and not self._all_done.done():
            self._all_done.set_exception(error)

    async def _execute(self, number: int) -> None:
        """One try of the step, unless it is journalled; then its count, unless it is counted; then its publication.

        The steps before it come first if the ledger does not count them: it may have been restored from a backup that
        is older than the workflow's progress, and the ledger is the record.
        """
        for earlier in range(self._done + 1, number):
            await self._execute(earlier)
        tries = self._tries.setdefault(number, self.new_tries())
        if number > self._done:
            body = self._journal.get(step_entry(number))
            if body is None:
                body = await self._keep_step(number, *await self._try(number, tries))
            await self._count(number, body)
        if not await self._is_published_within(self._process.options.wait_noted_s):
            tries.upstream += 1
            unpublished = UpstreamUnavailable(detail=f"{ids.step_file(number)} is not published yet")
            raise StepAgain(await self._upstream_pause_s(str(unpublished), None, tries.upstream), unpublished)
        if self._waits.is_open:
            await self._go_on((await self._process.ledger_time()).now)

    async def _wait(self, reason: str, since: datetime | None = None) -> None:
        """As the built-in drive; one at a time, because the step and the watch over the server both note waits."""
        async with self._noting:
            await super()._wait(reason, since)

    async def _go_on(self, now: datetime) -> None:
        async with self._noting:
            await super()._go_on(now)


def _retried(again: StepAgain, number: int) -> ApplicationError:
    """The failure of a try. The server lets the next try begin after the delay. The driver has logged the failure."""
    delay, benign = timedelta(seconds=again.delay_s), ApplicationErrorCategory.BENIGN
    return ApplicationError(_what(again.code, number), type=again.code, next_retry_delay=delay, category=benign)


def _what(code: str, number: int) -> str:
    """The message of a step's failure, as the server gets it."""
    return f"{code} in step {ids.STEPS[number - 1]}; the run's record has the details"


def _busy(number: int) -> ApplicationError:
    """The failure of an activity whose step takes longer than the server waits. The workflow asks again."""
    return ApplicationError(f"step {number} is still being executed", category=ApplicationErrorCategory.BENIGN)


def _failed(error: StepError, number: int) -> ApplicationError:
    """The failure of a step that fails the run, and with it the workflow."""
    benign = ApplicationErrorCategory.BENIGN
    return ApplicationError(_what(error.code, number), type=error.code, non_retryable=True, category=benign)


def _left(why: str) -> ApplicationError:
    """The failure of a step that this process must not execute. The workflow waits for the next holder."""
    return ApplicationError(why, type=LEFT, non_retryable=True, category=ApplicationErrorCategory.BENIGN)


def _is_replaced(error: WorkflowFailureError) -> bool:
    """Whether the process that holds the run terminated the workflow to start a new one."""
    return isinstance(error.cause, TerminatedError) and error.cause.message == REPLACED


def _ending_of(error: WorkflowFailureError) -> StepError:
    """The error of a run whose workflow ended otherwise than by a step of this process."""
    match error.cause:
        case CancelledError():
            return WorkflowCancelled()
        case TerminatedError() as cause:
            return StepHopeless(detail=f"the run's workflow was terminated in Temporal: {cause.message}")
        case cause:
            return StepHopeless(detail=f"the run's workflow failed in Temporal: {cause}")
