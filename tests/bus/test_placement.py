"""Where a job goes: pools, labels, what it requires, and who has room."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.rig import Rig, quiet
from trellis.bus.messages import BusAlert, ErrorCode, WorkerHeartbeat, direct_subject
from trellis.bus.requests import JobRequest
from trellis.bus.scheduling.placement import (
    DOUBT_S_MAX,
    NoFittingWorker,
    PlacedJob,
    Placement,
    StaysReady,
    WaitReason,
    place_job,
)
from trellis.bus.scheduling.registry import LiveWorker, WorkerRegistry
from trellis.bus.topics import Topics
from trellis.testing import FakeClock

TOPIC = "job.code"
POOLED = Topics.model_validate(
    {
        "topics": {TOPIC: {"pools": ["code", "spare"]}},
        "pools": {"code": {"requires": ["Git"]}, "spare": {}, "other": {}},
    }
)
PLAIN = Topics()


@dataclass
class Subjects:
    quiet: set[str] = field(default_factory=set[str])
    under_way: int = 0
    used: set[str] = field(default_factory=set[str])
    left: set[str] = field(default_factory=set[str])

    def silent(self, subject: str, /) -> bool:
        return subject in self.quiet

    def proven(self, subject: str, /) -> bool:
        return subject in self.used

    def outstanding(self, subject: str, /) -> int:
        return self.under_way

    def deserted(self, topic: str, /) -> bool:
        return topic in self.left


def seen(worker_id: str = "w1", *, topics: tuple[str, ...] = (), load: int = 0, **said: Any) -> LiveWorker:
    clock = FakeClock()
    workers = WorkerRegistry(clock=clock)
    workers.record_heartbeat(
        WorkerHeartbeat(worker_id=worker_id, **{"pool": "code", "max_parallel_jobs": 4, **said}), clock.monotonic()
    )
    for number in range(load):
        workers.assigned(worker_id, f"a@{number}")
    (found,) = workers.live()
    return replace(found, ready_topics=topics)


def put(
    *workers: LiveWorker, topics: Topics = POOLED, subjects: Subjects | None = None, age_s: float = 0.0, **said: Any
) -> Placement:
    request = JobRequest.checked({"job_id": "j1", "topic": TOPIC, **said})
    return place_job(request, topics, workers, subjects or Subjects(), subject_max=10, age_s=age_s)


def to(worker_id: str) -> PlacedJob:
    return PlacedJob(subject=direct_subject(worker_id), worker_id=worker_id)


@pytest.mark.requirement("BUS-3", "D68")
def test_a_worker_of_another_version_stops_only_the_topics_that_it_names_or_that_nobody_else_serves():
    later = replace(seen("later", pool=""), other_versions=(2,))
    naming, wild = replace(later, ready_topics=(TOPIC,)), replace(later, ready_topics=(">",))
    used = Subjects(used={TOPIC})
    for unsaid in (later, wild):
        assert isinstance(put(unsaid, topics=PLAIN), NoFittingWorker), "nobody is known who would understand the order"
        late = put(unsaid, topics=PLAIN, age_s=DOUBT_S_MAX)
        assert isinstance(late, PlacedJob)
        assert (late.subject, late.doubt and late.doubt.worker_id) == (TOPIC, "later")
        placed = put(unsaid, topics=PLAIN, subjects=used)
        assert isinstance(placed, PlacedJob)
        assert (placed.subject, placed.doubt and placed.doubt.worker_id) == (TOPIC, "later")
        by_pool = put(unsaid, seen("able", pool=TOPIC), topics=PLAIN)
        assert isinstance(by_pool, PlacedJob)
    for named in (naming, replace(later, pool=TOPIC)):
        assert isinstance(put(named, topics=PLAIN, subjects=used), NoFittingWorker)
    assert put(replace(later, pool="other"), topics=PLAIN) == PlacedJob(subject=TOPIC)


# --- pools ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3")
def test_a_pooled_topic_goes_to_a_worker_of_its_pools_only():
    assert put(seen("a", pool="other"), seen("b", pool="spare")) == to("b")
    assert put(seen("a", pool="other")) == StaysReady(why=WaitReason.NOBODY, all_do=True)
    assert put() == StaysReady(why=WaitReason.NOBODY, all_do=True)


@pytest.mark.requirement("BUS-3")
def test_a_worker_that_says_its_topics_gets_no_others():
    assert put(seen("a", topics=("job.other",)), seen("b")) == to("b")
    assert put(seen("a", topics=(TOPIC,))) == to("a")


@pytest.mark.requirement("BUS-3", "D53")
def test_a_topic_without_a_pool_goes_to_a_worker_that_named_it_and_else_to_its_own_subject():
    assert put(seen("a", topics=(TOPIC,)), topics=PLAIN) == to("a")
    assert put(seen("a"), topics=PLAIN) == PlacedJob(subject=TOPIC)
    assert put(topics=PLAIN) == PlacedJob(subject=TOPIC)


@pytest.mark.requirement("D53")
def test_a_topics_own_subject_is_left_alone_while_it_is_silent_or_has_enough():
    assert put(topics=PLAIN, subjects=Subjects({TOPIC})) == StaysReady(why=WaitReason.SILENT, all_do=True)
    assert put(topics=PLAIN, subjects=Subjects(under_way=10)) == StaysReady(why=WaitReason.FULL, all_do=True)


def test_a_topics_own_subject_is_left_alone_while_its_announced_workers_are_silent():
    waits = StaysReady(why=WaitReason.DESERTED, all_do=True)
    assert put(topics=PLAIN, subjects=Subjects(left={TOPIC})) == waits
    assert put(seen(topics=(TOPIC,)), topics=PLAIN, subjects=Subjects(left={TOPIC})) == to("w1")


def test_a_worker_without_an_ear_of_its_own_is_reached_through_the_topic():
    assert put(seen("a"), subjects=Subjects({direct_subject("a")})) == PlacedJob(subject=TOPIC)


# --- labels and what is required --------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3")
def test_a_worker_with_a_subscription_is_chosen_before_one_without():
    deaf = Subjects(quiet={direct_subject("idle"), TOPIC})
    assert put(seen("idle"), seen("busy", load=3), subjects=deaf) == to("busy")
    assert put(seen("idle"), seen("busy", load=3), subjects=deaf, labels={"preferred_worker": "idle"}) == to("busy")


@pytest.mark.requirement("BUS-3")
def test_job_restricted_to_some_workers_is_not_sent_to_the_topic_subject():
    deaf = Subjects(quiet={direct_subject("w1")})
    able, other = seen(labels={"kind": "gpu"}), seen("w2", labels={"kind": "cpu"})
    wish = {"worker.kind": "gpu"}
    assert put(able, subjects=deaf, labels=wish) == PlacedJob(subject=TOPIC), "everybody who serves it may have it"
    placed = put(able, other, subjects=deaf, labels=wish)
    assert isinstance(placed, NoFittingWorker)
    assert "own subjects" in placed.reason
    busy = seen("w3", labels={"kind": "gpu"}, load=4)
    assert put(able, busy, other, subjects=deaf, labels=wish) == StaysReady(why=WaitReason.FULL, all_do=False)


@pytest.mark.requirement("BUS-3")
def test_a_label_about_the_worker_must_be_the_workers():
    here, there = seen("a", labels={"zone": "here"}), seen("b", labels={"zone": "there"})
    assert put(here, there, labels={"worker.zone": "there"}) == to("b")
    answer = put(here, there, labels={"worker.zone": "nowhere"})
    assert isinstance(answer, NoFittingWorker)
    assert "worker.zone=nowhere" in answer.reason


def test_other_labels_are_the_submitters_own():
    assert put(seen("a", labels={"zone": "here"}), labels={"zone": "there", "team": "x"}) == to("a")


def test_placement_preferences_are_not_required():
    busy, idle = seen("a", load=3), seen("b", pool="spare")
    assert put(busy, idle) == to("b")
    assert put(busy, idle, labels={"preferred_worker": "a"}) == to("a")
    assert put(busy, idle, labels={"preferred_pool": "code"}) == to("a")
    assert put(busy, idle, labels={"preferred_worker": "nobody", "preferred_pool": "none"}) == to("b")


@pytest.mark.requirement("BUS-3")
def test_requirement_of_a_job_is_met_by_its_pool_or_by_the_worker():
    plain, gpu = seen("a"), seen("b", pool="spare", capabilities=("GPU",))
    assert put(plain, gpu, meta={"requires": ["git"]}) == to("a")
    assert put(plain, gpu, meta={"requires": ["gpu"]}) == to("b")
    answer = put(plain, gpu, meta={"requires": ["gpu", "git"]})
    assert isinstance(answer, NoFittingWorker)
    assert "gpu" in answer.reason


def test_job_without_a_capable_worker_is_not_sent_to_the_topic_subject():
    assert isinstance(put(topics=PLAIN, meta={"requires": ["gpu"]}), NoFittingWorker)
    assert isinstance(put(topics=PLAIN, labels={"worker.zone": "here"}), NoFittingWorker)


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3")
def test_the_least_loaded_for_its_size_comes_first():
    assert put(seen("small", max_parallel_jobs=2, load=1), seen("large", max_parallel_jobs=10, load=2)) == to("large")
    assert put(seen("hot", cpu_load=90.0), seen("cool", cpu_load=5.0)) == to("cool")


@pytest.mark.requirement("BUS-3")
def test_full_and_overloaded_workers_get_nothing():
    full, hot = seen("full", load=4), seen("hot", cpu_load=97.0)
    assert put(full, hot) == StaysReady(why=WaitReason.FULL, all_do=True)
    assert put(full, seen("free")) == to("free")


def test_a_worker_without_a_declared_capacity_gets_one_job_at_a_time():
    assert put(seen("a", max_parallel_jobs=0)) == to("a")
    assert put(seen("a", max_parallel_jobs=0, load=1)) == StaysReady(why=WaitReason.FULL, all_do=True)


def test_a_job_for_certain_workers_that_are_full_says_nothing_about_the_others():
    full, free = seen("a", load=4, labels={"zone": "here"}), seen("b", labels={"zone": "there"})
    assert put(full, free, labels={"worker.zone": "here"}) == StaysReady(why=WaitReason.FULL, all_do=False)


def test_equal_workers_are_chosen_by_turns_over_the_jobs():
    workers = [seen(name) for name in ("a", "b", "c")]
    chosen: set[str] = set()
    for number in range(30):
        request = JobRequest.checked({"job_id": f"j{number}", "topic": TOPIC})
        placed = place_job(request, POOLED, workers, Subjects(), subject_max=10)
        assert isinstance(placed, PlacedJob)
        chosen.add(placed.worker_id)
    assert chosen == {"a", "b", "c"}


# --- on the bus -------------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-3")
async def test_job_without_a_matching_worker_is_deferred_until_one_matches(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"pools": ["code"]}}, pools={"code": {}}) as rig:
        plain = await rig.worker("plain", beats={"pool": "code", "max_parallel_jobs": 4})
        job_id = await rig.submit(TOPIC, meta={"requires": ["gpu"]})
        for _ in range(5):
            await rig.run()
        told = await rig.said(job_id, "job_deferred")
        assert told["hold"] == "placement"
        assert "gpu" in told["reason"]
        assert (await rig.path(job_id)).count("job_deferred") == 1
        gpu = await rig.worker("gpu", beats={"pool": "code", "max_parallel_jobs": 4, "capabilities": ("gpu",)})
        await rig.advance(6)
        await rig.run()
        assert (plain.jobs, gpu.jobs) == ([], [job_id])
        told = await rig.said(job_id, "job_dispatched")
        assert (told["worker_id"], told["subject"]) == ("gpu", direct_subject("gpu"))


@pytest.mark.requirement("BUS-3")
async def test_jobs_of_a_pool_without_live_workers_stay_ready_without_an_event(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"pools": ["code"]}}, pools={"code": {}}) as rig:
        job_id = await rig.submit(TOPIC)
        for _ in range(5):
            await rig.run()
        assert await rig.path(job_id) == ["job_accepted", "job_scheduled"]
        worker = await rig.worker("w1", beats={"pool": "code"})
        await rig.run()
        assert worker.jobs == [job_id]


async def test_a_worker_that_named_the_topic_is_preferred_to_the_topic_itself(rig: Rig):
    silent = await rig.worker("silent", TOPIC, direct=False)
    named = await rig.worker("named")
    await named.shake(TOPIC)
    await named.beat(max_parallel_jobs=9)
    jobs = await rig.submit_many(5, TOPIC)
    await rig.run()
    await quiet()
    assert sorted(named.jobs) == sorted(jobs)
    assert silent.jobs == []


@pytest.mark.requirement("BUS-3")
async def test_worker_that_sends_heartbeats_but_receives_nothing_does_not_block_dispatch(rig_of: Opens):
    async with rig_of(topics={"job.>": {"pools": ["p"]}}, pools={"p": {}}) as rig:
        deaf = await rig.worker("deaf", direct=False, beats={"pool": "p", "max_parallel_jobs": 100})
        good = await rig.worker("good", beats={"pool": "p", "max_parallel_jobs": 10})
        for second in range(1, 31):
            jobs = await rig.submit_many(2)
            await rig.advance(1)
            await deaf.beat(pool="p", max_parallel_jobs=100)
            await good.beat(pool="p", max_parallel_jobs=10)
            await rig.run()
            assert set(jobs) <= set(good.jobs), f"after {second} s"
            for order in good.orders[-2:]:
                await good.finish(order)


@pytest.mark.requirement("BUS-3", "D68")
async def test_handshake_of_another_version_raises_an_alert_and_does_not_stop_a_topic_in_use(rig: Rig):
    silent = await rig.worker("silent", TOPIC, direct=False)
    await rig.submit(TOPIC)
    await rig.run()
    await (await rig.worker("intruder", direct=False)).shake(supported_versions=(2,))
    await rig.submit(TOPIC)
    await rig.run()
    alerts = [body for _, body in rig.bus.published if isinstance(body, BusAlert)]
    assert len(silent.orders) == 2
    assert [(alert.code, alert.details["sender_id"]) for alert in alerts] == [(ErrorCode.VERSION_MISMATCH, "intruder")]
