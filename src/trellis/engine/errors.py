"""Every error Trellis raises. The docstring is the message; the data sits on the exception.

TrellisError
├── InputError                  what the caller gave cannot be taken; nothing was written
│   ├── UnknownJobType
│   ├── UnknownLifecycle
│   ├── PayloadInvalid
│   ├── PayloadTooLarge
│   ├── ResultInvalid
│   ├── OptionInvalid
│   ├── SettingsInvalid
│   │   └── ExtraMissing
│   ├── ConcurrencyKeyMissing
│   ├── IdReserved
│   ├── JobNotFound
│   ├── ScheduleNotFound
│   ├── HistoryBroken
│   └── IdempotencyMismatch
├── Refused                     the ledger's answer is no; nothing was written
│   ├── InvalidTransition
│   ├── QueueFull
│   ├── UniqueConflict
│   ├── ScheduleExists
│   ├── ScheduleBusy
│   ├── NotAllowed
│   │   └── LoginNotAllowed
│   ├── KeyUnusable
│   ├── TokenRefused
│   │   └── TokenExpired
│   └── LeaseConflictError
├── LedgerError                 the ledger itself
│   ├── LedgerUrlInvalid
│   │   └── LedgerLoginRefused
│   ├── LedgerTooOld
│   ├── PoolerUnfit
│   ├── LedgerMissing
│   ├── LedgerNotMigrated
│   │   ├── LedgerNewer
│   │   └── LedgerUpgraded
│   ├── LedgerReadOnly
│   ├── LedgerFull
│   ├── LedgerDamaged
│   ├── LedgerUnavailable
│   └── OutcomeUnknown
├── DiskFull                    a disk of the instance has no room for what it writes
├── ResourceFailed              a worker could not open a resource of its application
├── JobEnded                    the job has no result to wait for: it ended otherwise
│   ├── JobFailed
│   ├── JobDeadLettered
│   └── JobCancelled
└── JobError                    raised by handlers; the class decides what happens to the job
    ├── ValidationError         the payload can never work: dead-lettered, no retry
    ├── TransientError          worth another attempt
    ├── PermanentError          not worth another attempt
    └── ProcessCrashed          the process of a handler died
"""

import shlex
from enum import Enum, StrEnum
from typing import ClassVar

from trellis.engine.text import masked_url


class TrellisError(Exception):
    """Something in Trellis went wrong."""

    code: ClassVar[str] = "INTERNAL_ERROR"
    shown: ClassVar[str | None] = None
    """The text that network callers get instead of a message that may contain server addresses."""

    def __init__(self, **data: object) -> None:
        self.data = data
        template = (self.__doc__ or "").strip()
        super().__init__(template.format(**data) if data else template)

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between processes with their message and data; their constructors take neither by position."""
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[TrellisError], args: tuple[object, ...], fields: dict[str, object]) -> TrellisError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class InputError(TrellisError):
    """{detail}"""

    code = "VALIDATION_FAILED"


class UnknownJobType(InputError):
    """No handler is registered for job type {type!r}; known types: {known}."""


class UnknownLifecycle(InputError):
    """There is no lifecycle {name!r}; choose one of {known}."""


class PayloadInvalid(InputError):
    """The payload of {type!r} does not fit: {detail}"""


class PayloadTooLarge(InputError):
    """The payload has {size} bytes and the limit is {limit}; store the data elsewhere and pass a reference."""

    code = "PAYLOAD_TOO_LARGE"


class ResultInvalid(InputError):
    """The result of {type!r} does not fit: {detail}"""


class OptionInvalid(InputError):
    """{option} is {value!r}: {expected}."""

    def __init__(self, *, option: str, value: object, expected: str) -> None:
        if isinstance(value, Enum):  # as callers write it
            value = value.value if isinstance(value, StrEnum) else value.name.lower()
        super().__init__(option=option, value=value, expected=expected)
        if value is None:  # nobody typed it
            self.args = (f"{option} is missing: {expected}.",)


class SettingsInvalid(InputError):
    """{source}: {detail}"""


class ExtraMissing(SettingsInvalid):
    """{feature} needs packages that are not installed ({package}): pip install 'trellis-engine[{extra}]'"""


class ConcurrencyKeyMissing(InputError):
    """Jobs of type {type!r} are limited by their concurrency key, which their application computes or each submit gives. Give the key (--concurrency-key, concurrency_key), or submit with the application if it computes it (--app MODULE:APP, `connect(app=…)`)."""


class IdReserved(InputError):
    """The job id {job_id!r} ends as only ids do that the engine makes itself (.c, .r1, .q-1f, @1, -resolved-webhook); choose another id."""


class JobNotFound(InputError):
    """There is no job {job_id!r} in this ledger."""

    code = "NOT_FOUND"


class ChildExists(InputError):
    """Job {job_id} has the id or the unique key of a child that {parent_id} would spawn, and is no child of it; nothing was spawned. A unique job can be submitted with ctx.submit, which returns the one that is there."""

    code = "CONFLICT"


class SignalRefused(TrellisError):
    """The signal {name!r} cannot be sent to job {job_id}: {reason}"""

    code = "CONFLICT"


class ScheduleNotFound(InputError):
    """There is no schedule of jobs named {name!r}; {hint}"""

    code = "NOT_FOUND"


class HistoryBroken(InputError):
    """Job {job_id} cannot be put back: {reason}."""


class IdempotencyMismatch(InputError):
    """Key {key!r} was used before for another request (job {job_id}); use a new key or send the same request."""

    code = "IDEMPOTENCY_MISMATCH"


class Refused(TrellisError):
    """{detail}"""

    code = "CONFLICT"


class InvalidTransition(Refused):
    """Job {job_id} cannot go from {source} to {target} by {actor}: {reason}."""

    code = "INVALID_TRANSITION"


class NotABatch(Refused):
    """Job {job_id} exists and completes no batch; nothing was submitted. Give the completion job another id or key."""


class QueueFull(Refused):
    """{waiting} jobs of concurrency key {key!r} wait and {limit} is the limit; wait until one of them is taken."""

    code = "RATE_LIMITED"


class UniqueConflict(Refused):
    """Job {job_id} of type {type!r} holds the unique key {key!r}; wait until it lets go, or submit with on_conflict return."""


class ScheduleExists(Refused):
    """There is another schedule named {name!r} already; change it, remove it, or choose another name."""


class ScheduleBusy(Refused):
    """Others keep changing the schedule {name!r}; try again."""


class NotAllowed(Refused):
    """Role {role} may not {action}: {reason}."""

    code = "FORBIDDEN"


class LoginNotAllowed(NotAllowed):
    """The database refuses this login: {reason}. It needs {missing}."""


class KeyUnusable(Refused):
    """The key that tokens are signed with cannot be used: {reason}."""

    code = "AUTH_REQUIRED"


class TokenRefused(Refused):
    """The token is refused: {problem}; {remedy}."""

    code = "AUTH_REQUIRED"


class TokenExpired(TokenRefused):
    """The token is refused: {problem}; {remedy}."""

    code = "TOKEN_EXPIRED"


class LeaseConflictError(Refused):
    """The lease on job {job_id} (epoch {epoch}) is lost; what this holder wrote was refused."""

    code = "LEASE_LOST"


class LedgerError(TrellisError):
    """{detail}"""

    code = "UPSTREAM_UNAVAILABLE"
    shown = "The ledger cannot answer now; try again in a while."


def _without_password(url: object) -> str:
    """A ledger's address with its password masked: errors are logged."""
    return masked_url(str(url))


def _typed(url: object) -> str:
    """A ledger's address as a shell reads it, without its password."""
    return shlex.quote(_without_password(url))


class LedgerUrlInvalid(LedgerError):
    """{url!r} is no ledger address: {reason}. Use sqlite:///path/to/file.db or postgresql://user@host/database."""

    code = "VALIDATION_FAILED"

    def __init__(self, *, url: object, reason: object) -> None:
        super().__init__(url=_without_password(url), reason=reason)


class LedgerLoginRefused(LedgerUrlInvalid):
    """The ledger {url} lets nobody in with this login: {reason}."""


class LedgerTooOld(LedgerError):
    """{software} {found} is too old: {needed} or newer is needed ({reason})."""


class PoolerUnfit(LedgerError):
    """The pooler in front of PostgreSQL refuses what the ledger needs ({reason}); in pgbouncer set pool_mode = transaction or session, or name the server itself in TRELLIS_LEDGER."""


class LedgerMissing(LedgerError):
    """There is no ledger at {path}: no such file; run `trellis migrate --ledger {url}` to make it."""

    def __init__(self, *, path: object, url: object) -> None:
        super().__init__(path=path, url=_typed(url))


class LedgerNotMigrated(LedgerError):
    """The ledger has schema version {found} and this program needs {needed}; run `trellis migrate --ledger {url}`."""

    def __init__(self, *, url: object = "URL", **data: object) -> None:
        super().__init__(url=_typed(url), **data)


class LedgerNewer(LedgerNotMigrated):
    """A newer program brought the ledger to schema version {found}, and this program knows schema version {known}. Use the program that migrated the ledger, or any that knows schema version {oldest} or later; this one changed nothing."""


class LedgerUpgraded(LedgerNotMigrated):
    """Another version of Trellis changed the ledger's schema while this process used it ({reason}); restart this process with that version."""


class LedgerReadOnly(LedgerError):
    """The ledger cannot be written: {reason}."""


class LedgerFull(LedgerError):
    """The disk of {ledger} is full; nothing of this call was written. Free space and try again."""

    def __init__(self, *, ledger: object = "the ledger") -> None:
        super().__init__(ledger=ledger)


class LedgerDamaged(LedgerError):
    """The ledger's storage is damaged ({reason})."""

    shown = "The ledger's storage is damaged; its operator has to restore it."


class LedgerUnavailable(LedgerError):
    """The ledger does not answer: {reason}."""


class OutcomeUnknown(LedgerError):
    """The ledger went away before it answered {verb} ({request}); ask again with the same id to learn what happened."""

    shown = None


class DiskFull(TrellisError):
    """The disk of {folder} is full: less than {needed_mib} MiB are free. Free space on it and try again."""

    code = "UPSTREAM_UNAVAILABLE"
    shown = "A disk is full; its operator has to make room."


class JobEnded(TrellisError):
    """Job {job_id} ended as {state}: {reason}"""

    code = "CONFLICT"


class JobFailed(JobEnded):
    """Job {job_id} failed: {reason}"""


class JobDeadLettered(JobEnded):
    """Job {job_id} was dead-lettered ({reason_code}): {reason}"""


class JobCancelled(JobEnded):
    """Job {job_id} was cancelled: {reason}"""


class ResourceFailed(TrellisError):
    """The resource {name!r} ({type}) could not be opened, so the worker did not start: {detail}"""


class JobError(TrellisError):
    """A handler failed."""

    def __init__(self, message: str = "", **data: object) -> None:
        Exception.__init__(self, message or (self.__doc__ or ""))
        self.data = data


class ValidationError(JobError):
    """The payload can never work."""

    code = "VALIDATION_FAILED"


class TransientError(JobError):
    """Worth another attempt."""


class PermanentError(JobError):
    """Not worth another attempt."""


class ProcessCrashed(JobError):
    """The process of a handler died: a crash, an exit, or a kill, as when memory runs out. The attempt failed."""
