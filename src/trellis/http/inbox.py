"""The inbox: wishes from outside, which the gate takes or refuses."""

from collections.abc import Mapping
from typing import Any

from trellis.http.calls import GatewayCalls
from trellis.http.listing import LIMIT_DEFAULT, listed
from trellis.http.shapes import InboxEntry, InboxStats, InboxTaken, Page


class Inbox:
    """The inbox: `client.inbox`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls

    async def submit(
        self,
        action: str,
        target: str,
        payload: Mapping[str, Any] | None = None,
        *,
        entry_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> InboxTaken:
        """Put a wish in, such as `run` of an agent; the same entry again is the same entry."""
        entry: dict[str, Any] = {
            "intent": {"action": action, "target": target, "payload": dict(payload or {})},
            "metadata": dict(metadata or {}),
            **({} if entry_id is None else {"id": entry_id}),
        }
        return await self._calls.post(InboxTaken, "/inbox/submit", entry, key=idempotency_key)

    async def entries(
        self, *, status: str | None = None, limit: int = LIMIT_DEFAULT, cursor: str | None = None
    ) -> Page[InboxEntry]:
        """Entries, newest first."""
        return await listed(self._calls, InboxEntry, "/inbox/entries", limit, cursor, status=status)

    async def stats(self) -> InboxStats:
        """How much lies there, and what became of today's."""
        return await self._calls.get(InboxStats, "/inbox/stats")
