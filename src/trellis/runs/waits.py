"""How long a run has waited: for its documents to be published, for an object store that does not answer, or for its
agent to be active.

What holds:
- a wait is in the run's journal, as the entry that says since when and for what, and the entry that says until when.
  So whoever drives the run next counts the same waits, and whoever asks about the run is told;
- at most one wait of a run is open at a time, and at most WAITS_MAX are kept. Beyond that they are not told apart from
  work any more.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from trellis.documents.run_documents import timestamp

WAITS_MAX = 1_000
SINCE_ENTRY = "wait/{number:04}/since"
UNTIL_ENTRY = "wait/{number:04}/until"

Keep = Callable[[str, bytes], Awaitable[bytes]]
"""Puts an entry into the run's journal and returns what is there under this name: the first body stays."""


@dataclass(frozen=True, slots=True)
class UpstreamWait:
    """One wait; `until` is None while it goes on."""

    since: datetime
    reason: str
    until: datetime | None = None
    is_bounded: bool = True
    """Whether it counts toward what a run may wait in all; for a stopped agent a run waits until a person decides."""

    def lasted_s(self, now: datetime) -> float:
        """How long it lasted, or has lasted by now."""
        return max(0.0, ((self.until or now) - self.since).total_seconds())


def read_waits(journal: Mapping[str, bytes]) -> list[UpstreamWait]:
    """The waits that a run's journal holds, oldest first."""
    found: list[UpstreamWait] = []
    while (body := journal.get(SINCE_ENTRY.format(number=len(found) + 1))) is not None:
        ended = journal.get(UNTIL_ENTRY.format(number=len(found) + 1))
        found.append(_read(body, ended))
    return found


def open_of(journal: Mapping[str, bytes]) -> UpstreamWait | None:
    """The wait that a run is in; None when it waits for nothing."""
    waits = read_waits(journal)
    return waits[-1] if waits and waits[-1].until is None else None


class UpstreamWaits:
    """The waits of one run in the hands of its driver."""

    def __init__(self, journal: Mapping[str, bytes], keep: Keep) -> None:
        self._waits = read_waits(journal)
        self._keep = keep

    @property
    def is_open(self) -> bool:
        """Whether the run waits now."""
        return bool(self._waits) and self._waits[-1].until is None

    def lasted_s(self, now: datetime) -> float:
        """How long the run has waited in all."""
        return sum(wait.lasted_s(now) for wait in self._waits)

    def bounded_s(self, now: datetime) -> float:
        """How long it has waited of what it may wait."""
        return sum(wait.lasted_s(now) for wait in self._waits if wait.is_bounded)

    async def begin(self, reason: str, since: datetime, *, is_bounded: bool = True) -> None:
        """The run waits since this moment; nothing changes for one that waits so already."""
        if self.is_open and self._waits[-1].is_bounded == is_bounded:
            return
        await self.end(since)
        if len(self._waits) >= WAITS_MAX:
            return
        made = {"since": timestamp(since), "reason": reason, "bounded": is_bounded}
        body = json.dumps(made, ensure_ascii=False).encode()
        kept = await self._keep(SINCE_ENTRY.format(number=len(self._waits) + 1), body)
        self._waits.append(_read(kept, None))

    async def end(self, until: datetime) -> float:
        """The run goes on; how long it has waited this time."""
        if not self.is_open:
            return 0.0
        kept = await self._keep(UNTIL_ENTRY.format(number=len(self._waits)), timestamp(until).encode())
        self._waits[-1] = replace(self._waits[-1], until=datetime.fromisoformat(kept.decode()))
        return self._waits[-1].lasted_s(until)


def _read(body: bytes, ended: bytes | None) -> UpstreamWait:
    read = json.loads(body)
    until = None if ended is None else datetime.fromisoformat(ended.decode())
    return UpstreamWait(datetime.fromisoformat(read["since"]), str(read["reason"]), until, bool(read["bounded"]))
