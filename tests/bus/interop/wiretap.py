"""A wire between one side and a NATS server that keeps a copy of every message this side sends, as bytes.

A subscription to everything would hear the same, but it would also be somebody who listens: nobody could find out any more that a subject
has no listener. So the tap sits on the connection and reads the protocol of NATS.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cap.packet_boundary import parse_packet
from cap.validate import validate_bus_packet

from tests.servers.nats import NatsServer
from tests.stopped_tasks import stopped

LINE_BYTES_MAX = 1 << 20
CHUNK = 1 << 16
OUR_SUBJECTS = ("sys.", "job.", "worker.", "_INBOX.")
"""Everything else that a client sends is for the server: streams, acknowledgements, and empty words to itself to learn how far it came."""
ENDED_BY_PEER = (ConnectionError, asyncio.IncompleteReadError)


@dataclass(frozen=True)
class Sent:
    """One message as it went over the wire."""

    subject: str
    data: bytes

    @property
    def packet(self) -> Any:
        return parse_packet(self.data)

    @property
    def kind(self) -> str:
        """Which payload of CAP it has."""
        return str(self.packet.WhichOneof("payload"))


@dataclass
class Wiretap:
    """Everything that was sent through it."""

    port: int
    sent: list[Sent] = field(default_factory=list[Sent])

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def packets(self, subject: str, kind: str | None = None) -> list[Any]:
        """Every packet to a subject, or below it when it ends with a dot."""
        fits = [one for one in self.sent if one.subject == subject or (subject[-1] == "." and _below(one, subject))]
        return [getattr(one.packet, one.kind) for one in fits if kind in {None, one.kind}]

    def check(self) -> None:
        """Every packet of CAP is one by the SDK's own judgement."""
        wrong = {one.subject: errors for one in self.sent if (errors := validate_bus_packet(one.packet))}
        assert not wrong


def _below(sent: Sent, prefix: str) -> bool:
    return sent.subject.startswith(prefix)


@asynccontextmanager
async def tapped(server: NatsServer) -> AsyncGenerator[Wiretap]:
    """A tap in front of this server."""
    tasks: set[asyncio.Task[None]] = set()
    tap = Wiretap(0)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", server.port)
        for pump in (_listen_in(reader, their_writer, tap.sent), _pass_on(their_reader, writer)):
            tasks.add(asyncio.create_task(pump))

    listening = await asyncio.start_server(connected, "127.0.0.1", 0, limit=LINE_BYTES_MAX)
    tap.port = listening.sockets[0].getsockname()[1]
    try:
        yield tap
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await stopped(*tasks, but=(OSError, EOFError))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
    except ENDED_BY_PEER:
        pass
    finally:
        writer.close()


async def _listen_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: list[Sent]) -> None:
    """Pass everything on; `PUB subject [reply] size` and `HPUB subject [reply] header-size size` have bytes behind them."""
    try:
        while True:
            line = await reader.readuntil(b"\r\n")
            words = line.split()
            if words and words[0].upper() in {b"PUB", b"HPUB"}:
                body = await reader.readexactly(int(words[-1]) + 2)
                header = int(words[-2]) if words[0].upper() == b"HPUB" else 0
                if words[1].decode().startswith(OUR_SUBJECTS) and len(body) - header > 2:
                    sent.append(Sent(words[1].decode(), body[header:-2]))
                line += body
            writer.write(line)
            await writer.drain()
    except ENDED_BY_PEER:
        pass
    finally:
        writer.close()
