"""Targets of outgoing requests: parsing URLs, which addresses are allowed, and the errors of outgoing requests."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from trellis.engine.errors import TrellisError

# Errors of outgoing requests.
#
# OutgoingError
# ├── UrlRefused            the policy forbids the URL; nothing was looked up or sent
# ├── AddressRefused        the host has an address that is not allowed; no connection was made
# ├── OutgoingUnavailable   the server did not answer, or not in time: worth a retry
# └── AnswerRefused         the response is larger than allowed or has the wrong encoding


class OutgoingError(TrellisError):
    """{detail}"""

    code = "UPSTREAM_UNAVAILABLE"


class UrlRefused(OutgoingError):
    """The address {url!r} is refused: {reason}."""

    code = "VALIDATION_FAILED"


class AddressRefused(OutgoingError):
    """The address {url!r} is refused: {host} is at {address}, which is not public; list its origin if it is meant."""

    code = "VALIDATION_FAILED"


class OutgoingUnavailable(OutgoingError):
    """{url!r} did not answer: {reason}."""


class AnswerRefused(OutgoingError):
    """The answer of {url!r} is refused: {reason}."""


# Allowed addresses: those of the public internet, and no special-purpose ones.
#
# The tables are our own: what the standard library calls global changed between Python versions. An address that embeds
# another one (mapped, translated, tunnelled) is never public here, whatever it embeds.


def _networks(*networks: str) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(map(ip_network, networks))


_IPV4_SPECIAL = _networks(
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",
    "100.64.0.0/10",  # carrier-grade NAT; one cloud has its metadata here
    "127.0.0.0/8",
    "168.63.129.16/32",  # a cloud's service for its guests, on a public address
    "169.254.0.0/16",  # link-local, used by metadata services
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",  # 6to4 relays
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
)
_IPV6_UNICAST = ip_network("2000::/3")
"""All routed addresses. Mapped, translated, local and multicast addresses are outside."""
_IPV6_SPECIAL = _networks(
    "2001::/23",  # protocol assignments, including Teredo
    "2001:db8::/32",
    "2002::/16",  # 6to4 embeds any IPv4 address
    "3fff::/20",
)
_NEVER = _networks(
    "0.0.0.0/8",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "224.0.0.0/3",
    "::/128",
    "fd00:ec2::/32",  # a cloud's metadata over IPv6
    "fe80::/10",
    "ff00::/8",
)
"""Refused even for listed names: the owner of a domain can point a name anywhere."""


def read_ip(text: str) -> IPv4Address | IPv6Address | None:
    """The address in its plain form: four decimal numbers, or IPv6 without a zone. None for anything else."""
    if "%" in text:
        return None
    try:
        return ip_address(text)
    except ValueError:
        return None


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether a caller's URL may lead to this address."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _IPV4_SPECIAL)
    return address in _IPV6_UNICAST and not any(address in network for network in _IPV6_SPECIAL)


def is_usable(address: IPv4Address | IPv6Address) -> bool:
    """Whether a listed host may have this address. Private networks are allowed."""
    inside = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return not any(
        one in network
        for one in (address, inside)
        if one is not None
        for network in _NEVER
        if network.version == one.version
    )


def one_sender(address: str) -> str:
    """The unit by which anonymous senders are counted: an IPv4 address, or the /64 of an IPv6 address.

    A sender with one IPv6 address has at least a /64, and could use another address every time.
    """
    ip = read_ip(address.partition("%")[0])
    if not isinstance(ip, IPv6Address):
        return address
    return str(ip.ipv4_mapped or ip_network((ip, 64), strict=False))


# Parsing URLs strictly, so that no other parser can read them differently.
#
# Anything that two libraries could interpret differently is refused: user names, backslashes, white space, other
# alphabets, trailing dots, numbers that some parse as an address. So the checked host is the one connected to.

URL_CHARS_MAX = 2_048
PORTS_OF_SCHEME = {"http": 80, "https": 443}
SHOWN_CHARS_MAX = 200

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<rest>(?:/[!$&-;=?-Z_a-z~%]*)?)"
)
"""The rest after the first slash allows every path or query character, but no `#` and no white space."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class UrlTarget:
    """A parsed URL."""

    url: str
    scheme: str
    host: str
    """In lower case; an IPv6 address without brackets."""
    port: int
    path: str
    """With the query; begins with a slash."""
    address: IPv4Address | IPv6Address | None
    """The host as an address; None if it is a name."""

    @property
    def origin(self) -> str:
        """`https://host:443`, always with the port."""
        return f"{self.scheme}://{self.written_host}:{self.port}"

    @property
    def written_host(self) -> str:
        """The host as written in a URL, with brackets for IPv6."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def host_header(self) -> str:
        """The value of the Host header: with the port only if it is not the default."""
        usual = PORTS_OF_SCHEME[self.scheme] == self.port
        return self.written_host if usual else f"{self.written_host}:{self.port}"


def read_target(url: str) -> UrlTarget:
    """Parse the URL; raises UrlRefused. Nothing is resolved."""
    if len(url) > URL_CHARS_MAX:
        raise _refused(url, f"it has {len(url)} characters and the limit is {URL_CHARS_MAX}")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise _refused(
            url, "write it in plain ASCII without spaces: names of other alphabets as xn--…, the rest as %XX"
        )
    matched = _URL.fullmatch(url)
    if matched is None:
        raise _refused(url, "write https://host/path, without a user name, a backslash or a #")
    scheme, host = matched["scheme"].lower(), matched["host"].lower()
    if scheme not in PORTS_OF_SCHEME:
        raise _refused(url, "only https and http are fetched")
    port = PORTS_OF_SCHEME[scheme] if matched["port"] is None else int(matched["port"])
    if not 1 <= port <= 65_535:
        raise _refused(url, "a port is a number from 1 to 65535")
    address = _address(url, host)
    name = host if address is None else str(address)
    return UrlTarget(url=url, scheme=scheme, host=name, port=port, path=matched["rest"] or "/", address=address)


def _address(url: str, host: str) -> IPv4Address | IPv6Address | None:
    if host.startswith("["):
        address = read_ip(host[1:-1])
        if not isinstance(address, IPv6Address):
            raise _refused(url, "what stands in brackets is no IPv6 address")
        return address
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1] or labels[-2] if len(labels) > 1 else labels[-1]):
        address = read_ip(host)
        if address is None:
            raise _refused(url, "an address is written as four decimal numbers without leading zeros")
        return address
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise _refused(url, "the host is no name: letters, digits and hyphens between single dots, none at the end")
    return None


def _refused(url: str, reason: str) -> UrlRefused:
    return UrlRefused(url=url_for_message(url), reason=reason)


def url_for_message(url: str) -> str:
    """The URL for a message: shortened, and without text before an @ or after a ?, which may be secret."""
    shown = re.sub(r"//[^/]*@", "//…@", url.partition("?")[0])
    return shown if len(shown) <= SHOWN_CHARS_MAX else f"{shown[:SHOWN_CHARS_MAX]}…"
