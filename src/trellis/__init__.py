"""Trellis: a durable job engine, and an execution platform for agents with a human in control."""

from trellis.client import JobHandle, Trellis
from trellis.engine.errors import (
    JobCancelled,
    JobDeadLettered,
    JobFailed,
    LeaseConflictError,
    NotAllowed,
    PermanentError,
    TokenExpired,
    TokenRefused,
    TransientError,
    TrellisError,
    ValidationError,
)
from trellis.engine.jobs import Priority
from trellis.engine.retries import RetryPolicy
from trellis.wiring import connect, connect_sync, run_worker
from trellis.worker.app import App
from trellis.worker.context import Context, Item, SyncContext
from trellis.worker.options import WorkerOptions
from trellis.worker.outcomes import Snooze
from trellis.worker.payloads import Undo

__all__ = [
    "App",
    "Context",
    "Item",
    "JobCancelled",
    "JobDeadLettered",
    "JobFailed",
    "JobHandle",
    "LeaseConflictError",
    "NotAllowed",
    "PermanentError",
    "Priority",
    "RetryPolicy",
    "Snooze",
    "SyncContext",
    "TokenExpired",
    "TokenRefused",
    "TransientError",
    "Trellis",
    "TrellisError",
    "Undo",
    "ValidationError",
    "WorkerOptions",
    "connect",
    "connect_sync",
    "run_worker",
]
