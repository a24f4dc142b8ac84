"""Schedules of jobs in a ledger: stored by version, found when due, and each change one administrative act (RUN-9)."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.ledgers.conformance.rig import ADMIN, WORKER, Rig
from trellis.engine import schedules
from trellis.engine.errors import InputError
from trellis.engine.schedules import InstantDecision, ScheduleSpec, decided, new_record, submitted

SPEC = ScheduleSpec(name="nightly", cron="0 * * * *", type="work", payload={"n": 1})
HOUR_S = 3_600.0


async def stored(rig: Rig, spec: ScheduleSpec = SPEC, *, paused: bool = False) -> None:
    record = new_record(spec, "anna", await rig.ledger.now(), paused=paused)
    assert await rig.ledger.save_schedule(ADMIN, record, cause="test")


@pytest.mark.requirement("RUN-9")
async def test_a_schedule_is_due_from_its_next_instant_on_until_the_instant_is_decided(rig: Rig):
    await stored(rig)
    await stored(rig, replace(SPEC, name="on-topic", type=None, topic="job.echo"))
    before = await rig.ledger.due_schedules(topics=True)
    assert (before.due, before.next_at) == ((), SPEC.next_instant(before.now))
    await rig.advance(HOUR_S)
    found = await rig.ledger.due_schedules(topics=False)
    (due,) = found.due
    assert (due.spec, due.owner, due.version, due.next_at) == (SPEC, "anna", 1, before.next_at)
    assert {one.name for one in (await rig.ledger.due_schedules(topics=True)).due} == {"nightly", "on-topic"}
    assert before.next_at is not None
    fired = decided(due, InstantDecision(before.next_at))
    assert await rig.ledger.advance_schedule(WORKER, fired)
    (firing,) = (await rig.ledger.due_schedules(topics=False)).due
    assert firing == replace(fired, version=2), "it stays due until its job is recorded"
    assert await rig.ledger.advance_schedule(WORKER, submitted(firing, "job-1"))
    (known,) = await rig.ledger.schedules("nightly")
    assert (known.firing, known.last_at, known.last_job, known.skipped) == (None, before.next_at, "job-1", None)
    assert known.next_at == before.next_at + timedelta(hours=1)
    assert (await rig.ledger.due_schedules(topics=False)).due == ()


@pytest.mark.requirement("RUN-9")
async def test_of_concurrent_changes_of_one_version_one_succeeds(rig: Rig):
    await stored(rig)
    await rig.advance(HOUR_S)
    (due,) = (await rig.ledger.due_schedules(topics=False)).due
    other = await rig.open_another()
    decision = decided(due, InstantDecision(due.spec.next_instant(due.since)))
    answers = await asyncio.gather(
        *(ledger.advance_schedule(WORKER, decision) for ledger in (rig.ledger, other) for _ in range(4))
    )
    assert sorted(answers) == [False] * 7 + [True]
    outdated = replace(due, spec=replace(SPEC, cron="5 * * * *"))
    assert not await rig.ledger.save_schedule(ADMIN, outdated)
    assert not await rig.ledger.save_schedule(ADMIN, replace(outdated, version=0)), "another of this name is there"
    assert await rig.ledger.save_schedule(ADMIN, replace(outdated, version=2))
    (known,) = await rig.ledger.schedules()
    assert (known.spec.cron, known.version, known.firing) == ("5 * * * *", 3, None)


@pytest.mark.requirement("OBS-1", "D35")
async def test_each_change_of_a_schedule_is_one_act_and_a_repeated_one_none(rig: Rig):
    await stored(rig)
    await stored(rig)
    (known,) = await rig.ledger.schedules()
    now = await rig.ledger.now()
    for change in (
        replace(known, paused=True).from_now(now),
        replace(known, paused=False, version=2).from_now(now),
        replace(known, spec=replace(SPEC, tz="Europe/Kyiv"), version=3).from_now(now),
    ):
        assert await rig.ledger.save_schedule(ADMIN, change, cause="why")
        (stored_now,) = await rig.ledger.schedules()
        assert (stored_now.next_at is None) is change.paused
    assert await rig.ledger.remove_schedule(ADMIN, "nightly", cause="why")
    assert not await rig.ledger.remove_schedule(ADMIN, "nightly")
    acts = [act for act in await rig.ledger.acts() if act.event.startswith("schedule.")]
    assert [(act.event, act.subject, act.cause) for act in acts] == [
        ("schedule.added", "nightly", "test"),
        ("schedule.paused", "nightly", "why"),
        ("schedule.resumed", "nightly", "why"),
        ("schedule.changed", "nightly", "why"),
        ("schedule.removed", "nightly", "why"),
    ]
    changed = acts[3]
    assert (changed.source, changed.target) == (SPEC.to_json(), replace(SPEC, tz="Europe/Kyiv").to_json())
    assert [(act.source, act.target) for act in acts[1:3]] == [("active", "paused"), ("paused", "active")]
    assert await rig.ledger.schedules() == []


async def test_a_ledger_has_a_bounded_number_of_schedules(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.ledgers.sqlite.schedules.SCHEDULES_MAX", 3)
    if rig.admin_sql is not None:
        await rig.admin_sql(
            "INSERT INTO trellis.schedule SELECT 's' || n, 1, '{}', false, true, 'x', now(), null, null, null, null, null, 1, now()"
            f" FROM generate_series(1, {schedules.SCHEDULES_MAX - 3}) n"
        )
    for n in range(3):
        await stored(rig, replace(SPEC, name=f"a{n}"))
    with pytest.raises(InputError, match="already; remove one"):
        await stored(rig, replace(SPEC, name="b"))
    await stored(rig, replace(SPEC, name="a0"))
