"""Options of a bus worker, with their bounds, and the interface through which it reads payloads and stores results."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import DELAY_S_MAX
from trellis.engine.text import is_storable
from trellis.worker.options import (
    CONCURRENCY_MAX,
    DRAIN_S_DEFAULT,
    SETTLE_S_DEFAULT,
    THREADS_DEFAULT_MAX,
    THREADS_MAX,
)

WORKER_ID_PATTERN = r"^[A-Za-z0-9_-]{1,200}$"
PARALLEL_DEFAULT = 16
HEARTBEAT_S_DEFAULT, HEARTBEAT_S_MIN, HEARTBEAT_S_MAX = 5.0, 0.1, 60.0
ASK_S_DEFAULT = 2.0
RESULT_S_DEFAULT = 600.0
CANCEL_GRACE_S_DEFAULT = 2.0
BACKLOG_MAX_DEFAULT = 256
UNANSWERED_MAX_DEFAULT = 1_000
COUNT_MAX = 100_000
WORDS_MAX = 1_000
WORD_CHARS_MAX = 200
INTRODUCTION_BYTES_MAX = 24_000
"""Maximum size of what a heartbeat says about a worker, and of the topics in its handshake.

A control plane drops packets of more than 32 KiB.
"""
WORD_BYTES_BESIDE = 8
"""Upper bound of the encoding overhead per word."""


class PointerAccess(Protocol):
    """Reads payloads by pointer and stores results (`trellis.bus.pointers` has the schemes)."""

    async def read(self, pointer: str) -> bytes:
        """Returns the bytes at the pointer. Raises PointerUnknown or PointerGone."""
        ...

    async def write(self, job_id: str, body: bytes) -> str:
        """Stores the result of this execution and returns its pointer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BusWorkerOptions:
    """How one bus worker behaves. The worker id is the sender id of its bus connection, as CAP requires."""

    pool: str = ""
    """The pool of the worker; empty for none."""
    region: str = ""
    """Where the worker runs. Informational."""
    capabilities: tuple[str, ...] = ()
    """Capabilities that jobs may require (`meta.requires`)."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that jobs select workers by: a job's label `worker.<name>` must equal the label `<name>` here."""
    orders_from: tuple[str, ...] = ()
    """Sender ids whose orders the worker accepts. Empty: every sender that may publish to its subjects."""
    max_parallel_jobs: int = PARALLEL_DEFAULT
    """Handlers that run at the same time."""
    threads: int | None = None
    """Threads for sync handlers; None allows one per slot, up to 64."""
    heartbeat_s: float = HEARTBEAT_S_DEFAULT
    """Heartbeat interval. A worker counts as lost after three times this long."""
    ask_s: float = ASK_S_DEFAULT
    """How long to wait for one answer of the control plane."""
    result_s: float = RESULT_S_DEFAULT
    """How long to repeat an unacknowledged result, and how long to retry storing what a handler returned."""
    cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT
    """How long a handler may continue after it was told to stop, before it is cancelled."""
    backlog_max: int = BACKLOG_MAX_DEFAULT
    """Jobs that may wait for a free slot. Further orders are given back at once."""
    unanswered_max: int = UNANSWERED_MAX_DEFAULT
    """Results that may wait for their acknowledgement. At this number the worker starts no new job."""
    drain_s: float = DRAIN_S_DEFAULT
    """How long running handlers may go on after the first signal."""
    settle_s: float = SETTLE_S_DEFAULT
    """How long the last results may take to be acknowledged when the worker stops."""

    def __post_init__(self) -> None:
        _within("max_parallel_jobs", self.max_parallel_jobs, 1, CONCURRENCY_MAX)
        _within("threads", self.threads_max, 1, THREADS_MAX)
        _within("heartbeat_s", self.heartbeat_s, HEARTBEAT_S_MIN, HEARTBEAT_S_MAX)
        _within("ask_s", self.ask_s, 0.01, 60)
        _within("result_s", self.result_s, 0, DELAY_S_MAX)
        _within("cancel_grace_s", self.cancel_grace_s, 0, 3600)
        _within("backlog_max", self.backlog_max, 0, COUNT_MAX)
        _within("unanswered_max", self.unanswered_max, 1, COUNT_MAX)
        _within("drain_s", self.drain_s, 0, DELAY_S_MAX)
        _within("settle_s", self.settle_s, 0, DELAY_S_MAX)
        _words("pool", (self.pool,))
        _words("region", (self.region,))
        _words("capabilities", self.capabilities)
        _words("orders_from", self.orders_from)
        _words("labels", (*self.labels, *self.labels.values()))
        said = (self.pool, self.region, *self.capabilities, *self.labels, *self.labels.values())
        check_introduction("pool, region, capabilities and labels", said)

    @property
    def threads_max(self) -> int:
        """The maximum number of threads."""
        return min(THREADS_DEFAULT_MAX, self.max_parallel_jobs) if self.threads is None else self.threads


def checked_worker_id(worker_id: str) -> str:
    """Returns the id unchanged. Raises OptionInvalid if it cannot be part of the subject `worker.<id>.jobs`."""
    if not re.fullmatch(WORKER_ID_PATTERN, worker_id):
        raise OptionInvalid(
            option="the worker's name", value=worker_id, expected="use letters, digits, - and _, at most 200 of them"
        )
    return worker_id


def check_introduction(option: str, words: Sequence[str]) -> None:
    """Raises OptionInvalid if the worker's heartbeat or handshake would be too large to be accepted."""
    size = sum(len(word.encode()) + WORD_BYTES_BESIDE for word in words)
    if size > INTRODUCTION_BYTES_MAX:
        expected = f"a worker can say at most {INTRODUCTION_BYTES_MAX} bytes of itself; give it less, or share it between several workers"
        raise OptionInvalid(option=option, value=f"{size} bytes", expected=expected)


def as_worker_id(name: str) -> str:
    """Turns a process name into a valid worker id."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:WORD_CHARS_MAX] or "worker"


def _within(option: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise OptionInvalid(option=option, value=value, expected=f"it must be from {low:g} to {high:g}")


def _words(option: str, words: tuple[str, ...]) -> None:
    if len(words) > 2 * WORDS_MAX:
        raise OptionInvalid(option=option, value=f"{len(words)} words", expected=f"at most {WORDS_MAX} of them")
    for word in words:
        if len(word) > WORD_CHARS_MAX:
            raise OptionInvalid(option=option, value=word[:40], expected=f"at most {WORD_CHARS_MAX} characters each")
        if not is_storable(word):
            raise OptionInvalid(option=option, value=ascii(word), expected="write it in UTF-8, without zero bytes")
