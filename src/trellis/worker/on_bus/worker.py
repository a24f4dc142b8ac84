"""A bus worker: runs the handlers of an application for jobs that arrive as CAP packets.

    async with BusWorker(app, bus, options, clock=clock, new_id=new_id, resolver=pointers) as worker:
        ...                               # serves its topics until the block ends, then drains

The worker subscribes to the subject of every topic of its application, in the queue group of the same name, as every
CAP worker does, and to its own subject. This process executes each order at most once, however often it is delivered.

An order of our own control plane starts only after the control plane's ledger agreed, and its result is repeated until
it is acknowledged. An order of any other scheduler starts at once, and its result is sent once.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any, Self

from trellis.bus.errors import BusError
from trellis.bus.messages import (
    CANCEL,
    RESULT,
    Dispatch,
    ErrorCode,
    JobCancel,
    JobOrder,
    JobResult,
    Status,
    direct_subject,
)
from trellis.bus.port import Bus, BusSubscription, ReceivedPacket
from trellis.bus.requests import TOPIC_PATTERN, JobRequest
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.errors import OptionInvalid
from trellis.engine.logs import log_of
from trellis.worker.app import App, JobSpec
from trellis.worker.handlers import Handlers
from trellis.worker.held import StopCause
from trellis.worker.on_bus.attempt import OrderAttempt, OrderKind, SeenOrders
from trellis.worker.on_bus.calls import HandlerCalls, not_run_result, result_of
from trellis.worker.on_bus.reports import BusPresence, BusReporter, ControlAnswer
from trellis.worker.options import BusWorkerOptions, PointerAccess, check_introduction, checked_worker_id
from trellis.worker.worker import Drained

_log = log_of("trellis.worker")


class BusWorker:
    """Serves the topics of one application. The worker id is the sender id of its bus connection."""

    def __init__(
        self,
        app: App,
        bus: Bus,
        options: BusWorkerOptions,
        *,
        clock: Clock,
        new_id: Callable[[], str],
        resolver: PointerAccess,
        cpu_load: Callable[[], float] | None = None,
    ) -> None:
        handlers = Handlers(app, clock=clock, threads=options.threads_max, processes=options.processes_max)
        self.worker_id = checked_worker_id(bus.sender_id)
        self.topics = tuple(_topic(spec) for spec in app)
        check_introduction("the topics of the application", self.topics)
        self.app = app
        self.bus = bus
        self.options = options
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.stopping = False
        self.drained: Drained | None = None
        self.attempts: dict[str, OrderAttempt] = {}
        """The orders this worker holds, by their identity."""
        self._seen = SeenOrders()
        self._tasks: dict[asyncio.Task[None], OrderAttempt] = {}
        self._changed = asyncio.Event()
        self._slots = asyncio.Semaphore(options.max_parallel_jobs)
        self._room = asyncio.Semaphore(options.max_parallel_jobs + options.unanswered_max)
        self._held_max = options.max_parallel_jobs + options.unanswered_max + options.backlog_max
        self._orders: list[BusSubscription] = []
        self._cancels: BusSubscription | None = None
        self._handlers = handlers
        self._reports = BusReporter(bus=bus, clock=clock, new_id=new_id, ask_s=options.ask_s, result_s=options.result_s)
        self._calls = HandlerCalls(
            resolver=resolver,
            clock=clock,
            handlers=handlers,
            worker_id=self.worker_id,
            stopping=lambda: self.stopping,
            keep_s=options.result_s,
        )
        self.presence = BusPresence(
            bus=bus,
            clock=clock,
            options=options,
            new_id=new_id,
            topics=self.topics,
            active=lambda: self.options.max_parallel_jobs if self.stopping else self.running,
            cpu_load=cpu_load or (lambda: 0.0),
            held=lambda: [one.wire_id for one in self.attempts.values() if one.begun_at is not None],
        )
        self._present: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        """Number of running handlers, including those that have returned and whose result is being stored."""
        return sum(attempt.begun_at is not None and attempt.busy for attempt in self.attempts.values())

    @property
    def waiting(self) -> int:
        """Number of orders that wait for a slot."""
        return sum(attempt.waiting for attempt in self.attempts.values())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    async def start(self) -> None:
        """Opens the application's resources, subscribes to its topics and starts sending heartbeats.

        Raises ResourceFailed and BusUnavailable.
        """
        await self._handlers.open()
        async with AsyncExitStack() as failed:
            failed.push_async_callback(self._handlers.close)
            await self._subscribe()
            failed.pop_all()
        self._present = self.loop.create_task(self.presence.run(), name="presence")

    async def _subscribe(self) -> None:
        self._cancels = await self.bus.listen(CANCEL, self._on_cancel)
        for topic in self.topics:
            self._orders.append(await self.bus.listen(topic, self._on_order, group=topic))
        self._orders.append(await self.bus.listen(direct_subject(self.worker_id), self._on_order))

    async def until_stopped(self, stop: asyncio.Event) -> None:
        await stop.wait()

    async def drain(self, hurry: asyncio.Event | None = None) -> Drained:
        """Stops accepting orders and lets running handlers finish for `drain_s`.

        `hurry` (a second signal) ends that wait. Handlers that still run then are stopped. The last results get
        `settle_s` to be acknowledged.
        """
        if self.drained is not None:
            return self.drained
        self.stopping = True
        self.presence.changed.set()
        for listening in self._orders:
            await listening.stop()
        not_begun = self._give_back_waiting()
        await self._until(
            lambda: not any(one.busy for one in self.attempts.values()), self.options.drain_s, hurry or asyncio.Event()
        )
        cut_short = self._give_back_running()
        await self._until(lambda: not self._tasks, self.options.settle_s, asyncio.Event())
        self.drained = Drained(not_begun=not_begun, cut_short=cut_short, unsettled=len(self._tasks))
        await self._close()
        _log.info("worker_drained", not_begun=not_begun, cut_short=cut_short, unsettled=self.drained.unsettled)
        return self.drained

    # -- incoming packets -----------------------------------------------------------------------------------------

    async def _on_order(self, received: ReceivedPacket) -> None:
        """Handles an order. The job runs in its own task, so the subscription is not blocked."""
        order = _order_of_body(received.packet.body)
        if order is None:
            _log.warning("packet_not_understood", subject=received.subject, body=type(received.packet.body).__name__)
            return
        if order.dispatch.worker_id not in {"", self.worker_id}:
            _log.warning("order_of_another", job_id=order.request.job_id, worker_id=order.dispatch.worker_id)
            return
        sender = received.packet.sender_id
        if self.options.orders_from and sender not in self.options.orders_from:
            _log.warning("order_of_a_stranger", job_id=order.request.job_id, sender_id=sender)
            return
        attempt = OrderAttempt(order, received.packet.trace_id, sender)
        kind = self._seen.note(attempt)
        if kind not in {OrderKind.NEW, OrderKind.FUTURE}:
            await self._not_again(attempt, kind)
            return
        if len(self._tasks) >= self._held_max:
            _log.warning("order_dropped", job_id=attempt.wire_id, held=len(self._tasks))
            return
        if kind is OrderKind.NEW and not attempt.asks:
            for older in [one for one in self.attempts.values() if _is_superseded(one, attempt)]:
                self._let_go(older)
        self.attempts[attempt.identity] = attempt
        refusal = self._refusal(attempt) if kind is OrderKind.NEW else self._out_of_turn(attempt)
        if refusal is None:
            self._spawn(attempt, self._execute(attempt, self.app.spec(order.request.topic)))
        else:
            self._withdraw(attempt, refusal)

    async def _on_cancel(self, received: ReceivedPacket) -> None:
        cancel = received.packet.body
        if not isinstance(cancel, JobCancel):
            return
        for attempt in [one for one in self.attempts.values() if one.wire_id == cancel.job_id]:
            if not attempt.is_meant(cancel.dispatch, self.worker_id):
                _log.info("cancel_of_another_attempt", job_id=attempt.wire_id, sender_id=received.packet.sender_id)
                continue
            attempt.tell(cancel.reason or f"cancelled by {cancel.requested_by}")
            if attempt.waiting:
                self._withdraw(attempt, self._cancelled(attempt))

    async def _not_again(self, attempt: OrderAttempt, kind: OrderKind) -> None:
        """Ignores an order that must not run.

        For a copy, a scheduler that does not answer gets the known result again: it may have missed it.
        """
        _log.info("order_not_executed", job_id=attempt.wire_id, why=kind.value)
        known = self._seen.result(attempt)
        if kind is OrderKind.COPY and known is not None and not attempt.asks:
            with suppress(BusError):
                await self.bus.publish(RESULT, known, trace_id=attempt.trace_id)

    def _let_go(self, attempt: OrderAttempt) -> None:
        """Abandons an attempt whose scheduler dispatched the job again. Nothing is reported for it."""
        _log.warning("attempt_superseded", job_id=attempt.wire_id)
        attempt.cut(StopCause.LOST)
        if attempt.waiting:
            attempt.waiting, attempt.ended = False, True
            self._cancel_tasks(attempt)

    def _refusal(self, attempt: OrderAttempt) -> JobResult | None:
        """Returns the result that refuses an order, which another worker may take; None if this worker can take it."""
        options = self.options
        at_once = options.max_parallel_jobs + options.backlog_max
        if attempt.request.topic not in self.app:
            known = ", ".join(self.topics)
            code, why = (
                ErrorCode.WORKER_UNAVAILABLE,
                f"this worker does not serve {attempt.request.topic}, only {known}",
            )
        elif self.stopping:
            code, why = ErrorCode.WORKER_UNAVAILABLE, "the worker drains"
        elif len(self.attempts) > at_once and sum(one.waiting or one.busy for one in self.attempts.values()) > at_once:
            code, why = ErrorCode.RESOURCE_EXHAUSTED, f"{options.backlog_max} jobs wait here already"
        else:
            return None
        return not_run_result(attempt, Status.FAILED_RETRYABLE, code.name, why, worker_id=self.worker_id)

    def _out_of_turn(self, attempt: OrderAttempt) -> JobResult:
        """Refuses an order whose attempt skips ahead, so that its scheduler does not wait for a result."""
        _log.info("order_not_executed", job_id=attempt.wire_id, why=OrderKind.FUTURE.value)
        why = f"attempt {attempt.order.dispatch.attempt} does not follow the last one here; send the next attempt"
        code = ErrorCode.WORKER_UNAVAILABLE.name
        return not_run_result(attempt, Status.FAILED_RETRYABLE, code, why, worker_id=self.worker_id)

    # -- one job --------------------------------------------------------------------------------------------------

    async def _execute(self, attempt: OrderAttempt, spec: JobSpec) -> None:
        async with self._room:
            async with self._slots:
                attempt.waiting = False
                try:
                    result, beats = await self._run(attempt, spec)
                finally:
                    attempt.ended = True
                    self._changed.set()
            try:
                if result is not None:
                    await self._settle(attempt, result)
            finally:
                attempt.settled.set()
                if beats is not None:
                    beats.cancel()

    async def _run(self, attempt: OrderAttempt, spec: JobSpec) -> "tuple[JobResult | None, asyncio.Task[None] | None]":
        """Runs the handler. Returns its result and the heartbeat task.

        The result is None when this worker must not report the attempt.
        """
        answer = await self._reports.may_start(attempt, lambda: self.stopping) if attempt.asks else ControlAnswer.YES
        if answer is ControlAnswer.STOP:
            attempt.tell("it was cancelled before it began")
        if answer in {ControlAnswer.NO, ControlAnswer.NOTHING}:
            _log.info("not_begun", job_id=attempt.wire_id, answer=answer.value)
            return None, None
        if attempt.cancel_requested:
            return self._cancelled(attempt), None
        if self.stopping:
            return self._given_back(attempt), None
        attempt.begun_at = self.clock.monotonic()
        beats = self.loop.create_task(self._reports.beats(attempt), name=f"beats {attempt.wire_id}")
        with ExitStack() as broken:
            broken.callback(beats.cancel)  # if this raises, the attempt is never reported: its lease must expire
            ending = await self._calls.run(attempt, spec, self.options.cancel_grace_s)
            result = result_of(attempt, ending, worker_id=self.worker_id, now=self.clock.monotonic())
            broken.pop_all()
        if attempt.fate is StopCause.LOST:
            _log.warning("outcome_dropped", job_id=attempt.wire_id, reason=attempt.fate.value)
            return None, beats
        return result, beats

    async def _settle(self, attempt: OrderAttempt, result: JobResult) -> None:
        self._seen.settle(attempt, result)
        await self._reports.settle(attempt, result)

    def _cancelled(self, attempt: OrderAttempt) -> JobResult:
        return not_run_result(attempt, Status.CANCELLED, "", attempt.reason, worker_id=self.worker_id)

    def _given_back(self, attempt: OrderAttempt) -> JobResult:
        code = ErrorCode.WORKER_UNAVAILABLE.name
        return not_run_result(attempt, Status.FAILED_RETRYABLE, code, "the worker drains", worker_id=self.worker_id)

    def _withdraw(self, attempt: OrderAttempt, result: JobResult) -> None:
        """Reports an order that will not start, and removes it from the queue for a slot."""
        attempt.waiting, attempt.ended = False, True
        self._cancel_tasks(attempt)
        self._spawn(attempt, self._settle(attempt, result))

    def _cancel_tasks(self, attempt: OrderAttempt) -> None:
        for task, whose in list(self._tasks.items()):
            if whose is attempt:
                task.cancel()

    def _spawn(self, attempt: OrderAttempt, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work, name=f"job {attempt.wire_id}")
        self._tasks[task] = attempt
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        attempt = self._tasks.pop(task)
        if attempt not in self._tasks.values():
            self.attempts.pop(attempt.identity, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("job_broken", job_id=attempt.wire_id, error=repr(error), exc_info=error)
        self._changed.set()

    # -- draining -------------------------------------------------------------------------------------------------

    def _give_back_waiting(self) -> int:
        waiting = [attempt for attempt in self.attempts.values() if attempt.waiting]
        for attempt in waiting:
            self._withdraw(attempt, self._given_back(attempt))
        return len(waiting)

    def _give_back_running(self) -> int:
        running = [one for one in self.attempts.values() if one.begun_at is not None and not one.ended]
        for attempt in running:
            attempt.cut(StopCause.GIVEN_BACK)
        for attempt in self.attempts.values():
            attempt.stop_keeping()  # report the work as done, or the lease expires and it runs again
        return len(running)

    async def _until(self, reached: Callable[[], bool], seconds: float, hurry: asyncio.Event) -> None:
        """Waits until `reached` is true, at most `seconds`, or until `hurry` is set."""
        limit = asyncio.ensure_future(sleep_or_stop(self.clock, hurry, seconds))
        try:
            while not reached() and not limit.done():
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({changed, limit}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            limit.cancel()
            await asyncio.gather(limit, return_exceptions=True)

    async def _close(self) -> None:
        left = list(self._tasks)
        if self._present is not None:
            left.append(self._present)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._cancels is not None:
            await self._cancels.stop()
        await self._handlers.close()


def _topic(spec: JobSpec) -> str:
    if not re.fullmatch(TOPIC_PATTERN, spec.type):
        raise OptionInvalid(
            option="job type",
            value=spec.type,
            expected="on the bus it is a topic: words of letters, digits, - and _ with dots between",
        )
    return spec.type


def _order_of_body(body: object) -> JobOrder | None:
    """Returns the order of a packet. A scheduler without dispatches sends a bare request."""
    if isinstance(body, JobRequest):
        return JobOrder(request=body, dispatch=Dispatch())
    return body if isinstance(body, JobOrder) else None


def _is_superseded(older: OrderAttempt, newer: OrderAttempt) -> bool:
    """Whether the same scheduler dispatched the same job again. For our own control plane the ledger decides that."""
    same = older.wire_id == newer.wire_id and older.sender_id == newer.sender_id
    return same and not older.asks
