"""The port of the bus. `local` serves one process, `nats` a fleet; one test suite runs on both.

What every implementation guarantees:

- `publish` returns when the bus has taken the packet, or raises BusUnavailable. Nothing is queued to be sent later.
  Its subclass BusUncertain means that the packet may have arrived or may still arrive: the connection broke before
  the outcome was known. Any other BusUnavailable means that the packet did not arrive.
- `publish(..., needs_listener=True)` also raises NoResponders when the bus knows that there is no subscriber.
- `publish(..., kept=True)` returns only when the packet is also stored for durable subscribers, where the bus stores
  packets. It raises NotKept when the bus has taken the packet but refuses to store it; current subscribers still get
  it.
- A packet may be lost, duplicated or late. Receivers must tolerate that.
- `listen` with a group gives each packet to one subscriber of the group, without a group to every subscriber. A
  handler that raises loses only its own packet. A durable subscriber gets the packet again, if the bus can do that.
- Packets that cannot be read, or lack a required signature, never reach a handler. They are dropped and an alert is
  sent.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from trellis.bus.errors import BusUnavailable
from trellis.bus.messages import OnRefused, Packet, PacketBody


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedPacket:
    """A packet that came in. `answer` replies to a sender that asked.

    It does nothing if the packet was not a question.
    """

    subject: str
    packet: Packet
    answer: "Callable[[PacketBody], Awaitable[None]]"
    wants_answer: bool = False


PacketHandler: TypeAlias = Callable[[ReceivedPacket], Awaitable[None]]


class BusSubscription(Protocol):
    """One subscription."""

    async def stop(self) -> None:
        """Stop the subscription. Running handlers finish; no packet is handled afterwards."""
        ...


class Bus(Protocol):
    """One connection to the bus. Every packet it sends carries its sender id."""

    url: str
    sender_id: str
    on_refused: OnRefused | None
    """Called for each dropped packet, so that its sender can be answered. Set by one of the connection's users."""

    async def publish(
        self,
        subject: str,
        body: PacketBody,
        *,
        trace_id: str,
        message_id: str | None = None,
        needs_listener: bool = False,
        kept: bool = False,
    ) -> None:
        """Send one packet.

        Durable subscribers get repeated packets with the same `message_id` once, if the bus detects duplicates.
        """
        ...

    async def ask(self, subject: str, body: PacketBody, *, trace_id: str, timeout_s: float) -> Packet:
        """Send one packet and wait for the answer. Raises NoResponders, and BusUnavailable, also on timeout."""
        ...

    async def listen(
        self,
        subject: str,
        handler: PacketHandler,
        *,
        group: str | None = None,
        durable: bool = False,
        alerts: bool = True,
    ) -> BusSubscription:
        """Subscribe a handler to a subject.

        With `durable`, packets that arrived while there was no subscriber are delivered too, where the bus stores them.
        Without `alerts`, a packet that cannot be read is dropped silently here, because another subscriber of ours gets
        it too and sends the alert.
        """
        ...

    @property
    def connected(self) -> bool:
        """Whether the bus is reachable now."""
        ...

    async def close(self) -> None:
        """Finish running handlers and close the connection."""
        ...


async def ping(bus: Bus) -> None:
    """Return if the bus is reachable now; raises BusUnavailable otherwise."""
    if not bus.connected:
        raise BusUnavailable(url=bus.url, detail="there is no connection")
