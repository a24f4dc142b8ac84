"""The jobs this worker holds, and where each is on its way from claim to settlement.

A held job is in exactly one of these: `assigned` (claimed, its start not committed), `ready` (started, waiting for a
runner), running, `finished` (its outcome waits for the next turn), or with the suspects. `jobs` has all of them.
"""

import asyncio
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any

from trellis.engine.event_data import ArtifactPointer
from trellis.engine.jobs import Advance, Claimed, JobKey, Lease, lease_length_s
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.worker.app import JobSpec

if TYPE_CHECKING:
    from trellis.worker.logs import LogBuffer

ASSIGNED = LEASED_JOB.by_name["assigned"].name
RUNNING = LEASED_JOB.by_name["running"].name


class StopCause(Enum):
    """Why this worker itself stopped a handler."""

    LOST = "lease lost"
    TIMED_OUT = "timed out"
    DOUBTED = "lease in doubt"
    GIVEN_BACK = "given back by a worker that stops"


class HeldJob:
    """One held job. Mutable: the worker's own notes, never shared with another thread but for flags."""

    __slots__ = (
        "artifacts",
        "began_at",
        "cancel_event",
        "cancel_requested",
        "claimed",
        "fate",
        "fence",
        "finished",
        "heard",
        "lease",
        "lease_over",
        "logs",
        "payload",
        "progress",
        "renewed_at",
        "shares_handler",
        "spec",
        "state",
        "taken_at",
        "task",
    )

    def __init__(self, claimed: Claimed, spec: JobSpec, sent_at: float) -> None:
        self.claimed = claimed
        self.spec = spec
        self.lease: Lease = claimed.lease
        self.state = claimed.state
        self.taken_at = sent_at
        self.renewed_at = sent_at
        # The fence is counted from before the claim was sent, so this worker's view ends before the ledger's does.
        self.fence = sent_at + lease_length_s(claimed.lease_s, claimed.heartbeat_s)
        self.began_at: float | None = None
        self.task: asyncio.Task[None] | None = None
        """The runner to cancel, while the handler can be cancelled."""
        self.shares_handler = False
        """It runs in one handler call with others: its lost lease must not cut theirs."""
        self.fate: StopCause | None = None
        self.finished = False
        self.cancel_requested = False
        self.lease_over = False
        """The handler was told that its lease is over by this worker's clock: whatever it does from then on may be done twice."""
        self.heard = False
        """The handler knows that it should stop: it looked, waited for it, or was cut."""
        self.cancel_event: asyncio.Event | None = None
        self.payload: Any = None
        self.progress: bytes | None = None
        """Progress not yet told to the ledger."""
        self.logs: LogBuffer | None = None
        self.artifacts: list[ArtifactPointer] = []
        """What the handler named so far; it is written with the completion."""

    def renewed(self, sent_at: float) -> None:
        """The lease runs on from when the renewal was sent."""
        self.renewed_at = sent_at
        self.fence = sent_at + lease_length_s(self.claimed.lease_s, self.claimed.heartbeat_s)

    def request_cancel(self) -> None:
        """Tell the handler that it should stop."""
        self.cancel_requested = True
        if self.cancel_event is not None:
            self.cancel_event.set()

    def interrupt(self, fate: StopCause) -> None:
        """Stop the handler from outside, once: an async one is cancelled, a sync one only told."""
        if self.fate is not None or self.finished:
            return
        self.fate = fate
        if self.cancel_event is not None:
            self.cancel_event.set()
        whole = not self.shares_handler or fate in {StopCause.TIMED_OUT, StopCause.GIVEN_BACK}
        if self.task is not None and whole and not self.task.cancelling():
            self.heard = True
            self.task.cancel(fate.value)


class Settlement:
    """One advance for the next turn, with the job it is about."""

    __slots__ = ("advance", "held")

    def __init__(self, held: HeldJob, advance: Advance) -> None:
        self.held = held
        self.advance = advance


class HeldJobs:
    """Everything this worker holds."""

    def __init__(self) -> None:
        self.jobs: dict[JobKey, HeldJob] = {}
        self.assigned: deque[HeldJob] = deque()
        self.ready: deque[HeldJob] = deque()
        self.quarantined: deque[HeldJob] = deque()
        self.finished: list[Settlement] = []
        self.running = 0
        self.changed = asyncio.Event()
        """Something finished or came free: the turn loop should look."""
        self.settled = 0
        """Outcomes ever queued: the measure of this worker's pace."""

    def settle(self, held: HeldJob, advance: Advance) -> None:
        """Queue a job's last step for the next turn."""
        held.finished = True
        self.settled += 1
        self.finished.append(Settlement(held, advance))
        self.changed.set()

    def waiting(self) -> list[HeldJob]:
        """Every held job whose handler has not begun, but for the suspect whose turn it is."""
        return [*self.assigned, *self.ready, *list(self.quarantined)[1:]]

    def take_back(self, gone: set[HeldJob]) -> None:
        """Take jobs that have not begun out of their queues."""
        self.assigned = deque(h for h in self.assigned if h not in gone)
        self.quarantined = deque(h for h in self.quarantined if h not in gone)
        # The runners hold on to this deque, so it is changed in place.
        kept = [h for h in self.ready if h not in gone]
        self.ready.clear()
        self.ready.extend(kept)

    def forget(self, held: HeldJob) -> None:
        """The ledger has taken the last step, or the lease is lost."""
        # The job may be held anew, by a later claim of this same worker.
        if self.jobs.get(held.lease.key) is held:
            del self.jobs[held.lease.key]
