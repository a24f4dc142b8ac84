"""The documents about decisions of the safety policy, and about another policy that is tried."""

from typing import Any

import pydantic


class LookedShape(pydantic.BaseModel):
    """One rule that was looked at, and why it fits or does not."""

    rule: str
    decision: str
    fits: bool
    why: str


class ExplanationShape(pydantic.BaseModel):
    """A decision of the safety kernel, and how it came about. A kernel in another process tells it in its reason alone."""

    decision: str
    rule: str
    reason: str
    policy_hash: str
    job_hash: str
    delay_s: float | None = None
    constraints: dict[str, Any] | None = None
    looked: list[LookedShape]
    not_looked: list[str]


class SimulatedShape(pydantic.BaseModel):
    """One request under the policy that was tried; `before` is null where nothing was decided yet."""

    job_id: str
    topic: str
    before: str | None
    before_rule: str | None
    after: str
    after_rule: str
    reason: str
    changes: bool


class SimulationShape(pydantic.BaseModel):
    """What a policy would say, and how many answers would be others."""

    policy_hash: str
    items: list[SimulatedShape]
    changed: int
