"""Error hooks: called for every failed attempt and for nothing else, without any effect on the outcome."""

import asyncio
from typing import Any

import pytest

from tests.worker.conftest import Stand
from trellis import App, Context, PermanentError, Snooze, SyncContext, TransientError
from trellis.testing import sandbox
from trellis.worker import handlers
from trellis.worker.options import WorkerOptions


async def test_every_failed_attempt_is_reported_with_its_context_and_error():
    app, reports = App(), list[tuple[int, str]]()

    @app.on_error
    async def report(ctx: Context, error: BaseException) -> None:
        reports.append((ctx.attempt, str(error)))

    @app.job("t", max_attempts=3)
    async def handler(ctx: Context) -> str:
        if ctx.attempt < 3:
            raise TransientError(f"attempt {ctx.attempt}")
        return "done"

    async with sandbox(app) as box:
        assert await box.run("t") == "done"
    assert reports == [(1, "attempt 1"), (2, "attempt 2")]


async def test_a_hook_that_fails_or_hangs_is_logged_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(handlers, "ERROR_HOOK_S_MAX", 0.05)
    app, reports = App(), list[str]()

    @app.on_error
    def broken(ctx: SyncContext, error: BaseException) -> None:
        raise RuntimeError("the tracker is down")

    @app.on_error
    async def hangs(ctx: Context, error: BaseException) -> None:
        await asyncio.Event().wait()

    @app.on_error
    async def works(ctx: Context, error: BaseException) -> None:
        ctx.logger.info("reported")
        reports.append(str(error))

    @app.job("t")
    def handler(ctx: SyncContext) -> None:
        raise PermanentError("broken for good")

    async with sandbox(app) as box:
        job = await box.submit("t")
        await box.run_until_idle()
        assert (await job.status()).state == "failed"
        assert reports == ["broken for good"]
        lines = [one.data or b"" for one in await box.ledger.signals(job.id, limit=10)]
        assert any(b"reported" in line for line in lines)
    assert [record.message.split()[0] for record in caplog.records if "error_hook_failed" in record.message] == [
        "error_hook_failed"
    ] * 2


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, SystemExit, KeyboardInterrupt])
async def test_a_hook_that_raises_what_means_something_to_the_loop_changes_nothing(
    kind: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
):
    app, reports = App(), list[str]()

    async def waits(ctx: Context, problem: BaseException) -> None:
        raise error

    def blocks(ctx: SyncContext, problem: BaseException) -> None:
        raise error

    app.on_error(waits if kind == "async" else blocks)

    @app.on_error
    async def works(ctx: Context, problem: BaseException) -> None:
        reports.append(str(problem))

    @app.job("t")
    async def handler(ctx: Context) -> None:
        raise PermanentError("broken for good")

    async with sandbox(app) as box:
        job = await box.submit("t")
        await box.run_until_idle()
        assert (await job.status()).state == "failed"
    assert reports == ["broken for good"]
    assert "error_hook_failed" in caplog.text


async def test_a_hook_that_cancels_its_own_task_leaves_no_job_behind():
    app = App()

    @app.on_error
    async def report(ctx: Context, error: BaseException) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        raise PermanentError("broken for good")

    async with sandbox(app) as box:
        jobs = [await box.submit("t") for _ in range(3)]
        await box.run_until_idle(options=WorkerOptions(concurrency=1))
        assert [(await job.status()).state for job in jobs] == ["failed"] * 3


async def test_a_timeout_and_a_result_that_cannot_be_stored_are_failed_attempts(stand: Stand):
    app, reports = App(), dict[str, str]()

    @app.on_error
    async def report(ctx: Context, error: BaseException) -> None:
        reports[ctx.type] = str(error)

    @app.job("slow", timeout_s=1)
    async def slow(ctx: Context) -> None:
        await asyncio.Event().wait()

    @app.job("large")
    async def large(ctx: Context) -> str:
        return "x" * 2_000_000

    jobs = [await stand.submit(one, max_attempts=1) for one in ("slow", "large")]
    async with stand.running(app):
        for job in jobs:
            await stand.in_state(job, "dead_lettered", step_s=0.1)
    assert reports["slow"] == "no end after 1 s (timeout_s)"
    assert "PayloadTooLarge" in reports["large"]


async def test_a_snooze_and_a_cancelled_job_are_no_failures(stand: Stand):
    app, reports = App(), list[Any]()

    @app.on_error
    async def report(ctx: Context, error: BaseException) -> None:
        reports.append(error)

    @app.job("snoozes")
    async def snoozes(ctx: Context) -> None:
        raise Snooze(3600)

    @app.job("waits", heartbeat_s=10)
    async def waits(ctx: Context) -> None:
        await ctx.cancel_requested()
        raise RuntimeError("stopped")

    await stand.submit("snoozes")
    job = await stand.submit("waits")
    async with stand.running(app):
        await stand.in_state(job, "running", step_s=0.1)
        await job.cancel()
        await stand.in_state(job, "cancelled", step_s=0.5)
    assert reports == []
