"""Messages of the bus as values, and the validation of their envelopes.

`cap` encodes them as CAP v1 packets and decodes them; the local bus passes them on unchanged. Names are those of CAP. A
request that goes to a worker carries its wire id `<job id>@<epoch>` (D29); all other receivers see the job's own id.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum, StrEnum
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias

from trellis.bus.errors import BusError
from trellis.bus.requests import JobRequest, ResourceRef

SUBMIT = "sys.job.submit"
RESULT = "sys.job.result"
PROGRESS = "sys.job.progress"
CANCEL = "sys.job.cancel"
HEARTBEAT = "sys.heartbeat"
HANDSHAKE = "sys.handshake"
ALERT = "sys.alert"
DEAD_LETTERS = "sys.job.dlq"
"""Subject on which CAP expects jobs that ended badly."""
ASK_FIRST = "trellis.start"
"""Key in a request's env. The worker asks before it starts, and resends its result until it is acknowledged.

Only our own workers know it.
"""
JOB_ID_IN_ENV = "job_id"
"""Key in a request's env: the job's own id, for handlers that recognise work they did before (D29).

A value set by the client stays.
"""
OWN_JOB_ID_IN_ENV = "trellis.job_id"
"""Key in a request's env: the job's own id, always as the control plane has it."""
LEASE_IN_ENV = "trellis.lease_s"
"""Key in a request's env: how long a worker may be silent, in seconds, before the attempt counts as lost."""
START_STEP = "start"
"""Step id with which our own workers ask whether they may start; the message is then their token.

Handlers have no step of this name.
"""
NOT_BEGUN = "NOT_BEGUN"
"""Error code with which our own workers return a job they have not started.

It may go to another worker under the same id.
"""
POINTER_CHANGED = "POINTER_CHANGED"
"""Error code of a job whose payload does not match the digest in its pointer.

The job was not executed, and an alert is sent.
"""
ACCEPTED, STOP, REFUSED = "accepted", "cancel", "refused"
"""First word of the answer to a worker's report.

In order: the report counts; it counts and the job is to be cancelled; it does not count.
"""


def direct_subject(worker_id: str) -> str:
    """The subject on which only this worker listens."""
    return f"worker.{worker_id}.jobs"


class Status(IntEnum):
    """JobStatus of CAP v1."""

    UNSPECIFIED = 0
    PENDING = 1
    SCHEDULED = 2
    DISPATCHED = 3
    RUNNING = 4
    SUCCEEDED = 5
    FAILED = 6
    CANCELLED = 7
    DENIED = 8
    TIMEOUT = 9
    FAILED_RETRYABLE = 10
    FAILED_FATAL = 11


class ErrorCode(IntEnum):
    """CAP's error codes. From 1000 on, the range CAP leaves to applications, the codes of our own workers."""

    UNSPECIFIED = 0
    VERSION_MISMATCH = 100
    MALFORMED_PACKET = 101
    UNKNOWN_PAYLOAD = 102
    SIGNATURE_INVALID = 103
    SIGNATURE_MISSING = 104
    TIMEOUT = 200
    RESOURCE_EXHAUSTED = 201
    PERMISSION_DENIED = 202
    INVALID_INPUT = 203
    NOT_FOUND = 204
    DUPLICATE = 205
    WORKER_UNAVAILABLE = 206
    SAFETY_DENIED = 300
    POLICY_VIOLATION = 301
    RISK_TAG_BLOCKED = 302
    PUBLISH_FAILED = 400
    SUBSCRIBE_FAILED = 401
    CONNECTION_LOST = 402
    HANDLER_FAILED = 1000
    """A handler raised an error that no other code covers; `error_code` has the class of the error."""
    RESULT_NOT_KEPT = 1001
    """A handler returned, but no store accepted the result."""
    RESULT_INVALID = 1002
    """A handler returned a value that cannot be stored."""
    SNOOZED = 1003
    """A handler snoozed its job."""
    POINTER_CHANGED = 1004
    """The payload does not match the digest in its pointer."""
    POINTER_UNAVAILABLE = 1005
    """The store behind a pointer did not answer."""


_CAP_PREFIXES = ("ERROR_CODE_", "PROTOCOL_", "JOB_", "TRANSPORT_")
_OTHER_NAMES = {
    "DENIED": ErrorCode.SAFETY_DENIED,
    "SAFETY_POLICY_VIOLATION": ErrorCode.POLICY_VIOLATION,
    "SAFETY_RISK_TAG_BLOCKED": ErrorCode.RISK_TAG_BLOCKED,
    NOT_BEGUN: ErrorCode.WORKER_UNAVAILABLE,
}
"""Other spellings that workers send for these codes."""


def error_number(code: str) -> int:
    """The number of an error code given as text, in CAP's spelling or ours; 0 for an unknown code."""
    short = code
    for prefix in _CAP_PREFIXES:
        short = short.removeprefix(prefix)
    number = ErrorCode.__members__.get(short) or _OTHER_NAMES.get(short) or ErrorCode.UNSPECIFIED
    return number.value


def error_name(number: int) -> str:
    """The text of an error code given as a number: empty for 0, the number itself for an unknown code."""
    if not number:
        return ""
    return ErrorCode(number).name if number in ErrorCode.__members__.values() else str(number)


class AlertSeverity(StrEnum):
    """How bad an alert is."""

    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Identifies one dispatch of a job.

    Our own workers echo it; workers of the SDK do so only in its production profile.
    """

    dispatch_id: str = ""
    attempt: int = 0
    worker_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOrder:
    """A request sent to a worker: `request.job_id` is the wire id."""

    request: JobRequest
    dispatch: Dispatch


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """The outcome of a job: reported by its worker, or published by the control plane."""

    job_id: str
    status: Status
    worker_id: str
    result_ptr: str = ""
    execution_ms: int = 0
    error_code: str = ""
    error_message: str = ""
    artifact_ptrs: tuple[str, ...] = ()
    error_code_enum: int = 0
    dispatch: Dispatch | None = None
    result_ref: ResourceRef | None = None
    artifact_refs: tuple[ResourceRef, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProgress:
    """A progress report, which is also a heartbeat of the job.

    Also the answer to a worker's question; `status` is then the job's state.
    """

    job_id: str
    status: Status = Status.RUNNING
    step_id: str = ""
    percent: int = 0
    message: str = ""
    result_ptr: str = ""
    dispatch: Dispatch | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCancel:
    """A cancel request for a job. Toward workers `job_id` is the wire id."""

    job_id: str
    reason: str = ""
    requested_by: str
    dispatch: Dispatch | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHeartbeat:
    """A heartbeat of one worker. It names no jobs."""

    worker_id: str
    pool: str = ""
    region: str = ""
    type: str = ""
    cpu_load: float = 0.0
    gpu_utilization: float = 0.0
    memory_load: float = 0.0
    active_jobs: int = 0
    max_parallel_jobs: int = 0
    capabilities: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True, slots=True)
class Handshake:
    """The message a component sends when it connects. Empty `ready_topics` means that it did not list any."""

    component_id: str
    role: str = "worker"
    supported_versions: tuple[int, ...] = (1,)
    capabilities: Mapping[str, bool] = field(default_factory=dict[str, bool])
    sdk_version: str = ""
    ready_topics: tuple[str, ...] = ()


def sdk_version() -> str:
    """The name and version of this program, for handshakes."""
    try:
        return f"trellis {version('trellis-engine')}"
    except PackageNotFoundError:
        return "trellis unpacked"


@dataclass(frozen=True, kw_only=True, slots=True)
class BusAlert:
    """An alert to operators about the bus."""

    message: str
    code: ErrorCode
    severity: AlertSeverity
    details: Mapping[str, str] = field(default_factory=dict[str, str])


PacketBody: TypeAlias = (
    JobRequest | JobOrder | JobResult | JobProgress | JobCancel | WorkerHeartbeat | Handshake | BusAlert
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """One message with its envelope."""

    trace_id: str
    sender_id: str
    created_at: datetime
    body: PacketBody


# Envelope checks before sending, on every bus: CAP's rules for the envelope, and which sender may set which ids. A
# packet that breaks one is a bug in the sender's program. It raises before anything is sent, because the receivers
# would drop it.

NAME_CHARS_MAX = 256
SUBJECT_CHARS_MAX = 500
SUBJECTS_REMEMBERED_MAX = 1_000
"""Subjects that are remembered as valid."""
_WORD = re.compile(r"[^\s.*>\x00-\x20\x7f]+")


class PacketRefused(BusError):
    """The packet is refused ({code}): {detail}"""

    def __init__(
        self, code: ErrorCode, detail: str, *, job_id: str = "", trace_id: str = "", sender_id: str = ""
    ) -> None:
        super().__init__(code=code.name, detail=detail)
        self.error_code, self.detail = code, detail
        self.job_id, self.trace_id, self.sender_id = job_id, trace_id, sender_id
        """What could be read from the packet; enough to answer its sender."""


OnRefused: TypeAlias = Callable[[str, PacketRefused], Awaitable[None]]
"""Called with the subject and the reason. When it raises, a packet that the bus keeps is redelivered."""


class PacketWrong(BusError):
    """This packet cannot be sent: {detail}"""


@lru_cache(SUBJECTS_REMEMBERED_MAX)
def check_subject(subject: str, *, patterns: bool = False) -> None:
    """Check that packets can be sent to the subject or, with `patterns`, be subscribed to; raises PacketWrong."""
    words = subject.split(".")
    wild = {"*", ">"} if patterns else set[str]()
    wrong = [word for word in words if not _WORD.fullmatch(word) and word not in wild]
    if wrong or ">" in words[:-1] or len(subject) > SUBJECT_CHARS_MAX:
        raise PacketWrong(
            detail=f"{subject[:SUBJECT_CHARS_MAX]!r} is no subject: words of visible characters with dots between them"
        )


def check(packet: Packet) -> None:
    """Check a packet before it is sent; raises PacketWrong."""
    fault = _envelope_fault(packet) or _body_fault(packet.body, packet.sender_id)
    if fault:
        raise PacketWrong(detail=fault)


def _envelope_fault(packet: Packet) -> str | None:
    for name, value in (("trace_id", packet.trace_id), ("sender_id", packet.sender_id)):
        if not value or len(value) > NAME_CHARS_MAX:
            return f"{name} must have 1 to {NAME_CHARS_MAX} characters"
    return "created_at must have a time zone" if packet.created_at.tzinfo is None else None


def _body_fault(body: PacketBody, sender: str) -> str | None:
    """The first rule that the body breaks; None if it breaks none."""
    match body:
        case JobResult():
            rules = (
                (body.status is not Status.UNSPECIFIED, "a result needs a status"),
                (body.worker_id == sender, "the worker_id of a result must be the sender's id"),
                (body.execution_ms >= 0, "execution_ms must not be negative"),
                (body.job_id, "job_id must not be empty"),
            )
        case JobProgress():
            rules = ((0 <= body.percent <= 100, "percent must be 0 to 100"), (body.job_id, "job_id must not be empty"))
        case JobCancel():
            rules = (
                (body.job_id, "job_id must not be empty"),
                (body.requested_by, "requested_by must not be empty"),
            )
        case WorkerHeartbeat():
            rules = ((body.worker_id == sender, "the worker_id of a heartbeat must be the sender's id"),)
        case Handshake():
            rules = ((body.component_id == sender, "the component_id of a handshake must be the sender's id"),)
        case BusAlert():
            rules = ((body.message, "message must not be empty"), (body.code, "an alert needs an error code"))
        case JobRequest() | JobOrder():
            rules = ()
    return next((fault for holds, fault in rules if not holds), None)
