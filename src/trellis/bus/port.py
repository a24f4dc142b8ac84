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

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from trellis.bus.errors import BusUnavailable
from trellis.bus.messages import OnRefused, Packet, PacketBody
from trellis.engine.errors import TrellisError
from trellis.engine.logs import log_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedPacket:
    """A packet that came in. `answer` replies to a sender that asked.

    It does nothing if the packet was not a question.
    """

    subject: str
    packet: Packet
    answer: "Callable[[PacketBody], Awaitable[None]]"
    wants_answer: bool = False
    is_checked: bool = False
    """Whether a request was checked as one from outside (`JobRequest.checked`) when the packet was read."""


PacketHandler: TypeAlias = Callable[[ReceivedPacket], Awaitable[None]]


class BusSubscription(Protocol):
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
        echoes: bool = True,
    ) -> BusSubscription:
        """Subscribe a handler to a subject.

        With `durable`, packets that arrived while there was no subscriber are delivered too, where the bus stores them.
        Without `alerts`, a packet that cannot be read is dropped silently here, because another subscriber of ours gets
        it too and sends the alert. Without `echoes`, packets that this connection published need not be handed over: the
        handler ignores them anyway.
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


# Running the handlers of one subscription, as every implementation does: several at once, up to a limit.

HANDLERS_MAX = 64
CLOSE_S_MAX = 10.0
AGAIN_S_FIRST = 0.25
AGAIN_S_MAX = 30.0
DELIVERIES_MAX = 1_000
"""How often a packet is delivered to a durable subscriber whose handler raises: some hours, given the pauses below."""

log = log_of("trellis.bus")


def redelivery_delay_s(deliveries: int) -> float:
    """Delay before redelivery after the nth failure of a handler (from 1), in seconds."""
    return min(AGAIN_S_MAX, AGAIN_S_FIRST * 2.0 ** min(deliveries - 1, 16))


class HandlerPool:
    """The running handlers of one subscription."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(HANDLERS_MAX)
        self._running: set[asyncio.Task[None]] = set()

    async def start(self, work: Callable[[], Awaitable[object]]) -> None:
        """Start a handler as soon as there is room."""
        await self._slots.acquire()
        task = asyncio.create_task(self._run(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def room(self) -> int:
        """Wait for room; returns how many more handlers may start, at least one."""
        async with self._slots:
            return max(1, HANDLERS_MAX - len(self._running))

    async def finish(self, within_s: float | None = None) -> None:
        """Wait for running handlers, and cancel those that still run after `within_s` seconds."""
        running = self._running - {asyncio.current_task()}
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _run(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        finally:
            self._slots.release()


async def run_handler(subject: str, work: Awaitable[None]) -> bool:
    """Run the handler of a packet. Returns whether it finished without an error."""
    try:
        await work
    except TrellisError as error:
        log.warning("handler_failed", subject=subject, error=str(error))
        return False
    except Exception:  # An exception of a handler loses only its own packet.
        log.exception("handler_failed", subject=subject)
        return False
    return True
