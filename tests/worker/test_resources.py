"""Resources of an application: opened before the first claim, injected by annotation, closed in reverse order."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, NewType, Self

import pytest

from tests.worker.conftest import Stand
from trellis import App, CallNext, Context, Item, OptionInvalid, ResourceFailed, SyncContext
from trellis.testing import sandbox
from trellis.worker import resources

Journal = list[str]


class Settings:
    url = "books"


class Database:
    def __init__(self, url: str) -> None:
        self.url = url


class Cache:
    """A resource that is a context manager itself."""

    def __init__(self, database: Database) -> None:
        self.name = f"cache of {database.url}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


Replica = NewType("Replica", Database)


def shop(journal: Journal) -> App:
    """An application whose resources note when they are opened and closed."""
    app = App()

    @app.resource
    async def database(settings: Settings) -> AsyncIterator[Database]:
        journal.append("database opened")
        yield Database(settings.url)
        journal.append("database closed")

    @app.resource
    def settings() -> Iterator[Settings]:
        journal.append(f"settings opened on the main thread: {threading.current_thread() is threading.main_thread()}")
        yield Settings()
        journal.append("settings closed")

    return app


async def test_resources_are_injected_by_annotation_and_closed_in_reverse_order(stand: Stand):
    journal = Journal()
    app = shop(journal)
    app.resource(Cache)

    @app.job("t")
    async def handler(ctx: Context, cache: Cache, n: int, *, database: Database) -> str:
        journal.append("handler")
        return f"{database.url} {n}, {cache.name}"

    job = await stand.submit("t", 7)
    await stand.run_until_idle(app)
    assert await job.result(timeout_s=0) == "books 7, cache of books"
    assert journal == [
        "settings opened on the main thread: False",
        "database opened",
        "handler",
        "database closed",
        "settings closed",
    ]


async def test_sync_and_batch_handlers_middleware_and_error_hooks_get_resources_too():
    journal = Journal()
    app = shop(journal)

    @app.middleware
    async def noted(ctx: Context, call_next: CallNext, database: Database) -> Any:
        journal.append(f"middleware {database.url}")
        return await call_next()

    @app.on_error
    def reported(ctx: SyncContext, error: Exception, database: Database) -> None:
        journal.append(f"hook {database.url} {error}")

    @app.job("sync", max_attempts=1)
    def sync(ctx: SyncContext, database: Database) -> str:
        raise LookupError(f"{database.url} is closed")

    @app.job("batch", batch=5)
    async def batch(items: list[Item[int]], database: Database) -> None:
        for item in items:
            item.done(f"{database.url} {item.payload}")

    async with sandbox(app) as box:
        await box.submit("sync")
        await box.run_until_idle()
        assert await box.run("batch", 4) == "books 4"
    assert "hook books books is closed" in journal
    assert journal.count("middleware books") == 2


async def test_a_resource_may_be_any_context_manager_and_types_tell_two_of_a_kind_apart():
    app = App()

    @app.resource
    @asynccontextmanager
    async def main() -> AsyncIterator[Database]:
        yield Database("main")

    @app.resource
    def replica() -> AbstractContextManager[Replica]:
        @contextmanager
        def opened() -> Iterator[Replica]:
            yield Replica(Database("replica"))

        return opened()

    @app.job("t")
    async def handler(ctx: Context, database: Database, replica: Replica) -> list[str]:
        return [database.url, replica.url]

    async with sandbox(app) as box:
        assert await box.run("t") == ["main", "replica"]


async def test_a_resource_that_fails_stops_the_start_before_anything_is_claimed(stand: Stand):
    journal = Journal()
    app = shop(journal)

    @app.resource
    async def broken(database: Database) -> AsyncIterator[Cache]:
        raise ConnectionError("no route to redis://:hunter2@cache")
        yield Cache(database)

    @app.job("t")
    async def handler(ctx: Context) -> None: ...

    job = await stand.submit("t")
    worker = stand.worker(app)
    with pytest.raises(ResourceFailed, match=r"broken' \(Cache\) could not be opened.*no route") as caught:
        await worker.start()
    assert "hunter2" not in str(caught.value)
    assert journal[-2:] == ["database closed", "settings closed"]
    assert await stand.events(job) == ["job_queued"]
    await worker.drain()


async def test_a_resource_that_never_opens_or_closes_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    monkeypatch.setattr(resources, "OPEN_S_MAX", 0.05)
    monkeypatch.setattr(resources, "CLOSE_S_MAX", 0.05)
    app, closed = App(), list[str]()

    @app.resource
    async def slow_to_close() -> AsyncIterator[Settings]:
        yield Settings()
        await asyncio.Event().wait()

    @app.resource
    async def never(settings: Settings) -> AsyncIterator[Database]:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("never")
        yield Database("x")

    @app.job("t")
    async def handler(ctx: Context) -> None: ...

    async with sandbox(app) as box:
        with pytest.raises(ResourceFailed, match=r"it took longer than 0.05 s"):
            await box.run("t")
    assert closed == ["never"]
    assert "resource_not_closed" in caplog.text


async def test_a_test_may_replace_a_resource(stand: Stand):
    journal = Journal()
    app = shop(journal)

    @app.job("t")
    async def handler(ctx: Context, database: Database) -> str:
        return database.url

    async with sandbox(app, resources={Database: Database("fake")}) as box:
        assert await box.run("t") == "fake"
    assert "database opened" not in journal
    async with sandbox(app, resources={Cache: 1}) as box:
        with pytest.raises(OptionInvalid, match="no such resource; known: "):
            await box.run("t")


def test_two_resources_of_one_type_are_refused_at_once():
    app = shop([])
    with pytest.raises(OptionInvalid, match=r"database provides this type already"):

        @app.resource
        def another() -> Iterator[Database]:
            yield Database("two")

    other = shop([])

    @other.job("t.other")
    async def handler(ctx: Context) -> None: ...

    app.include(other)
    with pytest.raises(OptionInvalid, match=r"provides this type already"):
        app.check()


def test_an_annotation_that_is_no_resource_is_named_before_the_worker_starts():
    app = shop([])

    @app.job("t")
    async def handler(ctx: Context, n: int, cache: Cache) -> None: ...

    with pytest.raises(OptionInvalid, match=r"parameter cache of .*handler.*known: Database, Settings"):
        app.check()


def test_resources_that_need_each_other_are_named():
    app = App()

    @app.resource
    def database(cache: Cache) -> Iterator[Database]:
        yield Database("x")

    app.resource(Cache)

    @app.job("t")
    async def handler(ctx: Context) -> None: ...

    with pytest.raises(OptionInvalid, match=r"database -> Cache -> .*database'.*in a circle"):
        app.check()


@pytest.mark.parametrize("annotated", [False, True])
def test_a_function_that_cannot_be_a_resource_is_refused_at_once(annotated: bool):
    def unannotated():
        yield 1

    async def returned() -> Database:
        return Database("x")

    with pytest.raises(OptionInvalid, match="a resource is a generator function"):
        App().resource(returned if annotated else unannotated)


async def test_the_payload_of_a_handler_with_resources_is_checked_at_submit():
    app = shop([])

    @app.job("t")
    async def handler(ctx: Context, database: Database) -> str:
        return database.url

    async with sandbox(app) as box:
        with pytest.raises(Exception, match="its handler takes no payload"):
            await box.submit("t", 4)


async def test_handlers_get_the_resources_of_applications_that_theirs_includes_or_is_included_in():
    outer, inner = App(), shop([])

    @outer.job("t.outer")
    async def handler(ctx: Context, database: Database) -> str:
        return database.url

    @inner.job("t.inner")
    async def other(ctx: Context, cache: Cache) -> str:
        return cache.name

    outer.resource(Cache)
    outer.include(inner)
    async with sandbox(outer) as box:
        assert await box.run("t.outer") == "books"
        assert await box.run("t.inner") == "cache of books"
