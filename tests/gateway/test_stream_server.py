"""Streams over a real server: a storm of reconnects, a slow listener, and the end of the server."""

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.gateway.listening import PATIENCE_S, HeardIds, Socket
from tests.gateway.serving import Served, serving, settings_in
from tests.stopped_tasks import stopped
from trellis.app.settings import Settings
from trellis.auth.tokens import issue, symmetric_key
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.gateway import GatewayOptions
from trellis.gateway.event_stream import STOPPING
from trellis.gateway.hub import StreamOptions
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role, Trigger

KEY = symmetric_key(b"for tests of streams: 32 bytes..", issuer="tests")
EVENTS_PER_JOB = 4
BATCH = 5
WRITERS = 4
REPLICAS = 2
MANY = GatewayOptions(
    requests_per_second=100_000,
    burst=100_000,
    streams=StreamOptions(ring=200, listeners_per_principal_max=1_000),
)
"""A ring that is small beside what happens, so that listeners come from behind it all the time."""


def token(role: Role = Role.OWNER, name: str = "listener") -> str:
    return issue(KEY, name=name, roles=[role], ttl_s=3_600, now=time.time())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def any_url(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    return sqlite_url if request.param == "sqlite" else request.getfixturevalue("postgres_url")


# --- writers -------------------------------------------------------------------------------------------------------


def write_jobs(url: str, writer: str, jobs: int) -> None:
    """One writer: jobs of its own, from submit to success, a few in each transaction."""
    asyncio.run(_write_jobs(url, writer, jobs))


async def _write_jobs(url: str, writer: str, jobs: int) -> None:
    ledger = await open_ledger(url)
    try:
        for first in range(0, jobs, BATCH):
            await work_through(ledger, writer, range(first, min(first + BATCH, jobs)))
    finally:
        await ledger.close()


async def work_through(ledger: Ledger, writer: str, numbers: Sequence[int]) -> None:
    submitter, worker = Actor(role=Role.SUBMITTER, name=writer), Actor(role=Role.WORKER, name=writer)
    await ledger.submit(submitter, [NewJob(job_id=JobId(f"{writer}-{n}"), type=writer) for n in numbers])
    claim = Claim(claim_id=ClaimId(f"{writer}-{numbers[0]}"), types=(TypeClaim(type=writer),), start=BATCH)
    claimed = (await ledger.turn(Turn(actor=worker, claim=claim))).claimed
    assert len(claimed) == len(numbers)
    done = tuple(Advance(job.lease, job.state, Trigger.COMPLETE, result=b"null") for job in claimed)
    await ledger.turn(Turn(actor=worker, advances=done))


# --- the storm -----------------------------------------------------------------------------------------------------


async def follow(
    servers: Sequence[Served], begins: str, rng: random.Random, last: asyncio.Future[str], piece: int
) -> HeardIds:
    """Listen from `begins` to the last event, over connections that are cut at random, each to any replica."""
    heard = HeardIds(last_id=begins)

    def has_all() -> bool:
        return last.done() and heard.last_position >= last.result()

    while not has_all():
        stream = await Socket.connect(rng.choice(servers).port, token(), heard)
        assert stream.status == 200
        for _ in range(rng.randint(1, 12)):
            reading = asyncio.ensure_future(stream.read(rng.randint(1, piece)))
            await asyncio.wait({reading, last}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and has_all():
                reading.cancel()
                await stopped(reading)
                break
            assert await reading, heard.comments
        await stream.cut()
    return heard


async def storm(
    url: str, servers: Sequence[Served], writers: Executor, *, jobs: int, listeners: int, piece: int
) -> None:
    ledger = await open_ledger(url)
    try:
        begins, loop = await ledger.feed_end(), asyncio.get_running_loop()
        last: asyncio.Future[str] = loop.create_future()
        following = [
            asyncio.ensure_future(follow(servers, begins, random.Random(n), last, piece)) for n in range(listeners)
        ]
        names = [f"writer{n}" for n in range(WRITERS)]
        await asyncio.gather(*(loop.run_in_executor(writers, write_jobs, url, name, jobs // WRITERS) for name in names))
        expected = await everything(ledger, begins)
        assert len(expected) == jobs * EVENTS_PER_JOB
        last.set_result(list(expected)[-1])
        for heard in await asyncio.gather(*following):
            assert heard.event_ids == list(expected.values())
    finally:
        await ledger.close()


async def everything(ledger: Ledger, position: str) -> dict[str, str]:
    """The ids of all events after a position, by their own positions, as the feed has them."""
    found: dict[str, str] = {}
    while (page := await ledger.feed(position, limit=500)).events:
        found |= {at: event.id for at, event in zip(page.positions, page.events, strict=True)}
        position = page.position
    return found


@pytest.mark.requirement("RUN-5", "PIPE-13", "D6")
async def test_listeners_that_reconnect_at_random_see_every_event_once_and_in_order(
    sqlite_url: str, settings: Settings
):
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(sqlite_url, [KEY], settings=settings, options=MANY)) for _ in range(REPLICAS)
        ]
        writers = stack.enter_context(ThreadPoolExecutor(4))
        await storm(sqlite_url, servers, writers, jobs=252, listeners=20, piece=8_192)


@pytest.mark.prove
@pytest.mark.quiet
@pytest.mark.timeout(600)
@pytest.mark.requirement("RUN-5", "PIPE-13", "D6")
async def test_a_hundred_listeners_see_ten_thousand_events_of_four_processes_once_and_in_order(
    any_url: str, settings: Settings
):
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(any_url, [KEY], settings=settings, options=MANY)) for _ in range(REPLICAS)
        ]
        writers = stack.enter_context(ProcessPoolExecutor(4, mp_context=get_context("spawn")))
        await storm(any_url, servers, writers, jobs=2_500, listeners=100, piece=65_536)


# --- the server ----------------------------------------------------------------------------------------------------


async def test_open_streams_end_when_the_server_stops_and_do_not_delay_it(sqlite_url: str, settings: Settings):
    with serving(sqlite_url, [KEY], settings=settings) as server:
        streams = [await Socket.connect(server.port, token(), HeardIds()) for _ in range(5)]
        for stream in streams:
            await stream.read()
    for stream in streams:
        while await stream.read():
            pass
        assert stream.over
        assert stream.heard.comments == [STOPPING]
        await stream.cut()


async def test_a_listener_that_vanishes_leaves_nothing_behind(sqlite_url: str, settings: Settings):
    with serving(sqlite_url, [KEY], settings=settings) as server:
        streams = [await Socket.connect(server.port, token(), HeardIds()) for _ in range(5)]
        assert server.app.state.streams.hub.listeners == 5
        for stream in streams:
            await stream.cut()
        await until_alone(server)


async def until_alone(server: Served) -> None:
    """Nobody listens there any more, and nothing is looked at for anybody."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_until_alone(server), server.loop))


async def _until_alone(server: Served) -> None:
    hub = server.app.state.streams.hub
    while hub.listeners or hub._tasks:  # noqa: ASYNC110 - the loop hears of closed sockets when it goes round
        await asyncio.sleep(0)


async def test_a_socket_that_is_not_read_is_dropped_with_a_bound_on_what_waits_for_it(
    sqlite_url: str, settings: Settings
):
    options = replace(MANY, streams=replace(MANY.streams, send_timeout_s=0.2))
    with serving(sqlite_url, [KEY], settings=settings, options=options, send_buffer=4_096) as server:
        stream = await Socket.connect(server.port, token(), HeardIds(last_id=f"{0:016}"), receive_buffer=4_096)
        stream.pause()
        await _write_jobs(sqlite_url, "writer0", 500)
        await until_alone(server)
        await stream.cut()
