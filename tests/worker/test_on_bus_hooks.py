"""Middleware, resources, error hooks and processes of a worker on the bus: as on a ledger."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.on_bus_rig import TOPIC, Rig
from tests.worker.process_jobs import spin
from tests.worker.test_processes import lives
from trellis import App, CallNext, Context, Item, ResourceFailed, Snooze, SyncContext
from trellis.bus.messages import Status


class Database:
    url = "books"


def shop(journal: list[str]) -> App:
    app = App()

    @app.resource
    async def database() -> AsyncIterator[Database]:
        journal.append("opened")
        yield Database()
        journal.append("closed")

    @app.middleware
    async def noted(ctx: Context, call_next: CallNext) -> Any:
        journal.append(f"before {ctx.type}")
        result = await call_next()
        journal.append(f"after {result}")
        return result

    @app.on_error
    def report(ctx: SyncContext, error: BaseException) -> None:
        journal.append(f"{type(error).__name__} of attempt {ctx.attempt}")

    return app


async def test_handlers_on_the_bus_have_middleware_and_resources():
    rig, journal = Rig(), list[str]()
    app = shop(journal)

    @app.job("job.async")
    async def on_the_loop(ctx: Context, n: int, database: Database) -> str:
        return f"{database.url} {n}"

    @app.job("job.sync")
    def on_a_thread(ctx: SyncContext, n: int, database: Database) -> str:
        return f"{database.url} {n}"

    @app.job("job.batch", batch=5)
    async def in_a_batch(items: list[Item[int]], database: Database) -> None:
        for item in items:
            item.done(f"{database.url} {item.payload}")

    async with rig.serving(app):
        for topic in ("job.async", "job.sync", "job.batch"):
            order = await rig.control.dispatch(topic=topic, context_ptr=rig.kept.put(7))
            result = await rig.result(order)
            assert result.status is Status.SUCCEEDED
            assert rig.kept.value(result.result_ptr) == "books 7"
    around = [[f"before {topic}", "after books 7"] for topic in ("job.async", "job.sync", "job.batch")]
    assert journal == ["opened", *(line for lines in around for line in lines), "closed"]


async def test_failed_attempts_on_the_bus_are_reported_and_snoozes_are_not():
    rig, journal = Rig(), list[str]()
    app = shop(journal)

    @app.job(TOPIC)
    async def handler(ctx: Context, how: str) -> None:
        raise (Snooze(1) if how == "snooze" else LookupError("gone"))

    async with rig.serving(app):
        for how in ("snooze", "fail"):
            await rig.result(await rig.control.dispatch(context_ptr=rig.kept.put(how)))
    assert [line for line in journal if "attempt" in line] == ["LookupError of attempt 1"]


async def test_a_resource_that_fails_stops_a_worker_on_the_bus_before_it_listens():
    rig, app = Rig(), App()

    @app.resource
    async def database() -> AsyncIterator[Database]:
        raise ConnectionError("refused")
        yield Database()

    @app.job(TOPIC)
    async def handler(ctx: Context) -> None: ...

    worker = rig.worker(app)
    with pytest.raises(ResourceFailed, match="refused"):
        await worker.start()
    await worker.drain()
    assert rig.control.handshakes == []


async def test_a_timeout_ends_the_process_of_an_order(tmp_path: Path):
    rig, app, file = Rig(), App(), tmp_path / "process-id"
    app.job(TOPIC, runner="process", timeout_s=5)(spin)
    async with rig.serving(app):
        order = await rig.control.dispatch(context_ptr=rig.kept.put({"file": str(file)}))
        await rig.until(lambda: file.exists() and file.read_text() != "")
        assert lives(file)
        await rig.pass_time(6)
        result = await rig.result(order)
    assert (result.status, result.error_code) == (Status.FAILED_RETRYABLE, "TIMEOUT")
    assert not lives(file)
