"""Validates gateway URLs."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from trellis.http.errors import GatewayUrlInvalid

PLAIN = "http://"
SCHEMES = (PLAIN, "https://")


def is_gateway_url(url: str | None) -> bool:
    """Whether a URL is one of a gateway and not of a ledger."""
    return url is not None and url.lower().startswith(SCHEMES)


def is_readable_on_the_way(url: str) -> bool:
    """Whether others could read traffic to this URL: it is not encrypted and leaves this machine."""
    if not url.lower().startswith(PLAIN):
        return False
    host = urlsplit(url).hostname or ""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def checked_url(url: str) -> str:
    """The gateway URL, validated; raises GatewayUrlInvalid."""
    if not is_gateway_url(url):
        raise GatewayUrlInvalid(url=url, reason="it does not begin with http:// or https://")
    if not url.isascii() or not url.isprintable() or any(char in url for char in ' \\"<>^`{|}'):
        raise GatewayUrlInvalid(url=url, reason="it has characters that no address has")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise GatewayUrlInvalid(url=url, reason=str(error)) from None
    if "@" in parts.netloc:
        raise GatewayUrlInvalid(url=f"{parts.scheme}://…@{parts.hostname}", reason="a token is not part of it")
    if not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise GatewayUrlInvalid(url=url, reason="it must be a host, perhaps with a port and a path, and no more")
    return url
