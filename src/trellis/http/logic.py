"""What agents go by: proposing another text of it. Nothing is changed before a person approves."""

from typing import Any, Literal, Unpack

from trellis.http.calls import GatewayCalls, path_of
from trellis.http.memory import Backing
from trellis.http.shapes import LogicProposed


class Logic:
    """What agents go by: `client.logic`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls

    async def propose(
        self,
        agent: str,
        summary: str,
        text: str,
        *,
        change: Literal["replace", "append"] = "replace",
        idempotency_key: str | None = None,
        **backing: Unpack[Backing],
    ) -> LogicProposed:
        """Propose another text of an agent's logic; a person decides, always."""
        body: dict[str, Any] = {"summary": summary, "text": text, "change": change, **backing}
        return await self._calls.post(LogicProposed, path_of("logic", agent, "propose"), body, key=idempotency_key)
