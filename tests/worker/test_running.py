"""Handlers run, and their ends become the job's next step."""

import asyncio
import contextvars
import json
import random
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.worker.conftest import Stand
from trellis.engine.errors import JobDeadLettered, JobFailed, PermanentError, TransientError, ValidationError
from trellis.engine.jobs import Actor, JobId, NewJob, ReasonCode, Stage
from trellis.engine.records import JobFilter
from trellis.engine.retry_policy import RETRY_BASE_S_DEFAULT, RetryPolicy
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.context import Context, Item, SyncContext
from trellis.worker.options import WorkerOptions
from trellis.worker.outcomes import Snooze
from trellis.worker.runners import SLICE_S, Runners
from trellis.worker.turns import WorkListener

SUCCEEDED = ["job_queued", "job_claimed", "job_started", "job_succeeded"]
NOW = RetryPolicy(base_s=0.0)


@dataclass
class Document:
    title: str


@dataclass
class Indexed:
    words: int


@pytest.mark.requirement("DJ-19", "D47")
async def test_an_async_handler_gets_its_type_and_its_result_comes_back_as_one(stand: Stand):
    app = App()
    stored: list[str] = []

    @app.job("index")
    async def index(ctx: Context, doc: Document) -> Indexed:
        stored.append((await stand.trellis.job(ctx.job_id)).state)
        return Indexed(words=len(doc.title.split()))

    job = await stand.submit("index", Document("three little words"))
    await stand.run_until_idle(app)
    assert await job.result(timeout_s=0) == {"words": 3}
    assert await stand.trellis.handle(job.id, returns=Indexed).result(timeout_s=0) == Indexed(words=3)
    assert await stand.events(job) == SUCCEEDED
    assert stored == ["running"]


async def test_a_sync_handler_runs_on_a_thread_and_may_block_on_its_context(stand: Stand):
    app = App()
    threads: set[int] = set()

    @app.job("sync")
    def handler(ctx: SyncContext, n: int) -> str:
        threads.add(threading.get_ident())
        ctx.checkpoint({"n": n})
        assert ctx.last_checkpoint == {"n": n}
        child = ctx.submit("child", n)
        return ctx.journal("made", lambda: f"{ctx.job_id}:{child}")

    @app.job("child")
    async def child(ctx: Context, n: int) -> None: ...

    job = await stand.submit("sync", 5)
    await stand.run_until_idle(app)
    assert await job.result(timeout_s=0) == f"{job.id}:id-3"
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration, asyncio.CancelledError])
async def test_a_sync_handler_that_raises_what_means_something_to_the_loop_only_fails(
    stand: Stand, error: type[BaseException]
):
    app = App()

    @app.job("sync", max_attempts=1)
    def handler(ctx: SyncContext) -> None:
        raise error

    job = await stand.submit("sync", max_attempts=1)
    await stand.run_until_idle(app)
    with pytest.raises(JobDeadLettered, match=error.__name__):
        await job.result(timeout_s=0)


async def test_a_handler_that_exits_ends_itself_and_not_the_worker(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        sys.exit(3)

    job = await stand.submit("t", max_attempts=1)
    await stand.run_until_idle(app)
    with pytest.raises(JobDeadLettered, match="SystemExit: 3"):
        await job.result(timeout_s=0)


class Speechless(Exception):
    """Whose own code fails when it is asked what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


async def test_an_error_that_cannot_say_what_it_is_ends_its_attempt_like_any_other(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        raise Speechless

    job = await stand.submit("t", max_attempts=1)
    await stand.run_until_idle(app)
    with pytest.raises(JobDeadLettered, match="Speechless"):
        await job.result(timeout_s=0)


class Panic(BaseException):
    """As libraries in other languages raise it when they break."""


class SpeechlessExit(SystemExit):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("kind", ["async", "sync", "batch"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, Panic, SpeechlessExit])
async def test_any_error_of_a_handler_ends_its_attempt_and_not_the_worker(
    stand: Stand, kind: str, error: type[BaseException]
):
    app = App()

    @app.job("async")
    async def waits(ctx: Context) -> None:
        raise error

    @app.job("sync")
    def blocks(ctx: SyncContext) -> None:
        raise error

    @app.job("batch", batch=2)
    async def takes_several(items: list[Item[int]]) -> None:
        raise error

    job = await stand.submit(kind, 1 if kind == "batch" else None, max_attempts=1)
    await stand.run_until_idle(app)
    with pytest.raises(JobDeadLettered, match=error.__name__):
        await job.result(timeout_s=0)


async def test_logging_in_a_handler_never_fails_the_job(stand: Stand):
    app, round_and_round = App(), list[Any]()
    round_and_round.append(round_and_round)

    @app.job("t")
    async def handler(ctx: Context) -> str:
        ctx.logger.info("a file called %s", "half \udcff")
        ctx.logger.info("%s and %s", *[1])
        ctx.logger.info("pairs", found={(1, 2): 3}, again=round_and_round)
        event: Any = ValueError("e" * 10_000)
        ctx.logger.warning(event)
        ctx.logger.info("odd", found=Speechless())
        event = Speechless()
        ctx.logger.info(event)
        ctx.logger.info("%s", event)
        return "done"

    job = await stand.submit("t", max_attempts=1, returns=str)
    await stand.run_until_idle(app)
    assert await job.result(timeout_s=0) == "done"
    lines = [json.loads(signal.data or b"") for signal in await stand.trellis.ledger.signals(job.id, limit=10)]
    silent = "<Speechless that cannot be shown>"
    assert [line["event"] for line in lines] == [
        "a file called half ?",
        "%s and %s (1,)",
        "pairs",
        "e" * 1_000,
        "odd",
        silent,
        "%s <tuple that cannot be shown>",
    ]


async def test_a_batch_handler_decides_for_each_job(stand: Stand):
    app = App()
    sizes: list[int] = []

    @app.job("batch", batch=4, retry=NOW, max_attempts=2)
    async def handler(items: list[Item[int]]) -> None:
        sizes.append(len(items))
        for item in items:
            if item.payload == 1:
                item.fail(PermanentError("one is no good"))
            elif item.payload == 2 and item.ctx.attempt == 1:
                item.fail(TransientError("later"))
            elif item.payload != 3:
                item.done(item.payload * 10)

    jobs = await stand.trellis.submit_many("batch", list(range(6)))
    await stand.run_until_idle(app)
    await stand.sweep()
    await stand.run_until_idle(app)
    assert [(await job.status()).state for job in jobs] == ["succeeded", "failed", *["succeeded"] * 4]
    assert [await jobs[n].result() for n in (0, 2, 3, 5)] == [0, 20, None, 50]
    assert sizes[0] == 4
    assert sum(sizes) == 7


async def test_a_batch_handler_that_raises_fails_those_it_had_not_decided(stand: Stand):
    app = App()

    @app.job("batch", batch=10, max_attempts=1)
    async def handler(items: list[Item[int]]) -> None:
        items[0].done("first")
        raise RuntimeError("and then it broke")

    jobs = await stand.trellis.submit_many("batch", [0, 1], max_attempts=1)
    await stand.run_until_idle(app)
    assert [(await job.status()).state for job in jobs] == ["succeeded", "dead_lettered"]


async def test_a_time_out_while_the_logs_of_a_finished_batch_are_written_costs_none_of_its_jobs(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
):
    app, entered, answers = App(), asyncio.Event(), asyncio.Event()
    write = stand.ledger.signal

    async def slow(*args: Any) -> Any:
        entered.set()
        await answers.wait()
        return await write(*args)

    monkeypatch.setattr(stand.faults, "signal", slow, raising=False)

    @app.job("batch", batch=3, timeout_s=5)
    async def handler(items: list[Item[int]]) -> None:
        for item in items:
            item.ctx.logger.info("done")
            item.done(item.payload)

    jobs = await stand.trellis.submit_many("batch", [0, 1, 2])
    async with stand.running(app) as worker:
        await entered.wait()
        for _ in range(4):
            await stand.until(lambda: True)
            stand.clock.advance(2.0)
        answers.set()
        for job in jobs:
            await stand.in_state(job, "succeeded")
        # The ledger shows the outcome a moment before the worker hears that it is committed.
        await stand.until(lambda: (worker.held_jobs.running, worker.held_jobs.jobs) == (0, {}))


@pytest.mark.requirement("DJ-9", "DJ-10", "DJ-16", "D38")
async def test_a_failing_job_is_retried_with_backoff_and_then_dead_lettered(stand: Stand):
    app = App()
    attempts: list[int] = []

    @app.job("flaky", max_attempts=3, retry=RetryPolicy(jitter=0.0))
    async def handler(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        raise TransientError(f"attempt {ctx.attempt}")

    job = await stand.submit("flaky", max_attempts=3)
    waits: list[float] = []
    for _ in range(2):
        await stand.run_until_idle(app)
        status = await job.status()
        assert status.due_at is not None
        waits.append((status.due_at - await stand.ledger.now()).total_seconds())
        stand.clock.advance(waits[-1])
        await stand.sweep()
    await stand.run_until_idle(app)
    assert attempts == [1, 2, 3]
    assert waits == pytest.approx([0.5, 1.0])
    with pytest.raises(JobDeadLettered, match="attempt 3") as caught:
        await job.result(timeout_s=0)
    assert caught.value.data["reason_code"] == "dependency_unavailable"
    (letter,) = await stand.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.attempts, letter.stage, letter.last_owner) == (3, Stage.EXEC, "w1")


@pytest.mark.requirement("DJ-10", "DJ-16")
@pytest.mark.parametrize(
    "error,options,state,letters",
    [
        (PermanentError("no"), {}, "failed", 0),
        (PermanentError("no"), {"dlq_on_fail": True}, "failed", 1),
        (ValidationError("no"), {}, "dead_lettered", 1),
        (RuntimeError("no"), {"max_attempts": 1, "on_exhausted": "fail"}, "failed", 0),
    ],
)
async def test_the_class_of_an_error_decides(stand: Stand, error: Exception, options: Any, state: str, letters: int):
    app = App()

    @app.job("t", **options)
    async def handler(ctx: Context) -> None:
        raise error

    job = await stand.submit("t", max_attempts=options.get("max_attempts", 5))
    await stand.run_until_idle(app)
    assert (await job.status()).state == state
    assert len(await stand.ledger.dead_letters(JobFilter(), limit=10)) == letters
    with pytest.raises((JobFailed, JobDeadLettered), match="no"):
        await job.result(timeout_s=0)


@pytest.mark.requirement("DJ-18", "DJ-19")
@pytest.mark.parametrize("payload,says", [({"wrong": 1}, "title"), (None, "object")])
async def test_a_payload_that_does_not_fit_never_reaches_user_code(stand: Stand, payload: Any, says: str):
    app = App()
    ran: list[Any] = []

    @app.job("t")
    async def handler(ctx: Context, doc: Document) -> None:
        ran.append(doc)

    job = await stand.submit("t", payload)
    await stand.run_until_idle(app)
    assert ran == []
    assert (await job.status()).state == "dead_lettered"
    (letter,) = await stand.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.reason_code, letter.stage) == (ReasonCode.VALIDATION_FAILED, Stage.INPUT)
    assert says in letter.last_error


@pytest.mark.requirement("DJ-18", "DJ-12", "DJ-19")
async def test_a_payload_that_cannot_be_parsed_is_dead_lettered_at_once_with_a_complete_letter(stand: Stand):
    app, ran = App(), list[str]()

    @app.job("t")
    async def handler(ctx: Context, doc: Document) -> None:
        ran.append(ctx.job_id)

    torn = NewJob(job_id=JobId("torn"), type="t", payload=b"{", max_attempts=5, correlation_id="order-7")
    await stand.ledger.submit(Actor(role=Role.SUBMITTER, name="ada"), [torn])
    await stand.run_until_idle(app)
    assert ran == []
    (letter,) = await stand.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.job_id, letter.reason_code, letter.stage) == ("torn", ReasonCode.PARSE_ERROR, Stage.INPUT)
    assert (letter.attempts, letter.last_owner, letter.correlation_id) == (1, "w1", "order-7")
    assert letter.last_lease_expires_at is not None
    assert letter.last_error


@pytest.mark.requirement("DJ-12")
async def test_a_result_that_cannot_be_stored_is_dead_lettered_at_the_output_stage(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> Indexed:
        return "not indexed at all"  # type: ignore[return-value]

    await stand.submit("t")
    await stand.run_until_idle(app)
    (letter,) = await stand.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.reason_code, letter.stage) == (ReasonCode.VALIDATION_FAILED, Stage.OUTPUT)


@pytest.mark.requirement("D38")
async def test_a_snoozed_job_comes_back_later_and_keeps_its_attempts(stand: Stand):
    app = App()
    calls: list[tuple[int, int]] = []

    @app.job("t", max_attempts=2)
    async def handler(ctx: Context) -> None:
        calls.append((ctx.attempt, ctx.max_attempts))
        if len(calls) < 6:
            raise Snooze(30)
        if len(calls) == 6:
            raise TransientError("the first attempt that counts")

    job = await stand.submit("t", max_attempts=2)
    for _ in range(5):
        await stand.run_until_idle(app)
        stand.clock.advance(29)
        await stand.sweep()
        await stand.run_until_idle(app)
        stand.clock.advance(1)
        await stand.sweep()
    await stand.run_until_idle(app)
    retry = (await job.events())[-1]
    assert json.loads(retry.data or b"")["retry_in_s"] <= RETRY_BASE_S_DEFAULT, "the backoff counts snoozes"
    stand.clock.advance(RETRY_BASE_S_DEFAULT)
    await stand.sweep()
    await stand.run_until_idle(app)
    assert calls == [(1, 2)] * 6 + [(2, 2)]
    assert (await job.status()).state == "succeeded"
    assert (await stand.events(job)).count("job_snoozed") == 5


@pytest.mark.parametrize("rate, seconds", [(2.0, 6.5), (1.0, 12.0)])
async def test_a_rate_is_reached_also_where_a_poll_leaves_a_part_of_a_claim_over(
    stand: Stand, rate: float, seconds: float
):
    app, started = App(), list[float]()

    @app.job("metered", rate=rate)
    async def handler(ctx: Context) -> None:
        started.append(stand.clock.monotonic())

    for _ in range(12):
        await stand.submit("metered")
    began = stand.clock.monotonic()
    async with stand.running(app):
        await stand.until(lambda: len(started) == 12, step_s=0.1)
    # 12 jobs, of which up to two are claimed at once at the start. Each slow answer of the ledger lets the clock take a
    # step more. A poll that lost what is left of a claim made 1.2 jobs a second of 2: 8.3 s.
    assert started[-1] - began <= seconds
    assert started[-1] - began >= (12 - 2) / rate - 0.2


async def test_a_slow_rate_hands_out_one_job_at_a_time(stand: Stand):
    app, started = App(), list[float]()

    @app.job("quota", rate=0.05)
    async def handler(ctx: Context) -> None:
        started.append(stand.clock.monotonic())

    for _ in range(3):
        await stand.submit("quota")
    async with stand.running(app):
        await stand.until(lambda: len(started) == 2, step_s=1.0)
    assert started[1] - started[0] >= 19.0


async def test_why_a_job_was_dead_lettered_names_its_reason_code_once(stand: Stand):
    app = App()

    @app.job("index")
    async def handler(ctx: Context, doc: Document) -> None: ...

    job = await stand.submit("index", {"tilte": "a"})
    await stand.run_until_idle(app)
    with pytest.raises(JobDeadLettered) as dead:
        await job.result(timeout_s=0)
    assert str(dead.value).startswith(f"Job {job.id} was dead-lettered (validation_failed): title: ")


async def test_a_journal_takes_any_callable_returns_json_and_refuses_a_name_used_twice(stand: Stand):
    app = App()
    calls: list[int] = []

    def read(page: int) -> dict[str, Any]:
        calls.append(page)
        if len(calls) == 1:
            raise TransientError("the first call fails")
        return {"page": page, "at": datetime(2026, 1, 2, tzinfo=UTC)}

    @app.job("t", retry=NOW)
    async def handler(ctx: Context) -> list[Any]:
        with suppress(TransientError):
            await ctx.journal("page-0", lambda: read(0))
        pages = [await ctx.journal(f"page-{page}", lambda page=page: read(page)) for page in range(2)]
        assert pages == [{"page": page, "at": "2026-01-02T00:00:00Z"} for page in range(2)]
        return [await ctx.journal("page-1", lambda: read(9)), *pages]

    job = await stand.submit("t")
    await stand.run_until_idle(app)
    with pytest.raises(JobFailed, match=r"the step 'page-1' twice in one attempt: give each step its own name"):
        await job.result(timeout_s=0)
    assert calls == [0, 0, 1], "a call that raised may be made again; the name used twice calls nothing"


async def test_a_journaled_result_that_cannot_be_stored_is_not_made_again(stand: Stand):
    app, charged = App(), list[str]()

    @app.job("pay", max_attempts=3, retry=NOW)
    async def pay(ctx: Context) -> None:
        await ctx.journal("charge", lambda: charged.append("ada") or object())

    job = await stand.submit("pay")
    await stand.run_until_idle(app)
    with pytest.raises(JobDeadLettered, match="the step 'charge' has run, and its result cannot be stored"):
        await job.result(timeout_s=0)
    assert charged == ["ada"]


@pytest.mark.requirement("DJ-21")
async def test_a_later_attempt_gets_the_same_key_the_last_checkpoint_and_the_journal(stand: Stand):
    app = App()
    seen: list[tuple[Any, ...]] = []
    paid: list[str] = []

    async def pay() -> str:
        paid.append("paid")
        return f"receipt-{len(paid)}"

    @app.job("t", retry=NOW)
    async def handler(ctx: Context) -> str:
        receipt = await ctx.journal("pay", pay)
        seen.append((ctx.attempt, ctx.idempotency_key, ctx.last_checkpoint, receipt))
        await ctx.checkpoint({"page": ctx.attempt})
        if ctx.attempt < 3:
            raise TransientError("again")
        return receipt

    job = await stand.submit("t")
    for _ in range(3):
        await stand.run_until_idle(app)
        await stand.sweep()
    assert seen == [
        (1, job.id, None, "receipt-1"),
        (2, job.id, {"page": 1}, "receipt-1"),
        (3, job.id, {"page": 2}, "receipt-1"),
    ]
    assert paid == ["paid"]


async def test_children_inherit_parent_correlation_and_trace(stand: Stand):
    app = App()

    @app.job("parent")
    async def parent(ctx: Context) -> str:
        return await ctx.submit("child", 1)

    @app.job("child")
    async def child(ctx: Context, n: int) -> list[str | None]:
        return [ctx.parent_id, ctx.correlation_id, ctx.trace]

    job = await stand.submit("parent", correlation_id="order-7", trace="00-abc-def-01")
    await stand.run_until_idle(app)
    child_id = await job.result(timeout_s=0)
    assert await stand.trellis.handle(child_id).result(timeout_s=0) == [job.id, "order-7", "00-abc-def-01"]


async def test_log_lines_and_progress_are_kept_with_the_job_and_bounded(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        ctx.progress({"done": 1})
        ctx.progress({"done": 2})
        for n in range(300):
            ctx.logger.info("line %d of %s", n, "many", n=n)

    job = await stand.submit("t")
    await stand.run_until_idle(app)
    signals = await job.signals()
    logs = [signal.data or b"" for signal in signals if signal.type == "job_log"]
    assert len(logs) == 201
    assert b'"line 0 of many"' in logs[0]
    assert b'"dropped": 100' in logs[-1]
    assert [signal.data for signal in signals if signal.type == "job_heartbeat"] == [b'{"done":2}']
    assert (await stand.events(job)) == SUCCEEDED


async def test_context_variables_set_by_a_handler_do_not_reach_the_next_job(stand: Stand):
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
    app = App()
    seen: list[str] = []

    @app.job("t")
    async def handler(ctx: Context, n: int) -> None:
        seen.append(tenant.get())
        tenant.set(f"tenant-{n}")

    await stand.trellis.submit_many("t", list(range(20)))
    await stand.run_until_idle(app, concurrency=2)
    assert seen == ["nobody"] * 20


async def test_never_more_handlers_than_slots_run_at_once_and_every_job_runs_once(stand: Stand):
    app = App()
    now = peak = 0
    full = asyncio.Event()
    ran: list[int] = []

    @app.job("t")
    async def handler(ctx: Context, n: int) -> None:
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        if peak == 5:
            full.set()
        await full.wait()
        for _ in range(n % 3):
            await asyncio.sleep(0)
        now -= 1
        ran.append(n)

    await stand.trellis.submit_many("t", list(range(500)))
    await stand.run_until_idle(app, concurrency=5)
    assert peak == 5
    assert sorted(ran) == list(range(500))


async def test_handlers_that_never_suspend_do_not_keep_a_turn_from_leaving_with_what_is_finished(stand: Stand):
    app = App()
    unsettled = 0

    @app.job("t")
    async def handler(ctx: Context, n: int) -> None:
        nonlocal unsettled
        stand.clock.advance(0.002)  # busy for two milliseconds of the worker's own time
        unsettled = max(unsettled, len(worker.held_jobs.finished))

    await stand.trellis.submit_many("t", list(range(200)))
    worker = stand.worker(app, concurrency=200, prefetch=0)
    await worker.start(listening=False)
    await worker.until_idle()
    await worker.drain()
    assert 0 < unsettled < 199


@pytest.mark.requirement("D32")
async def test_a_worker_without_hints_finds_new_work_by_polling(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> None: ...

    async with stand.running(app) as worker:
        await stand.until(worker.turns.idle.is_set)
        job = await stand.submit("t")
        await stand.in_state(job, "succeeded", step_s=0.05)


@pytest.mark.requirement("D32")
async def test_a_poll_comes_within_half_a_second(stand: Stand):
    polled: list[float] = []

    async def found() -> None:
        polled.append(stand.clock())

    listener = WorkListener(
        ledger=stand.ledger,
        clock=stand.clock,
        rng=random.Random(3),
        types=("t",),
        poll_s=WorkerOptions().poll_s,
        hints=False,
        found=found,
    )
    for _ in range(20):
        polling = asyncio.ensure_future(listener.run_once())
        await asyncio.sleep(0)
        stand.clock.advance(0.5)
        await asyncio.wait_for(polling, 60)
    assert len(polled) == 20


async def test_a_failing_handler_leaves_its_traceback_in_the_log(stand: Stand, caplog: pytest.LogCaptureFixture):
    app = App()

    @app.job("t", max_attempts=1)
    async def handler(ctx: Context, n: int) -> float:
        return 1 / n

    job = await stand.submit("t", 0)
    with caplog.at_level("WARNING", logger="trellis.worker"):
        await stand.run_until_idle(app)
    (record,) = [one for one in caplog.records if "attempt_failed" in one.message]
    assert job.id in record.message
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_a_handler_that_cancels_its_own_task_costs_no_later_job_its_runner(stand: Stand):
    app, ran = App(), list[int]()

    @app.job("work")
    async def work(ctx: Context, n: int) -> None:
        ran.append(n)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # no await follows, so the runner gets it when it rests

    async with stand.running(app, concurrency=2):
        for n in range(3):
            job = await stand.submit("work", n)
            await stand.in_state(job, "succeeded", step_s=0.2)
    assert ran == [0, 1, 2]


async def test_a_slice_that_is_over_wakes_one_runner_and_not_all_of_them(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    app, looks, jobs = App(), 0, 60

    @app.job("work")
    async def work(ctx: Context) -> None:
        stand.clock.advance(SLICE_S)

    def counted(runners: Runners, now: float) -> bool:
        nonlocal looks
        looks += 1
        return is_over(runners, now)

    is_over = Runners._slice_is_over
    monkeypatch.setattr(Runners, "_slice_is_over", counted)
    await stand.trellis.submit_many("work", [None] * jobs)
    await stand.run_until_idle(app, concurrency=30)
    assert jobs <= looks <= 4 * jobs, "each of the 30 runners looked in each slice"
