"""Workflows under three schedulers and three processes that follow the feed: each step in its turn, nothing stuck, everything undone."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Parts, parts_of
from tests.bus.rig import PASSES_MAX, TOPIC, Rig, ScriptedWorker, decision, quiet
from trellis.bus.messages import JobOrder, Status
from trellis.bus.outcomes.job_tree import RETRYABLE_ENDS, EffectiveJob, JobTree, WorkflowKey, requeue_as_new_job
from trellis.bus.requests import COMPENSATES, JobRequest
from trellis.bus.safety.policy import DecisionKind, SafetyDecision
from trellis.bus.scheduling.scheduler import Scheduler
from trellis.engine.errors import InvalidTransition
from trellis.engine.jobs import Actor, RequestId
from trellis.engine.records import Job, JobFilter, JobPlace
from trellis.lifecycles import Role

OPERATOR = Actor(role=Role.GATEWAY, name="olha")
TOPICS = {TOPIC: {"max_attempts": 2, "backoff_s": 0}}
ACTS = {"step": 12, "end": 20, "again": 8, "cancel": 1, "take_over": 4, "wait": 4}
REST = 12
"""Rounds without a change, over more time than anybody rests."""


@dataclass(kw_only=True)
class Fleet:
    """Three of each, which work at the same time between two acts."""

    rig: Rig
    rng: random.Random
    worker: ScriptedWorker
    schedulers: list[Scheduler]
    parts: list[Parts]
    keys: list[WorkflowKey]
    numbers: int = 0
    orders: list[JobOrder] = field(default_factory=list[JobOrder])

    # --- what happens ----------------------------------------------------------------------------------------------

    async def act(self) -> None:
        await getattr(self, self.rng.choices(list(ACTS), list(ACTS.values()))[0])()

    async def step(self) -> None:
        self.numbers += 1
        parent, workflow_id, tenant, _ = self.rng.choice(self.keys)
        fields: dict[str, Any] = {"tenant_id": tenant} if tenant else {}
        if self.rng.random() < 0.7:
            fields["compensation"] = {"topic": TOPIC}
        place = {"parent_job_id": parent, "workflow_id": workflow_id, "step_index": self.rng.randrange(5)}
        await self.rig.submit(job_id=f"s{self.numbers}", **place, **fields)

    async def end(self) -> None:
        for _ in range(min(3, len(self.orders))):
            order = self.orders.pop(self.rng.randrange(len(self.orders)))
            statuses = [Status.SUCCEEDED, Status.FAILED, Status.FAILED_RETRYABLE]
            await self.parts[0].result(order.request.job_id, "w1", self.rng.choices(statuses, [8, 1, 2])[0])

    async def again(self) -> None:
        found = [job for job in await self.jobs() if job.state in RETRYABLE_ENDS]
        if found:
            job = await self.rig.job(self.rng.choice(found).job_id)
            self.numbers += 1
            with suppress(InvalidTransition):  # it may be done again already
                await requeue_as_new_job(self.rig.ledger, OPERATOR, job, self.rig.topics, RequestId(f"r{self.numbers}"))

    async def cancel(self) -> None:
        found = [job for job in await self.jobs() if job.place is not JobPlace.ENDED]
        if found:
            await self.parts[0].cancel(self.rng.choice(found).job_id)

    async def take_over(self) -> None:
        await self.rng.choice(self.parts).reconciler.release()

    async def wait(self) -> None:
        await self.rig.advance(self.rng.choice([1, 6, 20]))

    def judge(self, request: JobRequest) -> SafetyDecision:
        return decision(request, DecisionKind.DENY if self.rng.random() < 0.06 else DecisionKind.ALLOW)

    async def work(self) -> None:
        """All of them at once, each a pass; nobody was handed out whose turn it was not."""
        before = len(self.worker.orders)
        work: list[Any] = [one.run_once() for one in self.schedulers] + [
            one.reconciler.run_once() for one in self.parts
        ]
        self.rng.shuffle(work)
        await asyncio.gather(*work)
        await quiet()
        new = self.worker.orders[before:]
        self.orders += new
        for order in new:
            await self.was_in_turn(order.request.env["job_id"])
        await self.are_undone_one_by_one()

    async def rest(self) -> None:
        """Everything ends well from now on, until nothing changes any more."""
        self.rig.kernel.answer = decision
        unchanged, last = 0, list[tuple[str, int]]()
        for _ in range(PASSES_MAX):
            if unchanged == REST:
                return
            await self.work()
            while self.orders:
                await self.parts[0].result(self.orders.pop().request.job_id, "w1")
            await self.rig.advance(7)
            now = [(job.job_id, job.version) for job in await self.jobs()]
            unchanged, last = unchanged + 1 if now == last else 0, now
        raise AssertionError("they do not come to rest")

    # --- what holds ------------------------------------------------------------------------------------------------

    async def was_in_turn(self, job_id: str) -> None:
        request = JobRequest.read((await self.rig.job(job_id)).payload or b"")
        if COMPENSATES in request.labels:
            return
        tree = JobTree(ledger=self.rig.ledger, topics=self.rig.topics)
        steps = await self.steps(await tree.key_of(request))
        before = {one.job.job_id: one.job.state for one in steps if one.request.step_index < request.step_index}
        assert set(before.values()) <= {"SUCCEEDED"}, f"{job_id} went before {before}"

    async def are_undone_one_by_one(self) -> None:
        """But for those that an operator runs again."""
        tree = JobTree(ledger=self.rig.ledger, topics=self.rig.topics)
        under_way: dict[WorkflowKey, str] = {}
        for job in await self.jobs():
            step = None if job.compensates is None else await tree.request(job.compensates)
            if step is not None and job.place is not JobPlace.ENDED and ".q-" not in job.job_id.rpartition(".c")[2]:
                other = under_way.setdefault(await tree.key_of(step), job.job_id)
                assert other == job.job_id, f"{job.job_id} and {other} are under way"

    async def is_undone(self, key: WorkflowKey) -> None:
        steps, tree = await self.steps(key), JobTree(ledger=self.rig.ledger, topics=self.rig.topics)
        if any(one.failed for one in steps):
            for one in steps:
                if one.job.state == "SUCCEEDED" and one.request.compensation is not None:
                    assert await tree.compensation(one.job.job_id) is not None, f"{one.job.job_id} is not undone"

    async def steps(self, key: WorkflowKey) -> list[EffectiveJob]:
        """As somebody sees them who remembers nothing."""
        tree = JobTree(ledger=self.rig.ledger, topics=self.rig.topics)
        found: list[EffectiveJob] = []
        for job in await tree.children(key[0]):
            request = await tree.request(job.job_id)
            if request is not None and not request.is_retry and await tree.key_of(request) == key:
                found.append(await tree.effective_step(job, request, step_of=key[0]))
        return found

    async def jobs(self) -> list[Job]:
        return list((await self.rig.ledger.jobs(JobFilter(lifecycle="bus-job"), limit=500)).jobs)


async def fleet_on(rig: Rig, seed: int, steps_max: int) -> Fleet:
    schedulers = [rig.scheduler, *[await rig.another(f"scheduler-{n}") for n in (2, 3)]]
    parts = [parts_of(rig, name=f"process-{n}", ledger=await rig.bench.open_another()) for n in range(3)]
    for tree in [*(one._tree for one in schedulers), *(one.reconciler._tree for one in parts)]:
        tree.remembered.steps_max = steps_max
    keys: list[WorkflowKey] = [
        (parent, workflow, tenant, "gateway") for parent in "pq" for workflow in ("a", "b") for tenant in ("", "t")
    ][:5]
    worker = await rig.worker("w1", TOPIC)
    fleet = Fleet(rig=rig, rng=random.Random(seed), worker=worker, schedulers=schedulers, parts=parts, keys=keys)
    rig.kernel.answer = fleet.judge
    return fleet


@pytest.mark.requirement("BUS-5", "BUS-8", "D36", "D39")
@pytest.mark.parametrize(
    "seed, steps_max, acts",
    [
        (1, 8, 80),
        *(pytest.param(seed, (8, 100_000)[seed % 2], 250, marks=pytest.mark.prove) for seed in range(2, 22)),
    ],
)
async def test_steps_go_in_turn_and_are_undone_under_three_of_each(rig_of: Opens, seed: int, steps_max: int, acts: int):
    async with rig_of(topics=TOPICS) as rig:
        fleet = await fleet_on(rig, seed, steps_max)
        for _ in range(acts):
            await fleet.act()
            if fleet.rng.random() < 0.6:
                await fleet.work()
        await fleet.rest()
        assert [job.job_id for job in await fleet.jobs() if job.place is not JobPlace.ENDED] == []
        for key in fleet.keys:
            await fleet.is_undone(key)
