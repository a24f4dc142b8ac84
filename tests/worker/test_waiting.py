"""A process that is started before its ledger is there: it waits, says so, and stops when told to."""

import asyncio
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable

import pytest

from tests.servers.postgres import PostgresServer
from tests.stopped_tasks import stopped
from trellis.app.wiring import SystemClock
from trellis.engine.errors import LedgerError, LedgerNotMigrated, LedgerUnavailable, LedgerUrlInvalid
from trellis.engine.ledger import Ledger
from trellis.engine.service import BACKOFF_S_MAX, wait_for_ledger
from trellis.ledgers import migrate, open_ledger
from trellis.testing import FakeClock
from trellis.worker.worker import open_until_signalled

AWAY = LedgerUnavailable(reason="nothing listens there")


class Opener:
    """Opens a real ledger, after it has failed as often as it is told."""

    def __init__(self, clock: FakeClock, *errors: LedgerError) -> None:
        self.clock = clock
        self.errors = list(errors)
        self.tried_at: list[float] = []

    async def __call__(self) -> Ledger:
        self.tried_at.append(self.clock())
        if self.errors:
            raise self.errors.pop(0)
        return await open_ledger(":memory:")


async def passing(clock: FakeClock, task: "asyncio.Task[Ledger | None]", until_s: float = 600.0) -> None:
    """Let time pass, a little at a time, until the task is done."""
    while not task.done() and clock() < until_s:
        await asyncio.sleep(0)
        if clock._sleepers:
            clock.advance(0.05)
    async with asyncio.timeout(60):
        await asyncio.wait([task])


async def test_a_ledger_that_is_away_is_waited_for_ever_more_patiently(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    clock = FakeClock(0.0)
    opener = Opener(clock, *[AWAY] * 12)
    waiting = asyncio.create_task(wait_for_ledger(opener, clock, random.Random(1), asyncio.Event()))
    await passing(clock, waiting)
    ledger = waiting.result()
    assert ledger is not None
    await ledger.close()
    pauses = [later - earlier for earlier, later in zip(opener.tried_at, opener.tried_at[1:], strict=False)]
    assert len(pauses) == 12
    assert pauses[0] <= 0.15
    assert BACKOFF_S_MAX / 2 <= pauses[-1] <= BACKOFF_S_MAX + 0.05
    told = caplog.text
    assert told.count("waiting_for_ledger") == 1, "the first at once, then one a minute"
    assert "nothing listens there" in told
    assert "waited_s" in told
    assert told.count("ledger_answers") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        LedgerUrlInvalid(url="postgresql://x", reason="password authentication failed"),
        LedgerNotMigrated(found=0, needed=2, url="postgresql://x"),
    ],
    ids=["address or password", "not migrated"],
)
async def test_a_ledger_that_answers_and_is_the_wrong_one_is_not_waited_for(wrong: LedgerError):
    clock = FakeClock(0.0)
    opener = Opener(clock, wrong)
    with pytest.raises(type(wrong)):
        await wait_for_ledger(opener, clock, random.Random(1), asyncio.Event())
    assert opener.tried_at == [0.0]


async def test_unknown_host_is_not_retried():
    async def opening() -> Ledger:
        try:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        except OSError as error:
            lost = LedgerUnavailable(reason="there is no such host")
            raise lost from error

    with pytest.raises(LedgerUnavailable):
        await wait_for_ledger(opening, FakeClock(0.0), random.Random(1), asyncio.Event())


async def silence() -> Ledger:
    """A server that takes the connection and never says a word."""
    await asyncio.Event().wait()
    raise AssertionError


async def refusal() -> Ledger:
    raise AWAY


@pytest.mark.parametrize("opening", [silence, refusal])
async def test_a_process_that_waits_stops_at_a_signal(opening: Callable[[], Awaitable[Ledger]]):
    waiting = asyncio.create_task(open_until_signalled(opening, FakeClock(0.0), random.Random(1)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await waiting is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the next signal is the process's own again"


async def test_a_postgresql_that_starts_later_is_found(postgres_server: PostgresServer):
    """The real server behind a port that nobody listens at, until somebody does."""
    url = postgres_server.create_database("waited_for")
    await migrate(url)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    behind = url.replace(f":{postgres_server.port}/", f":{port}/")
    assert behind != url
    tries, servers = 0, []

    async def opening() -> Ledger:
        nonlocal tries
        tries += 1
        if tries == 3:
            servers.append(await asyncio.start_server(_forward(postgres_server.port), "127.0.0.1", port))
        return await open_ledger(behind, hints=False)

    ledger = await wait_for_ledger(opening, SystemClock(), random.Random(1), asyncio.Event())
    assert ledger is not None
    assert tries == 3
    await ledger.close()
    servers[0].close()


def _forward(port: int):
    """Bytes from here to the server and back."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        await stopped(pump(reader, there_writer), pump(there_reader, writer), but=(OSError, EOFError))

    return serve
