"""What the safety policy says about a job, why, and what another policy would say."""

from collections.abc import Mapping, Sequence
from typing import Any

from trellis.http.calls import GatewayCalls
from trellis.http.safety_shapes import ExplanationShape, SimulationShape


class Safety:
    """The safety policy: `client.safety`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls

    async def explain(self, request: Mapping[str, Any], *, policy: str | None = None) -> ExplanationShape:
        """What the policy in force, or the one given as text, decides about a job request, and how it comes to that."""
        body = {"request": dict(request), "policy": policy}
        return await self._calls.post(ExplanationShape, "/safety/explain", body)

    async def simulate(
        self, policy: str, *, requests: Sequence[Mapping[str, Any]] | None = None, last: int = 100
    ) -> SimulationShape:
        """What a policy, given as text, would decide about these requests, or would have decided about the last jobs on the bus."""
        body = {
            "policy": policy,
            "requests": None if requests is None else [dict(one) for one in requests],
            "last": last,
        }
        return await self._calls.post(SimulationShape, "/safety/simulate", body)
