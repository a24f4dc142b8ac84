"""The worker in real time on every ledger: hints, sweeps, retries and keys, with nothing faked."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.pace import Pace
from trellis.client import Trellis
from trellis.engine.authority import Principal
from trellis.engine.errors import OptionInvalid, PermanentError, TransientError
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, Place
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
TEXTS = {
    "job_id": 200,
    "idempotency_key": 200,
    "idempotency_scope": 200,
    "concurrency_key": 200,
    "correlation_id": 200,
    "trace": 1000,
    "parent_id": 200,
    "compensates": 200,
}
"""The options of a submit that are text, and how much of it each takes."""


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


def caller(ledger: Ledger, app: App | None) -> Trellis:
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
async def test_a_job_longer_than_its_lease_is_renewed_and_runs_once(ledger: Ledger, pace: Pace):
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
    assert runs == [1] or pace.stood_still_s > 0.5


async def test_text_that_no_ledger_can_keep_is_refused_by_its_options_name_and_nothing_is_written(ledger: Ledger):
    app = App()

    @app.job("t", concurrency_key=lambda key: key)
    async def handler(ctx: Context, key: str) -> None: ...

    trellis, untyped = caller(ledger, app), caller(ledger, None)
    for bad in ("a\0b", "half a pair \ud800", "\udc80"):
        for option in TEXTS:
            await refused(trellis, option, payload="k", **{"idempotency_key": "k", option: bad})
        await refused(untyped, "concurrency_key", concurrency_key=bad)
        await refused(trellis, "job type", type_=bad)
        await refused(untyped, "job type", type_=bad)
    for option, chars_max in TEXTS.items():
        await refused(trellis, option, payload="k", **{"idempotency_key": "k", option: "x" * (chars_max + 1)})
    await refused(trellis, "concurrency_key", payload="k\0")
    await refused(untyped, "job type", type_="t" * 201)
    assert (await ledger.jobs(JobFilter(), limit=10)).jobs == ()


async def test_text_as_long_as_it_may_be_is_kept_as_it_is(ledger: Ledger):
    longest = {name: "x" * chars for name, chars in TEXTS.items() if name not in {"compensates", "concurrency_key"}}
    longest |= {"trace": "\N{SEEDLING}" * 1000, "correlation_id": "\N{SEEDLING}" * 200}
    job = await caller(ledger, None).submit("t" * 200, concurrency_key="\N{SEEDLING}" * 200, **longest)  # type: ignore[arg-type]
    status = await job.status()
    assert (status.job_id, status.trace, status.correlation_id) == (
        longest["job_id"],
        longest["trace"],
        longest["correlation_id"],
    )


async def refused(trellis: Trellis, option: str, *, type_: str = "t", payload: Any = None, **settings: Any) -> None:
    with pytest.raises(OptionInvalid) as caught:
        await trellis.submit(type_, payload, **settings)
    assert caught.value.data["option"] == option
    str(caught.value).encode()


@pytest.mark.quiet
@pytest.mark.requirement("D32", "D49")
async def test_a_free_slot_is_not_idle_for_a_second_while_work_waits_with_hints_off(ledger: Ledger, url: str):
    """By the events themselves: from the end of one job of a key to the start of the next, with two workers that only poll."""
    app, loop, other = App(), asyncio.get_running_loop(), await open_ledger(url)

    @app.job("keyed", retry=QUICK)
    async def keyed(ctx: Context, n: int) -> None:
        if n % 4 == 3 and ctx.attempt == 1:
            raise TransientError("its slot is free while it waits")

    trellis = caller(ledger, app)
    began = loop.time()
    jobs = [await trellis.submit("keyed", n, concurrency_key=f"k{n % 3}") for n in range(36)]
    options = [WorkerOptions(name=f"w{n}", hints=False, concurrency=4, drain_s=5.0) for n in range(2)]
    async with make_worker(app, ledger, options[0]), make_worker(app, other, options[1]):
        for job in jobs:
            await job.result(timeout_s=60)
    assert loop.time() - began < 60
    for key in range(3):
        events = [event for job in jobs[key::3] for event in await job.events()]
        ends = sorted(e.ts for e in events if e.type in {"job_succeeded", "job_retry_scheduled"})
        starts = sorted(e.ts for e in events if e.type == "job_started")
        idle = [(start - end).total_seconds() for end, start in zip(ends, starts[1:], strict=False)]
        assert max(idle) <= 1.0, f"key {key}: {max(idle):.2f} s"
    await other.close()
