"""Whether a person let a job go: an approval counts for the job as it is, under the policy as it is (D45)."""

import json
from collections.abc import Iterable
from typing import Any

from trellis.bus.safety.decisions import Decision
from trellis.engine.records import Event

APPROVED = "job_approved"
HOLD_S = 72 * 3600.0
"""How long a job that waits for a person rests before it is asked about again."""


def approved(events: Iterable[Event], decision: Decision) -> str | None:
    """The id of the approval that is bound to what this decision is bound to; None without one."""
    for event in events:
        if event.type != APPROVED:
            continue
        said: Any = json.loads(event.data or b"{}")
        if said.get("job_hash") == decision.job_hash and said.get("policy_hash") == decision.policy_hash:
            return event.id
    return None
