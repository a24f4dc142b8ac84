"""Schedules of jobs: a job of a type or on a topic at every instant of a cron expression.

The ledger stores them, so that they work without any other store. This module holds what a schedule is and decides what
is to be done at a moment; `trellis.worker.schedules` does it. Invariants:

- Each change of a stored schedule names the version that it read, so of two concurrent changes one succeeds.
- An instant is decided once: either its job is submitted or it is skipped with a reason. The decision is stored before
  the job is submitted (`firing`). A process that dies in between leaves the submit to the others.
- The job of an instant has the idempotency key `schedule:{name}:{instant}` in a scope that no caller can use.
- An instant before the schedule was stored, changed or resumed is never fired.
"""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from itertools import islice, takewhile
from typing import Any, Self

from trellis.engine import admin_acts
from trellis.engine.cron import EXPECTED as CRON_EXPECTED
from trellis.engine.cron import cron_problem, instants_back, next_instant, time_zone
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import TYPE_PATTERN
from trellis.engine.text import is_storable

SCHEDULES_MAX = 1_000
"""The most schedules that one ledger stores."""
SPEC_BYTES_MAX = 65_536
NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
LATE_S = 60.0
"""An instant that nobody fired for so long was missed: the misfire policy decides about it."""
CATCH_UP_MAX = 100
"""The most missed instants that the misfire policy `all` fires. Older ones are skipped."""
JITTER_S_MAX = 3_600.0
DUE_MAX = 100
"""The most due schedules of one read."""
REASON_CHARS_MAX = 500
KEY_CHARS_MAX = 200
RESERVED_SCOPE_PREFIX = "trellis:"
"""Callers cannot use idempotency scopes that begin with it."""
SCHEDULE_SCOPE = f"{RESERVED_SCOPE_PREFIX}schedules"
"""The idempotency scope of scheduled jobs."""
QUEUE_KEY_PREFIX = "schedule:"
"""Prefix of the concurrency key of a schedule whose jobs run one after the other."""

ADDED = admin_acts.SCHEDULE_ADDED
CHANGED = admin_acts.SCHEDULE_CHANGED
PAUSED = admin_acts.SCHEDULE_PAUSED
RESUMED = admin_acts.SCHEDULE_RESUMED
REMOVED = admin_acts.SCHEDULE_REMOVED


class Misfire(StrEnum):
    """What happens to instants that were missed because no process was running."""

    SKIP = "skip"
    """They are skipped."""
    ONCE = "once"
    """All of them together fire one job, for the latest."""
    ALL = "all"
    """Each fires its own job, the oldest first, at most CATCH_UP_MAX."""


class Overlap(StrEnum):
    """What happens at an instant while the job of an earlier one has not ended."""

    ALLOW = "allow"
    """The jobs run beside each other."""
    SKIP = "skip"
    """The instant is skipped."""
    QUEUE = "queue"
    """The jobs run one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSpec:
    """What a schedule does: its expression, and the job to submit at each instant. Exactly one of type and topic."""

    name: str
    cron: str
    tz: str = "UTC"
    type: str | None = None
    topic: str | None = None
    payload: Any = None
    """The payload of each job, as JSON."""
    concurrency_key: str | None = None
    """The concurrency key of each job; only for a type."""
    misfire: Misfire = Misfire.ONCE
    overlap: Overlap = Overlap.ALLOW
    jitter_s: float = 0.0
    """Each instant fires up to so many seconds later, and before the next one. The delay depends on the name and the
    instant alone."""

    @property
    def zone(self) -> tzinfo:
        return time_zone(self.tz) or UTC

    def to_json(self) -> str:
        """The text that the ledger stores. Equal schedules have equal texts."""
        values = {
            "cron": self.cron,
            "tz": self.tz,
            "type": self.type,
            "topic": self.topic,
            "payload": self.payload,
            "concurrency_key": self.concurrency_key,
            "misfire": self.misfire.value,
            "overlap": self.overlap.value,
            "jitter_s": self.jitter_s,
        }
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, name: str, text: str) -> Self:
        values = json.loads(text)
        policies = {"misfire": Misfire(values.pop("misfire")), "overlap": Overlap(values.pop("overlap"))}
        return cls(name=name, **policies, **values)

    def fires_at(self, instant: datetime) -> datetime:
        """When this instant fires: at the instant, plus its jitter. Every process computes the same.

        An instant fires before the next one, so a jitter that is longer than the time between them is cut.
        """
        if not self.jitter_s:
            return instant
        longest_s = min(self.jitter_s, (self.next_instant(instant) - instant).total_seconds())
        digest = hashlib.sha256(f"{self.name}:{instant_text(instant)}".encode()).digest()
        return instant + timedelta(seconds=longest_s * int.from_bytes(digest[:4]) / 2**32)

    def next_instant(self, after: datetime) -> datetime:
        return next_instant(self.cron, after, self.zone)

    def next_fire(self, since: datetime) -> datetime:
        """When the first instant after `since` fires."""
        return self.fires_at(self.next_instant(since))


def checked_spec(spec: ScheduleSpec) -> ScheduleSpec:
    """The schedule with its expression in normal form. Raises OptionInvalid, which says what to change."""
    problem = cron_problem(spec.cron)
    named = [target for target in (spec.type, spec.topic) if target is not None]
    checks = (
        ("name", spec.name, re.fullmatch(NAME_PATTERN, spec.name), "1 to 64 of a-z 0-9 . _ -, a letter or digit first"),
        ("cron", spec.cron, problem is None, f"{problem}; give {CRON_EXPECTED}"),
        ("tz", spec.tz, time_zone(spec.tz), "a name of the tz database, such as Europe/Kyiv or UTC"),
        ("type", spec.type or spec.topic, len(named) == 1, "give a job type or a topic, one of the two"),
        (
            "type",
            "".join(named),
            all(re.fullmatch(TYPE_PATTERN, one) for one in named),
            f"it must match {TYPE_PATTERN}",
        ),
        ("jitter_s", spec.jitter_s, 0 <= spec.jitter_s <= JITTER_S_MAX, f"from 0 to {JITTER_S_MAX:g} seconds"),
    )
    for option, value, is_right, expected in checks:
        if not is_right:
            raise OptionInvalid(option=option, value=str(value)[:KEY_CHARS_MAX], expected=expected)
    _check_concurrency(spec)
    normal = replace(spec, cron=" ".join(spec.cron.split()), jitter_s=float(spec.jitter_s))
    _check_text(normal)
    return normal


def _check_concurrency(spec: ScheduleSpec) -> None:
    key, queued = spec.concurrency_key, spec.overlap is Overlap.QUEUE
    if spec.topic is not None and (queued or key is not None):
        expected = "allow or skip, and no concurrency key: the limits of a topic are its own"
        raise OptionInvalid(option="overlap", value=spec.overlap.value, expected=expected)
    if queued and key is not None:
        expected = "allow or skip: its jobs have a concurrency key, which already limits how many run at once"
        raise OptionInvalid(option="overlap", value=spec.overlap.value, expected=expected)
    if key is not None and not (1 <= len(key) <= KEY_CHARS_MAX and is_storable(key)):
        raise OptionInvalid(option="concurrency_key", value=key[:40], expected=f"1 to {KEY_CHARS_MAX} characters")


def _check_text(spec: ScheduleSpec) -> None:
    try:
        text = spec.to_json()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionInvalid(option="payload", value="…", expected=f"what JSON can hold ({error})") from error
    if len(text) > SPEC_BYTES_MAX:
        expected = f"at most {SPEC_BYTES_MAX} bytes of JSON together with its options"
        raise OptionInvalid(option="payload", value=f"{len(text)} bytes", expected=expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRecord:
    """A schedule as the ledger stores it. `version` 0 is one that is not stored yet."""

    spec: ScheduleSpec
    owner: str
    """Who owns its jobs."""
    since: datetime
    """Instants up to here are decided, or were before the schedule was stored, changed or resumed."""
    version: int = 0
    paused: bool = False
    next_at: datetime | None = None
    """When something is to be done next; None while paused."""
    firing: datetime | None = None
    """The instant whose job is being submitted."""
    last_at: datetime | None = None
    """The last instant that was decided."""
    last_job: str | None = None
    """The last job that was submitted."""
    skipped: str | None = None
    """Why the last instant submitted no job; None if it did."""

    @property
    def name(self) -> str:
        return self.spec.name

    def from_now(self, now: datetime) -> "ScheduleRecord":
        """The record with no instant before `now` left to fire."""
        return replace(self, since=now, firing=None, next_at=None if self.paused else self.spec.next_fire(now))


@dataclass(frozen=True, kw_only=True, slots=True)
class DueSchedules:
    """Schedules with something to do at `now`, the ledger's time. `next_at` is when the next of all others is due."""

    now: datetime
    due: tuple[ScheduleRecord, ...] = ()
    next_at: datetime | None = None


def new_record(spec: ScheduleSpec, owner: str, now: datetime, *, paused: bool = False) -> ScheduleRecord:
    """A checked schedule that fires from `now` on. Raises OptionInvalid."""
    return ScheduleRecord(spec=checked_spec(spec), owner=owner, since=now, paused=paused).from_now(now)


def instant_text(instant: datetime) -> str:
    """The instant as used in idempotency keys, without fractions of a second."""
    return f"{instant.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def instant_key(name: str, instant: datetime) -> str:
    """The idempotency key of the job of this instant."""
    return f"schedule:{name}:{instant_text(instant)}"


def next_fires(record: ScheduleRecord, now: datetime, count: int) -> list[datetime]:
    """When the next instants fire, from `now` on. A paused schedule shows when it would."""
    instants: list[datetime] = []
    at = max(now, record.since)
    for _ in range(count):
        at = record.spec.next_instant(at)
        instants.append(record.spec.fires_at(at))
    return instants


@dataclass(frozen=True, slots=True)
class InstantDecision:
    """What is to be done about the next instants of a schedule: fire `instant`, or skip all up to it with a reason."""

    instant: datetime
    skipped: str | None = None


def decide(record: ScheduleRecord, now: datetime) -> InstantDecision | None:
    """What the misfire policy says at this moment; None if no instant is due."""
    spec = record.spec
    open_instants = takewhile(lambda instant: instant > record.since, instants_back(spec.cron, now, spec.zone))
    due = (instant for instant in open_instants if spec.fires_at(instant) <= now)
    newest_first = list(islice(due, CATCH_UP_MAX + 1))
    if not newest_first:
        return None
    latest = newest_first[0]
    match spec.misfire:
        case Misfire.ONCE:
            return InstantDecision(latest)
        case Misfire.ALL if len(newest_first) > CATCH_UP_MAX:
            many = f"more than {CATCH_UP_MAX} instants were missed; this one and those before it are not made up for"
            return InstantDecision(newest_first[-1], skipped=many)
        case Misfire.ALL:
            return InstantDecision(newest_first[-1])
        case Misfire.SKIP:
            in_time = [one for one in newest_first if now - spec.fires_at(one) <= timedelta(seconds=LATE_S)]
            late = f"it was missed by more than {LATE_S:g} s"
            return InstantDecision(in_time[-1]) if in_time else InstantDecision(latest, skipped=late)


def decided(record: ScheduleRecord, decision: InstantDecision) -> ScheduleRecord:
    """The record after a decision. A fired instant stays due until its job is submitted (`submitted`)."""
    if decision.skipped is None:
        return replace(record, since=decision.instant, firing=decision.instant, last_at=decision.instant, skipped=None)
    return _concluded(
        replace(record, since=decision.instant, last_at=decision.instant, skipped=decision.skipped[:REASON_CHARS_MAX])
    )


def submitted(record: ScheduleRecord, job_id: str | None, refusal: str | None = None) -> ScheduleRecord:
    """The record after the job of `firing` was submitted, or was refused for this reason."""
    reason = None if refusal is None else refusal[:REASON_CHARS_MAX]
    return _concluded(replace(record, firing=None, last_job=job_id or record.last_job, skipped=reason))


def _concluded(record: ScheduleRecord) -> ScheduleRecord:
    return replace(record, next_at=None if record.paused else record.spec.next_fire(record.since))
