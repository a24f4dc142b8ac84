"""Targets of outgoing calls: how a URL is read, and which addresses it may lead to."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from trellis.net.errors import UrlRefused

# Which addresses a URL of somebody else may lead to: those of the public internet, and nothing that is special in any way.
#
# The tables are our own: what the standard library calls global changed between versions of Python, and an address that carries
# another one inside (mapped, translated, tunnelled) is never public here, whatever it carries.

_IPV4_SPECIAL = tuple(
    ip_network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a carrier's translation; one cloud has its metadata here
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's own server for its guests, on a public number
        "169.254.0.0/16",  # link-local, where metadata services are
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_IPV6_UNICAST = ip_network("2000::/3")
"""All that is routed; mapped, translated, local and multicast addresses are outside."""
_IPV6_SPECIAL = tuple(
    ip_network(network)
    for network in (
        "2001::/23",  # protocol assignments, among them Teredo
        "2001:db8::/32",
        "2002::/16",  # 6to4 carries any IPv4 address
        "3fff::/20",
    )
)
_NEVER = tuple(
    ip_network(network)
    for network in (
        "0.0.0.0/8",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "224.0.0.0/3",
        "::/128",
        "fd00:ec2::/32",  # a cloud's metadata over IPv6
        "fe80::/10",
        "ff00::/8",
    )
)
"""Where no listed name leads either: a name can be pointed anywhere by whoever runs its domain."""


def read_ip(text: str) -> IPv4Address | IPv6Address | None:
    """The address in its one plain form: four decimal numbers, or IPv6 without a zone. Anything else is None."""
    if "%" in text:
        return None
    try:
        return ip_address(text)
    except ValueError:
        return None


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether anybody may point us there."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _IPV4_SPECIAL)
    return address in _IPV6_UNICAST and not any(address in network for network in _IPV6_SPECIAL)


def is_usable(address: IPv4Address | IPv6Address) -> bool:
    """Whether a host that the operator listed may be there; a private network is its good right."""
    inside = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return not any(
        one in network
        for one in (address, inside)
        if one is not None
        for network in _NEVER
        if network.version == one.version
    )


def is_loopback(address: IPv4Address | IPv6Address) -> bool:
    """Whether only this machine reaches it."""
    return address.is_loopback


def one_sender(address: str) -> str:
    """What counts as one sender of those who have no other name: an IPv4 address, or the /64 of an IPv6 address.

    Whoever has one address of IPv6 has a /64 at least, and could send from another one every time.
    """
    found = read_ip(address.partition("%")[0])
    if not isinstance(found, IPv6Address):
        return address
    return str(found.ipv4_mapped or ip_network((found, 64), strict=False))


# Where a URL leads, read in the one way that leaves nothing to another reader's opinion.
#
# What two libraries could understand differently is refused: user names, backslashes, white space, other alphabets, dots at the
# end, numbers that some would take for an address. So what was checked is what is connected to.

URL_CHARS_MAX = 2_048
PORTS_OF_SCHEME = {"http": 80, "https": 443}
SHOWN_CHARS_MAX = 200

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<rest>(?:/[!$&-;=?-Z_a-z~%]*)?)"
)
"""After the first slash everything that may stand in a path or a query but `#`, `@` in front of the host, and white space."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class UrlTarget:
    """A URL, taken apart."""

    url: str
    scheme: str
    host: str
    """In small letters; an IPv6 address without brackets."""
    port: int
    path: str
    """With the query; begins with a slash."""
    address: IPv4Address | IPv6Address | None
    """What the host is if it is no name."""

    @property
    def origin(self) -> str:
        """`https://host:443`, always with the port."""
        return f"{self.scheme}://{self.written_host}:{self.port}"

    @property
    def written_host(self) -> str:
        """As it stands in a URL."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def host_header(self) -> str:
        """As the server expects it: the port only where it is not the usual one."""
        usual = PORTS_OF_SCHEME[self.scheme] == self.port
        return self.written_host if usual else f"{self.written_host}:{self.port}"


def read_target(url: str) -> UrlTarget:
    """What the URL names; raises UrlRefused. Nothing is looked up."""
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
    """Short enough for a message, and without what stands before an @ or after a ?: both may be secrets."""
    told = re.sub(r"//[^/]*@", "//…@", url.partition("?")[0])
    return told if len(told) <= SHOWN_CHARS_MAX else f"{told[:SHOWN_CHARS_MAX]}…"
