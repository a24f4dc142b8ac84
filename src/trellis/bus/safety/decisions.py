"""Decisions of a safety kernel, and errors of policies, approvals and kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from trellis.bus.errors import KernelUnavailable
from trellis.bus.requests import JobRequest
from trellis.engine.errors import InputError, Refused

# Errors.


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


# Decisions, and the kernel that makes them.


class DecisionKind(StrEnum):
    """The five possible decisions."""

    ALLOW = "allow"
    DENY = "deny"
    REQUIRE_HUMAN = "require_human"
    THROTTLE = "throttle"
    ALLOW_WITH_CONSTRAINTS = "allow_with_constraints"


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetyDecision:
    """One decision, with everything that it is bound to."""

    kind: DecisionKind
    rule: str
    """The rule that decided; `default` when none matched."""
    reason: str
    policy_hash: str
    job_hash: str
    delay_s: float = 0.0
    """How long a throttled job waits before the kernel is asked again, in seconds."""
    constraints: Mapping[str, Any] = field(default_factory=dict[str, Any])
    redacted: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The context that the worker gets in place of the request's own: `context_ptr`, `context_ref` or both.

    Empty for none.
    """

    @property
    def lets_go(self) -> bool:
        """Whether the job may be dispatched without a person."""
        return self.kind in {DecisionKind.ALLOW, DecisionKind.ALLOW_WITH_CONSTRAINTS}

    def to_dict(self) -> dict[str, Any]:
        """The form stored in events."""
        told: dict[str, Any] = {
            "decision": self.kind.value,
            "rule": self.rule,
            "reason": self.reason,
            "policy_hash": self.policy_hash,
            "job_hash": self.job_hash,
        }
        if self.kind is DecisionKind.THROTTLE:
            told["delay_s"] = self.delay_s
        if self.constraints:
            told["constraints"] = dict(self.constraints)
        if self.redacted:
            told["redacted"] = dict(self.redacted)
        return told


class DecisionKernel(Protocol):
    """A kernel as the scheduler uses it."""

    async def check(self, request: JobRequest) -> SafetyDecision:
        """Decide whether this job may be dispatched now; raises KernelUnavailable, and then the job waits."""
        ...
