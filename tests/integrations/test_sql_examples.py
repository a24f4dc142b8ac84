"""The examples of jobs in a transaction of one's own do what they say, with the libraries themselves."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from typing import cast

import fastapi.testclient
import psycopg
import pytest
from django.db import connection, connections, transaction
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from examples.transactional import with_django, with_fastapi, with_psycopg, with_sqlalchemy
from examples.transactional.shop import Shipment, app
from tests.integrations.ways import driven_by
from tests.servers.postgres import PostgresServer
from trellis import connect
from trellis.engine.errors import OptionInvalid, UniqueConflict
from trellis.integrations.sql import submit_on
from trellis.testing import run_until_idle

ATOMIC = cast("Callable[[], AbstractContextManager[None]]", transaction.atomic)
TABLE = "create table shop_order (id text primary key)"


class GivenUp(Exception):
    """Ends a transaction of these tests without a commit."""


@pytest.fixture
async def shop(postgres_url: str) -> str:
    """A database with the ledger and the shop's own table. Its worker has been started once."""
    await _open_shop(postgres_url)
    with psycopg.connect(postgres_url) as owner:
        owner.execute(TABLE)
    return postgres_url


async def _open_shop(url: str) -> None:
    async with connect(url, app=app) as trellis:
        await trellis.declare(app)


async def shipped(url: str) -> list[str | None]:
    """What the worker did: the order of each job, which must be in the table too."""
    async with connect(url, app=app) as trellis:
        await run_until_idle(app, trellis.ledger)
        ended = [event async for page in trellis.feed(follow=False) for event in page.events]
        results = [await trellis.handle(event.job_id).result(0) for event in ended if event.type == "job_succeeded"]
    with psycopg.connect(url) as reader:
        orders = [row[0] for row in reader.execute("select id from shop_order order by id")]
    assert sorted(results) == [f"shipped {order}" for order in orders]
    return orders


async def test_the_example_for_sqlalchemy(shop: str):
    engine = create_engine(driven_by(shop, "psycopg"), poolclass=NullPool)
    with Session(engine) as session, session.begin():
        with_sqlalchemy.place_order(session, "1")
    with suppress(GivenUp), Session(engine) as session, session.begin():
        with_sqlalchemy.place_order(session, "2")
        raise GivenUp
    later = create_async_engine(driven_by(shop, "asyncpg"), poolclass=NullPool)
    async with AsyncSession(later) as session, session.begin():
        await with_sqlalchemy.place_order_async(session, "3")
    with suppress(GivenUp):
        async with AsyncSession(later) as session, session.begin():
            await with_sqlalchemy.place_order_async(session, "4")
            raise GivenUp
    assert await shipped(shop) == ["1", "3"]


async def test_the_example_for_psycopg(shop: str):
    with psycopg.connect(shop) as now:
        with_psycopg.place_order(now, "1")
        with pytest.raises(psycopg.errors.UniqueViolation):
            with_psycopg.place_order(now, "1")
    async with await psycopg.AsyncConnection.connect(shop) as later:
        await with_psycopg.place_order_async(later, "2")
        await later.rollback()
    assert await shipped(shop) == ["1", "2"]


async def test_the_example_for_fastapi(shop: str):
    engine = create_async_engine(driven_by(shop, "asyncpg"), poolclass=NullPool)
    client = fastapi.testclient.TestClient(with_fastapi.shop_api(engine))
    assert set(client.post("/orders/1").json()) == {"job"}
    assert client.post("/orders/sold-out").status_code == 409
    assert await shipped(shop) == ["1"]


@pytest.fixture(scope="module")
def django_url(postgres_server: PostgresServer, postgres_template: str) -> Iterator[str]:
    """Django is set up once in a process, with one database."""
    url = postgres_server.create_database("test_django", postgres_template)
    with_django.configure(url)
    yield url
    postgres_server.drop_database("test_django")


def _use_django() -> None:
    """As a view does: on a thread, with the connection that Django has for it."""
    with closing(connections["default"]):
        _place_orders_in_django()


def _place_orders_in_django() -> None:
    order = with_django.order_model()
    with connection.schema_editor() as schema:
        schema.create_model(order)
    with_django.place_order(order, "1")
    with suppress(GivenUp), ATOMIC():
        with_django.place_order(order, "2")
        raise GivenUp
    with ATOMIC():
        with pytest.raises(UniqueConflict), ATOMIC():
            submit_on(connection, "order.ship", Shipment("1"), app=app, on_conflict="raise")
        with suppress(GivenUp), ATOMIC():
            with_django.place_order(order, "3")
            raise GivenUp
        with_django.place_order(order, "4")
    with pytest.raises(OptionInvalid, match=r"transaction\.atomic"):
        submit_on(connection, "order.ship", Shipment("5"), app=app)


async def test_the_example_for_django(django_url: str):
    await _open_shop(django_url)
    await asyncio.to_thread(_use_django)
    assert await shipped(django_url) == ["1", "4"]
