"""Steps of many jobs in one turn. PostgreSQL makes most of them in one statement, and each leaves its job as if it came alone."""

import json
from datetime import timedelta

import pytest

from tests.ledgers.conformance.rig import LENGTH_S, Rig, actor
from trellis.engine.jobs import Advance, CancelMode, CancelRequested, Epoch, Lease, LeaseLost, StepApplied
from trellis.engine.records import JobPlace
from trellis.ledgers.postgres.turn import sort_steps, steps_call
from trellis.lifecycles import Role, Trigger

ORCHESTRATOR = actor(Role.ORCHESTRATOR)
KEY = "run:anna"
VERSION = 3
"""Of a run that was requested, queued and started."""


async def driven(rig: Rig, **options) -> Lease:
    lease = await rig.drive(await rig.submit_one(lifecycle="run", **options), "running")
    assert lease is not None
    return lease


def step(lease: Lease, version: int | None = VERSION, **options) -> Advance:
    options.setdefault("data", b'{"step": 1}')
    return Advance(lease=lease, source="running", trigger="step", version=version, **options)


def complete(lease: Lease, **options) -> Advance:
    return Advance(lease=lease, source="running", trigger=Trigger.COMPLETE, data=b'{"summary": "done"}', **options)


def fail(lease: Lease) -> Advance:
    return Advance(lease=lease, source="running", trigger=Trigger.FAIL, data=b'{"error_text": "no"}', cause="no")


@pytest.mark.oldest_server
@pytest.mark.requirement("D29", "DJ-7", "PIPE-3")
async def test_steps_of_many_runs_in_one_turn_leave_each_as_if_it_came_alone(rig: Rig):
    plain, unnumbered, stale, older, requested, failed, twice = [await driven(rig) for _ in range(7)]
    assert isinstance(await rig.cancel(requested.job_id, CancelMode.SOFT, by=ORCHESTRATOR), CancelRequested)
    lost = stale._replace(epoch=Epoch(stale.epoch + 1))
    await rig.advance(1.0)
    steps = (
        fail(failed),
        step(plain, cause="counted", data=b'{"n": 1}'),
        step(lost),
        step(older, version=VERSION - 1),
        step(requested),
        step(twice, data=b'{"n": 1}'),
        step(twice, version=VERSION + 1, data=b'{"n": 2}'),
        step(unnumbered, version=None, data=None),
    )
    outcomes = (await rig.turn(*steps, by=ORCHESTRATOR)).outcomes
    applied = StepApplied(4)
    expected = [applied, applied, LeaseLost(lost), LeaseLost(older), applied, applied, StepApplied(5), applied]
    assert outcomes == expected
    last = {lease: await rig.last_event(lease.job_id) for lease in (plain, unnumbered, requested, twice)}
    assert {(event.type, event.role, event.source, event.target) for event in last.values()} == {
        ("run.step.completed", Role.ORCHESTRATOR, "running", "running")
    }
    assert [(last[lease].cause, last[lease].data) for lease in (plain, unnumbered, twice)] == [
        ("counted", b'{"n": 1}'),
        (None, None),
        (None, b'{"n": 2}'),
    ]
    until = await rig.ledger.now() + timedelta(seconds=LENGTH_S)
    assert [(await rig.job(lease.job_id)).lease_expires_at for lease in (plain, unnumbered, requested)] == [until] * 3
    assert [(await rig.job(lease.job_id)).version for lease in (stale, older)] == [VERSION] * 2
    assert await rig.state(failed.job_id) == "failed"
    assert (await rig.verify()).ok


@pytest.mark.oldest_server
@pytest.mark.requirement("D29", "DJ-7", "DJ-15")
async def test_completions_of_many_runs_in_one_turn_leave_each_as_if_it_came_alone(rig: Rig):
    rig.key_limits[KEY] = 1
    keyed = await driven(rig, concurrency_key=KEY)
    behind = await rig.submit_one(lifecycle="run", concurrency_key=KEY)
    assert await rig.move(behind, "queued", by=ORCHESTRATOR)
    assert (await rig.job(behind)).place is JobPlace.BLOCKED
    plain, going_on, stale, older, requested = [await driven(rig) for _ in range(5)]
    assert isinstance(await rig.cancel(requested.job_id, CancelMode.SOFT, by=ORCHESTRATOR), CancelRequested)
    lost = stale._replace(epoch=Epoch(stale.epoch + 1))
    steps = (
        complete(requested),
        complete(plain, result=b"[1]", cause="ends"),
        step(going_on),
        complete(lost),
        complete(older, version=VERSION - 1),
        complete(keyed),
    )
    outcomes = (await rig.turn(*steps, by=ORCHESTRATOR)).outcomes
    applied = StepApplied(4)
    assert outcomes == [applied, applied, applied, LeaseLost(lost), LeaseLost(older), applied]
    ended = [await rig.job(lease.job_id) for lease in (requested, plain, keyed)]
    assert [(job.state, job.place, job.version) for job in ended] == [("completed", JobPlace.ENDED, 4)] * 3
    assert [await rig.state(lease.job_id) for lease in (going_on, stale, older)] == ["running"] * 3
    last = await rig.last_event(plain.job_id)
    assert (last.type, last.role, last.cause, last.data) == (
        "run.completed",
        Role.ORCHESTRATOR,
        "ends",
        b'{"summary": "done"}',
    )
    assert await rig.ledger.result(plain.job_id) == b"[1]"
    assert "cancel_requested" in json.loads((await rig.last_event(requested.job_id)).data or b"{}")
    assert (await rig.job(behind)).place is JobPlace.READY
    again = (await rig.turn(*steps, by=ORCHESTRATOR)).outcomes
    repeated = StepApplied(4, repeated=True)
    assert again == [repeated, repeated, repeated, LeaseLost(lost), LeaseLost(older), repeated]
    assert (await rig.verify()).ok


@pytest.mark.only("postgres")
async def test_plain_steps_of_many_jobs_need_no_step_by_step_call(rig: Rig):
    """The wrong line it catches: one that sends every step the slow way, which gives the same answers."""
    first, second, keyed, requested = [await driven(rig, concurrency_key=key) for key in (None, None, KEY, None)]
    await rig.cancel(requested.job_id, CancelMode.SOFT, by=ORCHESTRATOR)
    assert rig.admin_sql is not None
    cases: list[tuple[tuple[Advance, ...], int]] = [
        ((step(first), step(second)), 2),
        ((complete(first), step(second), complete(keyed)), 3),
        ((step(first), complete(requested)), 1),
        ((step(first), step(first, version=VERSION + 1)), 0),
        ((fail(first), step(second)), 1),
    ]
    for steps, count in cases:
        told = steps_call(0, sort_steps(steps, None, Role.ORCHESTRATOR)).told
        by = f"trellis.register_actor('o', {Role.ORCHESTRATOR.code}::smallint)"
        made = f"trellis._advance_together(array[{by}], array[$step${told}$step$::jsonb], trellis._open_batch())"
        await rig.admin_sql("BEGIN")
        await rig.admin_sql(f"DO $$ BEGIN ASSERT (SELECT count(*) FROM {made}) = {count}; END $$")
        await rig.admin_sql("ROLLBACK")
