"""Administrative acts: changes by people and components that are not steps of a job, with their actor (OBS-1, D35).

- The ledger records an act on itself in the transaction of the change, for every caller. Such acts are: pausing a type,
  limiting a rate, a key or the number held, declaring type options, releasing a subscriber, sending a signal to a job,
  changing the jobs of a filter, a migration.
- `Ledger.record_act` records acts on something outside the ledger, such as the status of an agent, and refused
  requests.
- The projector publishes one audit record per act.
- Setting a value to what it already is changes nothing and is no act.
- Every act records who, from which node, why and when.
- An act that may be recorded again after a crash carries its own id. The second recording changes nothing.
"""

import json
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from trellis.engine.errors import OptionInvalid
from trellis.engine.text import storable
from trellis.lifecycles import Role

# Nodes: the machines that write to the ledger, as audit records name them (OBS-1).

NODE_CHARS_MAX = 255
_PROCESS = re.compile(r"@(?P<node>[^@]+):\d+$")


def this_node() -> str:
    """The name of this machine."""
    return (socket.gethostname() or "localhost")[:NODE_CHARS_MAX]


def node_of(actor: str, recorded: str | None) -> str | None:
    """The machine an actor wrote from: as recorded, else taken from a process name such as `worker@alpine:71`.

    Older ledgers record no machine. For an actor name without a process, such as a person's, the result is then None.
    """
    if recorded:
        return recorded
    match = _PROCESS.search(actor)
    return None if match is None else match["node"]


PAUSED = "type.paused"
RESUMED = "type.resumed"
RATE = "type.rate.changed"
HELD_LIMIT = "type.held_limit.changed"
KEY_LIMIT = "key.limit.changed"
LEFT_BEHIND = "follower.left_behind"
TYPE_OPTIONS = "type.options.changed"
MIGRATED = "ledger.migrated"
RETAINED = "retention.removed"
GRANTED = "authority.granted"
TOKEN_ISSUED = "token.issued"  # noqa: S105 - the name of an event
LEDGER_SUBJECT = "ledger"
"""The subject of the acts of migrations, of retention and of changes of many jobs."""
NO_REASON = "no reason given"
"""The cause of an act whose author gave none. PostgreSQL writes the same text."""
HOME_ISSUER = "issuer.changed"
SCHEDULE_ADDED = "schedule.added"
SCHEDULE_CHANGED = "schedule.changed"
SCHEDULE_PAUSED = "schedule.paused"
SCHEDULE_RESUMED = "schedule.resumed"
SCHEDULE_REMOVED = "schedule.removed"
SIGNALLED = "job.signalled"
JOBS_CHANGED = "jobs.changed"
LEDGER_EVENTS = frozenset(
    {
        *(PAUSED, RESUMED, RATE, HELD_LIMIT, KEY_LIMIT, LEFT_BEHIND, TYPE_OPTIONS, MIGRATED, RETAINED, GRANTED),
        *(HOME_ISSUER, SCHEDULE_ADDED, SCHEDULE_CHANGED, SCHEDULE_PAUSED, SCHEDULE_RESUMED, SCHEDULE_REMOVED),
        *(SIGNALLED, JOBS_CHANGED),
    }
)
"""Events of acts that the ledger alone records, with their change. PostgreSQL refuses the same ones."""
ACTIVITY = ("active", "paused")
"""The source and target values of acts that pause or resume a type."""
EVENT_CHARS_MAX = 100
SUBJECT_CHARS_MAX = 500
TEXT_CHARS_MAX = 2_000
CORRELATION_CHARS_MAX = 200
JOB_CHARS_MAX = 200
FACTS_BYTES_MAX = 1024 * 1024
ACTS_MAX = 500
"""The most acts on one page."""
RECORD_FIELDS = (
    *("ts", "event", "actor", "job_id", "from", "to", "node", "format", "event_id"),
    *("subject", "role", "actor_name", "correlation_id", "cause"),
)
"""The fields of every audit record of an act, in this order. The act's facts follow under their own names."""
RESERVED_FIELDS = frozenset({*RECORD_FIELDS, "lifecycle", "version"})
"""Names that no fact has: the fields of every act's record, and those that mark the record of a job's event."""
FACTS_DEPTH_MAX = 32
"""How deep the facts of an act may be nested. PostgreSQL has the same limit."""
UNREADABLE_FACTS = "unreadable_facts"
"""The fact that holds the stored text of facts that Python cannot read."""

_ID = re.compile(r"(?=(refused|objects-rebuilt|ledger-rebuilt)-.|.+-agent$)[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_EVENT_ID_END = re.compile(r"-[0-9]{1,10}$")
"""How every id of a job's event ends. No act may have such an id, or it could take the place of the event's record."""
_FACT_NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewAct:
    """An act to record: the event (`agent.status.changed`), its subject, the values before and after, and the cause."""

    event: str
    subject: str
    source: str | None = None
    target: str | None = None
    cause: str | None = None
    correlation_id: str | None = None
    job_id: str | None = None
    """The job that caused the act, if any."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of the audit record, as JSON; at most FACTS_BYTES_MAX."""
    id: str | None = None
    """The caller's own id, for an act that may be recorded twice. The second recording writes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdminAct:
    """An act as the ledger recorded it. `no` counts the acts of one ledger; `id` is unique over all ledgers."""

    no: int
    id: str
    at: datetime
    role: Role
    actor: str
    node: str | None
    event: str
    subject: str
    source: str | None
    target: str | None
    cause: str | None
    correlation_id: str | None
    job_id: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


def checked_act(act: NewAct) -> NewAct:
    """The act as it can be stored, with long texts cut.

    Raises OptionInvalid for an invalid name and for too many facts.
    """
    if not 1 <= len(act.event) <= EVENT_CHARS_MAX:
        raise OptionInvalid(option="event", value=act.event[:50], expected=f"1 to {EVENT_CHARS_MAX} characters")
    if act.event in LEDGER_EVENTS:
        raise OptionInvalid(option="event", value=act.event, expected="no event that the ledger records itself")
    if not 1 <= len(act.subject) <= SUBJECT_CHARS_MAX:
        raise OptionInvalid(option="subject", value=act.subject[:50], expected=f"1 to {SUBJECT_CHARS_MAX} characters")
    if act.id is not None and (_ID.fullmatch(act.id) is None or _EVENT_ID_END.search(act.id)):
        expected = (
            "at most 200 letters, digits, dots and hyphens that begin with refused-, objects-rebuilt- or ledger-rebuilt-"
            " or end with -agent, and no id of an event"
        )
        raise OptionInvalid(option="id", value=act.id[:50], expected=expected)
    _check_facts(act.facts)
    correlation, job_id = act.correlation_id, act.job_id
    return NewAct(
        event=act.event,
        subject=storable(act.subject) or "",
        source=_cut(act.source),
        target=_cut(act.target),
        cause=reason(act.cause),
        correlation_id=None if correlation is None else correlation[:CORRELATION_CHARS_MAX],
        job_id=None if job_id is None else job_id[:JOB_CHARS_MAX],
        facts=act.facts,
        id=act.id,
    )


def reason(text: str | None) -> str:
    """The cause as an act records it: cut to the storable length, or NO_REASON."""
    return _cut(text) or NO_REASON


def facts_text(facts: Mapping[str, Any]) -> str | None:
    """An act's facts as both ledgers store them; None if empty."""
    return json.dumps(dict(facts), separators=(",", ":")) if facts else None


def read_facts(text: str | None) -> Mapping[str, Any]:
    """The facts of a stored act. Facts that Python cannot read are one fact, their text."""
    try:
        return json.loads(text) if text else {}
    except (RecursionError, ValueError):
        return {UNREADABLE_FACTS: text}


def rate_text(per_second: float | None, burst: int) -> str | None:
    """A rate limit as acts show it; None for no limit. PostgreSQL produces the same text."""
    return None if per_second is None else f"{float(per_second)!r}".removesuffix(".0") + f"/s, burst {burst}"


def _check_facts(facts: Mapping[str, Any]) -> None:
    for name in facts:
        if _FACT_NAME.fullmatch(name) is None or name in RESERVED_FIELDS:
            expected = "a lower-case name of at most 50 characters that is no field of every record"
            raise OptionInvalid(option="facts", value=name[:50], expected=expected)
    if not _is_flat(facts):
        raise OptionInvalid(option="facts", value="…", expected=f"nested at most {FACTS_DEPTH_MAX} deep")
    try:
        json.dumps(dict(facts), ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise OptionInvalid(option="facts", value="…", expected="JSON that can be written as UTF-8") from error
    if len(facts_text(facts) or "") > FACTS_BYTES_MAX:
        raise OptionInvalid(option="facts", value="…", expected=f"at most {FACTS_BYTES_MAX} bytes of JSON")


def _is_flat(facts: Mapping[str, Any]) -> bool:
    level: list[Any] = [facts]
    for _ in range(FACTS_DEPTH_MAX + 1):
        level = [inner for outer in level for inner in _children(outer)]
    return not level


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).values()
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()


def _cut(text: str | None) -> str | None:
    return None if text is None else (storable(text) or "")[:TEXT_CHARS_MAX]
