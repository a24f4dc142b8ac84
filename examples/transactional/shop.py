"""The job that the other examples submit. Its options travel with its type: no submit has to repeat them.

trellis worker examples.transactional.shop:app --ledger postgresql://…
"""

from dataclasses import dataclass

from trellis import App, Context

app = App()


@dataclass
class Shipment:
    """What to ship."""

    order: str
    express: bool = False


@app.job("order.ship", unique=lambda shipment: shipment.order, max_attempts=8, priority="interactive")
async def ship(ctx: Context, shipment: Shipment) -> str:
    """One job for each order, however often it is submitted."""
    ctx.logger.info("shipping", order=shipment.order)
    return f"shipped {shipment.order}{' by express' if shipment.express else ''}"
