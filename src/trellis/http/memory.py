"""What agents remember."""

from typing import Literal

from trellis.http.calls import Calls, path_of
from trellis.http.listing import LIMIT_DEFAULT, listed
from trellis.http.shapes import MemoryChange, MemoryRead, Page


class Memory:
    """What agents remember: `client.memory`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def read(self, agent: str, *, mode: Literal["basic", "wide"] = "basic") -> MemoryRead:
        """Layer 1 of an agent's memory; wide adds its facts."""
        return await self._calls.get(MemoryRead, path_of("memory", agent, "read"), mode=mode)

    async def history(self, agent: str, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[MemoryChange]:
        """The changes of a memory, newest first."""
        return await listed(self._calls, MemoryChange, path_of("memory", agent, "history"), limit, cursor)
