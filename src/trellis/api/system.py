"""What an instance does now: queues, workers, alerts, service level objectives (OBS-3 to OBS-5, D35)."""

from datetime import datetime
from typing import TYPE_CHECKING

from trellis.api.context import ApiPart
from trellis.auth.matrices import RULES
from trellis.engine.alerts import ALERTS_MAX, Alert
from trellis.engine.errors import Refused
from trellis.engine.metrics import exposition
from trellis.engine.records import JobFilter, WorkerRecord
from trellis.engine.text import nearest
from trellis.http.operation_shapes import (
    AlertPage,
    AlertShape,
    QueuePaused,
    QueueShape,
    RuleShape,
    SloShape,
    WorkerShape,
)
from trellis.http.shapes import Page
from trellis.operations.alerts import ALERTS
from trellis.operations.explain import served_types, worker_presence
from trellis.operations.job_documents import json_value
from trellis.operations.metrics import ledger_gauges
from trellis.operations.runbooks import runbook_command
from trellis.storage.objects.canonical_json import timestamp
from trellis.worker.app import checked_type

if TYPE_CHECKING:
    from trellis.operations.slo import SloMeasurement

READ, PAUSE = "system.read", "queues.pause"


class LocalSystem(ApiPart):
    """The state of an instance on its ledger and stores, with the calls of `client.system`."""

    async def queues(self) -> Page[QueueShape]:
        self._context.check_read(READ)
        queue_counts = await self._context.ledger.queues()
        return Page[QueueShape](items=[QueueShape.model_validate(one) for one in queue_counts], next_cursor=None)

    async def pause(self, type_: str, *, reason: str | None = None, force: bool = False) -> QueuePaused:
        """Pause a job type: no more of its jobs are claimed. Held jobs continue. An operator's act.

        A type of which nothing was seen yet is refused unless `force` is given: it is probably misspelt.
        """
        return await self._set(type_, paused=True, reason=reason, force=force)

    async def resume(self, type_: str, *, reason: str | None = None, force: bool = False) -> QueuePaused:
        return await self._set(type_, paused=False, reason=reason, force=force)

    async def _set(self, type_: str, *, paused: bool, reason: str | None, force: bool) -> QueuePaused:
        actor, chosen = self._context.permit(PAUSE), checked_type(type_)
        if not force:
            await self._refuse_unknown(chosen)
        await self._context.changes.pause(actor, chosen, paused=paused, cause=reason)
        return QueuePaused(type=chosen, paused=paused)

    async def _refuse_unknown(self, type_: str) -> None:
        """Raise Refused for an unknown type: pausing a misspelt name would leave the intended one running."""
        ledger = self._context.changes
        known = {queue.type for queue in await ledger.queues()}
        known |= {served for worker in await ledger.workers() for served in served_types(worker)}
        if type_ in known or (await ledger.jobs(JobFilter(type=type_), limit=1)).jobs:
            return
        near = nearest(type_, known)
        hint = f"did you mean {near}?" if near else "`trellis queues` lists those that are."
        raise Refused(
            detail=f"Type {type_!r} is not known here: nothing of it was submitted and no worker serves it; {hint}"
            " --force does it all the same, before its first job."
        )

    async def workers(self) -> Page[WorkerShape]:
        self._context.check_read(READ)
        now, workers = await self._context.now(), await self._context.ledger.workers()
        newest_first = sorted(workers, key=lambda seen: seen.seen_at, reverse=True)
        return Page[WorkerShape](items=[_worker(one, now) for one in newest_first], next_cursor=None)

    async def alerts(self, *, only_open: bool = False, limit: int = ALERTS_MAX) -> AlertPage:
        self._context.check_read(READ)
        alerts = await self._context.ledger.alerts(limit=limit, only_open=only_open)
        last, now = await self._context.ledger.alert_mark(), await self._context.now()
        return AlertPage(
            items=[_alert(one) for one in alerts],
            next_cursor=None,
            evaluated=last.stale_at is not None and now <= last.stale_at,
            evaluated_at=None if last.evaluated_at is None else timestamp(last.evaluated_at),
        )

    async def metrics(self) -> str:
        """Queues, workers and followers in Prometheus' text format. A gateway adds what its process has counted."""
        self._context.check_read(READ)
        return exposition(await ledger_gauges(self._context.ledger)).decode()

    async def slo(self) -> Page[SloShape]:
        self._context.check_read(READ)
        from trellis.operations.slo import measure_objectives  # loads the lifecycles' own modules

        items = [_slo(one) for one in await measure_objectives(self._context.ledger)]
        return Page[SloShape](items=items, next_cursor=None)

    async def authority(self) -> Page[RuleShape]:
        self._context.check_read("rules.read")
        items = [
            RuleShape(
                name=rule.name,
                action=rule.action,
                source=rule.source,
                grants={role.value: grant.value for role, grant in rule.grants.items()},
            )
            for rule in RULES.values()
        ]
        return Page[RuleShape](items=items, next_cursor=None)


def _alert(alert: Alert) -> AlertShape:
    declared = ALERTS.get(alert.name)
    return AlertShape(
        id=alert.id,
        name=alert.name,
        subject=alert.subject,
        value=alert.value,
        text=alert.text,
        state="open" if alert.resolved_at is None else "resolved",
        raised_at=timestamp(alert.raised_at),
        last_seen_at=timestamp(alert.last_seen_at),
        resolved_at=None if alert.resolved_at is None else timestamp(alert.resolved_at),
        action="" if declared is None else declared.action,
        runbook="" if declared is None else runbook_command(declared.page),
    )


def _worker(seen: WorkerRecord, now: datetime) -> WorkerShape:
    return WorkerShape(
        name=seen.name,
        seen_at=timestamp(seen.seen_at),
        silent_s=max(0.0, (now - seen.seen_at).total_seconds()),
        state=worker_presence(seen, now).value,
        held=seen.held,
        info=json_value(seen.info),
    )


def _slo(measured: "SloMeasurement") -> SloShape:
    objective = measured.objective
    return SloShape(
        name=objective.name,
        title=objective.title,
        status=measured.status.value,
        value=measured.value,
        unit=objective.unit.value,
        goal="above" if objective.is_above else "below",
        target=objective.target,
        window_s=objective.window_s,
        samples=measured.samples,
        bad=measured.bad,
        error_budget_left=measured.error_budget_left,
        partial=measured.is_partial,
        counts=objective.counts,
    )
