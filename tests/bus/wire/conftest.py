"""The buses under test: a local one, and NATS on a real server, with and without JetStream."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

import pytest

from tests.servers.nats import NatsServer, running_nats
from trellis.app.wiring import SystemClock
from trellis.bus.messages import JobProgress
from trellis.bus.port import ReceivedPacket
from trellis.bus.wire import BusOptions, connection, open_bus, streams
from trellis.bus.wire import nats as nats_bus
from trellis.bus.wire import streams as durable
from trellis.bus.wire.local import LocalBus
from trellis.bus.wire.nats import NatsBus

PATIENCE_S = 60.0
AnyBus: TypeAlias = LocalBus | NatsBus
Opener: TypeAlias = Callable[..., Awaitable[Any]]


def now() -> datetime:
    return datetime.now(UTC)


def new_id() -> str:
    return str(uuid.uuid4())


@dataclass
class Net:
    """Where buses meet. Every test has subjects of its own: the server is shared."""

    url: str
    jetstream: bool = False
    options: BusOptions = field(default_factory=BusOptions)
    opened: list[AnyBus] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1))
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    async def bus(self, sender_id: str = "trellis", **options: Any) -> Any:
        first = next((bus for bus in self.opened if isinstance(bus, LocalBus)), None)
        if first is not None:
            made: AnyBus = first.sibling(sender_id)
        else:
            wanted = replace(self.options, url=self.url, sender_id=sender_id, **options)
            made = await open_bus(wanted, clock=SystemClock(), now=now, new_id=new_id)
        self.opened.append(made)
        return made

    def subject(self) -> str:
        return f"job.{self.mark}.n{next(self.numbers)}"

    async def close(self) -> None:
        for bus in reversed(self.opened):
            await bus.close()


class Heard:
    """A handler that remembers, and lets a test wait for what it has heard."""

    def __init__(self, answer: str | None = None) -> None:
        self.packets: list[ReceivedPacket] = []
        self.failures = 0
        self._answer = answer
        self._more = asyncio.Event()

    async def __call__(self, received: ReceivedPacket) -> None:
        self.packets.append(received)
        self._more.set()
        if self.failures:
            self.failures -= 1
            raise ValueError("this handler was told to fail")
        if self._answer is not None:
            await received.answer(JobProgress(job_id="answered", message=self._answer))

    @property
    def messages(self) -> list[str]:
        return [received.packet.body.message for received in self.packets]  # type: ignore[union-attr]

    async def until(self, count: int) -> "Heard":
        async with asyncio.timeout(PATIENCE_S):
            while len(self.packets) < count:
                self._more.clear()
                await self._more.wait()
        return self


def said(message: str, job_id: str = "job-1") -> JobProgress:
    return JobProgress(job_id=job_id, message=message)


async def until(holds: Callable[[], Any]) -> None:
    """Wait for something that another process does."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await SystemClock().sleep(0.005)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for some seconds is no fault of the server: a test that is about such a wait says how long it is."""
    for module, name in [
        (connection, "FLUSH_S_MAX"),
        (nats_bus, "KEPT_S_MAX"),
        (streams, "API_S"),
        (durable, "API_S"),
    ]:
        monkeypatch.setattr(module, name, PATIENCE_S)


@pytest.fixture(scope="session")
def plain_server() -> Iterator[NatsServer]:
    with running_nats() as server:
        yield server


@pytest.fixture(scope="session")
def stream_server() -> Iterator[NatsServer]:
    with running_nats(jetstream=True) as server:
        yield server


@asynccontextmanager
async def net_at(url: str, *, jetstream: bool = False, **options: Any) -> AsyncIterator[Net]:
    net = Net(url, jetstream, BusOptions(**options))
    try:
        yield net
    finally:
        await net.close()


@pytest.fixture(params=["local", "nats", "nats-jetstream"])
async def net(request: pytest.FixtureRequest) -> AsyncIterator[Net]:
    jetstream = request.param == "nats-jetstream"
    url = "local"
    if request.param != "local":
        url = request.getfixturevalue("stream_server" if jetstream else "plain_server").url
    async with net_at(url, jetstream=jetstream) as made:
        yield made


@pytest.fixture
async def nats_net(plain_server: NatsServer) -> AsyncIterator[Net]:
    async with net_at(plain_server.url) as made:
        yield made


@pytest.fixture
async def stream_net() -> AsyncIterator[Net]:
    """On a server of its own: what a stream has kept would be heard by the next test."""
    with running_nats(jetstream=True) as server:
        async with net_at(server.url, jetstream=True) as made:
            yield made
