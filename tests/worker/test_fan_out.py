"""Workflows under a real worker on every ledger: parents do not take the slots that their children need."""

import asyncio
from collections import Counter

import pytest

from tests.worker.test_every_ledger import caller, ledger, url  # noqa: F401 - fixtures
from trellis.app.wiring import make_worker
from trellis.engine.ledger import Ledger
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.options import WorkerOptions

PATIENCE_S = 60.0


def families(*, children: int) -> tuple[App, Counter[int]]:
    app, effects = App(), Counter[int]()

    @app.job("child")
    async def child(ctx: Context, number: int) -> int:
        effects[number] += 1
        return number

    @app.job("parent")
    async def parent(ctx: Context, first: int) -> int:
        return sum(await ctx.gather(*(ctx.spawn("child", first + n) for n in range(children))))

    return app, effects


@pytest.mark.parametrize(
    "parents, children", [(3, 2), (1, 1_000)], ids=["more-parents-than-slots", "a-thousand-children"]
)
async def test_parents_with_two_slots_finish(ledger: Ledger, parents: int, children: int):  # noqa: F811 - the fixture
    app, effects = families(children=children)
    trellis = caller(ledger, app)
    handles = [await trellis.submit("parent", 10_000 * n) for n in range(parents)]
    async with make_worker(app, ledger, WorkerOptions(name="w", concurrency=2)):
        results = await asyncio.wait_for(asyncio.gather(*(one.result() for one in handles)), PATIENCE_S)
    assert results == [sum(range(10_000 * n, 10_000 * n + children)) for n in range(parents)]
    assert (len(effects), set(effects.values())) == (parents * children, {1})
