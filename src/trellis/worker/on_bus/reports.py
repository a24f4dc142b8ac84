"""What a worker on the bus tells the control plane: its presence, and for its jobs the start, heartbeats and the result.

Our control plane answers each of these after its ledger has decided. The answer is a progress packet whose message
starts with one of the words of `messages`. Other schedulers do not answer: the worker only informs them.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from trellis.bus.errors import BusError, BusUnavailable
from trellis.bus.messages import (
    ACCEPTED,
    HANDSHAKE,
    HEARTBEAT,
    PROGRESS,
    REFUSED,
    RESULT,
    START_STEP,
    STOP,
    Handshake,
    JobProgress,
    JobResult,
    PacketBody,
    Status,
    WorkerHeartbeat,
    sdk_version,
)
from trellis.bus.port import Bus
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.logs import log_of
from trellis.worker.held import StopCause
from trellis.worker.on_bus.attempt import OrderAttempt
from trellis.worker.options import BusWorkerOptions

# Presence: a handshake that names the topics, then heartbeats.
#
# The handshake is repeated after a bus outage and every `HANDSHAKE_S`, for a control plane that started after the
# worker. A draining worker reports that it is full, so that it gets no new orders but does not count as lost.

HANDSHAKE_S = 30.0
STANDSTILL_S = 2.0
"""If a heartbeat is late by this much, log that the event loop was blocked."""
JOBS_SHOWN = 5
WORKER_TYPE = "trellis"
CAPABILITIES = ("progress", "cancel", "error_codes", "heartbeats")

_log = log_of("trellis.worker")


@dataclass(kw_only=True)
class BusPresence:
    """Sends a heartbeat every `heartbeat_s`, and at once when `changed` is set."""

    bus: Bus
    clock: Clock
    options: BusWorkerOptions
    new_id: Callable[[], str]
    topics: tuple[str, ...]
    active: Callable[[], int]
    cpu_load: Callable[[], float]
    held: Callable[[], Sequence[str]]
    """Returns the wire ids of the jobs that this worker runs."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _met_at: float | None = None
    """When the last handshake was sent; None when one is due."""
    _silent: bool = False

    async def run(self) -> None:
        while True:
            self.changed.clear()
            await self.run_once()
            rested_at = self.clock.monotonic()
            await sleep_or_stop(self.clock, self.changed, self.options.heartbeat_s)
            self._note_standstill(self.clock.monotonic() - rested_at - self.options.heartbeat_s)

    async def run_once(self) -> bool:
        """Sends one heartbeat, and a handshake if due. Returns False if the bus is unavailable."""
        now = self.clock.monotonic()
        try:
            if self._met_at is None or now - self._met_at >= HANDSHAKE_S:
                await self.bus.publish(HANDSHAKE, self.handshake(), trace_id=self.new_id())
                self._met_at = now
            await self.bus.publish(HEARTBEAT, self.heartbeat(), trace_id=self.new_id())
        except BusError as error:
            if not self._silent:
                _log.warning("heartbeat_not_sent", error=str(error))
            self._silent, self._met_at = True, None
            return False
        self._silent = False
        return True

    def _note_standstill(self, late_s: float) -> None:
        """Logs that the event loop was blocked.

        A worker that cannot send heartbeats counts as lost, and its jobs run again. The log must show why.
        """
        if late_s >= STANDSTILL_S:
            held = self.held()
            why = "an async handler must not block; as a plain def it gets a thread"
            _log.warning("event_loop_stood_still", for_s=round(late_s, 1), jobs=list(held[:JOBS_SHOWN]), remedy=why)

    def handshake(self) -> Handshake:
        return Handshake(
            component_id=self.bus.sender_id,
            capabilities=dict.fromkeys(CAPABILITIES, True),
            sdk_version=sdk_version(),
            ready_topics=self.topics,
        )

    def heartbeat(self) -> WorkerHeartbeat:
        options = self.options
        return WorkerHeartbeat(
            worker_id=self.bus.sender_id,
            pool=options.pool,
            region=options.region,
            type=WORKER_TYPE,
            cpu_load=min(100.0, max(0.0, self.cpu_load())),
            active_jobs=self.active(),
            max_parallel_jobs=options.max_parallel_jobs,
            capabilities=options.capabilities,
            labels=dict(options.labels),
        )


# Reports about jobs.

START_TRIES = 3
"""Minimum number of tries to get a start confirmed."""
START_S_MAX = 60.0
"""Maximum time to ask for a start, and never longer than the lease: after that the job may belong to another worker."""
START_PAUSE_S_FIRST, START_PAUSE_S_MAX = 0.2, 2.0
RESULT_PAUSE_S_FIRST, RESULT_PAUSE_S_MAX = 0.5, 10.0
PROGRESS_S = 1.0
"""Minimum interval between two progress reports of a handler."""


class ControlAnswer(Enum):
    YES = ACCEPTED
    NO = REFUSED
    STOP = STOP
    NOTHING = "no answer"


@dataclass(frozen=True, kw_only=True)
class BusReporter:
    """Sends the reports of one worker."""

    bus: Bus
    clock: Clock
    new_id: Callable[[], str]
    ask_s: float
    result_s: float

    async def may_start(self, attempt: OrderAttempt, stopping: Callable[[], bool]) -> ControlAnswer:
        """Asks the control plane whether the job may start.

        All tries carry the same token, so a lost answer can be asked for again, while a copy of the order is refused. A
        restarting control plane is waited for, unless the worker stops or the job is cancelled.
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
            answer = await self._ask(PROGRESS, question, attempt)
            if answer is ControlAnswer.YES and self.clock.monotonic() >= asked_at + attempt.lease_s:
                continue  # the answer took longer than the lease: the job may belong to another worker by now
            if answer is not ControlAnswer.NOTHING:
                attempt.heard_at = asked_at
                return answer
            await self.clock.sleep(min(START_PAUSE_S_MAX, START_PAUSE_S_FIRST * 2 ** min(number, 10)))
        return ControlAnswer.NOTHING

    async def beats(self, attempt: OrderAttempt) -> None:
        """Sends heartbeats until the job is settled, or until it is cancelled. The answers report a cancel request or a lost job."""
        sent_at = self.clock.monotonic()
        pause_s = min(PROGRESS_S, attempt.beat_s)
        while True:
            await self.clock.sleep(pause_s)
            now = self.clock.monotonic()
            if attempt.settled.is_set():
                return
            if attempt.progress is None and now - sent_at < attempt.beat_s:
                continue
            sent_at = now
            self._heed(attempt, await self._tell(attempt, attempt.sign_of_life()), now)
            if attempt.fate is StopCause.LOST:
                return

    async def settle(self, attempt: OrderAttempt, result: JobResult) -> bool:
        """Reports the result until it is acknowledged. Returns False if that takes longer than `result_s`."""
        began, pause_s = self.clock.monotonic(), RESULT_PAUSE_S_FIRST
        while not attempt.settled.is_set():
            if await self._delivered(attempt, result):
                attempt.settled.set()
                break
            if self.clock.monotonic() - began + pause_s > self.result_s:
                _log.warning("result_unanswered", job_id=attempt.wire_id, status=result.status.name)
                return False
            await sleep_or_stop(self.clock, attempt.settled, pause_s)
            pause_s = min(RESULT_PAUSE_S_MAX, attempt.beat_s, 2 * pause_s)  # a result counts as a heartbeat
        return True

    async def _delivered(self, attempt: OrderAttempt, result: JobResult) -> bool:
        if attempt.asks:
            answer = await self._ask(RESULT, result, attempt)
            if answer is ControlAnswer.NO:
                _log.warning("result_refused", job_id=attempt.wire_id, status=result.status.name)
            return answer is not ControlAnswer.NOTHING
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

    def _heed(self, attempt: OrderAttempt, answer: ControlAnswer, now: float) -> None:
        if attempt.ended and not attempt.keeping:
            return
        match answer:
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
    return next((known for known in ControlAnswer if answer.message.startswith(known.value)), ControlAnswer.NOTHING)


def _message_id(attempt: OrderAttempt) -> str:
    dispatch = attempt.order.dispatch
    return f"result:{attempt.wire_id}:{dispatch.dispatch_id}:{dispatch.attempt}"
