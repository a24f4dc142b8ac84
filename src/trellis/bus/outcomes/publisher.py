"""Publishes the ledger's decisions on the bus (BUS-12).

It publishes each end of a job to its client, and each revoked attempt to its worker.

It follows the feed. While the bus is down it keeps its position, so nothing is lost. A success that this process records
itself is published at once (`ending`), and the feed, read more seldom then, only confirms it. A packet whose
acknowledgement was lost is sent again with the same message id. Where the bus stores results, a result counts as sent when it is stored. A
client receives exactly the end that the ledger has, under its own job id; workers only ever use wire ids.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trellis.bus.errors import BusError, BusUnavailable, NotKept, TooLargeToKeep
from trellis.bus.messages import (
    ALERT,
    CANCEL,
    DEAD_LETTERS,
    NAME_CHARS_MAX,
    POINTER_CHANGED,
    RESULT,
    AlertSeverity,
    BusAlert,
    ErrorCode,
    JobCancel,
    JobResult,
    Status,
    error_number,
)
from trellis.bus.outcomes.attempts import WorkerReport, attempt_in, report_in
from trellis.bus.outcomes.linked_jobs import next_id
from trellis.bus.port import Bus
from trellis.bus.requests import wire_id
from trellis.bus.topics import Topics
from trellis.bus.trigger import CoalescedTrigger
from trellis.engine import tracing
from trellis.engine.jobs import JobId
from trellis.engine.logs import log_of
from trellis.engine.records import Event, event_id
from trellis.engine.subscription import FeedReport, FeedSubscriber, SubscriptionOptions, TakenOver
from trellis.lifecycles.bus_job import BUS_JOB, HELD

SUBSCRIBER_NAME = "bus-publisher"
FOLLOW_DEFAULT = SubscriptionOptions(gather_s=0.01, rest_s=0.05, save_every_s=0.1)
"""How the services of the bus follow the feed. What they do twice after a crash has the same ids, and so one effect.

Pages need no action where single jobs succeed: their results were published at once. After such a page, an end that is
published from the feed, or a step that waits for another, may wait `rest_s` longer.
"""
CONCURRENCY = 32
AHEAD_MAX = 10_000
"""Most successes that are published before the feed was read up to them. Further ones wait for the feed."""
ENDING_S_MAX = 5.0
"""How long the feed waits for a success that is being published at once, in seconds; then it publishes it."""
UNKEPT_RETRY_S_MAX = 30.0
"""How long results wait for a stream that refuses them, in seconds.

After that they go only to current subscribers, until the stream takes one again.
"""
KEPT_SUBJECTS = frozenset({RESULT, DEAD_LETTERS})
"""Subjects whose packets count as sent when a stream has stored them, where there are streams."""
END_EVENTS = frozenset({"job_succeeded", "job_failed", "job_cancelled", "job_denied", "job_timed_out"})
ATTEMPT_REVOKED_EVENTS = frozenset({"job_cancelled", "job_timed_out", "job_lease_expired"})
"""Events that end an attempt whose worker may still be running it, if the job was held."""
PUBLISHED_EVENTS = END_EVENTS | ATTEMPT_REVOKED_EVENTS
DEAD_LETTER_STATES = frozenset({"FAILED", "TIMEOUT", "DENIED"})
"""Ends that are also published on `sys.job.dlq`, unless the job is retried."""
WORKER_STATUSES = frozenset({Status.FAILED_RETRYABLE, Status.FAILED_FATAL})
"""Failure statuses of a worker that are passed on to the client. In the ledger both are FAILED."""
ENGINE_STATUS_NAMES = frozenset({Status.TIMEOUT.name, Status.DENIED.name, Status.CANCELLED.name})
"""Ends that only the control plane decides.

A worker that reports one only fails its job; its status is added to the message.
"""
ENGINE_ERROR_CODES = frozenset({ErrorCode.SAFETY_DENIED, ErrorCode.TIMEOUT})
"""Error codes that clients take for such an end."""
ERROR_OF_STATE = {
    "DENIED": ("SAFETY_DENIED", ErrorCode.SAFETY_DENIED),
    "TIMEOUT": ("TIMEOUT", ErrorCode.TIMEOUT),
    "CANCELLED": ("CANCELLED", ErrorCode.UNSPECIFIED),
}

_log = log_of("trellis.bus.outcomes.publisher")


@dataclass(frozen=True, kw_only=True, slots=True)
class BusPublishReport(FeedReport):
    """Result of one pass. It is held up while the bus does not take everything."""

    sent: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _OutgoingMessage:
    subject: str
    body: JobResult | JobCancel | BusAlert
    message_id: str


class EndPublication:
    """The publication of one success, by the process that records it. Between `ending` and the end of this, the feed waits.

    Either `publish` is called, once the ledger has the success, or `drop`.
    """

    def __init__(self, publisher: "BusPublisher", job_id: JobId) -> None:
        self._publisher, self._job_id = publisher, job_id
        self._over = asyncio.Event()

    def publish(self, version: int, report: WorkerReport, trace_id: str) -> None:
        """Publish the success that the ledger has recorded as this version of the job. Returns at once."""
        self._publisher.start_publishing(self._run(version, report, trace_id))

    def drop(self) -> None:
        """There is no success, or the feed shall publish it."""
        self._publisher.has_ended(self._job_id, self)
        self._over.set()

    async def wait(self) -> None:
        """Return when it is over; after `ENDING_S_MAX` seconds it is dropped."""
        try:
            async with asyncio.timeout(ENDING_S_MAX):
                await self._over.wait()
        except TimeoutError:
            self.drop()

    async def _run(self, version: int, report: WorkerReport, trace_id: str) -> None:
        try:
            if not self._over.is_set():
                is_sent = await self._publisher.publish_success(self._job_id, version, report, trace_id)
                if is_sent and not self._over.is_set():
                    self._publisher.was_sent(event_id(self._job_id, version))
        finally:
            self.drop()


@dataclass(kw_only=True)
class BusPublisher(FeedSubscriber[SubscriptionOptions]):
    """The service. A pass reads a page of the feed, publishes from it, and saves the position."""

    bus: Bus
    topics: Topics
    options: SubscriptionOptions = FOLLOW_DEFAULT
    name: str = SUBSCRIBER_NAME
    follows_as: str = SUBSCRIBER_NAME
    lifecycle: str | frozenset[str] | None = BUS_JOB.name
    types: frozenset[str] | None = PUBLISHED_EVENTS
    _sent: set[str] = field(default_factory=set[str])
    """Message ids that the bus has taken, of events after the position up to which everything is done."""
    _not_kept_since: dict[str, float] = field(default_factory=dict[str, float])
    """By subject: since when its stream refuses packets."""
    _ending: dict[JobId, EndPublication] = field(default_factory=dict[JobId, EndPublication])
    """Successes that are being recorded and published by this process."""
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set["asyncio.Task[None]"])
    _trigger: CoalescedTrigger[BusPublishReport] = field(init=False)

    def __post_init__(self) -> None:
        self._trigger = CoalescedTrigger(
            run=self._pass,
            more=lambda report: bool(report.events) and not report.held_up,
            gap_s=self.options.gather_s,
        )

    async def run_once(self) -> BusPublishReport:
        """Publish one page, as far as the bus takes it."""
        return await self._trigger.once()

    def wake(self) -> None:
        """Request a pass because a job has ended, if this process publishes."""
        if self.follows:
            self._trigger.wake()

    # --- successes that this process records ----------------------------------------------------------------------

    def ending(self, job_id: JobId) -> EndPublication | None:
        """Announce that this process is about to record the success of a job, and will publish it at once.

        None if the feed must do it: another process publishes, the bus is down, or too many are ahead of the feed.
        """
        is_possible = self.follows and self.bus.connected and not self._not_kept_since
        if not is_possible or job_id in self._ending or len(self._sent) + len(self._ending) >= AHEAD_MAX:
            return None
        ending = self._ending[job_id] = EndPublication(self, job_id)
        return ending

    def has_ended(self, job_id: JobId, ending: EndPublication) -> None:
        """Forget the announced success of a job."""
        if self._ending.get(job_id) is ending:
            del self._ending[job_id]

    def start_publishing(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the publication of a success. `release` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def was_sent(self, message_id: str) -> None:
        """Note a packet that the bus has taken, so that the feed does not send it again."""
        if self.follows:
            self._sent.add(message_id)

    async def publish_success(self, job_id: JobId, version: int, report: WorkerReport, trace_id: str) -> bool:
        """Publish a success that this process has recorded. Returns whether it is done; the feed publishes it otherwise."""
        result = _result(job_id, "SUCCEEDED", report, None, self.bus.sender_id)
        note = _OutgoingMessage(subject=RESULT, body=result, message_id=event_id(job_id, version))
        about = _EventAbout(id=note.message_id, job_id=job_id, target="SUCCEEDED", trace_id=_trace(trace_id, job_id))
        is_done = self.follows and await self._publish_note(about, note)
        if not is_done:
            self.wake()
        return is_done

    async def _pass(self) -> BusPublishReport:
        page = await self.page()
        if page is None:
            return BusPublishReport()
        try:
            if not page.events:
                await self.keep()
                return BusPublishReport(following=True)
            sent, done = await self._publish_events(page.events)
            if done:
                await self.remember(page.positions[done - 1])
                for event in page.events[:done]:
                    self._sent -= {
                        event.id,
                        _message_id(event, "stop"),
                        _message_id(event, "alert"),
                        _message_id(event, "dlq"),
                    }
            else:
                await self.keep()
        except TakenOver:
            self._sent.clear()
            return BusPublishReport(events=len(page.events))
        held_up = done < len(page.events)
        return BusPublishReport(
            following=True, events=len(page.events), sent=sent, held_up=held_up, needed_nothing=not (sent or held_up)
        )

    async def release(self) -> None:
        """Finish the requested passes, then release the subscription."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._trigger.drain()
        await super().release()

    async def _publish_events(self, events: Sequence[Event]) -> tuple[int, int]:
        """How many packets were sent, and the number of events that are completely published."""
        sent = 0
        for start in range(0, len(events), CONCURRENCY):
            group = events[start : start + CONCURRENCY]
            left = [number for number, event in enumerate(group) if not self._is_published(event)]
            answers = await asyncio.gather(*(self._publish_event(group[number]) for number in left))
            sent += sum(answer or 0 for answer in answers)
            if None in answers:
                return sent, start + left[answers.index(None)]
            await self.keep()
        return sent, len(events)

    async def _publish_event(self, event: Event) -> int | None:
        """How many packets were sent now; None when the bus did not take them all."""
        ending = self._ending.get(event.job_id)
        if ending is not None and event.type == "job_succeeded":
            await ending.wait()
        if self._is_published(event):
            return 0
        sent, about = 0, _about(event)
        for note in await self._notes(event):
            if note.message_id in self._sent:
                continue
            if not self.bus.connected or not await self._publish_note(about, note):
                return None
            self._sent.add(note.message_id)
            sent += 1
        return sent

    def _is_published(self, event: Event) -> bool:
        """Whether this is a success that was published before the feed was read up to it."""
        return event.type == "job_succeeded" and event.id in self._sent

    async def _publish_note(self, event: "_EventAbout", note: _OutgoingMessage) -> bool:
        """Whether the packet need not be sent again."""
        with await self._span(event, note) as span:
            return await self._publish_message(event, note, span)

    async def _span(self, event: "_EventAbout", note: _OutgoingMessage) -> tracing.Span:
        """A span in the trace of the job's submitter. The ledger is read only where tracing is on."""
        job = await self.ledger.job(event.job_id) if tracing.is_on() else None
        if job is None:
            return tracing.Span()
        what = "publish" if note.subject == RESULT else "stop"
        about = {**tracing.of_job(job), "trellis.event_id": event.id, "trellis.status": event.target}
        return tracing.carried(job.trace, f"job.{what} {job.type}", about, kind=tracing.PRODUCER)

    async def _publish_message(self, event: "_EventAbout", note: _OutgoingMessage, span: tracing.Span) -> bool:
        """Whether the packet need not be sent again."""
        kept = note.subject in KEPT_SUBJECTS
        try:
            await self.bus.publish(
                note.subject, note.body, trace_id=event.trace_id, message_id=note.message_id, kept=kept
            )
        except BusUnavailable as error:
            span.fail(str(error))
            _log.info("held_up", event_id=event.id, error=str(error))
            return False
        except TooLargeToKeep as error:
            # Current subscribers have received it. Other results must not wait, because waiting does not help.
            span.fail(str(error))
            _log.error("never_kept", event_id=event.id, error=str(error))
            return True
        except NotKept as error:
            span.fail(str(error))
            return self._goes_unkept(event, note.subject, error)
        except BusError as error:
            # No bus will ever take it, so the events after it must not wait.
            span.fail(str(error))
            _log.error("cannot_be_told", event_id=event.id, error=str(error))
            return True
        if kept:
            self._not_kept_since.pop(note.subject, None)
        return True

    def _goes_unkept(self, event: "_EventAbout", subject: str, error: NotKept) -> bool:
        """Whether to go on without the stream.

        A full stream is waited for; one that keeps refusing must not block everything.
        """
        now = self.clock.monotonic()
        if subject not in self._not_kept_since:
            self._not_kept_since[subject] = now
            _log.warning("not_kept", event_id=event.id, error=str(error))
        return now >= self._not_kept_since[subject] + UNKEPT_RETRY_S_MAX

    async def _notes(self, event: Event) -> list[_OutgoingMessage]:
        notes: list[_OutgoingMessage] = []
        if event.type in ATTEMPT_REVOKED_EVENTS and event.source in HELD:
            notes += await self._stop(event)
        if event.type in END_EVENTS:
            again = await self._successor(event) if event.target in DEAD_LETTER_STATES else None
            result = result_of(event, self.bus.sender_id, again=again)
            notes.append(_OutgoingMessage(subject=RESULT, body=result, message_id=event.id))
            if event.target in DEAD_LETTER_STATES and again is None:
                notes.append(_OutgoingMessage(subject=DEAD_LETTERS, body=result, message_id=_message_id(event, "dlq")))
            if result.error_code == POINTER_CHANGED:
                notes.append(
                    _OutgoingMessage(
                        subject=ALERT, body=_payload_changed(result), message_id=_message_id(event, "alert")
                    )
                )
        return notes

    async def _successor(self, event: Event) -> JobId | None:
        """The id of the job that will retry this one."""
        job = await self.ledger.job(event.job_id)
        events = [one for one in await self.ledger.events(event.job_id) if one.version <= event.version]
        stands = job is not None and job.version == event.version
        return next_id(job, events, self.topics) if job is not None and stands else None

    async def _stop(self, event: Event) -> list[_OutgoingMessage]:
        before = [one for one in await self.ledger.events(event.job_id) if one.version < event.version]
        dispatched = next((one for one in reversed(before) if one.type == "job_dispatched"), None)
        attempt = None if dispatched is None else attempt_in(before, dispatched.epoch)
        if attempt is None:
            return []
        cancel = JobCancel(
            job_id=wire_id(event.job_id, attempt.epoch),
            reason=event.cause or event.target,
            requested_by=self.bus.sender_id,
            dispatch=attempt.dispatch,
        )
        return [_OutgoingMessage(subject=CANCEL, body=cancel, message_id=_message_id(event, "stop"))]


def _message_id(event: Event, kind: str) -> str:
    return f"{event.id}:{kind}"


def _payload_changed(result: JobResult) -> BusAlert:
    """An alert that a payload was overwritten after it was checked, and perhaps approved."""
    return BusAlert(
        message=f"the payload of job {result.job_id} was changed after it was submitted; it was not executed",
        code=ErrorCode.SAFETY_DENIED,
        severity=AlertSeverity.CRITICAL,
        details={"job_id": result.job_id, "error": result.error_message[:NAME_CHARS_MAX]},
    )


class _EventAbout(NamedTuple):
    """What publishing needs to know of an event."""

    id: str
    job_id: JobId
    target: str
    trace_id: str


def _about(event: Event) -> _EventAbout:
    return _EventAbout(event.id, event.job_id, event.target, _trace(event.correlation_id, event.job_id))


def _trace(correlation_id: str, job_id: JobId) -> str:
    return correlation_id if 0 < len(correlation_id) <= NAME_CHARS_MAX else job_id


def result_of(event: Event, sender_id: str, *, again: JobId | None = None) -> JobResult:
    """The result published for the end of a job, with the id of its retry."""
    return _result(event.job_id, event.target, report_in(event), event.cause, sender_id, again=again)


def _result(
    job_id: JobId,
    target: str,
    report: WorkerReport | None,
    cause: str | None,
    sender_id: str,
    *,
    again: JobId | None = None,
) -> JobResult:
    code, number = ERROR_OF_STATE.get(target, ("", ErrorCode.UNSPECIFIED))
    if report is not None and target in {"SUCCEEDED", "FAILED"}:
        code = report.error_code
        number = report.error_code_enum or error_number(code)
    message = report.error_message if report and report.error_message else cause or ""
    if report is not None and target == "FAILED" and report.status in ENGINE_STATUS_NAMES:
        number = ErrorCode.UNSPECIFIED if number in ENGINE_ERROR_CODES else number
        message = f"{message} (its worker reported {report.status})".strip()
    if again is not None:
        message = f"{message}; it is done again as job {again}, unless that is cancelled".removeprefix("; ")
    return JobResult(
        job_id=job_id,
        status=_status(target, report),
        worker_id=sender_id,
        result_ptr=report.result_ptr if report else "",
        execution_ms=report.execution_ms if report else 0,
        error_code=code,
        error_message="" if target == "SUCCEEDED" else message,
        artifact_ptrs=report.artifact_ptrs if report else (),
        error_code_enum=int(number),
        dispatch=report.dispatch if report else None,
        result_ref=report.result_ref if report else None,
        artifact_refs=report.artifact_refs if report else (),
    )


def _status(target: str, report: WorkerReport | None) -> Status:
    """The state of the job or, if its worker reported it, the failure as retryable or fatal."""
    status = Status.__members__.get(report.status) if report is not None and target == "FAILED" else None
    return status if status is not None and status in WORKER_STATUSES else Status[target]
