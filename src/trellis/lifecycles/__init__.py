"""The eight lifecycles as data, and pure functions over them. Imports nothing else of Trellis."""

from trellis.lifecycles.events import EVENT_TYPES, REMARK_TYPES, SIGNAL_TYPES, event_code, event_name
from trellis.lifecycles.lifecycle import (
    Illegal,
    LeaseLoss,
    Lifecycle,
    Phase,
    Progress,
    Role,
    State,
    Transition,
    Trigger,
    next_state,
    progress,
)
from trellis.lifecycles.registry import BY_CODE, LIFECYCLES

__all__ = [
    "BY_CODE",
    "EVENT_TYPES",
    "LIFECYCLES",
    "REMARK_TYPES",
    "SIGNAL_TYPES",
    "Illegal",
    "LeaseLoss",
    "Lifecycle",
    "Phase",
    "Progress",
    "Role",
    "State",
    "Transition",
    "Trigger",
    "event_code",
    "event_name",
    "next_state",
    "progress",
]
