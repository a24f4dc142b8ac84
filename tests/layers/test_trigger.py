"""A trigger: what it makes, what it refuses, and what is told of a run from its beginning to its end."""

import asyncio

import pytest

from tests.layers.rig import WAITING_MAX, Rig
from trellis.agents.errors import SlugInvalid
from trellis.documents import ids
from trellis.documents.errors import AgentNotRunnable, RunNotFound, TooManyWaiting
from trellis.engine.errors import IdempotencyMismatch
from trellis.engine.jobs import CancelMode, JobId, RequestId, Submitted
from trellis.runs.orchestration import TriggerKind

BURST = 200


@pytest.mark.requirement("PIPE-1", "PIPE-2", "RUN-1", "D12", "D13", "D17", "D18")
async def test_a_run_is_requested_then_queued_then_running_then_completed(rig: Rig):
    hold = rig.hold("execute-agent")
    run_id = await rig.trigger(await rig.agent("gardener"))
    assert ids.RUN_ID.fullmatch(run_id)
    status = await rig.status(run_id)
    assert (status["status"], status["trigger"], status["version"]) == ("requested", "manual", 1)
    assert (status["current_step"], status["steps_completed"], status["finished_at"]) == (None, 0, None)
    standing = await rig.layer.run_state(run_id)
    assert (standing.status, standing.steps_completed, standing.position) == ("queued", 0, 0)
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    standing = await rig.layer.run_state(run_id)
    assert (standing.status, standing.steps_completed, standing.position) == ("running", 1, None)
    status = await rig.status(run_id)
    assert (status["status"], status["current_step"], status["steps_completed"]) == ("running", "execute-agent", 1)
    hold.release()
    status = await rig.shows(run_id, "completed")
    assert (status["steps_completed"], status["error"]) == (4, None)
    assert set(rig.steps.done.values()) == {1}
    events = [event.type for event in await rig.ledger.events(run_id)]
    assert events == [
        "run.requested",
        "run.queued",
        "run.started",
        *["run.step.completed"] * 4,
        "run.completed",
    ]


@pytest.mark.requirement("RUN-9")
@pytest.mark.parametrize("kind", list(TriggerKind))
async def test_run_records_its_trigger(rig: Rig, kind: TriggerKind):
    run_id = await rig.trigger(await rig.agent("gardener"), kind=kind)
    assert (await rig.status(run_id))["trigger"] == kind.value
    await rig.start()
    assert (await rig.shows(run_id, "completed"))["trigger"] == kind.value


@pytest.mark.requirement("PIPE-11")
async def test_the_same_key_is_the_same_run_also_when_it_has_ended(rig: Rig):
    slug = await rig.agent("gardener")
    first, *others = await asyncio.gather(*(rig.trigger(slug, key="press-1") for _ in range(4)))
    assert set(others) == {first}
    await rig.start()
    await rig.shows(first, "completed")
    again = await rig.layer.trigger(slug, {"topic": "bows"}, kind=TriggerKind.MANUAL, key="press-1")
    assert again == Submitted(job_id=first, created=False)
    assert await rig.trigger(slug, key="press-2") != first
    assert len(await rig.runs(slug)) == 2
    assert (await rig.status(first))["status"] == "completed"


@pytest.mark.requirement("DJ-5", "D27")
async def test_a_key_that_meant_something_else_is_refused(rig: Rig):
    slug = await rig.agent("gardener")
    await rig.trigger(slug, key="press-1")
    with pytest.raises(IdempotencyMismatch, match="press-1"):
        await rig.layer.trigger(slug, {"topic": "strings"}, kind=TriggerKind.MANUAL, key="press-1")
    assert len(await rig.runs(slug)) == 1


@pytest.mark.requirement("D24")
@pytest.mark.parametrize(
    "fields, reason",
    [
        (None, r"no agents/gardener/_agent\.md"),
        ({"tools": "[dig]"}, "field tools"),
        ({"status": "draft"}, "it is draft; .*trellis agents activate gardener"),
        ({"status": "paused"}, "it is paused; .*trellis agents activate gardener"),
        ({"status": "error"}, "it is error; .*trellis agents activate gardener"),
        ({"status": "archived"}, r"it is archived; only an active agent runs\."),
        ({"triggers": "{manual: false}"}, "triggers.manual: false"),
    ],
    ids=["missing", "malformed", "draft", "paused", "error", "archived", "not by hand"],
)
async def test_an_agent_that_may_not_run_is_refused_and_nothing_is_stored(
    rig: Rig, fields: dict[str, str] | None, reason: str
):
    if fields is not None:
        await rig.agent("gardener", **fields)
    with pytest.raises(AgentNotRunnable, match=reason):
        await rig.trigger("gardener")
    await rig.start()
    assert await rig.runs("gardener") == []
    assert (await rig.objects.list("agents/gardener/runs/")).items == ()


async def test_trigger_with_an_invalid_agent_slug_is_refused(rig: Rig):
    with pytest.raises(SlugInvalid):
        await rig.trigger("../gardener")


@pytest.mark.requirement("D25")
async def test_a_queue_that_is_full_refuses_before_anything_is_stored(rig: Rig):
    slug, other = await rig.agent("gardener"), await rig.agent("archivist")
    for _ in range(WAITING_MAX):
        await rig.trigger(slug)
    with pytest.raises(TooManyWaiting, match=f"{WAITING_MAX} is the limit"):
        await rig.trigger(slug)
    assert len(await rig.runs(slug)) == WAITING_MAX
    await rig.trigger(other)


@pytest.mark.requirement("D25")
async def test_a_queue_that_many_press_into_at_once_takes_as_many_as_may_wait(rig: Rig):
    slug = await rig.agent("gardener")
    answers = await asyncio.gather(*(rig.trigger(slug) for _ in range(BURST)), return_exceptions=True)
    assert sum(isinstance(answer, TooManyWaiting) for answer in answers) == BURST - WAITING_MAX
    assert len(await rig.runs(slug)) == WAITING_MAX


async def test_a_run_that_is_none_is_said_so(rig: Rig):
    for ask in (
        rig.layer.run_state(JobId("run_2026-02-14_080000_zzzzzz")),
        rig.layer.cancel(JobId("x"), mode=CancelMode.HARD, request_id=RequestId("r"), cause=None),
    ):
        with pytest.raises(RunNotFound):
            await ask


async def test_the_layer_says_whether_it_answers_and_who_it_is(rig: Rig):
    health = await rig.layer.health()
    assert health.healthy
    assert health.vendor
