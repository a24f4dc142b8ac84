"""The bus as everybody here uses it. `local` serves one process, `nats` a fleet; the same suite runs on both.

What every implementation promises, and what not:

- `publish` returns when the bus has taken the packet, or raises BusUnavailable: nothing is kept back to be sent later by itself. Its
  kind BusUncertain says that the packet may have arrived, or may still: the connection broke before anybody could tell. Any other
  BusUnavailable says that it surely did not.
- `publish(..., needs_listener=True)` also raises NoResponders when the bus knows that nobody listens there.
- `publish(..., kept=True)` returns only when the packet is also kept for those who listen durably, where the bus keeps packets. It raises
  NotKept when the bus has taken the packet and refuses to keep it: those who listen now hear it all the same.
- a packet may be lost, come twice, or come late: whoever receives must not care;
- `listen` with a group gives each packet to one listener of that group, without one to every listener. A handler that raises loses only
  its own packet; a durable listener gets it again, when the bus can do that.
- packets that cannot be read, or are not signed where they must be, never reach a handler: they are dropped and an alert is sent.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from trellis.bus.errors import BusUnavailable
from trellis.bus.messages import OnRefused, Packet, PacketBody


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedPacket:
    """A packet as it came in. `answer` sends a packet back to whoever asked; without a question it does nothing."""

    subject: str
    packet: Packet
    answer: "Callable[[PacketBody], Awaitable[None]]"
    wants_answer: bool = False


PacketHandler: TypeAlias = Callable[[ReceivedPacket], Awaitable[None]]


class BusSubscription(Protocol):
    """One subscription."""

    async def stop(self) -> None:
        """No packet is handled after this; those under way are finished."""
        ...


class Bus(Protocol):
    """One connection. Our sender id is in every packet that goes out."""

    url: str
    sender_id: str
    on_refused: OnRefused | None
    """Told of packets that were dropped, so that whoever sent one can be answered. One of this connection's users sets it."""

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
        """Send one packet. The same `message_id` again is one packet for those who listen durably, when the bus can tell."""
        ...

    async def ask(self, subject: str, body: PacketBody, *, trace_id: str, timeout_s: float) -> Packet:
        """Send one packet and wait for the answer; raises NoResponders, BusUnavailable (also when the time is over)."""
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
        """Have packets of this subject handled. `durable`: also those that came while nobody listened, where the bus keeps them.

        Without `alerts` a packet that cannot be taken is dropped silently here: another listener of ours hears the same and alerts.
        """
        ...

    @property
    def connected(self) -> bool:
        """Whether the bus answers just now."""
        ...

    async def close(self) -> None:
        """Finish what is under way and let go."""
        ...


async def ping(bus: Bus) -> None:
    """Come back when the bus answers just now; raises BusUnavailable when it does not."""
    if not bus.connected:
        raise BusUnavailable(url=bus.url, detail="there is no connection")
