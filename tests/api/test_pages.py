"""The application in this process: long lists read page by page, and repeated decisions."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import pytest

from tests.bus.safety.holding import held
from tests.gateway.conftest import Gateway, gateway, make_gateway, planted
from tests.gateway.world import proposal
from trellis.api.local import LocalApi, open_local_api
from trellis.api.proposals import ProposalHasOtherVersion
from trellis.auth.matrices import permit
from trellis.auth.principals import Principal
from trellis.bus.approvals import inbox_id
from trellis.http import pages
from trellis.lifecycles import Role

__all__ = ["gateway", "make_gateway", "planted"]  # fixtures of these tests


@asynccontextmanager
async def api_of(gateway: Gateway) -> AsyncGenerator[LocalApi]:
    """The application for an owner, on the ledger of a gateway's instance."""
    instance, owner = gateway.instance, Principal(name="olha", roles=frozenset({Role.OWNER}))
    async with open_local_api(
        instance.settings,
        "sqlite://",
        ledger=instance.ledger,
        reader=owner,
        permit=partial(permit, owner),
        acting=lambda *, operator: owner,
        name="olha",
    ) as api:
        yield api


@pytest.mark.requirement("RUN-4", "D45")
async def test_held_jobs_and_proposals_are_one_list_however_its_pages_are_cut(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pages, "PAGE_MAX", 2)
    jobs = [inbox_id(await held(gateway.instance.ledger)) for _ in range(3)]
    made = [await proposal(gateway) for _ in range(3)]
    decided = await proposal(gateway, approved=True)
    whole = [*jobs[::-1], decided, *made[::-1]]
    async with api_of(gateway) as api:
        everything = await api.proposals.list(limit=100)
        assert ([one.id for one in everything.items], everything.next_cursor) == (whole, None)
        for size in (1, 2, 3, 4, 6):
            first = await api.proposals.list(limit=size)
            rest = await api.proposals.list(limit=100, cursor=cast("str", first.next_cursor))
            assert [one.id for one in (*first.items, *rest.items)] == whole, size
            assert (len(first.items), rest.next_cursor) == (size, None)
        pending = await api.proposals.list(status="pending", limit=100)
        assert [one.id for one in pending.items] == [one for one in whole if one != decided]
        assert [one.id for one in (await api.proposals.list(status="approved")).items] == [decided]


@pytest.mark.requirement("D9")
async def test_a_repeated_decision_about_a_version_is_answered_as_the_first_one(gateway: Gateway):
    waiting = await proposal(gateway)
    async with api_of(gateway) as api:
        seen = (await api.proposals.get(waiting)).version
        first = await api.proposals.reject(waiting, "not today, thank you", version=seen, idempotency_key="once")
        again = await api.proposals.reject(waiting, "not today, thank you", version=seen, idempotency_key="once")
        assert (first, first.status) == (again, "rejected")
        with pytest.raises(ProposalHasOtherVersion):
            await api.proposals.reject(waiting, "not today, thank you", version=seen, idempotency_key="another")
