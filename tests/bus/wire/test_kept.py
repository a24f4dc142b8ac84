"""A packet that must be kept is kept when publishing it returns: what the server has only taken can be gone with it."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StreamConfig
from nats.js.errors import ServiceUnavailableError

from tests.bus.holding_parts import Parts, parts_of
from tests.bus.rig import TOPIC, rigged
from tests.bus.wire.conftest import Heard, Net, net_at, until
from tests.servers.nats import NatsServer, caught_up, running_nats
from tests.servers.nats_proxy import Frame, NatsProxy, Pipe
from trellis.app.wiring import SystemClock
from trellis.bus.errors import BusUnavailable, BusUncertain, NotKept, TooLargeToKeep
from trellis.bus.messages import DEAD_LETTERS, RESULT, JobResult, PacketWrong, Status
from trellis.bus.topics import Topics
from trellis.bus.wire import nats as nats_bus
from trellis.bus.wire import streams
from trellis.bus.wire.nats import NatsBus
from trellis.bus.wire.streams import ASK_AGAIN_S, SILENT_S_MAX, STREAM, refusal_in
from trellis.testing import FakeClock

kept_results = pytest.mark.requirement("BUS-10", "BUS-12")


def ended(job_id: str, by: str = "trellis") -> JobResult:
    return JobResult(job_id=job_id, status=Status.SUCCEEDED, worker_id=by)


def jobs_of(heard: Heard) -> list[str]:
    bodies = [received.packet.body for received in heard.packets]
    return [body.job_id for body in bodies if isinstance(body, JobResult)]


async def tell(bus: NatsBus, job_id: str) -> None:
    await bus.publish(RESULT, ended(job_id), trace_id="t", message_id=job_id, kept=True)


@dataclass(kw_only=True)
class Silencer(NatsProxy):
    """A network in which what streams say of packets, or of themselves, waits until it is let go."""

    silent: bool = False
    held: list[tuple[Frame, Pipe]] = field(default_factory=list[tuple[Frame, Pipe]])

    def _deliver(self, frame: Frame, pipe: Pipe) -> None:
        if self.silent and frame.subject.startswith("_INBOX") and frame.payload.startswith((b'{"stream"', b'{"type"')):
            self.held.append((frame, pipe))
        else:
            super()._deliver(frame, pipe)

    def release(self) -> None:
        self.silent = False
        held, self.held = self.held, []
        for frame, pipe in held:
            pipe.write(frame.data)


@asynccontextmanager
async def silenced(server: NatsServer) -> AsyncIterator[Silencer]:
    proxy = Silencer(port=server.port, rng=random.Random(1))
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()


async def stored(url: str, stream: str = STREAM) -> int:
    client = await nats.connect(url)
    try:
        return (await client.jetstream().stream_info(stream)).state.messages
    finally:
        await client.close()


@asynccontextmanager
async def publishing(server: NatsServer, folder: Path) -> AsyncIterator[tuple[Parts, Silencer]]:
    """A publisher on a ledger with one job that has succeeded, and the network between it and the server."""
    topics = Topics.model_validate({"topics": {TOPIC: {}}})
    async with silenced(server) as proxy, net_at(proxy.address) as net, rigged(topics, folder) as rig:
        bus: Any = await net.bus()
        await tell(bus, "job-0")  # so that the stream is there
        parts = parts_of(rig, bus=bus)
        await parts.result(await parts.dispatched(job_id="job-1"), "w1")
        yield parts, proxy


async def lose_everything(server: NatsServer, proxy: Silencer) -> None:
    """The server is killed, and with it goes what was not on its disk: all of it."""
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.erase)
    proxy.held.clear()
    proxy.silent = False
    await asyncio.to_thread(server.restart)


async def heard_by_a_client_that_was_away(server: NatsServer, *, marker: str = "marker") -> list[str]:
    """What a durable listener finds that comes after all of it."""
    async with net_at(server.url) as net:
        client, heard = await net.bus("client"), Heard()
        await client.publish(RESULT, ended(marker, "client"), trace_id="t", kept=True)
        await client.listen(RESULT, heard, group="client", durable=True)
        await until(lambda: marker in jobs_of(heard))
        return [job_id for job_id in jobs_of(heard) if job_id != marker]


@kept_results
async def test_a_result_that_was_received_but_not_stored_when_the_server_died_is_delivered_again(tmp_path: Path):
    with running_nats(jetstream=True) as server:
        async with publishing(server, tmp_path) as (parts, proxy):
            proxy.silent = True
            telling = asyncio.create_task(parts.publisher.run_once())
            await until(lambda: proxy.held)
            assert not telling.done(), "nobody knows yet whether it is kept"
            await lose_everything(server, proxy)
            assert (await telling).held_up
            sent = 0
            while not sent:
                sent = (await parts.publisher.run_once()).sent
                await SystemClock().sleep(0.01)
            assert (await parts.publisher.run_once()).events == 0
        assert await heard_by_a_client_that_was_away(server) == ["job-1"]


async def test_a_dead_letter_is_kept_once_in_a_stream_of_its_own(tmp_path: Path):
    with running_nats(jetstream=True) as server:
        async with publishing(server, tmp_path) as (parts, _):
            await parts.result(await parts.dispatched(job_id="bad"), "w1", Status.FAILED_FATAL)
            await parts.tell()
            again, event, bus = ended("bad"), await parts.last("bad"), parts.publisher.bus
            await bus.publish(DEAD_LETTERS, again, trace_id="t", message_id=f"{event.id}:dlq", kept=True)
            assert await stored(server.url, "TRELLIS-sys_job_dlq") == 1


async def test_a_publisher_that_is_content_when_the_server_has_taken_it_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def never(*_: object) -> bool:
        return False

    with running_nats(jetstream=True) as server:
        async with publishing(server, tmp_path) as (parts, proxy):
            monkeypatch.setattr(nats_bus.StreamDirectory, "keep", never)
            assert (await parts.publisher.run_once()).sent == 1
            await lose_everything(server, proxy)
            assert (await parts.publisher.run_once()).events == 0
        monkeypatch.undo()
        assert await heard_by_a_client_that_was_away(server) == [], "the mutant shows nothing"


@kept_results
async def test_a_packet_whose_acknowledgement_was_lost_is_kept_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nats_bus, "KEPT_S_MAX", 0.2)
    with running_nats(jetstream=True) as server:
        async with silenced(server) as proxy, net_at(proxy.address) as net:
            bus = await net.bus()
            await tell(bus, "job-0")
            proxy.silent = True
            with pytest.raises(BusUncertain, match="no stream said"):
                await tell(bus, "job-1")
            proxy.silent = False
            await tell(bus, "job-1")
            assert await stored(server.url) == 2


@kept_results
async def test_acknowledgements_of_many_packets_are_waited_for_together():
    with running_nats(jetstream=True) as server:
        async with silenced(server) as proxy, net_at(proxy.address) as net:
            bus = await net.bus()
            await tell(bus, "job-0")
            proxy.silent = True
            telling = [asyncio.create_task(tell(bus, f"job-{number}")) for number in range(1, 101)]
            await until(lambda: len(proxy.held) == 100)
            assert not any(task.done() for task in telling)
            proxy.release()
            await asyncio.gather(*telling)
            assert await stored(server.url) == 101


@kept_results
async def test_a_server_without_streams_takes_what_must_be_kept_all_the_same(nats_net: Net):
    bus, other, heard = await nats_net.bus(), await nats_net.bus("client"), Heard()
    await other.listen(RESULT, heard)
    await tell(bus, "job-1")
    await heard.until(1)


@kept_results
async def test_a_stream_that_is_missing_is_made_before_the_first_packet_that_must_be_kept():
    with running_nats(jetstream=True) as server:
        async with net_at(server.url) as net:
            bus = await net.bus()
            await asyncio.gather(*(tell(bus, f"job-{number}") for number in range(20)))
            assert await stored(server.url) == 20


@kept_results
@pytest.mark.parametrize("is_heard", [False, True])
async def test_a_stream_that_was_removed_is_made_again(monkeypatch: pytest.MonkeyPatch, is_heard: bool):
    monkeypatch.setattr(nats_bus, "KEPT_S_MAX", 0.2)
    with running_nats(jetstream=True) as server:
        async with net_at(server.url) as net:
            bus, other = await net.bus(), await net.bus("client")
            if is_heard:
                await other.listen(RESULT, Heard(answer="thank you"))
            await tell(bus, "job-0")
            client = await nats.connect(server.url)
            await client.jetstream().delete_stream(STREAM)
            await client.close()
            with pytest.raises(BusUnavailable) as error:
                await tell(bus, "job-1")
            assert isinstance(error.value, BusUncertain) == is_heard
            await tell(bus, "job-1")
            assert await stored(server.url) == 1


async def with_a_stream_of_somebody_else(server: NatsServer, **settings: Any) -> None:
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(StreamConfig(name="ALL", subjects=["sys.>"], **settings))
    await client.close()


@kept_results
async def test_a_stream_that_never_acknowledges_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nats_bus, "KEPT_S_MAX", 0.2)
    with running_nats(jetstream=True) as server:
        await with_a_stream_of_somebody_else(server, no_ack=True)
        async with net_at(server.url) as net:
            await tell(await net.bus(), "job-1")


@kept_results
@pytest.mark.parametrize(
    "settings, kind",
    [({"max_msg_size": 10}, TooLargeToKeep), ({"max_msgs": 1, "discard": DiscardPolicy.NEW}, NotKept)],
    ids=["small", "full"],
)
async def test_refused_stream_publish_gives_the_reason_and_still_reaches_listeners(
    settings: dict[str, Any], kind: type[Exception]
):
    with running_nats(jetstream=True) as server:
        await with_a_stream_of_somebody_else(server, **settings)
        async with net_at(server.url) as net:
            bus, other, heard = await net.bus(), await net.bus("client"), Heard()
            await other.listen(RESULT, heard)
            if "max_msgs" in settings:
                await tell(bus, "job-0")
            with pytest.raises(NotKept, match=r"exceeded|exceeds") as error:
                await tell(bus, "job-1")
            assert type(error.value) is kind
            await until(lambda: jobs_of(heard)[-1:] == ["job-1"])


@kept_results
async def test_publish_while_the_server_dies_reports_an_unknown_outcome():
    with running_nats(jetstream=True) as server:
        async with silenced(server) as proxy, net_at(proxy.address) as net:
            bus = await net.bus()
            await tell(bus, "job-0")
            proxy.silent = True
            telling = asyncio.create_task(tell(bus, "job-1"))
            await until(lambda: proxy.held)
            server.kill()
            with pytest.raises(BusUncertain, match="the connection broke"):
                await telling


@kept_results
@pytest.mark.parametrize(
    "said, why",
    [
        (b'{"stream":"TRELLIS","seq":1}', None),
        (b'{"stream":"TRELLIS","seq":1,"duplicate":true}', None),
        (b'{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"}}', "maximum bytes exceeded"),
        (b'{"error":"odd","stream":"TRELLIS"}', "odd"),
        (b"{", "its answer cannot be read"),
        (b"[]", "its answer cannot be read"),
        (b"{}", "its answer cannot be read"),
        (b'{"error":' * 100_000, "its answer cannot be read"),
    ],
)
def test_malformed_answers_of_a_stream_are_handled(said: bytes, why: str | None):
    refusal = refusal_in(said)
    assert (refusal and refusal.why) == why


@kept_results
@pytest.mark.parametrize("answer", [b"", b'{"ok": true}', b"thank you"])
async def test_answer_of_a_listener_is_not_taken_for_an_acknowledgement_of_the_stream(answer: bytes):
    answered = asyncio.Event()

    async def reply(message: Msg) -> None:
        await message.respond(answer)
        answered.set()

    with running_nats(jetstream=True) as server:
        async with silenced(server) as proxy, net_at(proxy.address) as net:
            bus, client = await net.bus(), await nats.connect(server.url)
            await tell(bus, "job-0")
            await client.subscribe(RESULT, cb=reply)
            await caught_up(client)
            proxy.silent = True
            telling = asyncio.create_task(tell(bus, "job-1"))
            await until(lambda: answered.is_set() and proxy.held)
            await caught_up(client)
            await bus._connection.taken(bus._connection.current)  # what was answered has come before this
            assert not telling.done()
            proxy.release()
            await telling
            await client.close()


def counted(work: Callable[..., Awaitable[Any]], count: Counter[str]) -> Callable[..., Awaitable[Any]]:
    def counting(*args: Any) -> Awaitable[Any]:
        count["asked"] += 1
        return work(*args)

    return counting


@kept_results
async def test_a_server_that_kept_packets_and_falls_silent_is_waited_for_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(nats_bus, "KEPT_S_MAX", 0.2)
    monkeypatch.setattr(streams, "API_S", 0.2)
    with running_nats(jetstream=True) as server:
        async with silenced(server) as proxy, net_at(proxy.address) as net:
            bus, clock = await net.bus(), FakeClock()
            bus._streams._clock = clock
            await tell(bus, "job-0")
            proxy.silent = True
            with pytest.raises(BusUncertain, match="no stream said"):
                await tell(bus, "job-1")
            asked = Counter[str]()
            monkeypatch.setattr(streams, "stream_of", counted(streams.stream_of, asked))
            telling = (tell(bus, f"job-{number}") for number in range(1, 21))
            told = await asyncio.gather(*telling, return_exceptions=True)
            assert {type(error) for error in told} == {BusUnavailable}, "they surely did not arrive"
            assert asked.total() == 1, "who waits together has one answer"
            clock.advance(SILENT_S_MAX)
            await tell(bus, "job-1")
            proxy.release()
            clock.advance(ASK_AGAIN_S)
            await tell(bus, "job-2")
            assert await stored(server.url) == 3


@kept_results
async def test_a_packet_that_the_server_never_takes_is_refused_and_costs_no_connection():
    with running_nats(settings="max_payload: 2000") as server:
        async with net_at(server.url) as net:
            bus = await net.bus()
            link = bus._connection.current
            empty = len(bus._encoded(RESULT, ended("job-1"), "t"))
            for chars in (1_980 - empty, 5_000):  # the first is too large only with its message id
                large = replace(ended("job-1"), error_message="x" * chars)
                with pytest.raises(PacketWrong, match="the server takes 2000"):
                    await bus.publish(RESULT, large, trace_id="t", message_id="job-1", kept=True)
            await tell(bus, "job-2")
            assert bus._connection.current is link


# --- servers that keep nothing for us ----------------------------------------------------------------------------------


async def is_told_to_listeners(url: str, clock: FakeClock | None = None) -> None:
    """A packet that must be kept, where nothing is, is heard by those who listen."""
    async with net_at(url) as net:
        bus, other, heard = await net.bus(), await net.bus("client"), Heard()
        if clock is not None:
            bus._streams._clock = clock
        await other.listen(RESULT, heard)
        for number in range(2):
            await tell(bus, f"job-{number}")
            if clock is not None:
                clock.advance(ASK_AGAIN_S)
        await heard.until(2)


@kept_results
async def test_a_nats_server_without_space_for_the_stream_still_takes_packets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    settings = f'jetstream {{ store_dir: "{tmp_path}", max_mem: 1MB, max_file: 1MB }}'
    with running_nats(settings=settings) as server:
        await is_told_to_listeners(server.url, FakeClock())
    assert caplog.text.count("stream_unusable") == 1, "it is told once, however often it is asked"
    assert "insufficient storage" in caplog.text


@kept_results
async def test_client_that_may_not_read_streams_can_publish(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "API_S", 0.2)
    users = '{ user: "ann", password: "s3cret", permissions: { publish: { deny: "$JS.API.>" } } }'
    with running_nats(jetstream=True, settings=f"authorization {{ users: [ {users} ] }}") as server:
        await is_told_to_listeners(server.url.replace("//", "//ann:s3cret@"))


@kept_results
async def test_streams_that_will_be_there_in_a_moment_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    found = streams.stream_of

    async def not_yet(*_: object) -> Any:
        monkeypatch.setattr(streams, "stream_of", found)
        raise ServiceUnavailableError(code=503, err_code=10008, description="temporarily unavailable")

    monkeypatch.setattr(streams, "stream_of", not_yet)
    with running_nats(jetstream=True) as server:
        async with net_at(server.url) as net:
            bus = await net.bus()
            with pytest.raises(BusUnavailable, match="not there yet") as error:
                await tell(bus, "job-1")
            assert type(error.value) is BusUnavailable, "it surely did not arrive"
            await tell(bus, "job-1")
            assert await stored(server.url) == 1


@kept_results
async def test_a_server_that_gets_streams_later_is_asked_again():
    with running_nats(jetstream=True) as server:
        async with net_at(server.url) as net:
            bus, clock = await net.bus(), FakeClock()
            bus._streams._clock = clock
            bus._streams._link = bus._connection.current
            bus._streams._known[RESULT] = streams._SubjectKeeping(keeps=False, at=clock.monotonic())
            assert not await bus._streams.keep(bus._connection.current, RESULT)
            clock.advance(ASK_AGAIN_S)
            await tell(bus, "job-1")
            assert await stored(server.url) == 1


@kept_results
async def test_a_server_that_dies_while_it_is_asked_for_streams_surely_took_nothing():
    with running_nats(jetstream=True) as server:
        async with net_at(server.url) as net:
            bus = await net.bus()
            server.freeze()
            telling = asyncio.create_task(tell(bus, "job-1"))
            await asyncio.wait({telling}, timeout=0.05)
            server.kill()
            with pytest.raises(BusUnavailable) as error:
                await telling
            assert type(error.value) is BusUnavailable


@kept_results
async def test_the_echo_of_an_own_result_is_taken_without_being_handed_over():
    with running_nats(jetstream=True) as server:
        async with net_at(server.url) as net:
            own, other = await net.bus("trellis"), await net.bus("w1")
            everything, others, durable = Heard(), Heard(), Heard()
            await own.listen(RESULT, everything)
            await own.listen(RESULT, others, echoes=False)
            await own.listen(RESULT, durable, group="trellis", durable=True, echoes=False)
            await tell(own, "own")
            await other.publish(RESULT, ended("foreign", "w1"), trace_id="t")
            await until(lambda: len(everything.packets) == 2 and others.packets and durable.packets)
            assert sorted(jobs_of(everything)) == ["foreign", "own"]
            assert (jobs_of(others), jobs_of(durable)) == (["foreign"], ["foreign"])
