"""The headers by which every response tells a browser what it may do with it.

A response that is no page of ours may load, run, embed and submit nothing: whatever text a caller put into a job, an
error or a document, a browser that opens the response executes none of it. A page that needs more says so in a
`Content-Security-Policy` of its own, which stays.
"""

from collections.abc import Mapping
from types import MappingProxyType

SECURITY_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
)
