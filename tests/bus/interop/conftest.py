"""The servers of the interoperability tests, and the control plane on them."""

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import fakeredis
import pytest

from tests.bus.interop.plane import Plane, plane_on
from tests.servers.nats import NatsServer, running_nats


@pytest.fixture(scope="session")
def interop_server() -> Iterator[NatsServer]:
    """Without streams: what one test leaves unheard is gone before the next. It takes packets that are larger than CAP allows."""
    with running_nats(settings="max_payload: 2MB") as server:
        yield server


@pytest.fixture
async def plane(interop_server: NatsServer, tmp_path: Path) -> AsyncIterator[Plane]:
    """A control plane whose topics are all as by default."""
    async with plane_on(interop_server, tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()
    thread.join()
