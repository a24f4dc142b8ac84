"""Rate limits per key as callers of Python see them: declared with a type, held for every submit, refused if they do not fit."""

from typing import Any

import pytest

from trellis.engine.errors import ConcurrencyKeyMissing, OptionInvalid
from trellis.engine.key_rates import KeyRate
from trellis.engine.records import JobFilter, JobPlace
from trellis.testing import Sandbox, sandbox
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.options import KEY_LIMIT_MAX


def crm(**options: Any) -> App:
    app = App()
    settings: dict[str, Any] = {"concurrency_key": lambda push: push["customer"], **options}

    @app.job("crm.push", **settings)
    async def push(ctx: Context, push: dict[str, str]) -> str:
        return push["customer"]

    @app.job("crm.push_all")
    async def push_all(ctx: Context, customers: list[str]) -> list[str]:
        handles = [ctx.spawn("crm.push", {"customer": customer}) for customer in customers]
        return await ctx.gather(*handles)

    return app


async def ended(box: Sandbox) -> int:
    page = await box.ledger.jobs(JobFilter(), limit=100)
    return sum(job.place is JobPlace.ENDED for job in page.jobs)


async def test_each_key_has_its_rate():
    async with sandbox(crm(rate_per_key=1.0, burst_per_key=2)) as box:
        for _ in range(5):
            await box.submit("crm.push", {"customer": "acme"})
        await box.submit("crm.push", {"customer": "other"})
        await box.run_until_idle()
        assert await ended(box) == 3
        await box.advance(1.0)
        await box.run_until_idle()
        assert await ended(box) == 4
        await box.run_until_idle(skip_waits=True)
        assert await ended(box) == 6


async def test_children_of_a_durable_function_keep_to_the_rate_and_all_end():
    async with sandbox(crm(rate_per_key=0.5)) as box:
        assert await box.run("crm.push_all", ["acme"] * 4) == ["acme"] * 4


async def test_a_key_that_a_submit_gives_has_the_rate_too():
    async with sandbox(crm(rate_per_key=1.0, concurrency_key=None)) as box:
        await box.submit("crm.push", {"customer": "acme"}, concurrency_key="acme")
        await box.run_until_idle()
        with pytest.raises(ConcurrencyKeyMissing, match=r"crm\.push"):
            await box.submit("crm.push", {"customer": "acme"})


def test_a_rate_without_a_limit_of_held_jobs_sets_the_highest_limit_and_a_burst_of_a_second():
    app = crm(rate_per_key=2.5)
    declared = app.spec("crm.push").declared
    assert (declared.concurrency_limit, declared.key_rate) == (KEY_LIMIT_MAX, KeyRate(per_second=2.5, burst=3))
    assert crm(rate_per_key=0.1, concurrency_limit=4).spec("crm.push").declared.concurrency_limit == 4
    assert crm(rate_per_key=0.1).spec("crm.push").options.key_rate == KeyRate(per_second=0.1, burst=1)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"rate_per_key": 0.0}, "rate_per_key.*from 1e-06 to 100000"),
        ({"rate_per_key": float("inf")}, "rate_per_key"),
        ({"rate_per_key": 1.0, "burst_per_key": 0}, "burst_per_key.*from 1 to 10000"),
        ({"burst_per_key": 3}, "burst_per_key.*give rate_per_key too"),
        ({"rate_pr_key": 3}, "did you mean rate_per_key"),
    ],
)
def test_rates_that_do_not_fit_are_refused_where_they_are_declared(options: dict[str, Any], words: str):
    with pytest.raises(OptionInvalid, match=words):
        crm(**options)
