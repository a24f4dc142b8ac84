"""Hints are few: one tells of all that was committed before it was sent."""

import asyncio

from trellis.ledgers.postgres.notifier import HintSender


class Channel:
    """Takes one hint at a time, each when the test lets it."""

    def __init__(self) -> None:
        self.sent = 0
        self.gate = asyncio.Event()

    async def send(self) -> None:
        self.sent += 1
        await self.gate.wait()


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
