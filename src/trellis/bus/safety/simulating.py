"""What another policy would change: over requests that are given, or over the last jobs of a ledger. It judges beside the event loop: a policy
that is tried may be a slow one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trellis.bus.documents import decision_of
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.requests import JobRequest
from trellis.bus.safety import judging
from trellis.bus.safety.decisions import DecisionKernel, SafetyDecision
from trellis.bus.safety.policy import SafetyPolicy
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.lifecycles.bus_job import BUS_JOB

JOBS_MAX = 1_000
REQUESTS_MAX = 1_000
PAGE = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedDecision:
    """One request under the policy that is tried. `before` is what was decided, or would be now; None when that is not known."""

    job_id: str
    topic: str
    before: str | None
    before_rule: str | None
    after: SafetyDecision

    @property
    def changes(self) -> bool:
        """Whether another answer would come."""
        return self.before is not None and self.before != self.after.kind.value

    def to_dict(self) -> dict[str, Any]:
        """As it is shown."""
        return {
            "job_id": self.job_id,
            "topic": self.topic,
            "before": self.before,
            "before_rule": self.before_rule,
            "after": self.after.kind.value,
            "after_rule": self.after.rule,
            "reason": self.after.reason,
            "changes": self.changes,
        }


async def simulate_requests(
    policy: SafetyPolicy, requests: Sequence[JobRequest], kernel: DecisionKernel | None
) -> list[SimulatedDecision]:
    """Beside what the kernel in force says to each now; raises KernelUnavailable."""
    made = list[SimulatedDecision]()
    for request in requests[:REQUESTS_MAX]:
        before = None if kernel is None else await kernel.check(request)
        made.append(
            SimulatedDecision(
                job_id=request.job_id,
                topic=request.topic,
                before=None if before is None else before.kind.value,
                before_rule=None if before is None else before.rule,
                after=await asyncio.to_thread(judging.decide, policy, request),
            )
        )
    return made


async def simulate_jobs(policy: SafetyPolicy, ledger: Ledger, *, last: int) -> list[SimulatedDecision]:
    """Beside what was decided about each of the last jobs, newest first; those whose request cannot be read are left out."""
    made, seen, cursor = list[SimulatedDecision](), 0, None
    while seen < min(last, JOBS_MAX):
        page = await ledger.jobs(
            JobFilter(lifecycle=BUS_JOB.name), limit=min(PAGE, min(last, JOBS_MAX) - seen), cursor=cursor
        )
        for listed in page.jobs:
            job = await ledger.job(listed.job_id)
            found = None if job is None else await _simulate_one(policy, ledger, job.payload or b"", job.job_id)
            made += [] if found is None else [found]
        seen, cursor = seen + len(page.jobs), page.cursor
        if cursor is None:
            break
    return made


async def _simulate_one(policy: SafetyPolicy, ledger: Ledger, payload: bytes, job_id: Any) -> SimulatedDecision | None:
    try:
        request = JobRequest.read(payload)
    except BusRequestInvalid:
        return None
    before = decision_of(await ledger.events(job_id)) or {}
    return SimulatedDecision(
        job_id=job_id,
        topic=request.topic,
        before=before.get("decision"),
        before_rule=before.get("rule"),
        after=await asyncio.to_thread(judging.decide, policy, request),
    )
