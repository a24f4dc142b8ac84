"""Runs of a stopped agent wait until it is active again; they do not fail, and take no other agent's place."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.runs.conftest import ORCHESTRATOR, Stand
from tests.runs.test_end_to_end import VIOLIN, Garden
from trellis.agents.catalog import Catalog
from trellis.agents.definition import AgentStatus
from trellis.agents.garden import plant
from trellis.engine.jobs import CancelMode, JobId, RequestId
from trellis.runs.agent_status import AgentGate
from trellis.runs.orchestrator import Orchestrator, OrchestratorOptions, RunDriver, RunDriverOptions
from trellis.runs.waits import read_waits
from trellis.storage.memory.repository import open_memory
from trellis.storage.objects.open import open_objects

GUARDIAN = "architect-guardian"


class Yard(Garden):
    """A garden with an orchestrator that has room for one run at a time, and the service that lets runs go on."""

    def services(self) -> tuple[Orchestrator, AgentGate]:
        numbers = itertools.count(1)

        async def published(slug: str, run_id: str, version: int) -> None:
            """Readers see everything at once."""

        driver = RunDriver(
            ledger=self.stand.ledger,
            actor=ORCHESTRATOR,
            clock=self.stand.clock,
            steps=self.work.steps(),
            published=published,
            options=RunDriverOptions(),
        )
        orchestrator = Orchestrator(
            ledger=self.stand.ledger,
            actor=ORCHESTRATOR,
            clock=self.stand.clock,
            driver=driver,
            new_id=lambda: f"claim-{next(numbers)}",
            options=OrchestratorOptions(concurrency=1),
        )
        gate = AgentGate(ledger=self.stand.ledger, actor=ORCHESTRATOR, catalog=Catalog(self.objects))
        return orchestrator, gate

    async def set(self, status: AgentStatus) -> None:
        await Catalog(self.objects).change_status(VIOLIN, status, at=await self.stand.ledger.now())

    async def states(self, runs: list[JobId]) -> list[str]:
        return [await self.stand.state(run) for run in runs]

    async def settle(self, orchestrator: Orchestrator) -> None:
        """Claim and drive until nothing more is handed out."""
        while (await orchestrator.run_once()).claimed or orchestrator._driving:
            await asyncio.gather(*(one.task for one in orchestrator._driving.values()))


@pytest.fixture
async def yard(stand: Stand, tmp_path: Path) -> AsyncGenerator[Yard]:
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    await plant(objects)
    yield Yard(stand, objects, open_memory(tmp_path / "memory"))
    await objects.close()


@pytest.mark.requirement("D24")
@pytest.mark.parametrize("status", [AgentStatus.PAUSED, AgentStatus.ERROR])
async def test_runs_of_a_stopped_agent_wait_until_it_is_active_again(yard: Yard, status: AgentStatus):
    orchestrator, gate = yard.services()
    runs = [await yard.stand.run_of(VIOLIN) for _ in range(3)]
    await yard.set(status)
    await yard.settle(orchestrator)
    other = await yard.stand.run_of(GUARDIAN)
    await yard.settle(orchestrator)
    assert await yard.states([*runs, other]) == ["running", "queued", "queued", "completed"]
    await yard.stand.lose_leases()
    await yard.settle(orchestrator)
    assert (await gate.run_once()).agents == ()
    assert await yard.states(runs) == ["running", "queued", "queued"]
    (wait,) = read_waits(await yard.stand.ledger.read_journal(runs[0]))
    assert (wait.until, wait.is_bounded) == (None, False)
    assert f"Agent {VIOLIN} is {status.value}; only an active agent runs" in wait.reason
    yard.stand.clock.advance(3 * 86_400.0)  # longer than a run may wait for upstream, and than it may work
    await yard.set(AgentStatus.ACTIVE)
    assert (await gate.run_once()).agents == (VIOLIN,)
    await yard.settle(orchestrator)
    assert await yard.states(runs) == ["completed"] * 3
    assert (await gate.run_once()).agents == ()
    await orchestrator.drain()


@pytest.mark.requirement("D24", "D19")
async def test_a_run_that_waits_for_its_agent_can_be_cancelled(yard: Yard):
    orchestrator, gate = yard.services()
    runs = [await yard.stand.run_of(VIOLIN) for _ in range(2)]
    await yard.set(AgentStatus.PAUSED)
    await yard.settle(orchestrator)
    await yard.stand.lose_leases()
    for run in runs:
        request = RequestId(f"c-{run}")
        await yard.stand.ledger.cancel(ORCHESTRATOR, run, CancelMode.SOFT, request, grace_s=1.0, cause="enough")
    assert await yard.states(runs) == ["failed", "failed"]
    await yard.set(AgentStatus.ACTIVE)
    later = await yard.stand.run_of(VIOLIN)
    await gate.run_once()
    await yard.settle(orchestrator)
    assert await yard.stand.state(later) == "completed", "the key has its limit again for whoever comes next"
    await orchestrator.drain()


@pytest.mark.requirement("D24")
async def test_runs_of_an_agent_that_was_removed_end_and_say_so(yard: Yard):
    orchestrator, gate = yard.services()
    run = await yard.stand.run_of(VIOLIN)
    await yard.set(AgentStatus.PAUSED)
    await yard.settle(orchestrator)
    await yard.stand.lose_leases()
    await yard.objects.delete(f"agents/{VIOLIN}/_agent.md")
    assert (await gate.run_once()).agents == (VIOLIN,)
    await yard.settle(orchestrator)
    assert (await yard.stand.events(run))[-1].cause == f"INTERNAL_ERROR: there is no agent {VIOLIN}"
    await orchestrator.drain()


@pytest.mark.requirement("D24")
async def test_runs_that_only_wait_for_each_other_are_left_alone(yard: Yard):
    _, gate = yard.services()
    for _ in range(3):
        await yard.stand.run_of(VIOLIN)
    assert (await gate.run_once()).agents == ()
    assert await yard.stand.claim() is not None
    assert (await gate.run_once()).agents == ()
