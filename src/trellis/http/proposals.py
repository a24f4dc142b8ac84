"""Proposals: what agents want changed, and what a person decides."""

from dataclasses import replace

from trellis.bus.topics import HELD_ACTION
from trellis.http.calls import GatewayCalls, GatewayRequest, path_of
from trellis.http.listing import LIMIT_DEFAULT, listed
from trellis.http.shapes import Page, ProposalDiff, ProposalShape

OPEN = frozenset({"approved", "auto_approved", "applying"})
"""Approved, and neither applied nor failed yet."""
AGAIN_S = 1.0


class Proposals:
    """What agents propose: `client.proposals`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls

    async def list(
        self,
        *,
        status: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
        conflicts: bool = False,
    ) -> Page[ProposalShape]:
        """Proposals, newest first; with `conflicts` those that can no longer be applied say why."""
        told = {"conflicts": "true"} if conflicts else {}
        return await listed(self._calls, ProposalShape, "/proposals", limit, cursor, status=status, **told)

    async def pending(self, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[ProposalShape]:
        """Those that wait for a person."""
        return await listed(self._calls, ProposalShape, "/proposals/pending", limit, cursor)

    async def get(self, proposal_id: str) -> ProposalShape:
        """One proposal."""
        return await self._calls.get(ProposalShape, path_of("proposals", proposal_id))

    async def diff(self, proposal_id: str) -> ProposalDiff:
        """What applying it would change now, as a unified diff; for those who may decide."""
        return await self._calls.get(ProposalDiff, path_of("proposals", proposal_id, "diff"))

    async def approve(
        self,
        proposal_id: str,
        note: str | None = None,
        *,
        version: int | None = None,
        idempotency_key: str | None = None,
    ) -> ProposalShape:
        """Approve a proposal, which is then applied; with `version` only as it was seen, else VersionDiffers."""
        return await self._decide(proposal_id, "approve", note, version, idempotency_key)

    async def reject(
        self, proposal_id: str, note: str, *, version: int | None = None, idempotency_key: str | None = None
    ) -> ProposalShape:
        """Reject a proposal and say why."""
        return await self._decide(proposal_id, "reject", note, version, idempotency_key)

    async def apply(self, proposal_id: str, *, idempotency_key: str | None = None) -> ProposalShape:
        """Have an approved proposal applied now. While another engine is at it, ask again for as long as one call may take."""
        calls, key = self._calls, self._calls.key(idempotency_key)
        ends_at = calls.clock.monotonic() + calls.options.timeout_s
        ask = GatewayRequest(method="POST", path=path_of("proposals", proposal_id, "apply"), key=key)
        found = await calls.asked(ProposalShape, ask)
        while (
            found.status in OPEN
            and found.action != HELD_ACTION
            and (left_s := ends_at - calls.clock.monotonic() - AGAIN_S) > 0
        ):
            await calls.clock.sleep(AGAIN_S)
            found = await calls.asked(ProposalShape, replace(ask, timeout_s=left_s))
        return found

    async def _decide(
        self, proposal_id: str, decision: str, note: str | None, version: int | None, key: str | None
    ) -> ProposalShape:
        ask = GatewayRequest(
            method="PATCH",
            path=path_of("proposals", proposal_id),
            body={"decision": decision, "note": note},
            key=self._calls.key(key),
            headers={} if version is None else {"If-Match": f'"{version}"'},
        )
        return await self._calls.asked(ProposalShape, ask)
