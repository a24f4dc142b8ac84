"""Streams that fall behind, that end, and that begin with a ticket. The hub's time is the test's where time matters."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.listening import listening
from tests.gateway.stand import BEGINNING, Stand, standing
from trellis.auth.tokens import Identity, TrustedKey, issue, make_private_jwk, private_key
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.ledger import Ledger
from trellis.engine.service import POLL_S_IDLE
from trellis.gateway.event_stream import EXPIRED, KEPT_S, OUTAGE, STOPPING, TTL_S, UNTRUSTED, TicketRefused
from trellis.gateway.hub import READ_MAX, StreamOptions
from trellis.lifecycles import Role
from trellis.testing import FakeClock

ALL = f"last_event_id={BEGINNING}"
RING = 10
BEHIND = StreamOptions(ring=RING, keep_alive_s=3_600.0)
"""A small ring, and no sign of life that could wake a listener which nobody woke for an event."""


@pytest.fixture
async def timed(tmp_path: Path) -> AsyncIterator[Stand]:
    """Nothing ends, and no sign of life is due, unless the test moves the clock."""
    async with standing(tmp_path, clock=FakeClock()) as made:
        yield made


async def tick(stand: Stand, seconds: float) -> None:
    """Move the clock when both services of the hub sleep, so that each of them sees the time that was meant."""
    assert stand.clock is not None
    async with asyncio.timeout(60):
        while stand.clock.sleeping < 2:  # noqa: ASYNC110 - they come back from the ledger's thread
            await asyncio.sleep(0)
    stand.clock.advance(seconds)


# --- behind the ring -----------------------------------------------------------------------------------------------


async def test_a_listener_that_fell_behind_the_ring_gets_everything_from_the_ledger(tmp_path: Path):
    async with standing(tmp_path, BEHIND) as stand, stand.listen() as slow, stand.listen() as quick:
        slow.blocked = asyncio.Event()
        made = []
        for _ in range(8):
            made += await stand.jobs(2 * RING)
            await quick.until_events(len(made))
        assert stand.hub._ring is not None
        assert len(stand.hub._ring._told) <= 2 * RING
        assert stand.hub._ring.floor > (slow.heard.last_id or "")
        slow.blocked.set()
        told = await slow.until_events(len(made))
        assert [data["jobId"] for data in told] == made


async def test_events_during_the_catch_up_of_a_listener_are_neither_lost_nor_repeated(tmp_path: Path):
    async with standing(tmp_path, BEHIND) as stand:
        made = await stand.jobs(3 * READ_MAX)
        async with stand.listen() as live, stand.listen(ALL) as late:
            for _ in range(10):
                made += await stand.jobs(RING + 1)
            await late.until(lambda: len(late.heard.events) >= len(made))
            await live.until(lambda: len(live.heard.events) >= 10 * (RING + 1))
        assert [data["jobId"] for _, data in late.heard.events] == made
        assert [data["jobId"] for _, data in live.heard.events] == made[3 * READ_MAX :]


async def test_a_listener_of_one_agent_gets_new_positions_also_from_events_of_others(timed: Stand):
    async with timed.listen("agent=archivist-violin") as listener:
        begun = listener.heard.last_id
        await timed.jobs(3)
        await tick(timed, POLL_S_IDLE)
        await tick(timed, 15)
        await listener.until(lambda: "still here" in listener.heard.comments)
        assert listener.heard.last_id == await timed.ledger.feed_end() > (begun or "")
        assert listener.heard.events == []


# --- the end -------------------------------------------------------------------------------------------------------


async def test_idle_stream_sends_keepalive_comments(timed: Stand):
    async with timed.listen() as listener:
        for number in (1, 2):
            await tick(timed, 15)
            await listener.until(lambda: len(listener.heard.comments) >= number)  # noqa: B023 - awaited here
        assert listener.heard.comments == ["still here"] * 2


@pytest.mark.requirement("AUTH-5")
async def test_the_stream_ends_with_its_token(timed: Stand):
    token = timed.token(ttl_s=60)
    async with listening(timed.app, Authorization=f"Bearer {token}") as listener:
        await tick(timed, 59)
        await listener.until(lambda: listener.heard.comments == ["still here"])
        await tick(timed, 2)
        await timed.jobs(1)  # its event comes at once, so it must not exist while the token is still good
        heard = await listener.ended()
    assert heard.comments[-1] == EXPIRED
    assert heard.events == []
    assert listener.over
    assert timed.hub.listeners == 0


async def test_the_stream_ends_soon_after_its_key_is_no_longer_trusted(timed: Stand):
    async with timed.listen() as listener:
        timed.keys.clear()
        await tick(timed, 15)
        assert (await listener.ended()).comments == [UNTRUSTED]


async def test_every_stream_ends_when_the_server_stops_and_none_begins(timed: Stand):
    async with timed.listen() as one, timed.listen() as other:
        await timed.hub.close()
        for listener in (one, other):
            assert (await listener.ended()).comments == [STOPPING]
            assert listener.over
    assert (await timed.heard()).status == 429


async def test_a_stream_ends_after_the_time_that_was_asked_for(timed: Stand):
    async with timed.listen("for_s=5") as listener:
        await tick(timed, 6)
        assert (await listener.ended()).comments == ["the time that was asked for is over"]


class Unwell:
    """A ledger that stops answering the feed when it is told to."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.down = ledger, False

    def __getattr__(self, name: str) -> Any:
        if name == "feed" and self.down:
            return self._no_answer
        return getattr(self._ledger, name)

    async def _no_answer(self, *_: Any, **__: Any) -> None:
        raise LedgerUnavailable(reason="it is gone")


async def test_stream_of_a_slow_listener_is_closed_while_the_ledger_is_down(tmp_path: Path):
    async with standing(tmp_path, BEHIND) as stand, stand.listen() as quick, stand.listen() as slow:
        unwell = Unwell(stand.ledger)
        stand.hub.ledger = unwell  # type: ignore[assignment]
        slow.blocked = asyncio.Event()
        made = 0
        while stand.hub._ring is None or stand.hub._ring.floor <= (slow.heard.last_id or ""):
            made += len(await stand.jobs(RING))
            await quick.until_events(made)
        unwell.down = True
        slow.blocked.set()
        heard = await slow.ended()
        assert heard.comments == [OUTAGE]
        unwell.down = False
        again = await stand.heard(Last_Event_ID=heard.last_id or "")
        assert len(heard.events) + len(again.heard.events) == made
        assert not quick.task.done()


async def test_a_listener_that_takes_nothing_is_dropped_and_can_go_on(tmp_path: Path):
    async with standing(tmp_path, StreamOptions(send_timeout_s=0.01)) as stand:
        async with stand.listen() as slow:
            slow.blocked = asyncio.Event()
            made = await stand.jobs(3)
            heard = await slow.ended()
        assert not slow.over
        assert stand.hub.listeners == 0
        again = await stand.heard(Last_Event_ID=heard.last_id or "")
        assert [data["jobId"] for _, data in again.heard.events] == made


async def test_streams_are_limited_and_a_closed_one_frees_its_place(tmp_path: Path):
    options = StreamOptions(listeners_max=3, listeners_per_principal_max=2)
    async with standing(tmp_path, options) as stand, stand.listen(name="anna"):
        async with stand.listen(name="anna"):
            refused = await stand.heard(name="anna")
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert b"anna has 2 streams open" in refused.body
            async with stand.listen(name="iryna"):
                refused = await stand.heard(name="olena")
                assert refused.status == 429
                assert b"This server has 3 streams open" in refused.body
        assert (await stand.heard(name="anna")).status == 200
        assert stand.hub.listeners == 1


# --- tickets -------------------------------------------------------------------------------------------------------


async def new_ticket(stand: Stand, role: Role = Role.OWNER, name: str = "iryna") -> str:
    async with stand.client(role, name=name) as client:
        answer = await client.post("/events/tickets")
    assert answer.status_code == 201
    assert answer.json()["expires_in"] == TTL_S
    return answer.json()["ticket"]


async def test_a_ticket_opens_one_stream_with_the_rights_of_its_token(timed: Stand):
    await timed.run_to_its_end()
    (job_id,) = await timed.jobs(1)
    ticket = await new_ticket(timed, Role.WORKER)
    async with listening(timed.app, f"for_s=0&{ALL}&ticket={ticket}") as listener:
        assert [data.get("jobId") for _, data in (await listener.ended()).events] == [job_id]
    async with listening(timed.app, f"for_s=0&ticket={ticket}") as again:
        await again.ended()
    assert again.status == 401
    assert b"it has been used" in again.body


async def test_concurrent_use_of_one_stream_ticket_admits_one(timed: Stand):
    ticket = await new_ticket(timed)
    found = await asyncio.gather(*(timed.tickets.take(ticket) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(one, Identity) for one in found) == 1
    assert sum(isinstance(one, TicketRefused) for one in found) == 19


async def test_stream_ticket_expires_after_half_a_minute_and_is_removed(timed: Stand):
    assert timed.clock is not None
    tickets = [await new_ticket(timed) for _ in range(3)]
    listed = [info.key for info in (await timed.objects.list("tickets/")).items]
    assert len(listed) == 3
    assert not any(ticket.partition(".")[2] in key for ticket in tickets for key in listed)
    timed.clock.advance(TTL_S)
    with pytest.raises(TicketRefused, match="good for 30 s"):
        await timed.tickets.take(tickets[0])
    timed.clock.advance(KEPT_S)
    await new_ticket(timed)
    assert len((await timed.objects.list("tickets/")).items) == 1


async def test_a_stream_by_ticket_ends_with_the_token_that_got_it(timed: Stand):
    identity = Identity(
        name="iryna", roles=frozenset({Role.SUBMITTER}), issuer="tests", expires_at=timed.began + 20, job_id="job-1"
    )
    assert await timed.tickets.take(await timed.tickets.issue(identity)) == identity
    ticket = await timed.tickets.issue(identity)
    async with listening(timed.app, f"ticket={ticket}") as listener:
        await tick(timed, 21)
        assert (await listener.ended()).comments[-1] == EXPIRED


async def test_forged_stream_ticket_is_refused(timed: Stand):
    good = await new_ticket(timed)
    seconds, _, _ = good.partition(".")
    for wrong in ("", "x", f"{seconds}.{'0' * 64}", f"{seconds}.{'../' * 21}0", good.upper() + "x", "9" * 90):
        async with listening(timed.app, f"ticket={wrong}") as listener:
            await listener.ended()
        assert listener.status == 401, wrong
    async with listening(timed.app, f"ticket={'9' * 101}") as listener:
        await listener.ended()
    assert listener.status == 422


async def test_a_role_that_may_read_nothing_gets_no_ticket(timed: Stand):
    async with timed.client(Role.MEMORY) as client:
        answer = await client.post("/events/tickets")
    assert answer.status_code == 403
    assert "events.read" in answer.json()["detail"]
    assert not (await timed.objects.list("tickets/")).items


# --- keys that are revoked -------------------------------------------------------------------------------------------


def other_key(key_id: str) -> TrustedKey:
    return private_key(json.dumps(make_private_jwk(key_id, "Ed25519")).encode(), issuer="tests")


@pytest.mark.requirement("AUTH-5")
async def test_a_ticket_is_worth_nothing_once_the_key_of_its_token_is_revoked(timed: Stand):
    old, new = other_key("old"), other_key("new")
    timed.keys[:] = [old, new]
    tickets = [await ticket_of(timed, key) for key in (old, new)]
    timed.keys[:] = [new]
    with pytest.raises(TicketRefused, match="not trusted any more"):
        await timed.tickets.take(tickets[0])
    assert (await timed.tickets.take(tickets[1])).key_id == "new"


@pytest.mark.requirement("AUTH-5")
async def test_a_stream_by_ticket_ends_soon_after_the_key_of_its_token_is_revoked(timed: Stand):
    old, new = other_key("old"), other_key("new")
    timed.keys[:] = [old, new]
    tickets = [await ticket_of(timed, key) for key in (old, new)]
    async with (
        listening(timed.app, f"ticket={tickets[0]}") as revoked,
        listening(timed.app, f"ticket={tickets[1]}") as kept,
    ):
        timed.keys[:] = [new]
        await tick(timed, 15)
        assert (await revoked.ended()).comments == [UNTRUSTED]
        await kept.until(lambda: kept.heard.comments == ["still here"])


@pytest.mark.requirement("AUTH-5")
@pytest.mark.parametrize("by_ticket", [False, True])
async def test_a_stream_that_always_has_something_to_send_ends_as_well(timed: Stand, *, by_ticket: bool):
    query = f"ticket={await new_ticket(timed)}" if by_ticket else ""
    headers = {} if by_ticket else {"Authorization": f"Bearer {timed.token()}"}
    async with listening(timed.app, query, **headers) as listener:
        timed.keys.clear()
        await timed.jobs(1)
        await tick(timed, 10)
        await listener.until_events(1)
        await timed.jobs(1)
        await tick(timed, 10)
        assert (await listener.ended()).comments == [UNTRUSTED]


async def ticket_of(stand: Stand, key: TrustedKey) -> str:
    token = issue(key, name="iryna", roles=[Role.OWNER], ttl_s=600, now=stand.began)
    async with stand.client(None) as client:
        answer = await client.post("/events/tickets", headers={"Authorization": f"Bearer {token}"})
    return answer.json()["ticket"]
