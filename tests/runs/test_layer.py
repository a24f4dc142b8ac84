"""Triggering, watching and cancelling runs through the orchestration layer's port."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Stand
from trellis.agents.catalog import Catalog
from trellis.agents.definition import AgentStatus
from trellis.agents.garden import plant
from trellis.engine.jobs import CancelMode, JobId, RequestId
from trellis.engine.records import JobFilter
from trellis.runs import ids
from trellis.runs.errors import AgentNotRunnable, RunNotFound, TooManyWaiting
from trellis.runs.layer import BuiltinLayer, TriggerKind
from trellis.runs.publishing import Publisher
from trellis.storage.objects import ObjectStore
from trellis.storage.open import open_objects

VIOLIN, GUARDIAN = "archivist-violin", "architect-guardian"


@pytest.fixture
async def objects(tmp_path: Path) -> AsyncGenerator[ObjectStore]:
    opened = await open_objects(f"file://{tmp_path / 'objects'}")
    await plant(opened)
    yield opened
    await opened.close()


@pytest.fixture
def layer(stand: Stand, objects: ObjectStore) -> BuiltinLayer:
    numbers = itertools.count(1)
    return BuiltinLayer(
        ledger=stand.ledger,
        gateway=GATEWAY,
        orchestrator=ORCHESTRATOR,
        catalog=Catalog(objects),
        publisher=Publisher(objects),
        random_text=lambda: f"{0xFFFFFF - next(numbers):06x}",
        waiting_max=5,
    )


async def triggered(layer: BuiltinLayer, slug: str = VIOLIN, key: str | None = None) -> JobId:
    return await layer.trigger(slug, {"topic": "bows"}, kind=TriggerKind.MANUAL, key=key)


@pytest.mark.requirement("PIPE-1", "PIPE-2", "D12", "D13", "D17")
async def test_a_trigger_writes_the_run_down_publishes_it_and_queues_it(
    stand: Stand, layer: BuiltinLayer, objects: ObjectStore
):
    run_id = await triggered(layer)
    assert ids.RUN_ID.fullmatch(run_id)
    found = await objects.get(ids.status_key(VIOLIN, run_id))
    assert found is not None
    status = json.loads(found.body)
    assert (status["status"], status["trigger"], status["version"]) == ("requested", "manual", 1)
    assert await stand.state(run_id) == "queued"
    standing = await layer.standing(run_id)
    assert (standing.status, standing.steps_completed, standing.position) == ("queued", 0, 0)


@pytest.mark.requirement("PIPE-3")
async def test_runs_that_wait_know_their_place(stand: Stand, layer: BuiltinLayer):
    waiting = list[JobId]()
    for _ in range(3):
        waiting.append(await triggered(layer))
        stand.clock.advance(0.001)
    first, second, third = waiting
    other = await triggered(layer, GUARDIAN)
    assert [(await layer.standing(run)).position for run in (first, second, third, other)] == [0, 1, 2, 0]
    assert await stand.claim() is not None
    assert [(await layer.standing(run)).position for run in (second, third)] == [0, 1]
    assert (await layer.standing(first)).position is None


@pytest.mark.requirement("D25")
async def test_a_queue_that_is_full_refuses_before_anything_is_stored(stand: Stand, layer: BuiltinLayer):
    for _ in range(5):
        await triggered(layer)
    with pytest.raises(TooManyWaiting, match="5 is the limit"):
        await triggered(layer)
    assert len((await stand.ledger.jobs(JobFilter(lifecycle="run"), limit=20)).jobs) == 5
    await triggered(layer, GUARDIAN)


@pytest.mark.requirement("D24")
async def test_only_an_active_agent_runs(stand: Stand, layer: BuiltinLayer, objects: ObjectStore):
    await Catalog(objects).change_status(VIOLIN, AgentStatus.PAUSED, at=await stand.ledger.now())
    with pytest.raises(AgentNotRunnable, match="paused"):
        await triggered(layer)
    with pytest.raises(AgentNotRunnable, match=r"no agents/nobody/_agent\.md"):
        await triggered(layer, "nobody")
    assert (await stand.ledger.jobs(JobFilter(lifecycle="run"), limit=20)).jobs == ()


@pytest.mark.requirement("PIPE-11")
async def test_the_same_trigger_asked_again_is_the_same_run(stand: Stand, layer: BuiltinLayer):
    runs = await asyncio.gather(*(triggered(layer, key="press-1") for _ in range(4)))
    assert len(set(runs)) == 1
    assert len((await stand.ledger.jobs(JobFilter(lifecycle="run"), limit=20)).jobs) == 1


@pytest.mark.requirement("D19")
async def test_a_run_is_cancelled_wherever_it_is(stand: Stand, layer: BuiltinLayer):
    waiting, other = await triggered(layer), await triggered(layer, GUARDIAN)
    assert await layer.cancel(waiting, mode=CancelMode.SOFT, request_id=RequestId("a"), cause="no") == "failed"
    assert await layer.cancel(waiting, mode=CancelMode.HARD, request_id=RequestId("b"), cause="no") == "failed"
    assert await stand.claim() is not None
    assert await layer.cancel(other, mode=CancelMode.SOFT, request_id=RequestId("c"), cause="no") == "running"
    assert await layer.cancel(other, mode=CancelMode.HARD, request_id=RequestId("d"), cause="now") == "failed"


async def test_a_run_that_is_none_is_said_so(layer: BuiltinLayer):
    for ask in (
        layer.standing(JobId("run_2026-02-14_080000_zzzzzz")),
        layer.cancel(JobId("x"), mode=CancelMode.HARD, request_id=RequestId("r"), cause=None),
    ):
        with pytest.raises(RunNotFound):
            await ask


async def test_the_layer_says_whether_it_answers(layer: BuiltinLayer):
    assert await layer.health() == type(await layer.health())(healthy=True, vendor="builtin")
