"""The worker in real time on every ledger: hints, sweeps, retries and keys, with nothing faked."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from trellis.client import Trellis
from trellis.engine.authority import Principal
from trellis.engine.errors import PermanentError, TransientError
from trellis.engine.ledger import Ledger
from trellis.engine.records import Place
from trellis.engine.retries import RetryPolicy
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.wiring import SystemClock, make_worker, new_id
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.options import WorkerOptions
from trellis.worker.outcomes import Snooze

QUICK = RetryPolicy(base_s=0.01, max_s=0.02)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
async def ledger(url: str) -> AsyncGenerator[Ledger]:
    opened = await open_ledger(url)
    yield opened
    report = await verify(opened)
    assert report.ok, "\n".join(map(str, report.violations[:20]))
    await opened.close()


def caller(ledger: Ledger, app: App) -> Trellis:
    principal = Principal(name="test", roles=frozenset(Role))
    return Trellis(ledger, principal, clock=SystemClock(), new_id=new_id, app=app)


@pytest.mark.requirement("DJ-4", "DJ-10", "DJ-16")
async def test_two_workers_bring_jobs_of_mixed_fate_to_their_ends(ledger: Ledger, url: str):
    app = App()
    executions: Counter[str] = Counter()

    @app.job("mixed", retry=QUICK, max_attempts=3)
    async def mixed(ctx: Context, n: int) -> int:
        executions[ctx.job_id] += 1
        await asyncio.sleep(0)
        first = executions[ctx.job_id] == 1
        if n % 5 == 1 and first:
            raise TransientError("once")
        if n % 5 == 2:
            raise PermanentError("never")
        if n % 5 == 3:
            raise RuntimeError("always")
        if n % 5 == 4 and first:
            raise Snooze(0.01)
        return n

    trellis = caller(ledger, app)
    other = await open_ledger(url)
    async with (
        make_worker(app, ledger, WorkerOptions(name="one", concurrency=8)),
        make_worker(app, other, WorkerOptions(name="two", concurrency=8)),
    ):
        jobs = await trellis.submit_many("mixed", range(100))
        ends = [await trellis.wait(job.id, timeout_s=60) for job in jobs]
    await other.close()
    fates = Counter((n % 5, end.state) for n, end in enumerate(ends))
    assert fates == {
        (0, "succeeded"): 20,
        (1, "succeeded"): 20,
        (2, "failed"): 20,
        (3, "dead_lettered"): 20,
        (4, "succeeded"): 20,
    }
    runs = Counter((n % 5, executions[job.id]) for n, job in enumerate(jobs))
    assert runs == {(0, 1): 20, (1, 2): 20, (2, 1): 20, (3, 3): 20, (4, 2): 20}
    assert all(end.place is Place.ENDED for end in ends)


@pytest.mark.requirement("JQ-7", "D49")
async def test_jobs_of_one_key_never_overlap_and_all_are_done(ledger: Ledger):
    app = App()
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()

    @app.job("keyed", concurrency_key=lambda key: key)
    async def keyed(ctx: Context, key: str) -> None:
        now[key] += 1
        most[key] = max(most[key], now[key])
        await asyncio.sleep(0.001)
        now[key] -= 1

    trellis = caller(ledger, app)
    async with make_worker(app, ledger, WorkerOptions(concurrency=32)):
        jobs = await trellis.submit_many("keyed", [f"key-{n % 5}" for n in range(60)])
        ends = [await trellis.wait(job.id, timeout_s=60) for job in jobs]
    assert {end.state for end in ends} == {"succeeded"}
    assert set(most.values()) == {1}


@pytest.mark.requirement("D4")
async def test_a_job_longer_than_its_lease_is_renewed_and_runs_once(ledger: Ledger):
    app = App(testing=True)
    runs: list[int] = []

    @app.job("long", lease_s=3.0, heartbeat_s=0.5)
    async def long(ctx: Context) -> bool:
        runs.append(ctx.attempt)
        for _ in range(25):
            await asyncio.sleep(0.1)
            assert ctx.lease_valid
        return True

    trellis = caller(ledger, app)
    async with make_worker(app, ledger, WorkerOptions()):
        job = await trellis.submit("long")
        assert await job.result(timeout_s=60) is True
    assert runs == [1]
