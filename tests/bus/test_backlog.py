"""How much may wait on the topics: kept to the number, without a count for each request, and never against what was accepted."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.bus.rig import Rig
from trellis.bus.errors import BusConfigInvalid, TopicFull
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.submitter import COUNT_COST_FACTOR, COUNT_FRESH_S, COUNT_FRESH_S_MAX, BacklogLimit
from trellis.bus.topics import Topics, read_topics, subject_matches
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Actor, CancelMode, JobId, NewJob, RequestId
from trellis.lifecycles import Role

GATEWAY = Actor(role=Role.GATEWAY, name="gateway@test")
PLAIN = Topics()


def limited(most: int, **said: Any) -> Topics:
    return Topics.model_validate({"topics": {"job.a": {"waiting_max": most}}, **said})


def job(job_id: str, topic: str = "job.a", *, key: str = "", topics: Topics = PLAIN) -> NewJob:
    meta = {"meta": {"idempotency_key": key}} if key else {}
    request = JobRequest.checked({"job_id": job_id, "topic": topic, **meta})
    return new_bus_job(request, topics, trace_id="t-1")


class Door:
    """Somebody who lets requests in, and what that cost."""

    def __init__(self, rig: Rig, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig, self.topics, self.counts = rig, topics, 0
        self.takes_s = 0.0
        self.room = BacklogLimit(ledger=rig.ledger, clock=rig.clock)
        asked = rig.ledger.queues

        async def queues(*, exact: bool = False) -> Sequence[Any]:
            self.counts += 1
            rig.clock.advance(self.takes_s)
            return await asked()

        monkeypatch.setattr(rig.ledger, "queues", queues)

    async def submit(self, *jobs: NewJob) -> list[str]:
        """The ids of those that were let in."""
        done = await asyncio.gather(*(self._one(one) for one in jobs), return_exceptions=True)
        assert all(answer is None or isinstance(answer, TopicFull) for answer in done)
        return [one.job_id for one, answer in zip(jobs, done, strict=True) if answer is None]

    async def _one(self, one: NewJob) -> None:
        await self.room.admit(one, self.topics)
        await self.rig.ledger.submit(GATEWAY, [one])


@pytest.mark.on_both
@pytest.mark.requirement("BUS-11")
async def test_as_many_wait_as_may_and_what_was_accepted_is_never_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    door = Door(rig, limited(20), monkeypatch)
    many = [job(f"j{n}", key=f"k{n}") for n in range(50)]
    taken = await door.submit(*many)
    assert (len(taken), door.counts) == (20, 1), "those who come at the same time share one count"
    assert await door.submit(*many[:20]) == taken
    assert await door.submit(job("another-id", key="k3")) == ["another-id"], "its key means the job that is there"
    assert await door.submit(job("elsewhere", "job.b")) == ["elsewhere"]
    rig.clock.advance(COUNT_FRESH_S)
    assert await door.submit(job("j51")) == []
    client = Actor(role=Role.SUBMITTER, name="client")
    await rig.ledger.cancel(client, JobId("j0"), CancelMode.HARD, RequestId("x"), grace_s=0, cause=None)
    assert await door.submit(job("j51")) == [], "a count is good for a second"
    rig.clock.advance(COUNT_FRESH_S)
    assert await door.submit(job("j51"), job("j52")) == ["j51"]


async def test_however_many_names_there_are_all_topics_together_have_a_bound(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    door = Door(rig, limited(20, waiting_max=7), monkeypatch)
    assert len(await door.submit(*(job(f"j{n}", f"job.{n}") for n in range(30)))) == 7
    with pytest.raises(TopicFull, match="7 jobs wait on all topics and 7 is the limit"):
        await door.room.admit(job("more"), door.topics)


async def test_jobs_that_a_worker_has_do_not_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    door = Door(rig, limited(1), monkeypatch)
    assert await door.submit(job("a"), job("b")) == ["a"]
    await rig.worker("w-1", "job.a")
    await rig.run()
    assert (await rig.job("a")).state == "DISPATCHED"
    rig.clock.advance(COUNT_FRESH_S)
    assert await door.submit(job("b")) == ["b"]


async def test_backlog_count_is_reused_longer_while_far_below_the_limit(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    door = Door(rig, limited(80), monkeypatch)
    for n in range(10):
        assert await door.submit(job(f"j{n}"))
        rig.clock.advance(COUNT_FRESH_S_MAX / 20)
    assert door.counts == 1
    await door.submit(job("j10"))
    assert door.counts == 2, "an eighth of the room is given away"
    rig.clock.advance(COUNT_FRESH_S_MAX)
    await door.submit(job("j11"))
    assert door.counts == 3


async def test_slow_backlog_count_is_repeated_less_often(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    door = Door(rig, limited(8), monkeypatch)
    door.takes_s = 0.2
    for n in range(3):
        assert await door.submit(job(f"j{n}"))
        rig.clock.advance(COUNT_COST_FACTOR * door.takes_s / 3 - 0.001)
    assert door.counts == 1
    rig.clock.advance(0.01)
    assert await door.submit(job("j3"))
    assert door.counts == 2


async def test_waiters_of_a_failed_backlog_count_do_not_recount_one_by_one(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    door = Door(rig, limited(5), monkeypatch)
    asked, counts, away = rig.ledger.queues, 0, True

    async def queues(*, exact: bool = False) -> Sequence[Any]:
        nonlocal counts
        counts += 1
        if away:
            await asyncio.sleep(0)
            raise LedgerUnavailable(reason="it is away")
        return await asked()

    monkeypatch.setattr(rig.ledger, "queues", queues)
    done = await asyncio.gather(
        *(door.room.admit(job(f"j{n}"), door.topics) for n in range(30)), return_exceptions=True
    )
    assert {type(answer) for answer in done} == {LedgerUnavailable}
    assert counts == 1
    away = False
    assert len(await door.submit(*(job(f"k{n}") for n in range(9)))) == 5
    assert counts == 2


async def test_two_processes_exceed_the_backlog_limit_by_at_most_one_interval(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    one, two = Door(rig, limited(10), monkeypatch), Door(rig, limited(10), monkeypatch)
    steps = 4
    for n in range(60):
        for name, door in (("one", one), ("two", two)):
            await door.submit(job(f"{name}-{n}"))
        rig.clock.advance(COUNT_FRESH_S / steps)
    (waiting,) = (depth.scheduled for depth in await rig.ledger.queues() if depth.type == "job.a")
    assert 10 <= waiting <= 10 + steps


def test_a_limit_that_is_none_is_refused_with_its_place(tmp_path: Any):
    file = tmp_path / "bus.toml"
    file.write_text("waiting_max = 0\n")
    with pytest.raises(BusConfigInvalid, match="waiting_max: Input should be greater than or equal to 1"):
        read_topics(file)
    file.write_text('waiting_max = 500\n[topics."job.>"]\nwaiting_max = 5\n')
    read = read_topics(file)
    assert (read.waiting_max, read.of("job.x").waiting_max, Topics().of("job.x").waiting_max) == (500, 5, 100_000)


@pytest.mark.parametrize(
    "pattern", ["job.>.x", "job..x", "job.", "job code", "job.co*", "job.>x", "jöb.x", ".".join(["a"] * 17)]
)
def test_a_pattern_that_fits_no_topic_is_refused_with_its_place(tmp_path: Any, pattern: str):
    file = tmp_path / "bus.toml"
    file.write_text(f'[topics."{pattern}"]\nidempotent = true\n', encoding="utf-8")
    with pytest.raises(BusConfigInvalid) as refused:
        read_topics(file)
    assert f"topics.{pattern} fits no topic" in str(refused.value)
    for fine in ("job.x", "*", ">", "job.*.x", "job.*.>", "*.a_b-c"):
        file.write_text(f'[topics."{fine}"]\nidempotent = true\n')
        assert fine in read_topics(file).topics


def test_the_settings_of_a_topic_are_looked_for_once():
    topics = Topics.model_validate({"topics": {f"job.t{number}": {"lease_s": 1 + number} for number in range(1_000)}})
    assert topics.of("job.t999").lease_s == 1_000
    before = subject_matches.cache_info()
    assert topics.of("job.t999").lease_s == 1_000
    assert subject_matches.cache_info() == before
    assert topics == Topics.model_validate(topics.model_dump())
