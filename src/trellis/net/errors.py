"""What can go wrong on the way out.

OutgoingError
├── UrlRefused            the guard says no; nothing was sent and nobody was asked
├── AddressRefused        the host has an address that nobody outside may point us to; no connection was made
├── OutgoingUnavailable   it did not answer, or not in time: worth another try
└── AnswerRefused         it answered with more than is read here
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
