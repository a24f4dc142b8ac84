"""Unique jobs as callers of Python see them: declared with a type, given with a submit, submitted by a handler."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest

from trellis.app.wiring import SystemClock, new_id
from trellis.auth.principals import Principal
from trellis.client import Trellis
from trellis.engine.errors import JobCancelled, OptionInvalid, PayloadInvalid, UniqueConflict
from trellis.engine.jobs import SubmitOutcome
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.testing import sandbox
from trellis.worker.app import App
from trellis.worker.context import Context


@dataclass
class Page:
    url: str
    depth: int = 0


def crawler(**options: Any) -> App:
    app = App()

    @app.job("page.index", **options)
    async def index(ctx: Context, page: Page) -> str:
        return page.url

    @app.job("site.crawl")
    async def crawl(ctx: Context) -> list[str]:
        return [await ctx.submit("page.index", Page("/"), unique="args") for _ in range(2)]

    return app


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncGenerator[Ledger]:
    opened = await open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield opened
    await opened.close()


def caller(ledger: Ledger, app: App | None = None, **options: Any) -> Trellis:
    principal = Principal(**{"name": "test", "roles": frozenset(Role), **options})
    return Trellis(ledger, principal, clock=SystemClock(), new_id=new_id, app=app)


async def test_a_handle_says_what_the_submit_did():
    async with sandbox(crawler(unique=lambda page: page.url, on_conflict="replace")) as box:
        first = await box.submit("page.index", Page("/"))
        second = await box.submit("page.index", Page("/", depth=1))
        assert (first.outcome, second.outcome, second.replaced) == ("created", "replaced", first.id)
        third = await box.submit("page.index", Page("/"), on_conflict="return")
        assert (third.outcome, third.id, third.created) == (SubmitOutcome.RETURNED, second.id, False)
        with pytest.raises(UniqueConflict, match=second.id):
            await box.submit("page.index", Page("/"), on_conflict="raise")
        await box.run_until_idle()
        assert await second.result() == "/"
        with pytest.raises(JobCancelled, match=f"replaced by {second.id}"):
            await first.result()


async def test_what_a_handler_submits_is_unique_too():
    async with sandbox(crawler()) as box:
        one, other = await box.run("site.crawl")
        assert one == other


async def test_a_debounced_type_runs_once_after_the_last_submit():
    async with sandbox(crawler(unique=lambda page: page.url, debounce_s=30)) as box:
        last = await box.submit("page.index", Page("/"))
        for depth in range(2):
            await box.advance(20)
            last = await box.submit("page.index", Page("/", depth))
        await box.advance(20)
        await box.run_until_idle()
        assert (await last.status()).state == "queued"
        await box.advance(11)
        await box.run_until_idle()
        assert (await last.status()).state == "succeeded"


@pytest.mark.requirement("D66")
async def test_the_rule_of_a_type_holds_for_callers_without_the_application(ledger: Ledger):
    await caller(ledger).declare(crawler(unique="args"))
    first = await caller(ledger).submit("page.index", {"url": "/", "depth": 0})
    again = await caller(ledger, crawler(unique="args")).submit("page.index", Page("/"))
    assert again.id == first.id, "with the application the payload is the same JSON"
    await caller(ledger).declare(crawler(unique=lambda page: page.url))
    with pytest.raises(OptionInvalid, match="give the key"):
        await caller(ledger).submit("page.index", {"url": "/"})
    assert (await caller(ledger).submit("page.index", {"url": "/"}, unique="/")).created


async def test_a_payload_is_checked_before_a_key_is_computed_from_it(ledger: Ledger):
    seen: list[Any] = []

    def key(page: Page) -> str:
        seen.append(page)
        return page.url

    trellis = caller(ledger, crawler(unique=key, concurrency_key=key))
    with pytest.raises(PayloadInvalid):
        await trellis.submit("page.index", {"depth": "deep"})
    assert seen == []
    await trellis.submit("page.index", {"url": "/"})
    assert seen == [Page("/"), Page("/")]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"unik": "args"}, "did you mean unique"),
        ({"unique": ""}, "1 to 200 characters"),
        ({"unique": "k", "while_": "sleeping"}, "waiting, unfinished"),
        ({"unique": "k", "on_conflict": "panic"}, "return, replace, raise"),
        ({"unique": "k", "window_s": 0}, "more than 0"),
        ({"on_conflict": "raise"}, "unique is missing"),
        ({"unique": "k", "debounce_s": 1, "delay_s": 5}, "debounce_s says when the job starts"),
        ({"unique": "k", "lifecycle": "queue-job"}, "only jobs of the lifecycle leased-job"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(ledger: Ledger, settings: dict[str, Any], message: str):
    with pytest.raises(OptionInvalid, match=message):
        await caller(ledger).submit("page.index", {"url": "/"}, **settings)


@pytest.mark.parametrize(
    "options",
    [
        {"on_conflict": "replace"},
        {"unique": "args", "on_conflict": "replace", "while_": "unfinished"},
        {"unique": "args", "debounce_max_s": 1},
        {"unique": lambda page: page.url, "debounce_s": 5, "debounce_max_s": 1},
    ],
)
def test_options_of_a_type_that_do_not_fit_together_are_refused_at_import(options: dict[str, Any]):
    with pytest.raises(OptionInvalid):
        crawler(**options)


@pytest.mark.parametrize("function", [lambda _: None, lambda _: 7, lambda page: page.missing])
async def test_a_function_that_computes_no_key_is_named(ledger: Ledger, function: Callable[[Any], Any]):
    with pytest.raises(OptionInvalid, match=r"unique of page\.index"):
        await caller(ledger, crawler(unique=function)).submit("page.index", Page("/"))


@pytest.mark.requirement("D62")
async def test_unique_keys_of_owners_that_see_only_their_own_jobs_are_apart(ledger: Ledger):
    own = {"roles": frozenset({Role.SUBMITTER}), "by_token": True}
    ada, bob = caller(ledger, name="ada", **own), caller(ledger, name="bob", **own)
    first = await ada.submit("page.index", {"url": "/"}, unique="args")
    other = await bob.submit("page.index", {"url": "/"}, unique="args", on_conflict="replace")
    assert (other.outcome, (await ada.job(first.id)).state) == ("created", "queued")
    assert (await ada.submit("page.index", {"url": "/"}, unique="args")).id == first.id


async def test_a_refused_submit_in_the_callers_transaction_replaces_nothing(ledger: Ledger, tmp_path: Path):
    trellis = caller(ledger)
    first = await trellis.submit("page.index", {"url": "/"}, unique="k", while_="waiting")
    connection = apsw.Connection(str(tmp_path / "ledger.db"))
    connection.execute("BEGIN IMMEDIATE")
    replaced = await trellis.submit_on(connection, "page.index", {"url": "/"}, unique="k", on_conflict="replace")
    assert replaced.replaced == first.id
    with pytest.raises(UniqueConflict):
        await trellis.submit_on(connection, "page.index", None, unique="k", on_conflict="raise")
    connection.execute("COMMIT")
    connection.close()
    assert (await trellis.job(first.id)).state == "cancelled"
    assert (await trellis.job(replaced.id)).state == "queued"


def test_a_schedule_cannot_compute_a_key():
    app = App()

    @app.periodic("0 3 * * *")
    @app.job("report", unique=lambda _: "k")
    async def report(ctx: Context) -> None: ...

    with pytest.raises(OptionInvalid, match="unique='args'"):
        app.schedules()
