"""Audit records: converts an event of the ledger to a document and back (OBS-1, D14, D35).

A record is a function of the ledger alone, so a lost one is recreated byte for byte. The records of a job hold enough
to restore the job: the first one holds the submission. Only the white space inside an event's data is not kept.
"""

import base64
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, cast

from trellis.documents.errors import RecordInvalid
from trellis.engine.admin_acts import RECORD_FIELDS, RESERVED_FIELDS, AdminAct, node_of
from trellis.engine.jobs import Epoch, JobId, Priority, ReasonCode, Stage
from trellis.engine.records import DeadLetter, Event, IdempotencyKey, RecordedEvent, Submission, UniqueKey
from trellis.lifecycles import Role
from trellis.storage.objects.canonical_json import encode

FIRST_FORMAT = 1
FORMAT = 2
"""Version of the record format; increases with every change. The first records had no such field."""
READABLE = frozenset({FIRST_FORMAT, FORMAT})
"""Formats from which a job can be restored. In format 1, `node` was derived from the actor's name."""
ORCHESTRATOR_NAME = "orchestration-layer"
"""The orchestrator's name in document 000."""
DEPTH_MAX = 100
"""JSON nested deeper than this is stored as base64 bytes."""


def document(record: RecordedEvent) -> dict[str, Any]:
    """The record as a dict: the fields of document 000 first, then the rest of the event."""
    event = record.event
    body: dict[str, Any] = {
        "ts": timestamp(event.ts),
        "event": event.type,
        "actor": _actor_name(event.role),
        "job_id": event.job_id,
        "from": event.source,
        "to": event.target,
        "node": event.node,
        "format": FORMAT,
        "event_id": event.id,
        "lifecycle": event.lifecycle,
        "type": record.type,
        "role": event.role.value,
        "actor_name": event.actor,
        "correlation_id": event.correlation_id,
        "cause": event.cause,
        "generation": event.generation,
        "attempt": event.attempt,
        "epoch": event.epoch,
        "version": event.version,
        "submitted_at": timestamp(record.submitted_at),
        "data": None,
    }
    if event.data is not None:
        body |= _data(event.data)
    if record.due_at is not None:
        body["due_at"] = timestamp(record.due_at)
    if record.request is not None:
        body["request"] = record.request
    if record.dead_letter is not None:
        body["dead_letter"] = _letter(record.dead_letter)
    if record.submission is not None:
        body["job"] = _job(record.submission)
    return body


def to_bytes(record: RecordedEvent) -> bytes:
    return encode(document(record))


def to_line(record: RecordedEvent) -> bytes:
    """The record as a line of a segment, without the newline."""
    return compact(document(record))


def compact(value: Any) -> bytes:
    """A value as JSON without white space. That is how a line of a segment has a record."""
    return _COMPACT.encode(value).encode()


def act_to_bytes(act: AdminAct) -> bytes:
    """The record of an administrative act as a separate object."""
    return encode(act_document(act))


def act_to_line(act: AdminAct) -> bytes:
    """The record of an administrative act in one line, as the audit chain hashes it."""
    return compact(act_document(act))


def act_document(act: AdminAct) -> dict[str, Any]:
    """The record of an administrative act as a dict.

    The fields of document 000 come first, the act's facts last. No fact replaces a field or makes the record look like
    that of a job's event.
    """
    fields = (
        *(timestamp(act.at), act.event, _actor_name(act.role), act.job_id, act.source, act.target, act.node, FORMAT),
        *(act.id, act.subject, act.role.value, act.actor, act.correlation_id, act.cause),
    )
    facts = {name: value for name, value in act.facts.items() if name not in RESERVED_FIELDS}
    return {**dict(zip(RECORD_FIELDS, fields, strict=True)), **facts}


def _actor_name(role: Role) -> str:
    return ORCHESTRATOR_NAME if role is Role.ORCHESTRATOR else role.value


def body_to_line(body: bytes) -> bytes | None:
    """The record in a separate object, in one line. None if the object is no record as Trellis writes it."""
    try:
        record = json.loads(body)
        return compact(record) if isinstance(record, dict) and encode(cast("dict[str, Any]", record)) == body else None
    except (ValueError, RecursionError):
        return None


def line_to_bytes(line: bytes) -> bytes:
    """A line of a segment as a separate object."""
    return encode(json.loads(line))


def timestamp(at: datetime) -> str:
    """A time with microseconds, the ledger's precision."""
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def is_older(body: bytes, event_id: str) -> bool:
    """Whether these bytes are a record of that event in another format."""
    known, fields = _value(body)
    if not known or not isinstance(fields, dict):
        return False
    record = cast("dict[str, Any]", fields)
    return record.get("event_id") == event_id and is_of_event(record) and record.get("format") != FORMAT


def is_readable(record: Mapping[str, Any]) -> bool:
    """Whether a job can be restored from a record of this format."""
    return record.get("format") in READABLE


def is_of_event(record: Mapping[str, Any]) -> bool:
    """Whether this is the record of a job's event, not of an administrative act."""
    return "lifecycle" in record and "version" in record


def is_of_act(record: Mapping[str, Any]) -> bool:
    """Whether this is the record of an administrative act.

    Old records of rebuilds, refusals and stopped agents have no subject and do not count.
    """
    return "subject" in record and not is_of_event(record) and record.get("format") in READABLE


def read_act(record: Mapping[str, Any]) -> AdminAct:
    """Parse the record of an act; raises RecordInvalid."""
    try:
        return AdminAct(
            no=0,
            id=record["event_id"],
            at=_known_moment(record["ts"]),
            role=Role(record["role"]),
            actor=record["actor_name"],
            node=record["node"],
            event=record["event"],
            subject=record["subject"],
            source=record["from"],
            target=record["to"],
            cause=record["cause"],
            correlation_id=record["correlation_id"],
            job_id=record["job_id"],
            facts={name: value for name, value in record.items() if name not in RECORD_FIELDS},
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise RecordInvalid(event=str(record.get("event_id")), problem=problem) from error


def read_record(record: Mapping[str, Any]) -> RecordedEvent:
    """Parse the record of an event; raises RecordInvalid."""
    try:
        event = _event(record)
        return RecordedEvent(
            event=event,
            type=record["type"],
            submitted_at=_known_moment(record["submitted_at"]),
            submission=_submission(record["type"], record["job"]) if "job" in record else None,
            due_at=_moment(record.get("due_at")),
            request=record.get("request"),
            dead_letter=_read_letter(event, record["type"], record["dead_letter"]) if "dead_letter" in record else None,
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise RecordInvalid(event=str(record.get("event_id")), problem=problem) from error


# --- to a record -----------------------------------------------------------------------------------------------------


def _data(body: bytes) -> dict[str, Any]:
    known, value = _value(body)
    return {"data": value} if known else {"data": None, "data_base64": _base64(body)}


def _letter(letter: DeadLetter) -> dict[str, Any]:
    until = letter.last_lease_expires_at
    return {
        "reason_code": letter.reason_code.value,
        "stage": letter.stage.value,
        "last_error": letter.last_error,
        "attempts": letter.attempts,
        "last_owner": letter.last_owner,
        "last_lease_expires_at": None if until is None else timestamp(until),
    }


def _job(submission: Submission) -> dict[str, Any]:
    return {
        "priority": submission.priority.name.lower(),
        "max_attempts": submission.max_attempts,
        "max_deaths": submission.max_deaths,
        "deadline_us": submission.deadline_us,
        "concurrency_key": submission.concurrency_key,
        "concurrency_limit": submission.concurrency_limit,
        "trace": submission.trace,
        "parent_id": submission.parent_id,
        "compensates": submission.compensates,
        "keys": [{"scope": k.scope, "key": k.key, "fingerprint": _base64(k.fingerprint)} for k in submission.keys],
        **({} if submission.unique is None else {"unique": _unique(submission.unique)}),
        "payload": _payload(submission.payload),
    }


def _unique(key: UniqueKey) -> dict[str, Any]:
    until = None if key.until is None else timestamp(key.until)
    about = {"scope": key.scope, "key": key.key, "unfinished": key.unfinished}
    return {**about, "until": until, "first_at": timestamp(key.first_at)}


def _payload(body: bytes) -> dict[str, Any]:
    """The payload as JSON where it is JSON, with what is needed to restore the same bytes."""
    known, value = _value(body)
    if not known:
        return {"base64": _base64(body)}
    form = next((name for name, write in _FORMS.items() if write(value) == body), None)
    return {"json": value, "base64": _base64(body)} if form is None else {"json": value, "form": form}


def _value(body: bytes) -> tuple[bool, Any]:
    """Whether these bytes are JSON that can be written again, and the value."""
    try:
        value = json.loads(body, parse_constant=_refuse)
        compact(value)
    except (ValueError, RecursionError):
        return False, None
    return (True, value) if _is_flat(body, value) else (False, None)


def _is_flat(body: bytes, value: Any) -> bool:
    """Whether the value is nested at most DEPTH_MAX deep, so that no JSON writer exceeds its recursion limit."""
    level = [value] if body.count(b"[") + body.count(b"{") > DEPTH_MAX else []
    for _ in range(DEPTH_MAX):
        if not level:
            return True
        level = [inner for outer in level for inner in _children(outer)]
    return not level


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def _refuse(name: str) -> None:
    raise ValueError(name)


_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_SPACED = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


_FORMS: Mapping[str, Callable[[Any], bytes]] = {
    "compact": compact,
    "spaced": lambda value: _SPACED.encode(value).encode(),
    "document": encode,
}
"""Ways the JSON may have been written. A record names the one that restores the same bytes."""


def _base64(body: bytes) -> str:
    return base64.b64encode(body).decode()


# --- from a record ---------------------------------------------------------------------------------------------------


def _event(record: Mapping[str, Any]) -> Event:
    return Event(
        id=record["event_id"],
        job_id=JobId(record["job_id"]),
        lifecycle=record["lifecycle"],
        type=record["event"],
        ts=_known_moment(record["ts"]),
        role=Role(record["role"]),
        actor=record["actor_name"],
        correlation_id=record["correlation_id"],
        cause=record["cause"],
        source=record["from"],
        target=record["to"],
        generation=int(record["generation"]),
        attempt=int(record["attempt"]),
        epoch=Epoch(int(record["epoch"])),
        version=int(record["version"]),
        data=_read_data(record),
        node=record["node"] if record["format"] == FORMAT else node_of(record["actor_name"], None),
    )


def _read_data(record: Mapping[str, Any]) -> bytes | None:
    if "data_base64" in record:
        return base64.b64decode(record["data_base64"], validate=True)
    return None if record["data"] is None else compact(record["data"])


def _moment(text: str | None) -> datetime | None:
    return None if text is None else _known_moment(text)


def _known_moment(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(f"{text} names no time zone")
    return at.astimezone(UTC)


def _submission(type_: str, job: Mapping[str, Any]) -> Submission:
    return Submission(
        type=type_,
        priority=Priority[job["priority"].upper()],
        max_attempts=int(job["max_attempts"]),
        max_deaths=int(job["max_deaths"]),
        payload=_read_payload(job["payload"]),
        deadline_us=job["deadline_us"],
        concurrency_key=job["concurrency_key"],
        concurrency_limit=int(job["concurrency_limit"]),
        trace=job["trace"],
        parent_id=job["parent_id"],
        compensates=job["compensates"],
        keys=tuple(_key(key) for key in job["keys"]),
        unique=None if "unique" not in job else _read_unique(job["unique"]),
    )


def _read_unique(key: Mapping[str, Any]) -> UniqueKey:
    return UniqueKey(
        scope=key["scope"],
        key=key["key"],
        unfinished=bool(key["unfinished"]),
        until=_moment(key["until"]),
        first_at=_known_moment(key["first_at"]),
    )


def _key(key: Mapping[str, Any]) -> IdempotencyKey:
    return IdempotencyKey(
        scope=key["scope"], key=key["key"], fingerprint=base64.b64decode(key["fingerprint"], validate=True)
    )


def _read_payload(payload: Mapping[str, Any]) -> bytes:
    if "base64" in payload:
        return base64.b64decode(payload["base64"], validate=True)
    return _FORMS[payload["form"]](payload["json"])


def _read_letter(event: Event, type_: str, letter: Mapping[str, Any]) -> DeadLetter:
    return DeadLetter(
        job_id=event.job_id,
        type=type_,
        state=event.target,
        reason_code=ReasonCode(letter["reason_code"]),
        stage=Stage(letter["stage"]),
        last_error=letter["last_error"],
        attempts=int(letter["attempts"]),
        last_owner=letter["last_owner"],
        last_lease_expires_at=_moment(letter["last_lease_expires_at"]),
        correlation_id=event.correlation_id,
        at=event.ts,
        version=event.version,
    )
