"""Middleware around handlers: their order, what they see, and how they change the outcome of an attempt."""

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from tests.worker.conftest import Stand
from trellis import App, CallNext, Context, Item, JobFailed, OptionInvalid, PermanentError, Snooze, SyncContext
from trellis.testing import sandbox
from trellis.worker.app import HOOKS_MAX

TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


async def test_middleware_run_in_order_of_registration_and_see_the_result():
    app, seen = App(), list[str]()

    @app.middleware
    async def outer(ctx: Context, call_next: CallNext) -> Any:
        seen.append(f"outer before {ctx.type}")
        result = await call_next()
        seen.append(f"outer after {result}")
        return result

    @app.middleware
    async def inner(ctx: Context, call_next: CallNext) -> Any:
        seen.append("inner before")
        return await call_next()

    @app.job("double")
    async def double(ctx: Context, n: int) -> int:
        return 2 * n

    async with sandbox(app) as box:
        assert await box.run("double", 21) == 42
    assert seen == ["outer before double", "inner before", "outer after 42"]


async def test_a_middleware_that_returns_nothing_keeps_the_result_and_one_that_returns_a_value_replaces_it():
    app = App()

    @app.middleware
    async def plus_one(ctx: Context, call_next: CallNext) -> int:
        return await call_next() + 1

    @app.middleware
    async def silent(ctx: Context, call_next: CallNext) -> None:
        await call_next()

    @app.job("n")
    def number(ctx: SyncContext) -> int:
        return 5

    async with sandbox(app) as box:
        assert await box.run("n") == 6


async def test_a_context_variable_of_a_middleware_reaches_a_handler_on_a_thread():
    app = App()

    @app.middleware
    async def tenant(ctx: Context, call_next: CallNext) -> Any:
        TENANT.set("garden")
        return await call_next()

    @app.job("whose")
    def whose(ctx: SyncContext) -> str:
        return TENANT.get()

    async with sandbox(app) as box:
        assert await box.run("whose") == "garden"
    assert TENANT.get() == "nobody"


async def test_what_a_middleware_raises_is_the_outcome_of_the_attempt():
    app, calls = App(), list[str]()

    @app.middleware
    async def gate(ctx: Context, call_next: CallNext) -> Any:
        calls.append(ctx.type)
        if ctx.type == "later" and len(calls) == 1:
            raise Snooze(30)
        if ctx.type == "never":
            raise PermanentError("closed for good")
        return await call_next()

    @app.job("later")
    async def later(ctx: Context) -> str:
        return "done"

    @app.job("never")
    async def never(ctx: Context) -> str:
        return "unreachable"

    async with sandbox(app) as box:
        job = await box.submit("later")
        await box.run_until_idle()
        assert (await job.status()).state == "queued"
        await box.advance(31)
        await box.run_until_idle()
        assert await job.result(timeout_s=0) == "done"
        with pytest.raises(JobFailed, match="closed for good"):
            await box.run("never")
    assert calls == ["later", "later", "never"]


async def test_middleware_of_a_batch_see_each_job_and_may_take_one_out():
    app, sizes, results = App(), list[int](), dict[int, Any]()

    @app.middleware
    async def gate(ctx: Context, call_next: CallNext) -> Any:
        if ctx.max_attempts == 1:
            raise PermanentError("not this one")
        results[len(results)] = await call_next()

    @app.job("sum", batch=10)
    async def handler(items: list[Item[int]]) -> None:
        sizes.append(len(items))
        for item in items:
            if item.payload == 3:
                item.fail(PermanentError("three"))
            else:
                item.done(item.payload * 10)

    async with sandbox(app) as box:
        jobs = [await box.submit("sum", n, max_attempts=1 if n == 2 else 2) for n in range(4)]
        await box.run_until_idle()
        assert [await jobs[n].result(timeout_s=0) for n in (0, 1)] == [0, 10]
        for n, why in ((2, "not this one"), (3, "three")):
            with pytest.raises(JobFailed, match=why):
                await jobs[n].result(timeout_s=0)
    assert sizes == [3]
    assert sorted(results.values()) == [0, 10]


async def test_an_error_of_a_whole_batch_reaches_every_middleware():
    app, errors = App(), list[str]()

    @app.middleware
    async def watch(ctx: Context, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except LookupError as error:
            errors.append(str(error))
            raise PermanentError("translated") from error

    @app.job("all", batch=10)
    async def handler(items: list[Item[int]]) -> None:
        raise LookupError("gone")

    async with sandbox(app) as box:
        jobs = [await box.submit("all", n) for n in range(3)]
        await box.run_until_idle()
        for job in jobs:
            with pytest.raises(JobFailed, match="translated"):
                await job.result(timeout_s=0)
    assert errors == ["gone"] * 3


async def test_a_handler_is_not_called_twice_in_one_attempt():
    app, calls = App(), list[int]()

    @app.middleware
    async def again(ctx: Context, call_next: CallNext) -> Any:
        await call_next()
        return await call_next()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        calls.append(ctx.attempt)

    async with sandbox(app) as box:
        with pytest.raises(JobFailed, match="again called call_next twice"):
            await box.run("t")
    assert calls == [1]


async def test_middleware_of_an_including_application_is_around_that_of_the_included_one():
    outer, inner, seen = App(), App(), list[str]()

    @outer.middleware
    async def first(ctx: Context, call_next: CallNext) -> Any:
        seen.append(f"first {ctx.type}")
        return await call_next()

    @inner.job("t.inner")
    async def handler(ctx: Context) -> None: ...

    @outer.job("t.outer")
    async def other(ctx: Context) -> None: ...

    outer.include(inner)

    @inner.middleware  # registered after it was included, and counts all the same
    async def second(ctx: Context, call_next: CallNext) -> Any:
        seen.append(f"second {ctx.type}")
        return await call_next()

    async with sandbox(outer) as box:
        await box.run("t.inner")
        await box.run("t.outer")
    assert seen == ["first t.inner", "second t.inner", "first t.outer"]


def test_a_function_that_cannot_be_a_middleware_is_refused_at_once():
    app = App()
    with pytest.raises(OptionInvalid, match=r"a middleware is `async def name\(ctx, call_next\)`"):
        app.middleware(lambda ctx, call_next: None)

    async def one(ctx: Context) -> None: ...

    with pytest.raises(OptionInvalid, match="a middleware is"):
        app.middleware(one)

    async def two(ctx: Context, call_next: CallNext) -> None: ...

    app.middleware(two)
    with pytest.raises(OptionInvalid, match="registered already"):
        app.middleware(two)


def test_the_number_of_middleware_is_bounded():
    app = App()

    def middleware() -> Any:
        async def one(ctx: Context, call_next: CallNext) -> None: ...

        return one

    for _ in range(HOOKS_MAX):
        app.middleware(middleware())
    with pytest.raises(OptionInvalid, match=f"at most {HOOKS_MAX}"):
        app.middleware(middleware())


@pytest.mark.parametrize("stand", [1], indirect=True, ids=["one-turn"])
async def test_a_handler_on_a_thread_is_told_of_its_timeout_and_not_left_behind_by_its_middleware(stand: Stand):
    app = App()

    @app.middleware
    async def around(ctx: Context, call_next: CallNext) -> Any:
        return await call_next()

    @app.job("t", timeout_s=1)
    def handler(ctx: SyncContext) -> str:
        while not ctx.cancelled:
            threading.Event().wait(0.01)
        return "stopped by itself"

    job = await stand.submit("t")
    async with stand.running(app):
        await stand.in_state(job, "succeeded", step_s=0.1)
    assert await job.result(timeout_s=0) == "stopped by itself"


@pytest.mark.parametrize("stand", [1], indirect=True, ids=["one-turn"])
async def test_a_timeout_counts_for_the_middleware_too(stand: Stand):
    app, ended = App(), list[str]()

    @app.middleware
    async def slow(ctx: Context, call_next: CallNext) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(ctx.job_id)

    @app.job("t", timeout_s=1)
    def handler(ctx: SyncContext) -> None: ...

    job = await stand.submit("t", max_attempts=1)
    async with stand.running(app):
        await stand.in_state(job, "dead_lettered", step_s=0.1)
    assert ended == [job.id]
