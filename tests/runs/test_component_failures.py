"""What a run does when a component fails (PIPE-12): who tries again, how often, and the code it ends with. Real steps, store and memory."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import ORCHESTRATOR, Stand
from tests.runs.test_end_to_end import VIOLIN, Garden
from trellis.agents.garden import plant
from trellis.documents import ids
from trellis.documents.publisher import PublishedRuns
from trellis.nlm.retrying_provider import RetryingProvider
from trellis.nlm.scripted import ProviderScript, ScriptedProvider
from trellis.runs.orchestrator import RunDriver, RunDriverOptions, RunStep, StepContext, StepResult
from trellis.runs.pipeline import RunSteps
from trellis.storage.memory.repository import MemoryRepository, open_memory
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore, StoredObject, StoreUnavailable

PAUSE_S_MAX = 30.0
RETRIES_S = [1.0, 2.0, 4.0]


class NoPauses:
    """A clock for which a pause is over at once, and a limit never comes: nothing here rests on how fast the machine is."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds > PAUSE_S_MAX:
            await asyncio.get_running_loop().create_future()
        if seconds >= RETRIES_S[0]:
            self.pauses.append(seconds)
        self._now += seconds
        await asyncio.sleep(0)


class Failing:
    """A store of which some reads are not answered."""

    def __init__(self, objects: ObjectStore, folder: str, times: int) -> None:
        self.refused = 0
        self._objects, self._folder, self._times = objects, folder, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def get(self, key: str) -> StoredObject | None:
        if key.startswith(self._folder) and self.refused < self._times:
            self.refused += 1
            raise StoreUnavailable(verb="get", key=key, reason="503")
        return await self._objects.get(key)


class Bench(Garden):
    """A garden in which a run goes on while parts of it fail. The driver's pauses and the tool's are counted apart."""

    def __init__(self, stand: Stand, objects: ObjectStore, memory: MemoryRepository) -> None:
        super().__init__(stand, objects, memory)
        self.clock, self.tool_clock = NoPauses(), NoPauses()

    def works_with(self, **parts: Any) -> RunSteps:
        self.work = replace(self.work, **parts)
        return self.work

    async def ends(self, steps: dict[str, RunStep] | None = None) -> tuple[dict[str, Any], dict[str, int]]:
        """A run to its end: its last status.json, and how often each step was begun."""
        begun: dict[str, int] = dict.fromkeys(ids.STEPS, 0)
        driver = RunDriver(
            ledger=self.stand.ledger,
            actor=ORCHESTRATOR,
            clock=self.clock,
            steps={name: _counted(name, step, begun) for name, step in (steps or self.work.steps()).items()},
            published=PublishedRuns(self.objects, self.clock).reached,
            options=RunDriverOptions(run_timeout_s=1e9, wait_noted_s=1e9),
        )
        run_id = await self.stand.run_of(VIOLIN)
        claimed = await self.stand.claim()
        assert claimed is not None
        driving = asyncio.ensure_future(driver.drive(claimed))
        async with asyncio.timeout(60):
            while not driving.done():
                await self.projector.run_once()
            while (await self.projector.run_once()).events:
                pass
        assert driving.result().state is not None
        return await self.document(ids.status_key(VIOLIN, run_id)), begun


def _counted(name: str, step: RunStep, begun: dict[str, int]) -> RunStep:
    async def counted(context: StepContext, /) -> StepResult:
        begun[name] += 1
        return await step(context)

    return counted


@pytest.fixture
async def bench(stand: Stand, tmp_path: Path) -> AsyncGenerator[Bench]:
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    await plant(objects)
    yield Bench(stand, objects, open_memory(tmp_path / "memory"))
    await objects.close()


@pytest.mark.requirement("PIPE-12", "RUN-6")
async def test_a_runtime_that_crashes_is_tried_again_by_the_step(bench: Bench):
    steps, crashes = bench.work.steps(), iter(range(2))
    usual = steps["execute-agent"]

    async def crashing(context: StepContext, /) -> StepResult:
        made = await usual(context)
        if next(crashes, None) is not None:
            raise MemoryError("the runtime crashed")
        return made

    status, begun = await bench.ends({**steps, "execute-agent": crashing})
    assert (status["status"], status["error"]) == ("completed", None)
    assert status["proposals_created"]
    assert begun == {**dict.fromkeys(ids.STEPS, 1), "execute-agent": 3}
    assert bench.clock.pauses == RETRIES_S[:2]


@pytest.mark.requirement("PIPE-12", "RUN-7", "D7")
async def test_a_provider_that_is_down_is_asked_again_by_the_tool_and_not_by_the_step(bench: Bench):
    provider = ScriptedProvider(ProviderScript.model_validate({"steps": [{"status": 503}]}), clock=bench.tool_clock)
    bench.works_with(asking=RetryingProvider(provider, clock=bench.tool_clock))
    status, begun = await bench.ends()
    assert status["status"] == "failed"
    assert status["error"].startswith("NLM_UNAVAILABLE: NLM provider scripted does not answer")
    assert (len(provider.asked), bench.tool_clock.pauses) == (4, RETRIES_S)
    assert (begun["execute-agent"], bench.clock.pauses) == (1, [])
    assert status["proposals_created"] == []


@pytest.mark.requirement("PIPE-12", "D7")
async def test_a_provider_that_comes_back_costs_the_run_nothing_but_time(bench: Bench):
    script = {"steps": [{"status": 503}, {"status": 429}, {"raw": "<html>"}, {"extractive": True}]}
    provider = ScriptedProvider(ProviderScript.model_validate(script), clock=bench.tool_clock)
    bench.works_with(asking=RetryingProvider(provider, clock=bench.tool_clock))
    status, begun = await bench.ends()
    assert (status["status"], begun) == ("completed", dict.fromkeys(ids.STEPS, 1))
    assert bench.tool_clock.pauses[:3] == RETRIES_S
    assert status["proposals_created"]


@pytest.mark.requirement("PIPE-12", "RUN-6", "D14")
async def test_step_retries_an_unavailable_store_until_it_answers(bench: Bench):
    store = Failing(bench.objects, f"agents/{VIOLIN}/_agent.md", times=40)
    bench.works_with(objects=store)
    status, begun = await bench.ends()
    assert (status["status"], status["error"]) == ("completed", None)
    assert (begun["load-context"], bench.clock.pauses[:6]) == (41, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0])


@pytest.mark.requirement("PIPE-12", "PIPE-15")
async def test_a_run_that_failed_of_its_provider_has_a_manifest_that_says_so(bench: Bench):
    provider = ScriptedProvider(ProviderScript.model_validate({"steps": [{"status": 400}]}), clock=bench.tool_clock)
    bench.works_with(asking=RetryingProvider(provider, clock=bench.tool_clock))
    status, _ = await bench.ends()
    found = await bench.objects.get(ids.manifest_key(VIOLIN, status["run_id"]))
    assert found is not None
    manifest = json.loads(found.body)
    assert (manifest["status"], manifest["error"]) == ("failed", status["error"])
    assert manifest["error"].startswith("NLM_UNAVAILABLE: ")
    assert (len(provider.asked), bench.tool_clock.pauses) == (1, [])
