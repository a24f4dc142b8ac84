"""Scheduled runs (RUN-9): registers the cron expressions that agents declare, and starts each due run exactly once.

Any number of processes may fire. The run of an instant has the idempotency key `cron:{slug}:{instant}`, in a scope that
no caller can use, and the ledger creates one run per key. All times are the ledger's. An instant before the
registration is never fired. Of missed instants only the latest is made up for, and only within the grace period. A
schedule that cannot be fired does not stop the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from trellis.agents.catalog import Catalog
from trellis.agents.definition import AgentDefinition
from trellis.agents.errors import AgentError
from trellis.documents.errors import RunError, ScheduleContended
from trellis.engine.errors import InputError
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.schedules import instant_text
from trellis.runs.orchestration import OrchestrationLayer, TriggerKind
from trellis.runs.timetable import HandledInstant, RegisteredSchedule, Timetable
from trellis.storage.objects.store import StoreUnavailable

GRACE_S_DEFAULT = 3_600.0
POLL_S_DEFAULT = 15.0
PAUSE_S_MIN = 0.02
REGISTER_S_DEFAULT = 30.0

_log = log_of("trellis.schedules")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleOptions:
    """Settings for firing schedules."""

    grace_s: float = GRACE_S_DEFAULT
    """How late a missed instant may still be fired."""
    poll_s: float = POLL_S_DEFAULT
    """Longest time until a schedule registered by another process is noticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleReport:
    """Result of one pass. `next_s` is the time until the next instant, None if there is none."""

    runs: tuple[str, ...] = ()
    skipped: int = 0
    next_s: float | None = None


@dataclass(kw_only=True)
class ScheduleFirer:
    """Fires due schedules: one run for each instant of each registered schedule."""

    ledger: Ledger
    layer: OrchestrationLayer
    timetable: Timetable
    options: ScheduleOptions = field(default_factory=ScheduleOptions)
    name: str = "schedules"

    async def run_once(self) -> ScheduleReport:
        """Check every registered schedule once."""
        now, schedules = await self.ledger.now(), await self.timetable.all()
        runs: list[str] = []
        skipped = 0
        for registered in schedules:
            instant = registered.schedule.due(now)
            if instant is None:
                continue
            try:
                last = await self._fire(registered, instant, now)
                runs += [last.run_id] if last.run_id else []
                skipped += last.run_id is None
                if await self.timetable.handled(registered, last):
                    _log_instant(registered, last)
            except StoreUnavailable as error:  # it stays due; the next pass fires it
                _log.warning("schedule_left", agent=registered.schedule.agent_slug, error=str(error))
        coming = [instant for one in schedules if (instant := one.schedule.next(now)) is not None]
        next_s = (min(coming) - now).total_seconds() if coming else None
        return ScheduleReport(runs=tuple(runs), skipped=skipped, next_s=next_s)

    def pause_s(self, report: ScheduleReport) -> float:
        """Until the next instant, but at most `poll_s`, so that new schedules are noticed."""
        if report.next_s is None:
            return self.options.poll_s
        return max(PAUSE_S_MIN, min(report.next_s, self.options.poll_s))

    async def _fire(self, registered: RegisteredSchedule, instant: datetime, now: datetime) -> HandledInstant:
        slug, text = registered.schedule.agent_slug, instant_text(instant)
        if now - instant > timedelta(seconds=self.options.grace_s):
            return HandledInstant(instant=instant, skipped=f"it was missed by more than {self.options.grace_s:g} s")
        try:
            run = await self.layer.trigger(
                slug, {"instant": text}, kind=TriggerKind.CRON, key=f"{TriggerKind.CRON}:{slug}:{text}"
            )
        except (AgentError, RunError, InputError) as error:
            return HandledInstant(instant=instant, skipped=str(error))
        return HandledInstant(instant=instant, run_id=run.job_id)


def _log_instant(registered: RegisteredSchedule, last: HandledInstant) -> None:
    """Log one line per instant, from the process that stored its result."""
    log = _log.bind(agent=registered.schedule.agent_slug, instant=instant_text(last.instant))
    if last.run_id is None:
        log.warning("schedule_skipped", reason=last.skipped)
    else:
        log.info("schedule_fired", run_id=last.run_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistrarReport:
    """What one pass changed."""

    registered: tuple[str, ...] = ()
    unregistered: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScheduleRegistrar:
    """Keeps the layer's schedules equal to the `triggers.cron` of the active agents."""

    layer: OrchestrationLayer
    catalog: Catalog
    interval_s: float = REGISTER_S_DEFAULT
    name: str = "schedule-registrar"

    async def run_once(self) -> RegistrarReport:
        """Compare every agent's file with the registered schedules once."""
        listed = await self.catalog.list()
        declared = {
            agent.slug: agent.triggers.cron
            for agent in listed.agents
            if isinstance(agent, AgentDefinition) and agent.may_run and agent.triggers.cron is not None
        }
        known = {schedule.agent_slug: schedule.cron for schedule in await self.layer.schedules()}
        looked_at = {agent.slug for agent in listed.agents}
        gone = [slug for slug in known if slug not in declared and (listed.complete or slug in looked_at)]
        return await self._apply({slug: cron for slug, cron in declared.items() if known.get(slug) != cron}, gone)

    def pause_s(self, report: RegistrarReport) -> float:  # noqa: ARG002 - the shape of every service
        """Always `interval_s`."""
        return self.interval_s

    async def _apply(self, declared: Mapping[str, str], gone: list[str]) -> RegistrarReport:
        registered = [slug for slug, cron in declared.items() if await self._register(slug, cron)]
        unregistered = [slug for slug in gone if await self._register(slug, None)]
        return RegistrarReport(registered=tuple(registered), unregistered=tuple(unregistered))

    async def _register(self, slug: str, cron: str | None) -> bool:
        """Whether the schedule was stored. If other writers keep changing it, the next pass tries again."""
        try:
            await self.layer.register_schedule(slug, cron)
        except ScheduleContended as error:
            _log.warning("schedule_left", agent=slug, error=str(error))
            return False
        if cron is None:
            _log.info("schedule_unregistered", agent=slug)
        else:
            _log.info("schedule_registered", agent=slug, cron=cron)
        return True
