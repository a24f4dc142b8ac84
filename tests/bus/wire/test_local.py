"""What only the local bus does: bounds inside one process, and time that a test can move."""

import asyncio
from datetime import UTC, datetime

import pytest

from tests.bus.wire.conftest import Heard, said
from trellis.bus.errors import BusUnavailable
from trellis.bus.port import AGAIN_S_FIRST, AGAIN_S_MAX, redelivery_delay_s
from trellis.bus.wire import local
from trellis.bus.wire.local import LocalBus
from trellis.testing import FakeClock


def bus_at(clock: FakeClock) -> LocalBus:
    return LocalBus("trellis", clock=clock, now=lambda: datetime.fromtimestamp(clock(), UTC))


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_packet_bears_the_time_that_was_passed_in():
    clock, heard = FakeClock(), Heard()
    bus = bus_at(clock)
    await bus.listen("a", heard)
    await bus.publish("a", said(""), trace_id="t")
    await heard.until(1)
    assert heard.packets[0].packet.created_at == datetime(2026, 1, 1, tzinfo=UTC)
    await bus.close()


async def test_a_question_ends_by_the_clock_that_was_passed_in():
    clock = FakeClock()
    bus = bus_at(clock)
    await bus.listen("a", Heard())
    asking = asyncio.create_task(bus.ask("a", said("?"), trace_id="t", timeout_s=3600))
    await turns()
    clock.advance(3600)
    with pytest.raises(BusUnavailable, match="3600 s"):
        await asking
    await bus.close()


async def test_redelivery_to_a_durable_listener_comes_after_a_pause():
    clock, heard = FakeClock(), Heard()
    heard.failures = 2
    bus = bus_at(clock)
    await bus.listen("a", heard, group="g", durable=True)
    await bus.publish("a", said("1"), trace_id="t")
    for deliveries in (1, 2, 3):
        await turns()
        assert len(heard.packets) == deliveries
        clock.advance(redelivery_delay_s(deliveries))
    await turns()
    assert len(heard.packets) == 3
    await bus.close()


async def test_stop_does_not_wait_for_a_delayed_packet():
    heard = Heard()
    heard.failures = 1
    bus = bus_at(FakeClock())
    listening = await bus.listen("a", heard, group="g", durable=True)
    await bus.publish("a", said("1"), trace_id="t")
    await turns()
    await asyncio.wait_for(listening.stop(), 5)
    await bus.close()


def test_the_pauses_grow_to_a_bound():
    assert [redelivery_delay_s(1), redelivery_delay_s(2), redelivery_delay_s(1000)] == [
        AGAIN_S_FIRST,
        2 * AGAIN_S_FIRST,
        AGAIN_S_MAX,
    ]


async def test_publisher_gets_an_error_when_a_listener_is_too_slow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "WAITING_MAX", 3)
    go, handled = asyncio.Event(), []

    async def stuck(received: object) -> None:
        await go.wait()
        handled.append(received)

    bus = bus_at(FakeClock())
    await bus.listen("a", stuck)
    taken, refusal = 0, ""
    try:
        while taken < 1_000:
            await bus.publish("a", said(""), trace_id="t")
            taken += 1
    except BusUnavailable as error:
        refusal = str(error)
    assert "are waiting" in refusal
    go.set()
    await turns(200)
    assert len(handled) == taken
    await bus.close()


async def test_closing_a_sibling_leaves_the_others():
    bus = bus_at(FakeClock())
    other, ours, theirs = bus.sibling("w-1"), Heard(), Heard()
    await bus.listen("a", ours)
    await other.listen("a", theirs)
    await other.close()
    await bus.publish("a", said("1"), trace_id="t")
    await ours.until(1)
    assert theirs.packets == []
    assert bus.connected
    await bus.close()
