"""What the tests of an orchestration layer may know of it: the port, the published documents, the ledger's reads, and this rig.

A layer of another kind passes the same tests by adding one rig. It says how the layer is made, how its processes start and are killed,
and how time passes; everything a test asserts, it asserts through the port and the documents.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from tests.agents.files import agent_file
from tests.runs.conftest import Steps
from trellis.documents import ids
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter
from trellis.runs.orchestration import OrchestrationLayer, TriggerKind
from trellis.runs.orchestrator import RunStep, StepContext, StepResult
from trellis.storage.objects.store import ObjectStore

PATIENCE_S = 60.0
RUNS_AT_ONCE = 2
"""The global limit that every rig sets."""
WAITING_MAX = 4
"""How many runs of one agent may wait, in every rig."""
GRACE_S = 3_600.0
"""How late a missed instant is made up for, in every rig."""


class Hold:
    """Runs that come to a step stay in it until they are let go."""

    def __init__(self, usual: RunStep) -> None:
        self.begun: list[str] = []
        self._usual = usual
        self._free: dict[str, asyncio.Event] = {}
        self._all = False

    async def __call__(self, context: StepContext, /) -> StepResult:
        self.begun.append(context.run_id)
        if not self._all:
            await self._gate(context.run_id).wait()
        return await self._usual(context)

    def release(self, run_id: str | None = None) -> None:
        """This run, or every run from now on."""
        self._all = self._all or run_id is None
        for free in self._free.values() if run_id is None else (self._gate(run_id),):
            free.set()

    def _gate(self, run_id: str) -> asyncio.Event:
        return self._free.setdefault(run_id, asyncio.Event())


class Rig(ABC):
    """One layer on a ledger and an object store of its own. No process of it works before `start`."""

    layer: OrchestrationLayer
    ledger: Ledger
    objects: ObjectStore
    steps: Steps

    @abstractmethod
    async def start(self) -> None:
        """One more process that drives runs and fires schedules."""

    @abstractmethod
    async def kill(self) -> None:
        """Every process ends in the middle of what it does, and tells nobody."""

    @abstractmethod
    async def pass_time(self, seconds: float) -> None:
        """The ledger's time goes on by so much, and everything that falls due happens."""

    @abstractmethod
    async def settle(self) -> None:
        """Let the processes do all that can be done without time passing."""

    async def until(self, holds: Callable[[], bool | Awaitable[bool]]) -> None:
        """Let the processes work until this holds."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = holds()
                if answer if isinstance(answer, bool) else await answer:
                    return
                await self.settle()

    def hold(self, step: str) -> Hold:
        """Runs that come to this step from now on stay in it."""
        held = self.steps.acts[step] = Hold(self.steps.acts[step])
        return held

    def statuses_after(self, step: str) -> list[str]:
        """The statuses that runs have when they leave this step, also by its cancellation; one more for each run."""
        usual, seen = self.steps.acts[step], list[str]()

        async def watched(context: StepContext, /) -> StepResult:
            try:
                return await usual(context)
            finally:
                seen.extend(await self.stands(JobId(context.run_id)))

        self.steps.acts[step] = watched
        return seen

    async def agent(self, slug: str, **fields: str) -> str:
        """An agent that is active unless told otherwise."""
        await self.objects.put(f"agents/{slug}/_agent.md", agent_file(slug=slug, **fields))
        return slug

    async def trigger(self, slug: str, *, key: str | None = None, kind: TriggerKind = TriggerKind.MANUAL) -> JobId:
        return (await self.layer.trigger(slug, {"topic": "bows"}, kind=kind, key=key)).job_id

    async def runs(self, slug: str) -> list[Job]:
        """The runs of an agent, oldest first."""
        where = JobFilter(lifecycle="run", concurrency_key=f"run:{slug}")
        return list(reversed((await self.ledger.jobs(where, limit=100)).jobs))

    async def status(self, run_id: JobId) -> dict[str, Any]:
        """The run's status.json."""
        slug = (await self.layer.run_state(run_id)).agent_slug
        found = await self.objects.get(ids.status_key(slug, run_id))
        assert found is not None, run_id
        return json.loads(found.body)

    async def stands(self, *runs: JobId) -> list[str]:
        return [(await self.layer.run_state(run)).status for run in runs]

    async def shows(self, run_id: JobId, status: str) -> dict[str, Any]:
        """The run's status.json, once it has this status."""

        async def shown() -> bool:
            return (await self.status(run_id))["status"] == status

        await self.until(shown)
        return await self.status(run_id)
