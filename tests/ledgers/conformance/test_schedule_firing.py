"""Processes that fire schedules of jobs: every instant once, whoever dies when, as its policies say (RUN-9)."""

import asyncio
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import pytest_asyncio

from tests.ledgers.conformance.rig import ADMIN, WORKER, Rig, actor
from trellis.bus.pointers import make_pointers
from trellis.bus.submitter import BacklogLimit, BusSubmitter
from trellis.bus.topics import Topics
from trellis.engine.errors import (
    IdempotencyMismatch,
    LedgerUnavailable,
    OptionInvalid,
    ScheduleExists,
    ScheduleNotFound,
)
from trellis.engine.jobs import Actor, RequestKey, Submitted, TypeOptions
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter, JobPlace
from trellis.engine.schedules import (
    InstantDecision,
    Misfire,
    Overlap,
    ScheduleSpec,
    decided,
    instant_key,
    new_record,
)
from trellis.lifecycles import Role
from trellis.storage.objects.open import open_objects
from trellis.testing import FakeClock
from trellis.worker.schedules import (
    POLL_S_DEFAULT,
    JobScheduleFirer,
    JobScheduleReport,
    JobSchedules,
    declare_schedules,
    scheduled_job,
    submit_scheduled,
)

HOUR_S = 3_600.0
HOURLY = ScheduleSpec(name="hourly", cron="0 * * * *", type="work", payload={"n": 1})


def firer(rig: Rig, ledger: Ledger | None = None, by: Actor = WORKER) -> JobScheduleFirer:
    return JobScheduleFirer(ledger=ledger or rig.ledger, actor=by, new_id=rig.new_id)


def book(rig: Rig, ledger: Ledger | None = None) -> JobSchedules:
    return JobSchedules(
        ledger=ledger or rig.ledger,
        permit=lambda _: ADMIN,
        check_read=lambda _: None,
        owner="anna",
        new_id=rig.new_id,
    )


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def half_past(rig: Rig) -> None:
    """Every test begins at half past an hour, far from the instants of its schedules."""
    now = await rig.ledger.now()
    await rig.advance((90 - now.minute) % 60 * 60.0)


def next_clock_change(zone: ZoneInfo, after: datetime) -> datetime:
    """When the clocks of a time zone are next set forward, to the hour."""
    hours = (after.replace(minute=0, second=0, microsecond=0) + timedelta(hours=n) for n in range(370 * 24))
    offsets = (
        (at, at.astimezone(zone).utcoffset(), (at - timedelta(hours=1)).astimezone(zone).utcoffset()) for at in hours
    )
    return next(at for at, offset, before in offsets if offset is not None and before is not None and offset > before)


async def fired(rig: Rig) -> list[Job]:
    """The jobs of all schedules, in the order of their submits."""
    page = await rig.ledger.jobs(JobFilter(), limit=1_000)
    return list(reversed(page.jobs))


@pytest.mark.requirement("RUN-9")
async def test_processes_that_fire_in_the_same_moment_submit_one_job(rig: Rig):
    await book(rig).add(HOURLY)
    other = await rig.open_another()
    processes = [firer(rig, ledger) for ledger in (rig.ledger, other) for _ in range(3)]
    for hour in range(1, 4):
        await rig.advance(HOUR_S)
        reports = await asyncio.gather(*(process.run_once() for process in processes))
        assert len({job for report in reports for job in report.jobs}) == 1
        assert len(await fired(rig)) == hour
    last = (await fired(rig))[-1]
    (known,) = await rig.ledger.schedules()
    assert known.last_at is not None
    assert (last.job_id, last.type, last.correlation_id) == (
        known.last_job,
        "work",
        instant_key("hourly", known.last_at),
    )
    first = (await rig.ledger.events(last.job_id))[0]
    assert (first.role, first.actor) == (Role.SUBMITTER, "anna")
    whole = await rig.ledger.job(last.job_id)
    assert whole is not None
    assert whole.payload == b'{"n":1}'


@pytest.mark.requirement("RUN-9")
async def test_a_process_that_dies_between_its_steps_leaves_the_rest_to_another(rig: Rig):
    schedules = book(rig)
    await schedules.add(HOURLY)
    await rig.advance(HOUR_S)
    (due,) = (await rig.ledger.due_schedules(topics=False)).due
    decision = decided(due, InstantDecision(due.spec.next_instant(due.since)))
    assert await rig.ledger.advance_schedule(WORKER, decision)  # and here the first process dies
    (job_id,) = (await firer(rig).run_once()).jobs
    await rig.advance(HOUR_S)
    (due,) = (await rig.ledger.due_schedules(topics=False)).due
    decision = decided(due, InstantDecision(due.spec.next_instant(due.since)))
    assert await rig.ledger.advance_schedule(WORKER, decision)
    assert decision.firing is not None
    job = await scheduled_job(due, instant_key("hourly", decision.firing), new_id=rig.new_id, bus=None)
    submitted_id = (await submit_scheduled(rig.ledger, WORKER, job)).job_id  # the second dies before it records the job
    assert (await firer(rig).run_once()).jobs == (submitted_id,)
    assert [one.job_id for one in await fired(rig)] == [job_id, submitted_id]


@pytest.mark.requirement("RUN-9")
@pytest.mark.parametrize("misfire, count", [(Misfire.SKIP, 0), (Misfire.ONCE, 1), (Misfire.ALL, 3)])
async def test_missed_instants_fire_as_the_misfire_policy_says(rig: Rig, misfire: Misfire, count: int):
    await book(rig).add(replace(HOURLY, misfire=misfire))
    await rig.advance(3 * HOUR_S)
    report = await firer(rig).run_once()
    assert (len(report.jobs), report.skipped) == (count, int(misfire is Misfire.SKIP))
    assert len(await fired(rig)) == count
    (known,) = await rig.ledger.schedules()
    assert (known.skipped or "").startswith("it was missed" if misfire is Misfire.SKIP else "")
    assert known.next_at is not None
    await rig.advance((known.next_at - await rig.ledger.now()).total_seconds())
    assert len((await firer(rig).run_once()).jobs) == 1, "the next one is in time"


@pytest.mark.requirement("RUN-9")
@pytest.mark.parametrize("overlap", Overlap)
async def test_an_instant_while_the_job_before_runs_does_as_the_overlap_policy_says(rig: Rig, overlap: Overlap):
    await book(rig).add(replace(HOURLY, overlap=overlap))
    for _ in range(3):
        await rig.advance(HOUR_S)
        await firer(rig).run_once()
    jobs = await fired(rig)
    places = [job.place for job in jobs]
    expected = {
        Overlap.ALLOW: [JobPlace.READY] * 3,
        Overlap.SKIP: [JobPlace.READY],
        Overlap.QUEUE: [JobPlace.READY, JobPlace.BLOCKED, JobPlace.BLOCKED],
    }
    assert places == expected[overlap]
    (known,) = await rig.ledger.schedules()
    if overlap is Overlap.SKIP:
        assert known.skipped == f"job {jobs[0].job_id} of an earlier instant has not ended; it is {jobs[0].state}"
        assert known.last_job == jobs[0].job_id
        await rig.drive(jobs[0].job_id, "succeeded")
        await rig.advance(HOUR_S)
        assert len((await firer(rig).run_once()).jobs) == 1


@pytest.mark.requirement("RUN-9")
async def test_a_paused_schedule_fires_nothing_and_a_resumed_one_from_then_on(rig: Rig):
    schedules = book(rig)
    await schedules.add(replace(HOURLY, misfire=Misfire.ALL))
    await schedules.pause("hourly", reason="quiet")
    await rig.advance(3 * HOUR_S)
    report = await firer(rig).run_once()
    assert (report.jobs, report.next_s, firer(rig).pause_s(report)) == ((), None, POLL_S_DEFAULT)
    await schedules.resume("hourly")
    assert (await firer(rig).run_once()).jobs == ()
    key = RequestKey(scope="s", key="r", fingerprint=b"f", about="hourly", given="r")
    ran = await schedules.run_under_key("hourly", key)
    assert ran.created
    again = await schedules.run_under_key("hourly", key)
    assert again == Submitted(job_id=ran.job_id, created=False), "one request is one job"
    with pytest.raises(IdempotencyMismatch, match="hourly"):
        await schedules.run_under_key("hourly", replace(key, fingerprint=b"g"))
    await rig.advance(HOUR_S)
    assert len((await firer(rig).run_once()).jobs) == 1
    assert len(await fired(rig)) == 2


@pytest.mark.requirement("RUN-9")
async def test_a_schedule_of_a_topic_is_fired_by_a_process_that_has_the_bus(rig: Rig, tmp_path: Path):
    await book(rig).add(replace(HOURLY, type=None, topic="job.echo"))
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    submitter = BusSubmitter(
        topics=Topics(),
        pointers=make_pointers(objects, None),
        room=BacklogLimit(ledger=rig.ledger, clock=FakeClock()),
        new_id=rig.new_id,
    )
    woken: list[str] = []
    with_bus = [
        replace(firer(rig), bus=lambda: nullcontext(submitter), accepted=lambda: woken.append("scheduler"))
        for _ in range(2)
    ]
    await rig.advance(HOUR_S)
    assert (await firer(rig).run_once()).jobs == (), "a worker without the bus leaves it to others"
    await asyncio.gather(*(process.run_once() for process in with_bus))
    (job,) = await fired(rig)
    assert (job.lifecycle, job.type, bool(woken)) == ("bus-job", "job.echo", True)
    first = (await rig.ledger.events(job.job_id))[0]
    (known,) = await rig.ledger.schedules()
    assert (first.actor, known.last_job, known.skipped) == ("anna", job.job_id, None)
    await objects.close()


async def test_a_job_that_the_ledger_refuses_is_a_skipped_instant_with_the_reason(rig: Rig):
    await rig.ledger.declare_types(WORKER, [TypeOptions(type="work", keyed=True)])
    await book(rig).add(HOURLY)
    await book(rig).add(replace(HOURLY, name="with-key", concurrency_key="k"))
    await rig.advance(HOUR_S)
    report = await firer(rig).run_once()
    assert (len(report.jobs), report.skipped) == (1, 1)
    known = {one.name: one for one in await rig.ledger.schedules()}
    assert "concurrency key" in (known["hourly"].skipped or "")
    assert (await fired(rig))[0].concurrency_key == "user:k"


async def test_declaring_again_changes_nothing_and_keeps_a_pause(rig: Rig):
    worker = actor(Role.WORKER)
    for _ in range(2):
        await declare_schedules(rig.ledger, worker, "app", [HOURLY])
    await book(rig).pause("hourly")
    await declare_schedules(rig.ledger, worker, "app", [HOURLY])
    await declare_schedules(rig.ledger, worker, "other", [replace(HOURLY, cron="30 * * * *")])
    (known,) = await rig.ledger.schedules()
    assert (known.spec.cron, known.paused, known.owner, known.version) == ("30 * * * *", True, "app", 3)


async def test_names_are_taken_once_and_unknown_ones_get_a_hint(rig: Rig):
    schedules = book(rig)
    await schedules.add(HOURLY)
    assert (await schedules.add(HOURLY)).version == 1
    with pytest.raises(ScheduleExists, match="hourly"):
        await schedules.add(replace(HOURLY, cron="5 * * * *"))
    with pytest.raises(ScheduleNotFound, match="did you mean hourly"):
        await schedules.remove("hourli")
    with pytest.raises(OptionInvalid, match="bus"):
        await JobSchedules.run(
            book(rig), (await schedules.add(replace(HOURLY, name="t", type=None, topic="job.echo"))).name
        )


class DyingProcess:
    """A ledger as seen by a process that dies now and then, before or after the ledger does what it was asked."""

    def __init__(self, ledger: Ledger, rng: random.Random, rate: float) -> None:
        self._ledger, self._rng, self._rate = ledger, rng, rate

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._ledger, name)
        if name not in {"submit", "advance_schedule"}:
            return real

        async def call(*args: Any, **options: Any) -> Any:
            draw = self._rng.random()
            if draw < self._rate:
                raise LedgerUnavailable(reason="killed before")
            answer = await real(*args, **options)
            if draw > 1 - self._rate:
                raise LedgerUnavailable(reason="killed after")
            return answer

        return call


async def _play(rig: Rig, specs: list[ScheduleSpec], begin: datetime, days: int, step_s: float, dying: float) -> int:
    """Let four processes fire while time passes and they die; every instant must have had one job. Returns how many."""
    rng, end = random.Random(7), begin + timedelta(days=days)
    await rig.advance((begin - await rig.ledger.now()).total_seconds())
    begin = await rig.ledger.now()
    for spec in specs:
        assert await rig.ledger.save_schedule(ADMIN, new_record(spec, "anna", begin))
    others = [await rig.open_another() for _ in range(3)]
    processes = [firer(rig, DyingProcess(ledger, rng, dying)) for ledger in (rig.ledger, *others)]  # type: ignore[arg-type]
    while (now := await rig.ledger.now()) < end:
        await rig.advance(min(step_s, (end - now).total_seconds() + 1))
        passes = await asyncio.gather(*(process.run_once() for process in processes), return_exceptions=True)
        assert {type(one) for one in passes} <= {JobScheduleReport, LedgerUnavailable}, passes
    for _ in range(3):
        await firer(rig).run_once()
    now, expected = await rig.ledger.now(), Counter[str]()
    for spec in specs:
        at = begin
        while (at := spec.next_instant(at)) <= now:
            expected[instant_key(spec.name, at)] += 1
    found, cursor = Counter[str](), None
    while True:
        page = await rig.ledger.jobs(JobFilter(), limit=500, cursor=cursor)
        found += Counter(job.correlation_id for job in page.jobs)
        if (cursor := page.cursor) is None:
            break
    assert found == expected
    return expected.total()


@pytest.mark.requirement("RUN-9")
async def test_every_instant_around_a_clock_change_has_one_job_while_processes_die(rig: Rig):
    specs = [
        ScheduleSpec(name="in-the-gap", cron="30 3 * * *", tz="Europe/Kyiv", type="work", misfire=Misfire.ALL),
        ScheduleSpec(
            name="often", cron="0 */6 * * *", tz="Europe/Kyiv", type="work", misfire=Misfire.ALL, jitter_s=600
        ),
    ]
    begin = next_clock_change(ZoneInfo("Europe/Kyiv"), await rig.ledger.now()) - timedelta(hours=37)
    assert await _play(rig, specs, begin, 3, 4 * HOUR_S, dying=0.05) == 3 + 12


@pytest.mark.prove
@pytest.mark.requirement("RUN-9")
async def test_ten_thousand_instants_of_a_year_have_one_job_each_while_processes_die(rig: Rig):
    zones = ("Europe/Kyiv", "America/New_York", "Australia/Lord_Howe", "UTC")
    specs = [
        *(
            ScheduleSpec(name=f"hourly-{n}", cron="0 * * * *", tz=zones[n], type="work", misfire=Misfire.ALL)
            for n in (0,)
        ),
        *(
            ScheduleSpec(
                name=f"daily-{zone.lower().replace('/', '-')}-{hour}", cron=f"30 {hour} * * *", tz=zone, type="work"
            )
            for zone in zones
            for hour in (1, 2, 3)
        ),
    ]
    specs = [replace(spec, misfire=Misfire.ALL) for spec in specs]
    begin = await rig.ledger.now()
    assert await _play(rig, specs, begin, 365, 6 * HOUR_S, dying=0.01) > 10_000
