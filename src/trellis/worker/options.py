"""Options of job types and of workers on a ledger and on the bus. Values out of bounds are refused at import."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import (
    ATTEMPTS_DEFAULT,
    ATTEMPTS_MAX,
    CLAIM_MAX,
    DEATHS_DEFAULT,
    DELAY_S_MAX,
    HEARTBEAT_S_DEFAULT,
    LEASE_S_DEFAULT,
    Priority,
)
from trellis.engine.key_rates import KeyRate, key_rate
from trellis.engine.option_values import CLAIMS_A_SECOND, SECONDS, check_bool, check_text, check_whole, check_within
from trellis.engine.records import RetentionOptions, SweepOptions
from trellis.engine.retry_policy import RETRY_DEFAULT, ErrorPolicy, OnExhausted, RetryPolicy
from trellis.engine.service import RETENTION_DEFAULT
from trellis.engine.text import is_storable
from trellis.engine.uniqueness import OnConflict, WhileHeld

LEASE_S_MIN, LEASE_S_MAX = 30.0, 120.0
HEARTBEAT_S_MIN, HEARTBEAT_S_MAX = 10.0, 30.0
BATCH_MAX = 500
KEY_LIMIT_MAX = 10_000
CONCURRENCY_DEFAULT = 64
CONCURRENCY_MAX = 1_000
PREFETCH_MAX = 500
PREFETCH_PER_SLOT = 4
THREADS_MAX = 256
THREADS_DEFAULT_MAX = 64
PROCESSES_MAX = 256
POLL_S_DEFAULT = 0.48
SWEEP_OF_WORKERS = SweepOptions(interval_s=0.5)
"""With the poll interval added, an expired backoff or a skipped slot is noticed within a second, even without hints."""
POLL_S_MAX = 0.5
DRAIN_S_DEFAULT = 25.0
SETTLE_S_DEFAULT = 5.0


class OnLeaseDoubt(StrEnum):
    """What to do with a handler whose lease may have expired by the worker's clock, because the ledger does not answer.

    `continue` is right for most handlers: the ledger forgives an outage, and the epoch refuses whatever comes too late.
    The handler runs until it checks `ctx.cancelled`. `stop` cancels it. Choose `stop` if two overlapping executions are
    worse than one interrupted execution, and the handler does not check.
    """

    CONTINUE = "continue"
    STOP = "stop"


class HandlerRunner(StrEnum):
    """Where a `def` handler runs.

    `thread` is right for handlers that wait. `process` is for those that compute: they use another core, and a timeout, a
    cancel and a lost lease really end them. An `async def` handler runs on the worker's event loop and takes neither.
    """

    THREAD = "thread"
    PROCESS = "process"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """How jobs of one type are leased, retried and submitted."""

    lease_s: float = LEASE_S_DEFAULT
    """How long a silent worker keeps a job: 30 to 120 s. Heartbeats extend it, so it limits silence, not duration."""
    heartbeat_s: float = HEARTBEAT_S_DEFAULT
    """How often a worker renews the lease and learns of a soft cancel: 10 to 30 s, at most a third of the lease.

    If only the lease is given, `@app.job` chooses a third of it, up to 15 s.
    """
    max_attempts: int = ATTEMPTS_DEFAULT
    """Maximum number of executions, including the first."""
    retry: RetryPolicy = RETRY_DEFAULT
    """How long to wait between attempts."""
    on_exhausted: OnExhausted = OnExhausted.DEAD_LETTER
    """What happens to a job whose last attempt failed: `dead_letter` or `fail`."""
    dlq_on_fail: bool = False
    """Whether a failed job also leaves a dead letter."""
    max_deaths: int = DEATHS_DEFAULT
    """How many workers may die while running a job before it is dead-lettered. 0 for no limit.

    With 1, the first death counts, whichever job caused it. From 2 on, the death that reaches the limit always happens
    while the job runs alone in its worker; with 2, it runs alone after its first death.
    """
    deadline_s: float | None = None
    """Maximum time from submit to the end of a job of this type."""
    timeout_s: float | None = None
    """How long one attempt may run. A handler on a thread only sees `ctx.cancelled`: no thread can be stopped."""
    priority: Priority = Priority.BATCH
    """`critical`, `interactive` or `batch`. A submit may override it."""
    rate: float | None = None
    """Maximum claims per second of this type, over all workers."""
    concurrency_limit: int = 1
    """How many jobs of one concurrency key may be held at once.

    If a rate per key is given and no limit, `@app.job` chooses the highest limit.
    """
    rate_per_key: float | None = None
    """Maximum claims per second of the jobs of one concurrency key, over all workers."""
    burst_per_key: int | None = None
    """How many jobs of one concurrency key may be claimed at once after a pause.

    Default: what `rate_per_key` gives in a second, and at least 1.
    """
    result_ttl_s: float | None = None
    """How long a result is kept. Default: as long as its job."""
    compensation: str | None = None
    """The job type that undoes a succeeded job of this type."""
    while_: WhileHeld | None = None
    """How long a job holds its unique key: while it is `waiting`, or `unfinished`.

    Default: `unfinished`, or `waiting` where a submit replaces the waiting job.
    """
    window_s: float | None = None
    """A job holds its unique key at least so long after its submit, also when it has ended."""
    on_conflict: OnConflict | None = None
    """What a submit does whose unique key is taken: `return` (default), `replace` or `raise`."""
    debounce_s: float | None = None
    """A submit replaces the waiting job with the same unique key, and the job starts this long after the last submit."""
    debounce_max_s: float | None = None
    """A debounced job starts at most this long after the first submit. Default: 10 times `debounce_s`."""
    batch: int = 0
    """If more than 0, the handler takes a list of up to this many jobs."""
    on_lease_doubt: OnLeaseDoubt = OnLeaseDoubt.CONTINUE
    """What to do with a handler whose lease may have expired while the ledger does not answer: `continue` or `stop`."""
    runner: HandlerRunner | None = None
    """Where a `def` handler runs: `thread` or `process`. Default: a thread."""

    @property
    def key_rate(self) -> KeyRate | None:
        """How often jobs of each concurrency key are claimed. Raises OptionInvalid."""
        return key_rate(self.rate_per_key, self.burst_per_key)

    @property
    def errors(self) -> ErrorPolicy:
        """The options that decide how errors are handled."""
        return ErrorPolicy(retry=self.retry, on_exhausted=self.on_exhausted, dlq_on_fail=self.dlq_on_fail)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """How one worker process behaves."""

    name: str = "worker"
    """The worker's name, shown to operators."""
    concurrency: int = CONCURRENCY_DEFAULT
    """Maximum number of handlers that run at the same time."""
    prefetch: int | None = None
    """Maximum number of jobs held beyond those running. None chooses by concurrency; 0 disables prefetch."""
    threads: int | None = None
    """Threads for sync handlers. None: one per slot, up to 64. With fewer threads than slots, handlers wait for one."""
    processes: int | None = None
    """Processes for handlers with `runner="process"`. None: one per core, at most one per slot."""
    poll_s: float = POLL_S_DEFAULT
    """How often a worker with free slots polls for work when no hint comes."""
    hints: bool = True
    """Whether to listen for hints. False relies on polling alone."""
    sweep: SweepOptions | None = SWEEP_OF_WORKERS
    """How this worker sweeps. None leaves that to other processes."""
    retention: RetentionOptions | None = RETENTION_DEFAULT
    """How long ended jobs are kept. None leaves that to other processes."""
    drain_s: float = DRAIN_S_DEFAULT
    """How long running handlers may continue after the first signal."""
    settle_s: float = SETTLE_S_DEFAULT
    """How long the ledger may take to accept the last outcomes when the worker stops."""

    def __post_init__(self) -> None:
        check_whole("concurrency", self.concurrency, 1, CONCURRENCY_MAX)
        check_whole("prefetch", self.prefetch_max, 0, CLAIM_MAX)
        check_whole("threads", self.threads_max, 1, THREADS_MAX)
        check_whole("processes", self.processes_max, 1, PROCESSES_MAX)
        check_within("poll_s", self.poll_s, 0.001, POLL_S_MAX, of=SECONDS)
        check_within("drain_s", self.drain_s, 0.0, DELAY_S_MAX, of=SECONDS)
        check_within("settle_s", self.settle_s, 0.0, DELAY_S_MAX, of=SECONDS)

    @property
    def prefetch_max(self) -> int:
        """The maximum number of jobs held beyond those running."""
        return min(PREFETCH_MAX, PREFETCH_PER_SLOT * self.concurrency) if self.prefetch is None else self.prefetch

    @property
    def threads_max(self) -> int:
        return min(THREADS_DEFAULT_MAX, self.concurrency) if self.threads is None else self.threads

    @property
    def processes_max(self) -> int:
        return _processes(self.processes, self.concurrency)


def check_job_options(options: JobOptions, *, testing: bool) -> None:
    """Raises OptionInvalid for options out of bounds. `testing` lifts only the bounds on lease and heartbeat."""
    if testing:
        check_within("lease_s", options.lease_s, 0.001, DELAY_S_MAX, of=SECONDS)
        check_within("heartbeat_s", options.heartbeat_s, 0.001, options.lease_s, of=SECONDS)
    else:
        check_within("lease_s", options.lease_s, LEASE_S_MIN, LEASE_S_MAX, of=SECONDS)
        check_within("heartbeat_s", options.heartbeat_s, HEARTBEAT_S_MIN, HEARTBEAT_S_MAX, of=SECONDS)
        if options.heartbeat_s > options.lease_s / 3:
            raise OptionInvalid(
                option="heartbeat_s",
                value=options.heartbeat_s,
                expected=f"at most a third of lease_s {options.lease_s:g}",
            )
    check_whole("max_attempts", options.max_attempts, 1, ATTEMPTS_MAX)
    check_whole("max_deaths", options.max_deaths, 0, ATTEMPTS_MAX)
    check_whole("batch", options.batch, 0, BATCH_MAX)
    check_whole("concurrency_limit", options.concurrency_limit, 1, KEY_LIMIT_MAX)
    _ = options.key_rate
    retry: Any = options.retry
    if not isinstance(retry, RetryPolicy):
        expected = "it must be a RetryPolicy; max_attempts says how often a job is tried"
        raise OptionInvalid(option="retry", value=retry, expected=expected)
    check_bool("dlq_on_fail", options.dlq_on_fail)
    if options.compensation is not None:
        check_text("compensation", options.compensation, "it must be the name of a job type")
    for name in ("deadline_s", "timeout_s", "rate", "result_ttl_s"):
        value: float | None = getattr(options, name)
        if value is not None:
            check_within(name, value, 1e-6, DELAY_S_MAX, of=CLAIMS_A_SECOND if name == "rate" else SECONDS)


def _processes(wanted: int | None, slots: int) -> int:
    return min(os.cpu_count() or 1, slots, PROCESSES_MAX) if wanted is None else wanted


# Workers on the bus.

WORKER_ID_PATTERN = r"^[A-Za-z0-9_-]{1,200}$"
PARALLEL_DEFAULT = 16
BUS_HEARTBEAT_S_DEFAULT, BUS_HEARTBEAT_S_MIN, BUS_HEARTBEAT_S_MAX = 5.0, 0.1, 60.0
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
    processes: int | None = None
    """Processes for handlers with `runner="process"`; None allows one per core, at most one per slot."""
    heartbeat_s: float = BUS_HEARTBEAT_S_DEFAULT
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
        check_whole("max_parallel_jobs", self.max_parallel_jobs, 1, CONCURRENCY_MAX)
        check_whole("threads", self.threads_max, 1, THREADS_MAX)
        check_whole("processes", self.processes_max, 1, PROCESSES_MAX)
        check_within("heartbeat_s", self.heartbeat_s, BUS_HEARTBEAT_S_MIN, BUS_HEARTBEAT_S_MAX, of=SECONDS)
        check_within("ask_s", self.ask_s, 0.01, 60, of=SECONDS)
        check_within("result_s", self.result_s, 0, DELAY_S_MAX, of=SECONDS)
        check_within("cancel_grace_s", self.cancel_grace_s, 0, 3600, of=SECONDS)
        check_whole("backlog_max", self.backlog_max, 0, COUNT_MAX)
        check_whole("unanswered_max", self.unanswered_max, 1, COUNT_MAX)
        check_within("drain_s", self.drain_s, 0, DELAY_S_MAX, of=SECONDS)
        check_within("settle_s", self.settle_s, 0, DELAY_S_MAX, of=SECONDS)
        _words("pool", (self.pool,))
        _words("region", (self.region,))
        _words("capabilities", self.capabilities)
        _words("orders_from", self.orders_from)
        _words("labels", (*self.labels, *self.labels.values()))
        words = (self.pool, self.region, *self.capabilities, *self.labels, *self.labels.values())
        check_introduction("pool, region, capabilities and labels", words)

    @property
    def threads_max(self) -> int:
        return min(THREADS_DEFAULT_MAX, self.max_parallel_jobs) if self.threads is None else self.threads

    @property
    def processes_max(self) -> int:
        return _processes(self.processes, self.max_parallel_jobs)


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


def _words(option: str, words: tuple[str, ...]) -> None:
    if len(words) > 2 * WORDS_MAX:
        raise OptionInvalid(option=option, value=f"{len(words)} words", expected=f"at most {WORDS_MAX} of them")
    for word in words:
        if len(word) > WORD_CHARS_MAX:
            raise OptionInvalid(option=option, value=word[:40], expected=f"at most {WORD_CHARS_MAX} characters each")
        if not is_storable(word):
            raise OptionInvalid(option=option, value=ascii(word), expected="write it in UTF-8, without zero bytes")
