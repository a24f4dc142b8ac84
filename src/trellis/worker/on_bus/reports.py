"""What a worker says about its jobs: the question whether one may begin, signs of life, and the result until it is answered.

Our control plane answers every question after its ledger has decided, with a progress packet whose message begins with one of the
words of `messages`. Any other scheduler answers nothing: it is told and not asked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import count

from trellis.bus.errors import BusError, BusUnavailable
from trellis.bus.messages import (
    ACCEPTED,
    PROGRESS,
    REFUSED,
    RESULT,
    START_STEP,
    STOP,
    JobProgress,
    JobResult,
    PacketBody,
    Status,
)
from trellis.bus.port import Bus
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.logs import log_of
from trellis.worker.held import StopCause
from trellis.worker.on_bus.attempt import OrderAttempt

START_TRIES = 3
"""How often a start is asked for at least."""
START_S_MAX = 60.0
"""How long it is asked for at most, and no longer than the lease: then the job is another's."""
START_PAUSE_S_FIRST, START_PAUSE_S_MAX = 0.2, 2.0
RESULT_PAUSE_S_FIRST, RESULT_PAUSE_S_MAX = 0.5, 10.0
PROGRESS_S = 1.0
"""How often a handler's progress is told, at most."""

_log = log_of("trellis.worker")


class ControlAnswer(Enum):
    """What the control plane said."""

    YES = ACCEPTED
    NO = REFUSED
    STOP = STOP
    NOTHING = "no answer"


@dataclass(frozen=True, kw_only=True)
class BusReporter:
    """Speaks for one worker."""

    bus: Bus
    clock: Clock
    new_id: Callable[[], str]
    ask_s: float
    result_s: float

    async def may_start(self, attempt: OrderAttempt, stopping: Callable[[], bool]) -> ControlAnswer:
        """Whether the job may begin. The same token over all tries: a lost answer is asked for again, and a copy of the order gets no.

        A control plane that begins anew is waited for, unless the worker stops or nobody wants the job any more.
        """
        question = JobProgress(
            job_id=attempt.wire_id,
            status=Status.RUNNING,
            step_id=START_STEP,
            message=self.new_id(),
            dispatch=attempt.dispatch,
        )
        until = self.clock.monotonic() + min(attempt.lease_s, START_S_MAX)
        for number in count():
            if number >= START_TRIES and (stopping() or attempt.should_stop or self.clock.monotonic() >= until):
                break
            asked_at = self.clock.monotonic()
            said = await self._ask(PROGRESS, question, attempt)
            if said is ControlAnswer.YES and self.clock.monotonic() >= asked_at + attempt.lease_s:
                continue  # it has waited here for longer than it holds: the job may be another's since
            if said is not ControlAnswer.NOTHING:
                attempt.heard_at = asked_at
                return said
            await self.clock.sleep(min(START_PAUSE_S_MAX, START_PAUSE_S_FIRST * 2 ** min(number, 10)))
        return ControlAnswer.NOTHING

    async def beats(self, attempt: OrderAttempt) -> None:
        """Say that the job runs, until it is settled; hear whether it is still wanted, and still this worker's."""
        told_at = self.clock.monotonic()
        pause_s = min(PROGRESS_S, attempt.beat_s)
        while not await sleep_or_stop(self.clock, attempt.settled, pause_s):
            now = self.clock.monotonic()
            if attempt.progress is None and now - told_at < attempt.beat_s:
                continue
            told_at = now
            self._heed(attempt, await self._tell(attempt, attempt.sign_of_life()), now)
            if attempt.fate is StopCause.LOST:
                return

    async def settle(self, attempt: OrderAttempt, result: JobResult) -> bool:
        """Report the result until somebody has it; False when nobody would have it in time."""
        began, pause_s = self.clock.monotonic(), RESULT_PAUSE_S_FIRST
        while not attempt.settled.is_set():
            if await self._delivered(attempt, result):
                attempt.settled.set()
                break
            if self.clock.monotonic() - began + pause_s > self.result_s:
                _log.warning("result_unanswered", job_id=attempt.wire_id, status=result.status.name)
                return False
            await sleep_or_stop(self.clock, attempt.settled, pause_s)
            pause_s = min(RESULT_PAUSE_S_MAX, attempt.beat_s, 2 * pause_s)  # a result is a sign of life too
        return True

    async def _delivered(self, attempt: OrderAttempt, result: JobResult) -> bool:
        if attempt.asks:
            said = await self._ask(RESULT, result, attempt)
            if said is ControlAnswer.NO:
                _log.warning("result_refused", job_id=attempt.wire_id, status=result.status.name)
            return said is not ControlAnswer.NOTHING
        try:
            await self.bus.publish(RESULT, result, trace_id=attempt.trace_id, message_id=_message_id(attempt))
        except BusUnavailable:
            return False
        return True

    async def _tell(self, attempt: OrderAttempt, progress: JobProgress) -> ControlAnswer:
        if attempt.asks:
            return await self._ask(PROGRESS, progress, attempt)
        try:
            await self.bus.publish(PROGRESS, progress, trace_id=attempt.trace_id)
        except BusError as error:
            _log.info("progress_not_sent", job_id=attempt.wire_id, error=str(error))
        return ControlAnswer.NOTHING

    def _heed(self, attempt: OrderAttempt, said: ControlAnswer, now: float) -> None:
        if attempt.ended and not attempt.keeping:
            return
        match said:
            case ControlAnswer.YES:
                attempt.heard_at = now
            case ControlAnswer.STOP:
                attempt.tell("its control plane wants it to stop")
            case ControlAnswer.NO:
                _log.warning("attempt_revoked", job_id=attempt.wire_id)
                attempt.cut(StopCause.LOST)
            case ControlAnswer.NOTHING:
                pass

    async def _ask(self, subject: str, body: PacketBody, attempt: OrderAttempt) -> ControlAnswer:
        try:
            answer = await self.bus.ask(subject, body, trace_id=attempt.trace_id, timeout_s=self.ask_s)
        except BusError as error:
            _log.info("no_answer", job_id=attempt.wire_id, subject=subject, error=str(error))
            return ControlAnswer.NOTHING
        if answer.sender_id != attempt.sender_id:
            _log.warning("answer_of_another", job_id=attempt.wire_id, sender_id=answer.sender_id)
            return ControlAnswer.NOTHING
        return _control_answer(answer.body, attempt.wire_id)


def _control_answer(answer: PacketBody, wire_id: str) -> ControlAnswer:
    if not isinstance(answer, JobProgress) or answer.job_id != wire_id:
        return ControlAnswer.NOTHING
    return next((said for said in ControlAnswer if answer.message.startswith(said.value)), ControlAnswer.NOTHING)


def _message_id(attempt: OrderAttempt) -> str:
    dispatch = attempt.order.dispatch
    return f"result:{attempt.wire_id}:{dispatch.dispatch_id}:{dispatch.attempt}"
