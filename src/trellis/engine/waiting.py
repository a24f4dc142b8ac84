"""Waiting for a ledger that is not there yet: a process may be started before its database is."""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable

from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.outages import SUMMARY_S
from trellis.engine.service import backoff_s

OpenLedger = Callable[[], Awaitable[Ledger]]


async def wait_for_ledger(
    open_ledger: OpenLedger, clock: Clock, rng: random.Random, stop: asyncio.Event
) -> Ledger | None:
    """The ledger as soon as it answers; None when `stop` is set first.

    Only a ledger that does not answer is waited for. One that answers and is the wrong one (address, password, schema)
    will be no other after any wait: its error is raised at once, and so is that of a host name nobody knows.
    """
    log, began, failures, logged, last = log_of("trellis.service"), clock.monotonic(), 0, 0.0, ""
    while not stop.is_set():
        try:
            ledger = await _opened_unless_stopped(open_ledger, stop)
        except LedgerUnavailable as error:
            if _names_no_host(error):
                raise
            failures += 1
            pause = backoff_s(failures, rng.random())
            waited = round(clock.monotonic() - began, 1)
            if str(error) != last or clock.monotonic() - logged >= SUMMARY_S:
                logged, last = clock.monotonic(), str(error)
                log.warning("waiting_for_ledger", error=last, waited_s=waited, next_try_s=round(pause, 1))
            await sleep_or_stop(clock, stop, pause)
        else:
            if failures and ledger is not None:
                log.info("ledger_answers", waited_s=round(clock.monotonic() - began, 1), tries=failures + 1)
            return ledger
    return None


async def _opened_unless_stopped(open_ledger: OpenLedger, stop: asyncio.Event) -> Ledger | None:
    """A server that takes the connection and then says nothing must not keep a process from stopping."""
    opening, stopping = asyncio.ensure_future(open_ledger()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            return None
        ledger = await opening
        if not stop.is_set():
            return ledger
        await ledger.close()
    finally:
        for task in (opening, stopping):
            task.cancel()
        await asyncio.gather(opening, stopping, return_exceptions=True)
    return None


def _names_no_host(error: BaseException) -> bool:
    """Somewhere behind this error the system said that no host has that name."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, socket.gaierror):
            return cause.errno == socket.EAI_NONAME
        cause = cause.__context__
    return False
