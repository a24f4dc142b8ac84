"""The eight lifecycles by name."""

from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.inbox_entry import INBOX_ENTRY
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.lifecycle import Lifecycle
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN

LIFECYCLES: dict[str, Lifecycle] = {
    lifecycle.name: lifecycle
    for lifecycle in (RUN, QUEUE_JOB, NLM_JOB, LEASED_JOB, BUS_JOB, PROPOSAL, INBOX_ENTRY, ARTIFACT)
}

BY_CODE: dict[int, Lifecycle] = {lifecycle.code: lifecycle for lifecycle in LIFECYCLES.values()}
