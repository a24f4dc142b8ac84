"""A bus inside one process: packets are passed on unchanged.

It stores nothing, so packets in flight end with the process.

`LocalBus(sender_id, …)` creates a bus; `bus.sibling(other_id)` is another sender on the same bus.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from trellis.bus.errors import BusUnavailable, NoAnswer, NoResponders
from trellis.bus.messages import OnRefused, Packet, PacketBody, check, check_subject
from trellis.bus.port import (
    CLOSE_S_MAX,
    DELIVERIES_MAX,
    HandlerPool,
    PacketHandler,
    ReceivedPacket,
    redelivery_delay_s,
    run_handler,
)
from trellis.bus.topics import subject_matches
from trellis.engine.clock import Clock, sleep_or_stop, within
from trellis.engine.logs import log_of

URL = "local"
WAITING_MAX = 10_000
"""Maximum number of packets waiting for one subscriber."""

_log = log_of("trellis.bus")


class _LocalHub:
    """The subscriptions of one bus, and the rotation within groups."""

    def __init__(self) -> None:
        self.listening: list[LocalSubscription] = []
        self._turns: Iterator[int] = itertools.count()

    def listeners(self, subject: str) -> "list[LocalSubscription]":
        """Every subscription without a group, and the next one of each group."""
        groups: dict[str, list[LocalSubscription]] = {}
        chosen: list[LocalSubscription] = []
        for listening in self.listening:
            if subject_matches(listening.subject, subject):
                members = chosen if listening.group is None else groups.setdefault(listening.group, [])
                members.append(listening)
        turn = next(self._turns)
        return chosen + [members[turn % len(members)] for members in groups.values()]


@dataclass(eq=False, kw_only=True)
class LocalSubscription:
    """One subscription. Packets wait in order, and several are handled concurrently."""

    subject: str
    handler: PacketHandler
    group: str | None
    durable: bool
    bus: "LocalBus"
    hub: _LocalHub
    clock: Clock
    _waiting: deque[ReceivedPacket] = field(default_factory=deque[ReceivedPacket])
    _handling: HandlerPool = field(default_factory=HandlerPool)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _pump: asyncio.Task[None] | None = None

    @property
    def full(self) -> bool:
        """Whether no more packets may wait."""
        return len(self._waiting) >= WAITING_MAX

    def put(self, received: ReceivedPacket) -> None:
        self._waiting.append(received)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._work_off())

    async def stop(self) -> None:
        await self.end(None)

    async def end(self, within_s: float | None) -> None:
        """Stop, and cancel handlers that still run after `within_s` seconds."""
        if self in self.hub.listening:
            self.hub.listening.remove(self)
        self._stopped.set()
        self._waiting.clear()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        await self._handling.finish(within_s)

    async def _work_off(self) -> None:
        while self._waiting:
            received = self._waiting.popleft()
            await self._handling.start(lambda received=received: self._handle(received))

    async def _handle(self, received: ReceivedPacket) -> None:
        for delivery in range(1, DELIVERIES_MAX + 1):
            if await run_handler(received.subject, self.handler(received)) or not self.durable:
                return
            if await sleep_or_stop(self.clock, self._stopped, redelivery_delay_s(delivery)):
                return
        _log.error("packet_given_up", subject=received.subject, deliveries=DELIVERIES_MAX)


class LocalBus:
    """See the port."""

    def __init__(
        self, sender_id: str, *, clock: Clock, now: Callable[[], datetime], hub: _LocalHub | None = None
    ) -> None:
        self.url = URL
        self.sender_id = sender_id
        self.on_refused: OnRefused | None = None
        """Never called: an invalid packet is refused at the sender."""
        self._clock, self._now = clock, now
        self._hub = hub or _LocalHub()
        self._own: list[LocalSubscription] = []
        self._open = True

    def sibling(self, sender_id: str) -> "LocalBus":
        """Another sender on the same bus. Closing it ends only its own subscriptions."""
        return LocalBus(sender_id, clock=self._clock, now=self._now, hub=self._hub)

    @property
    def connected(self) -> bool:
        return self._open

    async def publish(
        self,
        subject: str,
        body: PacketBody,
        *,
        trace_id: str,
        message_id: str | None = None,  # noqa: ARG002 - nothing is kept that could be recognised
        needs_listener: bool = False,
        kept: bool = False,  # noqa: ARG002 - nothing is kept at all
    ) -> None:
        packet = self.packet(body, trace_id)
        listeners = self._listeners(subject)
        if needs_listener and not listeners:
            raise NoResponders(subject=subject)
        self._hand_over(listeners, subject, packet, None)
        await asyncio.sleep(0)  # let the subscribers in this process run

    async def ask(self, subject: str, body: PacketBody, *, trace_id: str, timeout_s: float) -> Packet:
        packet = self.packet(body, trace_id)
        listeners = self._listeners(subject)
        if not listeners:
            raise NoResponders(subject=subject)
        answered: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        self._hand_over(listeners, subject, packet, answered)
        try:
            return await within(self._clock, timeout_s, _wait_for_reply(answered))
        except TimeoutError:
            raise NoAnswer(url=self.url, subject=subject, timeout_s=timeout_s) from None

    async def listen(
        self,
        subject: str,
        handler: PacketHandler,
        *,
        group: str | None = None,
        durable: bool = False,
        alerts: bool = True,  # noqa: ARG002 - what cannot be taken does not leave its sender
        echoes: bool = True,  # noqa: ARG002 - handing a packet over costs nothing here
    ) -> LocalSubscription:
        check_subject(subject, patterns=True)
        subscription = LocalSubscription(
            subject=subject, handler=handler, group=group, durable=durable, bus=self, hub=self._hub, clock=self._clock
        )
        self._hub.listening.append(subscription)
        self._own.append(subscription)
        return subscription

    async def close(self) -> None:
        self._open = False
        for listening in self._own:
            await listening.end(CLOSE_S_MAX)
        self._own.clear()

    def packet(self, body: PacketBody, trace_id: str) -> Packet:
        """A packet from this sender; raises PacketWrong."""
        packet = Packet(trace_id=trace_id, sender_id=self.sender_id, created_at=self._now(), body=body)
        check(packet)
        return packet

    def _listeners(self, subject: str) -> list[LocalSubscription]:
        check_subject(subject)
        if not self._open:
            raise BusUnavailable(url=self.url, detail="it is closed")
        return self._hub.listeners(subject)

    def _hand_over(
        self, listeners: list[LocalSubscription], subject: str, packet: Packet, answered: asyncio.Future[Packet] | None
    ) -> None:
        if any(listening.full for listening in listeners):
            raise BusUnavailable(url=self.url, detail=f"{WAITING_MAX} packets are waiting at {subject}")
        for listening in listeners:
            answer = partial(_reply, listening.bus, packet.trace_id, answered)
            listening.put(
                ReceivedPacket(subject=subject, packet=packet, answer=answer, wants_answer=answered is not None)
            )


async def _reply(bus: LocalBus, trace_id: str, answered: asyncio.Future[Packet] | None, body: PacketBody) -> None:
    if answered is not None and not answered.done():
        answered.set_result(bus.packet(body, trace_id))


async def _wait_for_reply(answered: asyncio.Future[Packet]) -> Packet:
    return await answered
