"""The worker in real time on every ledger: hints, sweeps, retries and keys, with nothing faked."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.pace import Pace
from trellis.app.wiring import SystemClock, make_worker, new_id
from trellis.auth.principals import Principal
from trellis.client import Trellis
from trellis.engine.errors import NotAllowed, OptionInvalid, PermanentError, TransientError
from trellis.engine.event_data import ArtifactPointer
from trellis.engine.jobs import Stage
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, JobPlace
from trellis.engine.retry_policy import RetryPolicy
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.context import Context, SyncContext
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


@pytest.mark.requirement("DJ-10", "DJ-16")
async def test_two_workers_end_all_jobs_of_mixed_outcomes(ledger: Ledger, url: str):
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
    assert all(end.place is JobPlace.ENDED for end in ends)


@pytest.mark.requirement("D49")
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


@pytest.mark.requirement("DJ-20", "DJ-21")
async def test_artifacts_that_a_handler_names_are_kept_by_the_attempt_that_succeeds(ledger: Ledger):
    app = App()

    @app.job("report", retry=RetryPolicy(base_s=0.0), max_attempts=2)
    async def report(ctx: Context) -> str:
        ctx.artifact(f"s3://bucket/{ctx.epoch}.pdf", name="report", size=ctx.attempt)
        if ctx.attempt == 1:
            raise TransientError("the store is slow")
        return "made"

    @app.job("sync", max_attempts=1)
    def sync(ctx: SyncContext, pointer: str) -> None:
        ctx.artifact(pointer)

    trellis = caller(ledger, app)
    jobs = [await trellis.submit("report"), await trellis.submit("sync", "file:///a"), await trellis.submit("sync", "")]
    async with make_worker(app, ledger, WorkerOptions()):
        ends = [(await trellis.wait(job.id, timeout_s=60)).state for job in jobs]
    assert ends == ["succeeded", "succeeded", "dead_lettered"]
    assert await jobs[0].artifacts() == (ArtifactPointer(pointer="s3://bucket/2.pdf", name="report", size=2),)
    assert await jobs[1].artifacts() == (ArtifactPointer(pointer="file:///a"),)
    assert await jobs[2].artifacts() == (), "an address must say something"


@pytest.mark.requirement("DJ-11")
async def test_a_hard_cancel_ends_the_job_at_once_and_discards_what_its_handler_had_made(ledger: Ledger):
    app, begun, go = App(testing=True), asyncio.Event(), asyncio.Event()

    @app.job("report", lease_s=3.0)
    async def report(ctx: Context) -> str:
        ctx.artifact("s3://bucket/half.pdf")
        begun.set()
        await go.wait()
        return "half"

    job = await caller(ledger, app).submit("report")
    async with make_worker(app, ledger, WorkerOptions()):
        await begun.wait()
        await job.cancel(mode="hard")
        assert (await job.status()).state == "cancelled"
        go.set()
    assert await job.artifacts() == ()
    assert await ledger.result(job.id) is None


@pytest.mark.requirement("DJ-12", "DJ-18")
async def test_the_dead_letter_says_what_kind_of_end_it_was(ledger: Ledger):
    app = App()

    @app.job("end", max_attempts=1, dlq_on_fail=True)
    async def end(ctx: Context, how: str) -> None:
        if how == "permanent":
            raise PermanentError("no such account")
        if how == "policy":
            raise PermanentError("not allowed", reason_code="policy_violation")
        if how == "transient":
            raise TransientError("no answer")
        raise RuntimeError("odd")

    trellis = caller(ledger, app)
    jobs = {how: await trellis.submit("end", how) for how in ("permanent", "policy", "transient", "odd")}
    async with make_worker(app, ledger, WorkerOptions()):
        ends = {how: (await trellis.wait(job.id, timeout_s=60)).state for how, job in jobs.items()}
    dead = dict.fromkeys(("policy", "transient", "odd"), "dead_lettered")
    assert ends == {"permanent": "failed", **dead}
    letters = {letter.job_id: letter for letter in await ledger.dead_letters(JobFilter(type="end"), limit=10)}
    assert {how: letters[job.id].reason_code.value for how, job in jobs.items()} == {
        "permanent": "validation_failed",
        "policy": "policy_violation",
        "transient": "dependency_unavailable",
        "odd": "exhausted_retries",
    }
    assert {letter.stage for letter in letters.values()} == {Stage.EXEC}


@pytest.mark.requirement("DJ-18", "DJ-12")
async def test_an_operator_dead_letters_a_job_wherever_it_is(ledger: Ledger):
    app, begun, go = App(testing=True), asyncio.Event(), asyncio.Event()

    @app.job("long", lease_s=3.0)
    async def long(ctx: Context) -> str:
        begun.set()
        await go.wait()
        return "done all the same"

    trellis = caller(ledger, app)
    waiting, running = await trellis.submit("long", delay_s=60), await trellis.submit("long")
    async with make_worker(app, ledger, WorkerOptions()):
        await begun.wait()
        for job in (waiting, running):
            assert (await trellis.dead_letter(job.id, reason="not allowed here")).state == "dead_lettered"
        go.set()
    letters = {letter.job_id: letter for letter in await ledger.dead_letters(JobFilter(type="long"), limit=10)}
    told = {(one.reason_code.value, one.last_error) for one in letters.values()}
    assert told == {("policy_violation", "not allowed here")}
    assert (letters[waiting.id].stage, letters[running.id].stage) == (Stage.FETCH, Stage.EXEC)
    assert letters[running.id].last_owner is not None
    assert await ledger.result(running.id) is None, "its holder's work was refused"
    with pytest.raises(OptionInvalid, match="policy_violation"):
        await trellis.dead_letter(running.id, reason="x", reason_code="exhausted_retries")
    worker = Principal(name="w", roles=frozenset({Role.WORKER}))
    with pytest.raises(NotAllowed):
        await Trellis(ledger, worker, clock=SystemClock(), new_id=new_id).dead_letter(running.id, reason="x")
