"""Streams of the NATS server (JetStream), and durable subscriptions on them.

An existing stream is used as it is, whoever created it. A missing stream or consumer is created, also after the server
has lost its data.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from trellis.bus.errors import BusUnavailable
from trellis.bus.messages import RESULT, SUBMIT
from trellis.bus.port import CLOSE_S_MAX, DELIVERIES_MAX, HandlerPool, redelivery_delay_s
from trellis.bus.wire.connection import NatsConnection, NatsLink, status_of, subscribe, unsubscribe
from trellis.engine.clock import Clock
from trellis.engine.logs import log_of

# Which stream stores the packets of a subject, and its acknowledgements.
#
# The server's answer is cached per connection: a yes until a packet is not acknowledged, a no for a while.

STREAM = "TRELLIS"
KEPT_SUBJECTS = (SUBMIT, RESULT)
KEPT_S = 7 * 24 * 3600.0
KEPT_BYTES_MAX = 256 * 1024 * 1024
OTHER_BYTES_MAX = KEPT_BYTES_MAX // 4
"""Size limit of the stream of any other subject, such as `sys.job.dlq`."""
SAME_MESSAGE_S = 120.0
API_S = 5.0
ASK_AGAIN_S = 10.0
"""How long a negative answer is cached, in seconds."""
NO_JETSTREAM = {None, 10039, 10076}
"""Error codes of a server without JetStream: none, or disabled (for this account)."""
JETSTREAM_UNAVAILABLE = 10008
"""Error code of a server whose JetStream is not available yet, or not available again yet."""
TOO_LARGE = 10054
"""Error code of a stream for a packet that it never takes."""
SILENT_S_MAX = 30.0
"""How long packets wait for a server that stored packets before and does not answer now, in seconds."""
STREAMS_SILENT = "its streams do not answer"
DETAIL_CHARS_MAX = 200

T = TypeVar("T")
log = log_of("trellis.bus")


@dataclass(frozen=True, kw_only=True, slots=True)
class _SubjectKeeping:
    """A cached answer about a subject."""

    keeps: bool
    at: float


@dataclass(frozen=True, slots=True)
class StreamRefusal:
    why: str
    code: int | None = None


class StreamDirectory:
    """Tells publishers whether a stream will acknowledge packets of a subject."""

    def __init__(self, connection: NatsConnection, *, clock: Clock) -> None:
        self._connection, self._clock = connection, clock
        self._link: NatsLink | None = None
        self._known: dict[str, _SubjectKeeping] = {}
        self._asking = asyncio.Lock()
        self._complaint = ""
        self._kept: set[str] = set()
        """Subjects of which a stream has stored packets, over any connection."""
        self._silent_since: float | None = None
        self._silent_at = float("-inf")

    async def keep(self, link: NatsLink, subject: str) -> bool:
        """Whether a stream stores and acknowledges packets of this subject; creates one if needed.

        Raises BusUnavailable.
        """
        known = self._still_known(link, subject)
        if known is not None:
            return known.keeps
        came_at = self._clock.monotonic()
        async with self._asking:  # concurrent callers share one question
            known = self._still_known(link, subject)
            if known is None and came_at <= self._silent_at:
                raise self._connection.unavailable(STREAMS_SILENT)
            if known is None:
                known = _SubjectKeeping(keeps=await self._ask(link, subject), at=self._clock.monotonic())
                if self._link is not link:
                    self._link, self._known = link, {}
                self._known[subject] = known
        return known.keeps

    def forget(self, subject: str) -> None:
        """Drop the cached answer, because the stream did not behave accordingly."""
        self._known.pop(subject, None)

    def _still_known(self, link: NatsLink, subject: str) -> _SubjectKeeping | None:
        known = self._known.get(subject) if self._link is link else None
        if known is None or known.keeps or self._clock.monotonic() < known.at + ASK_AGAIN_S:
            return known
        return None

    async def _ask(self, link: NatsLink, subject: str) -> bool:
        try:
            stream = await unless_down(link, stream_of(link.client, subject))
        except ServiceUnavailableError as error:
            if error.err_code == JETSTREAM_UNAVAILABLE:
                raise self._connection.unavailable(f"its streams are not there yet: {error.description}") from error
            return self._without(subject, None if error.err_code in NO_JETSTREAM else error)
        except (NatsError, OSError, TimeoutError) as error:
            if link.down.is_set():
                raise self._connection.unavailable() from error
            if isinstance(error, TimeoutError) and subject in self._kept and self._may_speak_again():
                raise self._connection.unavailable(STREAMS_SILENT) from error
            return self._without(subject, error)
        self._complaint, self._silent_since = "", None
        if stream.config.no_ack:
            return False
        self._kept.add(subject)
        return True

    def _may_speak_again(self) -> bool:
        """Whether to keep waiting for a silent server.

        A short silence is waited for; a lasting one must not block everything.
        """
        now = self._clock.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        waits = now < self._silent_since + SILENT_S_MAX
        self._silent_at = now if waits else self._silent_at
        return waits

    def _without(self, subject: str, error: Exception | None) -> bool:
        """No stream stores packets here. An unexpected reason is logged once."""
        complaint = "" if error is None else str(error) or type(error).__name__
        if complaint and complaint != self._complaint:
            log.warning("stream_unusable", subject=subject, error=complaint)
        self._complaint = complaint
        return False


async def stream_of(client: Client, subject: str) -> StreamInfo:
    """The stream that stores packets of this subject, created if missing; raises the server's error."""
    untyped: Any = client  # the library's own annotations are incomplete
    streams = untyped.jetstream(timeout=API_S)
    try:
        stream: StreamInfo = await streams.add_stream(_stream_config(subject))
    except ServiceUnavailableError:
        raise
    except APIError as refusal:  # It exists with other settings, or another stream has the subject: use that one.
        try:
            stream = await streams.stream_info(await streams.find_stream_name_by_subject(subject))
        except NotFoundError:
            raise refusal from None
    return stream


def _stream_config(subject: str) -> StreamConfig:
    wanted = StreamConfig(
        name=STREAM,
        subjects=list(KEPT_SUBJECTS) if subject in KEPT_SUBJECTS else [subject],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=KEPT_S,
        max_bytes=KEPT_BYTES_MAX,
        duplicate_window=SAME_MESSAGE_S,
    )
    if subject in KEPT_SUBJECTS:
        return wanted
    return replace(wanted, name=plain_name(f"{STREAM}-{subject}"), max_bytes=OTHER_BYTES_MAX)


def refusal_in(acknowledgement: bytes) -> StreamRefusal | None:
    """Why a stream has not kept a packet; None when it has."""
    answer: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(acknowledgement)
    match answer:
        case {"error": {"description": why, "err_code": int(code)}}:
            return StreamRefusal(str(why)[:DETAIL_CHARS_MAX], code)
        case {"error": {"description": why}} | {"error": why}:
            return StreamRefusal(str(why)[:DETAIL_CHARS_MAX])
        case {"stream": _}:
            return None
        case _:
            return StreamRefusal("its answer cannot be read")


async def unless_down(link: NatsLink, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises when the link breaks first.

    Otherwise a request that the server never got would hang.
    """
    working = asyncio.create_task(work)
    breaking = asyncio.create_task(link.down.wait())
    try:
        await asyncio.wait({working, breaking}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        for task in (working, breaking):
            task.cancel()
        await asyncio.gather(working, breaking, return_exceptions=True)
    raise NatsError("the connection broke")


def plain_name(text: str) -> str:
    """A valid name of a stream or consumer: without dots and wildcards."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in text)


# Durable subscriptions: packets wait in a stream of the server until a handler has finished with them.
#
# On a server without JetStream the subscription is direct, and JetStream is tried again at every new connection. A
# packet whose handler raises is redelivered after a pause. A packet that the server took just before it was killed may
# not have reached its disk. A sender that must be sure waits for an answer, or for the stream's acknowledgement.

ACK_WAIT_S = 20.0
"""How long a handler may take, in seconds. Then the server gives its packet to another subscriber."""
UNDER_WAY_MAX = 4_096
DRAIN_S_MAX = 10.0
PULL_S = 5.0
PULL_GRACE_S = 2.0
RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class StreamConsumer:
    """The stream and consumer that hold the packets."""

    stream: str
    consumer: str


class DurableSubscription:
    """Subscribes to one subject for a group.

    `on_message` gets the message, and its stream metadata if a stream stored it. It returns whether the packet is done with.
    A message that `is_useless` is acknowledged without it.
    """

    def __init__(
        self,
        connection: NatsConnection,
        subject: str,
        group: str,
        on_message: Callable[[Msg, Msg.Metadata | None], Awaitable[bool]],
        is_useless: Callable[[Msg], bool],
        *,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._subject, self._group, self._on_message = subject, group, on_message
        self._is_useless = is_useless
        self._clock = clock
        self._handling = HandlerPool()
        self._left, self._ended, self._gone = 0, asyncio.Event(), False
        self._settled = asyncio.Event()
        self._runner = asyncio.create_task(self._run())

    async def settled(self) -> None:
        """Wait until the subscription is active, or its first attempt has failed."""
        await self._settled.wait()

    async def stop(self) -> None:
        await self.end(None)

    async def end(self, within_s: float | None = CLOSE_S_MAX) -> None:
        """Stop, and cancel handlers that still run after `within_s` seconds."""
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

    # -- stream and consumer ---------------------------------------------------------------------------------------

    async def _prepare(self, link: NatsLink) -> StreamConsumer | None:
        """The stream and consumer, created if needed; None when this server stores nothing for us."""
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
        except APIError:  # It exists with other settings: use it as it is.
            await streams.consumer_info(stream, name)
        return name

    # -- with JetStream --------------------------------------------------------------------------------------------

    async def _pull_from(self, link: NatsLink, place: StreamConsumer) -> None:
        """Pull as many packets as there is room for, until the link or the consumer is gone."""
        inbox = link.client.new_inbox()
        subscription = await subscribe(link.client, inbox, self._delivered)
        self._gone = False
        try:
            while not (self._gone or link.down.is_set()):
                self._left = await self._handling.room()
                self._ended.clear()
                pull = {"batch": self._left, "expires": int(PULL_S * 1e9)}
                subject = f"$JS.API.CONSUMER.MSG.NEXT.{place.stream}.{place.consumer}"
                await link.client.publish(subject, json.dumps(pull).encode(), reply=inbox)
                self._settled.set()
                await _wait_for_any(self._ended, link.down, within_s=PULL_S + PULL_GRACE_S)
        finally:
            await unsubscribe(link, subscription, DRAIN_S_MAX)

    async def _delivered(self, message: Msg) -> None:
        status = status_of(message)
        if status is None:
            self._left -= 1
            if self._is_useless(message):
                await self._acknowledge(message)
            else:
                await self._handling.start(lambda: self._work(message))
        elif status == "503" or (
            status == "409" and "deleted" in (message.headers or {}).get("Description", "").lower()
        ):
            self._gone = True
        if status not in {None, "100"} or self._left <= 0:
            self._ended.set()

    async def _work(self, message: Msg) -> None:
        if await self._on_message(message, message.metadata):
            await self._acknowledge(message)
            return
        deliveries = message.metadata.num_delivered
        try:
            if deliveries >= DELIVERIES_MAX:
                log.error("packet_given_up", subject=self._subject, deliveries=deliveries)
                await message.term()
            else:
                await message.nak(delay=redelivery_delay_s(deliveries))
        except (NatsError, OSError) as error:  # The server did not receive it, and redelivers the packet.
            self._note_unacknowledged(error)

    async def _acknowledge(self, message: Msg) -> None:
        try:
            await message.ack()
        except (NatsError, OSError) as error:
            self._note_unacknowledged(error)

    def _note_unacknowledged(self, error: Exception) -> None:
        log.debug("not_acknowledged", subject=self._subject, error=str(error))

    # -- without JetStream -----------------------------------------------------------------------------------------

    async def _listen_directly(self, link: NatsLink) -> None:
        """Subscribe directly, until a new connection has JetStream."""
        log.info("stream_missing", subject=self._subject, url=self._connection.options.shown)
        client = link.client
        subscription = await subscribe(client, self._subject, self._on_direct_message, group=self._group)
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

    async def _on_direct_message(self, message: Msg) -> None:
        if not self._is_useless(message):
            await self._handling.start(lambda: self._on_message(message, None))


async def _wait_for_any(*events: asyncio.Event, within_s: float) -> None:
    """Wait until one of the events is set, or the time is over."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
