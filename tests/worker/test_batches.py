"""Batches under a worker: the completion job learns how each job of its batch has ended, and survives every crash."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from tests.worker.test_every_ledger import caller, ledger, url  # noqa: F401 - fixtures
from trellis.app.wiring import make_worker
from trellis.engine.errors import JobFailed, PermanentError
from trellis.engine.jobs import Actor, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.verify import verify
from trellis.lifecycles import Role
from trellis.testing import Sandbox, sandbox
from trellis.worker import durable
from trellis.worker.app import App
from trellis.worker.batches import ERROR_CHARS_OF_BATCH, short_outcome
from trellis.worker.context import Context, SyncContext
from trellis.worker.durable import MemberFailed
from trellis.worker.options import WorkerOptions
from trellis.worker.requests import BatchJob

ADMIN = Actor(role=Role.CONTROL_PLANE, name="test")


@dataclass(frozen=True)
class Page:
    """What a job of a batch returns."""

    number: int


class Shop:
    """Jobs of a batch, and a job that reports how they ended."""

    def __init__(self, *, sync: bool = False) -> None:
        self.app = App()
        self.effects: Counter[str] = Counter()
        self.broken = {-1}
        app = self.app

        @app.job("page", lease_s=30)
        async def page(ctx: Context, number: int) -> Page:
            self.effects[f"page {number}"] += 1
            if number in self.broken:
                raise PermanentError("x" * 2 * ERROR_CHARS_OF_BATCH)
            return Page(number)

        if sync:

            @app.job("report", lease_s=30)
            def report_in_thread(ctx: SyncContext, day: str) -> dict[str, Any]:
                batch = ctx.batch()
                ctx.step("send", lambda: self.effects.update(["report"]))
                return {"day": day, "counts": batch.counts, "results": _shown(ctx.batch_results())}
        else:

            @app.job("report", lease_s=30)
            async def report(ctx: Context, day: str) -> dict[str, Any]:
                batch = await ctx.batch()
                await ctx.step("send", lambda: self.effects.update(["report"]))
                return {"day": day, "counts": batch.counts, "results": _shown(await ctx.batch_results())}


def _shown(results: list[Any]) -> list[Any]:
    return [[one.state, one.error] if isinstance(one, MemberFailed) else one.number for one in results]


def pages(*numbers: int) -> list[BatchJob]:
    return [BatchJob("page", number) for number in numbers]


async def report_once(box: Sandbox, *numbers: int) -> Any:
    batch = await box.submit_batch(pages(*numbers), on_complete=BatchJob("report", "today"))
    await box.run_until_idle(skip_waits=True)
    return await batch.completion.result(timeout_s=0)


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
async def test_the_completion_job_learns_how_each_job_ended(sync: bool):
    shop = Shop(sync=sync)
    async with sandbox(shop.app) as box:
        answer = await report_once(box, 1, -1, 3)
    assert answer["counts"] == {"succeeded": 2, "failed": 1}
    first, (state, error), last = answer["results"]
    assert (first, state, last) == (1, "failed", 3)
    assert error.startswith("PermanentError: xxx")


def test_a_long_error_of_a_job_is_shortened():
    long = short_outcome({"failed": "dead_lettered", "error": "x" * 2 * ERROR_CHARS_OF_BATCH})
    assert long == {"failed": "dead_lettered", "error": "x" * ERROR_CHARS_OF_BATCH}
    assert short_outcome({"ok": "a result"}) == {"ok": None}


async def test_an_empty_batch_is_reported_at_once():
    shop = Shop()
    async with sandbox(shop.app) as box:
        assert await report_once(box) == {"day": "today", "counts": {}, "results": []}


async def test_the_types_and_settings_of_jobs_may_differ():
    shop = Shop()

    @shop.app.job("other")
    async def other(ctx: Context) -> str:
        return "typed"

    @shop.app.job("all")
    async def every(ctx: Context) -> list[str]:
        batch = await ctx.batch()
        assert batch.all_succeeded
        return [one.type for one in batch.jobs] + [repr(one) for one in await ctx.batch_results(1, 3)]

    async with sandbox(shop.app) as box:
        jobs = [BatchJob("page", 1, priority="critical"), BatchJob("other"), BatchJob("page", 2, delay_s=60)]
        batch = await box.submit_batch(jobs, on_complete=BatchJob("all", idempotency_key="once"))
        again = await box.submit_batch(jobs, on_complete=BatchJob("all", idempotency_key="once"))
        assert [one.id for one in again.jobs] == [one.id for one in batch.jobs]
        assert (batch.created, again.created) == (True, False)
        correlations = {(await one.status()).correlation_id for one in (batch.completion, *batch.jobs)}
        assert correlations == {batch.completion.id}
        await box.run_until_idle(skip_waits=True)
        assert await batch.completion.result(timeout_s=0) == ["page", "other", "page", "'typed'", "Page(number=2)"]


async def test_a_batch_is_repaired_by_requeues_of_the_dead_job_and_the_completion_job():
    shop = Shop()

    @shop.app.job("strict")
    async def strict(ctx: Context) -> int:
        shop.effects["strict"] += 1
        batch = await ctx.batch()
        if batch.failed:
            raise PermanentError(f"{len(batch.failed)} failed")
        return len(batch.jobs)

    async with sandbox(shop.app) as box:
        batch = await box.submit_batch(pages(1, -1), on_complete=BatchJob("strict"))
        await box.run_until_idle(skip_waits=True)
        with pytest.raises(JobFailed, match="1 failed"):
            await batch.completion.result(timeout_s=0)
        shop.broken.clear()
        both = [batch.jobs[1].id, batch.completion.id]
        await box.ledger.requeue(ADMIN, both, RequestId("again"), limit=2, cause=None)
        await box.run_until_idle(skip_waits=True)
        assert await batch.completion.result(timeout_s=0) == 2
        assert shop.effects["page 1"] == 1


async def test_a_handler_that_completes_no_batch_is_told_so():
    shop = Shop()

    @shop.app.job("hasty", max_attempts=1)
    async def hasty(ctx: Context) -> None:
        await ctx.batch_results()

    async with sandbox(shop.app) as box:
        alone = await box.submit("report", "today")
        early = await box.submit_batch(pages(1), on_complete=BatchJob("hasty"))
        await box.run_until_idle(skip_waits=True)
        with pytest.raises(JobFailed, match="completes no batch"):
            await alone.result(timeout_s=0)
        with pytest.raises(JobFailed, match=r"ctx.batch\(\)"):
            await early.completion.result(timeout_s=0)


async def test_more_results_than_fit_are_read_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(durable, "RESULTS_BYTES_MAX", 20)
    monkeypatch.setattr(durable, "RESULTS_READ", 2)
    shop = Shop()

    @shop.app.job("parts")
    async def parts(ctx: Context) -> list[int]:
        total = len((await ctx.batch()).jobs)
        return [one.number for start in range(total) for one in await ctx.batch_results(start, start + 1)]

    async with sandbox(shop.app) as box:
        whole = await box.submit_batch(pages(1, 2, 3), on_complete=BatchJob("report", "today"))
        part = await box.submit_batch(pages(1, 2, 3), on_complete=BatchJob("parts"))
        await box.run_until_idle(skip_waits=True)
        with pytest.raises(JobFailed, match="in parts"):
            await whole.completion.result(timeout_s=0)
        assert await part.completion.result(timeout_s=0) == [1, 2, 3]


@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
async def test_a_batch_survives_a_death_at_each_of_its_writes(committed: bool):
    deaths = 0
    for write in itertools.count(1):
        shop = Shop()
        async with sandbox(shop.app) as box:
            box.crash_at(write, committed=committed)
            answer = await report_once(box, 1, 2)
            assert (answer["counts"], answer["results"]) == ({"succeeded": 2}, [1, 2]), write
            assert all(count <= 2 for count in shop.effects.values())
            report = await verify(box.ledger)
            assert report.ok, report.violations[:5]
            if not box.crashed:
                break
            deaths += 1
    assert deaths >= 4, "the worker wrote to the ledger at more places than these"


async def test_a_batch_of_thousands_completes_under_a_real_worker(ledger: Ledger):  # noqa: F811 - the fixture
    shop = Shop()
    trellis = caller(ledger, shop.app)
    batch = await trellis.submit_batch(pages(*range(2_000)), on_complete=BatchJob("report", "today"))
    async with make_worker(shop.app, ledger, WorkerOptions(name="w", concurrency=100)):
        answer = await batch.completion.result(timeout_s=60)
    assert answer["results"] == list(range(2_000))
    assert (len(shop.effects), set(shop.effects.values())) == (2_001, {1})
