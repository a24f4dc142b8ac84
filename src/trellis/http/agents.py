"""Agents: which there are, and whether they may run."""

from trellis.http.calls import GatewayCalls, GatewayRequest, path_of
from trellis.http.listing import LIMIT_DEFAULT, listed
from trellis.http.shapes import AgentShape, Page


class Agents:
    """The agents: `client.agents`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls

    async def list(self, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[AgentShape]:
        """The agents, by name."""
        return await listed(self._calls, AgentShape, "/agents", limit, cursor)

    async def get(self, agent: str) -> AgentShape:
        """One agent."""
        return await self._calls.get(AgentShape, path_of("agents", agent))

    async def activate(self, agent: str, *, reason: str | None = None) -> AgentShape:
        """Let an agent run."""
        return await self._change(agent, "active", reason)

    async def pause(self, agent: str, *, reason: str | None = None) -> AgentShape:
        """Let no further run of it begin."""
        return await self._change(agent, "paused", reason)

    async def _change(self, agent: str, status: str, reason: str | None) -> AgentShape:
        body = {"status": status, "reason": reason}
        path = path_of("agents", agent, "status")
        return await self._calls.asked(
            AgentShape, GatewayRequest(method="PATCH", path=path, body=body, key=self._calls.key(None))
        )
