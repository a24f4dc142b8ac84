"""The connection to NATS, and the credentials it uses.

`NatsConnection` reconnects by itself for as long as the process lives. It settles what the client library leaves open:

- Nothing is published while there is no connection, and nothing is queued: the caller gets an error at once.
- A packet counts as taken by the server when a message sent to ourselves after it comes back. The server handles the
  messages of one connection in order, and delivers in order too. Concurrent publishers share one such message. (The
  library's own flush is not enough: its PING may overtake what was published before.)
- For the same reason, a missing subscriber is known when that message is back, without waiting for a timeout.
"""

import asyncio
import base64
import binascii
import contextlib
import itertools
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import UnexpectedEOF

from trellis.bus.errors import BusUnavailable, BusUncertain
from trellis.bus.messages import PacketWrong
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.errors import SettingsInvalid
from trellis.engine.logs import log_of

# Credentials for a NATS server: a credentials file (a user's JWT and the seed of its key), or a file with the seed
# alone (an nkey).
#
# The file is read for every new connection, so a replaced file takes effect with the next one. The seed never leaves
# this process; the server gets a signature of its nonce. nats-py 2.16 loops forever on a file without a JWT and needs
# the package nkeys, hence our own reader. Check again when nats-py is upgraded.

FILE_BYTES_MAX = 64 * 1024
JWT, SEED = "NATS USER JWT", "USER NKEY SEED"
"""The names of the two parts of a credentials file."""
_USER = 20 << 3
_SEED = 18 << 3
"""Key type prefixes. They make a user's public key begin with U, and its seed with SU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """The identity of this process toward the server."""

    public: str
    """The user's public key."""
    jwt: str | None = field(repr=False)
    key: Ed25519PrivateKey = field(repr=False)

    def sign(self, nonce: str) -> bytes:
        """The signature of the server's nonce."""
        return base64.b64encode(self.key.sign(nonce.encode()))


def read_credentials(file: Path) -> Credentials:
    """Read a credentials file. Raises SettingsInvalid; its text never contains a secret."""
    text = _text(file)
    if JWT not in text and SEED not in text:
        return _credentials_of_seed(file, text.strip(), None)
    jwt, seed = _section(text, JWT), _section(text, SEED)
    for name, section in ((JWT, jwt), (SEED, seed)):
        if not section:
            raise SettingsInvalid(source=str(file), detail=f"has no part {name!r}; make the credentials file again")
    credentials = _credentials_of_seed(file, seed, jwt)
    if _subject(file, jwt) != credentials.public:
        raise SettingsInvalid(source=str(file), detail="has a JWT and a seed of different users; make it again")
    return credentials


def connect_arguments(client: Client, file: Path) -> dict[str, Any]:
    """The client's connect arguments for these credentials; raises SettingsInvalid."""
    credentials = read_credentials(file)
    arguments: dict[str, Any] = {"user": credentials.public}  # makes the client sign; the name itself is not sent
    untyped: Any = client

    def sign(nonce: str) -> bytes:
        current = _current_credentials(file)
        if credentials.jwt is None:
            untyped._public_nkey = current.public  # noqa: SLF001 - the library has no other way in but its own reader
        return current.sign(nonce)

    def jwt() -> bytes:
        return (_current_credentials(file).jwt or "").encode()

    arguments["signature_cb"] = sign
    return arguments if credentials.jwt is None else {**arguments, "user_jwt_cb": jwt}


def _current_credentials(file: Path) -> Credentials:
    """The credentials in the file now.

    Errors become NatsError: any other exception would end the client's reconnecting.
    """
    try:
        return read_credentials(file)
    except SettingsInvalid as error:
        raise NatsError(str(error)) from error


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(FILE_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise SettingsInvalid(source=str(file), detail=f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsInvalid(source=str(file), detail="is no NATS credentials file: it is no text") from None


def _section(text: str, name: str) -> str:
    """The text between the begin and end lines of a section; empty if they are missing."""
    _, begun, rest = text.partition(f"BEGIN {name}")
    inside, ended, _ = rest.partition(f"END {name}")
    return inside.strip("- \t\r\n") if begun and ended else ""


def _credentials_of_seed(file: Path, seed: str, jwt: str | None) -> Credentials:
    key = _key(seed)
    if key is None:
        raise SettingsInvalid(
            source=str(file), detail="is no NATS credentials file and no user's nkey seed, which begins with SU"
        )
    public = bytes([_USER]) + key.public_key().public_bytes_raw()
    return Credentials(public=_encoded(public), jwt=jwt, key=key)


def _key(seed: str) -> Ed25519PrivateKey | None:
    """The private key of a user's seed; None if the seed is invalid or mistyped."""
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except (binascii.Error, ValueError):
        return None
    body, check = raw[:-2], raw[-2:]
    kinds = bytes([_SEED | _USER >> 5, (_USER & 31) << 3])
    if len(raw) != 36 or body[:2] != kinds or _checksum(body) != check:
        return None
    return Ed25519PrivateKey.from_private_bytes(body[2:])


def _subject(file: Path, jwt: str) -> str:
    """The subject of a JWT. The server verifies the JWT."""
    try:
        _, claims, _ = jwt.split(".")
        parsed: Any = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        return str(parsed["sub"])
    except (ValueError, KeyError, TypeError):
        raise SettingsInvalid(source=str(file), detail="has a JWT that cannot be read; make it again") from None


def _encoded(raw: bytes) -> str:
    return base64.b32encode(raw + _checksum(raw)).decode().rstrip("=")


def _checksum(raw: bytes) -> bytes:
    return binascii.crc_hqx(raw, 0).to_bytes(2, "little")


FLUSH_S_MAX = 5.0
"""How long the server may take to accept a packet, in seconds. After that the client reconnects."""
CONNECT_S_MAX = 2
RECONNECT_S = 0.5
PING_S = 10
PINGS_MAX = 2
WAITING_MAX = 65_536
WAITING_BYTES_MAX = 64 * 1024 * 1024
INBOX = "_INBOX"
NO_RESPONDERS = "503"
NEVER_CONNECTED = "not connected yet"
_ACK_PREFIXES = (b'{"stream":', b'{"error":')
"""First bytes of a stream's acknowledgement: the packet was stored, or was refused."""
_BROKEN = (ConnectionResetError, BrokenPipeError, UnexpectedEOF)

_log = log_of("trellis.bus")


@dataclass(frozen=True, kw_only=True)
class NatsOptions:
    """The servers, and how to connect to them."""

    servers: tuple[str, ...]
    name: str
    creds_file: Path | None = None
    ca_file: Path | None = None
    reconnect_s: float = RECONNECT_S

    @property
    def shown(self) -> str:
        """The server addresses without secrets."""
        return ",".join(_without_secrets(server) for server in self.servers)


@dataclass(eq=False, kw_only=True)
class NatsLink:
    """One established connection, until it breaks."""

    client: Client
    down: asyncio.Event = field(default_factory=asyncio.Event)
    expected: dict[str, "asyncio.Future[Msg | None]"] = field(default_factory=dict[str, "asyncio.Future[Msg | None]"])
    """Messages expected in our inbox, by the last word of their subject.

    None as result means that the link broke first.
    """
    kept: set[str] = field(default_factory=set[str])
    """The expected messages that are acknowledgements of a stream, not answers."""
    next_mark: "asyncio.Future[Msg | None] | None" = None
    """Resolves when the message to ourselves that is about to be sent comes back."""


class NatsConnection:
    """Connects and reconnects. `link()` waits for a connection; `current` is None while there is none."""

    def __init__(self, options: NatsOptions, *, clock: Clock, new_id: Callable[[], str]) -> None:
        self.options = options
        self.current: NatsLink | None = None
        self.client: Client | None = None
        """The client, also while it reconnects; None before its first connection."""
        self.error = NEVER_CONNECTED
        self.on_client: list[Callable[[Client], Awaitable[None]]] = []
        """Called with every new client before it is used, to subscribe.

        A client keeps its subscriptions over reconnects.
        """
        self._clock = clock
        self._inbox = f"{INBOX}.{new_id().replace('-', '')}"
        self._tokens = itertools.count(1)
        self._changed = asyncio.Event()
        self._first_try = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: asyncio.Task[None] | None = None
        self._ssl = _tls(options)
        if options.creds_file is not None:
            read_credentials(options.creds_file)  # fail at once if the file is invalid
        self._closing = False

    async def open(self) -> None:
        """Start connecting. Returns after the first success or failure, and keeps trying. Raises SettingsInvalid."""
        self._runner = asyncio.create_task(self._run())
        first = asyncio.create_task(self._first_try.wait())
        await asyncio.wait({self._runner, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if self._runner.done():
            await self._runner

    async def close(self) -> None:
        self._closing = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def link(self) -> NatsLink:
        """The connection, as soon as there is one."""
        while self.current is None:
            self._changed.clear()
            await self._changed.wait()
        return self.current

    def unavailable(self, detail: str | None = None) -> BusUnavailable:
        """The error for a caller while there is no connection."""
        return BusUnavailable(url=self.options.shown, detail=detail or self.error)

    def up(self) -> NatsLink:
        """The current connection; raises BusUnavailable."""
        if self.current is None or not self.current.client.is_connected:
            raise self.unavailable()
        return self.current

    async def send(
        self, link: NatsLink, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Pass a message to the client library.

        Raises BusUnavailable when it was not taken, and BusUncertain when it failed on the way.

        Raises PacketWrong for a packet over the server's size limit: the server would disconnect us for it.
        """
        size, most = len(data) + _headers_bytes(headers), link.client.max_payload
        if size > most:
            raise PacketWrong(detail=f"it has {size} bytes and the server takes {most}; raise its max_payload")
        try:
            await link.client.publish(subject, data, reply=reply, headers=dict(headers) if headers else None)
        except NatsError as error:
            raise self.unavailable(str(error) or type(error).__name__) from error
        except OSError as error:
            raise self.uncertain(str(error) or type(error).__name__) from error

    def expect(self, link: NatsLink, *, kept: bool = False) -> tuple[str, "asyncio.Future[Msg | None]"]:
        """A reply subject of ours, and a future for the first message that arrives there.

        The message is an answer or, with `kept`, a stream's acknowledgement. Pass the reply subject to `forget` in the
        end.
        """
        token = str(next(self._tokens))
        link.expected[token] = expected = asyncio.get_running_loop().create_future()
        if kept:
            link.kept.add(token)
        if link.down.is_set():
            expected.set_result(None)
        return f"{self._inbox}.{token}", expected

    def forget(self, link: NatsLink, reply: str) -> None:
        """Expect no more messages at this reply subject."""
        token = reply.rpartition(".")[2]
        link.expected.pop(token, None)
        link.kept.discard(token)

    async def taken(self, link: NatsLink) -> None:
        """Wait until the server has taken everything sent over this link so far; raises BusUncertain."""
        mark = link.next_mark
        if mark is None:
            mark = link.next_mark = asyncio.get_running_loop().create_future()
            self._spawn(self._mark(link, mark))
        try:
            back = await asyncio.shield(mark)
        except TimeoutError:
            raise self.uncertain(f"it took nothing for {FLUSH_S_MAX:g} s") from None
        if back is None:
            raise self.uncertain("the connection broke")

    def uncertain(self, detail: str) -> BusUncertain:
        """The error for a packet that the client library had accepted.

        The packet may be at the server, or go out with the next connection.
        """
        return BusUncertain(url=self.options.shown, detail=detail)

    async def _mark(self, link: NatsLink, mark: "asyncio.Future[Msg | None]") -> None:
        await asyncio.sleep(0)  # concurrent publishers share the mark, and its time-out
        link.next_mark = None
        reply, back = self.expect(link)
        answer: Msg | None = None
        try:
            async with asyncio.timeout(FLUSH_S_MAX):
                await self.send(link, reply, b"")
                answer = await back
        except TimeoutError as error:
            if not mark.done():
                mark.set_exception(error)
                mark.exception()  # all callers may be gone
            if not link.down.is_set():
                await link.client.force_reconnect()
        except BusUnavailable:
            answer = None
        finally:
            self.forget(link, reply)
            if not mark.done():
                mark.set_result(answer)

    async def _on_inbox(self, message: Msg) -> None:
        link, token = self.current, message.subject.rpartition(".")[2]
        if link is None:
            return
        if token in link.kept:  # subscribers see this reply subject and may send anything to it
            fits = message.data.startswith(_ACK_PREFIXES) or status_of(message) is not None
        else:
            fits = not message.data.startswith(b"{")  # an answer is never JSON
        if not fits:
            return
        expected = link.expected.get(token)
        if expected is not None and not expected.done():
            expected.set_result(message)

    # -- connecting and reconnecting -------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            client, closed = Client(), asyncio.Event()
            try:
                await client.connect(**self._arguments(client, closed))
                await self._use(client, closed)
            except Exception as error:  # noqa: BLE001 - the library lets out whatever a server makes it stumble over
                self._note(error)
            finally:
                with contextlib.suppress(Exception):  # e.g. a client that never connected, or has unsent data
                    await client.close()
            await self._clock.sleep(self.options.reconnect_s)

    async def _use(self, client: Client, closed: asyncio.Event) -> None:
        """Use the client until it gives up: the server disconnected it, or it did not understand an answer."""
        try:
            await subscribe(client, f"{self._inbox}.*", self._on_inbox)
            begun: list[Callable[[Client], Awaitable[None]]] = []
            while waiting := [begin for begin in self.on_client if begin not in begun]:
                begun.append(waiting[0])
                await waiting[0](client)
            self.client = client
            self._came_up(client)
            while not await sleep_or_stop(self._clock, closed, self.options.reconnect_s):
                _raise_if_given_up(client)
        finally:
            self.client = None
            self._went_down()

    def _arguments(self, client: Client, closed: asyncio.Event) -> dict[str, Any]:
        async def reconnected() -> None:
            self._came_up(client)

        async def disconnected() -> None:
            if self.current is not None and self.current.client is client:  # not if a newer client has replaced it
                self._went_down()

        async def ended() -> None:
            closed.set()

        async def failed(error: Exception) -> None:
            self._note(error)

        arguments: dict[str, Any] = {
            "servers": list(self.options.servers),
            "name": self.options.name,
            "connect_timeout": CONNECT_S_MAX,
            "reconnect_time_wait": self.options.reconnect_s,
            "max_reconnect_attempts": -1,
            "ping_interval": PING_S,
            "max_outstanding_pings": PINGS_MAX,
            "pending_size": 0,
            "reconnected_cb": reconnected,
            "disconnected_cb": disconnected,
            "closed_cb": ended,
            "error_cb": failed,
        }
        if self.options.creds_file is not None:
            arguments |= connect_arguments(client, self.options.creds_file)
        return arguments if self._ssl is None else {**arguments, "tls": self._ssl}

    def _came_up(self, client: Client) -> None:
        self._went_down()
        self.current = NatsLink(client=client)
        self._changed.set()
        self._first_try.set()
        _log.info("bus_connected", url=self.options.shown)

    def _went_down(self) -> None:
        link, self.current = self.current, None
        if link is None:
            return
        self.error = "the connection broke"
        link.down.set()
        for expected in link.expected.values():
            if not expected.done():
                expected.set_result(None)
        if not self._closing:
            _log.warning("bus_disconnected", url=self.options.shown)

    def _note(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        self._first_try.set()
        if text == self.error or (isinstance(error, _BROKEN) and self.error != NEVER_CONNECTED):
            return  # the break is known; the server's reason, which comes first, says more
        _log.warning("bus_error", url=self.options.shown, error=text)
        self.error = text

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _raise_if_given_up(client: Client) -> None:
    """Raise if the client has silently given up.

    The library's reconnect and close tasks end without a report on unexpected errors.
    """
    untyped: Any = client  # there is no public API for this
    reconnecting: asyncio.Task[None] | None = untyped._reconnection_task  # noqa: SLF001
    if client.is_connected or (reconnecting is not None and not reconnecting.done()):
        return
    if reconnecting is not None and not reconnecting.cancelled():
        reconnecting.result()
    raise client.last_error or NatsError("it gave up")


async def subscribe(
    client: Client, subject: str, on_message: Callable[[Msg], Awaitable[None]], *, group: str = ""
) -> Subscription:
    """Subscribe with limits on pending messages.

    Messages beyond them are dropped and reported as a connection error.
    """
    untyped: Any = client  # the library's own annotations are incomplete
    subscription: Subscription = await untyped.subscribe(
        subject, queue=group, cb=on_message, pending_msgs_limit=WAITING_MAX, pending_bytes_limit=WAITING_BYTES_MAX
    )
    return subscription


async def unsubscribe(link: NatsLink | None, subscription: Subscription, within_s: float | None) -> None:
    """Unsubscribe, but handle what the server had already sent.

    What takes longer than `within_s` seconds is dropped.
    """
    try:
        if link is not None and not link.down.is_set():
            async with asyncio.timeout(within_s):
                await subscription.drain()
    except (NatsError, TimeoutError) as error:
        _log.debug("not_drained", subject=subscription.subject, error=str(error) or type(error).__name__)
    try:
        await subscription.unsubscribe()
    except NatsError:
        return  # already drained, or gone with its connection


def _headers_bytes(headers: Mapping[str, str] | None) -> int:
    """The bytes that headers add to a packet: a first line, one line per header, and an empty line."""
    return 12 + sum(len(f"{name}: {value}".encode()) + 2 for name, value in headers.items()) if headers else 0


def status_of(message: Msg) -> str | None:
    """The status code of a message sent by the server itself; None for other messages."""
    return message.headers.get("Status") if message.headers else None


def servers_of(url: str) -> tuple[str, ...]:
    """The addresses in a comma-separated list; raises SettingsInvalid."""
    servers = tuple(part.strip() for part in url.split(",") if part.strip())
    for server in servers:
        parts = urlsplit(server)
        try:
            usable = parts.scheme in {"nats", "tls", "ws", "wss"} and parts.hostname and (parts.port or 1)
        except ValueError:
            usable = False
        if not usable:
            raise SettingsInvalid(
                source="TRELLIS_BUS", detail=f"{_without_secrets(server)!r} is no address like nats://host:4222"
            )
    return servers


def _without_secrets(server: str) -> str:
    front, at, rest = server.rpartition("@")
    scheme, slashes, _ = front.partition("://")
    return f"{scheme}{slashes}{rest}" if at else server


def _tls(options: NatsOptions) -> ssl.SSLContext | None:
    for file in (options.creds_file, options.ca_file):
        if file is not None and not file.is_file():
            raise SettingsInvalid(source=str(file), detail="there is no such file")
    if options.ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(options.ca_file))
    except (ssl.SSLError, OSError) as error:
        raise SettingsInvalid(source=str(options.ca_file), detail="holds no certificates in PEM") from error
