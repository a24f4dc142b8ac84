"""CAP v1 on the wire: encodes and decodes packets (protobuf `BusPacket`, protocol version 1), with strict checks.

Uses the message classes of CAP's own SDK. An invalid incoming packet is refused with CAP's error code for the fault
(`PacketRefused`). An outgoing packet must pass the SDK's validator, else it is not sent. Session tokens, and identities
outside a request, have no meaning here; they are neither sent nor stored. `signatures` defines what a signature covers.
"""

import hashlib
import importlib
import math
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, TypeVar

import pydantic

from trellis.bus.errors import BusRequestInvalid
from trellis.bus.messages import (
    NAME_CHARS_MAX,
    SUBMIT,
    AlertSeverity,
    BusAlert,
    Dispatch,
    ErrorCode,
    Handshake,
    JobCancel,
    JobOrder,
    JobProgress,
    JobResult,
    Packet,
    PacketBody,
    PacketRefused,
    PacketWrong,
    Status,
    WorkerHeartbeat,
    check,
)
from trellis.bus.requests import Budget, Compensation, ContextHints, IdentityBinding, JobMeta, JobRequest, ResourceRef
from trellis.bus.wire.signatures import ALGORITHM, MESSAGE_ID_BYTES, PROFILE, PacketDelivery, PacketKeys, SignedPacket
from trellis.engine.extras import Extra, extra_needed

# Conversion between our request models and CAP's messages, which have numbers where we have names.

PRIORITIES: Mapping[str | None, int] = {None: 0, "interactive": 1, "batch": 2, "critical": 3}
ACTOR_TYPES: Mapping[str, int] = {"": 0, "human": 1, "service": 2}
_PARTS: Mapping[str, type[pydantic.BaseModel]] = {
    "context_hints": ContextHints,
    "budget": Budget,
    "meta": JobMeta,
    "compensation": Compensation,
    "identity": IdentityBinding,
    "context_ref": ResourceRef,
}
BodyT = TypeVar("BodyT", JobCancel, WorkerHeartbeat, Handshake, BusAlert)
_PRIORITY_NAMES = {number: name for name, number in PRIORITIES.items()}
_ACTOR_NAMES = {number: name for name, number in ACTOR_TYPES.items()}


def message_fields(message: Any, shape: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The fields of a message that our model has. Empty fields are left out: the model has the same defaults."""
    known = shape.model_fields
    return {field.name: _field_value(field.name, value) for field, value in message.ListFields() if field.name in known}


def _field_value(name: str, value: Any) -> Any:
    if name in _PARTS:
        return message_fields(value, _PARTS[name])
    if name == "priority":
        return _PRIORITY_NAMES.get(value, value)
    if name == "actor_type":
        return _ACTOR_NAMES.get(value, value)
    if name == "expires_at":
        return value.ToJsonString()
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int) else _plain(value)


def _plain(value: Any) -> dict[str, Any] | tuple[Any, ...]:
    return dict(value) if hasattr(value, "items") else tuple(value)


def fields_of(values: dict[str, Any]) -> dict[str, Any]:
    """A request's fields, with CAP's numbers in place of names."""
    numbered: dict[str, Any] = {name: fields_of(value) if name in _PARTS else value for name, value in values.items()}
    if "priority" in numbered:
        numbered["priority"] = PRIORITIES[numbered["priority"]]
    if "actor_type" in numbered:
        numbered["actor_type"] = ACTOR_TYPES[numbered["actor_type"]]
    if "sha256" in numbered:
        numbered["sha256"] = bytes.fromhex(numbered["sha256"])
    if "expires_at" in numbered:
        numbered["expires_at"] = _timestamp(numbered["expires_at"])
    return numbered


def _timestamp(text: str) -> Any:
    if not text:
        return None
    timestamp = importlib.import_module("google.protobuf.timestamp_pb2").Timestamp()
    timestamp.FromJsonString(text)
    return timestamp


# Strict checks of a packet's bytes, beyond a protobuf parser: one encoding per packet, and one payload.
#
# A parser accepts numbers that are longer than necessary, and the last of two payloads. Two receivers could then read
# the same signed bytes differently, so such packets are refused. The order of fields is free and unknown fields are
# ignored, as protobuf allows.

FIELDS_MAX = 50_000
"""Maximum number of fields of a packet, including nested messages, because reading each costs time."""
VARINT_BYTES_MAX = 10
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_FIXED = {_I64: 8, _I32: 4}


class NotStrict(ValueError):
    """A packet's bytes break the strict encoding rules."""


def is_plainly_strict(data: bytes, message: Any) -> bool:
    """Whether these bytes are exactly what we would write for this message, without fields that this version does not know.

    Then they are strict, and need not be read once more in Python. Other bytes may be strict too: `check_strict` decides.
    """
    if len(data) > FIELDS_MAX or message.SerializeToString(deterministic=True) != data:
        return False
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return known.ByteSize() == len(data)


def check_strict(data: bytes, descriptor: Any) -> frozenset[int]:
    """The field numbers at the top level of a message of this type; raises NotStrict.

    Reads every field and nested message once, up to a maximum number, because the bytes are untrusted.
    """
    known = _known_fields(descriptor)
    left, top = _read_fields(data, 0, len(data), FIELDS_MAX)
    oneofs = [oneof for number, _, _ in top if (oneof := known.get(number, _UNKNOWN)[1])]
    if len(oneofs) != len(set(oneofs)):
        raise NotStrict(f"it has more than one {oneofs[0]}")
    waiting = [(at, end, part) for number, at, end in top if (part := known.get(number, _UNKNOWN)[0])]
    while waiting:
        at, end, part = waiting.pop()
        inside = _known_fields(part)
        left, nested = _read_fields(data, at, end, left)
        waiting += [(start, stop, kind) for number, start, stop in nested if (kind := inside.get(number, _UNKNOWN)[0])]
    return frozenset(number for number, _, _ in top)


_UNKNOWN: tuple[Any, str] = (None, "")


@cache
def field_names(shape: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(shape))


@cache
def _known_fields(descriptor: Any) -> dict[int, tuple[Any, str]]:
    """By field number: the type of a nested message (None for other fields), and the oneof the field belongs to."""
    return {
        field.number: (field.message_type, field.containing_oneof.name if field.containing_oneof else "")
        for field in descriptor.fields
    }


def _read_fields(data: bytes, at: int, end: int, left: int) -> tuple[int, list[tuple[int, int, int]]]:
    """How many more fields the packet may have, and the fields of this message.

    A field is its number and the range of the bytes after its tag.
    """
    fields: list[tuple[int, int, int]] = []
    while at < end:
        tag = data[at]
        if tag < 0x80:  # nearly every tag is one byte
            at += 1
        else:
            tag, at = _varint(data, at, end)
        wire = tag & 7
        if wire == _LEN:
            size, at = (data[at], at + 1) if at < end and data[at] < 0x80 else _varint(data, at, end)
            stop = at + size
        elif wire == _VARINT:
            stop = at + 1 if at < end and data[at] < 0x80 else _varint(data, at, end)[1]
        elif wire in _FIXED:
            stop = at + _FIXED[wire]
        else:
            raise NotStrict(f"field {tag >> 3} has the wire type {wire}, which is none of proto3")
        if stop > end or tag < 8:
            raise NotStrict(f"field {tag >> 3} does not fit into what it is part of")
        fields.append((tag >> 3, at, stop))
        at = stop
        left -= 1
        if left < 0:
            raise NotStrict(f"it has more than {FIELDS_MAX} fields")
    return left, fields


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A varint and the position after it."""
    value = shift = 0
    for place in range(at, min(end, at + VARINT_BYTES_MAX)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if byte == 0 and place > at:
                raise NotStrict("a number is not in its shortest form")
            return value, place + 1
        shift += 7
    raise NotStrict("a number does not end")


# Encoding and decoding of packets.

PROTOCOL_VERSION = 1
PACKET_BYTES_MAX = 1024 * 1024
REMEMBERED_MAX = 256
"""How many short packets are remembered as read."""
REMEMBERED_BYTES_MAX = 4 * 1024
"""The longest packet that is remembered."""
PRESENCE_BYTES_MAX = 32 * 1024
"""Size limit of heartbeats and handshakes. Their content is kept in memory for as long as their sender lives."""
PRESENCE_PAYLOADS = frozenset({"heartbeat", "handshake"})
PRESENCE_S_MAX = 60.0
"""Maximum age of a heartbeat or handshake, and how far it may be in the future, in seconds.

CAP allows clocks to differ by this much.
"""
ECHOED_ID_CHARS_MAX = 2_000
"""Maximum length of the job id that is returned to the client of a refused request.

The client gets no answer for a longer id.
"""
DETAIL_CHARS_MAX = 500
ROLES = ("", "gateway", "scheduler", "worker", "orchestrator", "controller")
SEVERITIES = (
    AlertSeverity.INFO,
    AlertSeverity.INFO,
    AlertSeverity.WARNING,
    AlertSeverity.ERROR,
    AlertSeverity.CRITICAL,
)
"""Severities by CAP's number. An alert without one is INFO."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NO_UNKNOWN_FIELDS: frozenset[int] = frozenset()


def load() -> None:
    """Import the SDK before the first packet, because that takes time; raises SettingsInvalid."""
    for module in ("buspacket_pb2", "job_pb2", "heartbeat_pb2", "handshake_pb2", "alert_pb2"):
        _sdk(module)
    _validator()


def encode(packet: Packet, keys: PacketKeys, *, subject: str = "", message_id: str = "") -> bytes:
    """Encode a packet for one subject, and sign it when we have a key; raises PacketWrong."""
    check(packet)
    since = packet.created_at - _EPOCH
    name, values = _payload(packet)
    try:
        message = _sdk("buspacket_pb2").BusPacket(
            trace_id=packet.trace_id,
            sender_id=packet.sender_id,
            protocol_version=PROTOCOL_VERSION,
            created_at={"seconds": since.days * 86_400 + since.seconds, "nanos": since.microseconds * 1000},
            **{name: values},
        )
    except (ValueError, TypeError) as error:  # a number or text that does not fit its field
        raise PacketWrong(detail=str(error)) from error
    faults = _validator().validate_bus_packet(message)
    if faults:
        raise PacketWrong(detail="; ".join(f"{fault.field}: {fault.message}" for fault in faults)[:DETAIL_CHARS_MAX])
    if keys.own is not None:
        _bind(message, keys, subject, message_id)
        message.signature = keys.sign(message.SerializeToString(deterministic=True))
    data: bytes = message.SerializeToString(deterministic=True)
    if len(data) > PACKET_BYTES_MAX:
        raise PacketWrong(
            detail=f"it has {len(data)} bytes and the limit is {PACKET_BYTES_MAX}; store the data and send a pointer"
        )
    return data


def decode(data: bytes, keys: PacketKeys, subject: str = "", *, delivery: PacketDelivery | None = None) -> Packet:
    """Decode a received packet; raises PacketRefused.

    On the submit subject, requests are checked as requests from outside. With `delivery`, a signed packet, a heartbeat
    or a handshake is also checked against how it was delivered.
    """
    is_short = len(data) <= REMEMBERED_BYTES_MAX
    message = _recognized(data) if is_short else _recognized.__wrapped__(data)
    _check_signature(message, keys, delivery)
    packet = _read(data, subject) if is_short else _read_packet(message, subject)
    if delivery is not None:
        _check_freshness(message, delivery)
    return packet


# -- decoding ----------------------------------------------------------------------------------------------------------
#
# A process often receives the same bytes twice: as a member of a group and as a direct subscriber. What depends on the
# bytes alone is read once. Signature, delivery and age are checked each time.


@lru_cache(REMEMBERED_MAX)
def _recognized(data: bytes) -> Any:
    """The parsed message, if this version knows its payload. Callers do not change it."""
    message, fields = _parsed(data)
    _check_version(message)
    _check_payload(message, fields)
    return message


@lru_cache(REMEMBERED_MAX)
def _read(data: bytes, subject: str) -> Packet:
    return _read_packet(_recognized(data), subject)


def _read_packet(message: Any, subject: str) -> Packet:
    _check_meaning(message)
    return Packet(
        trace_id=message.trace_id,
        sender_id=message.sender_id,
        created_at=_cap_timestamp(message, message.created_at, "created_at"),
        body=_read_body(message, subject),
    )


def _parsed(data: bytes) -> tuple[Any, frozenset[int]]:
    """The parsed message, and its field numbers; none of a message that has only fields that this version knows."""
    if not data:
        raise PacketRefused(ErrorCode.MALFORMED_PACKET, "it is empty")
    if len(data) > PACKET_BYTES_MAX:
        raise PacketRefused(ErrorCode.MALFORMED_PACKET, f"it has {len(data)} bytes and the limit is {PACKET_BYTES_MAX}")
    message = _sdk("buspacket_pb2").BusPacket()
    try:
        message.ParseFromString(data)
    except _module("google.protobuf.message").DecodeError as error:
        raise PacketRefused(ErrorCode.MALFORMED_PACKET, f"it is no BusPacket: {error}"[:DETAIL_CHARS_MAX]) from None
    if is_plainly_strict(data, message):
        return message, _NO_UNKNOWN_FIELDS
    try:
        return message, check_strict(data, message.DESCRIPTOR)
    except NotStrict as error:
        raise _refused(message, ErrorCode.MALFORMED_PACKET, str(error)) from None


def _check_payload(message: Any, fields: frozenset[int]) -> None:
    """Refuses a packet without a payload that this version knows.

    A packet without any payload is malformed. One with a payload or field of a newer version has an unknown payload.
    """
    payload = message.WhichOneof("payload")
    if payload in _READERS:
        return
    if payload is None and fields <= {field.number for field in message.DESCRIPTOR.fields}:
        raise _refused(message, ErrorCode.MALFORMED_PACKET, "it has no payload")
    raise _refused(message, ErrorCode.UNKNOWN_PAYLOAD, "there is no payload that this side knows")


def _check_freshness(message: Any, delivery: PacketDelivery) -> None:
    """Refuses heartbeats and handshakes that are too old or too far in the future.

    They describe their worker at sending time. An old one may have been stored or replayed.
    """
    if message.WhichOneof("payload") not in PRESENCE_PAYLOADS:
        return
    age_s = (delivery.at - _cap_timestamp(message, message.created_at, "created_at")).total_seconds()
    if abs(age_s) > PRESENCE_S_MAX:
        when = f"{abs(age_s):.0f} s {'old' if age_s > 0 else 'ahead'}"
        detail = (
            f"it is {when} by created_at, and what introduces a worker counts for {PRESENCE_S_MAX:g} s; set its clock"
        )
        raise _refused(message, ErrorCode.MALFORMED_PACKET, detail)


def _check_version(message: Any) -> None:
    if message.protocol_version != PROTOCOL_VERSION:
        detail = f"its protocol version is {message.protocol_version}, and this side speaks {PROTOCOL_VERSION}"
        raise _refused(message, ErrorCode.VERSION_MISMATCH, detail)


def _check_signature(message: Any, keys: PacketKeys, delivery: PacketDelivery | None) -> None:
    signature: bytes = message.signature
    if not keys.must_sign(message.sender_id):
        return
    unsigned = type(message)()
    unsigned.CopyFrom(message)
    unsigned.ClearField("signature")
    covered: bytes = unsigned.SerializeToString(deterministic=True)
    fault = keys.fault(message.sender_id, covered, signature)
    if fault is not None:
        missing = fault is ErrorCode.SIGNATURE_MISSING
        detail = "it is not signed, and its sender must sign" if missing else "its signature is not its sender's"
        raise _refused(message, fault, detail)
    misuse = None if delivery is None else keys.misuse(_signed(message, covered), delivery)
    if misuse is not None:
        raise _refused(message, ErrorCode.SIGNATURE_INVALID, misuse)


def _signed(message: Any, covered: bytes) -> SignedPacket:
    metadata = message.signature_metadata
    bound = message.HasField("signature_metadata") and metadata.profile_version == PROFILE
    return SignedPacket(
        digest=hashlib.sha256(covered).digest(),
        created_at=_cap_timestamp(message, message.created_at, "created_at"),
        audience=metadata.audience if bound else None,
        expires_at=_cap_timestamp(message, metadata.expires_at, "signature_metadata.expires_at") if bound else None,
    )


def _bind(message: Any, keys: PacketKeys, subject: str, message_id: str) -> None:
    """Put subject, expiry and a unique message id into the envelope, so that the signature covers them."""
    if not subject:
        return
    metadata = message.signature_metadata
    metadata.profile_version, metadata.algorithm, metadata.audience, metadata.key_id = (
        PROFILE,
        ALGORITHM,
        subject,
        message.sender_id,
    )
    metadata.message_id = hashlib.sha256(message_id.encode()).digest()[:MESSAGE_ID_BYTES]
    metadata.expires_at.seconds = message.created_at.seconds + math.ceil(keys.window_s)


def _check_meaning(message: Any) -> None:
    faults = _validator().validate_bus_packet(message)
    if faults:
        is_request = message.WhichOneof("payload") == "job_request"
        of_request = _validator().validate_job_request(message.job_request) if is_request else ()
        code = ErrorCode.INVALID_INPUT if len(of_request) == len(faults) else ErrorCode.MALFORMED_PACKET
        raise _refused(message, code, f"{faults[0].field}: {faults[0].message}")
    if message.WhichOneof("payload") in PRESENCE_PAYLOADS and message.ByteSize() > PRESENCE_BYTES_MAX:
        detail = f"it has {message.ByteSize()} bytes and the limit for what introduces a worker is {PRESENCE_BYTES_MAX}"
        raise _refused(message, ErrorCode.MALFORMED_PACKET, detail)
    if max(len(message.trace_id), len(message.sender_id)) > NAME_CHARS_MAX:
        detail = f"trace_id and sender_id have at most {NAME_CHARS_MAX} characters"
        raise _refused(message, ErrorCode.MALFORMED_PACKET, detail)


def _cap_timestamp(message: Any, timestamp: Any, name: str) -> datetime:
    try:
        return _EPOCH + timedelta(seconds=timestamp.seconds, microseconds=timestamp.nanos // 1000)
    except OverflowError:
        raise _refused(message, ErrorCode.MALFORMED_PACKET, f"{name} is out of range") from None


def _read_body(message: Any, subject: str) -> PacketBody:
    name = message.WhichOneof("payload")
    try:
        if name == "job_request":
            return _read_request(message.job_request, from_outside=subject == SUBMIT)
        return _READERS[name](getattr(message, name))
    except BusRequestInvalid as error:
        raise _refused(message, ErrorCode.INVALID_INPUT, str(error.data["detail"])) from None
    except ValueError as error:
        raise _refused(message, ErrorCode.MALFORMED_PACKET, str(error)) from None


def _refused(message: Any, code: ErrorCode, detail: str) -> PacketRefused:
    named = message.job_request.job_id if message.WhichOneof("payload") == "job_request" else ""
    return PacketRefused(
        code,
        detail[:DETAIL_CHARS_MAX],
        job_id=named if len(named) <= ECHOED_ID_CHARS_MAX else "",
        trace_id=message.trace_id[:NAME_CHARS_MAX],
        sender_id=message.sender_id[:NAME_CHARS_MAX],
    )


def _read_request(message: Any, *, from_outside: bool = False) -> JobRequest | JobOrder:
    values = message_fields(message, JobRequest)
    if from_outside:
        return JobRequest.checked(values)
    request = JobRequest.valid(values)
    dispatch = _dispatch(message)
    return request if dispatch is None else JobOrder(request=request, dispatch=dispatch)


def _dispatch(message: Any) -> Dispatch | None:
    if not message.HasField("dispatch"):
        return None
    dispatch = message.dispatch
    return Dispatch(dispatch_id=dispatch.dispatch_id, attempt=dispatch.attempt, worker_id=dispatch.assigned_worker_id)


def _ref(message: Any) -> ResourceRef | None:
    """A reference in a report; None if it exceeds our limits. The report still counts."""
    try:
        return ResourceRef.model_validate(message_fields(message, ResourceRef))
    except ValueError:
        return None


def _fields(message: Any, shape: type[BodyT], **others: Any) -> BodyT:
    """The body with the fields of the same names; `others` are the fields that a packet holds in another form."""
    values = {name: getattr(message, name) for name in field_names(shape) if name not in others}
    plain = {name: value if isinstance(value, str | int | float) else _plain(value) for name, value in values.items()}
    return shape(**plain, **others)


def _read_result(message: Any) -> JobResult:
    return JobResult(
        job_id=message.job_id,
        status=Status(message.status),
        worker_id=message.worker_id,
        result_ptr=message.result_ptr,
        execution_ms=message.execution_ms,
        error_code=message.error_code,
        error_message=message.error_message,
        artifact_ptrs=tuple(message.artifact_ptrs),
        error_code_enum=message.error_code_enum,
        dispatch=_dispatch(message),
        result_ref=_ref(message.result_ref) if message.HasField("result_ref") else None,
        artifact_refs=tuple(filter(None, map(_ref, message.artifact_refs))),
    )


def _read_progress(message: Any) -> JobProgress:
    return JobProgress(
        job_id=message.job_id,
        status=Status(message.status),
        step_id=message.step_id,
        percent=message.percent,
        message=message.message,
        result_ptr=message.result_ptr,
        dispatch=_dispatch(message),
    )


def _read_cancel(message: Any) -> JobCancel:
    return _fields(message, JobCancel, dispatch=_dispatch(message))


def _read_heartbeat(message: Any) -> WorkerHeartbeat:
    for name in ("cpu_load", "gpu_utilization", "memory_load"):
        if not math.isfinite(getattr(message, name)):
            raise ValueError(f"heartbeat.{name}: must be a number")
    if message.active_jobs < 0 or message.max_parallel_jobs < 0:
        raise ValueError("heartbeat.active_jobs and heartbeat.max_parallel_jobs: must not be negative")
    return _fields(message, WorkerHeartbeat)


def _read_handshake(message: Any) -> Handshake:
    return _fields(message, Handshake, role=ROLES[message.role] if 0 <= message.role < len(ROLES) else "")


def _read_alert(message: Any) -> BusAlert:
    known = message.error_code_enum in ErrorCode.__members__.values()
    level, severity = str(message.level).upper(), int(message.severity)
    by_level = AlertSeverity(level) if level in AlertSeverity.__members__ else AlertSeverity.INFO
    return _fields(
        message,
        BusAlert,
        code=ErrorCode(message.error_code_enum) if known else ErrorCode.UNSPECIFIED,
        severity=SEVERITIES[severity] if 0 < severity < len(SEVERITIES) else by_level,
    )


_READERS: Mapping[str | None, Any] = {
    "job_request": _read_request,
    "job_result": _read_result,
    "job_progress": _read_progress,
    "job_cancel": _read_cancel,
    "heartbeat": _read_heartbeat,
    "handshake": _read_handshake,
    "alert": _read_alert,
}


# -- encoding ----------------------------------------------------------------------------------------------------------


def _payload(packet: Packet) -> tuple[str, dict[str, Any]]:
    """The field of the packet that holds the body, and the body's fields."""
    body = packet.body
    match body:
        case JobOrder(request=request, dispatch=dispatch):
            values = {**fields_of(request.model_dump(exclude_defaults=True)), "dispatch": _identity(dispatch)}
        case JobResult():
            values = {
                **_slots(body),
                "result_ref": None if body.result_ref is None else fields_of(body.result_ref.model_dump()),
                "artifact_refs": [fields_of(ref.model_dump()) for ref in body.artifact_refs],
            }
        case JobProgress() | JobCancel() | WorkerHeartbeat():
            values = _slots(body)
        case Handshake():
            values = {**_slots(body), "role": ROLES.index(body.role) if body.role in ROLES else 0}
        case BusAlert():
            values = _alert(body, packet)
        case JobRequest():
            values = fields_of(body.model_dump(exclude_defaults=True))
    return _PAYLOAD_FIELDS[type(body)], values


_PAYLOAD_FIELDS: Mapping[type[PacketBody], str] = {
    JobRequest: "job_request",
    JobOrder: "job_request",
    JobResult: "job_result",
    JobProgress: "job_progress",
    JobCancel: "job_cancel",
    WorkerHeartbeat: "heartbeat",
    Handshake: "handshake",
    BusAlert: "alert",
}


def _identity(dispatch: Dispatch | None) -> dict[str, Any] | None:
    if dispatch is None:
        return None
    return {"dispatch_id": dispatch.dispatch_id, "attempt": dispatch.attempt, "assigned_worker_id": dispatch.worker_id}


def _slots(body: JobResult | JobProgress | JobCancel | WorkerHeartbeat | Handshake) -> dict[str, Any]:
    """The fields of a body, with CAP's form of a dispatch."""
    values = {name: getattr(body, name) for name in field_names(type(body))}
    return {**values, "dispatch": _identity(values["dispatch"])} if "dispatch" in values else values


def _alert(body: BusAlert, packet: Packet) -> dict[str, Any]:
    return {
        "level": body.severity.value,
        "message": body.message,
        "component": packet.sender_id,
        "code": body.code.name,
        "severity": SEVERITIES.index(body.severity, 1),
        "error_code_enum": int(body.code),
        "source_component": packet.sender_id,
        "details": dict(body.details),
        "trace_id": packet.trace_id,
    }


# -- the SDK -----------------------------------------------------------------------------------------------------------


def _sdk(module: str) -> ModuleType:
    return _module(f"cap.pb.cordum.agent.v1.{module}")


def _validator() -> ModuleType:
    return _module("cap.validate")


@cache
def _module(name: str) -> ModuleType:
    with extra_needed(Extra.BUS, "CAP over NATS"):
        return importlib.import_module(name)
