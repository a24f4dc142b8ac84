"""The inbox: a submitted entry is checked once and becomes one run, job or proposal (D51, JQ-12).

Invariants:
- An entry is a job of lifecycle `inbox-entry`. Its payload holds the verdict of the check, which is made once, before
  the entry is stored.
- An accepted entry creates its run or job under the idempotency key `inbox:<id>`, and a proposal under an id derived
  from the entry's. So settling it repeatedly or concurrently creates one. Of concurrent equal proposals one waits.
- An entry that cannot be served now, because its agent has too many waiting runs, stays pending. It is retried and
  expires when its time to live is over.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from trellis.agents.definition import ENTRY_ACTIONS, AgentDefinition
from trellis.agents.errors import AgentError
from trellis.documents import ids
from trellis.documents.errors import AgentNotRunnable, EntryNotFound, RunError, TooManyWaiting
from trellis.engine import tracing
from trellis.engine.errors import IdempotencyMismatch, InputError, NotAllowed, QueueFull
from trellis.engine.event_data import data_of
from trellis.engine.jobs import Actor, JobId, Mismatch, Move, NewJob, RequestId, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, IdempotencyKey, Job, JobFilter
from trellis.lifecycles import Role
from trellis.lifecycles.inbox_entry import INBOX_ENTRY
from trellis.proposals.proposal import ProposalSource
from trellis.proposals.service import ProposalOffer, ProposalService
from trellis.runs.orchestration import INBOX_KEY, OrchestrationLayer, TriggerKind
from trellis.storage.objects.canonical_json import encode, timestamp

TYPE = "inbox-entry"
RUN = "run"
JOB = "job"
ACTIONS = ENTRY_ACTIONS
RULES: Mapping[str, str] = MappingProxyType({RUN: "runs.trigger", JOB: "jobs.create"})
"""Rule that the sender needs for each action. A proposal changes nothing and needs only the right to use the inbox."""
KEY_SCOPE = "inbox"
ENTRY = b"entry"
"""The fingerprint of what an entry creates: its key is used for one request only."""
SETTLE_BATCH_MAX = 100
SETTLE_POLL_S = 5.0
SETTLED_EVENTS = ("inbox.processed", "inbox.rejected", "inbox.expired")
TRIGGERS: Mapping[str, TriggerKind] = MappingProxyType(
    {"cron": TriggerKind.CRON, "webhook": TriggerKind.EVENT, "agent": TriggerKind.EVENT}
)
"""Trigger kind of an entry's run, by the entry's source type. A person's entry is manual (RUN-9)."""
RELAYS: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        "cron": frozenset({Role.GATEWAY, Role.ORCHESTRATOR}),
        "webhook": frozenset({Role.GATEWAY}),
        "agent": frozenset({Role.GATEWAY, Role.ORCHESTRATOR, Role.AGENT_RUNTIME}),
    }
)
"""Roles that may relay an entry of each source type. An entry from any other sender counts as a person's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewInboxEntry:
    """A submitted entry. `identity` is the authenticated caller's, whatever the entry says."""

    id: JobId
    source_type: str
    identity: str
    at: datetime
    action: str
    target: str
    payload: Mapping[str, Any]
    correlation_id: str
    priority: str
    ttl_hours: float
    roles: frozenset[Role] = frozenset()
    """The sender's roles, from its token."""

    @property
    def is_relayed(self) -> bool:
        """Whether the sender has a role that may relay entries of this source type."""
        return not self.roles.isdisjoint(RELAYS.get(self.source_type, frozenset()))

    def to_dict(self) -> dict[str, Any]:
        """The entry in the form of D51."""
        return {
            "id": self.id,
            "source": {"type": self.source_type, "identity": self.identity, "timestamp": timestamp(self.at)},
            "intent": {"action": self.action, "target": self.target, "payload": dict(self.payload)},
            "metadata": {
                "correlation_id": self.correlation_id,
                "priority": self.priority,
                "ttl_hours": self.ttl_hours,
            },
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class InboxEntryState:
    """An entry and its outcome. `made` names what it created, `rejection` says why it created nothing."""

    entry: Mapping[str, Any]
    status: str
    created_at: datetime
    updated_at: datetime
    version: int
    made: Mapping[str, str] | None = None
    rejection: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InboxCounts:
    """Number of pending entries, and of entries settled today (UTC) by outcome."""

    pending: int
    processed_today: int
    rejected_today: int
    expired_today: int


@dataclass(frozen=True, kw_only=True)
class InboxService:
    """Accepts entries in the gateway's name.

    `new_job` builds the job that an entry asks for in its sender's name, or raises an InputError. Its last argument is the
    scope and the idempotency key under which the job is submitted, if it is.
    """

    ledger: Ledger
    gateway: Actor
    layer: OrchestrationLayer
    proposal_service: ProposalService
    new_job: Callable[[Mapping[str, Any], str, tuple[str, str] | None], Awaitable[NewJob]]

    async def submit(
        self, entry: NewInboxEntry, *, key: IdempotencyKey | None, fingerprint: bytes = b"", given: bool = False
    ) -> Submitted:
        """Check an entry and store it with the verdict; raises IdempotencyMismatch.

        A repeated key returns the first entry. `given` means that the sender chose the id, which then is a key as well.
        """
        refusal = await self._judge(entry)
        job = NewJob(
            job_id=entry.id,
            type=TYPE,
            lifecycle=INBOX_ENTRY.name,
            payload=encode({**entry.to_dict(), "refusal": refusal, "relayed": entry.is_relayed}),
            delay_s=entry.ttl_hours * 3600.0,
            idempotency_key=None if key is None else key.key,
            idempotency_scope="" if key is None else key.scope,
            fingerprint=fingerprint,
            id_is_given=given,
            correlation_id=entry.correlation_id,
            trace=tracing.here(),
        )
        (answer,) = await self.ledger.submit(self.gateway, [job])
        if isinstance(answer, Mismatch):
            raise IdempotencyMismatch(key=answer.key, job_id=answer.job_id)
        return answer

    async def settle(self, entry: JobId) -> InboxEntryState:
        """Do what the verdict says, once. Returns the entry's state afterwards. Raises EntryNotFound."""
        job = await self.found(entry)
        if job.state == "pending":
            with tracing.carried(job.trace, "inbox.settle", {"trellis.job_id": entry}):
                await self._settle(job)
        return await self.entry_state(entry)

    async def found(self, entry: str) -> Job:
        """The entry's job; raises EntryNotFound."""
        job = await self.ledger.job(JobId(entry))
        if job is None or job.lifecycle != INBOX_ENTRY.name or job.payload is None:
            raise EntryNotFound(entry=entry)
        return job

    async def entry_state(self, entry: str) -> InboxEntryState:
        """The entry's state; raises EntryNotFound."""
        job = await self.found(entry)
        return _entry_state(job, await self.ledger.events(job.job_id))

    async def entry_states(self, jobs: Sequence[Job]) -> list[InboxEntryState]:
        """The states of several entries, with one query in total. Entries removed meanwhile are left out."""
        contents = await self.ledger.contents_of([job.job_id for job in jobs]) if jobs else {}
        there = [(job, *contents[job.job_id]) for job in jobs if job.job_id in contents]
        return [_entry_state(replace(job, payload=payload), events) for job, payload, events in there]

    async def stats(self) -> InboxCounts:
        now = await self.ledger.now()
        midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        today = await self.ledger.count_events(SETTLED_EVENTS, since=midnight)
        depth = [queue.scheduled for queue in await self.ledger.queues() if queue.lifecycle == INBOX_ENTRY.name]
        return InboxCounts(
            pending=sum(depth),
            processed_today=today["inbox.processed"],
            rejected_today=today["inbox.rejected"],
            expired_today=today["inbox.expired"],
        )

    # --- the check ---------------------------------------------------------------------------------------------------

    async def _judge(self, entry: NewInboxEntry) -> dict[str, str] | None:
        """Why this entry is rejected, or None: action not allowed, target missing, or an equal proposal waits."""
        try:
            if entry.action == JOB:
                await self._job(entry.to_dict())
            elif entry.action == RUN:
                _refuse_trigger(
                    await self.proposal_service.agent(entry.target), entry.source_type, relayed=entry.is_relayed
                )
            else:
                offer = await self._offer(entry.to_dict())
                await self.proposal_service.check(offer)
                await self.proposal_service.refuse_duplicate(offer)
        except QueueFull:
            return None  # the entry stays pending until there is room
        except (AgentError, RunError, InputError, NotAllowed) as error:
            return {"code": error.code, "reason": str(error)}
        return None

    # --- settling ----------------------------------------------------------------------------------------------------

    async def _settle(self, job: Job) -> None:
        entry = json.loads(job.payload or b"{}")
        if entry["refusal"] is not None:
            await self._move(job.job_id, "rejected", {"rejection": entry["refusal"]})
            return
        try:
            outcome = await self._make(entry)
        except (TooManyWaiting, QueueFull):
            return
        except (AgentError, RunError, InputError, NotAllowed) as error:
            await self._move(job.job_id, "rejected", {"rejection": {"code": error.code, "reason": str(error)}})
            return
        await self._move(job.job_id, "processed", {"made": outcome})

    async def _make(self, entry: Mapping[str, Any]) -> dict[str, str]:
        key, intent = f"{INBOX_KEY}{entry['id']}", entry["intent"]
        if intent["action"] == RUN:
            kind = _trigger_kind(entry["source"]["type"], relayed=entry.get("relayed", False))
            run = await self.layer.trigger(
                intent["target"],
                intent["payload"],
                kind=kind,
                key=key,
                correlation_id=entry["metadata"]["correlation_id"],
            )
            return {"run_id": run.job_id}
        if intent["action"] == JOB:
            sender = Actor(role=self.gateway.role, name=entry["source"]["identity"])
            (job,) = await self.ledger.submit(sender, [await self._job(entry, key)])
            return {"job_id": job.job_id}
        proposal = ids.entry_proposal_id(entry["id"], datetime.fromisoformat(entry["source"]["timestamp"]))
        stored = await self.ledger.job(proposal)
        if stored is not None and stored.parent_id == entry["id"]:  # even if its target has changed since
            return {"proposal_id": proposal}
        return {"proposal_id": (await self.proposal_service.make_first(await self._offer(entry), proposal)).id}

    async def _job(self, entry: Mapping[str, Any], key: str | None = None) -> NewJob:
        asked_as = None if key is None else (KEY_SCOPE, key)
        job = await self.new_job(entry["intent"]["payload"], entry["source"]["identity"], asked_as)
        target = entry["intent"]["target"]
        if job.type != target:
            raise InputError(detail=f"the target is {target!r} and the job would be a {job.type!r}; name the same")
        return replace(
            job,
            idempotency_key=key,
            idempotency_scope=KEY_SCOPE,
            fingerprint=ENTRY,
            id_is_given=False,
            correlation_id=entry["metadata"]["correlation_id"],
            parent_id=JobId(entry["id"]),
        )

    async def _offer(self, entry: Mapping[str, Any]) -> ProposalOffer:
        slug, _, target = str(entry["intent"]["target"]).partition("/")
        await self.proposal_service.agent(slug)
        return ProposalOffer(
            agent_slug=slug,
            draft=await self.proposal_service.about_file(
                slug, entry["intent"]["action"], target, entry["intent"]["payload"]
            ),
            source=ProposalSource(
                type=entry["source"]["type"],
                identity=entry["source"]["identity"],
                run_id=None,
                inbox_entry_id=entry["id"],
            ),
            priority=entry["metadata"]["priority"],
            correlation_id=entry["metadata"]["correlation_id"],
        )

    async def _move(self, entry: JobId, target: str, facts: Mapping[str, Any]) -> None:
        data = json.dumps(facts, ensure_ascii=False).encode()
        request = RequestId(f"settle:{entry}")
        await self.ledger.move(self.gateway, Move(job_id=entry, target=target, request_id=request, data=data))


@dataclass(frozen=True, kw_only=True, slots=True)
class InboxReport:
    """Result of one pass."""

    settled: int = 0
    more: bool = False


@dataclass(kw_only=True)
class InboxSettler:
    """The service: settles entries that a gateway left pending, because it died or because there was no room."""

    inbox: InboxService
    name: str = "inbox-keeper"
    _cursor: str | None = None

    async def run_once(self) -> InboxReport:
        """Settle one page of the pending entries, all pages in turn."""
        where = JobFilter(lifecycle=INBOX_ENTRY.name, state="pending")
        page = await self.inbox.ledger.jobs(where, limit=SETTLE_BATCH_MAX, cursor=self._cursor)
        self._cursor = page.cursor
        standings = [await self.inbox.settle(job.job_id) for job in page.jobs]
        return InboxReport(settled=sum(one.status != "pending" for one in standings), more=page.cursor is not None)

    def pause_s(self, report: InboxReport) -> float:
        """No pause while there are more pages."""
        return 0.0 if report.more else SETTLE_POLL_S


def _trigger_kind(source: str, *, relayed: bool) -> TriggerKind:
    """The trigger kind of an entry's run. The entry's own source type counts only if it was relayed."""
    return TRIGGERS.get(source, TriggerKind.MANUAL) if relayed else TriggerKind.MANUAL


def _refuse_trigger(agent: AgentDefinition, source: str, *, relayed: bool) -> None:
    """Raise AgentNotRunnable if the agent has no manual trigger and no trigger of the entry's kind."""
    own = {"cron": agent.triggers.cron is not None, "webhook": bool(agent.triggers.events)}.get(source, False)
    if source in TRIGGERS and not agent.triggers.manual and not (own and relayed):
        why = "it names no trigger for" if relayed else "the sender has no role that passes on"
        reason = f"its file says `triggers.manual: false`, and {why} an entry of {source}"
        raise AgentNotRunnable(slug=agent.slug, reason=reason)


def _entry_state(job: Job, events: Sequence[Event]) -> InboxEntryState:
    entry = json.loads(job.payload or b"{}")
    del entry["refusal"]
    entry.pop("relayed", None)
    last = data_of(events[-1])
    return InboxEntryState(
        entry=entry,
        status=job.state,
        created_at=job.created_at,
        updated_at=job.updated_at,
        version=job.version,
        made=last.get("made"),
        rejection=last.get("rejection"),
    )
