"""The chain of runs that begin each other through events, and its end (RUN-9, D71).

Invariants:

- An agent is never begun by what its own runs caused: directly, or through other runs, jobs and inbox entries.
- At most CHAIN_MAX runs begin each other through events. A run that an event began carries in its parameters the agents
  of the runs that led to it (`chain`, oldest first) and its number in the chain (`depth`, from 1).
"""

import json
from dataclasses import dataclass
from typing import Any, cast

from trellis.documents.run_documents import RunRequest
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter
from trellis.lifecycles.inbox_entry import INBOX_ENTRY
from trellis.lifecycles.run import RUN
from trellis.runs.orchestration import INBOX_KEY, TriggerKind

CHAIN_MAX = 5
"""The most runs that may begin each other through events."""
ANCESTORS_MAX = 50
"""The most parents of a job that are looked at to find the run that caused it."""
CHAIN_RUNS_MAX = 100
"""The most runs of one correlation id that are looked at to find the depth of a chain."""


@dataclass(frozen=True, slots=True)
class TriggerOrigin:
    """The runs that led to an event: their agents, oldest first, and how many of the runs an event began."""

    agents: tuple[str, ...] = ()
    depth: int = 0

    @property
    def params(self) -> dict[str, Any]:
        """The parameters with which a run that the event begins continues the chain."""
        return {"depth": self.depth + 1, "chain": list(self.agents)}

    def refusal(self, slug: str) -> str | None:
        """Why the event begins no run of this agent; None if the chain may go on with it."""
        if slug in self.agents:
            return "a run of the same agent led to the event; it would go on for ever"
        if self.depth >= CHAIN_MAX:
            return f"it would be run {self.depth + 1} of a chain that events began, and {CHAIN_MAX} is the limit"
        return None


async def origin_of(ledger: Ledger, job: Job | None) -> TriggerOrigin:
    """The runs behind a job: it is one, or its parents lead to one or to an entry that an agent put into the inbox.

    Beyond ANCESTORS_MAX parents the chain counts as full.
    """
    after: tuple[str, ...] = ()  # the agents of runs that entries of the inbox began, between the origin and here
    for _ in range(ANCESTORS_MAX):
        if job is None:
            return TriggerOrigin(after)
        parent_id = job.parent_id
        if job.lifecycle == RUN.name:
            origin = _origin_of_run(job)
            parent_id = None if origin.depth else await _entry_of_run(ledger, job)
            if parent_id is None:
                return TriggerOrigin(origin.agents + after, origin.depth + len(after))
            after = origin.agents + after
        elif _is_of_agent(job):
            behind = await _origin_by_correlation(ledger, job)
            return TriggerOrigin(behind.agents + after, behind.depth + len(after))
        job = None if parent_id is None else await ledger.job(parent_id)
    return TriggerOrigin(after, CHAIN_MAX)


async def _entry_of_run(ledger: Ledger, run: Job) -> JobId | None:
    """The inbox entry that asked for this run, by the idempotency key under which the inbox begins runs."""
    recorded = await ledger.recorded((await ledger.events(run.job_id))[:1])
    keys = [key.key for one in recorded if one.submission is not None for key in one.submission.keys]
    return next((JobId(key.removeprefix(INBOX_KEY)) for key in keys if key.startswith(INBOX_KEY)), None)


async def _origin_by_correlation(ledger: Ledger, entry: Job) -> TriggerOrigin:
    """The runs with the correlation id of an agent's entry: nothing says which of them sent it, so all count."""
    where = JobFilter(lifecycle=RUN.name, correlation_id=entry.correlation_id)
    runs = (await ledger.jobs(where, limit=CHAIN_RUNS_MAX)).jobs
    earlier = [await ledger.job(run.job_id) for run in runs if run.created_at <= entry.created_at]
    origins = [_origin_of_run(run) for run in earlier if run is not None]
    agents = dict.fromkeys(agent for origin in reversed(origins) for agent in origin.agents)
    return TriggerOrigin(tuple(agents), max((origin.depth for origin in origins), default=0))


def entry_of(job: Job) -> dict[str, Any]:
    """The inbox entry that a job stands for; empty for other jobs."""
    return json.loads(job.payload or b"{}") if job.lifecycle == INBOX_ENTRY.name else {}


def _is_of_agent(job: Job) -> bool:
    source: dict[str, Any] = entry_of(job).get("source") or {}
    return source.get("type") == "agent"


def _origin_of_run(run: Job) -> TriggerOrigin:
    """What a run says of itself. Only a run that an event began has a depth."""
    if run.payload is None:
        return TriggerOrigin()
    request = RunRequest.read(run.payload)
    depth = request.params.get("depth") if request.trigger == TriggerKind.EVENT else 0
    if not isinstance(depth, int) or depth < 1:
        return TriggerOrigin((request.agent_slug,))
    chain: object = request.params.get("chain")  # absent in a run that an older version began
    led = [one for one in cast("list[object]", chain) if isinstance(one, str)] if isinstance(chain, list) else []
    return TriggerOrigin((*led, request.agent_slug), depth)
