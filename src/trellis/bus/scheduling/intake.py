"""The intake: job requests and cancel requests that clients send over the bus (BUS-2, BUS-11).

A request is accepted when it is in the ledger. Otherwise it is refused: an alert gives the reason, and the client gets
a result, if no job has that id. A request refused because the topic was full may be sent again under the same id. A
request repeated after its job has ended gets the result again. A request that repeats an idempotency key under another
job id is refused as DUPLICATE, under its own id: the first job does the work. While the ledger is unavailable nothing
is answered, and a bus that stores requests redelivers them.
"""

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime

from trellis.auth.matrices import permit
from trellis.auth.ownership import is_of_sender, may_link_on_bus, scoped_key, submitter_of
from trellis.auth.principals import bus_sender, sender_name
from trellis.bus.errors import BusError, BusRequestInvalid, TopicFull
from trellis.bus.messages import (
    CANCEL,
    NAME_CHARS_MAX,
    RESULT,
    SUBMIT,
    Dispatch,
    ErrorCode,
    JobCancel,
    JobOrder,
    JobResult,
    Packet,
    PacketRefused,
    Status,
)
from trellis.bus.outcomes.attempts import attempt_in
from trellis.bus.outcomes.job_tree import JobTree
from trellis.bus.outcomes.publisher import END_EVENTS, result_of
from trellis.bus.port import Bus, BusSubscription, ReceivedPacket
from trellis.bus.requests import JobRequest, new_bus_job, read_wire_id
from trellis.bus.submitter import BacklogLimit
from trellis.bus.topics import Topics
from trellis.bus.wire.alerts import AlertLimit, AlertRates, AlertSender
from trellis.engine import tracing
from trellis.engine.clock import Clock
from trellis.engine.errors import InputError, LedgerError, NotAllowed, Refused
from trellis.engine.jobs import (
    CANCEL_GRACE_S_DEFAULT,
    JOB_ID_PATTERN,
    Actor,
    CancelMode,
    JobId,
    Mismatch,
    RequestId,
    Submitted,
)
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Job, JobPlace
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB

# Cancel requests that arrive before the request of their job.
#
# Requests may come through a stream while cancels come directly, so a cancel sent right after its request can overtake
# it, and another process may take the request in. A cancel of an unknown job is therefore kept for some seconds. The
# intake of this process checks it when the request arrives. For requests that other processes take in, the ledger is
# read again, for a shorter time.
#
# A cancel created before its request did not overtake it: a client that submits a job again after a cancel wants it
# done.

KEPT_S = 30.0
KEPT_MAX = 1_000
"""Maximum number of kept cancels. When exceeded, the oldest of the sender with the most is dropped."""
SENDER_MAX = 50
"""Maximum number of kept cancels per sender. When exceeded, the sender's oldest is dropped."""
LOOK_AGAIN_S_MAX = 5.0
"""How long the ledger is read for a job that another process takes in, in seconds.

The ledger does not show when its request was created.
"""
LOOK_S_FIRST = 0.25
"""Delay before the ledger is read again, in seconds; doubled each time."""

_log = log_of("trellis.bus.scheduling.intake")
CancelKey = tuple[str, str]
"""The job id, and the sender of the cancel."""


@dataclass(slots=True)
class _EarlyCancel:
    packet: Packet
    since: float
    until: float
    next_at: float
    pause_s: float = LOOK_S_FIRST


@dataclass(kw_only=True)
class EarlyCancels:
    """Cancel requests in this process whose jobs are not in the ledger yet."""

    clock: Clock
    carry_out: Callable[[Packet], Awaitable[bool]]
    """Cancels the job that a packet names; False if there is no such job."""
    _counts: Counter[str] = field(default_factory=Counter[str])
    """Number of kept cancels by sender."""
    _kept: "OrderedDict[CancelKey, _EarlyCancel]" = field(default_factory=OrderedDict[CancelKey, _EarlyCancel])
    _looking: "asyncio.Task[None] | None" = None

    def keep(self, packet: Packet) -> None:
        now, key = self.clock.monotonic(), _key(packet)
        self._drop(key)
        self._kept[key] = _EarlyCancel(packet, since=now, until=now + KEPT_S, next_at=now + LOOK_S_FIRST)
        self._counts[packet.sender_id] += 1
        if self._counts[packet.sender_id] > SENDER_MAX:
            self._drop_oldest(packet.sender_id)
        elif len(self._kept) > KEPT_MAX:
            self._drop_oldest(self._counts.most_common(1)[0][0])
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_again())

    def forget(self, packet: Packet) -> None:
        self._drop(_key(packet))

    def of_request(self, job_id: str, sender_id: str, requested_at: datetime) -> Packet | None:
        """The kept cancel of this job by this sender that overtook its request, if any.

        It stays until it is carried out.
        """
        kept = self._kept.get((job_id, sender_id))
        if kept is None:
            return None
        if kept.until <= self.clock.monotonic() or kept.packet.created_at < requested_at:
            self._drop((job_id, sender_id))
            return None
        return kept.packet

    async def stop(self) -> None:
        """Stop reading the ledger and drop all kept cancels."""
        self._kept.clear()
        self._counts.clear()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_again(self) -> None:
        while self._kept:
            now = self.clock.monotonic()
            next_at = min(kept.next_at for kept in self._kept.values())
            await self.clock.sleep(max(LOOK_S_FIRST / 5, next_at - now))
            for key, kept in list(self._kept.items()):
                await self._look(key, kept)

    async def _look(self, key: CancelKey, kept: _EarlyCancel) -> None:
        now = self.clock.monotonic()
        if now >= kept.until:
            self._drop(key)
            _log.info("cancel_of_unknown_job", job_id=key[0], sender=key[1])
        elif now >= kept.next_at:
            kept.pause_s *= 2
            kept.next_at = min(kept.until, now + kept.pause_s)
            if now > kept.since + LOOK_AGAIN_S_MAX:
                kept.next_at = kept.until
                return
            try:
                if await self.carry_out(kept.packet):
                    self._drop(key)
            except LedgerError as error:
                _log.info("cancel_waits_for_ledger", job_id=key[0], error=str(error))

    def _drop_oldest(self, sender_id: str) -> None:
        self._drop(next(key for key in self._kept if key[1] == sender_id))

    def _drop(self, key: CancelKey) -> None:
        if self._kept.pop(key, None) is not None:
            self._counts[key[1]] -= 1
            if not self._counts[key[1]]:
                del self._counts[key[1]]


def _key(packet: Packet) -> CancelKey:
    named = packet.body.job_id if isinstance(packet.body, JobCancel) else ""
    return named, packet.sender_id


GROUP = "trellis"
"""The queue group of every process of the control plane."""
TEXT_CHARS_MAX = 500
REFUSALS = AlertRates(at_once=100, every_s=0.1, all_at_once=1_000, all_every_s=0.01)
"""Rate limits for refusals published as results.

All clients receive all results, and a client with many requests needs all of its own.
"""
REFUSED_ID_CHARS_MAX = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(kw_only=True)
class BusIntake:
    """Receives requests and cancels, sharing the work with all other processes of the control plane."""

    ledger: Ledger
    bus: Bus
    topics: Topics
    room: BacklogLimit
    clock: Clock
    accepted: Callable[[JobId], Awaitable[None]] | None = None
    """Called when a new job is in the ledger, and its stored request is known to be valid."""
    works_on: Callable[[str, str], Awaitable[None]] | None = None
    """Called with a wire id and a sender id when a request shows that this sender, if it is the worker, has started."""
    cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT
    """How long after a soft cancel a job that still runs is ended, in seconds."""
    _listening: list[BusSubscription] = field(default_factory=list[BusSubscription])
    _alerts: AlertSender = field(init=False)
    _early: EarlyCancels = field(init=False)
    _refusals: AlertLimit = field(init=False)

    def __post_init__(self) -> None:
        self._alerts = AlertSender(bus=self.bus, limit=AlertLimit(self.clock))
        self._refusals = AlertLimit(self.clock, REFUSALS)
        self._early = EarlyCancels(clock=self.clock, carry_out=self._cancel)

    async def start(self) -> None:
        """Subscribe, also to packets that the bus refuses: the client of an invalid request waits for an answer."""
        self.bus.on_refused = self.on_refused
        self._listening.append(await self.bus.listen(SUBMIT, self.on_submit, group=GROUP, durable=True))
        self._listening.append(await self.bus.listen(CANCEL, self.on_cancel, group=GROUP))

    async def stop(self) -> None:
        """Unsubscribe and finish running work."""
        self.bus.on_refused = None
        while self._listening:
            await self._listening.pop().stop()
        await self._early.stop()

    async def on_submit(self, received: ReceivedPacket) -> None:
        """Handle one request. Raises LedgerError; the bus may then redeliver the request."""
        packet = received.packet
        submitted = packet.body.request if isinstance(packet.body, JobOrder) else packet.body
        if not isinstance(submitted, JobRequest):
            _log.warning("not_a_request", sender=packet.sender_id, body=type(submitted).__name__)
            return
        try:
            request = submitted if received.is_checked else _checked(submitted)
            self._early.of_request(request.job_id, packet.sender_id, packet.created_at)  # drops an older cancel
            answer = await self._submit(packet, request)
        except TopicFull as error:
            await self._refuse(packet, submitted.job_id, str(error), ErrorCode.RESOURCE_EXHAUSTED)
            return
        except NotAllowed as error:
            await self._refuse(packet, submitted.job_id, str(error), ErrorCode.PERMISSION_DENIED)
            return
        except (InputError, Refused) as error:
            await self._refuse(packet, submitted.job_id, str(error), ErrorCode.INVALID_INPUT)
            return
        if isinstance(answer, Mismatch):
            await self._refuse(packet, submitted.job_id, _is_mismatch(answer), ErrorCode.DUPLICATE)
        elif answer.job_id != request.job_id:
            await self._tell_refused(packet, submitted.job_id, _is_repeated(answer), ErrorCode.DUPLICATE)
        else:
            await self._taken_in(packet, answer)
            await self._note_worker(packet.sender_id, request.parent_job_id)

    async def _taken_in(self, packet: Packet, answer: Submitted) -> None:
        """The ledger has this job, newly or from an earlier request."""
        early = self._early.of_request(answer.job_id, packet.sender_id, packet.created_at)
        if early is not None and await self._cancel(early):
            self._early.forget(early)
        if not answer.created:
            await self._tell_again(answer.job_id, packet.trace_id)
        elif self.accepted is not None:
            await self.accepted(answer.job_id)

    async def _tell_again(self, job_id: JobId, trace_id: str) -> None:
        """Publish the result of an ended job again. The client may have missed it: a bus can lose stored packets."""
        ended = [event for event in await self.ledger.events(job_id) if event.type in END_EVENTS]
        if not ended:
            return
        try:
            result = result_of(ended[-1], self.bus.sender_id)
            # Without the message id of the first packet: the bus would drop it as a duplicate.
            await self.bus.publish(RESULT, result, trace_id=trace_id)
        except BusError as error:
            _log.info("result_not_told_again", job_id=job_id, error=str(error))  # the client may ask again

    async def _submit(self, packet: Packet, request: JobRequest) -> Submitted | Mismatch:
        about: dict[str, tracing.Value] = {
            "trellis.job_id": request.job_id,
            "trellis.correlation_id": packet.trace_id,
        }
        came = tracing.readable(request.env.get(tracing.IN_ENV))
        with tracing.carried(came, f"job.submit {request.topic}", about, kind=tracing.CONSUMER):
            permitted = permit(bus_sender(packet.sender_id), "jobs.create")
            job = new_bus_job(request, self.topics, trace_id=packet.trace_id, trace=tracing.here())
            if not await may_link_on_bus(self.ledger, packet.sender_id, job.parent_id):
                detail = f"parent_job_id: {packet.sender_id} neither submitted {job.parent_id} nor works on it"
                raise BusRequestInvalid(detail=detail)
            sender = Actor(role=Role.GATEWAY, name=permitted.name)
            job = await scoped_key(self.ledger, job, sender.name)
            await self.room.admit(job, self.topics)
            return (await self.ledger.submit(sender, [job]))[0]

    async def _note_worker(self, sender_id: str, named: str) -> None:
        """Report that a worker has started.

        A worker that submits child jobs under the parent's wire id has received its order.

        Child jobs from the parent's own submitter show nothing.
        """
        parsed = read_wire_id(named)
        if parsed is None or self.works_on is None:
            return
        parent = await self.ledger.job(parsed[0])
        if parent is not None and not await is_of_sender(self.ledger, parent, sender_id):
            await self.works_on(named, sender_id)

    async def on_refused(self, subject: str, error: PacketRefused) -> None:
        """Handle a packet that the bus dropped and alerted about. The client of an invalid request gets a result."""
        if subject == SUBMIT and error.error_code is ErrorCode.INVALID_INPUT:
            await self._tell_refused(error, error.job_id, error.detail, error.error_code)

    async def on_cancel(self, received: ReceivedPacket) -> None:
        """Handle a client's cancel request. Cancels that the control plane sends to workers are ignored."""
        packet = received.packet
        cancel = packet.body
        if not isinstance(cancel, JobCancel) or packet.sender_id == self.bus.sender_id:
            return
        may_come = re.fullmatch(JOB_ID_PATTERN, cancel.job_id) and read_wire_id(cancel.job_id) is None
        if may_come:
            self._early.keep(packet)  # before the ledger is read: the request may be taken in meanwhile
        if await self._cancel(packet):
            self._early.forget(packet)
        elif not may_come:
            _log.info("cancel_of_unknown_job", job_id=cancel.job_id, sender=packet.sender_id)

    async def _cancel(self, packet: Packet) -> bool:
        """Cancel the job that the packet names, if its sender may; False if there is no such job."""
        cancel = packet.body
        job = await self.ledger.job(JobId(cancel.job_id)) if isinstance(cancel, JobCancel) else None
        if job is None or not isinstance(cancel, JobCancel):
            return False
        if job.lifecycle != BUS_JOB.name:
            _log.info("cancel_of_unknown_job", job_id=cancel.job_id, sender=packet.sender_id)
            return True
        try:
            own = await self._is_of(job, packet.sender_id)
            canceller = permit(bus_sender(packet.sender_id), "jobs.cancel", own=own)
        except NotAllowed as error:
            await self._alert(packet, job.job_id, ErrorCode.PERMISSION_DENIED, f"{packet.sender_id}: {error}")
            return True
        if not await self._is_meant(job, cancel.dispatch):
            _log.info("cancel_of_another_attempt", job_id=job.job_id, sender=packet.sender_id)
            return True
        job = await self._open_form(job)
        await self.ledger.cancel(
            canceller,
            job.job_id,
            CancelMode.SOFT,
            RequestId(f"bus-cancel:{job.job_id}"),
            grace_s=self.cancel_grace_s,
            cause=cancel.reason[:TEXT_CHARS_MAX] or None,
        )
        return True

    async def _open_form(self, job: Job) -> Job:
        """The job or, if it has ended, its current retry: a cancel applies to both."""
        if job.place is not JobPlace.ENDED:
            return job
        effective = await JobTree(ledger=self.ledger, topics=self.topics).effective_job(job)
        return job if effective is None else effective.job

    async def _is_of(self, job: Job, sender_id: str) -> bool:
        """Whether this sender submitted the job.

        Older jobs store the bare sender id; a submitter by another way is named in the request.
        """
        submitter = await submitter_of(self.ledger, job)
        if submitter != sender_id:
            return submitter == sender_name(sender_id)
        request = await JobTree(ledger=self.ledger, topics=self.topics).request(job.job_id)
        events = await self.ledger.events(job.job_id)
        return events[0].role is Role.GATEWAY and request is not None and request.principal_id != sender_id

    async def _is_meant(self, job: Job, dispatch: Dispatch | None) -> bool:
        """Whether a cancel that names a dispatch names the current one. Most cancels name none."""
        if dispatch is None or dispatch == Dispatch():
            return True
        attempt = attempt_in(await self.ledger.events(job.job_id), job.epoch)
        return attempt is not None and attempt.objection(dispatch.worker_id or attempt.worker, dispatch) is None

    async def _refuse(self, packet: Packet, job_id: str, reason: str, code: ErrorCode) -> None:
        """Alert that the request is refused, and tell the client unless another job has that id."""
        await self._alert(packet, job_id, code, reason)
        await self._tell_refused(packet, job_id, reason, code)

    async def _tell_refused(self, packet: Packet | PacketRefused, named: str, reason: str, code: ErrorCode) -> None:
        """Publish a refusal as a result under the client's own job id.

        An invalid id is used too, cut and without control characters. Nothing is published if the id is a job id or
        wire id of an existing job: clients would take it for that job's result.
        """
        job_id = _CONTROL.sub("", named)[:REFUSED_ID_CHARS_MAX]
        if not job_id or await self._is_anybodys(job_id):
            return
        if self._refusals.left_out(code, packet.sender_id) is None:
            _log.info("refusal_not_told", sender=packet.sender_id, code=code.name)
            return
        result = JobResult(
            job_id=job_id,
            status=Status.FAILED,
            worker_id=self.bus.sender_id,
            error_code=code.name,
            error_message=reason[:TEXT_CHARS_MAX],
            error_code_enum=code.value,
        )
        await self.bus.publish(RESULT, result, trace_id=packet.trace_id[:NAME_CHARS_MAX] or job_id)

    async def _is_anybodys(self, named: str) -> bool:
        """Whether a job has this id or this wire id."""
        parsed = read_wire_id(named)
        ids = [named] if parsed is None else [named, parsed[0]]
        usable = [JobId(one) for one in ids if re.fullmatch(JOB_ID_PATTERN, one)]
        return any([await self.ledger.job(one) is not None for one in usable])

    async def _alert(self, packet: Packet, job_id: str, code: ErrorCode, message: str) -> None:
        details = {"job_id": job_id, "trace_id": packet.trace_id}
        await self._alerts.send(code, message, about=packet.sender_id, trace_id=packet.trace_id, details=details)


def _checked(submitted: JobRequest) -> JobRequest:
    return JobRequest.checked(submitted.model_dump(mode="json", exclude_defaults=True, warnings=False))


def _is_mismatch(answer: Mismatch) -> str:
    return f"{answer.key} was used before for another request (job {answer.job_id}); choose another id or key"


def _is_repeated(answer: Submitted) -> str:
    return (
        f"its idempotency key was used before: job {answer.job_id} does the work, and its result comes under that id; "
        "use a new key for new work"
    )
