"""A workflow survives the death of its worker at every write: the result is the same, and no child is lost or doubled."""

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest

from trellis.engine.jobs import JobId
from trellis.engine.verify import verify
from trellis.testing import Sandbox, sandbox
from trellis.worker.app import App
from trellis.worker.context import Context, SyncContext


def shop(effects: Counter[str], *, sync: bool) -> App:
    """Steps, children with join, a sleep and a signal in one workflow."""
    app = App()

    @app.job("part", lease_s=30)
    async def part(ctx: Context, n: int) -> int:
        effects[f"part {n}"] += 1
        return n * n

    def pay() -> str:
        effects["pay"] += 1
        return f"paid {effects['pay']}"

    if sync:

        @app.job("order", lease_s=30)
        def order_in_thread(ctx: SyncContext) -> list[Any]:
            paid = ctx.step("pay", pay)
            squares = ctx.gather(*(ctx.spawn("part", n) for n in range(3)))
            ctx.sleep(3600)
            return [paid.split()[0], squares, ctx.wait_signal("go"), ctx.step("ship", lambda: "shipped")]
    else:

        @app.job("order", lease_s=30)
        async def order(ctx: Context) -> list[Any]:
            paid = await ctx.step("pay", pay)
            squares = await ctx.gather(*(ctx.spawn("part", n) for n in range(3)))
            await ctx.sleep(3600)
            return [paid.split()[0], squares, await ctx.wait_signal("go"), await ctx.step("ship", lambda: "shipped")]

    return app


async def order_once(box: Sandbox) -> tuple[list[Any], JobId]:
    job = await box.submit("order")
    await box.signal(job, "go", "now")
    await box.run_until_idle(skip_waits=True)
    return await job.result(timeout_s=0), job.id


async def check(box: Sandbox, effects: Counter[str], job_id: JobId, *, deaths: int) -> None:
    children = await box.ledger.children(job_id, since=None, limit=100)
    assert len(children.job_ids) == 3, "no child is lost or doubled"
    journal = await box.ledger.read_journal(job_id)
    steps = [name for name in journal if ":step:" in name]
    assert len(steps) == 2, "one entry for each step"
    assert all(count <= 1 + deaths for count in effects.values()), "only an effect that was not journaled is repeated"
    report = await verify(box.ledger)
    assert report.ok, report.violations[:5]


@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
async def test_a_workflow_survives_a_death_at_each_of_its_writes(sync: bool, committed: bool):
    deaths = 0
    for write in itertools.count(1):
        effects: Counter[str] = Counter()
        async with sandbox(shop(effects, sync=sync)) as box:
            box.crash_at(write, committed=committed)
            result, job_id = await order_once(box)
            assert result == ["paid", [0, 1, 4], "now", "shipped"], write
            await check(box, effects, job_id, deaths=1)
            if not box.crashed:
                break
            deaths += 1
    assert deaths >= 11, "the worker wrote to the ledger at more places than these"


async def test_a_sandbox_without_a_crash_runs_as_before():
    effects: Counter[str] = Counter()
    async with sandbox(shop(effects, sync=False)) as box:
        result, job_id = await order_once(box)
        assert (result, set(effects.values())) == (["paid", [0, 1, 4], "now", "shipped"], {1})
        await check(box, effects, job_id, deaths=0)
        assert not box.crashed
        await asyncio.sleep(0)
