"""Schedules: every instant once, by however many processes; none from before the registration; a missed one is made up for once."""

from datetime import datetime, timedelta

import pytest

from tests.layers.rig import GRACE_S, WAITING_MAX, Rig
from trellis.documents.errors import CronInvalid

MINUTE_S, HOUR_S = 60.0, 3_600.0


async def begin_at(rig: Rig, hour: int, minute: int = 0) -> datetime:
    """Let it be this time of the next day; the moment itself."""
    now = await rig.ledger.now()
    wanted = now.replace(hour=hour, minute=minute, second=0, microsecond=0) + timedelta(days=1)
    await rig.pass_time((wanted - now).total_seconds())
    return wanted


async def fired(rig: Rig, slug: str) -> int:
    """How many runs were begun; all of them have ended."""
    runs = await rig.runs(slug)
    for run in runs:
        assert (await rig.shows(run.job_id, "completed"))["error"] is None
    return len(runs)


@pytest.mark.requirement("RUN-9", "PIPE-2")
async def test_every_instant_begins_one_run_with_several_processes(rig: Rig):
    slug = await rig.agent("gardener")
    await begin_at(rig, 8)
    for _ in range(3):
        await rig.start()
    await rig.layer.register_schedule(slug, "*/5 * * * *")
    await rig.pass_time(5 * MINUTE_S - 1.0)
    assert await fired(rig, slug) == 0
    await rig.pass_time(1.0)
    assert await fired(rig, slug) == 1
    await rig.pass_time(4 * MINUTE_S)
    assert await fired(rig, slug) == 1
    for count in (2, 3, 4):
        await rig.pass_time(5 * MINUTE_S)
        assert await fired(rig, slug) == count
    assert {(await rig.status(run.job_id))["trigger"] for run in await rig.runs(slug)} == {"cron"}


@pytest.mark.requirement("RUN-9")
async def test_registered_schedules_are_listed_with_next_instant_and_last_run(rig: Rig):
    slug = await rig.agent("gardener")
    at = await begin_at(rig, 8)
    await rig.start()
    await rig.layer.register_schedule(slug, "  0 9 * *   * ")
    (schedule,) = await rig.layer.schedules()
    assert (schedule.agent_slug, schedule.cron, schedule.registered_at, schedule.last) == (slug, "0 9 * * *", at, None)
    assert schedule.next(at) == at + timedelta(hours=1)
    await rig.pass_time(HOUR_S)
    (run,) = await rig.runs(slug)
    (schedule,) = await rig.layer.schedules()
    assert schedule.last is not None
    assert (schedule.last.instant, schedule.last.run_id) == (at + timedelta(hours=1), run.job_id)
    assert schedule.next(await rig.ledger.now()) == at + timedelta(hours=25)


@pytest.mark.requirement("RUN-9")
async def test_an_instant_before_the_registration_is_not_fired(rig: Rig):
    slug = await rig.agent("gardener")
    await begin_at(rig, 9, 1)
    await rig.start()
    await rig.layer.register_schedule(slug, "0 9 * * *")
    await rig.pass_time(HOUR_S)
    assert await fired(rig, slug) == 0
    await begin_at(rig, 9)
    assert await fired(rig, slug) == 1


@pytest.mark.requirement("RUN-9")
async def test_the_same_expression_again_changes_nothing_and_another_counts_from_now(rig: Rig):
    slug = await rig.agent("gardener")
    at = await begin_at(rig, 8)
    await rig.start()
    await rig.layer.register_schedule(slug, "0 9 * * *")
    await rig.pass_time(HOUR_S / 2)
    await rig.layer.register_schedule(slug, "0 9 * * *")
    (schedule,) = await rig.layer.schedules()
    assert schedule.registered_at == at
    await rig.pass_time(HOUR_S / 2 + 1.0)
    assert await fired(rig, slug) == 1
    await rig.layer.register_schedule(slug, "0 9,12 * * *")
    await rig.settle()
    assert await fired(rig, slug) == 1
    await rig.pass_time(3 * HOUR_S)
    assert await fired(rig, slug) == 2


@pytest.mark.requirement("RUN-9")
async def test_a_schedule_that_was_taken_back_fires_no_more(rig: Rig):
    slug = await rig.agent("gardener")
    await begin_at(rig, 8)
    await rig.start()
    await rig.layer.register_schedule(slug, "0 * * * *")
    await rig.pass_time(HOUR_S)
    assert await fired(rig, slug) == 1
    await rig.layer.register_schedule(slug, None)
    await rig.layer.register_schedule("nobody", None)
    assert await rig.layer.schedules() == []
    await rig.pass_time(HOUR_S + 60.0)
    assert await fired(rig, slug) == 1
    await rig.layer.register_schedule(slug, "0 * * * *")
    await rig.settle()
    assert await fired(rig, slug) == 1
    await rig.pass_time(HOUR_S)
    assert await fired(rig, slug) == 2


@pytest.mark.requirement("RUN-9")
async def test_only_the_latest_missed_schedule_is_run(rig: Rig):
    slug = await rig.agent("gardener")
    await begin_at(rig, 8)
    await rig.start()
    await rig.layer.register_schedule(slug, "*/10 * * * *")
    await rig.kill()
    await rig.pass_time(35 * MINUTE_S)
    for _ in range(2):
        await rig.start()
    assert await fired(rig, slug) == 1
    await rig.pass_time(5 * MINUTE_S)
    assert await fired(rig, slug) == 2


@pytest.mark.requirement("RUN-9")
@pytest.mark.parametrize("late_s, runs", [(GRACE_S, 1), (GRACE_S + 1.0, 0)], ids=["within the grace", "too late"])
async def test_a_missed_instant_is_made_up_for_within_the_grace_only(rig: Rig, late_s: float, runs: int):
    slug = await rig.agent("gardener")
    await begin_at(rig, 8)
    await rig.layer.register_schedule(slug, "0 9 * * *")
    await rig.pass_time(HOUR_S + late_s)
    await rig.start()
    await rig.settle()
    assert await fired(rig, slug) == runs
    (schedule,) = await rig.layer.schedules()
    assert schedule.last is not None
    assert (schedule.last.skipped is None) == bool(runs)
    await begin_at(rig, 9)
    assert await fired(rig, slug) == runs + 1


@pytest.mark.requirement("RUN-9", "D24")
async def test_an_agent_that_is_not_active_is_passed_over_and_nothing_is_made_up_for(rig: Rig):
    slug = await rig.agent("gardener")
    await begin_at(rig, 8)
    await rig.start()
    await rig.layer.register_schedule(slug, "0 * * * *")
    await rig.agent(slug, status="paused")
    await rig.pass_time(HOUR_S)
    assert await fired(rig, slug) == 0
    (schedule,) = await rig.layer.schedules()
    assert schedule.last is not None
    assert "it is paused" in (schedule.last.skipped or "")
    await rig.agent(slug)
    await rig.settle()
    assert await fired(rig, slug) == 0
    await rig.pass_time(HOUR_S)
    assert await fired(rig, slug) == 1


@pytest.mark.requirement("RUN-9", "D25")
async def test_an_agent_whose_queue_is_full_is_passed_over(rig: Rig):
    hold, slug = rig.hold("load-context"), await rig.agent("gardener")
    await begin_at(rig, 8)
    await rig.start()
    await rig.layer.register_schedule(slug, "0 * * * *")
    await rig.pass_time(HOUR_S - 2.0)
    first = await rig.trigger(slug)
    await rig.until(lambda: hold.begun == [first])
    for _ in range(WAITING_MAX):
        await rig.trigger(slug)
    await rig.pass_time(2.0)
    (schedule,) = await rig.layer.schedules()
    assert schedule.last is not None
    assert f"{WAITING_MAX} is the limit" in (schedule.last.skipped or "")
    hold.release()
    await rig.until(lambda: rig.steps.done["finalize"] == WAITING_MAX + 1)
    assert await fired(rig, slug) == WAITING_MAX + 1


@pytest.mark.parametrize(
    "cron, wrong", [("0 25 * * *", "its hour is '25'"), ("daily", "1 fields"), ("0 0 30 2 *", "such a day")]
)
async def test_a_bad_expression_names_the_agent_and_what_is_wrong(rig: Rig, cron: str, wrong: str):
    slug = await rig.agent("gardener")
    with pytest.raises(CronInvalid, match=f"Agent gardener cannot run by .*{wrong}.*triggers.cron"):
        await rig.layer.register_schedule(slug, cron)
    assert await rig.layer.schedules() == []
