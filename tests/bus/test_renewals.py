"""A worker's heartbeats keep its jobs alive: those that it can mean, and no longer than one attempt may take."""

from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Held, Parts, parts_of
from tests.bus.rig import TOPIC, Rig
from trellis.bus.messages import WorkerHeartbeat
from trellis.bus.outcomes.attempts import AMNESTY_S_MAX, RECONNECT_GRACE_S
from trellis.engine.jobs import CancelMode
from trellis.engine.records import RetentionOptions

LEASE_S = 9.0
SHORT = {TOPIC: {"lease_s": LEASE_S, "running_s": 60.0}}


def _beat(rig: Rig, worker_id: str, active_jobs: int) -> None:
    rig.workers.record_heartbeat(
        WorkerHeartbeat(worker_id=worker_id, active_jobs=active_jobs, max_parallel_jobs=4), rig.clock()
    )


async def _pass(parts: Parts, seconds: float, worker_id: str | None, active_jobs: int = 1) -> None:
    """Time passes with renewals every second and a heartbeat after each of them."""
    for _ in range(int(seconds)):
        await parts.renewals.run_once()
        await parts.pass_time(1)
        if worker_id is not None:
            _beat(parts.rig, worker_id, active_jobs)


async def _run(parts: Parts, **fields: Any) -> Held:
    """A job that its worker told of once; it never asked whether it may begin."""
    held = await parts.dispatched(worker_id="w1", **fields)
    await parts.progress(held, "w1")
    return held


@pytest.mark.on_both
@pytest.mark.requirement("D29", "D30")
async def test_heartbeats_keep_a_long_job_alive(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        await _pass(parts, 5 * LEASE_S, "w1")
        assert await rig.state(held.job_id) == "DISPATCHED"
        assert (await parts.result(held, "w1")).message == "accepted"


@pytest.mark.requirement("BUS-5", "D30")
async def test_without_a_heartbeat_the_job_is_lost_with_its_lease(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        _beat(rig, "w1", 1)  # before it was seen: it may have been sent before the job was
        await _pass(parts, LEASE_S + 1, None)
        assert await rig.state(held.job_id) == "TIMEOUT"


@pytest.mark.requirement("D30")
async def test_a_heartbeat_of_an_idle_worker_keeps_nothing_alive(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        await _pass(parts, LEASE_S + 1, "w1", active_jobs=0)
        assert await rig.state(held.job_id) == "TIMEOUT"


@pytest.mark.requirement("D30")
async def test_heartbeats_of_another_worker_keep_nothing_alive(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held, anyones = await parts.dispatched(worker_id="w1"), await parts.dispatched()
        await _pass(parts, LEASE_S + 1, "w2")
        assert [await rig.state(one.job_id) for one in (held, anyones)] == ["TIMEOUT", "TIMEOUT"]


async def test_heartbeats_of_the_worker_that_started_a_job_renew_its_lease(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched()
        await parts.progress(held, "w1")
        await _pass(parts, 3 * LEASE_S, "w1")
        assert await rig.state(held.job_id) == "RUNNING"


@pytest.mark.requirement("D30")
async def test_jobs_that_run_account_for_what_a_worker_says_it_has(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        lost = await parts.dispatched(worker_id="w1")
        running = [await _run(parts) for _ in range(2)]
        await _pass(parts, LEASE_S + 1, "w1", active_jobs=2)
        assert await rig.state(lost.job_id) == "TIMEOUT"
        assert [await rig.state(one.job_id) for one in running] == ["RUNNING", "RUNNING"]


@pytest.mark.on_both
@pytest.mark.requirement("D30", "BUS-7")
@pytest.mark.parametrize("first", ["lost", "running"])
async def test_a_job_that_may_run_is_not_taken_for_lost_because_another_is(rig_of: Opens, first: str):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        jobs = [
            await parts.dispatched(job_id=name, worker_id="w1")
            for name in sorted(("lost", "running"), key=first.__ne__)
        ]
        # Which of the two the worker has, nobody can tell: the lost one must not take the place of the other.
        await _pass(parts, 3 * LEASE_S, "w1", active_jobs=1)
        assert [await rig.state(one.job_id) for one in jobs] == ["DISPATCHED", "DISPATCHED"]
        (running,) = (one for one in jobs if one.job_id == "running")
        assert (await parts.result(running, "w1")).message == "accepted"
        await _pass(parts, LEASE_S + 2, "w1", active_jobs=0)
        assert await parts.jobs() == {"lost": "TIMEOUT", "running": "SUCCEEDED"}


@pytest.mark.requirement("D30")
async def test_a_job_that_an_idle_worker_denied_is_not_kept_alive_by_later_ones(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        lost = await parts.dispatched(worker_id="w1")
        await _pass(parts, 3, "w1", active_jobs=0)
        later = await parts.dispatched(worker_id="w1")
        await _pass(parts, LEASE_S, "w1", active_jobs=1)
        assert [await rig.state(one.job_id) for one in (lost, later)] == ["TIMEOUT", "DISPATCHED"]


@pytest.mark.requirement("D30")
async def test_a_job_with_the_id_of_one_that_was_denied_and_removed_is_kept_alive(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        lost = await parts.dispatched(worker_id="w1", job_id="a")
        await _pass(parts, 3, "w1", active_jobs=0)
        await parts.result(lost, "w1")
        await rig.advance(2 * 86_400)
        while (await rig.ledger.retain(RetentionOptions(ended_s=86_400))).more:
            pass
        assert (await parts.dispatched(worker_id="w1", job_id="a")).wire_id == lost.wire_id
        await _pass(parts, 2 * LEASE_S, "w1", active_jobs=1)
        assert await rig.state("a") == "DISPATCHED"


@pytest.mark.requirement("D30")
async def test_heartbeat_between_two_jobs_does_not_deny_a_lease(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        for _ in range(3):
            await _pass(parts, 1, "w1", active_jobs=0)
            await _pass(parts, LEASE_S - 3, "w1", active_jobs=1)
        assert await rig.state(held.job_id) == "DISPATCHED"


@pytest.mark.on_both
@pytest.mark.requirement("D29", "D30")
async def test_lease_of_an_unconfirmed_start_is_not_renewed_by_heartbeats_for_other_jobs(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        await parts.start(held, "w1")  # the answer is lost, or the process ends and another comes with its name
        await _pass(parts, LEASE_S + 1, "w1", active_jobs=4)
        assert await rig.state(held.job_id) == "TIMEOUT"


@pytest.mark.on_both
@pytest.mark.requirement("D29", "D30")
async def test_a_hung_handler_is_bounded_by_its_topic(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"lease_s": LEASE_S, "running_s": 20.0}}) as rig:
        parts = parts_of(rig)
        held = await _run(parts)
        await _pass(parts, 20, "w1")
        assert await rig.state(held.job_id) == "RUNNING"
        await _pass(parts, 2 * LEASE_S, "w1")
        assert await rig.state(held.job_id) == "TIMEOUT"


@pytest.mark.requirement("D29", "BUS-5")
async def test_a_hung_handler_is_bounded_by_the_jobs_deadline(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await _run(parts, budget={"deadline_ms": 15_000})
        await _pass(parts, 16, "w1")
        last = await parts.last(held.job_id)
        assert (last.target, last.cause) == ("TIMEOUT", "deadline passed")


async def test_another_process_renews_leases_from_the_next_heartbeat(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        await _pass(parts, 2 * LEASE_S, "w1")
        other = parts_of(rig, name="process-2")
        await _pass(other, 2 * LEASE_S, "w1")
        assert await rig.state(held.job_id) == "DISPATCHED"


async def test_the_worker_of_a_job_with_a_cancel_request_gets_one_cancel(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await _run(parts)
        await parts.cancel(held.job_id, CancelMode.SOFT)
        await _pass(parts, 3, "w1")
        assert [stop.job_id for stop in parts.stops] == [held.wire_id]


async def test_leases_with_enough_time_left_are_not_renewed(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        await _run(parts)
        renewed: list[int] = []
        for _ in range(9):
            renewed.append((await parts.renewals.run_once()).renewed)
            await parts.pass_time(1)
            _beat(rig, "w1", 1)
        assert sum(renewed) == 2


async def test_passes_come_often_enough_for_the_shortest_lease(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"lease_s": 3}}) as rig:
        renewals = parts_of(rig).renewals
        assert renewals.pause_s(await renewals.run_once()) == 0.5
    async with rig_of() as rig:
        renewals = parts_of(rig).renewals
        assert renewals.pause_s(await renewals.run_once()) == 5.0


@pytest.mark.requirement("BUS-10", "D30")
async def test_an_outage_of_the_bus_has_nothing_done_again(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        rig.bus.down = True
        await _pass(parts, 3 * LEASE_S, None)
        rig.bus.down = False
        await _pass(parts, RECONNECT_GRACE_S - 1, None)
        assert await rig.state(held.job_id) == "DISPATCHED"
        _beat(rig, "w1", 1)
        await _pass(parts, 2, "w1")
        assert (await parts.result(held, "w1")).message == "accepted"


@pytest.mark.requirement("D30")
async def test_a_worker_without_a_heartbeat_after_an_outage_is_lost(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        rig.bus.down = True
        await _pass(parts, LEASE_S, None)
        rig.bus.down = False
        await _pass(parts, RECONNECT_GRACE_S + LEASE_S + 2, None)
        assert await rig.state(held.job_id) == "TIMEOUT"


@pytest.mark.requirement("D30")
async def test_a_process_that_never_finds_the_bus_again_keeps_nothing_for_ever(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"lease_s": 60.0, "running_s": 7_200.0}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        rig.bus.down = True
        for _ in range(int(AMNESTY_S_MAX / 20) + 5):
            await parts.renewals.run_once()
            await parts.pass_time(20)
        assert await rig.state(held.job_id) == "TIMEOUT"
