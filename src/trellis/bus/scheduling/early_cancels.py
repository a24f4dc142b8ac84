"""Cancels that arrive before the request of their job.

Requests may come over a stream and cancels come directly, so a cancel that a client sends right behind its request can overtake it, and
another process of the control plane may take the request in. A cancel of an unknown job is therefore kept for some seconds: whoever takes
the request in here asks for it, and for requests that other processes take in the ledger is looked at again, for a shorter while.

A cancel that was created before its request did not overtake it: whoever submits a job again after a cancel wants it done.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime

from trellis.bus.messages import JobCancel, Packet
from trellis.engine.clock import Clock
from trellis.engine.errors import LedgerError
from trellis.engine.logs import log_of

KEPT_S = 30.0
KEPT_MAX = 1_000
"""How many cancels of unknown jobs are kept; the oldest of the sender that has most goes first."""
SENDER_MAX = 50
"""How many of one sender are kept; the oldest goes first."""
LOOK_AGAIN_S_MAX = 5.0
"""How long the ledger is looked at for a job that another process takes in: when its request was created cannot be seen there."""
LOOK_S_FIRST = 0.25
"""How soon the ledger is looked at again; twice as long each time."""

_log = log_of("trellis.bus.scheduling.intake")
CancelKey = tuple[str, str]
"""The job that is meant, and who does not want it."""


@dataclass(slots=True)
class _EarlyCancel:
    packet: Packet
    since: float
    until: float
    next_at: float
    pause_s: float = LOOK_S_FIRST


@dataclass(kw_only=True)
class EarlyCancels:
    """One process's memory of cancels whose jobs are not there yet."""

    clock: Clock
    carry_out: Callable[[Packet], Awaitable[bool]]
    """Cancels the job that a packet names; False while there is no such job."""
    _counts: Counter[str] = field(default_factory=Counter[str])
    """How many are kept of each sender."""
    _kept: "OrderedDict[CancelKey, _EarlyCancel]" = field(default_factory=OrderedDict[CancelKey, _EarlyCancel])
    _looking: "asyncio.Task[None] | None" = None

    def keep(self, packet: Packet) -> None:
        """Remember this cancel for a while."""
        now, key = self.clock.monotonic(), _key(packet)
        self._drop(key)
        self._kept[key] = _EarlyCancel(packet, since=now, until=now + KEPT_S, next_at=now + LOOK_S_FIRST)
        self._counts[packet.sender_id] += 1
        if self._counts[packet.sender_id] > SENDER_MAX:
            self._drop_oldest(packet.sender_id)
        elif len(self._kept) > KEPT_MAX:
            self._drop_oldest(self._counts.most_common(1)[0][0])
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_again())

    def forget(self, packet: Packet) -> None:
        """It was carried out."""
        self._drop(_key(packet))

    def of_request(self, job_id: str, sender_id: str, requested_at: datetime) -> Packet | None:
        """The cancel of this job by this sender that overtook the request, if one came lately; it is kept until it is carried out."""
        found = self._kept.get((job_id, sender_id))
        if found is None:
            return None
        if found.until <= self.clock.monotonic() or found.packet.created_at < requested_at:
            self._drop((job_id, sender_id))
            return None
        return found.packet

    async def stop(self) -> None:
        """Look no more."""
        self._kept.clear()
        self._counts.clear()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_again(self) -> None:
        while self._kept:
            now = self.clock.monotonic()
            next_at = min(kept.next_at for kept in self._kept.values())
            await self.clock.sleep(max(LOOK_S_FIRST / 5, next_at - now))
            for key, kept in list(self._kept.items()):
                await self._look(key, kept)

    async def _look(self, key: CancelKey, kept: _EarlyCancel) -> None:
        now = self.clock.monotonic()
        if now >= kept.until:
            self._drop(key)
            _log.info("cancel_of_unknown_job", job_id=key[0], sender=key[1])
        elif now >= kept.next_at:
            kept.pause_s *= 2
            kept.next_at = min(kept.until, now + kept.pause_s)
            if now > kept.since + LOOK_AGAIN_S_MAX:
                kept.next_at = kept.until
                return
            try:
                if await self.carry_out(kept.packet):
                    self._drop(key)
            except LedgerError as error:
                _log.info("cancel_waits_for_ledger", job_id=key[0], error=str(error))

    def _drop_oldest(self, sender_id: str) -> None:
        self._drop(next(key for key in self._kept if key[1] == sender_id))

    def _drop(self, key: CancelKey) -> None:
        if self._kept.pop(key, None) is not None:
            self._counts[key[1]] -= 1
            if not self._counts[key[1]]:
                del self._counts[key[1]]


def _key(packet: Packet) -> CancelKey:
    named = packet.body.job_id if isinstance(packet.body, JobCancel) else ""
    return named, packet.sender_id
