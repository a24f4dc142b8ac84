"""A topic on which as many jobs wait as may: what a caller is told, and that nothing of its request stays."""

from typing import Any

import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.world import everything
from trellis.bus.submitter import COUNT_FRESH_S, BacklogLimit
from trellis.bus.topics import Topics
from trellis.inbox import InboxSettler
from trellis.lifecycles import Role
from trellis.testing import FakeClock

LIMITED = {"topics": {"job.echo": {"waiting_max": 2}}}


@pytest.fixture
def clock(gateway: Gateway) -> FakeClock:
    """The gateway lets two jobs wait on a topic, and counts by this clock."""
    made = FakeClock()
    vars(gateway.instance)["topics"] = Topics.model_validate(LIMITED)
    vars(gateway.instance)["room"] = BacklogLimit(ledger=gateway.instance.ledger, clock=made)
    return made


def asked(n: int, **said: Any) -> dict[str, Any]:
    return {"topic": "job.echo", "payload": {"n": n}, **said}


@pytest.mark.requirement("D27")
async def test_too_much_is_answered_with_what_to_do_and_leaves_nothing_behind(gateway: Gateway, clock: FakeClock):
    client = gateway.client("owner", name="iryna")
    for n, headers in ((1, {}), (2, {"Idempotency-Key": "k-2"})):
        answer = await client.post("/jobs", json=asked(n, **({} if headers else {"job_id": "one"})), headers=headers)
        assert answer.status_code == 202
    made = answer.json()["job_id"]
    before = await everything(gateway)
    for said in (asked(3, job_id="three"), {"topic": "job.echo", "context_ptr": "redis://ctx:x"}):
        refused = await client.post("/jobs", json=said, headers={"Idempotency-Key": "k-3"})
        problem = refused.json()
        assert (refused.status_code, problem["code"], refused.headers["Retry-After"]) == (429, "RATE_LIMITED", "1")
        assert problem["detail"].startswith(
            "2 jobs wait on job.echo and 2 is the limit; nothing was stored: send it again"
        )
    assert await everything(gateway) == before
    again = await client.post("/jobs", json=asked(1, job_id="one"))
    assert (again.status_code, again.headers["Idempotency-Replayed"]) == (202, "true")
    again = await client.post("/jobs", json=asked(2), headers={"Idempotency-Key": "k-2"})
    assert (again.status_code, again.json()["job_id"]) == (202, made), "a key that was answered is answered"
    assert (await gateway.client("control-plane").post("/jobs/one/cancel", json={"mode": "hard"})).status_code == 200
    clock.advance(COUNT_FRESH_S)
    later = await client.post("/jobs", json=asked(3, job_id="three"), headers={"Idempotency-Key": "k-3"})
    assert (later.status_code, later.json()["job_id"]) == (202, "three"), "the same request, also under the same key"


@pytest.mark.requirement("D51")
async def test_an_inbox_entry_waits_while_the_backlog_is_full(gateway: Gateway, clock: FakeClock):
    client = gateway.client("owner", name="olena")
    for n in (1, 2):
        await client.post("/jobs", json=asked(n, job_id=f"j{n}"))
    entry = {
        "source": {"type": "ui"},
        "intent": {"action": "job", "target": "job.echo", "payload": asked(3)},
        "metadata": {"priority": "normal"},
    }
    told = (await client.post("/inbox/submit", json=entry)).json()
    keeper = InboxSettler(inbox=gateway.instance.inbox(gateway.instance.actor(Role.GATEWAY)))
    await keeper.run_once()
    inbox = keeper.inbox
    assert (await inbox.entry_state(told["id"])).status == "pending"
    await gateway.client("control-plane").post("/jobs/j1/cancel", json={"mode": "hard"})
    clock.advance(COUNT_FRESH_S)
    await keeper.run_once()
    assert (await inbox.entry_state(told["id"])).status == "processed"
