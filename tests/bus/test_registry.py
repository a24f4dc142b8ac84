"""Who is on the bus: what heartbeats and handshakes say, what was handed out since, and who is lost."""

import json
from collections import Counter

import pytest

from tests.bus.conftest import Opens
from tests.bus.rig import TOPIC, Rig, quiet
from trellis.bus.messages import Handshake, WorkerHeartbeat, direct_subject
from trellis.bus.scheduling import registry
from trellis.bus.scheduling.registry import (
    FIRST_LEDGER_WRITES_MAX,
    HALF_OPEN_S,
    LASTING_S_MAX,
    LOST_KEPT_S,
    PATTERNS_MAX,
    SILENCE_S_MAX,
    WorkerRegistry,
)
from trellis.bus.topics import subject_matches
from trellis.testing import FakeClock

POOL = {"topics": {"job.>": {"pools": ["p"]}}, "pools": {"p": {}}}


def workers() -> tuple[WorkerRegistry, FakeClock]:
    clock = FakeClock()
    return WorkerRegistry(clock=clock), clock


def beat(worker_id: str = "w1", **said: object) -> WorkerHeartbeat:
    return WorkerHeartbeat(worker_id=worker_id, **said)  # pyright: ignore[reportArgumentType]


# --- alive and lost ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3")
def test_a_worker_is_lost_after_three_heartbeats_that_did_not_come():
    known, clock = workers()
    known.record_heartbeat(beat(active_jobs=2), clock.monotonic())
    seen = known.alive("w1")
    assert seen is not None
    assert (seen.heard_at, seen.active_jobs) == (clock.monotonic(), 2)
    clock.advance(14.9)
    assert known.alive("w1")
    clock.advance(0.2)
    assert known.alive("w1") is None
    assert list(known.live()) == []


@pytest.mark.requirement("BUS-3", "BUS-5")
def test_a_topic_is_deserted_while_its_announced_workers_are_silent_and_may_still_seem_to_listen():
    known, clock = workers()
    known.record_handshake(Handshake(component_id="w1", role="worker", ready_topics=("job.*",)), clock.monotonic())
    known.record_heartbeat(beat(), clock.monotonic())
    assert not known.deserted("job.code")
    clock.advance(15.1)
    assert known.deserted("job.code")
    assert not known.deserted("other.code")
    known.record_heartbeat(beat("w2", pool="job.code"), clock.monotonic())
    assert not known.deserted("job.code"), "another one is there"
    clock.advance(15.1)
    assert known.deserted("job.code")
    clock.advance(HALF_OPEN_S)
    assert not known.deserted("job.code"), "no server believes in their connections any more"


@pytest.mark.requirement("BUS-3", "BUS-5")
def test_a_topic_is_not_deserted_if_the_connection_is_closed_or_workers_that_announce_nothing_answer():
    known, clock = workers()
    for topic in ("job.closed", "job.answered"):
        shake = Handshake(component_id=topic.replace(".", "-"), role="worker", ready_topics=(topic,))
        known.record_handshake(shake, clock.monotonic())
    known.mark_silent(direct_subject("job-closed"), "job-closed")
    known.sent("job.answered", "j1@1", 30.0)
    clock.advance(15.1)
    assert (known.deserted("job.closed"), known.deserted("job.answered")) == (False, True)
    known.settled("j1@1", "job-answered")
    assert known.deserted("job.answered"), "its own worker reported late"
    known.sent("job.answered", "j2@1", 30.0)
    known.settled("j2@1", "somebody")
    assert not known.deserted("job.answered")
    known.record_heartbeat(beat("somebody"), clock.monotonic())
    clock.advance(15.1)
    assert known.deserted("job.answered"), "it only had not announced itself yet"


@pytest.mark.requirement("BUS-3")
@pytest.mark.parametrize("interval_s, learnt_s", [(10.0, 10.0), (2.0, 2.0), (0.1, 2.0)])
def test_registry_learns_the_heartbeat_interval_of_a_worker(interval_s: float, learnt_s: float):
    known, clock = workers()
    for _ in range(20):
        known.record_heartbeat(beat(), clock.monotonic())
        clock.advance(interval_s)
    seen = known.alive("w1")
    assert seen is not None
    assert seen.interval_s == pytest.approx(learnt_s, rel=0.1)


def test_a_worker_with_ever_rarer_heartbeats_is_kept_for_three_minutes_at_most():
    known, clock = workers()
    interval_s = 5.0
    for _ in range(20):
        known.record_heartbeat(beat(), clock.monotonic())
        seen = known.alive("w1")
        assert seen is not None
        interval_s = seen.interval_s
        clock.advance(2.9 * interval_s)
    assert interval_s == 60.0


def test_lost_worker_that_returns_is_registered_as_new():
    known, clock = workers()
    known.record_heartbeat(beat(max_parallel_jobs=2), clock.monotonic())
    known.assigned("w1", "a@1")
    clock.advance(60)
    known.record_heartbeat(beat(max_parallel_jobs=2), clock.monotonic())
    seen = known.alive("w1")
    assert seen is not None
    assert seen.load == 0


@pytest.mark.requirement("BUS-3")
@pytest.mark.parametrize("away", ["unheard", "not listening"])
def test_a_worker_that_comes_back_still_serves_what_it_named_once(away: str):
    known, clock = workers()
    known.record_handshake(
        Handshake(component_id="w1", ready_topics=("job.a",), supported_versions=(1, 2)), clock.monotonic()
    )
    known.record_heartbeat(beat(), clock.monotonic())
    if away == "unheard":
        clock.advance(60)
    else:
        known.mark_silent(direct_subject("w1"), "w1")
    assert known.alive("w1") is None
    known.record_heartbeat(beat(), clock.monotonic())
    assert [seen.ready_topics for seen in known.live()] == [("job.a",)], "it introduces itself once in its life"
    known.record_handshake(Handshake(component_id="w1", ready_topics=("job.b",)), clock.monotonic())
    assert [seen.ready_topics for seen in known.live()] == [("job.b",)]


def test_workers_that_have_been_lost_for_long_are_forgotten():
    known, clock = workers()
    for number in range(100):
        known.record_heartbeat(beat(f"pod-{number}"), clock.monotonic())
    clock.advance(LOST_KEPT_S / 2)
    known.record_heartbeat(beat("late"), clock.monotonic())
    clock.advance(LOST_KEPT_S / 2 + 200)
    assert list(known.live()) == []
    assert list(known._workers) == ["late"]


@pytest.mark.requirement("BUS-3", "D68")
@pytest.mark.parametrize("said, others", [((3, 2, 2), (2, 3)), ((2, 1), ()), ((), ())])
def test_worker_with_other_protocol_versions_is_registered_with_them(said: tuple[int, ...], others: tuple[int, ...]):
    known, clock = workers()
    known.record_handshake(Handshake(component_id="w1", supported_versions=said), clock.monotonic())
    known.record_heartbeat(beat(), clock.monotonic())
    clock.advance(LOST_KEPT_S / 2)
    known.record_heartbeat(beat(), clock.monotonic())  # it was lost meanwhile, and does not say it again
    assert [seen.other_versions for seen in known.live()] == [others]


def test_other_components_are_no_workers():
    known, clock = workers()
    known.record_handshake(Handshake(component_id="gateway-1", role="gateway"), clock.monotonic())
    assert known.alive("gateway-1") is None


@pytest.mark.parametrize("worker_id", ["", "a b", "a.>", "*", ".a", "x" * 201])
def test_a_worker_whose_name_is_no_subject_is_not_taken_in(worker_id: str):
    known, clock = workers()
    known.record_heartbeat(beat(worker_id), clock.monotonic())
    assert list(known.live()) == []


def test_invalid_heartbeat_numbers_are_replaced_by_defaults():
    known, clock = workers()
    known.record_heartbeat(beat(cpu_load=float("nan"), max_parallel_jobs=-3), clock.monotonic())
    seen = known.alive("w1")
    assert seen is not None
    assert (seen.cpu, seen.capacity) == (0.0, 1)


# --- load -------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3")
def test_jobs_dispatched_since_the_last_heartbeat_count_as_load():
    known, clock = workers()
    known.record_heartbeat(beat(max_parallel_jobs=4, active_jobs=1), clock.monotonic())
    known.assigned("w1", "a@1")
    known.assigned("w1", "b@1")
    assert [seen.load for seen in known.live()] == [3]
    known.settled("a@1")
    assert [seen.load for seen in known.live()] == [2]


@pytest.mark.requirement("BUS-3")
def test_jobs_ended_since_the_last_heartbeat_free_capacity_before_the_next():
    known, clock = workers()
    known.assigned("w1", "a@1")
    known.record_heartbeat(beat(max_parallel_jobs=1), clock.monotonic())
    known.assigned("w1", "a@1")
    known.record_heartbeat(beat(max_parallel_jobs=1, active_jobs=1), clock.monotonic())
    assert [seen.free for seen in known.live()] == [0]
    known.settled("a@1", "w1")
    known.settled("a@1", "w1")
    assert [seen.free for seen in known.live()] == [1], "heard twice it counts once"


def test_a_job_dispatched_by_another_process_frees_capacity_when_it_ends():
    known, clock = workers()
    known.record_heartbeat(beat(max_parallel_jobs=2, active_jobs=2), clock.monotonic())
    known.settled("theirs@1", "w1")
    assert [seen.free for seen in known.live()] == [1]


def test_an_order_that_crosses_a_heartbeat_still_counts():
    known, clock = workers()
    known.record_heartbeat(beat(max_parallel_jobs=2), clock.monotonic())
    known.assigned("w1", "a@1")
    known.record_heartbeat(beat(max_parallel_jobs=2, active_jobs=0), clock.monotonic())
    assert [seen.load for seen in known.live()] == [1]
    known.record_heartbeat(beat(max_parallel_jobs=2, active_jobs=0), clock.monotonic())
    assert [seen.load for seen in known.live()] == [0], "by the second one the worker would have counted it"


# --- subjects ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D53")
def test_a_silence_grows_to_its_bound_and_ends_when_a_worker_appears():
    known, clock = workers()
    waits: list[float] = []
    for _ in range(8):
        known.mark_silent(TOPIC)
        began = clock.monotonic()
        while known.silent(TOPIC):
            clock.advance(0.5)
        waits.append(clock.monotonic() - began)
    assert waits == [1, 2, 4, 8, 16, SILENCE_S_MAX, SILENCE_S_MAX, SILENCE_S_MAX]
    known.mark_silent(TOPIC)
    known.record_handshake(Handshake(component_id="w1", ready_topics=("job.other",)), clock.monotonic())
    assert known.silent(TOPIC), "it serves another topic"
    known.record_handshake(Handshake(component_id="w1", ready_topics=(TOPIC,)), clock.monotonic())
    assert not known.silent(TOPIC)


def tries(*, days: float, appears_every_s: float | None = None) -> int:
    """How often a subject is tried at which nobody ever listens, while workers that serve others come and go."""
    known, clock = workers()
    count, end, appears_at = 0, clock.monotonic() + days * 86_400, clock.monotonic()
    while clock.monotonic() < end:
        if not known.silent(TOPIC):
            count += 1
            known.mark_silent(TOPIC)
        if appears_every_s is not None and clock.monotonic() >= appears_at:
            appears_at += appears_every_s
            known.record_heartbeat(beat(f"w{clock.monotonic():.0f}"), clock.monotonic())
        clock.advance(5)
    return count


@pytest.mark.requirement("D53")
def test_a_silence_that_lasts_is_tried_every_five_minutes():
    assert 280 <= tries(days=1) <= 330


def test_workers_that_come_and_go_do_not_have_a_silence_tried_each_time():
    assert tries(days=1, appears_every_s=10) <= 660


@pytest.mark.requirement("D53")
def test_a_worker_that_appears_after_others_did_in_vain_is_found_and_then_trusted_again():
    known, clock = workers()
    known.mark_silent(TOPIC)
    for number in range(20):
        known.record_heartbeat(beat(f"w{number}"), clock.monotonic())
        while known.silent(TOPIC):
            clock.advance(1)
        known.mark_silent(TOPIC)
    known.record_heartbeat(beat("listens"), clock.monotonic())
    clock.advance(LASTING_S_MAX)
    assert not known.silent(TOPIC)
    known.mark_listening(TOPIC)
    known.mark_silent(TOPIC)
    known.record_heartbeat(beat("again"), clock.monotonic())
    assert not known.silent(TOPIC)


def test_worker_with_a_silent_subject_is_absent_until_its_next_heartbeat():
    known, clock = workers()
    known.record_heartbeat(beat(), clock.monotonic())
    known.mark_silent(direct_subject("w1"), "w1")
    assert known.alive("w1") is None
    known.record_heartbeat(beat(), clock.monotonic())
    assert known.alive("w1") is not None
    assert known.silent(direct_subject("w1")), "a heartbeat does not say that it listens there"
    known.record_handshake(Handshake(component_id="w1"), clock.monotonic())
    assert not known.silent(direct_subject("w1"))


def test_job_sent_to_a_subject_counts_until_it_ends_or_times_out():
    known, clock = workers()
    known.sent(TOPIC, "a@1", 30.0)
    known.sent(TOPIC, "b@1", 30.0)
    known.settled("a@1")
    assert known.outstanding(TOPIC) == 1
    clock.advance(31)
    assert known.outstanding(TOPIC) == 0


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """A process that keeps no more than so many of anything."""
    for name in ("WORKERS_MAX", "SUBJECTS_MAX"):
        monkeypatch.setattr(registry, name, 20)
    return 20


def test_worker_limit_keeps_registered_workers(few: int, caplog: pytest.LogCaptureFixture):
    known, clock = workers()
    for number in range(1_000):
        known.record_heartbeat(beat(f"w{number}"), clock.monotonic())
        known.record_handshake(Handshake(component_id=f"h{number}"), clock.monotonic())
    assert len(known._workers) == few
    assert known.alive("w0") is not None
    assert caplog.text.count("too_many_workers") == 1, "a flood of strangers does not fill the log"
    clock.advance(60)
    known.record_heartbeat(beat("late"), clock.monotonic())
    assert [seen.worker_id for seen in known.live()] == ["late"], "the lost make room"


def test_a_flood_of_unknown_workers_is_not_compared_with_every_known_worker(few: int):
    known, clock = workers()
    for number in range(few):
        known.record_heartbeat(beat(f"w{number}"), clock.monotonic())
    known._make_room(clock.monotonic())
    clock.advance(0.5)
    before = known._looked_at
    for number in range(100):
        known.record_heartbeat(beat(f"stranger{number}"), clock.monotonic())
    assert known._looked_at == before


def test_more_subjects_than_can_be_kept_are_forgotten_with_what_went_there(few: int):
    known, clock = workers()
    for number in range(1_000):
        subject = f"job.t{number}"
        known.sent(subject, f"j{number}@1", 30.0)
        known.mark_listening(subject)
        if number % 3:
            known.settled(f"j{number}@1")
        else:
            known.mark_silent(subject)
        clock.advance(0.1)
    assert len(known._subjects) <= few
    assert len(known._given_to) <= few


@pytest.mark.parametrize(
    "said",
    [
        beat(labels={str(number): "x" * 100 for number in range(1_000)}),
        beat(capabilities=tuple(str(number) * 100 for number in range(1_000))),
        Handshake(component_id="w1", ready_topics=tuple(f"job.{'x' * 100}{number}" for number in range(1_000))),
    ],
)
def test_a_worker_whose_heartbeat_is_over_the_bounds_is_not_registered(said: WorkerHeartbeat | Handshake):
    known, clock = workers()
    told = known.record_heartbeat if isinstance(said, WorkerHeartbeat) else known.record_handshake
    told(said, clock.monotonic())  # pyright: ignore[reportArgumentType]
    assert list(known.live()) == []


def test_a_worker_that_names_thousands_of_topics_is_not_compared_with_each():
    known, clock = workers()
    for number in range(500):
        known.mark_silent(f"job.t{number}")
    before = subject_matches.cache_info()
    topics = tuple(f"job.t{number}" for number in range(3_000))
    known.record_handshake(Handshake(component_id="w1", ready_topics=topics), clock.monotonic())
    after = subject_matches.cache_info()
    assert after.hits + after.misses == before.hits + before.misses
    assert not known.silent("job.t7")


def test_a_worker_that_names_too_many_patterns_is_not_taken_in(caplog: pytest.LogCaptureFixture):
    known, clock = workers()
    patterns = tuple(f"job.{number}.*" for number in range(PATTERNS_MAX + 1))
    known.record_handshake(Handshake(component_id="w1", ready_topics=patterns), clock.monotonic())
    assert list(known.live()) == []
    assert "worker_tells_too_much" in caplog.text
    known.record_handshake(Handshake(component_id="w1", ready_topics=patterns[1:]), clock.monotonic())
    assert [seen.worker_id for seen in known.live()] == ["w1"]


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


async def test_names_that_are_made_up_do_not_fill_the_ledger(rig: Rig):
    rig.workers.ledger = rig.ledger
    now = rig.clock.monotonic()
    for number in range(3 * FIRST_LEDGER_WRITES_MAX):
        rig.workers.record_heartbeat(beat(f"made-up-{number}"), now)
        await rig.workers._write_worker(f"made-up-{number}", now)
    assert len(await rig.ledger.workers()) == FIRST_LEDGER_WRITES_MAX


async def test_the_scheduler_is_called_when_a_worker_appears_and_when_one_has_capacity_again(rig: Rig):
    calls: list[int] = []
    rig.workers.appeared = lambda: calls.append(1)
    worker = await rig.worker("w1")
    await worker.beat(max_parallel_jobs=1, active_jobs=1)
    assert len(calls) == 1
    await worker.beat(max_parallel_jobs=1, active_jobs=0)
    assert len(calls) == 2
    await worker.beat(max_parallel_jobs=1, active_jobs=0)
    assert len(calls) == 2, "nothing is new"
    for _ in range(3):
        await worker.beat(max_parallel_jobs=1, active_jobs=1)
    assert len(calls) == 2, "it is full, and stays so"
