"""The only client for URLs that callers provide: callbacks, snapshots, webhooks.

Invariants:
- A URL leads to a public address over https, or to an origin that the operator listed. Anything else is refused before
  a packet is sent.
- The host is resolved once, every address is checked, and the connection goes to a checked address. The name stays in
  TLS and in the Host header, so the certificate must match the name.
- No redirect is followed, no proxy or password is taken from the environment, and no connection is reused.
- Bytes and time are limited, from the lookup to the last byte.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from types import TracebackType
from typing import Self

import httpx2

from trellis.net.targets import (
    AddressRefused,
    AnswerRefused,
    OutgoingUnavailable,
    UrlRefused,
    UrlTarget,
    is_public,
    is_usable,
    read_ip,
    read_target,
    url_for_message,
)

ADDRESSES_TRIED_MAX = 4
CONNECTIONS_MAX = 32
REQUEST_HEADERS_REFUSED = frozenset({"host", "connection", "transfer-encoding", "content-length", "accept-encoding"})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host, as text; raises OSError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingPolicy:
    """Where requests may go, and their limits."""

    origins: tuple[str, ...] = ()
    """`https://host` or `http://host:port` that are allowed although they are not public; names or addresses."""
    public: bool = True
    """Whether every public address is allowed too, over https."""
    public_ports: frozenset[int] = frozenset({443})
    answer_bytes_max: int = 5 * 1024 * 1024
    connect_s: float = 5.0
    total_s: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedResponse:
    """The response. Redirects are returned, not followed."""

    status: int
    headers: Mapping[str, str]
    """Header names are in lower case."""
    body: bytes


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """Resolve with the operating system's resolver."""
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in addresses]


@cache
def system_authorities() -> ssl.SSLContext:
    """A TLS context that trusts the authorities of this machine. Reading them takes 40 ms: a process does it once."""
    return ssl.create_default_context()


class GuardedClient:
    """Sends single requests that the policy allows. `tls` is for certificates of a private authority."""

    def __init__(
        self, policy: OutgoingPolicy, *, resolve: Resolve = system_resolve, tls: ssl.SSLContext | None = None
    ) -> None:
        self._policy, self._resolve = policy, resolve
        self._origins = frozenset(_origin(text) for text in policy.origins)
        self._client = httpx2.AsyncClient(
            verify=tls or system_authorities(),
            trust_env=False,
            follow_redirects=False,
            timeout=httpx2.Timeout(policy.total_s, connect=policy.connect_s),
            # A connection is pinned to one name: another name at the same address must not reuse it.
            limits=httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    def check(self, url: str) -> None:
        """Check that the URL is allowed, without resolving it; raises UrlRefused, AddressRefused."""
        self._judged(read_target(url))

    async def send(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, content: bytes | None = None
    ) -> FetchedResponse:
        """One request; raises UrlRefused, AddressRefused, OutgoingUnavailable, AnswerRefused."""
        target = read_target(url)
        self._judged(target)
        given = {name.lower(): value for name, value in (headers or {}).items()}
        refused = sorted(REQUEST_HEADERS_REFUSED & set(given))
        if refused:
            raise UrlRefused(
                url=url_for_message(url), reason=f"the header {refused[0]} is set here and not by the caller"
            )
        try:
            async with asyncio.timeout(self._policy.total_s):
                addresses = await self._addresses(target)
                return await self._first(target, addresses, method, given, content)
        except TimeoutError:
            reason = f"{self._policy.total_s:g} s were not enough"
            raise OutgoingUnavailable(url=url_for_message(url), reason=reason) from None

    # --- checking the target -----------------------------------------------------------------------------------------

    def _judged(self, target: UrlTarget) -> None:
        """All checks that need no lookup."""
        if target.origin in self._origins:
            return
        if not self._policy.public:
            raise UrlRefused(
                url=url_for_message(target.url), reason=f"only listed origins are asked, and {target.origin} is not"
            )
        if target.scheme != "https":
            raise UrlRefused(
                url=url_for_message(target.url), reason="it must begin with https://, or its origin be listed"
            )
        if target.port not in self._policy.public_ports:
            allowed = ", ".join(str(port) for port in sorted(self._policy.public_ports))
            raise UrlRefused(
                url=url_for_message(target.url), reason=f"its port must be {allowed}, or its origin be listed"
            )
        if target.address is not None:
            self._admit(target, target.address)

    async def _addresses(self, target: UrlTarget) -> list[IPv4Address | IPv6Address]:
        """The host's addresses, resolved once. One forbidden address refuses all of them."""
        if target.address is not None:
            return [target.address]
        try:
            resolved = await self._resolve(target.host, target.port)
        except OSError as error:
            reason = f"its host is not known ({error.strerror or type(error).__name__})"
            raise OutgoingUnavailable(url=url_for_message(target.url), reason=reason) from None
        addresses: list[IPv4Address | IPv6Address] = []
        for text in resolved:
            address = read_ip(text)
            if address is None:
                raise AddressRefused(url=url_for_message(target.url), host=target.host, address=text[:60])
            self._admit(target, address)
            addresses.append(address)
        if not addresses:
            raise OutgoingUnavailable(url=url_for_message(target.url), reason="its host has no address")
        return addresses[:ADDRESSES_TRIED_MAX]

    def _admit(self, target: UrlTarget, address: IPv4Address | IPv6Address) -> None:
        listed = target.origin in self._origins
        if not (is_usable(address) if listed else is_public(address)):
            raise AddressRefused(url=url_for_message(target.url), host=target.host, address=str(address))

    # --- sending -----------------------------------------------------------------------------------------------------

    async def _first(
        self,
        target: UrlTarget,
        addresses: Sequence[IPv4Address | IPv6Address],
        method: str,
        headers: Mapping[str, str],
        content: bytes | None,
    ) -> FetchedResponse:
        """Send to the first address that accepts the connection. After that there is no second try."""
        for address in addresses[:-1]:
            try:
                return await self._ask(target, address, method, headers, content)
            except httpx2.ConnectError:
                continue
            except httpx2.HTTPError as error:
                raise _unavailable(target, error) from None
        try:
            return await self._ask(target, addresses[-1], method, headers, content)
        except httpx2.HTTPError as error:
            raise _unavailable(target, error) from None

    async def _ask(
        self,
        target: UrlTarget,
        address: IPv4Address | IPv6Address,
        method: str,
        headers: Mapping[str, str],
        content: bytes | None,
    ) -> FetchedResponse:
        host = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
        pinned = f"{target.scheme}://{host}:{target.port}{target.path}"
        request = self._client.build_request(
            method,
            pinned,
            headers={**headers, "host": target.host_header, "accept-encoding": "identity", "connection": "close"},
            content=content,
            extensions={"sni_hostname": target.host},
        )
        response = await self._client.send(request, stream=True)
        try:
            body = await self._read(target, response)
        finally:
            await response.aclose()
        return FetchedResponse(status=response.status_code, headers=dict(response.headers), body=body)

    async def _read(self, target: UrlTarget, response: httpx2.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise AnswerRefused(url=url_for_message(target.url), reason="it is compressed, which was not asked for")
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > self._policy.answer_bytes_max:
                reason = f"it has more than {self._policy.answer_bytes_max} bytes"
                raise AnswerRefused(url=url_for_message(target.url), reason=reason)
        return bytes(body)


def _origin(text: str) -> str:
    target = read_target(text)
    if target.path != "/":
        raise UrlRefused(url=url_for_message(text), reason="an origin ends with its host or port")
    return target.origin


def _unavailable(target: UrlTarget, error: httpx2.HTTPError) -> OutgoingUnavailable:
    """The error without the library's own message, which may contain the request."""
    return OutgoingUnavailable(url=url_for_message(target.url), reason=type(error).__name__)
