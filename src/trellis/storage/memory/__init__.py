"""Agent memory: what an agent knows between its runs, kept in git and changed by applied proposals only."""

from trellis.storage.memory.layout import DeepPart, ReadMode, TokenCounter, count_tokens
from trellis.storage.memory.records import (
    AlreadyApplied,
    ChangeKind,
    Committed,
    DeepItem,
    DeepView,
    FileChange,
    HistoryEntry,
    HistoryPage,
    MemoryView,
    Verified,
    VersionConflict,
)
from trellis.storage.memory.repository import MemoryRepository, open_memory
from trellis.storage.memory.updates import Applied, Operation, Problem, ProblemCode, Rejected, Update, apply_updates

__all__ = [
    "AlreadyApplied",
    "Applied",
    "ChangeKind",
    "Committed",
    "DeepItem",
    "DeepPart",
    "DeepView",
    "FileChange",
    "HistoryEntry",
    "HistoryPage",
    "MemoryRepository",
    "MemoryView",
    "Operation",
    "Problem",
    "ProblemCode",
    "ReadMode",
    "Rejected",
    "TokenCounter",
    "Update",
    "Verified",
    "VersionConflict",
    "apply_updates",
    "count_tokens",
    "open_memory",
]
