"""Takes in what clients send over the bus: job requests and wishes to cancel (BUS-2, BUS-11).

A request that is in the ledger is accepted, and one that is not is refused aloud: an alert says why, and a client whose job id nobody
has used gets a result; one that found no room may be sent again under the same id. A request that is repeated after its job has ended
gets that result again. One that repeats an idempotency key under another job id is refused as DUPLICATE, under its own id: the first job
does the work. While the ledger is away nothing is answered, and a bus that keeps requests brings them again.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from trellis.bus.ends.families import JobTree
from trellis.bus.ends.publisher import END_EVENTS, result_of
from trellis.bus.envelope import NAME_CHARS_MAX, PacketRefused
from trellis.bus.errors import BusError, BusRequestInvalid, TopicFull
from trellis.bus.messages import (
    CANCEL,
    RESULT,
    SUBMIT,
    Dispatch,
    ErrorCode,
    JobCancel,
    JobOrder,
    JobResult,
    Packet,
    Status,
)
from trellis.bus.port import Bus, BusSubscription, ReceivedPacket
from trellis.bus.reporting.reports import attempt_in
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.room import BacklogLimit
from trellis.bus.scheduling.early_cancels import EarlyCancels
from trellis.bus.topics import Topics
from trellis.bus.wire.alerts import AlertLimit, AlertRates, AlertSender
from trellis.bus.wire_ids import read_wire_id
from trellis.engine import tracing
from trellis.engine.clock import Clock
from trellis.engine.errors import InputError, Refused
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
from trellis.engine.ownership import is_of_sender, may_link_on_bus, scoped_key, submitter_of
from trellis.engine.principal_names import sender_name
from trellis.engine.records import Job, JobPlace
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB

GROUP = "trellis"
"""The queue group of every process of the control plane."""
TEXT_CHARS_MAX = 500
REFUSALS = AlertRates(at_once=100, every_s=0.1, all_at_once=1_000, all_every_s=0.01)
"""How many refusals are told as results; everybody hears all results, and a client of many requests needs all of its own."""
REFUSED_ID_CHARS_MAX = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

_log = log_of("trellis.bus.scheduling.intake")


@dataclass(kw_only=True)
class BusIntake:
    """Listens for requests and cancels, with all other processes of the control plane as one."""

    ledger: Ledger
    bus: Bus
    topics: Topics
    room: BacklogLimit
    clock: Clock
    accepted: Callable[[], None] | None = None
    """Called when a new job is in the ledger."""
    works_on: Callable[[str, str], Awaitable[None]] | None = None
    """Called with a wire id and a sender's id when a request shows that this sender has begun, if it is the worker."""
    cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT
    """How long after a soft cancel a job that goes on is ended."""
    _listening: list[BusSubscription] = field(default_factory=list[BusSubscription])
    _alerts: AlertSender = field(init=False)
    _early: EarlyCancels = field(init=False)
    _refusals: AlertLimit = field(init=False)

    def __post_init__(self) -> None:
        self._alerts = AlertSender(bus=self.bus, limit=AlertLimit(self.clock))
        self._refusals = AlertLimit(self.clock, REFUSALS)
        self._early = EarlyCancels(clock=self.clock, carry_out=self._cancel)

    async def start(self) -> None:
        """Listen, also to what the bus itself refuses: a request that does not fit has a client that waits."""
        self.bus.on_refused = self.on_refused
        self._listening.append(await self.bus.listen(SUBMIT, self.on_submit, group=GROUP, durable=True))
        self._listening.append(await self.bus.listen(CANCEL, self.on_cancel, group=GROUP))

    async def stop(self) -> None:
        """Finish what is under way."""
        self.bus.on_refused = None
        while self._listening:
            await self._listening.pop().stop()
        await self._early.stop()

    async def on_submit(self, received: ReceivedPacket) -> None:
        """One request. Raises LedgerError, and then the bus may bring it again."""
        packet = received.packet
        said = packet.body.request if isinstance(packet.body, JobOrder) else packet.body
        if not isinstance(said, JobRequest):
            _log.warning("not_a_request", sender=packet.sender_id, body=type(said).__name__)
            return
        try:
            request = JobRequest.checked(said.model_dump(mode="json", exclude_defaults=True, warnings=False))
            self._early.of_request(request.job_id, packet.sender_id, packet.created_at)  # forgets what is older than it
            answer = await self._submit(packet, request)
        except TopicFull as error:
            await self._refuse(packet, said.job_id, str(error), ErrorCode.RESOURCE_EXHAUSTED)
            return
        except (InputError, Refused) as error:
            await self._refuse(packet, said.job_id, str(error), ErrorCode.INVALID_INPUT)
            return
        if isinstance(answer, Mismatch):
            await self._refuse(packet, said.job_id, _is_mismatch(answer), ErrorCode.DUPLICATE)
        elif answer.job_id != request.job_id:
            await self._tell_refused(packet, said.job_id, _is_repeated(answer), ErrorCode.DUPLICATE)
        else:
            await self._taken_in(packet, answer)
            await self._note_worker(packet.sender_id, request.parent_job_id)

    async def _taken_in(self, packet: Packet, answer: Submitted) -> None:
        """The ledger has this job, now or since an earlier request."""
        early = self._early.of_request(answer.job_id, packet.sender_id, packet.created_at)
        if early is not None and await self._cancel(early):
            self._early.forget(early)
        if not answer.created:
            await self._tell_again(answer.job_id, packet.trace_id)
        elif self.accepted is not None:
            self.accepted()

    async def _tell_again(self, job_id: JobId, trace_id: str) -> None:
        """Whoever asks again for a job that has ended may have missed its result: a bus can lose all that it has kept."""
        ended = [event for event in await self.ledger.events(job_id) if event.type in END_EVENTS]
        if not ended:
            return
        try:
            result = result_of(ended[-1], self.bus.sender_id)
            # Without the message id of the packet before it: a bus that keeps packets would take it for that one.
            await self.bus.publish(RESULT, result, trace_id=trace_id)
        except BusError as error:
            _log.info("result_not_told_again", job_id=job_id, error=str(error))  # the client may ask once more

    async def _submit(self, packet: Packet, request: JobRequest) -> Submitted | Mismatch:
        about: dict[str, tracing.Value] = {
            "trellis.job_id": request.job_id,
            "trellis.correlation_id": packet.trace_id,
        }
        came = tracing.readable(request.env.get(tracing.IN_ENV))
        with tracing.carried(came, f"job.submit {request.topic}", about, kind=tracing.CONSUMER):
            job = new_bus_job(request, self.topics, trace_id=packet.trace_id, trace=tracing.here())
            if not await may_link_on_bus(self.ledger, packet.sender_id, job.parent_id):
                detail = f"parent_job_id: {packet.sender_id} neither submitted {job.parent_id} nor works on it"
                raise BusRequestInvalid(detail=detail)
            sender = Actor(role=Role.GATEWAY, name=sender_name(packet.sender_id))
            job = await scoped_key(self.ledger, job, sender.name)
            await self.room.admit(job, self.topics)
            return (await self.ledger.submit(sender, [job]))[0]

    async def _note_worker(self, sender_id: str, named: str) -> None:
        """A worker that submits parts of a job under its wire id has got its order and has begun. A submitter's own parts show nothing."""
        found = read_wire_id(named)
        if found is None or self.works_on is None:
            return
        parent = await self.ledger.job(found[0])
        if parent is not None and not await is_of_sender(self.ledger, parent, sender_id):
            await self.works_on(named, sender_id)

    async def on_refused(self, subject: str, error: PacketRefused) -> None:
        """A packet that the bus dropped, after it has told people: the client of a request that does not fit is told too."""
        if subject == SUBMIT and error.error_code is ErrorCode.INVALID_INPUT:
            await self._tell_refused(error, error.job_id, error.detail, error.error_code)

    async def on_cancel(self, received: ReceivedPacket) -> None:
        """A client does not want its job any more. What we tell workers is none of it."""
        packet = received.packet
        wish = packet.body
        if not isinstance(wish, JobCancel) or packet.sender_id == self.bus.sender_id:
            return
        may_come = re.fullmatch(JOB_ID_PATTERN, wish.job_id) and read_wire_id(wish.job_id) is None
        if may_come:
            self._early.keep(packet)  # before the look: its request may be taken in meanwhile
        if await self._cancel(packet):
            self._early.forget(packet)
        elif not may_come:
            _log.info("cancel_of_unknown_job", job_id=wish.job_id, sender=packet.sender_id)

    async def _cancel(self, packet: Packet) -> bool:
        """Cancel the job that the packet names, if its sender may; False when there is no such job."""
        wish = packet.body
        job = await self.ledger.job(JobId(wish.job_id)) if isinstance(wish, JobCancel) else None
        if job is None or not isinstance(wish, JobCancel):
            return False
        if job.lifecycle != BUS_JOB.name:
            _log.info("cancel_of_unknown_job", job_id=wish.job_id, sender=packet.sender_id)
            return True
        if not await self._is_of(job, packet.sender_id):
            reason = "only who submitted a job cancels it over the bus"
            await self._alert(packet, job.job_id, ErrorCode.PERMISSION_DENIED, f"{packet.sender_id}: {reason}")
            return True
        if not await self._is_meant(job, wish.dispatch):
            _log.info("cancel_of_another_attempt", job_id=job.job_id, sender=packet.sender_id)
            return True
        job = await self._open_form(job)
        await self.ledger.cancel(
            Actor(role=Role.SUBMITTER, name=sender_name(packet.sender_id)),
            job.job_id,
            CancelMode.SOFT,
            RequestId(f"bus-cancel:{job.job_id}"),
            grace_s=self.cancel_grace_s,
            cause=wish.reason[:TEXT_CHARS_MAX] or None,
        )
        return True

    async def _open_form(self, job: Job) -> Job:
        """The job, or the one that does it again: who does not want the one does not want the other."""
        if job.place is not JobPlace.ENDED:
            return job
        standing = await JobTree(ledger=self.ledger, topics=self.topics).effective_job(job)
        return job if standing is None else standing.job

    async def _is_of(self, job: Job, sender_id: str) -> bool:
        """Whether this sender submitted the job. Older jobs name their senders as they are; who came by another way is named in its request."""
        submitter = await submitter_of(self.ledger, job)
        if submitter != sender_id:
            return submitter == sender_name(sender_id)
        request = await JobTree(ledger=self.ledger, topics=self.topics).request(job.job_id)
        events = await self.ledger.events(job.job_id)
        return events[0].role is Role.GATEWAY and request is not None and request.principal_id != sender_id

    async def _is_meant(self, job: Job, dispatch: Dispatch | None) -> bool:
        """Whether a wish that names a handing-out names the one that the job is in; most name none."""
        if dispatch is None or dispatch == Dispatch():
            return True
        attempt = attempt_in(await self.ledger.events(job.job_id), job.epoch)
        return attempt is not None and attempt.objection(dispatch.worker_id or attempt.worker, dispatch) is None

    async def _refuse(self, packet: Packet, job_id: str, reason: str, code: ErrorCode) -> None:
        """Say that it cannot be taken; to the client too, when the id is nobody else's job."""
        await self._alert(packet, job_id, code, reason)
        await self._tell_refused(packet, job_id, reason, code)

    async def _tell_refused(self, packet: Packet | PacketRefused, named: str, reason: str, code: ErrorCode) -> None:
        """The client hears it under its own id, also one that no job can have (cut, and without control characters); unless that is the
        id or the wire id of somebody's job: everybody would take it for that job's result.
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
        """Whether a job has this id, or this wire id is of one."""
        found = read_wire_id(named)
        ids = [named] if found is None else [named, found[0]]
        usable = [JobId(one) for one in ids if re.fullmatch(JOB_ID_PATTERN, one)]
        return any([await self.ledger.job(one) is not None for one in usable])

    async def _alert(self, packet: Packet, job_id: str, code: ErrorCode, message: str) -> None:
        details = {"job_id": job_id, "trace_id": packet.trace_id}
        await self._alerts.send(code, message, about=packet.sender_id, trace_id=packet.trace_id, details=details)


def _is_mismatch(answer: Mismatch) -> str:
    return f"{answer.key} was used before for another request (job {answer.job_id}); choose another id or key"


def _is_repeated(answer: Submitted) -> str:
    return (
        f"its idempotency key was used before: job {answer.job_id} does the work, and its result comes under that id; "
        "use a new key for new work"
    )
