"""Event triggers: runs of the agents whose files name an event in `triggers.events` (RUN-9, D24).

A subscriber of the feed begins them, one process at a time. Invariants:

- An event begins one run of each agent that names it. The run has the idempotency key `event:{event id}:{agent}`, in a
  scope that no caller can use.
- A chain of runs that begin each other through events ends: each run carries its depth, at most CHAIN_MAX, and a run
  that an event began never begins another run of the same agent.
- An event that begins no run of an agent that names it leaves the administrative act `trigger.skipped` with the reason.
- Events from before the first subscription begin nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trellis.agents.catalog import Catalog
from trellis.agents.definition import AgentDefinition, TriggerEvent
from trellis.agents.errors import AgentError
from trellis.documents.errors import RunError
from trellis.documents.run_documents import RunRequest
from trellis.engine.admin_acts import NewAct
from trellis.engine.errors import InputError
from trellis.engine.jobs import JobId
from trellis.engine.logs import log_of
from trellis.engine.records import Event, Job, JobFilter
from trellis.engine.subscription import FeedReport, FeedSubscriber, SubscriptionOptions
from trellis.lifecycles.inbox_entry import INBOX_ENTRY
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.run import RUN
from trellis.runs.orchestration import EVENT_KEY, OrchestrationLayer, TriggerKind

SUBSCRIBER_NAME = "event-triggers"
CHAIN_MAX = 5
"""The most runs that may begin each other through events."""
SKIPPED = "trigger.skipped"
TRIGGER_OF_EVENT = MappingProxyType(
    {"inbox.received": TriggerEvent.INBOX_ITEM_CREATED, "proposal.applied": TriggerEvent.PROPOSAL_APPLIED}
)
"""The word in an agent's file, by the type of the ledger's event."""
CHAIN_RUNS_MAX = 100
"""The most runs of one correlation id that are looked at to find the depth of a chain."""

_log = log_of("trellis.event_triggers")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventTriggerOptions(SubscriptionOptions):
    """Settings of the subscriber."""

    batch: int = 100
    lease_s: float = 15.0
    poll_s: float = 0.5
    standby_tries: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class EventTriggerReport(FeedReport):
    """Result of one pass: the runs that began, and how many triggers were skipped."""

    runs: tuple[str, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class _Origin:
    """The run that an event comes from, as far as it matters for a chain: its agent and its depth."""

    agent: str | None = None
    depth: int = 0


@dataclass(kw_only=True)
class EventTriggers(FeedSubscriber[EventTriggerOptions]):
    """Begins the runs of event triggers."""

    catalog: Catalog
    layer: OrchestrationLayer
    options: EventTriggerOptions = field(default_factory=EventTriggerOptions)
    name: str = SUBSCRIBER_NAME
    follows_as: str = SUBSCRIBER_NAME
    lifecycle: str | frozenset[str] | None = frozenset({INBOX_ENTRY.name, PROPOSAL.name})

    async def run_once(self) -> EventTriggerReport:
        """Handle one page of events. After an error the next pass starts from the same position."""
        if not self.follows and await self.begin() and self.saved is None:
            await self.remember(await self.ledger.feed_end())
        runs: list[str] = []
        skipped = 0

        async def handle(events: Sequence[Event]) -> None:
            nonlocal skipped
            wanted = [event for event in events if event.type in TRIGGER_OF_EVENT]
            agents = await self._agents() if wanted else []
            for event in wanted:
                for agent in agents:
                    if TRIGGER_OF_EVENT[event.type] in agent.triggers.events:
                        run_id = await self._trigger(event, agent.slug)
                        runs.extend([] if run_id is None else [run_id])
                        skipped += run_id is None

        done = await self.take(handle)
        return EventTriggerReport(
            following=done.following, events=done.events, held_up=done.held_up, runs=tuple(runs), skipped=skipped
        )

    async def _agents(self) -> list[AgentDefinition]:
        listed = (await self.catalog.list()).agents
        return [agent for agent in listed if isinstance(agent, AgentDefinition) and agent.triggers.events]

    async def _trigger(self, event: Event, slug: str) -> str | None:
        """Begin the run of an agent for an event. None if it was skipped, which is recorded."""
        job = await self.ledger.job(event.job_id)
        origin = await self._origin(event, job)
        reason = _refusal(slug, job, origin)
        if reason is None:
            params = {
                "event": TRIGGER_OF_EVENT[event.type].value,
                "event_id": event.id,
                "job_id": event.job_id,
                "depth": origin.depth + 1,
            }
            try:
                run = await self.layer.trigger(
                    slug,
                    params,
                    kind=TriggerKind.EVENT,
                    key=f"{EVENT_KEY}{event.id}:{slug}",
                    correlation_id=event.correlation_id,
                )
            except (AgentError, RunError, InputError) as error:
                reason = str(error)
            else:
                _log.info("event_triggered", agent=slug, event_id=event.id, run_id=run.job_id)
                return run.job_id
        await self._record_skip(event, slug, reason)
        return None

    async def _record_skip(self, event: Event, slug: str, reason: str) -> None:
        act = NewAct(
            event=SKIPPED,
            subject=slug,
            cause=reason,
            correlation_id=event.correlation_id,
            job_id=event.job_id,
            id=f"{event.id}-{slug}-agent",
        )
        await self.ledger.record_act(self.actor, act)
        _log.warning("event_trigger_skipped", agent=slug, event_id=event.id, reason=reason)

    async def _origin(self, event: Event, job: Job | None) -> _Origin:
        """The run behind a proposal, or the deepest one behind an entry that an agent put into the inbox."""
        if job is None:
            return _Origin()
        if job.parent_id is not None:
            return _origin_of(await self.ledger.job(JobId(job.parent_id)))
        if not _is_of_agent(job):
            return _Origin()
        where = JobFilter(lifecycle=RUN.name, correlation_id=event.correlation_id)
        runs = (await self.ledger.jobs(where, limit=CHAIN_RUNS_MAX)).jobs
        origins = [_origin_of(await self.ledger.job(run.job_id)) for run in runs]
        return max(origins, key=lambda origin: origin.depth, default=_Origin())


def _refusal(slug: str, job: Job | None, origin: _Origin) -> str | None:
    """Why an event begins no run of this agent; None if it may."""
    if job is None:
        return "what the event is about was removed"
    if origin.depth and origin.agent == slug:
        return "the event comes from a run of the same agent that an event began; it would go on for ever"
    if origin.depth >= CHAIN_MAX:
        return f"it would be run {origin.depth + 1} of a chain that events began, and {CHAIN_MAX} is the limit"
    entry = _entry(job)
    if entry.get("refusal"):
        return "the inbox refused the entry"
    intent: dict[str, Any] = entry.get("intent") or {}
    if intent.get("action") == "run" and intent.get("target") == slug:
        return "the entry itself asks for a run of this agent"
    return None


def _entry(job: Job) -> dict[str, Any]:
    """The inbox entry that a job stands for; empty for other jobs."""
    return json.loads(job.payload or b"{}") if job.lifecycle == INBOX_ENTRY.name else {}


def _is_of_agent(job: Job) -> bool:
    source: dict[str, Any] = _entry(job).get("source") or {}
    return source.get("type") == "agent"


def _origin_of(run: Job | None) -> _Origin:
    if run is None or run.lifecycle != RUN.name or run.payload is None:
        return _Origin()
    request = RunRequest.read(run.payload)
    depth = request.params.get("depth") if request.trigger == TriggerKind.EVENT else 0
    return _Origin(request.agent_slug, depth if isinstance(depth, int) else 0)
