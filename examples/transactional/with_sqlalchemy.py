"""SQLAlchemy: the order and its job are committed together, or neither is."""

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from examples.transactional.shop import Shipment, app
from trellis.integrations.sql import submit_on, submit_on_async


class Base(DeclarativeBase):
    """The shop's own tables."""


class Order(Base):
    """An order of the shop."""

    __tablename__ = "shop_order"
    id: Mapped[str] = mapped_column(primary_key=True)


def place_order(session: Session, order: str) -> str:
    """Store the order and submit its job. The caller commits: `with Session(engine) as session, session.begin(): …`"""
    session.add(Order(id=order))
    return submit_on(session, "order.ship", Shipment(order), app=app).job_id


async def place_order_async(session: AsyncSession, order: str) -> str:
    """The same with an asynchronous session, of any driver."""
    session.add(Order(id=order))
    return (await submit_on_async(session, "order.ship", Shipment(order), app=app)).job_id
