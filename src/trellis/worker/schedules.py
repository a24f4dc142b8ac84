"""Schedules of jobs at work: declared by applications, administered by people, fired by any number of processes.

`engine/schedules.py` decides what is to be done at a moment. Every worker and every orchestrator process runs a
`JobScheduleFirer`; the ledger decides which of them fires an instant. There is no leader.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from trellis.auth.ownership import acting_or_gateway
from trellis.auth.principals import Principal
from trellis.engine.errors import (
    InputError,
    LedgerError,
    NotAllowed,
    OptionInvalid,
    QueueFull,
    ScheduleBusy,
    ScheduleExists,
    ScheduleNotFound,
    TrellisError,
)
from trellis.engine.jobs import DECLARED, Actor, ChosenOptions, JobId, Mismatch, NewJob, RequestKey, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.request_keys import SUBMIT_ANSWERS
from trellis.engine.schedules import (
    CATCH_UP_MAX,
    DUE_MAX,
    QUEUE_KEY_PREFIX,
    SCHEDULE_SCOPE,
    InstantDecision,
    Overlap,
    ScheduleRecord,
    ScheduleSpec,
    decide,
    decided,
    instant_key,
    instant_text,
    new_record,
    submitted,
)
from trellis.engine.text import nearest
from trellis.lifecycles import LIFECYCLES, Role
from trellis.worker.requests import SubmitSettings, fingerprint, new_job

if TYPE_CHECKING:  # the bus is imported only by processes that submit to it
    from trellis.bus.submitter import BusSubmitter

READ, MANAGE = "schedules.read", "schedules.manage"
POLL_S_DEFAULT = 15.0
PAUSE_S_MIN = 0.02
WRITE_TRIES_MAX = 5
RUN_KEY_CHARS = 20
"""How much of a request's key is part of the key of the job that it submits."""

OpenBusSubmitter = Callable[[], "AbstractAsyncContextManager[BusSubmitter]"]

_log = log_of("trellis.schedules")


# --- the job of an instant -----------------------------------------------------------------------------------------------


async def scheduled_job(
    record: ScheduleRecord, key: str, *, new_id: Callable[[], str], bus: OpenBusSubmitter | None
) -> NewJob:
    """The job that a schedule submits, under this idempotency key. Raises an InputError that says what to change."""
    spec = record.spec
    if spec.topic is not None:
        return await _topic_job(spec, record.owner, key, bus)
    settings = SubmitSettings(correlation_id=key)
    if spec.concurrency_key is not None:
        settings["concurrency_key"] = spec.concurrency_key
    job = new_job(str(spec.type), spec.payload, settings, app=None, new_id=new_id)
    if spec.overlap is Overlap.QUEUE:
        bits = ChosenOptions.CONCURRENCY_KEY | ChosenOptions.CONCURRENCY_LIMIT
        key_of_queue = f"{QUEUE_KEY_PREFIX}{spec.name}"
        job = replace(job, concurrency_key=key_of_queue, concurrency_limit=1, chosen=job.chosen | bits)
    job = replace(job, idempotency_key=key, idempotency_scope=SCHEDULE_SCOPE)
    return replace(job, fingerprint=fingerprint(job))


async def _topic_job(spec: ScheduleSpec, owner: str, key: str, bus: OpenBusSubmitter | None) -> NewJob:
    if bus is None:
        raise OptionInvalid(option="topic", value=spec.topic, expected="this process has no settings of the bus")
    principal = Principal(name=owner, roles=frozenset({Role.SUBMITTER}), by_token=True)
    async with bus() as submitter:
        job = await submitter.job(
            {"topic": spec.topic},
            payload=spec.payload,
            principal=principal,
            correlation_id=key,
            asked_as=(SCHEDULE_SCOPE, key),
        )
    return replace(job, idempotency_key=key, idempotency_scope=SCHEDULE_SCOPE)


async def submit_scheduled(ledger: Ledger, actor: Actor, job: NewJob, *, key: RequestKey | None = None) -> Submitted:
    """Submit the job, unless it exists: another process was first, or this one died before it could record it."""
    (answer,) = await ledger.submit(acting_or_gateway(actor, job.lifecycle), [job], key=key)
    if isinstance(answer, Mismatch):
        _log.warning("schedule_job_differs", key=answer.key, job_id=answer.job_id)
        return Submitted(job_id=answer.job_id, created=False)
    return answer


# --- firing ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class JobScheduleReport:
    """Result of one pass. `next_s` is the time until the next instant, None if there is none."""

    jobs: tuple[str, ...] = ()
    skipped: int = 0
    next_s: float | None = None


@dataclass(kw_only=True)
class JobScheduleFirer:
    """Submits the jobs of due schedules, each instant once."""

    ledger: Ledger
    actor: Actor
    new_id: Callable[[], str]
    bus: OpenBusSubmitter | None = None
    """Opens the submitter of jobs on topics. Without it, schedules of topics are left to other processes."""
    accepted: Callable[[], None] | None = None
    """Called after a job on a topic was submitted."""
    poll_s: float = POLL_S_DEFAULT
    """Longest time until a schedule that another process stored is noticed."""
    name: str = "job-schedules"

    async def run_once(self) -> JobScheduleReport:
        """Handle every schedule that is due. One statement if there is none."""
        schedules = await self.ledger.due_schedules(topics=self.bus is not None)
        jobs: list[str] = []
        skipped, moments = 0, [] if schedules.next_at is None else [schedules.next_at]
        for due in schedules.due:
            decided_records = await self._handle(due, schedules.now)
            jobs += [record.last_job for record in decided_records if record.skipped is None and record.last_job]
            skipped += sum(record.skipped is not None for record in decided_records)
            moments += [record.next_at for record in decided_records[-1:] if record.next_at is not None]
        if len(schedules.due) == DUE_MAX:
            moments.append(schedules.now)
        next_s = (min(moments) - schedules.now).total_seconds() if moments else None
        return JobScheduleReport(jobs=tuple(jobs), skipped=skipped, next_s=next_s)

    def pause_s(self, report: JobScheduleReport) -> float:
        """Until the next instant, but at most `poll_s`, so that new schedules are noticed."""
        return self.poll_s if report.next_s is None else max(PAUSE_S_MIN, min(report.next_s, self.poll_s))

    async def _handle(self, due: ScheduleRecord, now: datetime) -> list[ScheduleRecord]:
        """Decide about the due instants of one schedule. Returns the record after each; none if others did it."""
        handled: list[ScheduleRecord] = []
        record: ScheduleRecord | None = due
        try:
            while record is not None and record.next_at is not None and record.next_at <= now:
                record = await self._step(record, now)
                handled += [] if record is None else [record]
                if len(handled) == CATCH_UP_MAX:
                    break
        except LedgerError:
            raise
        except TrellisError as error:  # a store of the bus does not answer; the schedule stays due
            _log.warning("schedule_left", schedule=due.name, error=str(error))
        return handled

    async def _step(self, record: ScheduleRecord, now: datetime) -> ScheduleRecord | None:
        """Decide about the next instant, or submit the job of a decided one. None if another process was first."""
        if record.firing is not None:
            return await self._submit(record, record.firing)
        decision = decide(record, now)
        if decision is None:  # this process has other rules of a time zone than the one that stored `next_at`
            return await self._store(replace(record, next_at=record.spec.next_fire(now)))
        if decision.skipped is None:
            decision = InstantDecision(decision.instant, await self._overlap(record))
        stored = await self._store(decided(record, decision))
        if stored is None:
            return None
        if stored.firing is None:
            _log_of(stored).warning("schedule_skipped", reason=stored.skipped)
            return stored
        return await self._submit(stored, stored.firing)

    async def _submit(self, record: ScheduleRecord, instant: datetime) -> ScheduleRecord | None:
        key, owner = instant_key(record.name, instant), Actor(role=Role.SUBMITTER, name=record.owner)
        job_id, refusal = None, None
        try:
            job = await scheduled_job(record, key, new_id=self.new_id, bus=self.bus)
            job_id = (await submit_scheduled(self.ledger, owner, job)).job_id
        except (InputError, QueueFull, NotAllowed) as error:
            refusal = str(error)
        stored = await self._store(submitted(record, job_id, refusal))
        if stored is not None and refusal is not None:
            _log_of(stored).warning("schedule_skipped", reason=refusal)
        elif stored is not None:
            _log_of(stored).info("schedule_fired", job_id=job_id)
        if job_id is not None and record.spec.topic is not None and self.accepted is not None:
            self.accepted()
        return stored

    async def _overlap(self, record: ScheduleRecord) -> str | None:
        """Why the overlap policy skips an instant now; None if it does not."""
        if record.spec.overlap is not Overlap.SKIP or record.last_job is None:
            return None
        job = await self.ledger.job(JobId(record.last_job))
        if job is None or LIFECYCLES[job.lifecycle].is_settled(job.state):
            return None
        return f"job {job.job_id} of an earlier instant has not ended; it is {job.state}"

    async def _store(self, record: ScheduleRecord) -> ScheduleRecord | None:
        stored = await self.ledger.advance_schedule(self.actor, record)
        return replace(record, version=record.version + 1) if stored else None


def _log_of(record: ScheduleRecord) -> Any:
    return _log.bind(schedule=record.name, instant=None if record.last_at is None else instant_text(record.last_at))


# --- declaring and administering -------------------------------------------------------------------------------------------


async def declare_schedules(ledger: Ledger, actor: Actor, owner: str, specs: Iterable[ScheduleSpec]) -> None:
    """Store the schedules of an application. Unchanged ones are not written again; the last declaration wins.

    A schedule that an operator paused stays paused.
    """
    for spec in specs:
        for _ in range(WRITE_TRIES_MAX):
            known = next(iter(await ledger.schedules(spec.name)), None)
            now = await ledger.now()
            record = new_record(spec, owner, now, paused=known is not None and known.paused)
            if known is not None:
                record = replace(record, version=known.version, owner=known.owner)
            if await ledger.save_schedule(actor, record, cause=DECLARED):
                break
        else:
            raise ScheduleBusy(name=spec.name)


@dataclass(frozen=True, kw_only=True)
class JobSchedules:
    """The schedules of jobs, for one caller. Each call asks the rule that allows it."""

    ledger: Ledger
    permit: Callable[[str], Actor]
    """The caller as an actor, if the rule of this name allows it; raises NotAllowed."""
    owner: str
    """The name that owns the jobs of schedules that this caller adds."""
    new_id: Callable[[], str]
    check_read: Callable[[str], None]
    """Raises NotAllowed unless the rule of this name lets the caller read."""
    bus: OpenBusSubmitter | None = None
    accepted: Callable[[], None] | None = None
    """Called after a job on a topic was submitted."""

    async def list(self) -> list[ScheduleRecord]:
        """All schedules of jobs, by name."""
        self.check_read(READ)
        return await self.ledger.schedules()

    async def get(self, name: str) -> ScheduleRecord:
        """One schedule. Raises ScheduleNotFound."""
        self.check_read(READ)
        return await self._find(name)

    async def add(self, spec: ScheduleSpec, *, paused: bool = False, reason: str | None = None) -> ScheduleRecord:
        """Add a schedule. The same again changes nothing. Raises ScheduleExists, OptionInvalid."""
        actor = self.permit(MANAGE)
        record = new_record(spec, self.owner, await self.ledger.now(), paused=paused)
        if not await self.ledger.save_schedule(actor, record, cause=reason):
            raise ScheduleExists(name=spec.name)
        return await self._find(spec.name)

    async def change(
        self, name: str, changes: Mapping[str, Any], *, paused: bool | None = None, reason: str | None = None
    ) -> ScheduleRecord:
        """Change fields of a schedule, or pause or resume it. Instants before the change are not fired later."""
        actor = self.permit(MANAGE)
        for _ in range(WRITE_TRIES_MAX):
            known = await self._find(name)
            record = new_record(
                replace(known.spec, **changes),
                known.owner,
                await self.ledger.now(),
                paused=known.paused if paused is None else paused,
            )
            if await self.ledger.save_schedule(actor, replace(record, version=known.version), cause=reason):
                return await self._find(name)
        raise ScheduleBusy(name=name)

    async def pause(self, name: str, *, reason: str | None = None) -> ScheduleRecord:
        """Fire no instant until it is resumed."""
        return await self.change(name, {}, paused=True, reason=reason)

    async def resume(self, name: str, *, reason: str | None = None) -> ScheduleRecord:
        """Fire again, from now on. Instants of the pause are not made up for."""
        return await self.change(name, {}, paused=False, reason=reason)

    async def remove(self, name: str, *, reason: str | None = None) -> None:
        """Remove a schedule. Its jobs stay. Raises ScheduleNotFound."""
        actor = self.permit(MANAGE)
        if not await self.ledger.remove_schedule(actor, name, cause=reason):
            raise await self._unknown(name)

    async def run(self, name: str) -> JobId:
        """Submit the job of a schedule now, also of a paused one."""
        return (await self.run_under_key(name, None)).job_id

    async def run_under_key(self, name: str, key: RequestKey | None) -> Submitted:
        """The same for a request with a key: repeated, it gets the job of the first. Raises IdempotencyMismatch."""
        actor = self.permit(MANAGE)
        stored = None if key is None else await self.ledger.find_request(key)
        if stored is not None and stored.answer is not None:
            return Submitted(job_id=SUBMIT_ANSWERS.decode(stored.answer)[0].job_id, created=False)
        record = await self._find(name)
        job = await self._job_now(record, None if key is None else key.key)
        submitted_job = await submit_scheduled(self.ledger, replace(actor, name=self.owner), job, key=key)
        if record.spec.topic is not None and self.accepted is not None:
            self.accepted()
        return submitted_job

    async def _job_now(self, record: ScheduleRecord, request: str | None) -> NewJob:
        key = f"schedule:{record.name}:run:{(request or self.new_id())[:RUN_KEY_CHARS]}"
        return await scheduled_job(replace(record, owner=self.owner), key, new_id=self.new_id, bus=self.bus)

    async def _find(self, name: str) -> ScheduleRecord:
        stored = await self.ledger.schedules(name)
        if not stored:
            raise await self._unknown(name)
        return stored[0]

    async def _unknown(self, name: str) -> ScheduleNotFound:
        near = nearest(name, [record.name for record in await self.ledger.schedules()])
        hint = (
            f"did you mean {near}?"
            if near
            else "`trellis schedules` lists those there are; an agent's stands in its file."
        )
        return ScheduleNotFound(name=name, hint=hint)
