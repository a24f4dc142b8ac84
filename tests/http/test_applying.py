"""Having a proposal applied while another engine is at it: asked again under one key, for as long as one call may take."""

import httpx2
import pytest

from tests.http.scripted import Script, client_on, in_time, problem
from trellis.http.calls import CallOptions
from trellis.http.errors import GatewayUnavailable
from trellis.testing import FakeClock

PROPOSAL = {
    "id": "prop_1",
    "created_at": "2026-02-14T08:00:00.000Z",
    "updated_at": "2026-02-14T08:00:00.000Z",
    "expires_at": "2026-02-21T08:00:00.000Z",
    "agent_slug": "archivist-violin",
    "source": {},
    "action": "propose-note",
    "target": "notes/a.md",
    "content": {},
    "target_hash": None,
    "priority": "normal",
    "requiresHumanReview": True,
    "approval": None,
    "apply_result": None,
    "version": 3,
}


def standing(status: str) -> httpx2.Response:
    return httpx2.Response(200, json={**PROPOSAL, "status": status}, headers={"Retry-After": "1"})


async def test_client_polls_a_proposal_that_is_being_applied_until_it_is_done():
    script, clock = Script(standing("applying"), standing("applying"), standing("applied")), FakeClock()
    async with client_on(script, clock) as client:
        found = await in_time(clock, client.proposals.apply("prop_1"))
    assert found.status == "applied"
    assert [request.method for request in script.requests] == ["POST"] * 3
    assert len(set(script.header("Idempotency-Key"))) == 1


async def test_client_reports_the_status_of_a_proposal_that_is_applied_for_too_long():
    script, clock = Script(standing("applying")), FakeClock()
    began = clock.monotonic()
    async with client_on(script, clock, options=CallOptions(timeout_s=5)) as client:
        found = await in_time(clock, client.proposals.apply("prop_1"))
    assert found.status == "applying"
    assert 2 <= len(script.requests) <= 6
    assert clock.monotonic() - began <= 5


async def test_apply_retries_after_a_gateway_outage_only_within_the_remaining_time():
    script, clock = Script(*[standing("applying")] * 3, problem(503, "UPSTREAM_UNAVAILABLE")), FakeClock()
    began = clock.monotonic()
    async with client_on(script, clock, options=CallOptions(timeout_s=5)) as client:
        with pytest.raises(GatewayUnavailable, match="idempotency_key='id-1'"):
            await in_time(clock, client.proposals.apply("prop_1"))
    assert clock.monotonic() - began <= 5
