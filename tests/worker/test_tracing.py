"""A handler in the trace of whoever submitted its job (OBS-6)."""

import pytest
from opentelemetry.trace import StatusCode

from tests.spans import TRACE, TRACE_ID, id_of, parent_of, recorded, span_id
from tests.worker.conftest import Stand
from trellis.engine import tracing
from trellis.engine.errors import PermanentError
from trellis.worker.app import App
from trellis.worker.context import Context, Item, SyncContext
from trellis.worker.outcomes import Snooze

pytestmark = pytest.mark.requirement("OBS-6")


async def test_a_handler_and_the_jobs_it_submits_are_in_the_submitters_trace(stand: Stand):
    app, seen = App(), list[str | None]()

    @app.job("parent")
    async def parent(ctx: Context) -> str:
        seen.append(tracing.here())
        return await ctx.submit("child")

    @app.job("child")
    def child(ctx: SyncContext) -> None:  # on a thread
        seen.append(tracing.here())
        ctx.submit("grandchild")

    @app.job("grandchild")
    async def grandchild(ctx: Context) -> None:
        pass

    with recorded() as spans:
        with tracing.carried(TRACE, "caller"):
            job = await stand.submit("parent", correlation_id="order-7")
        await stand.run_until_idle(app)
        submit, first, second, third = (
            spans.named(name)
            for name in ("job.submit", *(f"job.handle {type_}" for type_ in ("parent", "child", "grandchild")))
        )
    assert {id_of(span) for span in (submit, first, second, third)} == {TRACE_ID}
    assert [parent_of(span) for span in (first, second, third)] == [span_id(one) for one in (submit, first, second)]
    assert [(text or "").split("-")[2] for text in seen] == [span_id(first), span_id(second)]
    told = dict(first.attributes or {})
    assert (told["trellis.job_id"], told["trellis.correlation_id"]) == (job.id, "order-7")
    assert tracing.trace_id((await job.status()).trace) == TRACE_ID


async def test_without_an_sdk_jobs_hand_the_trace_on(stand: Stand):
    app, seen = App(), list[str | None]()

    @app.job("parent")
    async def parent(ctx: Context) -> str:
        seen.append(tracing.here())
        return await ctx.submit("child")

    @app.job("child")
    async def child(ctx: Context) -> None:
        seen.extend((ctx.trace, tracing.here()))

    @app.job("other")
    async def other(ctx: Context) -> None:
        seen.extend((ctx.trace, tracing.here()))

    with tracing.carried(TRACE, "caller"):
        await stand.submit("parent")
    await stand.submit("other")
    await stand.run_until_idle(app)
    assert sorted(map(str, seen)) == sorted([TRACE, TRACE, TRACE, "None", "None"])


async def test_a_span_records_a_failure_and_a_snooze_is_no_failure(stand: Stand):
    app = App()

    @app.job("broken")
    async def broken(ctx: Context) -> None:
        raise PermanentError("no more")

    @app.job("sleepy")
    async def sleepy(ctx: Context) -> None:
        raise Snooze(60.0)

    with recorded() as spans:
        for type_ in ("broken", "sleepy"):
            await stand.submit(type_)
        await stand.run_until_idle(app)
        failed, put_off = spans.named("job.handle broken"), spans.named("job.handle sleepy")
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "PermanentError: no more")
    assert (put_off.status.status_code, (put_off.attributes or {})["trellis.outcome"]) == (StatusCode.UNSET, "Snooze")


async def test_a_batch_is_one_span_that_is_linked_to_the_others(stand: Stand):
    app = App()

    @app.job("many", batch=3)
    async def many(items: list[Item[int]]) -> None:
        pass

    with recorded() as spans:
        for n in range(3):
            with tracing.span("caller"):
                await stand.submit("many", n)
        await stand.run_until_idle(app)
        handled = spans.named("job.handle many")
        callers = {id_of(span) for span in spans.all() if span.name == "caller"}
    linked = {f"{link.context.trace_id:032x}" for link in handled.links}
    assert (linked | {id_of(handled)}, (handled.attributes or {})["trellis.jobs"]) == (callers, 3)
