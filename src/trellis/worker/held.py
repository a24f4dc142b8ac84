"""The jobs that a worker holds, and the log lines of their handlers."""

import asyncio
import json
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeAlias

from trellis.engine.event_data import ArtifactPointer
from trellis.engine.jobs import Advance, Claimed, JobKey, Lease, Wait, lease_length_s
from trellis.engine.logs import log_of
from trellis.engine.text import safe_repr
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.worker.app import JobSpec

# Log lines of a handler: stored with the job, bounded per attempt, and also written to the process log.

LINES_MAX = 200
BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 8 * 1024

SIGNAL_LOG = "job_log"


class LogBuffer:
    """Log lines of one attempt that are not yet in the ledger. Lines over the bounds are counted and dropped."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, bytes | None]] = []
        self._lines = 0
        self._bytes = 0
        self._dropped = 0
        self._reported = 0

    def add(self, line: dict[str, Any]) -> None:
        """Adds a line, or counts it as dropped if a bound is reached."""
        body = _body(line)
        if body is None or len(body) > LINE_BYTES_MAX:
            body = json.dumps({**line, "event": line["event"][:1000], "fields": {}, "cut": True}).encode()
        if self._lines >= LINES_MAX or self._bytes + len(body) > BYTES_MAX:
            self._dropped += 1
            return
        self._lines += 1
        self._bytes += len(body)
        self._pending.append((SIGNAL_LOG, body))

    def take(self, *, last: bool) -> list[tuple[str, bytes | None]]:
        """Returns and clears the pending lines. With `last`, adds a line that says how many were dropped."""
        taken, self._pending = self._pending, []
        if last and self._dropped > self._reported:
            note = {"level": "warning", "event": "log lines over the bound were dropped", "dropped": self._dropped}
            taken.append((SIGNAL_LOG, json.dumps(note).encode()))
            self._reported = self._dropped
        return taken


def _body(line: dict[str, Any]) -> bytes | None:
    """Encodes a log line as JSON. Returns None if its fields cannot be encoded: logging must never fail a handler."""
    with suppress(Exception):  # the fields' own code may raise
        return json.dumps(line, default=partial(safe_repr, how=str), ensure_ascii=False).encode("utf-8", "replace")
    return None


def _text(event: Any, args: tuple[Any, ...]) -> str:
    """Formats the event with its arguments; appends them if the format does not fit. The event may be any object."""
    with suppress(Exception):
        return str(event % args) if args else safe_repr(event, str)
    return f"{safe_repr(event, str)} {safe_repr(args)}"


class JobLogger:
    """`ctx.logger`: `info("indexed", pages=3)`; %-arguments work too. Usable from any thread of the handler."""

    def __init__(self, buffer: LogBuffer, elapsed_s: Callable[[], float], **bound: Any) -> None:
        self._buffer = buffer
        self._elapsed_s = elapsed_s
        self._log = log_of("trellis.job").bind(**bound)

    def debug(self, event: str, *args: Any, **fields: Any) -> None:
        self._write("debug", event, args, fields)

    def info(self, event: str, *args: Any, **fields: Any) -> None:
        self._write("info", event, args, fields)

    def warning(self, event: str, *args: Any, **fields: Any) -> None:
        self._write("warning", event, args, fields)

    def error(self, event: str, *args: Any, **fields: Any) -> None:
        self._write("error", event, args, fields)

    def exception(self, event: str, *args: Any, **fields: Any) -> None:
        """Logs the exception being handled at level error, with its traceback."""
        self._write("error", event, args, {**fields, "traceback": traceback.format_exc(limit=20)})

    def _write(self, level: str, event: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        text = _text(event, args)
        at_s = round(self._elapsed_s(), 6)
        self._buffer.add({"at_s": at_s, "level": level, "event": text, "fields": fields})
        getattr(self._log, level)(text, **fields)


# Held jobs, from claim to settlement.
#
# A held job is in exactly one of these: `assigned` (claimed, start not committed), `ready` (started, waiting for a
# runner), running, `finished` (its outcome waits for the next turn), or `quarantined`. `jobs` contains all of them.

RUNNING = LEASED_JOB.by_name["running"].name


class StopCause(Enum):
    """Why the worker itself stopped a handler."""

    LOST = "lease lost"
    TIMED_OUT = "timed out"
    DOUBTED = "lease in doubt"
    GIVEN_BACK = "given back by a worker that stops"


class AttemptState(Protocol):
    """The state of an attempt, on a ledger or on the bus, that its handler's context reads and changes."""

    fate: StopCause | None
    lease_over: bool
    """Whether the handler was told that its lease expired by this worker's clock.

    From then on, another worker may run the job too.
    """
    heard: bool
    """Whether the handler knows that it should stop: it read `ctx.cancelled`, waited for it, or was cancelled."""
    in_thread: bool
    """Whether the handler runs on a thread, which cannot be stopped."""

    @property
    def fence(self) -> float:
        """Until when this worker certainly holds the job, by its own clock."""
        ...

    @property
    def should_stop(self) -> bool:
        """Whether the job was cancelled or the worker stopped the handler."""
        ...

    @property
    def stop_event(self) -> asyncio.Event:
        """Set when the handler should stop."""
        ...


class HeldJob:
    """One held job. Mutable and owned by the worker's event loop; handler threads touch only its flags."""

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
        "in_thread",
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
        "wait",
    )

    def __init__(self, claimed: Claimed, spec: JobSpec, sent_at: float) -> None:
        self.claimed = claimed
        self.spec = spec
        self.lease: Lease = claimed.lease
        self.state = claimed.state
        self.taken_at = sent_at
        self.renewed_at = sent_at
        # The fence counts from before the claim was sent, so the worker's view of the lease ends before the ledger's.
        self.fence = sent_at + lease_length_s(claimed.lease_s, claimed.heartbeat_s)
        self.began_at: float | None = None
        self.task: asyncio.Task[None] | None = None
        """The runner task to cancel; None when the handler cannot be cancelled."""
        self.shares_handler = False
        """Whether the job shares one handler call with others. A lost lease must then not cancel the call."""
        self.fate: StopCause | None = None
        self.finished = False
        self.cancel_requested = False
        self.lease_over = self.heard = self.in_thread = False
        self.cancel_event: asyncio.Event | None = None
        self.payload: Any = None
        self.progress: bytes | None = None
        """Progress not yet written to the ledger."""
        self.logs: LogBuffer | None = None
        self.wait: Wait | None = None
        """What the job waits for, once its handler has suspended it."""
        self.artifacts: list[ArtifactPointer] = []
        """Artifacts the handler has named so far. They are written with the completion."""

    @property
    def should_stop(self) -> bool:
        return self.cancel_requested or self.fate is not None

    @property
    def stop_event(self) -> asyncio.Event:
        if self.cancel_event is None:
            self.cancel_event = asyncio.Event()
        return self.cancel_event

    def renewed(self, sent_at: float) -> None:
        """Extends the lease, counted from when the renewal was sent."""
        self.renewed_at = sent_at
        self.fence = sent_at + lease_length_s(self.claimed.lease_s, self.claimed.heartbeat_s)

    def request_cancel(self) -> None:
        """Tells the handler that its job has a cancel request."""
        self.cancel_requested = True
        if self.cancel_event is not None:
            self.cancel_event.set()

    def interrupt(self, fate: StopCause) -> None:
        """Stops the handler, once. An async handler is cancelled; a sync handler only sees `ctx.cancelled`.

        In a shared batch call, only a timeout or a drain cancels the call.
        """
        if self.fate is not None or self.finished:
            return
        self.fate = fate
        if self.cancel_event is not None:
            self.cancel_event.set()
        whole = not self.shares_handler or fate in {StopCause.TIMED_OUT, StopCause.GIVEN_BACK}
        if self.task is not None and whole and not self.in_thread and not self.task.cancelling():
            self.heard = True
            self.task.cancel(fate.value)


Settlement: TypeAlias = tuple[HeldJob, Advance]
"""A held job with its transition for the next turn."""


class HeldJobs:
    """All jobs that this worker holds."""

    def __init__(self) -> None:
        self.jobs: dict[JobKey, HeldJob] = {}
        self.assigned: deque[HeldJob] = deque()
        self.ready: deque[HeldJob] = deque()
        self.quarantined: deque[HeldJob] = deque()
        self.finished: list[Settlement] = []
        self.running = 0
        self.changed = asyncio.Event()
        """Set when a job finished or a slot became free: wakes the turn loop."""
        self.settled = 0
        """Outcomes queued since the worker started. Used to measure its pace."""

    def settle(self, held: HeldJob, advance: Advance) -> None:
        """Queues a job's final transition for the next turn."""
        held.finished = True
        self.settled += 1
        self.finished.append((held, advance))
        self.changed.set()

    def waiting(self) -> list[HeldJob]:
        """Returns held jobs whose handler has not started, except the first quarantined job."""
        return [*self.assigned, *self.ready, *list(self.quarantined)[1:]]

    def take_back(self, gone: set[HeldJob]) -> None:
        """Removes jobs that have not started from their queues."""
        self.assigned = deque(h for h in self.assigned if h not in gone)
        self.quarantined = deque(h for h in self.quarantined if h not in gone)
        # The runners keep a reference to this deque, so change it in place.
        kept = [h for h in self.ready if h not in gone]
        self.ready.clear()
        self.ready.extend(kept)

    def forget(self, held: HeldJob) -> None:
        """Drops a job whose final transition is committed or whose lease is lost."""
        # The same worker may meanwhile hold the job again, through a later claim.
        if self.jobs.get(held.lease.key) is held:
            del self.jobs[held.lease.key]
