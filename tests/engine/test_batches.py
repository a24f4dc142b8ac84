"""Calls that meet go together, and one that is refused, gone or lost takes no other with it."""

import asyncio
from collections.abc import Sequence

import pytest

from trellis.engine.batches import Batcher, SingleFlight
from trellis.engine.errors import LedgerUnavailable, Refused


class Ledger:
    """Takes batches one after another, each when the test lets it; refuses negative numbers."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.down = False

    async def run(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        await self.gate.wait()
        if self.down:
            raise LedgerUnavailable(reason="gone")
        if min(items) < 0:
            raise Refused(detail="negative")
        return [item * 10 for item in items]


async def _sent(batcher: Batcher[int, int], *items: int) -> list["asyncio.Task[int]"]:
    """The calls are made, one after another, and as far as they get without the gate."""
    calls = [asyncio.create_task(batcher.put(item)) for item in items]
    for _ in range(3):
        await asyncio.sleep(0)
    return calls


async def test_batcher_sends_a_single_call_at_once_and_later_calls_together():
    ledger = Ledger()
    batcher = Batcher(ledger.run, lambda _: 1, 10)
    first = await _sent(batcher, 1)
    assert ledger.batches == [[1]]
    later = await _sent(batcher, 2, 3, 4)
    ledger.gate.set()
    assert await asyncio.gather(*first, *later) == [10, 20, 30, 40]
    assert ledger.batches == [[1], [2, 3, 4]]


async def test_a_batch_has_a_bound_and_what_weighs_more_goes_alone():
    ledger = Ledger()
    batcher = Batcher(ledger.run, lambda item: item, 5)
    calls = await _sent(batcher, 1)
    calls += await _sent(batcher, 2, 3, 4, 9, 1)
    ledger.gate.set()
    await asyncio.gather(*calls)
    assert ledger.batches == [[1], [2, 3], [4], [9], [1]]


async def test_a_refusal_reaches_only_the_call_it_is_for():
    ledger = Ledger()
    batcher = Batcher(ledger.run, lambda _: 1, 10)
    calls = await _sent(batcher, 1)
    calls += await _sent(batcher, 2, -3, 4)
    ledger.gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[:2] + answers[3:] == [10, 20, 40]
    assert isinstance(answers[2], Refused)


async def test_batched_call_without_a_waiter_is_not_sent():
    ledger = Ledger()
    batcher = Batcher(ledger.run, lambda _: 1, 10)
    first = await _sent(batcher, 1)
    gone, stays = await _sent(batcher, 2, 3)
    gone.cancel()
    ledger.gate.set()
    assert await asyncio.gather(*first, stays) == [10, 30]
    assert ledger.batches == [[1], [3]]


async def test_failed_batch_raises_for_every_caller_and_the_next_batch_is_sent():
    ledger = Ledger()
    batcher = Batcher(ledger.run, lambda _: 1, 10)
    ledger.down = True
    calls = await _sent(batcher, 1)
    calls += await _sent(batcher, 2, 3)
    ledger.gate.set()
    for call in calls:
        with pytest.raises(LedgerUnavailable):
            await call
    ledger.down = False
    assert await batcher.put(4) == 40


async def test_concurrent_calls_with_the_same_key_share_one_call_and_its_error():
    calls: list[str] = []
    gate = asyncio.Event()

    async def run(key: str) -> str:
        calls.append(key)
        await gate.wait()
        if key == "bad":
            raise LedgerUnavailable(reason="away")
        return key.upper()

    flight: SingleFlight[str, str] = SingleFlight(run)
    asked = [asyncio.create_task(flight.call(key)) for key in ("a", "a", "bad", "b", "a", "bad")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked[0].cancel()
    gate.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError), "whoever began it may leave"
    assert (answers[1], answers[3], answers[4]) == ("A", "B", "A")
    assert [type(answers[n]) for n in (2, 5)] == [LedgerUnavailable, LedgerUnavailable]
    assert sorted(calls) == ["a", "b", "bad"]
    await flight.close()
    assert await flight.call("a") == "A", "nothing is kept: the next call is made"
    assert calls.count("a") == 2


async def test_the_only_caller_makes_its_call_itself_and_those_who_come_meanwhile_share_the_next():
    ledger = Ledger()
    batcher = Batcher(ledger.run, lambda _: 1, 10, alone=True)
    (first,) = await _sent(batcher, 1)
    later = await _sent(batcher, 2, 3)
    assert ledger.batches == [[1]]
    ledger.gate.set()
    assert await asyncio.gather(first, *later) == [10, 20, 30]
    together = await _sent(batcher, 4, 5)
    assert await asyncio.gather(*together) == [40, 50]
    assert ledger.batches == [
        [1],
        [2, 3],
        [4, 5],
    ]  # after a batch of several, the first of the next waits for the others


async def test_a_cancelled_caller_that_called_itself_leaves_the_others_their_answers():
    ledger = Ledger()
    batcher = Batcher(ledger.run, lambda _: 1, 10, alone=True)
    (gone,) = await _sent(batcher, 1)
    (stays,) = await _sent(batcher, 2)
    gone.cancel()
    ledger.gate.set()
    assert await stays == 20
    assert gone.cancelled()
    ledger.gate.clear()
    (next_gone,) = await _sent(batcher, 3)
    next_gone.cancel()  # soon after, a call is not its caller's: it goes on
    ledger.gate.set()
    await batcher.close()
    assert ledger.batches == [[1], [2], [3]]
    assert await batcher.put(4) == 40


async def test_closing_waits_for_the_caller_that_makes_its_call_itself_and_for_those_behind_it():
    ledger = Ledger()
    batcher = Batcher(ledger.run, lambda _: 1, 10, alone=True)
    calls = await _sent(batcher, 1)
    calls += await _sent(batcher, 2)
    closing = asyncio.create_task(batcher.close())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not closing.done()
    ledger.gate.set()
    await closing
    assert [call.done() for call in calls] == [True, True]
