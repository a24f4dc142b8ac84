"""What `@app.job` declares holds for a submit by whichever entrance, from a caller that does not have the application.

HTTP and the inbox: tests/gateway. The command line: tests/cli/test_type_options.py.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.integrations.ways import asyncpg_connection
from trellis.app.wiring import connect, make_development_key
from trellis.client import Trellis
from trellis.engine.errors import JobDeadLettered, OptionInvalid, PayloadInvalid
from trellis.engine.jobs import JobId, Priority
from trellis.engine.records import JobFilter
from trellis.engine.schedules import ScheduleSpec
from trellis.testing import run_until_idle
from trellis.worker.app import App
from trellis.worker.context import Context


@dataclass
class Page:
    url: str


called: list[object] = []


def url_of(page: Page) -> str:
    """A key function that fails for everything but the handler's own type."""
    called.append(page)
    return page.url


library = App()


@library.job("page.index", max_attempts=4, priority="interactive", deadline_s=600.0, unique="args")
async def index(ctx: Context, page: Page) -> None: ...


@library.job("page.fetch", concurrency_key=url_of, unique=url_of)
async def fetch(ctx: Context, page: Page) -> None: ...


URL = {"url": "/"}


async def by_client(trellis: Trellis, url: str, **settings: Any) -> JobId:
    return (await trellis.submit("page.index", URL, **settings)).id


async def by_client_in_bulk(trellis: Trellis, url: str, **settings: Any) -> JobId:
    return (await trellis.submit_many("page.index", [URL], **settings))[0].id


async def by_client_in_a_transaction(trellis: Trellis, url: str, **settings: Any) -> JobId:
    if url.startswith("postgresql"):
        async with asyncpg_connection(url) as way, way.transaction():
            submitted = await way.submit("page.index", URL, **settings)
        return submitted.job_id
    with closing(apsw.Connection(url.removeprefix("sqlite:///"))) as own:
        own.execute("begin immediate")
        job = await trellis.submit_on(own, "page.index", URL, **settings)
        own.execute("commit")
    return job.id


async def by_handler(trellis: Trellis, url: str, **settings: Any) -> JobId:
    other, children = App(), list[JobId]()

    @other.job("start")
    async def start(ctx: Context) -> None:
        children.append(await ctx.submit("page.index", URL, **settings))

    await trellis.submit("start")
    await run_until_idle(other, trellis.ledger)
    return children[0]


async def by_durable_function(trellis: Trellis, url: str, **settings: Any) -> JobId:
    other = App()

    @other.job("start")
    async def start(ctx: Context) -> None:
        ctx.spawn("page.index", URL, **settings)

    await trellis.submit("start")
    await run_until_idle(other, trellis.ledger)
    return (await trellis.ledger.jobs(JobFilter(type="page.index"), limit=1)).jobs[0].job_id


async def by_schedule(trellis: Trellis, url: str, **settings: Any) -> JobId:
    if settings:
        pytest.skip("a schedule overrides nothing of its type")
    await trellis.schedules.add(ScheduleSpec(name="hourly", cron="0 * * * *", type="page.index", payload=URL))
    return await trellis.schedules.run("hourly")


Entrance = Callable[..., Awaitable[JobId]]
ENTRANCES: list[Entrance] = [
    by_client,
    by_client_in_bulk,
    by_client_in_a_transaction,
    by_handler,
    by_durable_function,
    by_schedule,
]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
async def trellis(url: str) -> AsyncGenerator[Trellis]:
    """A caller without the application, whose worker has been started once."""
    if url.startswith("sqlite"):
        make_development_key(url)
    async with connect(url, operator=True) as opened:
        await opened.declare(library)
        yield opened


@pytest.mark.requirement("D66")
@pytest.mark.parametrize("submit", ENTRANCES, ids=lambda entrance: entrance.__name__)
async def test_the_options_of_the_type_hold_at_every_entrance(trellis: Trellis, url: str, submit: Entrance):
    job = await trellis.job(await submit(trellis, url))
    assert (job.max_attempts, job.priority) == (4, Priority.INTERACTIVE)
    assert job.deadline_at is not None
    assert (job.deadline_at - job.created_at).total_seconds() == 600
    assert (await trellis.submit("page.index", URL)).id == job.job_id, "it is unique by its payload"


@pytest.mark.requirement("D66")
@pytest.mark.parametrize("submit", ENTRANCES[:-1], ids=lambda entrance: entrance.__name__)
async def test_a_submit_overrides_what_it_names_at_every_entrance(trellis: Trellis, url: str, submit: Entrance):
    job = await trellis.job(await submit(trellis, url, max_attempts=2, unique="other"))
    assert (job.max_attempts, job.priority) == (2, Priority.INTERACTIVE)
    assert (await trellis.submit("page.index", None, unique="other")).id == job.job_id
    assert (await trellis.submit("page.index", URL)).id != job.job_id


@pytest.mark.parametrize("submit", ENTRANCES[:3], ids=lambda entrance: entrance.__name__)
async def test_a_misspelt_setting_is_refused_at_every_entrance(trellis: Trellis, url: str, submit: Entrance):
    with pytest.raises(OptionInvalid, match="did you mean max_attempts"):
        await submit(trellis, url, max_atempts=2)


async def test_a_handler_learns_of_a_misspelt_setting_and_of_a_payload_that_does_not_fit(trellis: Trellis):
    app, refusals = App(), list[str]()
    app.job("page.fetch", concurrency_key=url_of, unique=url_of)(fetch)

    @app.job("start")
    async def start(ctx: Context) -> None:
        for submit in (ctx.submit, ctx.spawn):
            for payload, settings in (({"ulr": "/"}, {}), (URL, {"dealy_s": 1})):
                try:
                    await submit("page.fetch", payload, **settings)  # type: ignore[misc]
                except (OptionInvalid, PayloadInvalid) as error:
                    refusals.append(str(error))

    called.clear()
    await trellis.submit("start")
    await run_until_idle(app, trellis.ledger)
    assert [text.partition("did you mean ")[2].partition("?")[0] for text in refusals] == ["url", "delay_s"] * 2
    assert called == [], "no key function is asked about a payload or a submit that is refused"


async def test_a_child_whose_unique_key_another_job_holds_is_refused_with_that_job(trellis: Trellis):
    app, held = App(), await trellis.submit("page.index", URL)

    @app.job("start", max_attempts=1)
    async def start(ctx: Context) -> None:
        ctx.spawn("page.index", URL)

    parent = await trellis.submit("start", max_attempts=1)
    await run_until_idle(app, trellis.ledger)
    with pytest.raises(JobDeadLettered, match=f"ChildExists: Job {held.id} has the id or the unique key"):
        await parent.result(timeout_s=0)
    assert len((await trellis.ledger.jobs(JobFilter(type="page.index"), limit=9)).jobs) == 1


@pytest.mark.parametrize("payload", [{"ulr": "/"}, None, 7, [URL]], ids=str)
async def test_key_functions_get_the_handlers_type_and_no_payload_that_does_not_fit(tmp_path: Path, payload: object):
    called.clear()
    async with connect(f"sqlite:///{tmp_path / 'ledger.db'}", app=library) as trellis:
        with pytest.raises(PayloadInvalid):
            await trellis.submit_many("page.fetch", [URL, payload])
        assert called == [], "all payloads are checked before a key is computed"
        assert (await trellis.ledger.jobs(JobFilter(), limit=1)).jobs == (), "nothing was written"
        await trellis.submit_many("page.fetch", [URL])
        assert called == [Page("/"), Page("/")]
