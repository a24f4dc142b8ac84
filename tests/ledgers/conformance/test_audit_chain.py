"""The newest block of the audit chain in the ledger, and what retention does about what is not sealed."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, Rig, actor
from trellis.engine.admin_acts import RETAINED, NewAct, this_node
from trellis.engine.errors import NotAllowed, OptionInvalid
from trellis.engine.jobs import Actor
from trellis.engine.records import AuditHead, JobFilter, PlannedRemoval, RetentionOptions
from trellis.engine.subscription import PROJECTOR as FOLLOWS_AS
from trellis.lifecycles import Role, Trigger

DAY_S = 24 * 3600.0
PROJECTOR = actor(Role.PROJECTOR)
FIRST = AuditHead(number=0, sha256="0" * 64, position=None)


def block(number: int, position: str | None = None, digit: str = "a") -> AuditHead:
    return AuditHead(number=number, sha256=digit * 64, position=position)


async def stored(rig: Rig) -> AuditHead | None:
    head = await rig.ledger.audit_head()
    return None if head is None else replace(head, at=None)


@pytest.mark.oldest_server
@pytest.mark.requirement("OBS-1", "D57")
async def test_the_newest_block_is_replaced_by_the_one_after_it_and_by_no_other(rig: Rig):
    ledger, other = rig.ledger, await rig.open_another()
    assert await ledger.audit_head() is None
    assert await ledger.extend_audit_chain(PROJECTOR, FIRST, after=None)
    assert not await other.extend_audit_chain(PROJECTOR, block(0), after=None), "there is a chain already"
    await rig.submit_one()
    end = await ledger.feed_end()
    one, fork = block(1, end), block(1, end, "b")
    assert await ledger.extend_audit_chain(PROJECTOR, one, after=FIRST)
    assert not await other.extend_audit_chain(PROJECTOR, fork, after=FIRST), "the chain would fork"
    assert await ledger.extend_audit_chain(PROJECTOR, one, after=FIRST), "the same call again, its answer was lost"
    assert await stored(rig) == one
    for wrong in (block(3, end), replace(block(2), sha256="A" * 64), replace(block(2), feed=0)):
        with pytest.raises(OptionInvalid):
            await ledger.extend_audit_chain(PROJECTOR, wrong, after=one)


@pytest.mark.requirement("OBS-1")
async def test_an_act_is_sealed_after_it_is_published_and_once(rig: Rig):
    ledger = rig.ledger
    for number in range(2):
        await ledger.record_act(ADMIN, NewAct(event="x", subject=str(number)))
    first, second = await ledger.acts()
    assert await ledger.acts(unsealed=True) == []
    await ledger.acts_published(PROJECTOR, [first, second])
    assert await ledger.acts(unsealed=True) == [first, second]
    assert await ledger.extend_audit_chain(PROJECTOR, FIRST, after=None, acts=[first])
    assert await ledger.acts(unsealed=True) == [second]
    await rig.advance(400 * DAY_S)
    await ledger.retain(RetentionOptions())
    left = [act for act in await ledger.acts() if act.event != RETAINED]
    assert left == [second], "what is not sealed stays, however old it is"


@pytest.mark.oldest_server
@pytest.mark.requirement("D61", "OBS-1")
async def test_retention_keeps_what_is_not_sealed_and_records_what_it_removes(rig: Rig):
    await rig.ledger.extend_audit_chain(PROJECTOR, FIRST, after=None)
    held = [await rig.running() for _ in range(3)]
    await rig.pull(held[0], Trigger.COMPLETE)
    await rig.pull(held[1], Trigger.FAIL)
    await rig.pull(held[2], "reject", death=DEATH)
    sealed = await rig.ledger.feed_end()
    late = await rig.running()
    await rig.pull(late, Trigger.COMPLETE)
    await rig.advance(400 * DAY_S)
    options = RetentionOptions(cause="the owner said so")
    assert (await rig.ledger.retain(options)).jobs == 0
    assert [(row.state, row.removable, row.unsealed) for row in await rig.ledger.plan_retention(options)] == [
        ("succeeded", 0, 2),
        ("failed", 0, 1),
        ("dead_lettered", 0, 0),
    ]
    assert await rig.ledger.extend_audit_chain(PROJECTOR, block(1, sealed), after=FIRST)
    assert (await rig.ledger.plan_retention(options))[0] == PlannedRemoval(
        lifecycle="leased-job",
        state="succeeded",
        keep_s=30 * DAY_S,
        ended=2,
        oldest=(await rig.last_event(held[0].lease.job_id)).ts,
        removable=1,
        unsealed=1,
    )
    by = Actor(role=Role.CONTROL_PLANE, name="anna")
    assert (await rig.ledger.retain(options, by=by)).jobs == 2
    (act,) = [one for one in await rig.ledger.acts() if one.event == RETAINED]
    assert (act.actor, act.role, act.node, act.cause, act.subject) == (
        *("anna", Role.CONTROL_PLANE, this_node(), "the owner said so", "ledger"),
    )
    assert act.facts["removed"] == {"leased-job": {"succeeded": 1, "failed": 1}}
    assert sorted(act.facts["jobs"]) == sorted(one.lease.job_id for one in held[:2])
    assert act.facts["events"] == 8
    cut = datetime.fromisoformat(act.facts["ended_before"]["leased-job"]["failed"])
    assert cut == act.at - timedelta(days=30)
    left = {job.job_id for job in (await rig.ledger.jobs(JobFilter(), limit=10)).jobs}
    assert left == {held[2].lease.job_id, late.lease.job_id}


@pytest.mark.oldest_server
@pytest.mark.requirement("D61", "OBS-1")
async def test_retention_waits_for_the_chain_of_a_ledger_that_a_projector_follows_before_it_has_a_head(rig: Rig):
    """After an upgrade retention may run before the projector, which begins the chain."""
    following = await rig.ledger.subscribe(PROJECTOR, FOLLOWS_AS, lease_s=5.0)
    assert following is not None
    held = await rig.running()
    await rig.pull(held, Trigger.COMPLETE)
    await rig.ledger.record_act(ADMIN, NewAct(event="x", subject="y"))
    await rig.ledger.acts_published(PROJECTOR, await rig.ledger.acts())
    assert await rig.ledger.ack(following, await rig.ledger.feed_end(), lease_s=5.0)
    await rig.advance(400 * DAY_S)
    report = await rig.ledger.retain(RetentionOptions())
    (planned,) = await rig.ledger.plan_retention(RetentionOptions())
    assert (report.jobs, report.acts, planned.removable, planned.unsealed) == (0, 0, 0, 1)
    assert await rig.ledger.release_retention(ADMIN, FOLLOWS_AS), "there will be no chain: nobody publishes any more"
    report = await rig.ledger.retain(RetentionOptions())
    assert (report.jobs, report.acts) == (1, 1)


@pytest.mark.requirement("D61")
async def test_a_ledger_that_no_projector_follows_is_retained_without_a_chain(rig: Rig):
    following = await rig.ledger.subscribe(PROJECTOR, "bus-publisher", lease_s=5.0)
    assert following is not None
    held = await rig.running()
    await rig.pull(held, Trigger.COMPLETE)
    assert await rig.ledger.ack(following, await rig.ledger.feed_end(), lease_s=5.0)
    await rig.advance(400 * DAY_S)
    assert (await rig.ledger.retain(RetentionOptions())).jobs == 1


@pytest.mark.requirement("D61")
async def test_a_state_has_its_own_time_and_off_keeps_it(rig: Rig):
    done, failed = await rig.running(), await rig.running()
    await rig.pull(done, Trigger.COMPLETE)
    await rig.pull(failed, Trigger.FAIL)
    await rig.advance(10 * DAY_S)
    own = {("leased-job", "succeeded"): 11 * DAY_S, ("leased-job", "failed"): None}
    options = RetentionOptions(ended_s=DAY_S, states_s=own)
    assert (await rig.ledger.retain(options)).jobs == 0
    await rig.advance(2 * DAY_S)
    assert (await rig.ledger.retain(options)).jobs == 1
    assert await rig.ledger.job(failed.lease.job_id) is not None
    sooner = RetentionOptions(ended_s=DAY_S, from_the_start=True)
    assert (await rig.ledger.retain(sooner)).jobs == 1, "a changed setting holds at once when all is looked at again"
    with pytest.raises(OptionInvalid, match="a state in which a job ends: cancelled, dead_lettered, discarded, failed"):
        await rig.ledger.retain(RetentionOptions(states_s={("leased-job", "running"): 1.0}, testing=True))


@pytest.mark.requirement("D61")
async def test_kept_dead_letters_do_not_stop_the_removal_of_what_ended_after_them(rig: Rig):
    """More of them than a pass looks at: each pass goes on where the last one stopped."""
    for held in [await rig.running() for _ in range(85)]:
        await rig.pull(held, "reject", death=DEATH)
    done = await rig.running()
    await rig.pull(done, Trigger.COMPLETE)
    await rig.advance(40 * DAY_S)
    for _ in range(400):
        report = await rig.ledger.retain(RetentionOptions(batch=2))
        if not report.more:
            break
    assert await rig.ledger.job(done.lease.job_id) is None
    assert len(await rig.ledger.dead_letters(JobFilter(), limit=100)) == 85


@pytest.mark.requirement("D61", "AUTH-2")
async def test_a_role_that_may_not_remove_removes_nothing(rig: Rig):
    held = await rig.running()
    await rig.pull(held, Trigger.COMPLETE)
    await rig.advance(40 * DAY_S)
    for role in (Role.WORKER, Role.SUBMITTER, Role.OWNER):
        with pytest.raises(NotAllowed):
            await rig.ledger.retain(RetentionOptions(), by=actor(role))
    assert await rig.ledger.job(held.lease.job_id) is not None
