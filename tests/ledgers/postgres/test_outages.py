"""A server that falls silent: what the log says, and that nobody who stops waiting spoils the connection for the next."""

import asyncio
import logging

import pytest

from tests.faults.proxy import proxied
from trellis.engine import outage_log
from trellis.engine.outage_log import Outage
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.lanes import LaneOptions


def _first_line() -> asyncio.Event:
    """Set when the log has a line about an outage."""
    logged = asyncio.Event()
    handler = logging.Handler()
    handler.emit = lambda record: logged.set()
    logging.getLogger("trellis.outage").addHandler(handler)
    return logged


async def test_a_short_outage_of_the_server_is_logged_with_its_end_though_no_call_fails(
    postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO, "trellis")
    monkeypatch.setattr(outage_log, "LEDGER", Outage("ledger_unavailable"))
    options = LaneOptions(call_timeout_s=0.1, connect_timeout_s=5.0)
    async with proxied(postgres_url, seed=1, aimed=False) as (proxy, url):
        ledger = await open_ledger(url, options=options)
        await ledger.now()
        caplog.clear()  # a busy machine may have been slow to open it
        proxy.black_hole()
        logged = _first_line()
        asking = asyncio.create_task(ledger.now())
        async with asyncio.timeout(30):
            await logged.wait()
            proxy.reset_all()
            proxy.heal()
            await asking
        await ledger.close()
    events = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert events[0] == "ledger_unavailable"
    assert events.count("recovered") == 1
    assert "no answer to" in caplog.text
    assert "bus" not in caplog.text


async def test_a_caller_who_stops_waiting_leaves_the_lane_usable(postgres_url: str):
    async with proxied(postgres_url, seed=1, aimed=False) as (proxy, url):
        ledger = await open_ledger(url)
        await ledger.now()
        proxy.black_hole()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ledger.now()
        proxy.heal()
        async with asyncio.timeout(10):
            await ledger.now()
        await ledger.close()


async def test_a_wait_for_work_ends_in_time_while_the_listener_cannot_connect_and_hears_once_it_can(postgres_url: str):
    """The listener may try for an hour here; whoever waits for work waits no longer than it asked to."""
    async with proxied(postgres_url, seed=1, aimed=False) as (proxy, url):
        ledger = await open_ledger(url, options=LaneOptions(connect_timeout_s=3600.0))
        await ledger.now()
        proxy.black_hole()
        async with asyncio.timeout(30):
            await ledger.wait_for_work(("work",), 0.05)
            await ledger.wait_for_events(ledger.events_mark(), 0.05)
            proxy.heal()  # the attempt under way is not given up: what it asked is answered now
            await ledger.wait_for_work(("work",), 3600.0)  # the first time it listens counts as a hint
        await ledger.close()
