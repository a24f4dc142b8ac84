"""A pooler between the ledger and its server: the ledger works through it, or says which mode of the pooler to set."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import pytest

from tests.servers.pooler import Mode, pooling
from trellis.app.wiring import SystemClock, make_worker, new_id
from trellis.auth.principals import Principal
from trellis.client import Trellis
from trellis.engine.errors import PermanentError, PoolerUnfit
from trellis.engine.records import FindingSeverity, JobFilter, JobPlace
from trellis.engine.verify import verify
from trellis.ledgers import migrate, open_ledger
from trellis.ledgers.postgres.connection import SESSION_SETTINGS, PostgresConnection, PostgresError, connect, listens
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.options import WorkerOptions

JOBS = 30
IGNORED = frozenset({"search_path", "jit", "idle_in_transaction_session_timeout", "plan_cache_mode"})
"""What an operator lets pgbouncer take and forget: `ignore_startup_parameters`."""


@pytest.mark.requirement("D32")
@pytest.mark.parametrize("mode", ["transaction", "session"])
@pytest.mark.parametrize("ignored", [frozenset(), IGNORED], ids=["strict", "ignoring"])
async def test_jobs_are_worked_off_through_a_pooler(postgres_url: str, mode: Mode, ignored: frozenset[str]):
    app, ran, done = App(), Counter[int](), asyncio.Event()

    @app.job("count")
    async def count(ctx: Context, n: int) -> None:
        ran[n] += 1
        await ctx.checkpoint({"n": n})
        if len(ran) == JOBS:
            done.set()
        if n == 0:
            raise PermanentError("this one fails")

    async with pooling(postgres_url, mode, ignored=ignored) as (pooler, url):
        ledger = await open_ledger(url)
        trellis = Trellis(
            ledger, Principal(name="t", roles=frozenset(Role)), clock=SystemClock(), new_id=new_id, app=app
        )
        worker = make_worker(app, ledger, WorkerOptions(name="w", poll_s=0.05))
        async with worker:
            for n in range(JOBS):
                await trellis.submit("count", n, idempotency_key=f"key-{n}")
            async with asyncio.timeout(30):
                await done.wait()
        assert set(ran.values()) == {1}
        ended = await ledger.jobs(JobFilter(place=JobPlace.ENDED), limit=100)
        assert Counter(job.state for job in ended.jobs) == {"succeeded": JOBS - 1, "failed": 1}
        assert (await verify(ledger)).ok
        await ledger.close()
    assert len(pooler.refused) == (0 if ignored else 1), "once it is noticed, nothing is tried that it refuses"


@pytest.mark.parametrize("ignored", [frozenset(), IGNORED], ids=["strict", "ignoring"])
async def test_session_settings_hold_in_every_statement_through_a_pooler(postgres_url: str, ignored: frozenset[str]):
    async with pooling(postgres_url, ignored=ignored) as (pooler, url):
        connection = await connect(url, application_name="trellis-projector")
        assert not listens(connection)
        for name, value in SESSION_SETTINGS.items():
            assert await connection.fetchval("select current_setting($1)", name) in {value, "5s"}
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            assert await connection.fetchval("select current_setting('transaction_isolation')") == "repeatable read"
            assert await connection.fetchval("select current_setting('search_path')") == "trellis"
        await connection.close()
    assert set(pooler.names) == {"trellis-projector"}


async def _fail_halfway(connection: PostgresConnection) -> None:
    async with connection.transaction():
        await connection.execute("create table trellis.left_behind ()")
        await connection.execute("select 1 / 0")


async def test_a_transaction_that_fails_through_a_pooler_leaves_nothing_and_the_connection_usable(postgres_url: str):
    async with pooling(postgres_url) as (_, url):
        connection = await connect(url)
        with pytest.raises(PostgresError, match="division by zero"):
            await _fail_halfway(connection)
        assert await connection.fetchval("select to_regclass('trellis.left_behind')") is None
        await connection.close()


async def test_a_pooler_is_named_once_in_the_log(postgres_url: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "trellis.ledger")
    async with pooling(postgres_url) as (_, url):
        for _ in range(3):
            await (await connect(url)).close()
    assert [record.message for record in caplog.records if "pooler_noticed" in record.message] != []
    assert caplog.text.count("pooler_noticed") == 1


async def test_a_pooler_of_statements_is_refused_with_what_to_set(postgres_url: str):
    async with pooling(postgres_url, "statement") as (_, url):
        with pytest.raises(PoolerUnfit, match=r"pooler .* pool_mode = transaction"):
            await open_ledger(url)


async def test_a_ledger_is_migrated_through_a_pooler(new_postgres_database: Callable[..., str]):
    async with pooling(new_postgres_database()) as (_, url):
        await migrate(url)
        await (await open_ledger(url)).close()


async def test_a_direct_connection_keeps_its_prepared_statements_and_its_name(postgres_url: str):
    connection = await connect(postgres_url, application_name="trellis-" + "x" * 100)
    assert listens(connection)
    assert await connection.fetchval("select application_name from pg_stat_activity where pid = pg_backend_pid()") == (
        "trellis-" + "x" * 55
    )
    assert await connection.fetchval("select count(*) from pg_prepared_statements") > 0
    await connection.close()


async def test_a_process_is_known_by_its_name_in_the_servers_list(postgres_url: str):
    ledger = await open_ledger(postgres_url, part="sweeper")
    other = await connect(postgres_url)
    names = await other.fetch("select application_name from pg_stat_activity where datname = current_database()")
    assert "trellis-sweeper" in {row[0] for row in names}
    await other.close()
    await ledger.close()


@pytest.mark.requirement("D32")
async def test_the_doctor_says_that_work_is_found_by_polling_behind_a_pooler(postgres_url: str):
    async with pooling(postgres_url) as (_, url):
        ledger = await open_ledger(url)
        (hints,) = [one for one in await ledger.inspect() if one.check == "hints"]
        await ledger.close()
    assert hints.severity is FindingSeverity.WARNING
    assert "polling" in hints.detail
    assert "TRELLIS_LEDGER" in hints.remedy
    ledger = await open_ledger(postgres_url)
    (hints,) = [one for one in await ledger.inspect() if one.check == "hints"]
    await ledger.close()
    assert (hints.severity, hints.remedy) == (FindingSeverity.OK, "")
