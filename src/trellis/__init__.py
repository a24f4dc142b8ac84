"""Trellis: a durable job engine, and an execution platform for agents with a human in control.

Importing the package costs next to nothing: a name is loaded, with the module that has it, when it is first asked for.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as in `_NAMES`
    from trellis.app.wiring import connect, connect_sync, run_worker
    from trellis.client import BatchHandle, JobHandle, Trellis
    from trellis.engine.errors import (
        ConcurrencyKeyMissing,
        IdempotencyMismatch,
        IdReserved,
        InputError,
        InvalidTransition,
        JobCancelled,
        JobDeadLettered,
        JobEnded,
        JobError,
        JobFailed,
        JobNotFound,
        LeaseConflictError,
        LedgerError,
        LedgerUnavailable,
        NotABatch,
        NotAllowed,
        OptionInvalid,
        OutcomeUnknown,
        PayloadInvalid,
        PayloadTooLarge,
        PermanentError,
        ProcessCrashed,
        QueueFull,
        Refused,
        ResourceFailed,
        ResultInvalid,
        SettingsInvalid,
        SignalRefused,
        TokenExpired,
        TokenRefused,
        TransientError,
        TrellisError,
        UniqueConflict,
        UnknownJobType,
        ValidationError,
    )
    from trellis.engine.jobs import CancelMode, Moved, NotMoved, Priority, ReasonCode
    from trellis.engine.records import DeadLetter, Event, FeedPage, Job, JobFilter, Signal
    from trellis.engine.retry_policy import RetryPolicy
    from trellis.operations.job_changes import ChangeFilter, ChangeTotals
    from trellis.worker.app import App
    from trellis.worker.batches import BatchOutcome, MemberOutcome
    from trellis.worker.context import Context, Item, SyncContext
    from trellis.worker.durable import (
        ChildFailed,
        ChildHandle,
        DurableStepFailed,
        FirstChild,
        MemberFailed,
        ReplayMismatch,
        SignalTimeout,
    )
    from trellis.worker.middleware import CallNext
    from trellis.worker.options import WorkerOptions
    from trellis.worker.outcomes import Snooze
    from trellis.worker.payloads import Serializer, Undo
    from trellis.worker.process_child import ProcessContext
    from trellis.worker.requests import BatchJob

__all__ = [
    "App",
    "BatchHandle",
    "BatchJob",
    "BatchOutcome",
    "CallNext",
    "CancelMode",
    "ChangeFilter",
    "ChangeTotals",
    "ChildFailed",
    "ChildHandle",
    "ConcurrencyKeyMissing",
    "Context",
    "DeadLetter",
    "DurableStepFailed",
    "Event",
    "FeedPage",
    "FirstChild",
    "IdReserved",
    "IdempotencyMismatch",
    "InputError",
    "InvalidTransition",
    "Item",
    "Job",
    "JobCancelled",
    "JobDeadLettered",
    "JobEnded",
    "JobError",
    "JobFailed",
    "JobFilter",
    "JobHandle",
    "JobNotFound",
    "LeaseConflictError",
    "LedgerError",
    "LedgerUnavailable",
    "MemberFailed",
    "MemberOutcome",
    "Moved",
    "NotABatch",
    "NotAllowed",
    "NotMoved",
    "OptionInvalid",
    "OutcomeUnknown",
    "PayloadInvalid",
    "PayloadTooLarge",
    "PermanentError",
    "Priority",
    "ProcessContext",
    "ProcessCrashed",
    "QueueFull",
    "ReasonCode",
    "Refused",
    "ReplayMismatch",
    "ResourceFailed",
    "ResultInvalid",
    "RetryPolicy",
    "Serializer",
    "SettingsInvalid",
    "Signal",
    "SignalRefused",
    "SignalTimeout",
    "Snooze",
    "SyncContext",
    "TokenExpired",
    "TokenRefused",
    "TransientError",
    "Trellis",
    "TrellisError",
    "Undo",
    "UniqueConflict",
    "UnknownJobType",
    "ValidationError",
    "WorkerOptions",
    "connect",
    "connect_sync",
    "run_worker",
]

_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "trellis.client": ("BatchHandle", "JobHandle", "Trellis"),
        "trellis.engine.errors": (
            "ConcurrencyKeyMissing",
            "IdReserved",
            "IdempotencyMismatch",
            "InputError",
            "InvalidTransition",
            "JobCancelled",
            "JobDeadLettered",
            "JobEnded",
            "JobError",
            "JobFailed",
            "JobNotFound",
            "LeaseConflictError",
            "LedgerError",
            "LedgerUnavailable",
            "NotABatch",
            "NotAllowed",
            "OptionInvalid",
            "OutcomeUnknown",
            "PayloadInvalid",
            "PayloadTooLarge",
            "PermanentError",
            "ProcessCrashed",
            "QueueFull",
            "Refused",
            "ResourceFailed",
            "ResultInvalid",
            "SettingsInvalid",
            "SignalRefused",
            "TokenExpired",
            "TokenRefused",
            "TransientError",
            "TrellisError",
            "UniqueConflict",
            "UnknownJobType",
            "ValidationError",
        ),
        "trellis.engine.jobs": ("CancelMode", "Moved", "NotMoved", "Priority", "ReasonCode"),
        "trellis.operations.job_changes": ("ChangeFilter", "ChangeTotals"),
        "trellis.engine.records": ("DeadLetter", "Event", "FeedPage", "Job", "JobFilter", "Signal"),
        "trellis.engine.retry_policy": ("RetryPolicy",),
        "trellis.app.wiring": ("connect", "connect_sync", "run_worker"),
        "trellis.worker.app": ("App",),
        "trellis.worker.batches": ("BatchOutcome", "MemberOutcome"),
        "trellis.worker.context": ("Context", "Item", "SyncContext"),
        "trellis.worker.durable": (
            "ChildFailed",
            "ChildHandle",
            "FirstChild",
            "MemberFailed",
            "ReplayMismatch",
            "SignalTimeout",
            "DurableStepFailed",
        ),
        "trellis.worker.middleware": ("CallNext",),
        "trellis.worker.options": ("WorkerOptions",),
        "trellis.worker.outcomes": ("Snooze",),
        "trellis.worker.payloads": ("Serializer", "Undo"),
        "trellis.worker.process_child": ("ProcessContext",),
        "trellis.worker.requests": ("BatchJob",),
    }
)
"""Which module brings which names."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # type checkers would take every name for one that is here

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
