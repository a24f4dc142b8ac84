"""The data that a job's events carry: artifacts named by its handler, the traceback of a failure, a cancel request.

All of it is written in the transaction of the step and never changes. Artifacts belong to the completion: either the
job has succeeded and they are recorded, or neither (DJ-20).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Priority
from trellis.engine.records import Event, Job, SampledEvent
from trellis.engine.text import is_storable

ARTIFACTS_MAX = 100
ARTIFACTS_BYTES_MAX = 65_536
"""For all pointers of a job together: every reader of the feed receives them with the last event."""
POINTER_CHARS_MAX = 2_000
NAME_CHARS_MAX = 200
SHA256_CHARS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactPointer:
    """The location of something a job made.

    `pointer` is an address (s3://…, file://…); the other fields allow checking it.
    """

    pointer: str
    name: str | None = None
    sha256: str | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        _text("pointer", self.pointer, POINTER_CHARS_MAX)
        if self.name is not None:
            _text("name", self.name, NAME_CHARS_MAX)
        if self.sha256 is not None and not (len(self.sha256) == SHA256_CHARS and _is_hex(self.sha256)):
            raise OptionInvalid(option="sha256", value=self.sha256, expected="64 hexadecimal digits")
        if self.size is not None and not 0 <= self.size < 2**63:
            raise OptionInvalid(option="size", value=self.size, expected="a number of bytes")


def add_artifact(artifacts: list[ArtifactPointer], one: ArtifactPointer) -> None:
    """Add an artifact. Raises OptionInvalid when there are too many."""
    if len(artifacts) >= ARTIFACTS_MAX:
        raise OptionInvalid(option="artifacts", value=len(artifacts) + 1, expected=f"at most {ARTIFACTS_MAX} of a job")
    size = len(artifacts_data([*artifacts, one]) or b"")
    if size > ARTIFACTS_BYTES_MAX:
        expected = (
            f"at most {ARTIFACTS_BYTES_MAX} bytes of pointers and names; keep a list of them in an object and name that"
        )
        raise OptionInvalid(option="artifacts", value=size, expected=expected)
    artifacts.append(one)


def artifacts_data(artifacts: Sequence[ArtifactPointer]) -> bytes | None:
    """The event data of a completion that names these artifacts; None without any."""
    if not artifacts:
        return None
    pointers = [{name: value for name, value in asdict(one).items() if value is not None} for one in artifacts]
    return json.dumps({"artifacts": pointers}, ensure_ascii=False).encode()


def artifacts_of(events: Sequence[Event]) -> tuple[ArtifactPointer, ...]:
    """The artifacts that the job's completion named, also after a later compensation.

    Empty if the job did not succeed.
    """
    done = next((event for event in reversed(events) if event.source != event.target), None)
    pointers = None if done is None else data_of(done).get("artifacts")
    named = cast("list[dict[str, Any]]", pointers) if isinstance(pointers, list) else []
    return tuple(ArtifactPointer(**one) for one in named)


def last_traceback(events: Sequence[Event]) -> str | None:
    """The Python traceback of the handler's last failure; None if it never failed."""
    return traceback_in([data_of(event) for event in events])


def traceback_in(data: Sequence[Any]) -> str | None:
    """The last Python traceback in the data of these events, oldest first."""
    for one in reversed(data):
        error = cast("dict[str, Any]", one).get("error") if isinstance(one, dict) else None
        text = cast("dict[str, Any]", error).get("traceback") if isinstance(error, dict) else None
        if isinstance(text, str) and text:
            return text
    return None


def cause_of(event: Event) -> str | None:
    """Why this step was made. For a completed soft cancel: how it ended, who requested it and why."""
    data = data_of(event)
    by, reason = data.get("asked_by"), data.get("reason")
    if by is None:
        return event.cause
    cause = f"asked by {by}" + (f": {reason}" if reason else "")
    return f"{event.cause} ({cause})" if event.cause else cause


CANCEL_REQUESTED = "cancel_requested"
"""The member of an end event's data that records a cancel request. The job ended before it took effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequest:
    """A soft cancel requested of a job's holder."""

    actor: str
    role: str
    at: datetime | None
    """None for requests recorded by ledgers that did not store the time."""
    cause: str | None


def with_cancel_request(data: bytes | None, request: CancelRequest | None) -> bytes | None:
    """The data of an end event with the cancel request added. Data that is not a JSON object stays unchanged.

    PostgreSQL's `_with_cancel_request` does the same.
    """
    if request is None:
        return data
    at = None if request.at is None else request.at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    cancel_request = {"actor": request.actor, "role": request.role, "at": at, "cause": request.cause}
    member = json.dumps({CANCEL_REQUESTED: cancel_request}, ensure_ascii=False)[1:-1]
    try:
        text = (data or b"{}").decode().strip(" \t\r\n")
    except UnicodeDecodeError:
        return data
    if not (text.startswith("{") and text.endswith("}")):
        return data
    return (f"{text[:-1]}, {member}}}" if text[1:-1].strip(" \t\r\n") else f"{{{member}}}").encode()


def cancel_request_in(data: bytes | None) -> CancelRequest | None:
    """The cancel request in an end event's data, if any."""
    try:
        read: Any = json.loads(data) if data and CANCEL_REQUESTED.encode() in data else None
    except ValueError:  # not JSON, or not UTF-8
        return None
    fields: Any = cast("dict[str, Any]", read).get(CANCEL_REQUESTED) if isinstance(read, dict) else None
    if not isinstance(fields, dict):
        return None
    named = cast("dict[str, Any]", fields)
    return CancelRequest(
        actor=str(named.get("actor")),
        role=str(named.get("role")),
        at=_moment(named.get("at")),
        cause=named.get("cause"),
    )


def _moment(text: object) -> datetime | None:
    """The time that the engine wrote; None for anything else, as event data may be a client's own."""
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


def with_cancel_request_of(job: Job, request: CancelRequest | None) -> Job:
    """The job with its cancel request filled in; the same job without one."""
    if request is None:
        return job
    return replace(job, cancel_asked_by=request.actor, cancel_asked_at=request.at, cancel_cause=request.cause)


def reason_of(event: Event) -> str:
    """Why a job ended without success: the error with its code, else the cause, else the event's type."""
    data = data_of(event)
    error: Any = data.get("error", data.get("error_message"))
    message = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else error
    if code := data.get("error_code"):
        return f"{code}: {message}" if message else str(code)
    return str(message or cause_of(event) or event.type)


def data_of(event: Event | SampledEvent) -> dict[str, Any]:
    """The event's data; empty when there is none or it is not a JSON object."""
    read: Any = json.loads(event.data) if event.data else None
    return cast("dict[str, Any]", read) if isinstance(read, dict) else {}


def _text(option: str, value: str, most: int) -> None:
    if not (0 < len(value) <= most and is_storable(value)):
        raise OptionInvalid(option=option, value=value[:40], expected=f"a text of 1 to {most} characters")


def _is_hex(text: str) -> bool:
    return all(char in "0123456789abcdefABCDEF" for char in text)


# Priorities: an operator gives a waiting job another one.

DISCARDED = "job_discarded"
REPRIORITIZED = "job_reprioritized"


def priority_data(before: Priority, after: Priority) -> bytes:
    """The data of the event that gives a job another priority. PostgreSQL writes the same text."""
    return json.dumps({"before": before.name.lower(), "priority": after.name.lower()}).encode()


def priority_in(event: Event) -> Priority | None:
    """The priority that this event gave its job; None for any other event."""
    if event.type != REPRIORITIZED or event.data is None:
        return None
    name = str(json.loads(event.data).get("priority", "")).upper()
    return Priority.__members__.get(name)
