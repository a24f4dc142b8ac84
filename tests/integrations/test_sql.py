"""A job submitted in a transaction of SQLAlchemy, psycopg or asyncpg exists if and only if that transaction commits."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import InternalError, ProgrammingError
from sqlalchemy.orm import scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from examples.transactional.shop import Shipment, app
from tests.integrations.ways import WAYS, Way, asyncpg_connection, driven_by, psycopg_connection, sqlalchemy_session
from tests.servers.postgres import PostgresServer
from trellis.app.wiring import SystemClock, connect, new_id
from trellis.auth.principals import Principal
from trellis.client import Trellis
from trellis.engine.errors import (
    ConcurrencyKeyMissing,
    IdempotencyMismatch,
    InputError,
    LedgerNotMigrated,
    LoginNotAllowed,
    OptionInvalid,
    PayloadInvalid,
    TrellisError,
    UniqueConflict,
    UnknownJobType,
)
from trellis.engine.jobs import JobId, Priority, SubmitOutcome
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter
from trellis.integrations.sql import NOT_IN_SQL, PARAMETERS, submit_on, submit_on_async
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.migrate import migrate
from trellis.ledgers.postgres.notifier import CHANNEL
from trellis.lifecycles import Role
from trellis.testing import run_until_idle
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.requests import SETTINGS


class GivenUp(Exception):
    """Ends a transaction of these tests without a commit."""


@pytest.fixture
async def ledger(postgres_url: str) -> AsyncGenerator[Ledger]:
    """A ledger that knows the shop's job type, as after the start of a worker."""
    opened = await open_ledger(postgres_url)
    await Trellis(opened, Principal(name="test", roles=frozenset(Role)), clock=SystemClock(), new_id=new_id).declare(
        app
    )
    yield opened
    await opened.close()


@pytest.fixture(params=WAYS)
async def way(request: pytest.FixtureRequest, ledger: Ledger, postgres_url: str) -> AsyncGenerator[Way]:
    async with WAYS[request.param](postgres_url) as opened:
        yield opened


async def jobs(ledger: Ledger) -> list[Job]:
    return list((await ledger.jobs(JobFilter(), limit=10)).jobs)


async def stored(ledger: Ledger, job_id: str) -> Job:
    job = await ledger.job(JobId(job_id))
    assert job is not None
    return job


@pytest.mark.requirement("DJ-5", "D66")
async def test_a_job_exists_if_and_only_if_the_transaction_commits(way: Way, ledger: Ledger):
    with suppress(GivenUp):
        async with way.transaction():
            await way.submit("order.ship", Shipment("1"), app=app)
            raise GivenUp
    assert await jobs(ledger) == []
    async with way.transaction():
        await way.sql("create table shop_order (id text)")
        with suppress(GivenUp):
            async with way.transaction(nested=True):
                await way.submit("order.ship", Shipment("2"), app=app)
                raise GivenUp
        made = await way.submit("order.ship", Shipment("3"), app=app)
        assert await jobs(ledger) == [], "nobody else sees it yet"
    (job,) = await jobs(ledger)
    assert (job.job_id, made.outcome) == (made.job_id, SubmitOutcome.CREATED)
    assert (job.max_attempts, job.priority) == (8, Priority.INTERACTIVE), "the options travel with the type"
    await run_until_idle(app, ledger)
    assert await ledger.result(job.job_id) == b'"shipped 3"'


async def test_what_the_database_refuses_is_the_same_error_as_elsewhere_and_a_savepoint_keeps_the_rest(
    way: Way, ledger: Ledger
):
    async with way.transaction():
        first = await way.submit("order.ship", Shipment("7"), app=app, idempotency_key="once")
        refused: list[tuple[type[TrellisError], str, dict[str, Any]]] = [
            (UniqueConflict, first.job_id, {"on_conflict": "raise"}),
            (IdempotencyMismatch, first.job_id, {"idempotency_key": "once", "unique": "other", "delay_s": 1.0}),
        ]
        for kind, match, settings in refused:
            payload = Shipment("7", express=kind is IdempotencyMismatch)
            with pytest.raises(kind, match=match):
                async with way.transaction(nested=True):
                    await way.submit("order.ship", payload, app=app, **settings)
        with pytest.raises(InputError, match=r"job type order\.shp is unknown here"):
            async with way.transaction(nested=True):
                await way.submit("order.shp")
        again = await way.submit("order.ship", Shipment("7"), app=app)
        assert (again.job_id, again.outcome) == (first.job_id, SubmitOutcome.RETURNED)
        other = await way.submit("order.ship", Shipment("7"), app=app, on_conflict="replace", while_="waiting")
        assert (other.replaced, other.outcome) == (first.job_id, SubmitOutcome.REPLACED)
    assert {job.state for job in await jobs(ledger)} == {"queued", "cancelled"}


async def test_what_is_wrong_with_a_submit_is_said_before_the_database_is_asked(ledger: Ledger, postgres_url: str):
    async with psycopg_connection(postgres_url) as way, way.transaction():
        with pytest.raises(OptionInvalid, match="did you mean max_attempts"):
            await way.submit("order.ship", Shipment("1"), app=app, max_atempts=2)
        with pytest.raises(PayloadInvalid, match="did you mean order"):
            await way.submit("order.ship", {"oder": "1"}, app=app)
        with pytest.raises(UnknownJobType):
            await way.submit("order.shp", Shipment("1"), app=app)
        with pytest.raises(PayloadInvalid, match="NUL"):
            await way.submit("order.ship", {"order": "a\0b"})
        await way.submit("order.ship", {"order": "written \\u0000"}, unique="it")
    assert len(await jobs(ledger)) == 1, "the transaction went on"


@pytest.mark.parametrize("named", ["psycopg_connection", "sqlalchemy_async_session"])
async def test_every_setting_of_a_submit_arrives_in_the_ledger(ledger: Ledger, postgres_url: str, named: str):
    later = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    async with WAYS[named](postgres_url) as way, way.transaction():
        parent = await way.submit("order.ship", Shipment("1"), app=app, job_id="parent")
        made = await way.submit(
            "order.ship",
            Shipment("2", express=True),
            app=app,
            priority="critical",
            run_at=later,
            deadline_s=7200.5,
            max_attempts=3,
            concurrency_key="dock",
            concurrency_limit=4,
            correlation_id="c-1",
            trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            parent_id="parent",
        )
        delayed = await way.submit("order.ship", Shipment("3"), app=app, delay_s=2.5, unique="dock", window_s=60.0)
        bounced = await way.submit("order.ship", Shipment("4"), app=app, debounce_s=5.0, debounce_max_s=9.0)
    assert parent.job_id == "parent"
    job = await stored(ledger, made.job_id)
    assert job.payload == b'{"order": "2", "express": true}'
    assert (job.priority, job.max_attempts, job.concurrency_key) == (Priority.CRITICAL, 3, "user:dock")
    assert (job.correlation_id, job.parent_id, job.due_at) == ("c-1", "parent", later)
    assert job.trace == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert job.deadline_at is not None
    assert (job.deadline_at - job.created_at).total_seconds() == 7200.5
    for one, seconds in ((delayed, 2.5), (bounced, 5.0)):
        job = await stored(ledger, one.job_id)
        assert job.due_at is not None
        assert (job.due_at - job.created_at).total_seconds() == seconds


async def test_workers_are_woken_when_the_transaction_commits(ledger: Ledger, postgres_url: str):
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with psycopg_connection(postgres_url) as way, asyncpg_connection(postgres_url) as listener:
        await listener.connection.add_listener(CHANNEL, lambda *notice: heard.put_nowait(notice[-1]))
        async with way.transaction():
            await way.submit("order.ship", Shipment("1"), app=app)
            await listener.sql("select 1")
            assert heard.empty(), "not before the commit"
        async with asyncio.timeout(10):
            assert await heard.get() == ""
        async with way.transaction():
            await way.submit("order.ship", Shipment("2"), app=app, wake=False)
            await way.submit("order.ship", Shipment("3"), app=app, delay_s=60.0)
        await way.sql(f"select pg_notify('{CHANNEL}', 'mark')")
        async with asyncio.timeout(10):
            assert await heard.get() == "mark", "nothing was sent for a job that cannot begin, or that should not wake"


async def test_a_submit_outside_a_transaction_is_refused(ledger: Ledger, postgres_url: str):
    async with psycopg_connection(postgres_url) as way, asyncpg_connection(postgres_url) as other:
        for one in (way, other):
            with pytest.raises(OptionInvalid, match="not in a transaction"):
                await one.submit("order.ship", Shipment("1"), app=app)
    engine = create_engine(driven_by(postgres_url, "psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(OptionInvalid, match="AUTOCOMMIT"):
        submit_on(connection, "order.ship", Shipment("1"), app=app)
    engine.dispose()
    assert await jobs(ledger) == []


async def test_another_connection_is_refused_with_what_fits(postgres_url: str):
    engine = create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(OptionInvalid, match=r"Trellis\.submit_on"):
        submit_on(connection, "order.ship", Shipment("1"), app=app)
    engine.dispose()
    with pytest.raises(OptionInvalid, match="a Session or Connection of SQLAlchemy"):
        submit_on(object(), "order.ship", Shipment("1"), app=app)
    async with sqlalchemy_session(postgres_url) as way, asyncpg_connection(postgres_url) as other:
        with pytest.raises(OptionInvalid, match="a Session or Connection of SQLAlchemy"):
            await submit_on_async(way.connection, "order.ship", Shipment("1"), app=app)
        with pytest.raises(OptionInvalid, match="submit_on_async"):
            submit_on(other.connection, "order.ship", Shipment("1"), app=app)


async def test_settings_that_sql_does_not_take_are_refused_and_all_others_are_parameters(
    ledger: Ledger, postgres_url: str
):
    keyed = App()

    @keyed.job("order.ship", concurrency_key=lambda _: None)  # type: ignore[arg-type, return-value]
    async def ship(ctx: Context, shipment: Shipment) -> None: ...

    async with psycopg_connection(postgres_url) as way, way.transaction():
        for settings in ({"compensates": "x"}, {"idempotency_scope": "s"}, {"lifecycle": "run"}, {"deadline_s": None}):
            with pytest.raises(OptionInvalid, match=rf"{next(iter(settings))}.*Trellis\.submit"):
                await way.submit("order.ship", {"order": "1"}, **settings)
        with pytest.raises(OptionInvalid, match=r"concurrency_key.*Trellis\.submit"):
            await way.submit("order.ship", Shipment("1"), app=keyed)
    async with asyncpg_connection(postgres_url) as other:
        named, kinds = await other.connection.fetchrow(
            "select proargnames, oidvectortypes(proargtypes) from pg_proc where proname = 'submit_unique_job'"
        )
    taken = {name: kind for name, kind in zip(named, kinds.split(", "), strict=False) if name.startswith("p_")}
    spelt = {"float8": "double precision", "timestamptz": "timestamp with time zone", "int": "integer"}
    assert {name: spelt.get(kind, kind) for name, kind in PARAMETERS.items()} == taken
    parameters = {name.removeprefix("p_") for name in PARAMETERS} - {"type", "payload", "while"} | {"while_"}
    assert parameters | NOT_IN_SQL == SETTINGS


@pytest.mark.requirement("D66")
async def test_the_options_of_the_ledger_hold_for_a_program_with_older_ones(ledger: Ledger, postgres_url: str):
    (declared,) = await ledger.declared_types("order.ship")
    worker = Principal(name="test", roles=frozenset(Role)).acting(Role.WORKER, action="declare")
    await ledger.declare_types(worker, [replace(declared, max_attempts=2, priority=Priority.CRITICAL, deadline_s=60.0)])
    async with psycopg_connection(postgres_url) as way, way.transaction():
        made = await way.submit("order.ship", Shipment("1"), app=app)
    job = await stored(ledger, made.job_id)
    assert (job.max_attempts, job.priority, job.deadline_at is None) == (2, Priority.CRITICAL, False)


async def test_a_type_whose_application_computes_the_key_needs_the_application_or_the_key(
    ledger: Ledger, postgres_url: str
):
    (declared,) = await ledger.declared_types("order.ship")
    keyed = replace(declared, keyed=True, unique=None)
    worker = Principal(name="test", roles=frozenset(Role)).acting(Role.WORKER, action="declare")
    await ledger.declare_types(worker, [keyed])
    async with psycopg_connection(postgres_url) as way:
        with pytest.raises(ConcurrencyKeyMissing):
            async with way.transaction():
                await way.submit("order.ship", {"order": "1"})


async def test_errors_that_are_not_the_ledgers_stay_those_of_the_driver(
    new_postgres_database: Any, ledger: Ledger, postgres_url: str
):
    async with psycopg_connection(new_postgres_database()) as way:
        with pytest.raises(LedgerNotMigrated):
            async with way.transaction():
                await way.submit("order.ship", Shipment("1"), app=app)
    async with sqlalchemy_session(postgres_url) as way:
        with pytest.raises(ProgrammingError):
            await way.sql("select * from nowhere")
        with pytest.raises(InternalError, match="current transaction is aborted"):
            await way.submit("order.ship", Shipment("1"), app=app)


async def test_the_client_of_a_ledger_on_postgresql_says_what_to_use_instead(ledger: Ledger, postgres_url: str):
    async with psycopg_connection(postgres_url) as way, connect(postgres_url) as trellis:
        with pytest.raises(OptionInvalid, match=r"trellis\.integrations\.sql"):
            await trellis.submit_on(way.connection, "order.ship", {"order": "1"})


async def test_a_connection_of_a_pool_and_a_scoped_session_are_taken_too(ledger: Ledger, postgres_url: str):
    async with (
        asyncpg.create_pool(postgres_url, min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
        connection.transaction(),
    ):
        await submit_on_async(connection, "order.ship", Shipment("1"), app=app)
    engine = create_engine(driven_by(postgres_url, "psycopg"), poolclass=NullPool)
    session = scoped_session(sessionmaker(engine))
    submit_on(session, "order.ship", Shipment("2"), app=app)
    session.commit()
    session.remove()
    assert len(await jobs(ledger)) == 2


async def test_the_login_of_the_connection_decides(ledger: Ledger, postgres_url: str, postgres_server: PostgresServer):
    """A login with the role of a submitter submits as itself; one without any role is told what it lacks."""
    shop, guest = "login_of_shop", "login_of_guest"
    async with psycopg_connection(postgres_url) as owner:
        for login in (shop, guest):  # of the server, and kept: other databases may have granted it something
            await owner.sql(
                f"do $$ begin create role {login} login; exception when duplicate_object or unique_violation then null; end $$"
            )
    await migrate(postgres_url, grants=[(shop, Role.SUBMITTER)])
    database = urlsplit(postgres_url).path[1:]
    async with asyncpg_connection(postgres_server.url(database, shop)) as way, way.transaction():
        made = await way.submit("order.ship", Shipment("1"), app=app, idempotency_key="once")
    (event,) = await ledger.events(made.job_id)
    assert (event.role, event.actor) == (Role.SUBMITTER, f"db:{shop}:sql:{shop}")
    async with asyncpg_connection(postgres_server.url(database, guest)) as way:
        with pytest.raises(LoginNotAllowed, match="trellis_app"):
            async with way.transaction():
                await way.submit("order.ship", Shipment("2"), app=app)
