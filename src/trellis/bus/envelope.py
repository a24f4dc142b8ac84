"""What must hold of a packet before it leaves, on every bus: CAP's own rules for the envelope and who may say what.

A packet that breaks one is a mistake of the sender's program, and raises before anything is sent: the receivers would drop it.
"""

import re
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from trellis.bus.errors import BusError
from trellis.bus.messages import (
    BusAlert,
    ErrorCode,
    Handshake,
    JobCancel,
    JobOrder,
    JobProgress,
    JobResult,
    Packet,
    Status,
    WorkerHeartbeat,
)
from trellis.bus.requests import JobRequest

NAME_CHARS_MAX = 256
SUBJECT_CHARS_MAX = 500
_WORD = re.compile(r"[^\s.*>\x00-\x20\x7f]+")


class PacketRefused(BusError):
    """The packet is refused ({code}): {detail}"""

    def __init__(
        self, code: ErrorCode, detail: str, *, job_id: str = "", trace_id: str = "", sender_id: str = ""
    ) -> None:
        super().__init__(code=code.name, detail=detail)
        self.error_code, self.detail = code, detail
        self.job_id, self.trace_id, self.sender_id = job_id, trace_id, sender_id
        """What the packet said of itself, as far as it could be read: enough to answer whoever sent it."""


OnRefused: TypeAlias = Callable[[str, PacketRefused], Awaitable[None]]
"""Told the subject and why; when it raises, a packet that the bus keeps comes again."""


class PacketWrong(BusError):
    """This packet cannot be sent: {detail}"""


def check_subject(subject: str, *, patterns: bool = False) -> None:
    """Whether packets can be sent there, or, with `patterns`, be listened for; raises PacketWrong."""
    words = subject.split(".")
    wild = {"*", ">"} if patterns else set[str]()
    wrong = [word for word in words if not _WORD.fullmatch(word) and word not in wild]
    if wrong or ">" in words[:-1] or len(subject) > SUBJECT_CHARS_MAX:
        raise PacketWrong(
            detail=f"{subject[:SUBJECT_CHARS_MAX]!r} is no subject: words of visible characters with dots between them"
        )


def check(packet: Packet) -> None:
    """Raises PacketWrong."""
    fault = next((said for said in (_envelope(packet), _body(packet)) if said), None)
    if fault:
        raise PacketWrong(detail=fault)


def _envelope(packet: Packet) -> str | None:
    for name, said in (("trace_id", packet.trace_id), ("sender_id", packet.sender_id)):
        if not said or len(said) > NAME_CHARS_MAX:
            return f"{name} must have 1 to {NAME_CHARS_MAX} characters"
    return "created_at must have a time zone" if packet.created_at.tzinfo is None else None


def _body(packet: Packet) -> str | None:
    body, sender = packet.body, packet.sender_id
    match body:
        case JobResult():
            fault = _result(body, sender)
        case JobProgress():
            fault = (
                "percent must be 0 to 100"
                if not 0 <= body.percent <= 100
                else _empty_field_problem("job_id", body.job_id)
            )
        case JobCancel():
            fault = _empty_field_problem("job_id", body.job_id) or _empty_field_problem(
                "requested_by", body.requested_by
            )
        case WorkerHeartbeat():
            fault = None if body.worker_id == sender else "the worker_id of a heartbeat must be the sender's id"
        case Handshake():
            fault = None if body.component_id == sender else "the component_id of a handshake must be the sender's id"
        case BusAlert():
            fault = _empty_field_problem("message", body.message) or (
                None if body.code else "an alert needs an error code"
            )
        case JobRequest() | JobOrder():
            fault = None
    return fault


def _result(body: JobResult, sender: str) -> str | None:
    if body.status is Status.UNSPECIFIED:
        return "a result needs a status"
    if body.worker_id != sender:
        return "the worker_id of a result must be the sender's id"
    return "execution_ms must not be negative" if body.execution_ms < 0 else _empty_field_problem("job_id", body.job_id)


def _empty_field_problem(name: str, said: str) -> str | None:
    return None if said else f"{name} must not be empty"
