"""A real server for tests: ours, on loopback, in a thread with an event loop and an open instance of its own."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastapi import FastAPI

from trellis.app.instance import Instance, open_instance
from trellis.app.settings import Settings, read_settings
from trellis.app.wiring import new_id
from trellis.auth.tokens import TrustedKey
from trellis.gateway import GatewayOptions, create_app
from trellis.http_server.server import ServerOptions, listen, serve_gateway

PATIENCE_S = 60.0
LOOPBACK = ServerOptions(host="127.0.0.1", port=0)


@dataclass
class Served:
    """Where the server is, and what it works with; its loop runs in another thread."""

    port: int
    app: FastAPI
    instance: Instance
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event


def settings_in(folder: Path) -> Settings:
    """Objects and memory in this folder."""
    places = {"TRELLIS_OBJECTS": (folder / "objects").as_uri(), "TRELLIS_MEMORY": str(folder / "memory.git")}
    return read_settings(places, folder)


@contextlib.contextmanager
def serving(
    ledger_url: str,
    keys: Sequence[TrustedKey],
    *,
    settings: Settings,
    options: GatewayOptions | None = None,
    send_buffer: int | None = None,
    port: int = 0,
) -> Iterator[Served]:
    """Serve until the block ends; then the server has stopped and everything is closed. Connections get `send_buffer` bytes."""
    stage = _Stage(ledger_url, keys, settings, options, send_buffer, port)
    thread = threading.Thread(target=lambda: asyncio.run(stage.run()), daemon=True)
    thread.start()
    try:
        assert stage.settled.wait(PATIENCE_S), "the server did not start"
        if stage.served is None:
            raise AssertionError("the server did not start") from stage.failed
        yield stage.served
    finally:
        if stage.served is not None:
            stage.served.loop.call_soon_threadsafe(stage.served.stop.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not stop"


@dataclass
class _Stage:
    ledger_url: str
    keys: Sequence[TrustedKey]
    settings: Settings
    options: GatewayOptions | None
    send_buffer: int | None
    port: int
    settled: threading.Event = field(default_factory=threading.Event)
    served: Served | None = None
    failed: BaseException | None = None

    async def run(self) -> None:
        try:
            async with open_instance(self.settings, self.ledger_url) as instance:
                app = create_app(instance, self.keys, monotonic=time.monotonic, new_id=new_id, options=self.options)
                place = listen(replace(LOOPBACK, port=self.port), key_configured=True)
                if self.send_buffer is not None:
                    place.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer)
                port, stop = place.sockets[0].getsockname()[1], asyncio.Event()
                self.served = Served(port, app, instance, asyncio.get_running_loop(), stop)
                close = app.state.streams.hub.close
                await serve_gateway(app, place, LOOPBACK, stop, end_streams=close, ready=self.settled.set)
        except BaseException as error:
            self.failed, self.served = error, None
            raise
        finally:
            self.settled.set()
