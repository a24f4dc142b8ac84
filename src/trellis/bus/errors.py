"""Errors of the bus. The docstring of an error class is its message template."""

from trellis.engine.errors import InputError, QueueFull, TrellisError


class BusRequestInvalid(InputError):
    """The job request does not fit: {detail}"""


class TopicFull(QueueFull):
    """{waiting} jobs wait {place} and {limit} is the limit; nothing was stored: send it again when some of them are done, or raise waiting_max in bus.toml."""


class BusConfigInvalid(InputError):
    """{file} does not fit: {detail}"""


class PointerUnknown(InputError):
    """No scheme {scheme!r} is registered for pointers; known: {known}. `redis` needs TRELLIS_REDIS."""


class PointerGone(InputError):
    """Nothing is stored at {pointer}."""

    code = "NOT_FOUND"


class PointerInvalid(InputError):
    """{pointer!r} is no pointer that can be followed: {reason}."""


class PointerChanged(InputError):
    """What is stored at {pointer} does not have the sha256 in its name: it was changed. Nothing is done with it; submit the job again."""

    code = "CONFLICT"


class PointerTooLarge(InputError):
    """What is stored at {pointer} has more than {limit} bytes; store less, or fetch it where it lies."""

    code = "PAYLOAD_TOO_LARGE"


class PointerUnavailable(TrellisError):
    """The store behind {pointer} does not answer: {reason}; try again."""

    code = "UPSTREAM_UNAVAILABLE"


class BusError(TrellisError):
    """The bus cannot do it: {detail}"""


class BusUnavailable(BusError):
    """The bus at {url} does not answer: {detail}"""

    code = "UPSTREAM_UNAVAILABLE"


class NoAnswer(BusUnavailable):
    """Nobody answered at {subject} within {timeout_s:g} s, though the bus at {url} is there: look at who answers there, and at its ledger."""


class BusUncertain(BusUnavailable):
    """The bus at {url} broke off, and the packet may have arrived all the same: {detail}"""


class NoResponders(BusError):
    """Nobody listens at {subject}."""


class NotKept(BusError):
    """The stream that keeps what is sent to {subject} did not take the packet: {detail}; look at the stream's settings and its disk."""


class TooLargeToKeep(NotKept):
    """The stream that keeps what is sent to {subject} never takes a packet of this size: {detail}; raise its max_msg_size."""


class KernelUnavailable(TrellisError):
    """The safety kernel does not answer: {detail}"""

    code = "UPSTREAM_UNAVAILABLE"
