"""A NATS server that goes away, comes back, forgets everything or hangs."""

import asyncio
import contextlib
import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from tests.bus.wire.conftest import PATIENCE_S, Heard, Net, net_at, said, until
from tests.servers.nats import LEFT_BEHIND, NatsServer, caught_up, running_nats
from tests.servers.nats_proxy import NatsProxy
from trellis.app.wiring import SystemClock
from trellis.bus.errors import BusUnavailable, BusUncertain, NoResponders
from trellis.bus.messages import RESULT, SUBMIT, JobResult, PacketRefused, Status
from trellis.bus.wire import connection as nats_connection
from trellis.bus.wire import streams as nats_durable
from trellis.bus.wire.nats import NatsBus
from trellis.bus.wire.streams import STREAM
from trellis.engine.errors import LedgerUnavailable


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with running_nats(jetstream=True) as made:
        yield made


def ended(job_id: str, worker_id: str = "w-1") -> JobResult:
    return JobResult(job_id=job_id, status=Status.SUCCEEDED, worker_id=worker_id)


def link_of(bus: NatsBus) -> object:
    return bus._connection.current


async def reconnected(links: dict[NatsBus, object]) -> None:
    """A bus notices that its server was replaced only when it looks."""
    await until(lambda: all(bus.connected and link_of(bus) is not link for bus, link in links.items()))


def jobs_of(heard: Heard) -> list[str]:
    return [received.packet.body.job_id for received in heard.packets]  # type: ignore[union-attr]


@pytest.mark.requirement("BUS-10")
async def test_without_a_server_nothing_is_taken_and_nothing_is_sent_later(server: NatsServer):
    async with net_at(server.url) as net:
        bus, subject, heard = await net.bus(), net.subject(), Heard()
        await bus.listen(subject, heard)
        server.kill()
        await until(lambda: not bus.connected)
        for _ in range(3):
            with pytest.raises(BusUnavailable) as error:
                await bus.publish(subject, said("lost"), trace_id="t")
            assert type(error.value) is BusUnavailable, "it surely did not arrive"
            with pytest.raises(BusUnavailable):
                await bus.ask(subject, said("lost"), trace_id="t", timeout_s=1)
        server.restart()
        await until(lambda: bus.connected)
        await bus.publish(subject, said("taken"), trace_id="t", needs_listener=True)
        await heard.until(1)
        assert heard.messages == ["taken"]


@pytest.mark.requirement("BUS-10")
async def test_a_durable_listener_whose_connection_breaks_as_it_begins_listens_later(
    nats_net: Net, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nats_durable, "RETRY_S", 0.01)
    bus, other, subject, heard = await nats_net.bus(), await nats_net.bus("client"), nats_net.subject(), Heard()
    taken, broken = bus._connection.taken, [True]

    async def breaks_once(link: nats_connection.NatsLink) -> None:
        if broken:
            broken.pop()
            raise bus._connection.uncertain("the connection broke")
        await taken(link)

    monkeypatch.setattr(bus._connection, "taken", breaks_once)
    async with asyncio.timeout(PATIENCE_S):
        await bus.listen(subject, heard, group="g", durable=True)
        while not heard.packets:
            with contextlib.suppress(NoResponders):
                await other.publish(subject, said("hello"), trace_id="t", needs_listener=True)
            await SystemClock().sleep(0.005)


@pytest.mark.requirement("BUS-10")
async def test_publishers_that_wait_are_told_when_the_server_dies(server: NatsServer):
    async with net_at(server.url) as net:
        bus = await net.bus()
        server.freeze()
        waiting = [
            asyncio.create_task(bus.publish(net.subject(), said("?"), trace_id="t", needs_listener=True))
            for _ in range(10)
        ]
        asking = asyncio.create_task(bus.ask(net.subject(), said("?"), trace_id="t", timeout_s=60))
        await asyncio.wait({*waiting, asking}, timeout=0.05)
        server.kill()
        told = await asyncio.gather(*waiting, asking, return_exceptions=True)
        assert [type(error) for error in told] == [BusUncertain] * 10 + [BusUnavailable], "the server may have taken it"


@pytest.mark.requirement("BUS-10")
async def test_a_server_that_hangs_counts_as_gone(server: NatsServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nats_connection, "FLUSH_S_MAX", 0.2)
    async with net_at(server.url) as net:
        bus = await net.bus()
        server.freeze()
        with pytest.raises(BusUncertain, match="took nothing"):
            await bus.publish(net.subject(), said("?"), trace_id="t")
        assert not bus.connected
        server.thaw()
        await until(lambda: bus.connected)
        await bus.publish(net.subject(), said("!"), trace_id="t")


@dataclass(kw_only=True)
class Stranger(NatsProxy):
    """Now and then something else than a NATS server answers at the address."""

    rubbish: list[bytes] = field(default_factory=list[bytes])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.rubbish:
            await super()._accept(reader, writer)
            return
        writer.write(self.rubbish.pop())
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


RUBBISH = [
    b"INFO []\r\n",
    b"HTTP/1.1 503 Busy\r\n",
    b"INFO {\r\n",
    b"INFO {}\r\n-ERR\r\n",
    b"x" * 200_000 + b"\r\n",
    b"",
]


@pytest.mark.requirement("BUS-10")
@pytest.mark.filterwarnings(LEFT_BEHIND)
async def test_bus_keeps_reconnecting_whatever_server_answers_at_its_address(server: NatsServer):
    stranger = Stranger(port=server.port, rng=random.Random(1), rubbish=[RUBBISH[0]])
    await stranger.open()
    try:
        async with net_at(stranger.address) as net:
            bus = await net.bus()
            assert not bus.connected, "the first try fails, which is no reason not to open"
            bus._connection.options = replace(bus._connection.options, reconnect_s=0.02)
            await until(lambda: bus.connected)
            for rubbish in RUBBISH:
                stranger.rubbish, link = [rubbish], link_of(bus)
                stranger.cut(99)
                await until(lambda link=link: bus.connected and link_of(bus) is not link)
                await bus.publish(net.subject(), said("!"), trace_id="t")
                assert not stranger.rubbish
    finally:
        await stranger.close()
        gc.collect()


@pytest.mark.requirement("BUS-10")
async def test_nats_client_that_hangs_while_closing_is_replaced(plain_server: NatsServer):
    """The server throws it out while it has something to send: what it wanted to say then is not said, and nobody is called."""
    async with net_at(plain_server.url) as net:
        bus = await net.bus()
        bus._connection.options = replace(bus._connection.options, reconnect_s=0.02)
        client, link = bus._connection.client, link_of(bus)

        async def lost() -> None:
            raise ConnectionResetError("Connection lost")

        client._transport.drain = lost
        client._pending, client._pending_data_size = [b"PING\r\n"], 6
        with pytest.raises(ConnectionResetError):
            await client._close(Client.CLOSED, True)
        await until(lambda: bus.connected and link_of(bus) is not link)
        await bus.publish(net.subject(), said("!"), trace_id="t")
        client._transport.close()


async def test_a_client_whose_reconnecting_was_cancelled_has_given_up():
    client: Any = Client()
    client._reconnection_task = cancelled = asyncio.ensure_future(asyncio.Event().wait())
    cancelled.cancel()
    await asyncio.wait({cancelled})
    with pytest.raises(NatsError, match="it gave up"):
        nats_connection._raise_if_given_up(client)


@pytest.mark.requirement("BUS-10")
async def test_a_bus_opened_before_its_server_listens_once_it_is_there(server: NatsServer):
    server.kill()
    async with net_at(server.url) as net:
        bus, subject, heard, kept = await net.bus(), net.subject(), Heard(), Heard()
        assert not bus.connected
        await bus.listen(subject, heard)
        await bus.listen(RESULT, kept, group="trellis", durable=True)
        with pytest.raises(BusUnavailable):
            await bus.publish(subject, said("?"), trace_id="t")
        server.restart()
        await until(lambda: bus.connected)
        await bus.publish(subject, said("!"), trace_id="t", needs_listener=True)
        await heard.until(1)
        other = await net.bus("w-1")
        await until_kept(other, kept)


async def until_kept(bus, kept: Heard) -> None:
    """Send results until one arrives: what is sent before the stream is there again is lost."""
    async with asyncio.timeout(20):
        number = 0
        while not kept.packets:
            with contextlib.suppress(BusUnavailable):
                await bus.publish(RESULT, ended(f"job-{number}"), trace_id="t")
            number += 1
            await SystemClock().sleep(0.05)


async def until_stored(server: NatsServer, count: int) -> None:
    client = await nats.connect(server.url)
    async with asyncio.timeout(20):
        while (await client.jetstream().stream_info(STREAM)).state.messages < count:
            await SystemClock().sleep(0.005)
    await client.close()


@pytest.mark.requirement("BUS-10")
async def test_results_wait_for_a_listener_that_is_away(server: NatsServer):
    async with net_at(server.url) as net:
        worker, heard = await net.bus("w-1"), Heard()
        first = await net.bus()
        listening = await first.listen(RESULT, heard, group="trellis", durable=True)
        await worker.publish(RESULT, ended("job-0"), trace_id="t")
        await heard.until(1)
        await listening.stop()
        for number in range(1, 200):
            await worker.publish(RESULT, ended(f"job-{number}"), trace_id="t")
        second, rest = await net.bus(), Heard()
        await second.listen(RESULT, rest, group="trellis", durable=True)
        await rest.until(199)
        assert sorted(jobs_of(rest)) == sorted(f"job-{number}" for number in range(1, 200))


@pytest.mark.requirement("BUS-10")
async def test_results_and_submissions_survive_the_server(server: NatsServer):
    async with net_at(server.url) as net:
        bus, worker, heard = await net.bus(), await net.bus("w-1"), Heard()
        listening = await bus.listen(RESULT, heard, group="trellis", durable=True)
        await listening.stop()
        await worker.publish(RESULT, ended("job-1"), trace_id="t")
        await until_stored(server, 1)
        links = {bus: link_of(bus)}
        server.restart()
        await reconnected(links)
        await bus.listen(RESULT, heard, group="trellis", durable=True)
        await heard.until(1)
        assert jobs_of(heard) == ["job-1"]


@pytest.mark.requirement("BUS-10")
async def test_packet_in_flight_when_the_server_dies_is_redelivered(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nats_durable, "ACK_WAIT_S", 0.5)
    async with net_at(server.url) as net:
        bus, worker, heard = await net.bus(), await net.bus("w-1"), Heard()
        heard.failures = 1
        await bus.listen(RESULT, heard, group="trellis", durable=True)
        await worker.publish(RESULT, ended("job-1"), trace_id="t")
        await heard.until(1)
        await until_stored(server, 1)
        server.restart()
        await heard.until(2)
        assert jobs_of(heard) == ["job-1", "job-1"]


@pytest.mark.requirement("BUS-10")
async def test_a_server_that_lost_its_data_gets_its_stream_again(server: NatsServer):
    async with net_at(server.url) as net:
        bus, worker, heard = await net.bus(), await net.bus("w-1"), Heard()
        await bus.listen(RESULT, heard, group="trellis", durable=True)
        await bus.listen(SUBMIT, Heard(), group="trellis", durable=True)
        links = {bus: link_of(bus), worker: link_of(worker)}
        server.kill()
        server.erase()
        server.restart()
        await reconnected(links)
        await until_kept(worker, heard)


@pytest.mark.requirement("BUS-10")
async def test_a_server_with_jetstream_later_or_not_any_more_is_listened_to_all_the_same(server: NatsServer):
    server.restart(jetstream=False)
    async with net_at(server.url) as net:
        bus, worker = await net.bus(), await net.bus("w-1")
        heard = Heard()
        await bus.listen(RESULT, heard, group="trellis", durable=True)
        await worker.publish(RESULT, ended("without"), trace_id="t", needs_listener=True)
        await heard.until(1)
        for jetstream in (True, False):
            links = {bus: link_of(bus), worker: link_of(worker)}
            server.restart(jetstream=jetstream)
            await reconnected(links)
            heard.packets.clear()
            await until_kept(worker, heard)


async def test_the_same_message_id_is_one_packet_for_durable_listeners(server: NatsServer):
    async with net_at(server.url) as net:
        bus, worker, heard = await net.bus(), await net.bus("w-1"), Heard()
        await bus.listen(RESULT, heard, group="trellis", durable=True)
        for job_id, message_id in (("job-1", "m-1"), ("job-1", "m-1"), ("job-2", "m-2")):
            await worker.publish(RESULT, ended(job_id), trace_id="t", message_id=message_id)
        await heard.until(2)
        assert sorted(jobs_of(heard)) == ["job-1", "job-2"]


async def test_each_result_goes_to_one_process_of_every_group(server: NatsServer):
    async with net_at(server.url) as net:
        worker, one, two, other = await net.bus("w-1"), Heard(), Heard(), Heard()
        for heard, group in ((one, "trellis"), (two, "trellis"), (other, "audit")):
            bus = await net.bus()
            await bus.listen(RESULT, heard, group=group, durable=True)
        for number in range(50):
            await worker.publish(RESULT, ended(f"job-{number}"), trace_id="t")
        await other.until(50)
        await until(lambda: len(one.packets) + len(two.packets) == 50)
        assert sorted(jobs_of(one) + jobs_of(two)) == sorted(jobs_of(other))


async def test_a_stream_that_somebody_else_made_is_used(server: NatsServer):
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(name="ALL", subjects=["sys.>"])
    await client.close()
    async with net_at(server.url) as net:
        bus, worker, heard = await net.bus(), await net.bus("w-1"), Heard()
        await bus.listen(RESULT, heard, group="trellis", durable=True)
        await worker.publish(RESULT, ended("job-1"), trace_id="t")
        await heard.until(1)


@pytest.mark.requirement("BUS-10")
async def test_listener_added_while_the_server_is_away_gets_later_packets(server: NatsServer):
    async with net_at(server.url) as net:
        bus, subject, heard = await net.bus(), net.subject(), Heard()
        server.kill()
        await until(lambda: not bus.connected)
        await bus.listen(subject, heard)
        server.restart()
        await until(lambda: bus.connected)
        await bus.publish(subject, said("1"), trace_id="t", needs_listener=True)
        await heard.until(1)


@pytest.mark.requirement("BUS-10")
async def test_a_client_that_gave_up_is_replaced_with_all_that_it_listened_to(server: NatsServer):
    async with net_at(server.url) as net:
        bus, worker, subject, heard, kept = await net.bus(), await net.bus("w-1"), net.subject(), Heard(), Heard()
        await bus.listen(subject, heard)
        await bus.listen(RESULT, kept, group="trellis", durable=True)
        links = {bus: link_of(bus)}
        assert bus._connection.client is not None
        await bus._connection.client.close()
        await reconnected(links)
        await bus.publish(subject, said("1"), trace_id="t", needs_listener=True)
        await heard.until(1)
        await until_kept(worker, kept)


@pytest.mark.requirement("BUS-10")
async def test_a_refusal_that_could_not_be_told_is_tried_again(stream_net: Net):
    bus, refused = await stream_net.bus(), []

    async def on_refused(_: str, error: PacketRefused) -> None:
        refused.append(error.error_code)
        if len(refused) == 1:
            raise LedgerUnavailable(reason="away")

    bus.on_refused = on_refused
    await bus.listen(SUBMIT, Heard(), group="trellis", durable=True)
    client = await nats.connect(stream_net.url)
    await client.publish(SUBMIT, b"\xff")
    await caught_up(client)
    await client.close()
    await until(lambda: len(refused) == 2)
