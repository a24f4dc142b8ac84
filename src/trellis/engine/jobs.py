"""The engine's value types: jobs, leases, claims, steps and their answers; reserved job ids; options of a job type.

- `JobId` is the external text id that people and documents see; `JobKey` is the ledger's own number.
- `Epoch` is the fencing token of a job. It rises at every claim and every revocation and is never reset.
- `version` counts a job's transitions.
- Attempts and generations count from 0 here; people see attempt + 1.
- Values made for every job on the hot path are named tuples: they cost an eighth of a frozen dataclass.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, NewType, overload

from trellis.engine.admin_acts import rate_text
from trellis.engine.errors import ConcurrencyKeyMissing, IdempotencyMismatch, IdReserved, OptionInvalid
from trellis.engine.key_rates import KeyRate
from trellis.engine.uniqueness import UniqueRule
from trellis.lifecycles import Role, Trigger
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.nlm_job import NLM_JOB

JobId = NewType("JobId", str)
JobKey = NewType("JobKey", int)
Epoch = NewType("Epoch", int)
ClaimId = NewType("ClaimId", str)
RequestId = NewType("RequestId", str)

CORRELATION_PATTERN = r"[A-Za-z0-9._:-]{1,100}"
"""The correlation ids that a caller may choose for a request or a run."""
JOB_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}$"
TYPE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:>*-]{0,199}$"
PAYLOAD_BYTES_MAX = 1024 * 1024
RESULT_BYTES_MAX = 1024 * 1024
ERROR_CHARS_MAX = 8_000
CLAIM_MAX = 1_000
LEAST_URGENT_FIRST_EVERY = 8
"""Once in this many claims a claimer takes the least urgent priority first, so that no priority starves."""
SUBMIT_MAX = 5_000
RESTORE_MAX = 500
REMARKS_MAX = 100
HEAD_PAYLOAD_BYTES_MAX = 8_192
"""`peek_ready` leaves out payloads larger than this."""
HEADS_MAX = 5_000
"""The most jobs that one call of `peek_ready` returns.

Beyond that, the first job of every type comes before the second of any.
"""
DELAY_S_MAX = 366 * 24 * 3600.0
DEADLINE_S_MIN = 1e-6
"""A deadline of 0 s has passed when its job is submitted."""
ATTEMPTS_DEFAULT = 5
ATTEMPTS_MAX = 1_000
DEATHS_DEFAULT = 3
LEASE_S_DEFAULT = 60.0
HEARTBEAT_S_DEFAULT = 15.0
CANCEL_GRACE_S_DEFAULT = 30.0
ORPHAN_GRACE_S = CANCEL_GRACE_S_DEFAULT
"""How long a held child may take to stop after its parent was cancelled."""
JOB_SIGNALS_MAX = 1_000
"""The most signals that can be sent to one job."""
SIGNAL_NAME_CHARS_MAX = 200
BATCH_ENTRY = "@batch"
"""The journal entry of a completion job that names the jobs of its batch."""
RESTART_ENTRY = "@input"
"""The journal entry with the input of a job that began anew."""
WAIT_CHILDREN_MAX = 10_000
"""The most children that one wait can name."""
SILENCE_GRACE_S = 0.5
"""Added to two heartbeats before a silent holder loses its lease.

With the sweep on top the job is free within one second.
"""


def heartbeat_for(lease_s: float) -> float:
    """The default heartbeat interval: three times per lease, and at least every HEARTBEAT_S_DEFAULT (D65)."""
    return min(HEARTBEAT_S_DEFAULT, lease_s / 3)


def lease_length_s(lease_s: float, heartbeat_s: float) -> float:
    """How long a silent holder keeps its lease: `lease_s`, or two missed heartbeats plus a grace if that is shorter."""
    return min(lease_s, 2 * heartbeat_s + SILENCE_GRACE_S)


class Priority(IntEnum):
    """Lower is claimed first. Every few claims a worker takes the least urgent class first, so that none starves."""

    CRITICAL = 0
    INTERACTIVE = 1
    BATCH = 2


class ReasonCode(StrEnum):
    """Why a job was dead-lettered."""

    PARSE_ERROR = "parse_error"
    VALIDATION_FAILED = "validation_failed"
    DEPENDENCY_UNAVAILABLE = "dependency_unavailable"
    TIMEOUT = "timeout"
    EXHAUSTED_RETRIES = "exhausted_retries"
    POLICY_VIOLATION = "policy_violation"
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"
    COMPENSATION_FAILED = "compensation_failed"


class Stage(StrEnum):
    """The stage that a job had reached when it was dead-lettered."""

    FETCH = "fetch"
    INPUT = "input"
    EXEC = "exec"
    OUTPUT = "output"
    COMMIT = "commit"


class CancelMode(StrEnum):
    """How a job is cancelled: soft asks its holder to stop, hard ends the job now."""

    SOFT = "soft"
    HARD = "hard"


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """Who acts: a role of the authority matrix and a name people recognise."""

    role: Role
    name: str


class ChosenOptions:
    """Bits of `NewJob.chosen`: the options that a submit sets explicitly.

    The job type's declaration sets the others.
    """

    PRIORITY = 1
    MAX_ATTEMPTS = 2
    MAX_DEATHS = 4
    DEADLINE = 8
    CONCURRENCY_KEY = 16
    """The caller gave a key, or a function of the application was asked to compute one."""
    CONCURRENCY_LIMIT = 32
    ALL = 63


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job to submit. It has no slots, so that `copies` is fast.

    `fingerprint` identifies the request: the same idempotency key or job id must come with the same one.
    """

    job_id: JobId
    type: str
    payload: bytes = b"null"
    lifecycle: str = "leased-job"
    priority: Priority = Priority.BATCH
    delay_s: float = 0.0
    run_at: datetime | None = None
    deadline_s: float | None = None
    max_attempts: int = ATTEMPTS_DEFAULT
    max_deaths: int = DEATHS_DEFAULT
    concurrency_key: str | None = None
    concurrency_limit: int = 1
    waiting_max: int | None = None
    """Refuse with QueueFull when this many jobs of the concurrency key wait. Held and ended jobs do not count."""
    idempotency_key: str | None = None
    idempotency_scope: str = ""
    fingerprint: bytes = b""
    id_is_given: bool = False
    """The caller chose job_id. Submitting the same id and body again returns the existing job."""
    correlation_id: str | None = None
    trace: str | None = None
    parent_id: JobId | None = None
    compensates: JobId | None = None
    chosen: int = ChosenOptions.ALL
    """Options whose bit is missing take the value that the job's type declares in the ledger, if it declares one."""
    unique: UniqueRule | None = None
    """What the submit says about uniqueness. The job's type declares the values that it leaves out."""
    unique_scope: str = ""
    """Unique keys of different scopes are different: those of a tenant, or of an owner that sees its own jobs only."""

    def copies(self, jobs: Iterable[tuple[JobId, bytes]]) -> "list[NewJob]":
        """The same request for other jobs: their ids and payloads.

        It fills the fields at once. One by one, with the checks of a frozen class, takes thirty times as long.
        """
        copies: list[NewJob] = []
        common = vars(self)
        for job_id, payload in jobs:
            copy = object.__new__(NewJob)
            copy.__dict__.update(common, job_id=job_id, payload=payload)
            copies.append(copy)
        return copies

    def traced(self, *, correlation_id: str | None, trace: str | None) -> "NewJob":
        """The same job with this correlation id and trace, made as fast as `copies` makes one."""
        copy = object.__new__(NewJob)
        copy.__dict__.update(vars(self), correlation_id=correlation_id, trace=trace)
        return copy


class AlikeJobs(Sequence[NewJob]):
    """New jobs that differ only in id and payload, as a submit of many payloads has them.

    What they have in common is held once, with a list of their ids and one of their payloads. The jobs themselves are
    built when somebody reads one, and kept. A ledger that writes the lists as they are never builds them.
    """

    __slots__ = ("_jobs", "common", "ids", "payloads")

    def __init__(self, common: NewJob, ids: list[JobId], payloads: list[bytes]) -> None:
        """`common` is a job like all of them; its id, payload and fingerprint do not count."""
        self.common, self.ids, self.payloads = common, ids, payloads
        self._jobs: list[NewJob] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[NewJob]:
        return iter(self._built())

    @overload
    def __getitem__(self, index: int) -> NewJob: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NewJob]: ...
    def __getitem__(self, index: int | slice) -> NewJob | Sequence[NewJob]:
        if isinstance(index, slice) and self._jobs is None:
            return AlikeJobs(self.common, self.ids[index], self.payloads[index])
        return self._built()[index]

    def _built(self) -> list[NewJob]:
        if self._jobs is None:
            self._jobs = self.common.copies(zip(self.ids, self.payloads, strict=True))
        return self._jobs


def submit_parts(jobs: Sequence[NewJob]) -> Sequence[Sequence[NewJob]]:
    """New jobs in parts that are small enough for one submit each."""
    if len(jobs) <= SUBMIT_MAX:
        return (jobs,) if jobs else ()
    return [jobs[first : first + SUBMIT_MAX] for first in range(0, len(jobs), SUBMIT_MAX)]


def ids_of(jobs: Sequence[NewJob]) -> list[JobId]:
    return jobs.ids if isinstance(jobs, AlikeJobs) else [job.job_id for job in jobs]


def payloads_of(jobs: Sequence[NewJob]) -> list[bytes]:
    return jobs.payloads if isinstance(jobs, AlikeJobs) else [job.payload for job in jobs]


def different_ones(jobs: Sequence[NewJob]) -> Sequence[NewJob]:
    """The new jobs, or one of them if they differ only in id and payload: enough to see their types and lifecycles."""
    return (jobs.common,) if isinstance(jobs, AlikeJobs) and jobs.ids else jobs


class SubmitOutcome(StrEnum):
    """What a submit did."""

    CREATED = "created"
    RETURNED = "returned"
    """Nothing new was written: the job existed, by its idempotency key, its id or its unique key."""
    REPLACED = "replaced"
    """The job was created, and the waiting job that held its unique key was cancelled."""


class Submitted(NamedTuple):
    """The job is in the ledger; `created` is false when an earlier submit made it.

    A submit that the ledger sends again after a lost answer has created the job if the job has the id of this submit.
    """

    job_id: JobId
    created: bool
    replaced: JobId | None = None
    """The waiting job with the same unique key that this submit cancelled."""

    @property
    def outcome(self) -> SubmitOutcome:
        if not self.created:
            return SubmitOutcome.RETURNED
        return SubmitOutcome.CREATED if self.replaced is None else SubmitOutcome.REPLACED


def all_created(ids: Sequence[JobId]) -> "list[Submitted | Mismatch]":
    """The answers to jobs that were all created and replaced no other."""
    new = tuple[Any, ...].__new__  # calling the class takes half as long again
    return [new(Submitted, (job_id, True, None)) for job_id in ids]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The idempotency key or job id belongs to a different request. Nothing was written for this job."""

    key: str
    job_id: JobId


def check_own_ids(jobs: Sequence[NewJob]) -> None:
    """Check that no two jobs of a call have the same id. Raises OptionInvalid.

    An id that the caller chose, and that of a job with an idempotency key, may come again: it is the same request.
    """
    ids = ids_of(jobs)
    if len(ids) == 1 or len(set(ids)) == len(ids):
        return
    seen: set[str] = set()
    for job in jobs:
        if job.job_id in seen and not job.id_is_given and job.idempotency_key is None:
            raise OptionInvalid(option="job_id", value=job.job_id, expected="another id for each job of a call")
        seen.add(job.job_id)


def accepted(answer: Submitted | Mismatch) -> Submitted:
    """The answer of a submit, if the job is in the ledger. Raises IdempotencyMismatch."""
    if isinstance(answer, Mismatch):
        raise IdempotencyMismatch(key=answer.key, job_id=answer.job_id)
    return answer


class Lease(NamedTuple):
    """The right to move one job. It is valid while `epoch` equals the job's epoch."""

    key: JobKey
    epoch: Epoch
    job_id: JobId
    lifecycle: str


class Claimed(NamedTuple):
    """A claimed job, with what its holder needs to run it."""

    lease: Lease
    type: str
    state: str
    payload: bytes
    attempt: int
    generation: int
    max_attempts: int
    deaths: int
    lease_s: float
    """How long the lease lasts from the moment the claim was sent, unless renewed."""
    heartbeat_s: float
    correlation_id: str
    trace: str | None
    parent_id: JobId | None
    compensates: JobId | None
    checkpoint: bytes | None
    deadline_s: float | None
    """Seconds from the claim to the job's deadline, by the ledger's clock."""
    runs_alone: bool = False
    """Workers died while running this job, so it must be the only job of its next worker (`engine/retry_policy.py`)."""
    spared: int = 0
    """Attempts that closed without counting (snooze, release).

    `attempt` and `max_attempts` have both risen by this number.
    """

    @property
    def attempts_spent(self) -> int:
        """How many attempts of this generation counted before the current one."""
        return self.attempt - self.spared

    @property
    def attempts_allowed(self) -> int:
        """How many attempts may count, as submitted."""
        return self.max_attempts - self.spared


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetterReason:
    """What the caller must state for a dead letter.

    The ledger adds attempts, last owner, lease end and correlation id.
    """

    reason_code: ReasonCode
    stage: Stage
    last_error: str


class WaitMode(IntEnum):
    """What ends the wait for children. PostgreSQL's functions use these numbers."""

    ALL = 1
    """All of them have ended."""
    ALL_OR_FAILURE = 2
    """All of them have ended, or one of them without success."""
    ANY = 3
    """One of them has ended."""
    BATCH = 4
    """All jobs have ended whose batch this job completes. The journal of the job names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """What a suspended job waits for. It goes on when one of these has happened."""

    children: tuple[JobId, ...] = ()
    """Jobs that this job spawned. Not read with `WaitMode.BATCH`."""
    mode: WaitMode = WaitMode.ALL
    signal: str | None = None
    """A signal of this name."""
    after: int = 0
    """The number of the last signal that the job has read. Only later ones count."""
    timeout_s: float | None = None
    """The job goes on after this time in any case; None waits as long as it takes."""
    entry: tuple[str, bytes] | None = None
    """A journal entry that is stored with the wait: its name and body."""
    restart_with: bytes | None = None
    """Begin anew with this input: the journal is emptied but for `BATCH_ENTRY`, and has this body as `RESTART_ENTRY`. The job goes on at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalSent:
    """A signal is stored for its job. `repeated` means that an earlier call with the same key has stored it."""

    job_id: JobId
    number: int
    state: str
    """The state of the job when the signal arrived."""
    repeated: bool = False


class JobSignal(NamedTuple):
    """A signal that was sent to a job."""

    number: int
    name: str
    body: bytes


class JobOutcome(NamedTuple):
    """How far a job is, and its result or error once it has ended."""

    job_id: JobId
    type: str
    state: str
    has_ended: bool
    success: bool
    result: bytes | None
    """None also after the time for which the result was kept."""
    error: str | None


class Advance(NamedTuple):
    """A step that a holder makes on its job: fire `trigger` in state `source` under the lease's epoch."""

    lease: Lease
    source: str
    trigger: str
    delay_s: float = 0.0
    """For a step into a waiting state: seconds until the job may be claimed again, or until its timer is due."""
    spare_attempt: bool = False
    """The attempt that this step closes does not count against max_attempts (snooze, release)."""
    cause: str | None = None
    data: bytes | None = None
    """JSON object for the event's payload."""
    result: bytes | None = None
    result_ttl_s: float | None = None
    death: DeadLetterReason | None = None
    version: int | None = None
    """The job's version before this step. It tells apart equal steps of the same job (self-transitions)."""
    finalizes: JobId | None = None
    """The staged artifact that becomes final with this step. Set exactly where the transition has `finalizes`."""
    unless_cancelled: bool = False
    """For a step into an end state: refuse it when a cancel was requested of the holder."""
    wait: Wait | None = None
    """What the job waits for. Set exactly where the step suspends it."""


def completion(
    lease: Lease, source: str, data: bytes | None, result: bytes | None, result_ttl_s: float | None
) -> Advance:
    """The step of a holder whose work succeeded.

    Every job ends with one. It is built from the tuple of all fields, which takes half the time of naming them.
    """
    return tuple.__new__(  # pyright: ignore[reportUnknownMemberType]
        Advance,
        (lease, source, Trigger.COMPLETE, 0.0, False, None, data, result, result_ttl_s, None, None, None, False, None),
    )


class HeldLease(NamedTuple):
    """A held job as seen by a process other than its holder.

    `lease` allows moving or renewing it in the holder's place.
    """

    lease: Lease
    type: str
    state: str
    attempt: int
    max_attempts: int
    version: int
    owner: str | None
    left_s: float
    """Seconds until the lease ends; negative when it has ended and the job was not yet taken back."""
    cancel: bool
    """Whether a cancel was requested of the holder."""
    correlation_id: str


class StepApplied(NamedTuple):
    """The step is recorded. `repeated` means an earlier call with the same epoch had recorded it."""

    version: int
    repeated: bool = False


class LeaseLost(NamedTuple):
    """The step was refused: the job has a different epoch or state, or has ended."""

    lease: Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeClaim:
    """A job type that a claimer serves, with the lease and heartbeat it asks for."""

    type: str
    lease_s: float = LEASE_S_DEFAULT
    heartbeat_s: float = HEARTBEAT_S_DEFAULT


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A request for jobs. The first `start` jobs are claimed and started; up to `prefetch` more are only claimed.

    Repeating a claim id returns the same jobs while their leases live.
    """

    claim_id: ClaimId
    types: tuple[TypeClaim, ...]
    start: int = 1
    prefetch: int = 0
    lifecycle: str = "leased-job"
    isolates: bool = False
    """The claimer can run a job alone in its worker.

    A claim then hands out at most one job that must run alone, not started, and only while no other such job is held.
    Claimers that cannot isolate get such jobs like any other.
    """
    only: JobId | None = None
    """Claim this job and no other.

    If it waits for its concurrency key, it takes the slot of another job of the key that nobody has claimed. Pauses,
    rate limits and the limit of the key hold as for every claim.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One transaction of a holder: settle and start its jobs, then claim more."""

    actor: Actor
    advances: tuple[Advance, ...] = ()
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One outcome for each advance, in order, and the jobs claimed."""

    outcomes: list[StepApplied | LeaseLost]
    claimed: list[Claimed]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subscription:
    """The right to read the feed as a named subscriber, valid while `epoch` is that name's epoch.

    `position` None is the start.
    """

    name: str
    epoch: Epoch
    position: str | None


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease was extended. `cancel` asks the holder to stop."""

    cancel: bool


REQUEST_KEY_CHARS_MAX = MappingProxyType({"scope": 500, "key": 200, "about": 200})
FINGERPRINT_BYTES_MAX = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKey:
    """The idempotency key of a request that changes the ledger (see `request_keys`). Raises OptionInvalid if too long."""

    scope: str
    key: str
    fingerprint: bytes
    about: str
    """What the request is about: a job id, or a word for many jobs. Named to whoever uses the key for another request."""
    given: str
    """The key as the caller sent it, for messages."""
    keeps_refusals: bool = False
    """Store the answer of a requeue also when no job was requeued. Otherwise the repeated request tries again."""
    answer: bytes | None = None
    """For a move: the answer to store with the step, when the request makes more steps after it."""

    def __post_init__(self) -> None:
        texts = {"scope": self.scope, "key": self.key, "about": self.about}
        for name, text in texts.items():
            if len(text) > REQUEST_KEY_CHARS_MAX[name]:
                expected = f"at most {REQUEST_KEY_CHARS_MAX[name]} characters, not {len(text)}"
                raise OptionInvalid(option=f"{name} of a request", value=f"{text[:40]}…", expected=expected)
        if len(self.fingerprint) > FINGERPRINT_BYTES_MAX:
            expected = f"at most {FINGERPRINT_BYTES_MAX} bytes"
            raise OptionInvalid(option="fingerprint of a request", value=len(self.fingerprint), expected=expected)

    def part(self, name: str) -> "RequestKey":
        """The key of a further transaction of the same request."""
        return replace(self, key=f"{self.key}:{name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A step by a role that holds no lease: validate, approve, deny, cancel, requeue, dead-letter, claim by id.

    Repeating a request id returns the first answer. `version`, if given, must equal the job's version.
    """

    job_id: JobId
    target: str
    request_id: RequestId
    version: int | None = None
    delay_s: float | None = None
    """For a step into a waiting state: seconds until its timer is due. None waits until a role moves the job."""
    lease_s: float = LEASE_S_DEFAULT
    heartbeat_s: float = HEARTBEAT_S_DEFAULT
    cause: str | None = None
    data: bytes | None = None
    death: DeadLetterReason | None = None
    key: RequestKey | None = None
    """The idempotency key of the request, stored with the step. A move whose key has a stored answer is not made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The step is recorded. `lease` is set when the target state is held."""

    job_id: JobId
    source: str
    target: str
    version: int
    lease: Lease | None = None
    repeated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NotMoved:
    """The step was refused. `state` is the job's current state."""

    job_id: JobId
    state: str
    target: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequested:
    """The cancel request was recorded for the holder. After the grace period the sweep ends the job."""

    job_id: JobId
    state: str
    version: int
    repeated: bool = False


# Reserved job ids: those the engine derives from the ids of other jobs, for retries (`.r1`), compensations (`.c`), jobs
# that an operator runs again (`.q-…`) and single attempts (`@1`).
#
# Job ids are unique over all lifecycles. A caller that took a derived id first would keep the engine from creating the
# job that id stands for. Every ledger calls `check_new_id` before it accepts a new job; PostgreSQL enforces the same
# rule for callers that bypass Python.

RESERVED_ID_PATTERN = r"(\.(c|r[0-9]+|q-[0-9a-f]+)|@[0-9]+)\Z"
"""The endings of derived ids. Python and PostgreSQL interpret the pattern alike."""
REPORT_ID_PATTERN = r"\Aalert-[0-9a-f-]{36}-(raised|resolved)-[a-z]+(-[0-9]+)?\Z"
"""The ids of jobs that report alerts (`report_job_id` in engine/alerts.py). Whoever took one would keep a report from
being sent."""
RESERVED_ID_MARKS = (".", "@", "alert-")
"""Every id that one of the two patterns matches contains one of these, so many ids are searched for them at once."""
REPORTING_ROLE = Role.CONTROL_PLANE
"""The only role that may create jobs with the ids of reports."""
DERIVING_ROLES: Mapping[str, Role] = MappingProxyType({BUS_JOB.name: Role.RECONCILER, NLM_JOB.name: Role.NLM_BACKEND})
"""By lifecycle: the only role that may create jobs with derived ids."""

_reserved, _report = re.compile(RESERVED_ID_PATTERN), re.compile(REPORT_ID_PATTERN)


def check_new_id(job_id: str, lifecycle: str, role: Role) -> None:
    """Check that this role may give a new job this id. Raises IdReserved."""
    if _reserved.search(job_id) and DERIVING_ROLES.get(lifecycle) is not role:
        raise IdReserved(job_id=job_id)
    if _report.search(job_id) and role is not REPORTING_ROLE:
        raise IdReserved(job_id=job_id)


def check_new_ids(job_ids: Sequence[str], lifecycle: str, role: Role) -> None:
    """`check_new_id` for each of these ids. Raises IdReserved."""
    text = "\0".join(job_ids)
    if any(map(text.__contains__, RESERVED_ID_MARKS)):
        for job_id in job_ids:
            check_new_id(job_id, lifecycle, role)


# Type options: what an application declares about a job type, stored in the ledger for every submit (D66).
#
# A worker declares its application's types when it starts. A client with an application declares the types that the
# ledger does not know yet. Every submit (Python, command line, HTTP, SQL) gets the declared value for each option it
# does not set. The ledger cannot compute a concurrency key that a Python function computes. A submit with neither the
# application nor a key is refused, because it would bypass the limit.

DECLARED_MAX = 1_000
"""The most types that one call may declare, and that one listing returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeOptions:
    """The defaults of a job type, for options that a submit does not set."""

    type: str
    lifecycle: str = "leased-job"
    priority: Priority = Priority.BATCH
    max_attempts: int = ATTEMPTS_DEFAULT
    max_deaths: int = DEATHS_DEFAULT
    deadline_s: float | None = None
    concurrency_limit: int = 1
    keyed: bool = False
    """Every job needs a concurrency key: a function of the application computes it, or `key_rate` limits each key."""
    compensation: str | None = None
    """The job type that undoes a succeeded job of this type."""
    unique: UniqueRule | None = None
    """Holds for every submit of the type, for each value that the submit does not give."""
    key_rate: KeyRate | None = None
    """How often jobs of each concurrency key are claimed."""


DECLARED = "declared by an application"
"""The cause recorded by the administrative act when the options of a type change."""


def options_text(options: TypeOptions) -> str:
    """A type's options as administrative acts show them. PostgreSQL produces the same text."""
    deadline = None if options.deadline_s is None else f"{float(options.deadline_s)!r}".removesuffix(".0")
    named = {
        "priority": int(options.priority),
        "max_attempts": options.max_attempts,
        "max_deaths": options.max_deaths,
        "deadline_s": deadline,
        "concurrency_limit": options.concurrency_limit,
    }
    parts = [f"{name} {value}" for name, value in named.items() if value is not None]
    undone_by = [] if options.compensation is None else [f"compensation {options.compensation}"]
    rule = [] if options.unique is None else [f"unique {options.unique.text()}"]
    rate = None if options.key_rate is None else rate_text(options.key_rate.per_second, options.key_rate.burst)
    paced = [] if rate is None else [f"rate_per_key {rate}"]
    return ", ".join([*parts, *(["keyed"] if options.keyed else []), *undone_by, *rule, *paced])


class ResolvedOptions(NamedTuple):
    """The options that a job is stored with."""

    priority: Priority
    max_attempts: int
    max_deaths: int
    deadline_s: float | None
    concurrency_limit: int


def resolve_options(job: NewJob, declared: TypeOptions | None) -> ResolvedOptions:
    """The options the job sets, and its type's declaration for the rest. Raises ConcurrencyKeyMissing."""
    chosen = job.chosen
    if declared is None or chosen == ChosenOptions.ALL:
        return ResolvedOptions(job.priority, job.max_attempts, job.max_deaths, job.deadline_s, job.concurrency_limit)
    if declared.keyed and not chosen & ChosenOptions.CONCURRENCY_KEY:
        raise ConcurrencyKeyMissing(type=job.type)
    return ResolvedOptions(
        job.priority if chosen & ChosenOptions.PRIORITY else declared.priority,
        job.max_attempts if chosen & ChosenOptions.MAX_ATTEMPTS else declared.max_attempts,
        job.max_deaths if chosen & ChosenOptions.MAX_DEATHS else declared.max_deaths,
        job.deadline_s if chosen & ChosenOptions.DEADLINE else declared.deadline_s,
        job.concurrency_limit if chosen & ChosenOptions.CONCURRENCY_LIMIT else declared.concurrency_limit,
    )
