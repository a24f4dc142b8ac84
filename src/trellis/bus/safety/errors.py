"""What can go wrong with a policy, and with a person's decision about a held job."""

from trellis.bus.errors import KernelUnavailable
from trellis.engine.errors import InputError, Refused


class PolicyInvalid(InputError):
    """The safety policy {source} does not fit: {detail}"""


class NotHeld(Refused):
    """Job {job_id} does not wait for a person: {reason}."""

    code = "INVALID_TRANSITION"


class PolicyDiffers(Refused):
    """Job {job_id} is held under policy {held} and not under {given}; look at it again before you decide."""


class KernelInDoubt(KernelUnavailable):
    """The safety kernel does not answer this question: {detail}"""


class KernelRefuses(KernelUnavailable):
    """The safety kernel is there and gives no decision that can be used: {detail}"""
