"""Hints are few: one tells of all that was committed before it was sent."""

import asyncio

import pytest

from trellis.ledgers.postgres.connection import PostgresConnection, connect
from trellis.ledgers.postgres.lanes import LaneOptions
from trellis.ledgers.postgres.notifier import NOTIFY_WORK, UNHEARD_GAP_S, WORK_GAP_S, HintSender, PostgresNotifier


class Channel:
    """Takes one hint at a time, each when the test lets it."""

    def __init__(self, *, is_heard: bool = True) -> None:
        self.sent = 0
        self.gate = asyncio.Event()
        self.is_heard = is_heard

    async def send(self) -> bool:
        self.sent += 1
        await self.gate.wait()
        return self.is_heard


async def test_hints_of_callers_that_are_answered_together_are_one():
    channel = Channel()
    channel.gate.set()
    sender = HintSender(channel.send, gap_s=60.0)
    for _ in range(16):
        sender.hint()
    await sender.close()
    assert channel.sent == 1


async def test_a_hint_that_comes_while_one_is_sent_is_sent_after_it():
    channel = Channel()
    sender = HintSender(channel.send, gap_s=0.0)
    sender.hint()
    await asyncio.sleep(0)
    sender.hint()
    sender.hint()
    assert channel.sent == 1
    channel.gate.set()
    await sender.close()
    assert channel.sent == 2


async def test_a_hint_waits_for_the_gap_and_closing_does_not():
    channel = Channel()
    channel.gate.set()
    sender = HintSender(channel.send, gap_s=60.0)
    sender.hint()
    for _ in range(3):
        await asyncio.sleep(0)
    sender.hint()
    for _ in range(3):
        await asyncio.sleep(0)
    assert channel.sent == 1
    await sender.close()
    assert channel.sent == 2


async def test_a_hint_whose_task_was_cancelled_before_it_began_is_sent_later():
    channel = Channel()
    channel.gate.set()
    sender = HintSender(channel.send, gap_s=0.0)
    before = asyncio.all_tasks()
    sender.hint()
    (sending,) = asyncio.all_tasks() - before
    sending.cancel()
    async with asyncio.timeout(5):
        await sender.close()
    assert channel.sent == 1


@pytest.mark.parametrize("is_heard, sent", [(True, 2), (False, 1)])
async def test_hints_are_fewer_while_nobody_listens(is_heard: bool, sent: int):
    channel = Channel(is_heard=is_heard)
    channel.gate.set()
    sender = HintSender(channel.send, gap_s=0.0, unheard_gap_s=60.0)
    sender.hint()
    for _ in range(3):
        await asyncio.sleep(0)
    sender.hint()
    for _ in range(9):
        await asyncio.sleep(0)
    assert channel.sent == sent
    await sender.close()
    assert channel.sent == 2


async def is_heard(connection: PostgresConnection) -> bool:
    return await connection.fetchval(NOTIFY_WORK)


async def test_a_sender_learns_whether_somebody_listens(postgres_url: str):
    """A worker that begins to listen is told of the work that comes after a short gap, not a long one."""
    assert WORK_GAP_S < UNHEARD_GAP_S
    sender = await connect(postgres_url)
    listener = PostgresNotifier(postgres_url, LaneOptions(), on=True)
    try:
        assert not await is_heard(sender)
        assert not await is_heard(sender), "the sender keeps no lock"
        await listener.wait(5)  # the beginning counts as a hint
        assert await is_heard(sender)
        listener.skip_next_notify()
        waiting = asyncio.create_task(listener.wait(30))
        await is_heard(sender)
        await asyncio.wait_for(waiting, 5)
    finally:
        await listener.close()
        await sender.close()


async def test_a_login_that_keeps_the_lock_of_listeners_stops_no_hint(postgres_url: str):
    sender, other = await connect(postgres_url), await connect(postgres_url)
    listener = PostgresNotifier(postgres_url, LaneOptions(), on=True)
    try:
        await other.execute("select pg_advisory_lock(hashtextextended('trellis.listeners', 0))")
        assert await is_heard(sender)
        await listener.wait(10)
        listener.skip_next_notify()
        waiting = asyncio.create_task(listener.wait(30))
        await is_heard(sender)
        await asyncio.wait_for(waiting, 5)
    finally:
        await listener.close()
        await sender.close()
        await other.close()
