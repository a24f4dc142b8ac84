"""Administrative acts: what people and components change that is no step of a job, and who changed it (OBS-1, D35).

An act on the ledger itself (pausing a type, limiting a rate, a key or how many are held, leaving a follower behind) is recorded by the
ledger in the transaction that makes the change, from whichever entrance it came. An act on something outside of the ledger, such as the
status of an agent, is recorded with `Ledger.record_act`. The projector publishes one audit record of each. Setting
something to what it is already changes nothing, and is no act.
"""

from dataclasses import dataclass
from datetime import datetime

from trellis.engine.errors import OptionInvalid
from trellis.engine.text import storable
from trellis.lifecycles import Role

PAUSED = "type.paused"
RESUMED = "type.resumed"
RATE = "type.rate.changed"
HELD_LIMIT = "type.held_limit.changed"
KEY_LIMIT = "key.limit.changed"
LEFT_BEHIND = "follower.left_behind"
HOME_ISSUER = "issuer.changed"
ACTIVITY = ("active", "paused")
"""How a type stands that is not paused, and one that is."""
EVENT_CHARS_MAX = 100
SUBJECT_CHARS_MAX = 500
TEXT_CHARS_MAX = 2_000
CORRELATION_CHARS_MAX = 200
ACTS_MAX = 500
"""Acts of one page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewAct:
    """An act to record: what happened (`agent.status.changed`), to what, and how that stood before and stands now."""

    event: str
    subject: str
    source: str | None = None
    target: str | None = None
    cause: str | None = None
    correlation_id: str | None = None


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


def checked_act(act: NewAct) -> NewAct:
    """The act as it can be stored, long texts cut; raises OptionInvalid for a name that is too long."""
    if not 1 <= len(act.event) <= EVENT_CHARS_MAX:
        raise OptionInvalid(option="event", value=act.event[:50], expected=f"1 to {EVENT_CHARS_MAX} characters")
    if not 1 <= len(act.subject) <= SUBJECT_CHARS_MAX:
        raise OptionInvalid(option="subject", value=act.subject[:50], expected=f"1 to {SUBJECT_CHARS_MAX} characters")
    correlation = act.correlation_id
    return NewAct(
        event=act.event,
        subject=storable(act.subject) or "",
        source=_cut(act.source),
        target=_cut(act.target),
        cause=_cut(act.cause),
        correlation_id=None if correlation is None else correlation[:CORRELATION_CHARS_MAX],
    )


def rate_text(per_second: float | None, burst: int) -> str | None:
    """A rate limit as acts show it; None for no limit. PostgreSQL words it the same."""
    return None if per_second is None else f"{float(per_second)!r}".removesuffix(".0") + f"/s, burst {burst}"


def _cut(text: str | None) -> str | None:
    return None if text is None else (storable(text) or "")[:TEXT_CHARS_MAX]
