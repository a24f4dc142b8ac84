"""Samples and counts of the events of one lifecycle, which service level objectives are measured from."""

from datetime import timedelta

import pytest

from tests.ledgers.conformance.rig import ADMIN, Rig, actor
from trellis.engine.errors import OptionInvalid, UnknownLifecycle
from trellis.engine.jobs import CancelMode, Claimed
from trellis.ledgers.refusals import SAMPLES_MAX
from trellis.lifecycles import Role, Trigger

ORCHESTRATOR = actor(Role.ORCHESTRATOR)


async def run_at_work(rig: Rig) -> Claimed:
    run = await rig.submit_one(lifecycle="run", type="agent-run")
    await rig.move(run, "queued", by=ORCHESTRATOR)
    return await rig.claim_one(types=("agent-run",), lifecycle="run")


@pytest.mark.requirement("OBS-3")
async def test_the_newest_events_of_a_lifecycle_are_sampled_with_the_time_of_their_submit(rig: Rig):
    first = await run_at_work(rig)
    began = await rig.ledger.now()
    await rig.advance(10.0)
    await rig.pull(first, "step", by=ORCHESTRATOR, data=b'{"step":1}')
    await rig.advance(10.0)
    await rig.pull(first, "step", by=ORCHESTRATOR, data=b'{"step":2}')
    await rig.pull(first, Trigger.FAIL, by=ORCHESTRATOR, data=b"{}", cause="it broke")
    second = await rig.submit_one(lifecycle="run", type="agent-run")
    await rig.cancel(second, CancelMode.HARD, by=ORCHESTRATOR, cause="nobody needs it")
    types = ("run.step.completed", "run.failed", "run.completed")

    async def sample(since_s: float = 0.0, limit: int = 10) -> list[tuple[str, bytes | str | None]]:
        since = began + timedelta(seconds=since_s)
        found = await rig.ledger.sample_events("run", types, since=since, limit=limit)
        return [(one.type, one.cause or one.data) for one in found]

    steps = [("run.step.completed", b'{"step":2}'), ("run.step.completed", b'{"step":1}')]
    ends = [("run.failed", "nobody needs it"), ("run.failed", "it broke")]
    assert await sample() == [*steps, *ends]
    assert await sample(limit=1) == [steps[0], ends[0]], "at most so many of each type, the newest"
    assert await sample(10.0) == [*steps, *ends], "the moment itself belongs to the window"
    assert await sample(10.001) == [steps[0], *ends]
    step, _, cancelled, _ = await rig.ledger.sample_events("run", types, since=began, limit=10)
    assert (step.ts - step.submitted_at, step.source, step.role) == (
        timedelta(seconds=20),
        "running",
        Role.ORCHESTRATOR,
    )
    assert (cancelled.ts - cancelled.submitted_at, cancelled.source) == (timedelta(0), "requested")


@pytest.mark.requirement("OBS-3")
async def test_events_of_a_type_that_lifecycles_share_are_counted_and_sampled_for_one_of_them(rig: Rig):
    since = await rig.ledger.now()
    job = await rig.submit_one(lifecycle="queue-job")
    await rig.cancel(job, by=ADMIN)
    await rig.pull(await rig.running(), Trigger.FAIL)
    for lifecycle, many in (("queue-job", 1), ("leased-job", 1), ("run", 0), (None, 2)):
        assert await rig.ledger.count_events(["job_failed"], since=since, lifecycle=lifecycle) == {"job_failed": many}
    (found,) = await rig.ledger.sample_events("queue-job", ["job_failed"], since=since, limit=10)
    assert (found.source, found.role) == ("PENDING", Role.CONTROL_PLANE)
    assert await rig.ledger.count_events(["run.failed"], since=since, lifecycle="run") == {"run.failed": 0}


async def test_a_sample_without_bound_or_of_frequent_events_is_refused(rig: Rig):
    since = await rig.ledger.now()
    for lifecycle, limit in (("leased-job", 1), ("bus-job", 1), ("rnu", 1), ("run", 0), ("run", SAMPLES_MAX + 1)):
        with pytest.raises(OptionInvalid):
            await rig.ledger.sample_events(lifecycle, ["run.failed"], since=since, limit=limit)
    with pytest.raises(UnknownLifecycle):
        await rig.ledger.count_events(["run.failed"], since=since, lifecycle="rnu")
