"""Takes in what clients send over the bus: job requests and wishes to cancel (BUS-2, BUS-11).

A request that is in the ledger is accepted, and one that is not is refused aloud: an alert says why, and a client whose job id nobody
has used gets a result; one that found no room may be sent again under the same id. A request that is repeated after its job has ended gets that result again. While the ledger is away nothing is
answered, and a bus that keeps requests brings them again.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from trellis.bus.ends.families import Families
from trellis.bus.ends.publisher import ENDS, result_of
from trellis.bus.envelope import PacketRefused
from trellis.bus.errors import BusError, RequestInvalid, TopicFull
from trellis.bus.messages import (
    ALERT,
    CANCEL,
    RESULT,
    SUBMIT,
    Alert,
    Dispatch,
    ErrorCode,
    JobCancel,
    JobResult,
    Order,
    Packet,
    Severity,
    Status,
)
from trellis.bus.port import Bus, Listening, Received
from trellis.bus.reporting.reports import attempt_in
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.room import Room
from trellis.bus.topics import Topics
from trellis.bus.wire.alerts import AlertLimit
from trellis.engine import tracing
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
from trellis.engine.ownership import may_link_on_bus, scoped_key, submitter_of
from trellis.engine.principal_names import sender_name
from trellis.engine.records import Job, Place
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB

GROUP = "trellis"
"""The queue group of every process of the control plane."""
TEXT_CHARS_MAX = 500

_log = log_of("trellis.bus.scheduling.intake")


@dataclass(kw_only=True)
class Intake:
    """Listens for requests and cancels, with all other processes of the control plane as one."""

    ledger: Ledger
    bus: Bus
    topics: Topics
    room: Room
    accepted: Callable[[], None] | None = None
    """Called when a new job is in the ledger."""
    cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT
    """How long after a soft cancel a job that goes on is ended."""
    limit: AlertLimit | None = None
    """How often people are told of requests that are refused; None for every time."""
    _listening: list[Listening] = field(default_factory=list[Listening])

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

    async def on_submit(self, received: Received) -> None:
        """One request. Raises LedgerError, and then the bus may bring it again."""
        packet = received.packet
        said = packet.body.request if isinstance(packet.body, Order) else packet.body
        if not isinstance(said, JobRequest):
            _log.warning("not_a_request", sender=packet.sender_id, body=type(said).__name__)
            return
        try:
            request = JobRequest.checked(said.model_dump(mode="json", exclude_defaults=True, warnings=False))
            answer = await self._submit(packet, request)
        except TopicFull as error:
            await self._refuse(packet, said.job_id, str(error), ErrorCode.RESOURCE_EXHAUSTED)
            return
        except (InputError, Refused) as error:
            await self._refuse(packet, said.job_id, str(error), ErrorCode.INVALID_INPUT)
            return
        if isinstance(answer, Mismatch):
            await self._alert(packet, said.job_id, ErrorCode.DUPLICATE, _used_before(answer))
        elif not answer.created:
            await self._tell_again(answer.job_id, packet.trace_id)
        elif self.accepted is not None:
            self.accepted()

    async def _tell_again(self, job_id: JobId, trace_id: str) -> None:
        """Whoever asks again for a job that has ended may have missed its result: a bus can lose all that it has kept."""
        ended = [event for event in await self.ledger.events(job_id) if event.type in ENDS]
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
                raise RequestInvalid(detail=detail)
            sender = Actor(role=Role.GATEWAY, name=sender_name(packet.sender_id))
            job = await scoped_key(self.ledger, job, sender.name)
            await self.room.take(job, self.topics)
            return (await self.ledger.submit(sender, [job]))[0]

    async def on_refused(self, subject: str, error: PacketRefused) -> None:
        """A packet that the bus dropped, after it has told people: the client of a request that does not fit is told too."""
        if subject == SUBMIT and error.error_code is ErrorCode.INVALID_INPUT:
            await self._tell_refused(error.job_id, error.trace_id, error.detail, error.error_code)

    async def on_cancel(self, received: Received) -> None:
        """A client does not want its job any more. What we tell workers is none of it."""
        packet = received.packet
        wish = packet.body
        if not isinstance(wish, JobCancel) or packet.sender_id == self.bus.sender_id:
            return
        job = await self.ledger.job(JobId(wish.job_id))
        if job is None or job.lifecycle != BUS_JOB.name:
            _log.info("cancel_of_unknown_job", job_id=wish.job_id, sender=packet.sender_id)
            return
        if not await self._is_of(job, packet.sender_id):
            reason = "only who submitted a job cancels it over the bus"
            await self._alert(packet, job.job_id, ErrorCode.PERMISSION_DENIED, f"{packet.sender_id}: {reason}")
            return
        if not await self._is_meant(job, wish.dispatch):
            _log.info("cancel_of_another_attempt", job_id=job.job_id, sender=packet.sender_id)
            return
        job = await self._open_form(job)
        await self.ledger.cancel(
            Actor(role=Role.SUBMITTER, name=sender_name(packet.sender_id)),
            job.job_id,
            CancelMode.SOFT,
            RequestId(f"bus-cancel:{job.job_id}"),
            grace_s=self.cancel_grace_s,
            cause=wish.reason[:TEXT_CHARS_MAX] or None,
        )

    async def _open_form(self, job: Job) -> Job:
        """The job, or the one that does it again: who does not want the one does not want the other."""
        if job.place is not Place.ENDED:
            return job
        standing = await Families(ledger=self.ledger, topics=self.topics).stands_as(job)
        return job if standing is None else standing.job

    async def _is_of(self, job: Job, sender_id: str) -> bool:
        """Whether this sender submitted the job. Older jobs name their senders as they are; who came by another way is named in its request."""
        submitter = await submitter_of(self.ledger, job)
        if submitter != sender_id:
            return submitter == sender_name(sender_id)
        request = await Families(ledger=self.ledger, topics=self.topics).request(job.job_id)
        events = await self.ledger.events(job.job_id)
        return events[0].role is Role.GATEWAY and request is not None and request.principal_id != sender_id

    async def _is_meant(self, job: Job, dispatch: Dispatch | None) -> bool:
        """Whether a wish that names a handing-out names the one that the job is in; most name none."""
        if dispatch is None or not dispatch.dispatch_id:
            return True
        attempt = attempt_in(await self.ledger.events(job.job_id), job.epoch)
        return attempt is not None and attempt.dispatch_id == dispatch.dispatch_id

    async def _refuse(self, packet: Packet, job_id: str, reason: str, code: ErrorCode) -> None:
        """Say that it cannot be taken; to the client too, when the id is nobody else's job."""
        await self._alert(packet, job_id, code, reason)
        await self._tell_refused(job_id, packet.trace_id, reason, code)

    async def _tell_refused(self, job_id: str, trace_id: str, reason: str, code: ErrorCode) -> None:
        if not re.fullmatch(JOB_ID_PATTERN, job_id) or await self.ledger.job(JobId(job_id)) is not None:
            return
        result = JobResult(
            job_id=job_id,
            status=Status.FAILED,
            worker_id=self.bus.sender_id,
            error_code=code.name,
            error_message=reason[:TEXT_CHARS_MAX],
            error_code_enum=code.value,
        )
        await self.bus.publish(RESULT, result, trace_id=trace_id)

    async def _alert(self, packet: Packet, job_id: str, code: ErrorCode, message: str) -> None:
        left_out = 0 if self.limit is None else self.limit.left_out(code)
        if left_out is None:
            return
        _log.warning("request_refused", job_id=job_id, sender=packet.sender_id, code=code.name, reason=message)
        details = {"job_id": job_id, "sender_id": packet.sender_id, "trace_id": packet.trace_id}
        if left_out:
            details["left_out"] = str(left_out)
        alert = Alert(
            message=message[:TEXT_CHARS_MAX],
            code=code,
            severity=Severity.WARNING,
            details={name: text[:TEXT_CHARS_MAX] for name, text in details.items()},
        )
        try:
            await self.bus.publish(ALERT, alert, trace_id=packet.trace_id)
        except BusError as error:
            _log.warning("alert_not_sent", error=str(error))


def _used_before(answer: Mismatch) -> str:
    return f"{answer.key} was used before for another request (job {answer.job_id}); choose another id or key"
