"""Jobs as values: what a caller asks of the ledger, which ids are reserved, and the options of a job type."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, NewType

from trellis.engine.errors import ConcurrencyKeyMissing, IdReserved
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.nlm_job import NLM_JOB

# The nouns of the engine, as values: jobs, leases, events, dead letters, and what a caller asks of the ledger.
#
# Ids: `JobId` is the external text id that people and documents see; `JobKey` is the ledger's own number. `Epoch` is the
# fencing token: it rises at every claim and every revocation and is never reset. `version` counts a job's transitions.
# Attempts and generations count from 0 here; people see attempt + 1. What is made for every single job on the hot path is a
# named tuple, an eighth of the price of a frozen dataclass.

JobId = NewType("JobId", str)
JobKey = NewType("JobKey", int)
Epoch = NewType("Epoch", int)
ClaimId = NewType("ClaimId", str)
RequestId = NewType("RequestId", str)

CORRELATION_PATTERN = r"[A-Za-z0-9._:-]{1,100}"
"""What a caller may choose as the correlation id of a request or a run."""
JOB_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}$"
TYPE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:>*-]{0,199}$"
PAYLOAD_BYTES_MAX = 1024 * 1024
RESULT_BYTES_MAX = 1024 * 1024
ERROR_CHARS_MAX = 8_000
CLAIM_MAX = 1_000
LEAST_URGENT_FIRST_EVERY = 8
"""Every so many claims of one claimer look at the least urgent class first, so that none starves."""
SUBMIT_MAX = 5_000
RESTORE_MAX = 500
REMARKS_MAX = 100
HEAD_PAYLOAD_BYTES_MAX = 8_192
"""A head comes without a larger payload."""
HEADS_MAX = 5_000
"""Jobs that one look at the heads of all types gives; where they are more, the first of every type come before the second."""
DELAY_S_MAX = 366 * 24 * 3600.0
ATTEMPTS_DEFAULT = 5
ATTEMPTS_MAX = 1_000
DEATHS_DEFAULT = 3
LEASE_S_DEFAULT = 60.0
HEARTBEAT_S_DEFAULT = 15.0
CANCEL_GRACE_S_DEFAULT = 30.0
SILENCE_GRACE_S = 0.5
"""How much more than two heartbeats of silence a holder is given; with the sweep on top it is free within one second."""


def heartbeat_for(lease_s: float) -> float:
    """How often a lease is renewed where nobody says: three times while it lasts, and every HEARTBEAT_S_DEFAULT at least (D65)."""
    return min(HEARTBEAT_S_DEFAULT, lease_s / 3)


def lease_length_s(lease_s: float, heartbeat_s: float) -> float:
    """How long a silent holder keeps a job: its lease, or two missed heartbeats, whichever is over first."""
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
    """How far a job was when it was dead-lettered."""

    FETCH = "fetch"
    INPUT = "input"
    EXEC = "exec"
    OUTPUT = "output"
    COMMIT = "commit"


class CancelMode(StrEnum):
    """Soft asks the holder to stop; hard ends the job now."""

    SOFT = "soft"
    HARD = "hard"


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """Who acts: a role of the authority matrix and a name people recognise."""

    role: Role
    name: str


class ChosenOptions:
    """Which options a submit chose by name, as bits of `NewJob.chosen`. The others are as the job's type declares them."""

    PRIORITY = 1
    MAX_ATTEMPTS = 2
    MAX_DEATHS = 4
    DEADLINE = 8
    CONCURRENCY_KEY = 16
    """A key was given, or a function of the application was asked for one."""
    CONCURRENCY_LIMIT = 32
    ALL = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class NewJob:
    """A job to submit. `fingerprint` is what "the same request" means for its idempotency key and its own id."""

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
    """Refused with QueueFull when so many jobs of its concurrency key wait already; those that are held or have ended do not count."""
    idempotency_key: str | None = None
    idempotency_scope: str = ""
    fingerprint: bytes = b""
    id_is_given: bool = False
    """The caller chose job_id: submitting the same id and body again is answered with the existing job."""
    correlation_id: str | None = None
    trace: str | None = None
    parent_id: JobId | None = None
    compensates: JobId | None = None
    chosen: int = ChosenOptions.ALL
    """Options whose bit is missing give way to what the job's type declares in the ledger, if it declares anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """The job is in the ledger; `created` is false when an earlier submit made it."""

    job_id: JobId
    created: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The key or id was used before for another request: nothing was written for this job."""

    key: str
    job_id: JobId


class Lease(NamedTuple):
    """The right to move one job, while `epoch` is the job's epoch."""

    key: JobKey
    epoch: Epoch
    job_id: JobId
    lifecycle: str


class Claimed(NamedTuple):
    """A job just claimed, with what its holder needs to run it."""

    lease: Lease
    type: str
    state: str
    payload: bytes
    attempt: int
    generation: int
    max_attempts: int
    deaths: int
    lease_s: float
    """How long the lease holds from the moment the claim was sent, unless renewed."""
    heartbeat_s: float
    correlation_id: str
    trace: str | None
    parent_id: JobId | None
    compensates: JobId | None
    checkpoint: bytes | None
    deadline_s: float | None
    """Seconds from the claim to the job's deadline, by the ledger's clock."""
    runs_alone: bool = False
    """Its workers died: it must have the next one to itself (`engine/retry_policy.py`)."""
    spared: int = 0
    """Attempts that closed without counting (snooze, release); `attempt` and `max_attempts` have each risen by as many."""

    @property
    def attempts_spent(self) -> int:
        """How many attempts of this generation counted before the present one."""
        return self.attempt - self.spared

    @property
    def attempts_allowed(self) -> int:
        """How many may count, as the job was submitted."""
        return self.max_attempts - self.spared


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetterReason:
    """What a dead letter must say; the ledger adds attempts, last owner, lease end and correlation."""

    reason_code: ReasonCode
    stage: Stage
    last_error: str


class Advance(NamedTuple):
    """One step of a held job by its holder: pull `trigger` in `source` with the lease's epoch."""

    lease: Lease
    source: str
    trigger: str
    delay_s: float = 0.0
    """Into a waiting state: how long before it may be claimed again, or before its timer falls due."""
    spare_attempt: bool = False
    """The attempt this closes does not count against max_attempts (snooze, release)."""
    cause: str | None = None
    data: bytes | None = None
    """JSON object for the event's payload."""
    result: bytes | None = None
    result_ttl_s: float | None = None
    death: DeadLetterReason | None = None
    version: int | None = None
    """The job's version this step follows; what makes one of several equal steps (a self-transition) itself."""
    finalizes: JobId | None = None
    """The job's staged artifact that becomes final with this step; where a transition `finalizes`, and nowhere else."""
    unless_cancelled: bool = False
    """Into an end: refused when somebody has asked the holder to stop, for who would end it otherwise then."""


class HeldLease(NamedTuple):
    """A job that is held now, as one who is not its holder finds it: with `lease` it can be moved or renewed in the holder's place."""

    lease: Lease
    type: str
    state: str
    attempt: int
    max_attempts: int
    version: int
    owner: str | None
    left_s: float
    """How long the lease still runs; negative when it is over and nobody has taken the job back yet."""
    cancel: bool
    """Whether somebody asked the holder to stop."""
    correlation_id: str


class StepApplied(NamedTuple):
    """The step is in the ledger; `repeated` when an earlier call with the same epoch had made it."""

    version: int
    repeated: bool = False


class LeaseLost(NamedTuple):
    """The step was refused: the job has another epoch, another state, or has ended."""

    lease: Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeClaim:
    """One job type a claimer serves, with the lease it wants there."""

    type: str
    lease_s: float = LEASE_S_DEFAULT
    heartbeat_s: float = HEARTBEAT_S_DEFAULT


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A request for jobs: the first `start` are claimed and started at once, up to `prefetch` more only claimed.

    The same claim id asked again returns the same jobs while their leases live.
    """

    claim_id: ClaimId
    types: tuple[TypeClaim, ...]
    start: int = 1
    prefetch: int = 0
    lifecycle: str = "leased-job"
    isolates: bool = False
    """The claimer can run a job alone. It is handed at most one that must run so, not started, while nobody holds another;
    a claimer that cannot gets such jobs like any other.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One transaction of a holder: settle and start what it holds, then claim more."""

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
    """The right to follow the feed under a name, while `epoch` is that name's epoch; `position` None is the beginning."""

    name: str
    epoch: Epoch
    position: str | None


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease runs on; `cancel` asks the holder to stop."""

    cancel: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A step by a role that holds no lease: validate, approve, deny, cancel, requeue, dead-letter, claim by id.

    The same request id again returns the first answer. `version`, when given, must be the job's version.
    """

    job_id: JobId
    target: str
    request_id: RequestId
    version: int | None = None
    delay_s: float | None = None
    """Into a waiting state: when its timer falls due; None rests until someone moves it."""
    lease_s: float = LEASE_S_DEFAULT
    heartbeat_s: float = HEARTBEAT_S_DEFAULT
    cause: str | None = None
    data: bytes | None = None
    death: DeadLetterReason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The step is in the ledger; `lease` when the target state is held."""

    job_id: JobId
    source: str
    target: str
    version: int
    lease: Lease | None = None
    repeated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NotMoved:
    """The step was refused; `state` is where the job is."""

    job_id: JobId
    state: str
    target: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequested:
    """A soft cancel was handed to the holder; after the grace the sweep ends the job."""

    job_id: JobId
    state: str


# Job ids that the engine derives from the ids of other jobs: retries (`.r1`), compensations (`.c`), jobs that an operator runs again
# (`.q-…`) and the names of single attempts (`@1`).
#
# Nobody else may give a job such an id. Job ids are unique over all lifecycles: whoever took one first would keep the engine from making
# what follows from somebody else's job. Every ledger asks here before it takes in a new job; PostgreSQL holds the same rule for callers
# that bypass us.

RESERVED_ID_PATTERN = r"(\.(c|r[0-9]+|q-[0-9a-f]+)|@[0-9]+)\Z"
"""How derived ids end. Python and PostgreSQL read it alike."""
DERIVING_ROLES: Mapping[str, Role] = MappingProxyType({BUS_JOB.name: Role.RECONCILER, NLM_JOB.name: Role.NLM_BACKEND})
"""By lifecycle: the one role that makes jobs with derived ids."""

_reserved = re.compile(RESERVED_ID_PATTERN)


def check_new_id(job_id: str, lifecycle: str, role: Role) -> None:
    """Nothing, when this role may give a new job this id; raises IdReserved."""
    if _reserved.search(job_id) and DERIVING_ROLES.get(lifecycle) is not role:
        raise IdReserved(job_id=job_id)


# Type options: what an application declares about a job type, as the ledger keeps it for every submit (D66).
#
# A worker declares the types of its application when it starts; a client with an application declares those that the ledger does not
# know yet. Submits from anywhere (Python, command line, HTTP, SQL) get the declared values for every option that they do not choose by
# name. A concurrency key that a Python function computes cannot be computed by the ledger: a submit that has neither the
# application nor a key is refused, because it would pass by the limit.

DECLARED_MAX = 1_000
"""Types that one call declares, and that one look at the declared ones gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeOptions:
    """What holds for jobs of a type unless their submit says otherwise."""

    type: str
    lifecycle: str = "leased-job"
    priority: Priority = Priority.BATCH
    max_attempts: int = ATTEMPTS_DEFAULT
    max_deaths: int = DEATHS_DEFAULT
    deadline_s: float | None = None
    concurrency_limit: int = 1
    keyed: bool = False
    """A function of the application computes the concurrency key of each job."""
    compensation: str | None = None
    """The job type that undoes a succeeded job of this one."""


DECLARED = "declared by an application"
"""Why the options of a type changed, as acts say it."""


def options_text(options: TypeOptions) -> str:
    """The options of a type as acts show them. PostgreSQL words it the same."""
    deadline = None if options.deadline_s is None else f"{float(options.deadline_s)!r}".removesuffix(".0")
    named = {
        "priority": int(options.priority),
        "max_attempts": options.max_attempts,
        "max_deaths": options.max_deaths,
        "deadline_s": deadline,
        "concurrency_limit": options.concurrency_limit,
    }
    told = [f"{name} {value}" for name, value in named.items() if value is not None]
    undone_by = [] if options.compensation is None else [f"compensation {options.compensation}"]
    return ", ".join([*told, *(["keyed"] if options.keyed else []), *undone_by])


class ResolvedOptions(NamedTuple):
    """The options that a job is stored with."""

    priority: Priority
    max_attempts: int
    max_deaths: int
    deadline_s: float | None
    concurrency_limit: int


def resolve_options(job: NewJob, declared: TypeOptions | None) -> ResolvedOptions:
    """What the job chose itself, and for the rest what its type declares; raises ConcurrencyKeyMissing."""
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
