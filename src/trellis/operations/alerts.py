"""Alerts: the one table that declares them, and the service that evaluates their conditions (OBS-4).

An alert says that something needs an operator. Its declaration has what it watches, the threshold, what the operator
does, and the page with the commands. The conditions themselves are in `alert_conditions.py` (read from the ledger and
the object store) and in `host_conditions.py` (this machine's disks and certificates).

Every process with the role `alerts` runs an `AlertEvaluator`; there is no leader. Each evaluator reads the conditions
and gives the ledger all that hold. The ledger decides what is raised and what is resolved (`engine/alerts.py`), so two
evaluators raise an alert once. A condition that cannot be read changes nothing: its alert stays as it is.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TypeVar

from trellis.engine.alerts import (
    HOLD_S,
    INTERVAL_S_DEFAULT,
    STALE_INTERVALS,
    SUBJECT_CHARS_MAX,
    TEXT_CHARS_MAX,
    Alert,
    AlertChange,
    AlertChangeKind,
    AlertMark,
    AlertObservation,
    AlertRound,
    AlertScope,
)
from trellis.engine.clock import Clock
from trellis.engine.errors import TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.operations.runbooks import SUFFIX, runbook, runbook_command

SUBJECTS_MAX = 20
"""Most subjects of one alert at a time. What exceeds it is left out until another subject is resolved."""
COUNT_S = 60.0
"""How often a round also counts what ended in a window."""

_log = log_of("trellis.alerts")


@dataclass(frozen=True, slots=True)
class AlertDeclaration:
    """One kind of alert."""

    name: str
    watches: str
    """What holds while the alert is open, as a sentence."""
    subject: str = ""
    """What its subject is; empty if the alert is about the whole instance."""
    _: KW_ONLY
    setting: str | None = None
    """The setting with its threshold; None for a fixed one."""
    action: str
    """What the operator does first."""
    page: str
    """The name of its runbook, the page with the commands that help."""

    @property
    def runbook(self) -> str:
        """The file of that page in docs/runbooks."""
        return f"{self.page}{SUFFIX}"


JOBS_WAIT = "jobs-wait"
DEAD_JOBS = "dead-jobs"
ARTIFACT_WRITES = "artifact-writes"
CONTEXT_TIMEOUTS = "context-timeouts"
AGENT_FAILING = "agent-failing"
PROPOSAL_WAITS = "proposal-waits"
WORKER_LOST = "worker-lost"
PROJECTOR_LAG = "projector-lag"
RETENTION_HELD = "retention-held"
DEAD_LETTERS = "dead-letters"
DISK_LOW = "disk-low"
EXPIRY = "expiry"

ALERTS: Mapping[str, AlertDeclaration] = MappingProxyType(
    {
        one.name: one
        for one in (
            # The four of document 000, 5.4.
            AlertDeclaration(
                JOBS_WAIT,
                "A job has waited to be claimed for more than five minutes.",
                "job type",
                setting="alert_queued_s",
                action="Check that a worker serves the type; for queue jobs, also the NLM backend.",
                page="jobs-wait",
            ),
            AlertDeclaration(
                DEAD_JOBS,
                "More than 1 % of the queue jobs that ended in the last seven days are DEAD.",
                setting="alert_dead_percent",
                action="Read the log of the orchestrator.",
                page="dead-letters",
            ),
            AlertDeclaration(
                ARTIFACT_WRITES,
                "The last three tries of queue jobs to write an artifact failed.",
                action="Check that the object store answers.",
                page="object-store-down",
            ),
            AlertDeclaration(
                CONTEXT_TIMEOUTS,
                "The last three context assemblies of queue jobs took too long.",
                action="Check the memory repository and the object store.",
                page="context-timeouts",
            ),
            # What else needs an operator.
            AlertDeclaration(
                AGENT_FAILING,
                "Three runs of an agent failed in a row: it was stopped, or a server that it needs, as its model's, is away.",
                "agent",
                action="Read the error of its last run and mend the cause; activate the agent if it was stopped.",
                page="agent-failing",
            ),
            AlertDeclaration(
                PROPOSAL_WAITS,
                "A proposal has waited for a decision for more than 48 hours. It expires after 72.",
                "proposal",
                setting="alert_proposal_hours",
                action="Approve or reject it.",
                page="proposal-waits",
            ),
            AlertDeclaration(
                WORKER_LOST,
                "A worker stopped sending heartbeats without having drained.",
                "worker",
                action="Look whether its process or its machine died, and start it again.",
                page="worker-lost",
            ),
            AlertDeclaration(
                PROJECTOR_LAG,
                "The projector has not read an event that is over a minute old.",
                "follower",
                setting="alert_lag_s",
                action="Check that a process with the role projector runs and reaches the object store.",
                page="follower-behind",
            ),
            AlertDeclaration(
                RETENTION_HELD,
                "Retention keeps ended jobs because a follower has not read their events.",
                "follower",
                action="Start the follower again, or let retention go on without it.",
                page="retention-held",
            ),
            AlertDeclaration(
                DEAD_LETTERS,
                "More than 1 % of the jobs that ended in the last hour became dead letters, and at least three did.",
                setting="alert_dead_percent",
                action="Read the dead letters, mend the cause, and requeue them.",
                page="dead-letters",
            ),
            AlertDeclaration(
                DISK_LOW,
                "A disk of an instance has less than a tenth of its space left.",
                "machine and folder",
                setting="alert_disk_percent",
                action="Make room, or enlarge the disk.",
                page="disk-low",
            ),
            AlertDeclaration(
                EXPIRY,
                "A certificate or a token of this instance ends within 14 days.",
                "machine and setting",
                setting="alert_expiry_days",
                action="Renew it.",
                page="expiry",
            ),
        )
    }
)
"""Every alert, by name. Thresholds in the sentences are the defaults; the setting changes them."""


def runbook_of(name: str) -> tuple[str, str]:
    """The name and the text of a runbook, by its own name or by that of an alert. Raises RunbookUnknown."""
    declared = ALERTS.get(name.removesuffix(SUFFIX))
    page = name.removesuffix(SUFFIX) if declared is None else declared.page
    return page, runbook(page, also=ALERTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertThresholds:
    """When the conditions hold. `app/settings.py` has the settings."""

    queued_s: float = 300.0
    dead_percent: float = 1.0
    proposal_hours: float = 48.0
    lag_s: float = 60.0
    disk_percent: float = 10.0
    """Percent of a disk's space that must be free."""
    expiry_days: float = 14.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionMet:
    """A condition that holds for one subject."""

    subject: str = ""
    value: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What one check read: for each alert that it decides about, the subjects for which the condition holds."""

    met: Mapping[str, Sequence[ConditionMet]]
    subjects: tuple[str, ...] | None = None
    """The check decides only about these subjects: those of its own machine that it has looked at. None: about all."""
    unread: tuple[AlertScope, ...] = ()
    """What could not be read: nobody knows whether these conditions hold."""


Check = Callable[[datetime], Awaitable[Checked]]
"""Reads the conditions of some alerts at the ledger's time. A TrellisError or OSError means that they are not known.

`decides` names those alerts.
"""
CheckT = TypeVar("CheckT", bound=Callable[..., Awaitable[Checked]])


def decides(*names: str) -> Callable[[CheckT], CheckT]:
    """Declare the alerts that a check decides about, so that they stay as they are while it fails."""

    def declare(check: CheckT) -> CheckT:
        check.alerts = names  # pyright: ignore[reportFunctionMemberAccess]
        return check

    return declare


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertOptions:
    """How often an evaluator works, how long alerts are kept, and what reports them."""

    interval_s: float = INTERVAL_S_DEFAULT
    keep_s: float = 30 * 24 * 3600.0
    report_types: tuple[str, ...] = ()
    """Job types that report changes to people."""

    @property
    def stale_s(self) -> float:
        """If no other round follows for this long, nobody evaluates any more."""
        return STALE_INTERVALS * self.interval_s


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertReport:
    """The result of one round."""

    changes: tuple[AlertChange, ...] = ()


@dataclass(kw_only=True)
class AlertEvaluator:
    """The service. Each round reads every condition and gives the ledger those that hold."""

    ledger: Ledger
    actor: Actor
    clock: Clock
    checks: tuple[Check, ...]
    """Checks of every round."""
    counts: tuple[Check, ...] = ()
    """Checks that cost more, at most every COUNT_S. A round without them leaves their alerts as they are."""
    new_id: Callable[[], str]
    options: AlertOptions = field(default_factory=AlertOptions)
    name: str = "alerts"
    _counted_at: float = field(default=float("-inf"))

    async def run_once(self) -> AlertReport:
        """Run one round. Raises LedgerError when the ledger does not answer."""
        began, read_at = await self.ledger.alert_mark(), await self.ledger.now()
        scopes: list[AlertScope] = []
        observed: list[AlertObservation] = []
        unread: list[AlertScope] = []
        now = self.clock.monotonic()
        is_counting = now - self._counted_at >= COUNT_S
        for check in (*self.checks, *(self.counts if is_counting else ())):
            checked = await self._checked(check, read_at)
            unread += checked.unread
            subjects = (None,) if checked.subjects is None else checked.subjects
            for name, met in checked.met.items():
                scopes += [AlertScope(name=name, subject=one and one[:SUBJECT_CHARS_MAX]) for one in subjects]
                observed += [self._observation(name, one) for one in await self._first(name, met, began)]
        self._counted_at = now if is_counting else self._counted_at
        has_to_report = not began.unreported.isdisjoint(self.options.report_types)
        if not (observed or began.has_open or has_to_report or self._is_due(began, read_at)):
            return AlertReport()
        round_ = AlertRound(
            mark=began.mark,
            scopes=tuple(scopes),
            observed=tuple(observed),
            report_types=self.options.report_types,
            keep_s=self.options.keep_s,
            unread=tuple(unread),
            hold_s=max(HOLD_S, 3 * self.options.interval_s),
            stale_s=self.options.stale_s,
        )
        changes = await self.ledger.observe_alerts(self.actor, round_)
        for change in changes:
            _log_change(change)
        return AlertReport(changes=tuple(changes))

    def pause_s(self, report: AlertReport) -> float:  # noqa: ARG002 - the shape of every service
        """The fixed interval."""
        return self.options.interval_s

    def _is_due(self, began: AlertMark, now: datetime) -> bool:
        """Whether a round in which nothing holds is stored, so that readers see that alerts are evaluated.

        Among several evaluators one round in half an interval is enough. The last one may be of an evaluator with
        another interval: then this one stores its own, whichever of the two comes due first.
        """
        if began.evaluated_at is None or began.stale_at is None:
            return True
        age_s = (now - began.evaluated_at).total_seconds()
        left_s = (began.stale_at - now).total_seconds()
        return max(age_s, self.options.stale_s - left_s) >= self.options.interval_s / 2

    async def _checked(self, check: Check, now: datetime) -> Checked:
        """What a check read. If it fails, none of the alerts that it decides about is known."""
        try:
            return await check(now)
        except (TrellisError, OSError) as error:
            _log.warning("condition_unknown", check=getattr(check, "__name__", "check"), error=str(error))
            names: tuple[str, ...] = getattr(check, "alerts", ())
            return Checked(met={}, unread=tuple(AlertScope(name=name) for name in names))

    async def _first(self, name: str, met: Sequence[ConditionMet], began: AlertMark) -> Sequence[ConditionMet]:
        """At most SUBJECTS_MAX subjects. Those with an open alert come first: what still holds is not resolved."""
        if len(met) <= SUBJECTS_MAX:
            return met
        opened = await self.ledger.alerts(only_open=True) if began.has_open else []
        subjects = {one.subject for one in opened if one.name == name}
        return sorted(met, key=lambda one: one.subject[:SUBJECT_CHARS_MAX] not in subjects)[:SUBJECTS_MAX]

    def _observation(self, name: str, met: ConditionMet) -> AlertObservation:
        return AlertObservation(
            id=f"alert-{self.new_id()}",
            name=name,
            subject=met.subject[:SUBJECT_CHARS_MAX],
            value=met.value,
            text=met.text[:TEXT_CHARS_MAX],
        )


def _log_change(change: AlertChange) -> None:
    alert, declared = change.alert, ALERTS[change.alert.name]
    about = {"alert": alert.name, "subject": alert.subject, "alert_id": alert.id}
    if change.kind is AlertChangeKind.RAISED:
        _log.warning(
            "alert_raised", **about, text=alert.text, remedy=declared.action, runbook=runbook_command(declared.page)
        )
    else:
        _log.info("alert_resolved", **about)


def open_counts(alerts: Sequence[Alert]) -> dict[str, int]:
    """How many alerts of each declared name are open."""
    counts = dict.fromkeys(ALERTS, 0)
    for alert in alerts:
        if alert.resolved_at is None:
            counts[alert.name] = counts.get(alert.name, 0) + 1
    return counts
