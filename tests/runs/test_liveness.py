"""Load, a stopped projector and an object store that is away delay runs; they fail none and disable no agent."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import figures
from tests.runs.conftest import Stand
from tests.runs.test_audit_segments import work
from trellis.agents.catalog import Catalog
from trellis.agents.definition import AgentDefinition
from trellis.agents.garden import AGENTS
from trellis.app.instance import Instance, open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import SystemClock
from trellis.documents import ids
from trellis.engine.jobs import JobId
from trellis.engine.service import Service, serve
from trellis.engine.verify import verify
from trellis.runs.orchestration import TriggerKind
from trellis.runs.projector import Projector
from trellis.storage.objects.store import ObjectStore, StoreUnavailable
from trellis.testing import FakeClock

__all__ = ["figures"]

AT_ONCE = 500
LOOK_S = 0.2
VERBS = frozenset({"get", "head", "put", "delete", "list"})


class Away:
    """An object store that answers nothing while it is away."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._objects, name)
        if not self.is_away or name not in VERBS:
            return found

        async def refused(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable(verb=name, key="any", reason="away")

        return refused


class Platform:
    """All services of one instance, the projector apart: it comes and goes as a process of its own would."""

    def __init__(self, instance: Instance) -> None:
        self.store = Away(instance.objects)
        self.instance = replace(instance, objects=self.store)  # type: ignore[arg-type]
        self.runs: list[tuple[str, JobId]] = []
        self.events = 0

    async def begin_runs(self, number: int) -> None:
        """Begin runs; whoever begins one asks again while the store is away."""
        for _ in range(number):
            slug, key = AGENTS[len(self.runs) % len(AGENTS)], f"run-{len(self.runs)}"
            while True:
                try:
                    run_id = (await self.instance.layer.trigger(slug, {}, kind=TriggerKind.MANUAL, key=key)).job_id
                except StoreUnavailable:
                    await SystemClock().sleep(LOOK_S)
                else:
                    break
            self.runs.append((slug, run_id))

    @asynccontextmanager
    async def serving(self, wanted: Callable[[Service[Any]], bool]) -> AsyncGenerator[None]:
        """Services until the end of the block."""
        stop, services = asyncio.Event(), [one for one in self.instance.services() if wanted(one)]
        async with asyncio.TaskGroup() as group:
            for service in services:
                group.create_task(serve(service, SystemClock(), random.Random(1), stop))
            try:
                yield
            finally:
                stop.set()
        for service in services:
            for end in ("drain", "let_go"):
                if hasattr(service, end):
                    await getattr(service, end)()

    async def plain_jobs(self, jobs: int) -> None:
        stand = Stand(self.instance.ledger, FakeClock())
        for _ in range(jobs // AT_ONCE):
            await work(stand, AT_ONCE)

    async def all_completed(self) -> bool:
        return {status["status"] for status in await self.statuses()} == {"completed"}

    async def statuses(self) -> list[dict[str, Any]]:
        """What readers see of every run."""
        found = [await self.store.get(ids.status_key(*run)) for run in self.runs]
        return [{"status": None, "error": None} if one is None else json.loads(one.body) for one in found]

    async def agents(self) -> set[str]:
        loaded = [await Catalog(self.instance.objects).load(slug) for slug in AGENTS]
        return {agent.status.value for agent in loaded if isinstance(agent, AgentDefinition)}


def is_projector(service: Service[Any]) -> bool:
    return isinstance(service, Projector)


def is_of_runs(service: Service[Any]) -> bool:
    """Neither the projector nor what needs a gateway beside it."""
    return not is_projector(service) and not service.name.startswith("queue-")


async def until(holds: Callable[[], Awaitable[bool]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():
            await SystemClock().sleep(LOOK_S)


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncGenerator[Platform]:
    settings = Settings.model_validate({"objects": f"file://{folder / 'objects'}", "memory": folder / "memory.git"})
    async with open_instance(settings, url) as instance:
        await instance.plant()
        yield Platform(instance)
        report = await verify(instance.ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.requirement("D14", "D24", "PIPE-12")
async def test_all_runs_complete_under_load_with_projector_and_store_away_for_two_minutes_each(
    either_url: str, tmp_path: Path, figures: Callable[..., None]
):
    """100,000 plain jobs, and 20 runs that are begun before, between and in both outages, in real time."""
    jobs, away_s, each = 100_000, 120.0, 5
    clock = SystemClock()
    async with opened(either_url, tmp_path) as platform, platform.serving(is_of_runs), asyncio.TaskGroup() as group:
        began = clock.monotonic()
        load = group.create_task(platform.plain_jobs(jobs))
        async with platform.serving(is_projector):
            await platform.begin_runs(each)
            await clock.sleep(1.0)
        stopped_at = clock.monotonic()
        await platform.begin_runs(each)
        await clock.sleep(stopped_at + away_s - clock.monotonic())
        async with platform.serving(is_projector):
            await platform.begin_runs(each)
            platform.store.is_away, away_at = True, clock.monotonic()
            more = group.create_task(platform.begin_runs(each))
            await clock.sleep(away_at + away_s - clock.monotonic())
            platform.store.is_away, back_at = False, clock.monotonic()
            await load
            await more
            await until(platform.all_completed, within_s=300.0)
            figures(all_done_s=clock.monotonic() - began, after_store_s=clock.monotonic() - back_at)
        assert [status["status"] for status in await platform.statuses()] == ["completed"] * 20
        assert await platform.agents() == {"active"}
