"""A Temporal server that is away, dies in the middle of runs, or comes back without its data: no run is lost or fails."""

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from tests.layers.temporal import TemporalRig, on_temporal
from tests.servers.temporal import TemporalServer
from trellis.documents import ids
from trellis.engine.jobs import JobId
from trellis.runs.waits import read_waits


@pytest.fixture
def server() -> Iterator[TemporalServer]:
    """A server of the test's own, which is not running yet."""
    made = TemporalServer()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
async def rig(server: TemporalServer, tmp_path: Path) -> AsyncGenerator[TemporalRig]:
    async with on_temporal(tmp_path, server) as made:
        yield made


@pytest.mark.requirement("PIPE-2", "D32")
async def test_a_run_waits_in_the_ledger_while_the_server_is_away(rig: TemporalRig):
    health = await rig.layer.health()
    assert (health.healthy, health.vendor) == (False, "temporal")
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.settle()
    assert await rig.stands(run_id) == ["queued"]
    assert (await rig.status(run_id))["error"] is None


@pytest.mark.prove
@pytest.mark.requirement("PIPE-2", "PIPE-12", "D32")
async def test_runs_go_on_when_a_server_that_was_away_or_killed_is_back(
    rig: TemporalRig, server: TemporalServer, capfd: pytest.CaptureFixture[str]
):
    hold = rig.hold("execute-agent")
    first, second = [await rig.trigger(await rig.agent(slug)) for slug in ("gardener", "archivist")]
    await rig.start()
    await rig.settle()
    server.start()
    await rig.until(lambda: set(hold.begun) == {first, second})
    server.kill()
    hold.release(first)  # this step ends while the server is away, the other one after it is back
    await rig.until(lambda: _waits(rig, first))
    server.start()
    hold.release()
    for run_id in (first, second):
        status = await rig.shows(run_id, "completed")
        assert status["steps_completed"] == 4
        assert [event.type for event in await rig.ledger.events(run_id)].count("run.step.completed") == 4
    assert rig.steps.done == dict.fromkeys(ids.STEPS, 2)
    assert "temporalio" not in "".join(capfd.readouterr()), (
        "the log of a process is written by Trellis, as text or JSON"
    )


@pytest.mark.prove
@pytest.mark.requirement("PIPE-2", "D16")
async def test_runs_go_on_when_the_server_is_back_without_its_data(rig: TemporalRig, server: TemporalServer):
    hold = rig.hold("execute-agent")
    run_id = await rig.trigger(await rig.agent("gardener"))
    server.start()
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    server.kill()
    server.erase()
    server.start()
    hold.release()
    await rig.shows(run_id, "completed")
    assert [event.type for event in await rig.ledger.events(run_id)].count("run.step.completed") == 4


async def _waits(rig: TemporalRig, run_id: JobId) -> bool:
    """Whether the run's journal says that it waits for the server."""
    waits = read_waits(await rig.ledger.read_journal(run_id))
    return any("the Temporal server does not answer" in wait.reason for wait in waits)
