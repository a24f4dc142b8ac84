"""Jobs that a worker holds, each with the log lines of its handler."""

import asyncio
import json
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

from trellis.engine.event_data import ArtifactPointer
from trellis.engine.jobs import Advance, Claimed, JobKey, Lease, lease_length_s
from trellis.engine.logs import log_of
from trellis.engine.text import safe_repr
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.worker.app import JobSpec

# A handler's log lines: kept with the job, bounded per attempt, and passed on to the process's own log.

LINES_MAX = 200
BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 8 * 1024

SIGNAL_LOG = "job_log"


class LogBuffer:
    """Lines of one attempt that the ledger has not got yet. What is over the bound is counted, not kept."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, bytes | None]] = []
        self._lines = 0
        self._bytes = 0
        self._dropped = 0
        self._told = 0

    def add(self, line: dict[str, Any]) -> None:
        """Keep a line, or count it."""
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
        """What to write now; with `last` also how many lines were left out."""
        taken, self._pending = self._pending, []
        if last and self._dropped > self._told:
            note = {"level": "warning", "event": "log lines over the bound were dropped", "dropped": self._dropped}
            taken.append((SIGNAL_LOG, json.dumps(note).encode()))
            self._told = self._dropped
        return taken


def _body(line: dict[str, Any]) -> bytes | None:
    """The line as it is kept; None when its fields have no JSON form. To log must never fail a handler."""
    with suppress(Exception):  # it may be the fields' own code that fails
        return json.dumps(line, default=partial(safe_repr, how=str), ensure_ascii=False).encode("utf-8", "replace")
    return None


def _text(event: Any, args: tuple[Any, ...]) -> str:
    """With its arguments put in; beside it when they do not fit. An event may be any object."""
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
        """A line for whoever debugs the handler."""
        self._write("debug", event, args, fields)

    def info(self, event: str, *args: Any, **fields: Any) -> None:
        """A line about what happens."""
        self._write("info", event, args, fields)

    def warning(self, event: str, *args: Any, **fields: Any) -> None:
        """A line about something odd."""
        self._write("warning", event, args, fields)

    def error(self, event: str, *args: Any, **fields: Any) -> None:
        """A line about something wrong."""
        self._write("error", event, args, fields)

    def exception(self, event: str, *args: Any, **fields: Any) -> None:
        """A line about the exception being handled, with its traceback."""
        self._write("error", event, args, {**fields, "traceback": traceback.format_exc(limit=20)})

    def _write(self, level: str, event: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        text = _text(event, args)
        at_s = round(self._elapsed_s(), 6)
        self._buffer.add({"at_s": at_s, "level": level, "event": text, "fields": fields})
        getattr(self._log, level)(text, **fields)


# The jobs this worker holds, and where each is on its way from claim to settlement.
#
# A held job is in exactly one of these: `assigned` (claimed, its start not committed), `ready` (started, waiting for a
# runner), running, `finished` (its outcome waits for the next turn), or with the suspects. `jobs` has all of them.

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
