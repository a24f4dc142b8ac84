"""Who is on the bus: what heartbeats and handshakes say, what was handed out since, and who is lost."""

import json
from collections import Counter

import pytest

from tests.bus.conftest import Opens
from tests.bus.rig import TOPIC, Rig, quiet
from trellis.bus.messages import Handshake, Heartbeat, direct_subject
from trellis.bus.registry import SILENCE_S_MAX, Workers
from trellis.testing import FakeClock

POOL = {"topics": {"job.>": {"pools": ["p"]}}, "pools": {"p": {}}}


def workers() -> tuple[Workers, FakeClock]:
    clock = FakeClock()
    return Workers(clock=clock), clock


def beat(worker_id: str = "w1", **said: object) -> Heartbeat:
    return Heartbeat(worker_id=worker_id, **said)  # pyright: ignore[reportArgumentType]


# --- alive and lost ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3")
def test_a_worker_is_lost_after_three_heartbeats_that_did_not_come():
    known, clock = workers()
    known.heard(beat(active_jobs=2), clock.monotonic())
    seen = known.alive("w1")
    assert seen is not None
    assert (seen.heard_at, seen.active_jobs) == (clock.monotonic(), 2)
    clock.advance(14.9)
    assert known.alive("w1")
    clock.advance(0.2)
    assert known.alive("w1") is None
    assert list(known.live()) == []


@pytest.mark.requirement("BUS-3")
@pytest.mark.parametrize("interval_s, learnt_s", [(10.0, 10.0), (2.0, 2.0), (0.1, 2.0)])
def test_how_often_a_worker_speaks_is_learnt(interval_s: float, learnt_s: float):
    known, clock = workers()
    for _ in range(20):
        known.heard(beat(), clock.monotonic())
        clock.advance(interval_s)
    seen = known.alive("w1")
    assert seen is not None
    assert seen.interval_s == pytest.approx(learnt_s, rel=0.1)


def test_a_worker_that_speaks_ever_more_seldom_is_waited_for_three_minutes_at_most():
    known, clock = workers()
    interval_s = 5.0
    for _ in range(20):
        known.heard(beat(), clock.monotonic())
        seen = known.alive("w1")
        assert seen is not None
        interval_s = seen.interval_s
        clock.advance(2.9 * interval_s)
    assert interval_s == 60.0


def test_a_lost_worker_that_comes_back_begins_anew():
    known, clock = workers()
    known.heard(beat(max_parallel_jobs=2), clock.monotonic())
    known.assigned("w1", "a@1")
    clock.advance(60)
    known.heard(beat(max_parallel_jobs=2), clock.monotonic())
    seen = known.alive("w1")
    assert seen is not None
    assert seen.load == 0


def test_a_worker_that_speaks_another_version_is_not_used():
    known, clock = workers()
    known.met(Handshake(component_id="w1", supported_versions=(2,)), clock.monotonic())
    known.heard(beat(), clock.monotonic())
    assert list(known.live()) == []


def test_other_components_are_no_workers():
    known, clock = workers()
    known.met(Handshake(component_id="gateway-1", role="gateway"), clock.monotonic())
    assert known.alive("gateway-1") is None


@pytest.mark.parametrize("worker_id", ["", "a b", "a.>", "*", ".a", "x" * 201])
def test_a_worker_whose_name_is_no_subject_is_not_taken_in(worker_id: str):
    known, clock = workers()
    known.heard(beat(worker_id), clock.monotonic())
    assert list(known.live()) == []


def test_numbers_that_are_none_do_no_harm():
    known, clock = workers()
    known.heard(beat(cpu_load=float("nan"), max_parallel_jobs=-3), clock.monotonic())
    seen = known.alive("w1")
    assert seen is not None
    assert (seen.cpu, seen.capacity) == (0.0, 1)


# --- load -------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3")
def test_what_was_handed_out_since_the_last_heartbeat_counts():
    known, clock = workers()
    known.heard(beat(max_parallel_jobs=4, active_jobs=1), clock.monotonic())
    known.assigned("w1", "a@1")
    known.assigned("w1", "b@1")
    assert [seen.load for seen in known.live()] == [3]
    known.settled("a@1")
    assert [seen.load for seen in known.live()] == [2]


@pytest.mark.requirement("BUS-3")
def test_what_ended_since_the_last_heartbeat_makes_room_before_the_next():
    known, clock = workers()
    known.assigned("w1", "a@1")
    known.heard(beat(max_parallel_jobs=1), clock.monotonic())
    known.assigned("w1", "a@1")
    known.heard(beat(max_parallel_jobs=1, active_jobs=1), clock.monotonic())
    assert [seen.free for seen in known.live()] == [0]
    known.settled("a@1", "w1")
    known.settled("a@1", "w1")
    assert [seen.free for seen in known.live()] == [1], "heard twice it counts once"


def test_a_job_that_another_process_handed_out_makes_room_too_when_it_ends():
    known, clock = workers()
    known.heard(beat(max_parallel_jobs=2, active_jobs=2), clock.monotonic())
    known.settled("theirs@1", "w1")
    assert [seen.free for seen in known.live()] == [1]


def test_an_order_that_crosses_a_heartbeat_still_counts():
    known, clock = workers()
    known.heard(beat(max_parallel_jobs=2), clock.monotonic())
    known.assigned("w1", "a@1")
    known.heard(beat(max_parallel_jobs=2, active_jobs=0), clock.monotonic())
    assert [seen.load for seen in known.live()] == [1]
    known.heard(beat(max_parallel_jobs=2, active_jobs=0), clock.monotonic())
    assert [seen.load for seen in known.live()] == [0], "by the second one the worker would have counted it"


# --- subjects ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D53")
def test_a_silence_grows_to_its_bound_and_ends_when_a_worker_appears():
    known, clock = workers()
    waits: list[float] = []
    for _ in range(8):
        known.unanswered(TOPIC)
        began = clock.monotonic()
        while known.silent(TOPIC):
            clock.advance(0.5)
        waits.append(clock.monotonic() - began)
    assert waits == [1, 2, 4, 8, 16, SILENCE_S_MAX, SILENCE_S_MAX, SILENCE_S_MAX]
    known.unanswered(TOPIC)
    known.met(Handshake(component_id="w1", ready_topics=("job.other",)), clock.monotonic())
    assert known.silent(TOPIC), "it serves another topic"
    known.met(Handshake(component_id="w1", ready_topics=(TOPIC,)), clock.monotonic())
    assert not known.silent(TOPIC)


def test_a_worker_whose_own_subject_is_silent_is_not_there_until_it_speaks_again():
    known, clock = workers()
    known.heard(beat(), clock.monotonic())
    known.unanswered(direct_subject("w1"), "w1")
    assert known.alive("w1") is None
    known.heard(beat(), clock.monotonic())
    assert known.alive("w1") is not None
    assert known.silent(direct_subject("w1")), "a heartbeat does not say that it listens there"
    known.met(Handshake(component_id="w1"), clock.monotonic())
    assert not known.silent(direct_subject("w1"))


def test_what_went_to_a_subject_counts_until_it_ends_or_its_time_is_over():
    known, clock = workers()
    known.sent(TOPIC, "a@1", 30.0)
    known.sent(TOPIC, "b@1", 30.0)
    known.settled("a@1")
    assert known.outstanding(TOPIC) == 1
    clock.advance(31)
    assert known.outstanding(TOPIC) == 0


# --- on the bus -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3")
async def test_a_hundred_jobs_of_one_pass_are_spread_evenly(rig_of: Opens):
    async with rig_of(**POOL) as rig:
        names = ("w1", "w2", "w3", "w4")
        pool = [await rig.worker(name, beats={"pool": "p", "max_parallel_jobs": 50}) for name in names]
        await rig.submit_many(100)
        await rig.scheduler.run_once()
        await quiet()
        shares = Counter({worker.worker_id: len(worker.orders) for worker in pool})
        assert shares.total() == 100
        assert max(shares.values()) - min(shares.values()) <= 1


@pytest.mark.requirement("BUS-3")
async def test_full_workers_get_nothing_more_and_the_next_as_soon_as_one_has_ended(rig_of: Opens):
    async with rig_of(**POOL) as rig:
        pool = [await rig.worker(name, beats={"pool": "p", "max_parallel_jobs": 2}) for name in ("w1", "w2")]
        jobs = await rig.submit_many(9)
        await rig.run()
        assert [len(worker.orders) for worker in pool] == [2, 2]
        waiting = [job_id for job_id in jobs if await rig.path(job_id) == ["job_accepted", "job_scheduled"]]
        assert len(waiting) == 5, "those that wait have no event for it"
        await pool[0].finish(pool[0].orders[0])
        await rig.run()
        assert [len(worker.orders) for worker in pool] == [3, 2]


@pytest.mark.requirement("BUS-3")
async def test_a_lost_worker_gets_nothing(rig_of: Opens):
    async with rig_of(**POOL) as rig:
        lost = await rig.worker("lost", beats={"pool": "p", "max_parallel_jobs": 9})
        await rig.advance(8)
        there = await rig.worker("there", beats={"pool": "p", "max_parallel_jobs": 9, "cpu_load": 50})
        await rig.advance(8)
        await rig.submit_many(4)
        await rig.run()
        assert (len(lost.orders), len(there.orders)) == (0, 4)


async def test_people_see_the_workers_of_the_bus(rig: Rig):
    rig.workers.ledger = rig.ledger
    worker = await rig.worker("w1")
    await worker.shake(TOPIC)
    for _ in range(3):
        await worker.beat(pool="p", max_parallel_jobs=4, active_jobs=1, capabilities=("gpu",))
    await rig.workers.stop()
    (seen,) = await rig.ledger.workers()
    assert seen.name == "w1"
    told = json.loads(seen.info or b"{}")
    assert (told["types"], told["concurrency"], told["pool"], told["bus"]) == ([TOPIC], 4, "p", True)


async def test_the_scheduler_is_called_when_a_worker_appears_and_when_one_has_room_again(rig: Rig):
    calls: list[int] = []
    rig.workers.appeared = lambda: calls.append(1)
    worker = await rig.worker("w1")
    await worker.beat(max_parallel_jobs=1, active_jobs=1)
    assert len(calls) == 1
    await worker.beat(max_parallel_jobs=1, active_jobs=0)
    assert len(calls) == 2
    await worker.beat(max_parallel_jobs=1, active_jobs=0)
    assert len(calls) == 2, "nothing is new"
