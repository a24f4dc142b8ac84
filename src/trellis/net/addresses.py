"""Which addresses a URL of somebody else may lead to: those of the public internet, and nothing that is special in any way.

The tables are our own: what the standard library calls global changed between versions of Python, and an address that carries
another one inside (mapped, translated, tunnelled) is never public here, whatever it carries.
"""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

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
