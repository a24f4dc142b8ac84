"""A subscriber of the feed: what is read again, who takes over, and how often the ledger is written to."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event
from trellis.engine.subscription import FeedReport, FeedSubscriber, SubscriptionOptions, TakenOver
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.testing import FakeClock

SUBMITTER = Actor(role=Role.SUBMITTER, name="test")


@dataclass(kw_only=True)
class Reader(FeedSubscriber[SubscriptionOptions]):
    """Notes the jobs whose events it handled, and breaks where it is told to."""

    options: SubscriptionOptions = field(default_factory=lambda: SubscriptionOptions(batch=2))
    name: str = "reader"
    follows_as: str = "reader"
    handled: list[str] = field(default_factory=list[str])
    breaks: bool = False

    async def run_once(self) -> FeedReport:
        return await self.take(self._note)

    async def _note(self, events: Sequence[Event]) -> None:
        if self.breaks:
            raise ConnectionError("broken here")
        self.handled += [event.job_id for event in events]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def ledger(clock: FakeClock) -> AsyncGenerator[Ledger]:
    made = await open_ledger(":memory:", clock=clock)
    await made.submit(SUBMITTER, [NewJob(job_id=JobId(f"j{n}"), type="echo", payload=b"") for n in range(3)])
    yield made
    await made.close()


def reader(ledger: Ledger, clock: FakeClock, name: str) -> Reader:
    return Reader(ledger=ledger, actor=Actor(role=Role.CONTROL_PLANE, name=name), clock=clock)


async def test_a_page_that_was_not_handled_is_read_again_and_a_handled_one_is_not(ledger: Ledger, clock: FakeClock):
    first, second = reader(ledger, clock, "first"), reader(ledger, clock, "second")
    assert await first.run_once() == FeedReport(following=True, events=2)
    first.breaks = True
    with pytest.raises(ConnectionError):
        await first.run_once()
    assert await second.run_once() == FeedReport()
    await first.release()
    assert await second.run_once() == FeedReport(following=True, events=1)
    assert (first.handled, second.handled) == (["j0", "j1"], ["j2"])


async def test_a_process_on_standby_takes_over_after_the_lease_and_the_former_one_saves_nothing(
    ledger: Ledger, clock: FakeClock
):
    first, second = reader(ledger, clock, "first"), reader(ledger, clock, "second")
    await first.run_once()
    standby = await second.run_once()
    assert second.pause_s(standby) == pytest.approx(1.0)
    clock.advance(first.options.lease_s + 1)
    assert (await second.run_once()).following
    late = await first.run_once()
    assert (late, first.follows) == (FeedReport(events=1), False)
    assert second.pause_s(await second.run_once()) == pytest.approx(second.options.poll_s)


async def test_handlers_that_renew_at_the_same_moment_ask_the_ledger_once(
    ledger: Ledger, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
):
    one, ack, asked = reader(ledger, clock, "one"), ledger.ack, list[Any]()

    async def counted(*what: Any, **how: Any) -> bool:
        asked.append(what)
        return await ack(*what, **how)

    await one.run_once()
    monkeypatch.setattr(ledger, "ack", counted)
    await one.keep()
    assert not asked
    clock.advance(one.options.lease_s / 3)
    await asyncio.gather(*(one.keep() for _ in range(5)))
    assert len(asked) == 1


async def test_subscribers_that_began_at_different_times_renew_at_the_same_time(
    ledger: Ledger, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
):
    """Renewals of one moment share a transaction: an idle process then writes a third as often."""
    ack, renewed = ledger.ack, dict[str, list[float]]()
    early, late = reader(ledger, clock, "early"), reader(ledger, clock, "late")
    late.follows_as = "another"
    for one in (early, late):
        while (await one.run_once()).events:
            pass
        clock.advance(1.0)

    async def noted(following: Any, *what: Any, **how: Any) -> bool:
        renewed.setdefault(following.name, []).append(clock.monotonic())
        return await ack(following, *what, **how)

    monkeypatch.setattr(ledger, "ack", noted)
    for _ in range(20):
        await early.keep()
        await late.keep()
        clock.advance(1.0)
    assert renewed["reader"] == renewed["another"]
    assert all(after - before <= 2 for before, after in pairwise(renewed["reader"]))


async def test_every_task_of_a_subscription_that_was_taken_over_raises_taken_over(ledger: Ledger, clock: FakeClock):
    first, second = reader(ledger, clock, "first"), reader(ledger, clock, "second")
    await first.run_once()
    clock.advance(first.options.lease_s + 1)
    await second.run_once()
    for _ in range(3):
        with pytest.raises(TakenOver):
            await first.keep()


async def test_a_position_is_saved_when_it_is_time_and_at_the_release(ledger: Ledger, clock: FakeClock):
    options = SubscriptionOptions(batch=1, save_every_s=1.0, gather_s=0.2)
    first, second = reader(ledger, clock, "first"), reader(ledger, clock, "second")
    first.options = second.options = options
    await first.run_once()
    saved = first.saved
    assert saved is not None
    await first.run_once()
    assert first.saved == saved
    clock.advance(1.0)
    await first.keep()
    assert first.saved != saved
    saved = first.saved
    await first.run_once()
    assert first.saved == saved
    await first.release()
    assert await second.run_once() == FeedReport(following=True, events=0)
    assert first.handled == ["j0", "j1", "j2"]


async def test_what_was_handled_since_the_last_save_is_handled_again_after_a_crash(ledger: Ledger, clock: FakeClock):
    first, second = reader(ledger, clock, "first"), reader(ledger, clock, "second")
    first.options = SubscriptionOptions(batch=1, save_every_s=1.0)
    for _ in range(3):
        await first.run_once()
    clock.advance(first.options.lease_s + 1)
    await second.run_once()
    assert (first.handled, second.handled) == (["j0", "j1", "j2"], ["j1", "j2"])


async def test_events_are_gathered_only_after_a_page_that_was_not_full(ledger: Ledger, clock: FakeClock):
    one = reader(ledger, clock, "one")
    one.options = SubscriptionOptions(batch=2, gather_s=0.2)
    assert [one.pause_s(await one.run_once()) for _ in range(3)] == [0.0, 0.2, one.options.poll_s]


async def test_a_position_that_could_not_be_saved_is_saved_later_and_the_subscription_is_released_in_any_case(
    ledger: Ledger, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
):
    first = reader(ledger, clock, "first")
    ack, is_away = ledger.ack, True

    async def away(*args: Any, **options: Any) -> bool:
        if is_away and options["lease_s"]:  # a release has none
            raise LedgerUnavailable(reason="away")
        return await ack(*args, **options)

    monkeypatch.setattr(ledger, "ack", away)
    with pytest.raises(LedgerUnavailable):
        await first.run_once()
    is_away = False
    await first.keep()
    is_away = True
    for call in (first.run_once, first.release):
        with pytest.raises(LedgerUnavailable):
            await call()
    is_away = False
    second = reader(ledger, clock, "second")
    assert await second.run_once() == FeedReport(following=True, events=1)
    assert (first.handled, second.handled) == (["j0", "j1", "j2"], ["j2"])
