"""Schedules: when agents run and jobs are submitted by themselves. People add, change, run and remove those of jobs."""

from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from trellis.api.context import ApiPart
from trellis.app.system import new_id
from trellis.auth.ownership import owner_name
from trellis.engine.errors import SettingsInvalid
from trellis.engine.option_values import check_choice
from trellis.engine.schedules import Misfire, Overlap, ScheduleRecord, ScheduleSpec, next_fires
from trellis.http.operation_shapes import ScheduleDetail, ScheduleRemoved, ScheduleRun, ScheduleShape
from trellis.http.shapes import Page
from trellis.runs.timetable import Schedule
from trellis.worker.schedules import READ, JobSchedules

if TYPE_CHECKING:  # an instance loads the whole platform
    from trellis.app.instance import Instance
    from trellis.bus.submitter import BusSubmitter

SHOWN_INSTANTS = 5
POLICIES = {"misfire": Misfire, "overlap": Overlap}


class LocalSchedules(ApiPart):
    """Schedules on a ledger and its stores, with the calls of `client.schedules`."""

    async def list(self) -> Page[ScheduleShape]:
        self._context.check_read(READ)
        now, jobs = await self._context.now(), await self._jobs().list()
        agents: Sequence[Schedule] = ()
        with suppress(SettingsInvalid):  # a ledger without the stores of an instance has no agents
            agents = await (await self._context.instance()).layer.schedules()
        items = [*(_of_agent(one, now) for one in agents), *(_of_jobs(one) for one in jobs)]
        return Page[ScheduleShape](items=items, next_cursor=None)

    async def get(self, name: str) -> ScheduleDetail:
        """One schedule of jobs, and when its next five instants fire. Raises ScheduleNotFound."""
        return await self._detail(await self._jobs().get(name))

    async def add(
        self,
        name: str,
        *,
        cron: str,
        tz: str = "UTC",
        type_: str | None = None,
        topic: str | None = None,
        payload: Any = None,
        concurrency_key: str | None = None,
        misfire: str = Misfire.ONCE,
        overlap: str = Overlap.ALLOW,
        jitter_s: float = 0.0,
        paused: bool = False,
        reason: str | None = None,
    ) -> ScheduleDetail:
        """Add a schedule of jobs of a type, or on a topic. The same again changes nothing. Raises ScheduleExists."""
        spec = ScheduleSpec(
            name=name,
            cron=cron,
            tz=tz,
            type=type_,
            topic=topic,
            payload=payload,
            concurrency_key=concurrency_key,
            misfire=check_choice(Misfire, "misfire", misfire),
            overlap=check_choice(Overlap, "overlap", overlap),
            jitter_s=jitter_s,
        )
        return await self._detail(await self._jobs().add(spec, paused=paused, reason=reason))

    async def change(
        self, name: str, changes: Mapping[str, Any], *, paused: bool | None = None, reason: str | None = None
    ) -> ScheduleDetail:
        """Change fields of a schedule of jobs, or pause or resume it. Raises ScheduleNotFound."""
        checked_changes = {
            field: check_choice(POLICIES[field], field, value) if field in POLICIES else value
            for field, value in changes.items()
        }
        return await self._detail(await self._jobs().change(name, checked_changes, paused=paused, reason=reason))

    async def pause(self, name: str, *, reason: str | None = None) -> ScheduleDetail:
        return await self.change(name, {}, paused=True, reason=reason)

    async def resume(self, name: str, *, reason: str | None = None) -> ScheduleDetail:
        return await self.change(name, {}, paused=False, reason=reason)

    async def remove(self, name: str, *, reason: str | None = None) -> ScheduleRemoved:
        await self._jobs().remove(name, reason=reason)
        return ScheduleRemoved(name=name)

    async def run(self, name: str) -> ScheduleRun:
        """Submit the job of a schedule now, whether it is paused or not. Raises IdempotencyMismatch."""
        request = self._context.request_of(None)
        ran = await self._jobs().run_under_key(name, request.change(name))
        request.note(replayed=not ran.created)
        return ScheduleRun(name=name, job_id=ran.job_id)

    def _jobs(self) -> JobSchedules:
        """The schedules of jobs. The instance is opened only to submit a job on a topic."""
        context = self._context
        opened: deque[Instance] = deque()

        @asynccontextmanager
        async def bus() -> "AsyncGenerator[BusSubmitter]":
            opened.append(await context.instance())
            async with opened[0].open_bus_submitter() as submitter:
                yield submitter

        def wake() -> None:
            opened[0].wake_bus()

        return JobSchedules(
            ledger=context.changes,
            permit=context.permit,
            check_read=context.check_read,
            owner=owner_name(context.reader),
            new_id=new_id,
            bus=bus,
            accepted=wake,
        )

    async def _detail(self, record: ScheduleRecord) -> ScheduleDetail:
        spec = record.spec
        return ScheduleDetail(
            **_of_jobs(record).model_dump(),
            payload=spec.payload,
            concurrency_key=spec.concurrency_key,
            misfire=spec.misfire.value,
            overlap=spec.overlap.value,
            jitter_s=spec.jitter_s,
            next=next_fires(record, await self._context.now(), SHOWN_INSTANTS),
        )


def _of_jobs(record: ScheduleRecord) -> ScheduleShape:
    return ScheduleShape(
        name=record.name,
        type=record.spec.type,
        topic=record.spec.topic,
        cron=record.spec.cron,
        tz=record.spec.tz,
        paused=record.paused,
        owner=record.owner,
        next_at=record.next_at,
        last_at=record.last_at,
        last_job=record.last_job,
        skipped=record.skipped,
    )


def _of_agent(schedule: Schedule, now: datetime) -> ScheduleShape:
    last = schedule.last
    return ScheduleShape(
        name=schedule.agent_slug,
        agent=schedule.agent_slug,
        cron=schedule.cron,
        registered_at=schedule.registered_at,
        next_at=schedule.next(now),
        last_at=last.instant if last else None,
        last_run=last.run_id if last else None,
        skipped=last.skipped if last else None,
    )
