"""A durable listener: packets wait in a stream of the server (JetStream) until a handler has come to its end with them.

The stream and its consumer are made when they are missing, also after the server has lost its data. A server without JetStream is
listened to directly, and asked again at every new connection. A packet whose handler raises comes again after a pause. What the server
took a moment before it was killed may not have reached its disk: who must know waits for an answer, or for the stream's word that it was kept.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from trellis.bus.errors import BusUnavailable
from trellis.bus.wire.connection import NatsConnection, NatsLink, status_of, subscribe, unsubscribe
from trellis.bus.wire.handling import CLOSE_S_MAX, DELIVERIES_MAX, HandlerPool, redelivery_delay_s
from trellis.bus.wire.streams import API_S, NO_JETSTREAM, plain_name, stream_of, unless_down
from trellis.engine.clock import Clock
from trellis.engine.logs import log_of

ACK_WAIT_S = 20.0
"""How long a handler may take; then the server gives its packet to another."""
UNDER_WAY_MAX = 4_096
DRAIN_S_MAX = 10.0
PULL_S = 5.0
PULL_GRACE_S = 2.0
RETRY_S = 1.0

log = log_of("trellis.bus")


@dataclass(frozen=True, kw_only=True)
class StreamConsumer:
    """Where the packets wait."""

    stream: str
    consumer: str


class DurableSubscription:
    """Listens to one subject in the name of a group. `hear` is told where a stream kept the packet, and says whether it is done with."""

    def __init__(
        self,
        connection: NatsConnection,
        subject: str,
        group: str,
        hear: Callable[[Msg, Msg.Metadata | None], Awaitable[bool]],
        *,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._subject, self._group, self._hear = subject, group, hear
        self._clock = clock
        self._handling = HandlerPool()
        self._left, self._ended, self._gone = 0, asyncio.Event(), False
        self._settled = asyncio.Event()
        self._runner = asyncio.create_task(self._run())

    async def settled(self) -> None:
        """Wait until it listens, or the first attempt to has failed."""
        await self._settled.wait()

    async def stop(self) -> None:
        """See the port."""
        await self.end(None)

    async def end(self, within_s: float | None = CLOSE_S_MAX) -> None:
        """Stop, and end what is still under way after that long."""
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)
        await self._handling.finish(within_s)

    async def _run(self) -> None:
        while True:
            link = await self._connection.link()
            try:
                place = await unless_down(link, self._prepare(link))
                if place is None:
                    await self._listen_directly(link)
                else:
                    await self._pull_from(link, place)
            except (NatsError, OSError, TimeoutError, BusUnavailable) as error:
                log.warning("durable_listener_failed", subject=self._subject, error=str(error) or type(error).__name__)
                self._settled.set()
                await self._clock.sleep(RETRY_S)

    # -- where they wait --------------------------------------------------------------------------------------------

    async def _prepare(self, link: NatsLink) -> StreamConsumer | None:
        """The stream and the consumer, made if need be; None when this server keeps nothing for us."""
        untyped: Any = link.client  # the library's own annotations are incomplete
        try:
            stream = str((await stream_of(link.client, self._subject)).config.name)
            return StreamConsumer(
                stream=stream, consumer=await self._consumer(untyped.jetstream(timeout=API_S), stream)
            )
        except ServiceUnavailableError as error:
            if error.err_code in NO_JETSTREAM:
                return None
            raise
        except APIError as error:
            log.warning("stream_unusable", subject=self._subject, error=str(error))
            return None

    async def _consumer(self, streams: Any, stream: str) -> str:
        name = plain_name(f"{self._group}-{self._subject}")
        wanted = ConsumerConfig(
            durable_name=name,
            filter_subject=self._subject,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=DELIVERIES_MAX,
            max_ack_pending=UNDER_WAY_MAX,
        )
        try:
            await streams.add_consumer(stream, wanted)
        except (ServiceUnavailableError, NotFoundError):
            raise
        except APIError:  # It is there with other settings, which somebody chose.
            await streams.consumer_info(stream, name)
        return name

    # -- with JetStream ---------------------------------------------------------------------------------------------

    async def _pull_from(self, link: NatsLink, place: StreamConsumer) -> None:
        """Ask for as many packets as there is room for, again and again, until the link or the consumer is gone."""
        inbox = link.client.new_inbox()
        subscription = await subscribe(link.client, inbox, self._delivered)
        self._gone = False
        try:
            while not (self._gone or link.down.is_set()):
                self._left = await self._handling.room()
                self._ended.clear()
                wish = {"batch": self._left, "expires": int(PULL_S * 1e9)}
                subject = f"$JS.API.CONSUMER.MSG.NEXT.{place.stream}.{place.consumer}"
                await link.client.publish(subject, json.dumps(wish).encode(), reply=inbox)
                self._settled.set()
                await _wait_for_any(self._ended, link.down, within_s=PULL_S + PULL_GRACE_S)
        finally:
            await unsubscribe(link, subscription, DRAIN_S_MAX)

    async def _delivered(self, message: Msg) -> None:
        status = status_of(message)
        if status is None:
            self._left -= 1
            await self._handling.start(lambda: self._work(message))
        elif status == "503" or (status == "409" and "deleted" in _description(message)):
            self._gone = True
        if status not in {None, "100"} or self._left <= 0:
            self._ended.set()

    async def _work(self, message: Msg) -> None:
        done = await self._hear(message, message.metadata)
        try:
            deliveries = message.metadata.num_delivered
            if done:
                await message.ack()
            elif deliveries >= DELIVERIES_MAX:
                log.error("packet_given_up", subject=self._subject, deliveries=deliveries)
                await message.term()
            else:
                await message.nak(delay=redelivery_delay_s(deliveries))
        except (NatsError, OSError) as error:  # The server did not hear of it and gives the packet out again.
            log.debug("not_acknowledged", subject=self._subject, error=str(error))

    # -- without ----------------------------------------------------------------------------------------------------

    async def _listen_directly(self, link: NatsLink) -> None:
        """Until a new connection has JetStream."""
        log.info("stream_missing", subject=self._subject, url=self._connection.options.shown)
        client = link.client
        subscription = await subscribe(client, self._subject, self._heard, group=self._group)
        try:
            await self._connection.taken(link)
            self._settled.set()
            while link.client is client:
                await link.down.wait()
                link = await self._connection.link()
                if link.client is client and await unless_down(link, self._prepare(link)) is not None:
                    return
        finally:
            await unsubscribe(link if link.client is client else None, subscription, DRAIN_S_MAX)

    async def _heard(self, message: Msg) -> None:
        async def work() -> None:
            await self._hear(message, None)

        await self._handling.start(work)


async def _wait_for_any(*events: asyncio.Event, within_s: float) -> None:
    """Until one of them is set, or the time is over."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _description(message: Msg) -> str:
    return (message.headers or {}).get("Description", "").lower()
