"""Runs on a real SQLite ledger whose time, like the driver's own, moves only when the test moves it."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from trellis.documents.ids import STEPS
from trellis.documents.run_documents import RunFacts, RunRequest
from trellis.engine.jobs import Actor, Claim, Claimed, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, SweepOptions
from trellis.engine.step_runner import DriveOutcome
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.runs.orchestrator import TYPE, RunDriver, RunDriverOptions, RunStep, StepContext, StepResult, accept
from trellis.testing import FakeClock

GATEWAY = Actor(role=Role.GATEWAY, name="gateway@test")
ORCHESTRATOR = Actor(role=Role.ORCHESTRATOR, name="orchestrator@test")
PATIENCE_S = 60.0


def is_of_rebuild(key: str) -> bool:
    """Whether an object is the audit record of a rebuild: of all that is published it alone is made by one."""
    return "-rebuilt-" in key


class Steps:
    """Four steps that count how often each was done; a test replaces what one does."""

    def __init__(self) -> None:
        self.done: dict[str, int] = dict.fromkeys(STEPS, 0)
        self.acts: dict[str, RunStep] = {
            "load-context": self._plain({"sources": ["sources/a.md"]}),
            "execute-agent": self._plain({"summary": "nothing to change", "proposals": []}),
            "persist-results": self._persist,
            "finalize": self._plain({}),
        }

    def mapping(self) -> dict[str, RunStep]:
        return {name: self._counted(name) for name in STEPS}

    def _counted(self, name: str) -> RunStep:
        async def step(context: StepContext, /) -> StepResult:
            self.done[name] += 1
            return await self.acts[name](context)

        return step

    def _plain(self, result: dict[str, object]) -> RunStep:
        async def step(context: StepContext, /) -> StepResult:
            return StepResult(result=result)

        return step

    async def _persist(self, context: StepContext, /) -> StepResult:
        return StepResult(result={}, event_data={"proposals_created": ["prop_1"]}, output=b'{"proposals": []}\n')


class Stand:
    """Ledger, clock and drivers of one test."""

    def __init__(self, ledger: Ledger, clock: FakeClock) -> None:
        self.ledger = ledger
        self.clock = clock
        self.steps = Steps()
        self.shown: list[tuple[str, str, int]] = []
        self.shows = True
        self._numbers = itertools.count(1)

    async def run_of(self, slug: str = "archivist-violin", *, queued: bool = True) -> JobId:
        run_id = JobId(f"run_2026-02-14_080000_{next(self._numbers):06}")
        request = RunRequest(slug, "manual", {"topic": "bows"})
        job = NewJob(
            job_id=run_id, type=TYPE, lifecycle="run", payload=request.to_bytes(), concurrency_key=f"run:{slug}"
        )
        await self.ledger.submit(GATEWAY, [job])
        if queued:
            await accept(self.ledger, ORCHESTRATOR, run_id)
        return run_id

    async def claim(self, *, lease_s: float = 30.0) -> Claimed | None:
        terms = TypeClaim(type=TYPE, lease_s=lease_s, heartbeat_s=lease_s / 3)
        claim = Claim(claim_id=ClaimId(f"claim-{next(self._numbers)}"), types=(terms,), lifecycle="run")
        claimed = (await self.ledger.turn(Turn(actor=ORCHESTRATOR, claim=claim))).claimed
        return claimed[0] if claimed else None

    async def lose_leases(self) -> None:
        """Time passes second by second while a sweeper watches: a jump would look like an outage and be forgiven."""
        for _ in range(35):
            self.clock.advance(1.0)
            await self.ledger.sweep(Actor(role=Role.SWEEPER, name="test"), SweepOptions(elect=False))

    def driver(self, **options: float | tuple[float, ...]) -> RunDriver:
        async def published(slug: str, run_id: str, version: int) -> None:
            self.shown.append((slug, run_id, version))
            if not self.shows:
                await asyncio.get_running_loop().create_future()

        return RunDriver(
            ledger=self.ledger,
            actor=ORCHESTRATOR,
            clock=self.clock,
            steps=self.steps.mapping(),
            published=published,
            options=RunDriverOptions(**options),  # type: ignore[arg-type]
        )

    async def drive(self, claimed: Claimed | None = None, **options: float | tuple[float, ...]) -> DriveOutcome:
        claimed = claimed or await self.claim()
        assert claimed is not None
        return await asyncio.wait_for(self.driver(**options).drive(claimed), PATIENCE_S)

    async def facts(self, run_id: JobId) -> RunFacts:
        job = await self.ledger.job(run_id)
        assert job is not None
        assert job.payload is not None
        return RunFacts(run_id, RunRequest.read(job.payload), tuple(await self.ledger.events(run_id)))

    async def events(self, run_id: JobId) -> list[Event]:
        return await self.ledger.events(run_id)

    async def state(self, run_id: JobId) -> str:
        job = await self.ledger.job(run_id)
        assert job is not None
        return job.state

    async def until(self, holds: Callable[[], bool | Awaitable[bool]], *, step_s: float = 0.0) -> None:
        """Wait for the thing itself; each look is a trip to the ledger and moves the clock by `step_s` if somebody sleeps.

        Work that is not asleep takes no time, however slow the machine is.
        """
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = holds()
                if answer if isinstance(answer, bool) else await answer:
                    return
                if step_s and self.clock.sleeping:
                    self.clock.advance(step_s)
                await self.ledger.job(JobId("nobody"))


@pytest.fixture(params=["sqlite", "postgres"])
def either_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A ledger of each kind, migrated where that is needed."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'either.db'}"
    template = request.getfixturevalue("postgres_template")
    return request.getfixturevalue("new_postgres_database")(template=template)


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncGenerator[Stand]:
    clock = FakeClock()
    ledger = await open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=clock)
    made = Stand(ledger, clock)
    yield made
    report = await verify(made.ledger)
    assert report.ok, "\n".join(map(str, report.violations[:20]))
    await made.ledger.close()
