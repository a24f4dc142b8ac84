"""What agents remember, and proposing a change of it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from trellis.http.calls import GatewayCalls, path_of
from trellis.http.listing import LIMIT_DEFAULT, listed
from trellis.http.shapes import MemoryChange, MemoryProposed, MemoryRead, Page


class Backing(TypedDict, total=False):
    """What can be said for a proposal."""

    reasoning: str
    """Why."""
    run_id: str
    """The run of this agent that it comes from."""
    priority: Literal["normal", "high"]
    """Of high priority a person decides, also about memory."""


class Memory:
    """What agents remember: `client.memory`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls

    async def read(self, agent: str, *, mode: Literal["basic", "wide"] = "basic") -> MemoryRead:
        """Layer 1 of an agent's memory; wide adds its facts."""
        return await self._calls.get(MemoryRead, path_of("memory", agent, "read"), mode=mode)

    async def history(self, agent: str, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[MemoryChange]:
        """The changes of a memory, newest first."""
        return await listed(self._calls, MemoryChange, path_of("memory", agent, "history"), limit, cursor)

    async def propose(
        self,
        agent: str,
        summary: str,
        updates: Sequence[Mapping[str, Any]],
        *,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
        **backing: Unpack[Backing],
    ) -> MemoryProposed:
        """Propose changes that belong together, each {file, operation, content, …}; of normal priority they are applied at once."""
        body: dict[str, Any] = {"summary": summary, "updates": [dict(update) for update in updates], **backing}
        if expected_version is not None:
            body["expected_version"] = expected_version
        return await self._calls.post(MemoryProposed, path_of("memory", agent, "propose"), body, key=idempotency_key)
