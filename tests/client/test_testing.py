"""What applications test themselves with."""

import asyncio

import pytest

from trellis import App, Context, JobDeadLettered, RetryPolicy, Snooze, TransientError
from trellis.testing import FakeClock, sandbox

app = App()


@app.job("flaky", max_attempts=3, retry=RetryPolicy(base_s=30, jitter=0))
async def flaky(ctx: Context, succeeds_at: int) -> int:
    if ctx.attempt < succeeds_at:
        raise TransientError("not yet")
    return ctx.attempt


@app.job("patient")
async def patient(ctx: Context) -> None:
    if ctx.last_checkpoint is None:
        await ctx.checkpoint("waited")
        raise Snooze(3600)


async def test_a_backoff_is_over_when_the_test_says_so():
    async with sandbox(app) as box:
        job = await box.submit("flaky", 2)
        await box.run_until_idle()
        await box.advance(29)
        await box.run_until_idle()
        assert (await job.status()).state == "queued"
        await box.advance(1)
        await box.run_until_idle()
        await box.assert_events(
            job,
            [
                "job_queued",
                "job_claimed",
                "job_started",
                "job_retry_scheduled",
                "job_claimed",
                "job_started",
                "job_succeeded",
            ],
        )


async def test_run_goes_through_every_wait_and_returns_the_result_or_raises():
    async with sandbox(app) as box:
        began = box.clock()
        assert await box.run("flaky", 3) == 3
        assert box.clock() - began == pytest.approx(90)
        await box.run("patient")
        with pytest.raises(JobDeadLettered, match="not yet"):
            await box.run("flaky", 4)


async def test_assert_events_shows_what_differs():
    async with sandbox(app) as box:
        job = await box.submit("flaky", 1)
        with pytest.raises(AssertionError, match="job_queued"):
            await box.assert_events(job, ["job_queued", "job_claimed"])


async def test_a_fake_clock_wakes_sleepers_in_order_and_not_too_early():
    clock, woken = FakeClock(0.0), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    tasks = [asyncio.ensure_future(sleeper(seconds)) for seconds in (3, 1, 2)]
    await asyncio.sleep(0)
    clock.advance(2)
    await asyncio.gather(*tasks[1:])
    assert woken == [1, 2]
    clock.advance(1)
    await tasks[0]
