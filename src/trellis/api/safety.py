"""The safety policy: explain its decision about a job, and try another policy (BUS-4). Nothing is changed."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trellis.api.context import ApiPart
from trellis.bus.requests import JobRequest
from trellis.bus.safety import evaluation
from trellis.bus.safety.policy import SafetyPolicy, read_policy
from trellis.http.policy_shapes import ExplanationShape, SimulatedShape, SimulationShape


class LocalSafety(ApiPart):
    """The safety policy of an instance, with the calls of `client.safety`. Raises PolicyInvalid, BusRequestInvalid."""

    async def explain(self, request: Mapping[str, Any], *, policy: str | None = None) -> ExplanationShape:
        if policy is None:
            explanation = await (await self._context.instance()).kernel.explain(_read(request))
        else:
            explanation = await asyncio.to_thread(lambda: evaluation.explain(_policy(policy), _read(request)))
        return ExplanationShape.model_validate(explanation.to_dict())

    async def simulate(
        self, policy: str, *, requests: Sequence[Mapping[str, Any]] | None = None, last: int = 100
    ) -> SimulationShape:
        """What a policy decides about these requests, or about the last jobs on the bus, beside what was decided."""
        tried = await asyncio.to_thread(_policy, policy)
        if requests is None:
            simulation = await evaluation.simulate_jobs(tried, self._context.ledger, last=last)
        else:
            kernel = (await self._context.instance()).kernel
            simulation = await evaluation.simulate_requests(tried, [_read(one) for one in requests], kernel)
        items = [SimulatedShape.model_validate(one.to_dict()) for one in simulation]
        return SimulationShape(policy_hash=tried.hash, items=items, changed=sum(one.changes for one in simulation))


def _policy(text: str) -> SafetyPolicy:
    return read_policy(text, source="in the body")


def _read(request: Mapping[str, Any]) -> JobRequest:
    """The request of a job that need not exist, so that its id does not matter."""
    return JobRequest.read(json.dumps({"job_id": "asked", **request}).encode())
