"""A real gateway process that kills itself at a chosen point of a chosen request.

The process is the shipped application on its own server. `before` is when a request has come and nothing is done, `stored` when its
effect is in the ledger and nobody was told, `half` when the head of the answer is on its way and its body is not.
"""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.faults.nursery import tend
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import ISSUER, new_id
from trellis.auth.tokens import symmetric_key
from trellis.gateway import create_app
from trellis.http_server.server import ServerOptions, listen, serve_gateway
from trellis.ledgers.postgres import ledger as _postgres  # noqa: F401 - imported before the fork
from trellis.ledgers.sqlite import ledger as _sqlite  # noqa: F401 - imported before the fork
from trellis.storage.objects import local as _local  # noqa: F401 - imported before the fork

POINTS = ("before", "stored", "half")


@dataclass(frozen=True, kw_only=True)
class Orders:
    """How a gateway process behaves; passed as JSON."""

    url: str
    port: int
    secret: str
    objects: str | None = None
    memory: str | None = None
    die_at: str = ""
    die_after: int = 0
    """The number of the request that changes something at which it dies."""


class Mortal:
    """Dies at its point."""

    def __init__(self, app: ASGIApp, orders: Orders) -> None:
        self._app, self._orders, self._seen = app, orders, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not self._orders.die_at:
            await self._app(scope, receive, send)
            return
        self._seen += 1
        mine = self._seen == self._orders.die_after
        if mine and self._orders.die_at == "before":
            die()

        async def send_or_die(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            if mine and self._orders.die_at == ("half" if is_body else "stored"):
                die()
            if mine and not is_body:  # the head does not wait for a body of unknown length
                message["headers"] = [one for one in message["headers"] if one[0] != b"content-length"]
            await send(message)
            if mine and not is_body:
                await asyncio.sleep(0)  # the head is on its way

        await self._app(scope, receive, send_or_die)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(orders: Orders) -> None:
    settings = Settings.model_validate(
        {"objects": orders.objects, "memory": None if orders.memory is None else Path(orders.memory)}
    )
    key = symmetric_key(bytes.fromhex(orders.secret), issuer=ISSUER)
    async with open_instance(settings, orders.url) as instance:
        app = create_app(instance, [key], monotonic=time.monotonic, new_id=new_id)
        options = ServerOptions(host="127.0.0.1", port=orders.port)
        place = listen(options, key_configured=True)
        await serve_gateway(Mortal(app, orders), place, options, asyncio.Event())


def be_gateway(orders: dict[str, Any]) -> int:
    asyncio.run(main(Orders(**orders)))
    return 0


if __name__ == "__main__":
    tend(be_gateway)
