"""A TCP proxy on loopback in front of a NATS server that makes the network misbehave on purpose.

It reads the frames that the server sends and, by a seeded draw for each, loses, repeats, delays or reorders messages of chosen subjects;
answers to questions are chosen like any subject, by their packet. What clients send passes as it is. Connections can be cut at any
moment, and new ones refused. What the server says of other addresses is left out, so that no client finds a
way around.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from tests.stopped_tasks import stopped
from trellis.bus.topics import subject_matches

CHUNK = 256 * 1024
LINE_MAX = 64 * 1024
FRAME_MAX = 64 * 1024 * 1024
HELD_MAX = 2_000
"""Frames of one connection that may be on their way late; what comes beyond them passes at once."""
SWAP_S = 0.1
"""How long a frame waits for the one that shall overtake it."""
INBOXES = "_INBOX"
PACKET = b"\n"
"""How a CAP packet begins: its trace id is its first field. What else goes to inboxes is the server's own talk and stays."""


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How often a message is lost, and so on; shares of 1."""

    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    swapped: float = 0.0
    late_s: tuple[float, float] = (0.05, 1.0)
    """How late, drawn so that each order of magnitude is as likely as another."""
    subjects: tuple[str, ...] = ("job.>", "worker.>", "sys.>", "_INBOX.>")


CALM = Weather()


@dataclass(frozen=True)
class Frame:
    """One thing that the server says; `subject` is empty when it is no message."""

    data: bytes
    subject: str = ""
    payload: bytes = b""


@dataclass(eq=False)
class Pipe:
    """One client's connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    swap: Frame | None = None
    late: int = 0

    def write(self, data: bytes) -> None:
        if not self.client.is_closing():
            self.client.write(data)

    def close(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()

    async def closed(self) -> None:
        """Until nothing is left of it."""
        for writer in (self.client, self.server):
            await _abort(writer)


@dataclass(kw_only=True)
class NatsProxy:
    """Open it with `nats_proxied`. `weather` may be changed at any time; `met` counts what was done to messages."""

    port: int
    rng: random.Random
    weather: Weather = CALM
    met: Counter[str] = field(default_factory=Counter[str])
    address: str = ""
    _listening: asyncio.Server | None = None
    _pipes: set[Pipe] = field(default_factory=set[Pipe])
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set["asyncio.Task[None]"])

    def calm(self) -> None:
        """From now on every message comes, once and in time."""
        self.weather = CALM

    def cut(self, number: int = 1) -> None:
        """Break so many connections, whatever is on its way in them."""
        for pipe in self.rng.sample(sorted(self._pipes, key=id), min(number, len(self._pipes))):
            self.met["cut"] += 1
            pipe.close()

    async def open(self) -> None:
        """Let clients in, always at the same address."""
        port = int(self.address.rpartition(":")[2]) if self.address else 0
        self._listening = await asyncio.start_server(self._accept, "127.0.0.1", port, limit=CHUNK)
        self.address = f"nats://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Break every connection, and refuse new ones as a machine does whose server is down."""
        if self._listening is not None:
            self._listening.close()
        for pipe in list(self._pipes):
            pipe.close()
        await stopped(*self._tasks, but=(OSError, EOFError))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.port, limit=CHUNK)
        except OSError:
            await _abort(writer)
            return
        pipe = Pipe(writer, to_server)
        self._pipes.add(pipe)
        up = asyncio.create_task(_pass_on(reader, to_server))
        down = asyncio.create_task(self._bring(from_server, pipe))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pipes.discard(pipe)
            pipe.close()
            up.cancel()
            down.cancel()
            await stopped(up, down, but=(OSError, EOFError))
            await pipe.closed()

    async def _bring(self, reader: asyncio.StreamReader, pipe: Pipe) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while frame := await _read(reader):
                self._deliver(frame, pipe)
                await pipe.client.drain()

    # -- what happens to one frame ------------------------------------------------------------------------------------

    def _deliver(self, frame: Frame, pipe: Pipe) -> None:
        what = self._drawn(frame, pipe)
        if what:
            self.met[what] += 1
        match what:
            case "lost":
                return
            case "repeated":
                pipe.write(frame.data)
                self._later(frame, pipe)
            case "late":
                self._later(frame, pipe)
            case "swapped":
                pipe.swap = frame
                asyncio.get_running_loop().call_later(SWAP_S, self._unswap, pipe, frame)
                return
            case _:
                pipe.write(frame.data)
        if pipe.swap is not None and frame.subject and what != "late":
            self._unswap(pipe, pipe.swap)

    def _drawn(self, frame: Frame, pipe: Pipe) -> str:
        weather = self.weather
        if not frame.subject or not any(subject_matches(pattern, frame.subject) for pattern in weather.subjects):
            return ""
        if frame.subject.startswith(INBOXES) and not frame.payload.startswith(PACKET):
            return ""
        self.met["messages"] += weather is not CALM
        draw = self.rng.random()
        for what in ("lost", "repeated", "late", "swapped"):
            share: float = getattr(weather, what)
            if draw < share:
                full = pipe.late >= HELD_MAX if what in {"repeated", "late"} else pipe.swap is not None
                return "" if full and what != "lost" else what
            draw -= share
        return ""

    def _later(self, frame: Frame, pipe: Pipe) -> None:
        def arrive() -> None:
            pipe.late -= 1
            pipe.write(frame.data)

        pipe.late += 1
        low, high = self.weather.late_s
        asyncio.get_running_loop().call_later(low * (high / low) ** self.rng.random(), arrive)

    def _unswap(self, pipe: Pipe, frame: Frame) -> None:
        if pipe.swap is frame:
            pipe.swap = None
            pipe.write(frame.data)


async def _abort(writer: asyncio.StreamWriter) -> None:
    """Close it at once, as a broken network does, and see it gone."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame of the server; None at the end."""
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        return None
    assert len(line) <= LINE_MAX, "no frame begins with such a line"
    words = line.split()
    match words[0].upper() if words else b"":
        case b"INFO":
            return Frame(b"INFO " + _without_ways_around(line[5:]) + b"\r\n")
        case b"MSG":
            return await _message(reader, line, words, headers=0)
        case b"HMSG":
            return await _message(reader, line, words, headers=int(words[-2]))
        case _:
            return Frame(line)


async def _message(reader: asyncio.StreamReader, line: bytes, words: Sequence[bytes], *, headers: int) -> Frame:
    size = int(words[-1])
    assert size <= FRAME_MAX
    body = await reader.readexactly(size + 2)
    return Frame(line + body, words[1].decode(), body[headers:size])


def _without_ways_around(info: bytes) -> bytes:
    told = json.loads(info)
    for name in ("connect_urls", "ws_connect_urls"):
        told.pop(name, None)
    return json.dumps(told).encode()


@contextlib.asynccontextmanager
async def nats_proxied(port: int, *, seed: int) -> AsyncIterator[NatsProxy]:
    """A proxy to the server at this port."""
    proxy = NatsProxy(port=port, rng=random.Random(seed))
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()
