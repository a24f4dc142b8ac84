"""Whether a person let a job go: an approval counts for the job as it is, as its worker would be told it, under the policy as it is (D45)."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from trellis.bus.requests import JobRequest
from trellis.bus.safety.decisions import SafetyDecision
from trellis.bus.scheduling.orders import request_within_policy
from trellis.engine.records import Event

APPROVED = "job_approved"
HOLD_S = 72 * 3600.0
"""How long a job that waits for a person rests before it is asked about again."""


def approval_bindings(request: JobRequest, decision: Mapping[str, Any]) -> dict[str, str]:
    """What an approval is bound to: the request, the policy, and all that a worker would be told with the decision's constraints."""
    return {
        "job_hash": request.hash,
        "policy_hash": str(decision.get("policy_hash", "")),
        "order_hash": request_within_policy(request, decision.get("constraints") or {}, decision.get("redacted")).hash,
    }


def find_approval(events: Iterable[Event], request: JobRequest, decision: SafetyDecision) -> str | None:
    """The id of the approval that is bound to what would go out now; None without one."""
    bound = approval_bindings(request, json.loads(json.dumps(decision.to_dict())))
    for event in events:
        if event.type != APPROVED:
            continue
        said: Any = json.loads(event.data or b"{}")
        if all(said.get(name) == value for name, value in bound.items()):
            return event.id
    return None
