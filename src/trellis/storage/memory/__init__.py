"""Agent memory: an agent's knowledge between its runs, kept in git. Only applied proposals change it."""

from trellis.storage.memory.layout import (
    AlreadyApplied,
    ChangeKind,
    Committed,
    CommittedFileChange,
    DeepItem,
    DeepPart,
    DeepView,
    HistoryEntry,
    HistoryPage,
    MemoryView,
    ReadMode,
    TokenCounter,
    VersionConflict,
    count_tokens,
)
from trellis.storage.memory.repository import MemoryRepository, open_memory
from trellis.storage.memory.updates import (
    AppliedUpdates,
    Operation,
    ProblemCode,
    RejectedUpdates,
    Update,
    UpdateProblem,
    apply_updates,
)

__all__ = [
    "AlreadyApplied",
    "AppliedUpdates",
    "ChangeKind",
    "Committed",
    "CommittedFileChange",
    "DeepItem",
    "DeepPart",
    "DeepView",
    "HistoryEntry",
    "HistoryPage",
    "MemoryRepository",
    "MemoryView",
    "Operation",
    "ProblemCode",
    "ReadMode",
    "RejectedUpdates",
    "TokenCounter",
    "Update",
    "UpdateProblem",
    "VersionConflict",
    "apply_updates",
    "count_tokens",
    "open_memory",
]
