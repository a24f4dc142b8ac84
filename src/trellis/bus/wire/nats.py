"""The bus over NATS, with CAP packets. The port defines its guarantees.

An invalid packet is dropped. An alert with CAP's error code goes to `sys.alert`, rate limited, and `on_refused` is
called, so that a client whose request was refused need not wait.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from trellis.bus.errors import BusError, BusUnavailable, NoAnswer, NoResponders, NotKept, TooLargeToKeep
from trellis.bus.messages import ALERT, OnRefused, Packet, PacketBody, PacketRefused, check_subject
from trellis.bus.port import CLOSE_S_MAX, BusSubscription, HandlerPool, PacketHandler, ReceivedPacket, run_handler
from trellis.bus.wire.alerts import AlertLimit, alert_of
from trellis.bus.wire.cap import REMEMBERED_BYTES_MAX, decode, encode
from trellis.bus.wire.connection import (
    INBOX,
    NO_RESPONDERS,
    NatsConnection,
    NatsLink,
    status_of,
    subscribe,
    unsubscribe,
)
from trellis.bus.wire.signatures import PacketDelivery, PacketKeys
from trellis.bus.wire.streams import TOO_LARGE, DurableSubscription, StreamDirectory, refusal_in
from trellis.engine.clock import Clock
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache

REPLY_HEADER = "Trellis-Reply"
"""Header with the asker's inbox: a stream delivers messages with a reply subject of its own."""
MESSAGE_ID = "Nats-Msg-Id"
KEPT_S_MAX = 5.0
"""How long a stream may take to acknowledge a packet that the server has taken, in seconds."""
SENT_MAX = 1_000

log = log_of("trellis.bus")


class NatsBus:
    """See the port. Opened by `open_bus`."""

    def __init__(
        self,
        connection: NatsConnection,
        *,
        sender_id: str,
        keys: PacketKeys,
        clock: Clock,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self.url = connection.options.shown
        self.sender_id = sender_id
        self.on_refused: OnRefused | None = None
        self._connection = connection
        self._keys, self._clock, self._now, self._new_id = keys, clock, now, new_id
        self._limit = AlertLimit(clock)
        self._streams = StreamDirectory(connection, clock=clock)
        self._listening: set[NatsSubscription | DurableSubscription] = set()
        self._listeners = itertools.count(1)
        self._echoed: set[str] = set()
        """Subjects on which this process receives its own packets and has no use for them."""
        self._sent: LruCache[bytes, bool] = LruCache(SENT_MAX)
        """Short packets that were sent there last, so that an echo is known without reading it."""

    @property
    def connected(self) -> bool:
        return self._connection.current is not None and self._connection.current.client.is_connected

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
        check_subject(subject)
        data = self._encoded(subject, body, trace_id)
        if subject in self._echoed and len(data) <= REMEMBERED_BYTES_MAX:
            self._sent[data] = True
        link = self._connection.up()
        headers = {MESSAGE_ID: message_id} if message_id else None
        if kept and await self._streams.keep(link, subject):
            await self._publish_kept(link, subject, data, headers)
            return
        if not needs_listener:
            await self._connection.send(link, subject, data, headers=headers)
            await self._connection.taken(link)
            return
        reply, answer = self._connection.expect(link)
        try:
            await self._connection.send(link, subject, data, reply=reply, headers=headers)
            await self._connection.taken(link)
        finally:
            self._connection.forget(link, reply)
        if answer.done() and _is_no_responders(answer.result()):
            raise NoResponders(subject=subject)

    async def ask(self, subject: str, body: PacketBody, *, trace_id: str, timeout_s: float) -> Packet:
        check_subject(subject)
        data = self._encoded(subject, body, trace_id)
        link = self._connection.up()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._reply_to(link, subject, data)
        except TimeoutError:
            raise NoAnswer(url=self.url, subject=subject, timeout_s=timeout_s) from None

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
        """See the port. Without a connection it returns at once, and subscribes with the first connection."""
        check_subject(subject, patterns=True)
        if durable and group is None:
            raise BusError(detail="a durable listener needs a group: it is the group's place in the stream")
        listener = next(self._listeners)

        if not echoes:
            self._echoed.add(subject)

        def is_echo(message: Msg) -> bool:
            return not echoes and message.data in self._sent

        async def on_message(message: Msg, kept: Msg.Metadata | None) -> bool:
            return await self._on_message(message, handler, self._delivery(message, listener, kept), alerts=alerts)

        if durable and group is not None:
            subscription: NatsSubscription | DurableSubscription = DurableSubscription(
                self._connection, subject, group, on_message, is_echo, clock=self._clock
            )
            if self.connected:
                await subscription.settled()
        else:
            subscription = NatsSubscription(self._connection, subject, group or "", on_message, is_echo)
            await subscription.begin()
        self._listening.add(subscription)
        return subscription

    async def close(self) -> None:
        for listening in list(self._listening):
            await listening.end(CLOSE_S_MAX)
        self._listening.clear()
        await self._connection.close()

    # -- sending ---------------------------------------------------------------------------------------------------

    async def _publish_kept(self, link: NatsLink, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        reply, acknowledged = self._connection.expect(link, kept=True)
        try:
            await self._connection.send(link, subject, data, reply=reply, headers=headers)
            async with asyncio.timeout(KEPT_S_MAX):
                answer = await acknowledged  # which also says that the server has taken it
        except TimeoutError:
            self._streams.forget(subject)
            await self._connection.taken(link)  # a server that takes nothing is left
            raise self._connection.uncertain(f"no stream said for {KEPT_S_MAX:g} s that it has kept it") from None
        finally:
            self._connection.forget(link, reply)
        if answer is None:
            raise self._connection.uncertain("the connection broke")
        if _is_no_responders(answer):
            self._streams.forget(subject)
            raise self._connection.unavailable("the stream is gone")
        refusal = refusal_in(answer.data)
        if refusal is not None:
            kind = TooLargeToKeep if refusal.code == TOO_LARGE else NotKept
            raise kind(subject=subject, detail=refusal.why)

    def _encoded(self, subject: str, body: PacketBody, trace_id: str) -> bytes:
        packet = Packet(trace_id=trace_id, sender_id=self.sender_id, created_at=self._now(), body=body)
        return encode(packet, self._keys, subject=subject, message_id=self._new_id())

    async def _reply_to(self, link: NatsLink, subject: str, data: bytes) -> Packet:
        reply, answered = self._connection.expect(link)
        try:
            await self._connection.send(link, subject, data, reply=reply, headers={REPLY_HEADER: reply})
            answer = await answered
        finally:
            self._connection.forget(link, reply)
        if answer is None:
            raise self._connection.unavailable("the connection broke")
        if _is_no_responders(answer):
            raise NoResponders(subject=subject)
        try:
            return decode(answer.data, self._keys, delivery=PacketDelivery(subject=reply, at=self._now()))
        except PacketRefused as error:
            await self._refuse(answer.subject, error)
            raise BusUnavailable(url=self.url, detail=f"the answer cannot be used: {error.detail}") from error

    async def _answer(self, reply: str, body: PacketBody, trace_id: str) -> None:
        """Send an answer without waiting for its arrival: a sender that misses it asks again."""
        try:
            await self._connection.send(self._connection.up(), reply, self._encoded(reply, body, trace_id))
        except BusUnavailable as error:
            log.debug("answer_lost", error=str(error))
        except BusError as error:  # No bus will ever take it, so asking again would not help.
            log.warning("cannot_be_answered", error=str(error))

    # -- receiving -------------------------------------------------------------------------------------------------

    def _delivery(self, message: Msg, listener: int, kept: Msg.Metadata | None) -> PacketDelivery:
        """The delivery of a message.

        The time of a stored packet is when the stream took it; only the stream is trusted for that.
        """
        if kept is None:
            return PacketDelivery(subject=message.subject, at=self._now(), listener=listener)
        place = kept.sequence.stream
        return PacketDelivery(subject=message.subject, at=kept.timestamp, listener=listener, sequence=place)

    async def _on_message(
        self, message: Msg, handler: PacketHandler, delivery: PacketDelivery, *, alerts: bool
    ) -> bool:
        """Whether the packet is done with: handled, or useless."""
        try:
            packet = decode(message.data, self._keys, message.subject, delivery=delivery)
        except PacketRefused as error:
            return not alerts or await self._refuse(message.subject, error)
        reply = _reply_of(message)

        async def answer(body: PacketBody) -> None:
            if reply:
                await self._answer(reply, body, packet.trace_id)

        received = ReceivedPacket(
            subject=message.subject, packet=packet, answer=answer, wants_answer=bool(reply), is_checked=True
        )
        return await run_handler(message.subject, handler(received))

    async def _refuse(self, subject: str, error: PacketRefused) -> bool:
        left_out = self._limit.left_out(error.error_code, error.sender_id)
        if left_out is not None:
            log.warning("packet_refused", subject=subject, sender=error.sender_id, error=str(error), left_out=left_out)
            if subject != ALERT:  # an alert about an alert could loop forever
                await self._alert(subject, error, left_out)
        return self.on_refused is None or await run_handler(subject, self.on_refused(subject, error))

    async def _alert(self, subject: str, error: PacketRefused, left_out: int) -> None:
        trace_id = error.trace_id or self._new_id()
        try:
            data = self._encoded(ALERT, alert_of(subject, error, left_out), trace_id)
            await self._connection.send(self._connection.up(), ALERT, data)
        except BusError as failed:
            log.debug("alert_lost", error=str(failed))


class NatsSubscription:
    """A direct subscription: receives what is sent while it is active."""

    def __init__(
        self,
        connection: NatsConnection,
        subject: str,
        group: str,
        on_message: Callable[[Msg, Msg.Metadata | None], Awaitable[bool]],
        is_useless: Callable[[Msg], bool],
    ) -> None:
        self._connection = connection
        self._subject, self._group, self._on_message = subject, group, on_message
        self._is_useless = is_useless
        self._handling = HandlerPool()
        self._subscription: Subscription | None = None

    async def begin(self) -> None:
        """Subscribe now if there is a connection, and with every later client."""
        self._connection.on_client.append(self._subscribe)
        client, link = self._connection.client, self._connection.current
        if client is None:
            return
        try:
            await self._subscribe(client)
            if link is not None:
                await self._connection.taken(link)
        except (NatsError, BusUnavailable) as error:  # The client subscribes again when it reconnects.
            log.info("listening_later", subject=self._subject, error=str(error))

    async def stop(self) -> None:
        await self.end(None)

    async def end(self, within_s: float | None) -> None:
        """Stop, and cancel handlers that still run after `within_s` seconds."""
        if self._subscribe in self._connection.on_client:
            self._connection.on_client.remove(self._subscribe)
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await unsubscribe(self._connection.current, subscription, within_s)
        await self._handling.finish(within_s)

    async def _subscribe(self, client: Client) -> None:
        self._subscription = await subscribe(client, self._subject, self._start, group=self._group)

    async def _start(self, message: Msg) -> None:
        if not self._is_useless(message):
            await self._handling.start(lambda: self._on_message(message, None))


def _is_no_responders(message: Msg | None) -> bool:
    return message is not None and status_of(message) == NO_RESPONDERS


def _reply_of(message: Msg) -> str:
    """The reply subject. Only inboxes are allowed, so that a sender cannot make us publish elsewhere."""
    reply = (message.headers or {}).get(REPLY_HEADER) or message.reply
    return reply if reply.startswith(INBOX) else ""
