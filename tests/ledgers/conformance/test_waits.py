"""Suspended jobs: they hold no lease, and go on in the transaction in which what they wait for has happened."""

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, SUBMITTER, WORKER, Rig, actor
from tests.ledgers.conformance.test_restore import lost_and_restored
from trellis.engine.errors import ChildExists, InvalidTransition, JobNotFound, NotAllowed, OptionInvalid, SignalRefused
from trellis.engine.jobs import (
    JOB_SIGNALS_MAX,
    ORPHAN_GRACE_S,
    WAIT_CHILDREN_MAX,
    Advance,
    CancelMode,
    CancelRequested,
    Claimed,
    JobId,
    JobSignal,
    LeaseLost,
    NewJob,
    StepApplied,
    Turn,
    Wait,
    WaitMode,
)
from trellis.engine.records import JobPlace, RetentionOptions
from trellis.lifecycles import Role
from trellis.lifecycles.events import Cause

SUSPEND = "suspend"
FOREVER = Wait(signal="never")


def child_of(rig: Rig, parent: Claimed, **options) -> NewJob:
    return rig.new_job(type="child", parent_id=parent.lease.job_id, **options)


async def spawn(rig: Rig, parent: Claimed, n: int, *, entry: str = "children", abandoned=(), **options) -> list[JobId]:
    jobs = [child_of(rig, parent, **options) for _ in range(n)]
    stored = await rig.ledger.spawn(WORKER, parent.lease, jobs, entry, b"[]", abandoned=frozenset(abandoned))
    assert stored == b"[]"
    return [job.job_id for job in jobs]


async def suspend(rig: Rig, held: Claimed, wait: Wait) -> None:
    assert isinstance(await rig.pull(held, SUSPEND, wait=wait, spare_attempt=True), StepApplied)


async def end_child(rig: Rig, job_id: JobId, trigger: str = "complete", **options) -> None:
    held = await rig.claim_one(types=("child",), only=job_id)
    assert isinstance(await rig.pull(held, trigger, **options), StepApplied)


async def waiting_parent(rig: Rig, children: int, mode: WaitMode = WaitMode.ALL, **wait) -> tuple[JobId, list[JobId]]:
    parent = await rig.running()
    ids = await spawn(rig, parent, children)
    await suspend(rig, parent, Wait(children=tuple(ids), mode=mode, **wait))
    return parent.lease.job_id, ids


async def test_a_suspended_job_has_no_lease_and_is_not_claimed(rig: Rig):
    held = await rig.running()
    await suspend(rig, held, FOREVER)
    job = await rig.job(held.lease.job_id)
    assert (job.state, job.place, job.due_at, job.attempt) == ("suspended", JobPlace.SCHEDULED, None, 1)
    assert await rig.ledger.holds([job.job_id]) == []
    assert await rig.claim(5) == []
    await rig.pass_time(3600)
    assert await rig.state(job.job_id) == "suspended"
    assert isinstance(await rig.pull(held, "complete"), LeaseLost), "its holder has no lease any more"


async def test_a_job_goes_on_when_the_last_of_its_children_has_ended(rig: Rig):
    parent, (first, second) = await waiting_parent(rig, 2)
    await end_child(rig, second)
    assert await rig.state(parent) == "suspended"
    await end_child(rig, first, "fail")
    event = await rig.last_event(parent)
    assert (event.type, event.source, event.target, event.cause) == (
        "job_resumed",
        "suspended",
        "queued",
        Cause.CHILDREN_ENDED,
    )
    assert (event.role, event.actor) == (Role.SWEEPER, WORKER.name), "made in the transaction of the child's end"
    again = await rig.claim_one()
    assert (again.lease.job_id, again.attempts_spent, again.attempts_allowed) == (parent, 0, 5)


@pytest.mark.parametrize(
    "mode, ends, goes_on",
    [
        (WaitMode.ALL, ("fail",), False),
        (WaitMode.ALL_OR_FAILURE, ("complete",), False),
        (WaitMode.ALL_OR_FAILURE, ("fail",), True),
        (WaitMode.ALL_OR_FAILURE, ("complete", "complete", "complete"), True),
        (WaitMode.ANY, ("complete",), True),
        (WaitMode.ANY, ("fail",), True),
    ],
)
async def test_the_mode_of_a_wait_decides_which_ends_count(
    rig: Rig, mode: WaitMode, ends: tuple[str, ...], goes_on: bool
):
    parent, children = await waiting_parent(rig, 3, mode)
    for job_id, trigger in zip(children, ends, strict=False):
        assert await rig.state(parent) == "suspended"
        await end_child(rig, job_id, trigger)
    assert await rig.state(parent) == ("queued" if goes_on else "suspended")
    if goes_on:
        failed = mode is WaitMode.ALL_OR_FAILURE and "fail" in ends
        assert (await rig.last_event(parent)).cause == (Cause.CHILD_FAILED if failed else Cause.CHILDREN_ENDED)


async def test_children_that_ended_before_the_wait_began_count(rig: Rig):
    for mode, ends in ((WaitMode.ALL, 2), (WaitMode.ALL_OR_FAILURE, 1), (WaitMode.ANY, 1)):
        parent = await rig.running()
        children = await spawn(rig, parent, 2)
        for job_id in children[:ends]:
            await end_child(rig, job_id, "fail")
        await suspend(rig, parent, Wait(children=tuple(children), mode=mode))
        assert (await rig.event_types(parent.lease.job_id))[-2:] == ["job_suspended", "job_resumed"], mode
        await rig.cancel(parent.lease.job_id)


@pytest.mark.parametrize(
    "wait, cause",
    [
        ({"signal": "go"}, Cause.SIGNAL_ARRIVED % "go"),
        ({"signal": "go", "restart_with": b"2"}, Cause.BEGINS_ANEW),
        ({"restart_with": b"2"}, Cause.BEGINS_ANEW),
    ],
)
async def test_of_all_that_happened_before_the_wait_the_resumed_job_names_the_same(
    rig: Rig, wait: dict[str, Any], cause: str
):
    parent = await rig.running()
    (child,) = await spawn(rig, parent, 1)
    await end_child(rig, child)
    await rig.ledger.send_signal(ADMIN, parent.lease.job_id, "go", b"1")
    await suspend(rig, parent, Wait(children=(child,), **wait))
    assert (await rig.last_event(parent.lease.job_id)).cause == cause


async def test_a_wait_that_begins_after_the_last_child_ended_says_whether_one_failed(rig: Rig):
    parent = await rig.running()
    good, bad = await spawn(rig, parent, 2)
    await end_child(rig, good)
    await end_child(rig, bad, "fail")
    await suspend(rig, parent, Wait(children=(good, bad), mode=WaitMode.ALL_OR_FAILURE))
    assert (await rig.last_event(parent.lease.job_id)).cause == Cause.CHILD_FAILED


async def test_a_child_may_end_in_any_way(rig: Rig):
    for end in ("cancel", "dead_letter", "deadline", "deaths"):
        parent = await rig.running()
        (child,) = await spawn(rig, parent, 1, deadline_s=30.0 if end == "deadline" else None, max_deaths=1)
        await suspend(rig, parent, Wait(children=(child,)))
        if end == "cancel":
            await rig.cancel(child)
        elif end == "dead_letter":
            await rig.move(child, "dead_lettered", by=ADMIN, death=DEATH)
        elif end == "deaths":
            await rig.claim_one(types=("child",), only=child)
            await rig.lose_lease()
        else:
            await rig.pass_time(40)
        assert await rig.state(parent.lease.job_id) == "queued", end
        await rig.cancel(parent.lease.job_id)


async def test_a_timer_ends_the_wait(rig: Rig):
    parent, (child,) = await waiting_parent(rig, 1, timeout_s=60.0)
    assert (await rig.job(parent)).due_at is not None
    await rig.pass_time(50)
    assert await rig.state(parent) == "suspended"
    await rig.pass_time(20)
    event = await rig.last_event(parent)
    assert (event.type, event.cause, event.role) == ("job_resumed", None, Role.SWEEPER)
    await end_child(rig, child)
    assert await rig.state(parent) == "queued", "the child's end wakes nobody any more"


async def test_a_signal_resumes_the_job_that_waits_for_it(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    await suspend(rig, held, Wait(signal="approved"))
    other = await rig.ledger.send_signal(SUBMITTER, job_id, "rejected", b"1")
    assert (other.state, await rig.state(job_id)) == ("suspended", "suspended")
    sent = await rig.ledger.send_signal(SUBMITTER, job_id, "approved", b'{"by": "ada"}')
    event = await rig.last_event(job_id)
    assert (event.type, event.cause, event.actor, event.role) == (
        "job_resumed",
        "signal approved arrived",
        SUBMITTER.name,
        Role.SWEEPER,
    )
    assert await rig.ledger.job_signals(job_id, "approved", after=0, limit=10) == [
        JobSignal(sent.number, "approved", b'{"by": "ada"}')
    ]
    assert await rig.ledger.job_signals(job_id, "approved", after=sent.number, limit=10) == []
    acts = [one for one in await rig.ledger.acts() if one.event == "job.signalled"]
    assert [(one.actor, one.subject, one.target, one.job_id) for one in acts] == [
        (SUBMITTER.name, job_id, name, job_id) for name in ("rejected", "approved")
    ]


async def test_a_signal_that_came_before_the_wait_counts_unless_it_was_read(rig: Rig):
    held = await rig.running()
    sent = await rig.ledger.send_signal(ADMIN, held.lease.job_id, "go", b"1")
    await suspend(rig, held, Wait(signal="go"))
    assert await rig.state(held.lease.job_id) == "queued"
    again = await rig.claim_one()
    await suspend(rig, again, Wait(signal="go", after=sent.number))
    assert await rig.state(held.lease.job_id) == "suspended"


async def test_a_repeated_signal_is_stored_once(rig: Rig):
    job_id = await rig.submit_one()
    first = await rig.ledger.send_signal(SUBMITTER, job_id, "go", b"1", signal_key="k")
    again = await rig.ledger.send_signal(SUBMITTER, job_id, "go", b"2", signal_key="k")
    assert (first.repeated, again.repeated, again.number) == (False, True, first.number)
    assert [signal.body for signal in await rig.ledger.job_signals(job_id, "go", after=0, limit=10)] == [b"1"]
    await rig.cancel(job_id)
    assert (await rig.ledger.send_signal(SUBMITTER, job_id, "go", b"1", signal_key="k")).repeated


async def test_signals_are_refused_clearly(rig: Rig):
    with pytest.raises(JobNotFound):
        await rig.ledger.send_signal(SUBMITTER, JobId("nobody"), "go", b"1")
    job_id = await rig.submit_one()
    for body in (b"{", b"NaN", b'{"a":-Infinity}', b"\xff", b"[" * 100_000):
        with pytest.raises(OptionInvalid, match="JSON in UTF-8"):
            await rig.ledger.send_signal(SUBMITTER, job_id, "go", body)
    with pytest.raises(OptionInvalid, match="signal"):
        await rig.ledger.send_signal(SUBMITTER, job_id, "", b"1")
    with pytest.raises(NotAllowed, match="send a signal"):
        await rig.ledger.send_signal(actor(Role.PROJECTOR), job_id, "go", b"1")
    await rig.cancel(job_id)
    with pytest.raises(SignalRefused, match="it ended as cancelled"):
        await rig.ledger.send_signal(SUBMITTER, job_id, "go", b"1")


async def test_a_job_takes_a_bounded_number_of_signals(rig: Rig):
    job_id = await rig.submit_one()
    for n in range(JOB_SIGNALS_MAX):
        await rig.ledger.send_signal(SUBMITTER, job_id, f"s{n}", b"1")
    with pytest.raises(SignalRefused, match=f"{JOB_SIGNALS_MAX} signals"):
        await rig.ledger.send_signal(SUBMITTER, job_id, "s4", b"1")


async def test_a_repeated_spawn_submits_nothing_again(rig: Rig):
    parent = await rig.running()
    job = child_of(rig, parent)
    for body in (b"1", b"2"):
        assert await rig.ledger.spawn(WORKER, parent.lease, [job], "e", body, abandoned=frozenset()) == b"1"
    assert [one.job_id for one in (await rig.ledger.outcomes([job.job_id]))] == [job.job_id]
    assert await rig.ledger.read_journal(parent.lease.job_id) == {"e": b"1"}


async def test_a_lost_lease_spawns_nothing(rig: Rig):
    parent = await rig.running()
    await rig.lose_lease()
    job = child_of(rig, parent)
    stored = await rig.ledger.spawn(WORKER, parent.lease, [job], "e", b"1", abandoned=frozenset())
    assert stored == LeaseLost(parent.lease)
    assert await rig.ledger.job(job.job_id) is None
    assert await rig.ledger.read_journal(parent.lease.job_id) == {}


@pytest.mark.parametrize("options", [{"delay_s": 60.0}, {"concurrency_key": "k"}, {"priority": 0}])
async def test_children_of_every_kind_are_awaited(rig: Rig, options: dict[str, Any]):
    parent = await rig.running()
    children = await spawn(rig, parent, 2, **options)
    await suspend(rig, parent, Wait(children=tuple(children)))
    await rig.pass_time(61)
    for job_id in children:
        await end_child(rig, job_id)
    assert await rig.state(parent.lease.job_id) == "queued"


async def test_spawn_takes_only_children_of_the_held_job(rig: Rig):
    parent = await rig.running()
    for wrong in (rig.new_job(), rig.new_job(parent_id=parent.lease.job_id, idempotency_key="k", fingerprint=b"1")):
        with pytest.raises(OptionInvalid, match="plain child"):
            await rig.ledger.spawn(WORKER, parent.lease, [wrong], "e", b"1", abandoned=frozenset())


async def test_children_of_a_cancelled_job_are_cancelled(rig: Rig):
    parent = await rig.running()
    held_id, waiting_id = await spawn(rig, parent, 2)
    (kept,) = await spawn(rig, parent, 1, entry="more", abandoned=[JobId("later")])
    held = await rig.claim_one(types=("child",), only=held_id)
    await suspend(rig, parent, Wait(children=(held_id, waiting_id)))
    await rig.cancel(parent.lease.job_id)
    await rig.sweep()
    event = await rig.last_event(waiting_id)
    assert (event.type, event.cause, event.role) == ("job_cancelled", Cause.PARENT_ENDED, Role.SWEEPER)
    assert await rig.state(kept) == "cancelled"
    (lease,) = await rig.ledger.holds([held_id])
    assert lease.cancel, "its holder is asked to stop"
    assert isinstance(await rig.pull(held, "stop"), StepApplied)
    assert ORPHAN_GRACE_S > 0


async def test_abandoned_children_and_those_of_a_job_that_ended_otherwise_go_on(rig: Rig):
    """A job that failed may be requeued, and needs its children then."""
    cancelled = await rig.running()
    job = child_of(rig, cancelled)
    await rig.ledger.spawn(WORKER, cancelled.lease, [job], "e", b"1", abandoned=frozenset({job.job_id}))
    await rig.cancel(cancelled.lease.job_id)
    children = [job.job_id]
    for trigger in ("complete", "fail", "reject"):
        parent = await rig.running()
        children += await spawn(rig, parent, 1)
        await rig.pull(parent, trigger, death=DEATH if trigger == "reject" else None)
    await rig.sweep()
    assert {await rig.state(job_id) for job_id in children} == {"queued"}


async def test_a_requeued_child_is_awaited_again(rig: Rig):
    parent, (child,) = await waiting_parent(rig, 1)
    await end_child(rig, child, "fail")
    await rig.ledger.requeue(ADMIN, [child], rig.request(), limit=1, cause=None)
    again = await rig.claim_one()
    await suspend(rig, again, Wait(children=(child,)))
    assert await rig.state(parent) == "suspended"
    await end_child(rig, child)
    assert await rig.state(parent) == "queued"


async def test_a_suspended_job_is_cancelled_dead_lettered_and_ends_by_its_deadline(rig: Rig):
    for end in ("cancel", "dead_letter", "deadline"):
        held = await rig.running(deadline_s=100.0)
        await suspend(rig, held, FOREVER)
        if end == "cancel":
            assert not isinstance(await rig.cancel(held.lease.job_id), CancelRequested)
        elif end == "dead_letter":
            await rig.move(held.lease.job_id, "dead_lettered", by=ADMIN, death=DEATH)
        else:
            await rig.pass_time(110)
        assert await rig.state(held.lease.job_id) == ("cancelled" if end == "cancel" else "dead_lettered")


async def test_nobody_else_resumes_a_suspended_job(rig: Rig):
    held = await rig.running()
    await suspend(rig, held, FOREVER)
    for role in (Role.SUBMITTER, Role.CONTROL_PLANE, Role.WORKER, Role.GATEWAY):
        answer = await rig.move(held.lease.job_id, "queued", by=actor(role))
        assert "sweeper" in getattr(answer, "reason", ""), role
    assert await rig.state(held.lease.job_id) == "suspended"


async def test_a_cancel_request_ends_the_job_instead_of_suspending_it(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    await rig.pull(held, SUSPEND, wait=FOREVER, spare_attempt=True)
    assert await rig.state(held.lease.job_id) == "cancelled"


async def test_exactly_a_suspending_step_names_a_wait(rig: Rig):
    held = await rig.running()
    with pytest.raises(InvalidTransition, match="names its wait"):
        await rig.pull(held, SUSPEND)
    with pytest.raises(InvalidTransition, match="names its wait"):
        await rig.pull(held, "complete", wait=FOREVER)
    with pytest.raises(OptionInvalid, match="at most"):
        await rig.pull(held, SUSPEND, wait=Wait(children=(JobId("c"),) * (WAIT_CHILDREN_MAX + 1)))
    assert await rig.state(held.lease.job_id) == "running"


async def test_a_repeated_suspend_is_answered_alike(rig: Rig):
    held = await rig.running()
    first = await rig.pull(held, SUSPEND, wait=FOREVER, spare_attempt=True)
    again = await rig.pull(held, SUSPEND, wait=FOREVER, spare_attempt=True)
    assert isinstance(first, StepApplied)
    assert again == StepApplied(first.version, repeated=True)


async def test_outcomes_say_how_far_jobs_are(rig: Rig):
    done, failed, open_ = await rig.submit(3, type="child")
    await end_child(rig, done, "complete", result=b"7")
    await end_child(rig, failed, "fail", cause="no luck")
    outcomes = {one.job_id: one for one in await rig.ledger.outcomes([done, failed, open_, JobId("unknown")])}
    assert {key: one[2:] for key, one in outcomes.items()} == {
        done: ("succeeded", True, True, b"7", None),
        failed: ("failed", True, False, None, "no luck"),
        open_: ("queued", False, False, None, None),
    }


async def test_a_keyed_job_gives_its_slot_away_while_it_waits(rig: Rig):
    held = await rig.running(concurrency_key="k")
    second = await rig.submit_one(concurrency_key="k")
    assert await rig.claim(1) == []
    await suspend(rig, held, Wait(signal="go"))
    (other,) = await rig.claim(1)
    assert other.lease.job_id == second
    await rig.ledger.send_signal(ADMIN, held.lease.job_id, "go", b"1")
    assert await rig.claim(1) == [], "it waits for its slot again"
    await rig.pull(other, "complete")
    assert (await rig.claim_one()).lease.job_id == held.lease.job_id


async def test_many_children_that_end_at_once_resume_their_parents_once(rig: Rig):
    """Children of several parents end in many transactions at the same time: no end is missed, none counts twice."""
    parents = []
    for _ in range(4):
        parent = await rig.running()
        children = await spawn(rig, parent, 12)
        await suspend(rig, parent, Wait(children=tuple(children)))
        parents.append((parent.lease.job_id, children))
    ledgers = [rig.ledger, await rig.open_another()]
    held = await rig.claim(48, types=("child",))
    interleaved = sorted(held, key=lambda one: hash(one.lease.job_id) % 7)

    async def end(n: int, part: list[Claimed]) -> None:
        advances = tuple(Advance(one.lease, "running", "complete" if n % 3 else "fail") for one in part)
        await ledgers[n % 2].turn(Turn(actor=WORKER, advances=advances))

    await asyncio.gather(*(end(n, interleaved[n::8]) for n in range(8)))
    for job_id, _ in parents:
        assert (await rig.event_types(job_id)).count("job_resumed") == 1


async def test_signals_leave_with_their_job(rig: Rig):
    job_id = await rig.submit_one()
    await rig.ledger.send_signal(SUBMITTER, job_id, "go", b"1")
    await rig.cancel(job_id)
    await rig.advance(2 * 86_400.0)
    while (await rig.ledger.retain(RetentionOptions(ended_s=86_400.0))).more:
        pass
    assert await rig.ledger.job_signals(job_id, "go", after=0, limit=10) == []


async def test_a_wait_stores_its_journal_entry_and_a_new_beginning_empties_the_journal(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    await rig.ledger.journal(held.lease, "before", b"1")
    await suspend(rig, held, Wait(timeout_s=60.0, entry=("sleep", b"2")))
    assert await rig.ledger.read_journal(job_id) == {"before": b"1", "sleep": b"2"}
    await rig.pass_time(61)
    await suspend(rig, await rig.claim_one(), Wait(restart_with=b'"anew"'))
    assert await rig.ledger.read_journal(job_id) == {"@input": b'"anew"'}
    event = await rig.last_event(job_id)
    assert (event.type, event.cause) == ("job_resumed", Cause.BEGINS_ANEW)


async def test_a_child_whose_id_another_job_has_is_not_spawned(rig: Rig):
    """Ids of children can be computed: whoever takes one first keeps the child away, and cannot answer for it."""
    parent = await rig.running()
    job = child_of(rig, parent)
    await rig.offer(NewJob(job_id=job.job_id, type="child"))
    with pytest.raises(ChildExists):
        await rig.ledger.spawn(WORKER, parent.lease, [job], "e", b"1", abandoned=frozenset())
    assert await rig.ledger.read_journal(parent.lease.job_id) == {}


@pytest.mark.only("postgres")
@pytest.mark.parametrize(
    "mode, trigger", [(WaitMode.ALL_OR_FAILURE, "fail"), (WaitMode.ANY, "complete"), (WaitMode.ALL, "complete")]
)
async def test_children_of_the_same_parents_that_end_in_two_turns_do_not_deadlock(
    rig: Rig, mode: WaitMode, trigger: str
):
    families = [await waiting_parent(rig, 2, mode) for _ in range(120)]
    claimed = {one.lease.job_id: one for one in await rig.claim(2 * len(families), types=("child",))}
    held = [[claimed[ids[n]] for _, ids in families] for n in range(2)]
    other, before = await rig.open_another(), await _deadlocks(rig)
    turns = [
        Turn(actor=WORKER, advances=tuple(Advance(one.lease, "running", trigger) for one in part)) for part in held
    ]
    await asyncio.gather(rig.ledger.turn(turns[0]), other.turn(turns[1]))
    assert await _deadlocks(rig) == before
    assert {await rig.state(parent) for parent, _ in families} == {"queued"}


@pytest.mark.only("postgres")
async def test_a_sweep_waits_for_no_relative_of_a_job_that_it_ends(rig: Rig):
    """A turn has the child's row when the sweep comes to its lease: the sweep leaves the job to the next one."""
    parent = await rig.running()
    (child,) = await spawn(rig, parent, 1, max_attempts=1)
    held = await rig.claim_one(types=("child",), only=child)
    await suspend(rig, parent, Wait(children=(child,)))
    for _ in range(3):
        await rig.advance(8.0)
        await rig.sweep()
    assert rig.admin_url is not None
    turn = await asyncpg.connect(rig.admin_url)
    await turn.execute("BEGIN; SELECT FROM trellis.spawned FOR UPDATE")
    await rig.advance(8.0)
    report = await rig.sweep()
    assert (report.expired, report.exhausted, await rig.state(child)) == (0, 0, "running")
    await turn.execute("ROLLBACK")
    await turn.close()
    await rig.sweep()
    assert await rig.state(child) == "dead_lettered"
    assert await rig.state(parent.lease.job_id) == "queued"
    assert isinstance(await rig.pull(held, "complete"), LeaseLost)


async def test_a_restored_job_gets_signals_again(rig: Rig):
    """What it waited for is lost: it is resumed at once, and signals have higher numbers than those it has read."""
    held = await rig.running(type="waits")
    job_id = held.lease.job_id
    for _ in range(4):
        await rig.ledger.send_signal(SUBMITTER, job_id, "go", b"1")
    sent = await rig.ledger.send_signal(SUBMITTER, job_id, "go", b"1")
    await suspend(rig, held, Wait(signal="go", after=sent.number, timeout_s=86_400.0))
    await lost_and_restored(rig)
    await rig.advance(1)
    await rig.sweep()
    again = await rig.claim_one(types=("waits",))
    await suspend(rig, again, Wait(signal="go", after=sent.number))
    assert await rig.state(job_id) == "suspended"
    await rig.ledger.send_signal(SUBMITTER, job_id, "go", b"2")
    assert await rig.state(job_id) == "queued"
    assert [one.body for one in await rig.ledger.job_signals(job_id, "go", after=sent.number, limit=9)] == [b"2"]


@pytest.mark.only("postgres")
async def test_sql_callers_send_bounded_json(rig: Rig):
    job_id = await rig.submit_one()
    connection = await asyncpg.connect(rig.app_url)
    send = "SELECT outcome FROM trellis.send_signal(trellis.register_actor('x', $1::smallint), $2, $3, $4, null, null, false)"
    for name, body, wrong in (("go", b"not json", "is JSON"), ("", b"1", "1 to 200"), ("go", b"\xff", "is JSON")):
        with pytest.raises(asyncpg.PostgresError, match=wrong):
            await connection.fetchval(send, Role.CONTROL_PLANE.code, job_id, name, body)
    assert await connection.fetchval(send, Role.CONTROL_PLANE.code, job_id, "go", b"1") == "sent"
    await connection.close()


async def test_a_new_beginning_drops_the_signals_that_were_read(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    numbers = [(await rig.ledger.send_signal(SUBMITTER, job_id, name, b"1")).number for name in ("go", "go", "other")]
    anew = json.dumps({"n": 1, "payload": None, "signals": {"go": numbers[0]}}).encode()
    await suspend(rig, held, Wait(restart_with=anew))
    left = [await rig.ledger.job_signals(job_id, name, after=0, limit=9) for name in ("go", "other")]
    assert [[one.number for one in each] for each in left] == [[numbers[1]], [numbers[2]]]


async def _deadlocks(rig: Rig) -> int:
    assert rig.admin_sql is not None
    await rig.admin_sql("SELECT pg_stat_force_next_flush()")
    rows = await rig.admin_sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    return rows[0][0]
