"""psycopg 3: the order and its job are committed together, or neither is."""

import psycopg

from examples.transactional.shop import Shipment, app
from trellis.integrations.sql import submit_on, submit_on_async


def place_order(connection: psycopg.Connection, order: str) -> str:
    """Store the order and submit its job, in one transaction."""
    with connection.transaction():
        connection.execute("insert into shop_order (id) values (%s)", (order,))
        return submit_on(connection, "order.ship", Shipment(order), app=app).job_id


async def place_order_async(connection: psycopg.AsyncConnection, order: str) -> str:
    """The same with an asynchronous connection."""
    async with connection.transaction():
        await connection.execute("insert into shop_order (id) values (%s)", (order,))
        return (await submit_on_async(connection, "order.ship", Shipment(order), app=app)).job_id
