"""FastAPI: each request has one transaction, and its jobs are submitted in it.

The transaction is committed before the response is sent (`scope="function"`): an answer of 200 means that both are there.
"""

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from examples.transactional.shop import Shipment, app
from examples.transactional.with_sqlalchemy import Order
from trellis.integrations.sql import submit_on_async


def shop_api(engine: AsyncEngine) -> FastAPI:
    """The shop over HTTP."""
    api = FastAPI()

    async def one_transaction() -> AsyncGenerator[AsyncSession]:
        """Commit when the route returns; roll back when it raises."""
        async with AsyncSession(engine) as session, session.begin():
            yield session

    @api.post("/orders/{order}")
    async def place_order(
        order: str,
        session: Annotated[AsyncSession, Depends(one_transaction, scope="function")],
        *,
        express: bool = False,
    ) -> dict[str, str]:
        session.add(Order(id=order))
        job = await submit_on_async(session, "order.ship", Shipment(order, express), app=app)
        if order == "sold-out":
            raise HTTPException(409, "it is sold out")
        return {"job": job.job_id}

    return api
