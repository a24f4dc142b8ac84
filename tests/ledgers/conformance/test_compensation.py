"""Compensation: undoing a succeeded job with a linked job of its own."""

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, WORKER, Rig, actor
from trellis.engine.jobs import JobId, LeaseLost, NotMoved, ReasonCode, StepApplied
from trellis.engine.records import JobFilter, JobPlace
from trellis.lifecycles import Role, Trigger


async def _done(rig: Rig, **options) -> JobId:
    held = await rig.running(**options)
    await rig.pull(held, Trigger.COMPLETE, result=b'"made"')
    return held.lease.job_id


@pytest.mark.requirement("DJ-17", "DJ-15", "D36")
@pytest.mark.oldest_server
async def test_a_finished_compensation_is_recorded_on_its_original(rig: Rig):
    original = await _done(rig)
    undo = await rig.running(type="undo", compensates=original)
    assert undo.compensates == original
    assert (await rig.job(undo.lease.job_id)).compensates == original
    assert isinstance(await rig.pull(undo, Trigger.COMPLETE), StepApplied)
    job, event = await rig.job(original), await rig.last_event(original)
    assert (job.state, job.place, job.version) == ("succeeded", JobPlace.ENDED, 5)
    assert (event.type, event.source, event.target, event.version) == (
        "job_compensated",
        "succeeded",
        "succeeded",
        5,
    )
    assert (event.role, event.cause) == (Role.WORKER, f"compensated by {undo.lease.job_id}")
    assert await rig.ledger.result(original) == b'"made"'


@pytest.mark.requirement("DJ-17", "DJ-21")
async def test_a_repeated_completion_compensates_once(rig: Rig):
    original = await _done(rig)
    undo = await rig.running(type="undo", compensates=original)
    await rig.pull(undo, Trigger.COMPLETE)
    again = await rig.pull(undo, Trigger.COMPLETE)
    assert again == StepApplied(version=4, repeated=True)
    assert (await rig.event_types(original)).count("job_compensated") == 1


async def test_a_refused_completion_compensates_nothing(rig: Rig):
    original = await _done(rig)
    undo = await rig.running(type="undo", compensates=original)
    await rig.cancel(undo.lease.job_id)
    assert await rig.pull(undo, Trigger.COMPLETE) == LeaseLost(undo.lease)
    assert "job_compensated" not in await rig.event_types(original)


@pytest.mark.requirement("DJ-17", "D36", "DJ-12")
@pytest.mark.parametrize("how", ["reject", "lease", "move"])
async def test_a_compensation_that_dies_says_so(rig: Rig, how: str):
    original = await _done(rig)
    undo = await rig.running(type="undo", compensates=original, max_attempts=1)
    if how == "reject":
        await rig.pull(undo, "reject", death=DEATH)
    elif how == "lease":
        await rig.lose_lease()
    else:
        await rig.move(undo.lease.job_id, "dead_lettered", by=ADMIN, death=DEATH)
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=5)
    assert (letter.job_id, letter.reason_code) == (undo.lease.job_id, ReasonCode.COMPENSATION_FAILED)
    assert (await rig.job(original)).version == 4


@pytest.mark.requirement("DJ-17")
async def test_a_compensation_that_retries_compensates_in_the_end(rig: Rig):
    original = await _done(rig)
    undo = await rig.running(type="undo", compensates=original)
    await rig.pull(undo, Trigger.RETRY)
    again = await rig.claim_one(types=("undo",))
    assert again.compensates == original
    await rig.pull(again, Trigger.COMPLETE, by=WORKER)
    assert (await rig.event_types(original))[-1] == "job_compensated"


async def test_job_that_did_not_succeed_is_not_marked_as_compensated(rig: Rig):
    """The effect was never completed; the compensation itself still ends well."""
    held = await rig.running()
    await rig.pull(held, Trigger.FAIL)
    undo = await rig.running(type="undo", compensates=held.lease.job_id)
    assert isinstance(await rig.pull(undo, Trigger.COMPLETE), StepApplied)
    assert await rig.event_types(held.lease.job_id) == ["job_queued", "job_claimed", "job_started", "job_failed"]


@pytest.mark.oldest_server
@pytest.mark.requirement("D36")
async def test_no_role_can_mark_a_job_as_compensated(rig: Rig):
    """It is what the engine finds when a compensation succeeds, and no role's own word."""
    original = await _done(rig)
    before = await rig.snapshot(original)
    for role in Role:
        answer = await rig.move(original, "succeeded", by=actor(role))
        assert isinstance(answer, NotMoved), role
        assert answer.state == "succeeded"
    assert await rig.snapshot(original) == before


@pytest.mark.only("postgres")
@pytest.mark.requirement("DJ-17", "D36", "D55")
async def test_the_databases_own_function_refuses_a_compensation_too(rig: Rig):
    original = await _done(rig)
    before = await rig.snapshot(original)
    shell = await asyncpg.connect(rig.app_url, server_settings={"search_path": "trellis"})
    try:
        me = await shell.fetchval("select register_actor('somebody', $1)", Role.WORKER.code)
        answer = await shell.fetchrow(
            "select * from moves(array[$1::int], array[$2], array['succeeded'], array['r'], array[null::int], null, null, null,"
            " array['undone, believe me'], null, null, null, null)",
            me,
            original,
        )
    finally:
        await shell.close()
    assert answer is not None
    assert answer["outcome"] == "engine"
    assert await rig.snapshot(original) == before
