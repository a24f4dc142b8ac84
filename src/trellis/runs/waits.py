"""Records how long a run has waited for upstream.

A run waits for its documents to be published, for an object store that does not answer, or for its agent to be active.

Invariants:
- Each wait is stored in the run's journal as two entries: its start with the reason, and its end. So the next driver
  counts the same waits, and the API can show them.
- At most one wait of a run is open at a time, and at most WAITS_MAX are kept. Later waits are counted as work.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter, JobPlace
from trellis.lifecycles.run import RUN
from trellis.storage.objects.canonical_json import timestamp

WAITS_MAX = 1_000
SINCE_ENTRY = "wait/{number:04}/since"
UNTIL_ENTRY = "wait/{number:04}/until"

Keep = Callable[[str, bytes], Awaitable[bytes]]
"""Adds an entry to the run's journal. Returns what the journal holds under this name: the first body stays."""


@dataclass(frozen=True, slots=True)
class UpstreamWait:
    """One wait. `until` is None while it is open."""

    since: datetime
    reason: str
    until: datetime | None = None
    is_bounded: bool = True
    """Whether the wait counts toward the run's total limit. Waiting for a stopped agent does not: a person ends it."""

    def lasted_s(self, now: datetime) -> float:
        """How long the wait lasted, or has lasted so far."""
        return max(0.0, ((self.until or now) - self.since).total_seconds())


def read_waits(journal: Mapping[str, bytes]) -> list[UpstreamWait]:
    """The waits in a run's journal, oldest first."""
    waits: list[UpstreamWait] = []
    while (body := journal.get(SINCE_ENTRY.format(number=len(waits) + 1))) is not None:
        ended = journal.get(UNTIL_ENTRY.format(number=len(waits) + 1))
        waits.append(_read(body, ended))
    return waits


def open_of(journal: Mapping[str, bytes]) -> UpstreamWait | None:
    """The wait that is open now; None if there is none."""
    waits = read_waits(journal)
    return waits[-1] if waits and waits[-1].until is None else None


class UpstreamWaits:
    """The waits of one run, as its driver updates them."""

    def __init__(self, journal: Mapping[str, bytes], keep: Keep) -> None:
        self._waits = read_waits(journal)
        self._keep = keep

    @property
    def is_open(self) -> bool:
        return bool(self._waits) and self._waits[-1].until is None

    def lasted_s(self, now: datetime) -> float:
        """Seconds that the run has waited in total."""
        return sum(wait.lasted_s(now) for wait in self._waits)

    def bounded_s(self, now: datetime) -> float:
        """Seconds of waiting that count toward the run's limit."""
        return sum(wait.lasted_s(now) for wait in self._waits if wait.is_bounded)

    async def begin(self, reason: str, since: datetime, *, is_bounded: bool = True) -> None:
        """Open a wait since this moment. Does nothing if a wait of the same kind is open."""
        if self.is_open and self._waits[-1].is_bounded == is_bounded:
            return
        await self.end(since)
        if self._waits and self._waits[-1].until is not None:
            since = max(since, self._waits[-1].until)  # no moment counts twice
        if len(self._waits) >= WAITS_MAX:
            return
        entry = {"since": timestamp(since), "reason": reason, "bounded": is_bounded}
        body = json.dumps(entry, ensure_ascii=False).encode()
        kept = await self._keep(SINCE_ENTRY.format(number=len(self._waits) + 1), body)
        self._waits.append(_read(kept, None))

    async def end(self, until: datetime) -> float:
        """Close the open wait. Returns how long it lasted, in seconds."""
        if not self.is_open:
            return 0.0
        until = max(until, self._waits[-1].since)  # a step that began before the wait may end it
        kept = await self._keep(UNTIL_ENTRY.format(number=len(self._waits)), timestamp(until).encode())
        self._waits[-1] = replace(self._waits[-1], until=datetime.fromisoformat(kept.decode()))
        return self._waits[-1].lasted_s(until)


def _read(body: bytes, ended: bytes | None) -> UpstreamWait:
    read = json.loads(body)
    until = None if ended is None else datetime.fromisoformat(ended.decode())
    return UpstreamWait(datetime.fromisoformat(read["since"]), str(read["reason"]), until, bool(read["bounded"]))


async def open_wait(ledger: Ledger, job: Job) -> UpstreamWait | None:
    """What an open run waits for: its projector, its object store, or its stopped agent. None for other jobs.

    For a stopped agent, the wait is recorded on the run that started first, and also holds for the runs queued behind
    it.
    """
    if job.lifecycle != RUN.name or job.place is JobPlace.ENDED:
        return None
    wait = open_of(await ledger.read_journal(job.job_id))
    if wait is None and job.place is JobPlace.BLOCKED and job.concurrency_key is not None:
        where = JobFilter(lifecycle=RUN.name, state="running", concurrency_key=job.concurrency_key)
        for begun in (await ledger.jobs(where, limit=1)).jobs:
            wait = open_of(await ledger.read_journal(begun.job_id))
        return None if wait is None or wait.is_bounded else wait
    return wait
