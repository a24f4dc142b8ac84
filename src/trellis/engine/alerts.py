"""Alerts as the ledger stores them: what a round observed, what changed, and the jobs that report a change (OBS-4).

Invariants, kept by the database for any number of evaluators:
- There is at most one open alert of a name and a subject. It is raised once, and resolved once.
- A round resolves an alert only if it has checked that alert's name and subject, and nobody has seen the cause since
  the round began to read. A round that read before an alert was resolved does not raise it again. The ledger numbers
  the rounds that it stores, and a round says after which number it began to read: no clock decides.
- An evaluator resolves an alert only if it was the last one to see it, or if nobody has seen it for `hold_s`. So
  evaluators whose settings differ do not raise and resolve it in turns.
- An alert whose condition an evaluator cannot read stays open as long as that evaluator lives, unless one that has read
  the condition resolves it.
- The jobs that report a change are submitted in the transaction of the change, through the channels of that evaluator.
  An evaluator with other channels submits its own in its next round.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from trellis.engine.jobs import JobId, NewJob, Priority

ALERTS_MAX = 1_000
"""Most alerts that one round observes, or that one listing returns."""
SUBJECT_CHARS_MAX = 300
TEXT_CHARS_MAX = 1_000
REPORT_ATTEMPTS_MAX = 30
UNSEEN_S = 3_600.0
HOLD_S = 180.0
INTERVAL_S_DEFAULT = 15.0
"""How often an evaluator works, unless a setting says otherwise."""
STALE_INTERVALS = 3
"""After this many intervals without another round nobody evaluates any more."""
WEBHOOK, APPRISE = "trellis.alert.webhook", "trellis.alert.apprise"
REPORT_TYPE_PREFIX = "trellis.alert."
"""How the job types of reports begin. They are the platform's own jobs: no alert about the jobs of users counts them."""
STAGE_STEP_TYPES = ("job_retry_scheduled", "job_nlm_called", "job_succeeded")
"""How queue jobs leave a stage: with an error, with a context that was assembled, with an artifact that was written."""


class AlertChangeKind(StrEnum):
    """What happened to an alert."""

    RAISED = "raised"
    RESOLVED = "resolved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One alert. It is open until `resolved_at` is set."""

    id: str
    name: str
    """The kind of alert, such as `jobs-wait`."""
    subject: str
    """What it is about: a job type, an agent, a worker. Empty if the whole instance is meant."""
    value: float
    """The measured value that exceeded the threshold, as last observed."""
    text: str
    """One sentence for people, as last observed."""
    raised_at: datetime
    last_seen_at: datetime
    resolved_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertObservation:
    """A condition that holds now."""

    id: str
    """The id of the alert, if this observation raises one."""
    name: str
    subject: str
    value: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertScope:
    """What a round has checked: an alert's name, for one subject or for all."""

    name: str
    subject: str | None = None
    """None if all subjects were checked."""

    @property
    def pattern(self) -> str:
        """What a subject and the line's end after it begin with, so that `/data` does not cover `/data2`."""
        return "" if self.subject is None else f"{self.subject}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertMark:
    """Where a round begins."""

    mark: int
    """The number of the last round that the ledger has stored."""
    has_open: bool
    unreported: frozenset[str] = frozenset()
    """The channels that reported an alert, which has ended, and have not reported its end."""
    evaluated_at: datetime | None = None
    """When a round was stored last; None if there was none."""
    stale_at: datetime | None = None
    """Until when the evaluators have promised another round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertRound:
    """One round of an evaluator: what it checked, and every condition that it found to hold."""

    mark: int
    """The mark that the ledger gave before the first condition was read."""
    scopes: tuple[AlertScope, ...]
    observed: tuple[AlertObservation, ...]
    report_types: tuple[str, ...] = ()
    """The job types that report changes to people. One job of each type is submitted for every change."""
    unread: tuple[AlertScope, ...] = ()
    """What the round could not read. Open alerts in it stay open."""
    hold_s: float = HOLD_S
    """For how long an alert that another evaluator has seen is not resolved by this one.

    It is longer than evaluators usually pause, because only the other one knows whether its condition is over.
    """
    unseen_s: float = UNSEEN_S
    """An open alert that no evaluator has seen for this long is resolved: its host or its check is gone."""
    keep_s: float = 30 * 24 * 3600.0
    """How long a resolved alert is kept."""
    stale_s: float = STALE_INTERVALS * INTERVAL_S_DEFAULT
    """If no other round follows for this long, nobody evaluates any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertChange:
    """An alert that a round raised or resolved."""

    kind: AlertChangeKind
    alert: Alert


def report_job_id(alert_id: str, kind: AlertChangeKind, type_: str) -> JobId:
    """The id of the job that reports this change through one channel. There is one such job for each change."""
    return JobId(f"{alert_id}-{kind.value}-{type_.rpartition('.')[2]}")


def is_in(alert: Alert, scopes: Sequence[AlertScope]) -> bool:
    """Whether one of these scopes covers the alert."""
    return any(one.name == alert.name and f"{alert.subject}\n".startswith(one.pattern) for one in scopes)


def report_jobs(alert: Alert, kind: AlertChangeKind, types: Sequence[str]) -> list[NewJob]:
    """The jobs that report this change. Their payload only names the alert; the alert itself is read again."""
    return [
        NewJob(
            job_id=report_job_id(alert.id, kind, type_),
            type=type_,
            payload=json.dumps({"alert_id": alert.id, "change": kind.value}).encode(),
            priority=Priority.CRITICAL,
            max_attempts=REPORT_ATTEMPTS_MAX,
            correlation_id=alert.id,
            id_is_given=True,
            fingerprint=kind.value.encode(),
        )
        for type_ in types
    ]
