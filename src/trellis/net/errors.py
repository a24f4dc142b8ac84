"""Errors of outgoing requests.

OutgoingError
├── UrlRefused            the policy forbids the URL; nothing was looked up or sent
├── AddressRefused        the host has an address that is not allowed; no connection was made
├── OutgoingUnavailable   the server did not answer, or not in time: worth a retry
└── AnswerRefused         the response is larger than allowed or has the wrong encoding
"""

from trellis.engine.errors import TrellisError


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
