"""Administrative acts, and the nodes on which they were done."""

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

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
    """The machine that an actor wrote from: as recorded, else as the name of a process (`worker@alpine:71`) says.

    Ledgers of before record no machine; of a name that names no process, such as a person's, it is then not known.
    """
    if recorded:
        return recorded
    found = _PROCESS.search(actor)
    return None if found is None else found["node"]


# Administrative acts: what people and components change that is no step of a job, and who changed it (OBS-1, D35).
#
# An act on the ledger itself (pausing a type, limiting a rate, a key or how many are held, declaring the options of a type, leaving a
# follower behind, a migration) is recorded by the ledger in the transaction that makes the change, from whichever entrance it came. An act
# on something outside of the ledger, such as the status of an agent, and a request that was refused are recorded with `Ledger.record_act`.
# The projector publishes one audit record of each. Setting something to what it is already changes nothing, and is no act.
#
# Every act says who, from which node, why and when. An act that may be recorded again after a crash brings its own id: the second time
# changes nothing.

PAUSED = "type.paused"
RESUMED = "type.resumed"
RATE = "type.rate.changed"
HELD_LIMIT = "type.held_limit.changed"
KEY_LIMIT = "key.limit.changed"
LEFT_BEHIND = "follower.left_behind"
TYPE_OPTIONS = "type.options.changed"
MIGRATED = "ledger.migrated"
GRANTED = "authority.granted"
TOKEN_ISSUED = "token.issued"  # noqa: S105 - the name of an event
LEDGER_SUBJECT = "ledger"
"""What the act of a migration is about."""
NO_REASON = "no reason given"
"""The cause of an act whose author gave none. PostgreSQL writes the same."""
HOME_ISSUER = "issuer.changed"
ACTIVITY = ("active", "paused")
"""How a type stands that is not paused, and one that is."""
EVENT_CHARS_MAX = 100
SUBJECT_CHARS_MAX = 500
TEXT_CHARS_MAX = 2_000
CORRELATION_CHARS_MAX = 200
JOB_CHARS_MAX = 200
FACTS_BYTES_MAX = 1024 * 1024
ACTS_MAX = 500
"""Acts of one page."""
RECORD_FIELDS = (
    *("ts", "event", "actor", "job_id", "from", "to", "node", "format", "event_id"),
    *("subject", "role", "actor_name", "correlation_id", "cause"),
)
"""What every audit record of an act has, in this order. The act's facts follow under names of their own."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FACT_NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewAct:
    """An act to record: what happened (`agent.status.changed`), to what, how that stood before and stands now, and why."""

    event: str
    subject: str
    source: str | None = None
    target: str | None = None
    cause: str | None = None
    correlation_id: str | None = None
    job_id: str | None = None
    """The job that the act follows from, if one does."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else the audit record says, as JSON; at most FACTS_BYTES_MAX."""
    id: str | None = None
    """An id of the caller's own, for an act that may be recorded twice: the second time nothing is written."""


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
    """The act as it can be stored, long texts cut; raises OptionInvalid for a name that cannot be, and for too many facts."""
    if not 1 <= len(act.event) <= EVENT_CHARS_MAX:
        raise OptionInvalid(option="event", value=act.event[:50], expected=f"1 to {EVENT_CHARS_MAX} characters")
    if not 1 <= len(act.subject) <= SUBJECT_CHARS_MAX:
        raise OptionInvalid(option="subject", value=act.subject[:50], expected=f"1 to {SUBJECT_CHARS_MAX} characters")
    if act.id is not None and _ID.fullmatch(act.id) is None:
        raise OptionInvalid(option="id", value=act.id[:50], expected="at most 200 letters, digits, dots and hyphens")
    for name in act.facts:
        if _FACT_NAME.fullmatch(name) is None or name in RECORD_FIELDS:
            expected = "a lower-case name of at most 50 characters that is no field of every record"
            raise OptionInvalid(option="facts", value=name[:50], expected=expected)
    if len(facts_text(act.facts) or "") > FACTS_BYTES_MAX:
        raise OptionInvalid(option="facts", value="…", expected=f"at most {FACTS_BYTES_MAX} bytes of JSON")
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
    """Why somebody acted, as an act records it: cut to what can be stored, or that no reason was given."""
    return _cut(text) or NO_REASON


def facts_text(facts: Mapping[str, Any]) -> str | None:
    """An act's facts as both ledgers store them; None for none."""
    return json.dumps(dict(facts), separators=(",", ":")) if facts else None


def read_facts(text: str | None) -> Mapping[str, Any]:
    """The facts of a stored act."""
    return json.loads(text) if text else {}


def rate_text(per_second: float | None, burst: int) -> str | None:
    """A rate limit as acts show it; None for no limit. PostgreSQL words it the same."""
    return None if per_second is None else f"{float(per_second)!r}".removesuffix(".0") + f"/s, burst {burst}"


def _cut(text: str | None) -> str | None:
    return None if text is None else (storable(text) or "")[:TEXT_CHARS_MAX]
