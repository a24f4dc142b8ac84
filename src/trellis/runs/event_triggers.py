"""Event triggers: runs of the agents whose files name an event in `triggers.events` (RUN-9, D24, D71).

A subscriber of the feed begins them, one process at a time. Invariants:

- An event begins one run of each agent that names it. The run has the idempotency key `event:{event id}:{agent}`, in a
  scope that no caller can use.
- An agent is never begun by what its own runs caused. Each run that an event began carries the agents of the runs that
  led to it and their number (`runs/trigger_chain.py`), so a chain of runs that begin each other ends.
- An event that begins no run of an agent that names it leaves the administrative act `trigger.skipped` with the reason.
- Events from before the first subscription begin nothing. Its position is stored with it, so that none after it is
  lost if that process dies at once.
- Events of jobs and runs are read from the feed only while an agent names such an event.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trellis.agents.catalog import Catalog
from trellis.agents.definition import AgentDefinition, EventTrigger, TriggerEvent
from trellis.agents.errors import AgentError
from trellis.documents.errors import RunError
from trellis.documents.run_documents import RunRequest
from trellis.engine.admin_acts import NewAct
from trellis.engine.errors import InputError
from trellis.engine.jobs import CORRELATION_PATTERN
from trellis.engine.logs import log_of
from trellis.engine.records import Event, Job
from trellis.engine.subscription import FeedReport, FeedSubscriber, SubscriptionOptions
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.inbox_entry import INBOX_ENTRY
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN
from trellis.runs.orchestration import EVENT_KEY, OrchestrationLayer, TriggerKind
from trellis.runs.trigger_chain import TriggerOrigin, entry_of, origin_of
from trellis.storage.objects.canonical_json import sha256

SUBSCRIBER_NAME = "event-triggers"
SKIPPED = "trigger.skipped"
TRIGGER_OF_EVENT = MappingProxyType(
    {
        "inbox.received": TriggerEvent.INBOX_ITEM_CREATED,
        "proposal.applied": TriggerEvent.PROPOSAL_APPLIED,
        "run.completed": TriggerEvent.RUN_COMPLETED,
        "run.failed": TriggerEvent.RUN_FAILED,
    }
)
"""The word in an agent's file, by the type of the ledger's event. Ends of jobs have several types (`_is_job_end`)."""
JOB_LIFECYCLES = frozenset({LEASED_JOB.name, QUEUE_JOB.name})
"""The lifecycles of the jobs whose end is `job.ended`."""
ALWAYS_READ = frozenset({INBOX_ENTRY.name, PROPOSAL.name})
READ_WHEN_NAMED = MappingProxyType(
    {
        TriggerEvent.JOB_ENDED: JOB_LIFECYCLES,
        TriggerEvent.RUN_COMPLETED: frozenset({RUN.name}),
        TriggerEvent.RUN_FAILED: frozenset({RUN.name}),
    }
)
"""The lifecycles that are read from the feed while an agent names the event."""

_log = log_of("trellis.event_triggers")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventTriggerOptions(SubscriptionOptions):
    """Settings of the subscriber."""

    batch: int = 100
    lease_s: float = 15.0
    poll_s: float = 0.5
    agents_s: float = 30.0
    """Longest time until the first `job.ended`, `run.completed` or `run.failed` of an agent's file is noticed."""
    standby_tries: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class EventTriggerReport(FeedReport):
    """Result of one pass: the runs that began, and how many triggers were skipped."""

    runs: tuple[str, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Occurrence:
    """An event of the feed that agents may name: what they call it, what it is about, and that job as it is now."""

    event: Event
    trigger: TriggerEvent
    of: str | None
    job: Job | None

    @property
    def params(self) -> dict[str, Any]:
        """What a run is told about the event."""
        about = {"event": self.trigger.value, "event_id": self.event.id, "job_id": self.event.job_id}
        match self.trigger:
            case TriggerEvent.JOB_ENDED:
                return {**about, "type": self.of, "status": self.event.target}
            case TriggerEvent.RUN_COMPLETED | TriggerEvent.RUN_FAILED:
                return {**about, "agent": self.of, "status": self.event.target}
            case _:
                return about

    def is_named_by(self, agent: AgentDefinition) -> bool:
        return any(one.event is self.trigger and one.of in (None, self.of) for one in agent.triggers.events)


@dataclass(kw_only=True)
class EventTriggers(FeedSubscriber[EventTriggerOptions]):
    """Begins the runs of event triggers."""

    catalog: Catalog
    layer: OrchestrationLayer
    options: EventTriggerOptions = field(default_factory=EventTriggerOptions)
    name: str = SUBSCRIBER_NAME
    follows_as: str = SUBSCRIBER_NAME
    lifecycle: str | frozenset[str] | None = ALWAYS_READ
    _named: frozenset[EventTrigger] = frozenset()
    """What the agents named when they were last read. It decides which lifecycles and which jobs are looked at."""
    _named_until: float = 0.0

    async def run_once(self) -> EventTriggerReport:
        """Handle one page of events. After an error the next pass starts from the same position."""
        if not self.follows:
            end = await self.ledger.feed_end()  # read first: an event after the subscription is never before this end
            if await self.begin(first=end):
                self._named_until = 0.0
        if self.follows and self.clock.monotonic() >= self._named_until:
            self._note_named(await self._agents())
        runs: list[str] = []
        skipped = 0

        async def handle(events: Sequence[Event]) -> None:
            nonlocal skipped
            occurred = await self._occurrences(events)
            agents = await self._agents() if occurred else []
            for one in occurred:
                named_by = [agent.slug for agent in agents if one.is_named_by(agent)]
                origin = await origin_of(self.ledger, one.job) if named_by else TriggerOrigin()
                for slug in named_by:
                    run_id = await self._trigger(one, slug, origin)
                    runs.extend([] if run_id is None else [run_id])
                    skipped += run_id is None
                await self.keep()

        done = await self.take(handle)
        return EventTriggerReport(
            following=done.following, events=done.events, held_up=done.held_up, runs=tuple(runs), skipped=skipped
        )

    async def _agents(self) -> list[AgentDefinition]:
        listed = (await self.catalog.list()).agents
        return [agent for agent in listed if isinstance(agent, AgentDefinition) and agent.triggers.events]

    def _note_named(self, agents: Iterable[AgentDefinition]) -> None:
        """Read from the feed, from now on, what these agents need."""
        self._named = frozenset(one for agent in agents for one in agent.triggers.events)
        needed = (READ_WHEN_NAMED.get(one.event, frozenset[str]()) for one in self._named)
        self.lifecycle = ALWAYS_READ.union(*needed)
        self._named_until = self.clock.monotonic() + self.options.agents_s

    async def _occurrences(self, events: Sequence[Event]) -> list[_Occurrence]:
        """Those of these events that an agent may name. Jobs are read only if their type is named, runs if an agent is."""
        types = {one.of for one in self._named if one.event is TriggerEvent.JOB_ENDED}
        ends = [event for event in events if types and _is_job_end(event)]
        type_of = {one.event.id: one.type for one in await self.ledger.recorded(ends)}
        words = {one.event for one in self._named if one.event in READ_WHEN_NAMED}
        occurred: list[_Occurrence] = []
        for event in events:
            trigger = TRIGGER_OF_EVENT.get(event.type)
            if trigger is not None and (event.lifecycle in ALWAYS_READ or trigger in words):
                job = await self.ledger.job(event.job_id)
                occurred.append(_Occurrence(event=event, trigger=trigger, of=_about(job), job=job))
            elif (type_ := type_of.get(event.id)) in types and type_ is not None:
                job = await self.ledger.job(event.job_id)
                occurred.append(_Occurrence(event=event, trigger=TriggerEvent.JOB_ENDED, of=type_, job=job))
        return occurred

    async def _trigger(self, occurred: _Occurrence, slug: str, origin: TriggerOrigin) -> str | None:
        """Begin the run of an agent for an event. None if it was skipped, which is recorded."""
        event = occurred.event
        correlation_id = event.correlation_id  # of a job it may be any text, of a run not
        reason = _refusal(slug, occurred.job, origin)
        if reason is None:
            params = {**occurred.params, **origin.params}
            try:
                run = await self.layer.trigger(
                    slug,
                    params,
                    kind=TriggerKind.EVENT,
                    key=f"{EVENT_KEY}{event.id}:{slug}",
                    correlation_id=correlation_id if re.fullmatch(CORRELATION_PATTERN, correlation_id) else None,
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
            id=f"skipped-{sha256(f'{event.id} {slug}'.encode())[:32]}-agent",  # a job id may be no part of an act's id
        )
        await self.ledger.record_act(self.actor, act)
        _log.warning("event_trigger_skipped", agent=slug, event_id=event.id, reason=reason)


def _is_job_end(event: Event) -> bool:
    """Whether this is the end of a job's work: from a state in which it goes on to one in which it does not (D71)."""
    if event.lifecycle not in JOB_LIFECYCLES:
        return False
    lifecycle = LIFECYCLES[event.lifecycle]
    was_over = event.source is not None and lifecycle.is_settled(event.source)
    return lifecycle.is_settled(event.target) and not was_over


def _about(job: Job | None) -> str | None:
    """What narrows an event of this job: the action of an inbox entry, or the agent of a run."""
    if job is None:
        return None
    if job.lifecycle == RUN.name:
        return RunRequest.read(job.payload).agent_slug if job.payload else None
    intent: dict[str, Any] = entry_of(job).get("intent") or {}
    return intent.get("action")


def _refusal(slug: str, job: Job | None, origin: TriggerOrigin) -> str | None:
    """Why an event begins no run of this agent; None if it may."""
    if job is None:
        return "what the event is about was removed"
    if (reason := origin.refusal(slug)) is not None:
        return reason
    entry = entry_of(job)
    if entry.get("refusal"):
        return "the inbox refused the entry"
    intent: dict[str, Any] = entry.get("intent") or {}
    if intent.get("action") == "run" and intent.get("target") == slug:
        return "the entry itself asks for a run of this agent"
    return None
