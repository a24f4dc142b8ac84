"""The eight lifecycles as data, and pure functions over them. Imports nothing else of Trellis."""

from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.events import EVENT_TYPES, REMARK_TYPES, SIGNAL_TYPES, event_code, event_name
from trellis.lifecycles.inbox_entry import INBOX_ENTRY
from trellis.lifecycles.leased_job import LEASED_JOB
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
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN

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

LIFECYCLES: dict[str, Lifecycle] = {
    lifecycle.name: lifecycle
    for lifecycle in (RUN, QUEUE_JOB, NLM_JOB, LEASED_JOB, BUS_JOB, PROPOSAL, INBOX_ENTRY, ARTIFACT)
}

BY_CODE: dict[int, Lifecycle] = {lifecycle.code: lifecycle for lifecycle in LIFECYCLES.values()}
