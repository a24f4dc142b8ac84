"""The interface of an orchestration layer, and the built-in layer (PIPE-1, PIPE-2, PIPE-3, D13, D17, D25).

A layer is replaceable: it takes triggers, reports the state of runs, cancels them, and keeps schedules. With any layer
the ledger decides and status.json shows the result; the layer's own memory is never authoritative. `tests/layers` runs
the same tests against every layer.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from trellis.agents.catalog import AgentMissing, Catalog
from trellis.agents.definition import AgentDefinition, AgentMalformed
from trellis.documents import audit, ids, run_documents
from trellis.documents.errors import AgentNotRunnable, CronInvalid, DocumentDiffers, RunNotFound, TooManyWaiting
from trellis.documents.publisher import DocumentPublisher
from trellis.documents.run_documents import Publication, RunFacts, RunRequest
from trellis.engine import tracing
from trellis.engine.cron import EXPECTED as CRON_EXPECTED
from trellis.engine.cron import cron_problem
from trellis.engine.errors import IdempotencyMismatch, LedgerError, OptionInvalid, QueueFull
from trellis.engine.jobs import (
    CANCEL_GRACE_S_DEFAULT,
    CORRELATION_PATTERN,
    Actor,
    CancelMode,
    CancelRequested,
    JobId,
    Mismatch,
    Moved,
    NewJob,
    NotMoved,
    RequestId,
    RequestKey,
    Submitted,
)
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event, Job, JobFilter
from trellis.lifecycles.run import RUN
from trellis.runs.agent_status import run_key, why_not_runnable
from trellis.runs.orchestrator import TYPE, accept
from trellis.runs.timetable import Schedule, Timetable
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.store import StoreUnavailable

WAITING_MAX = 100
WAITING_STATES = ("queued", "requested")
KEY_SCOPE = "runs"
CRON_SCOPE = "schedules"
"""Idempotency scope of runs that a clock or an event trigger began. No caller's key can be in it."""
EVENT_KEY = "event:"
"""Prefix of the idempotency keys of runs that an event trigger began."""
INBOX_KEY = "inbox:"
"""Prefix of the idempotency keys of what an inbox entry asked for; the entry's id follows."""

_log = log_of("trellis.runs")


class TriggerKind(StrEnum):
    """What started a run."""

    MANUAL = "manual"
    CRON = "cron"
    EVENT = "event"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The state of a run. `position` counts the agent's runs that start before it; None once the run has started."""

    run_id: JobId
    agent_slug: str
    status: str
    steps_completed: int
    position: int | None


@dataclass(frozen=True, slots=True)
class LayerHealth:
    """Whether the layer would accept a trigger now."""

    healthy: bool
    vendor: str


class OrchestrationLayer(Protocol):
    """The adapter that gateway and command line use to reach an orchestration layer."""

    def acting_as(self, gateway: Actor) -> "OrchestrationLayer":
        """The same layer, whose triggers are recorded in this actor's name."""
        ...

    async def trigger(
        self,
        agent_slug: str,
        params: Mapping[str, Any],
        *,
        kind: TriggerKind,
        key: str | None = None,
        retry_of: str | None = None,
        correlation_id: str | None = None,
    ) -> Submitted:
        """Start a run and return its id.

        The same `key` again returns the same run, which is then not `created`. `retry_of` goes into its manifest (D20).

        `correlation_id` comes from the caller: the run's events and proposals carry it. Without one it is the run's id.

        Raises AgentNotRunnable, TooManyWaiting, and IdempotencyMismatch for a key that was used with another request.
        """
        ...

    async def run_state(self, run_id: JobId) -> RunState:
        """The run's state; raises RunNotFound."""
        ...

    async def cancel(
        self,
        run_id: JobId,
        *,
        mode: CancelMode,
        request_id: RequestId,
        cause: str | None,
        key: RequestKey | None = None,
    ) -> str:
        """Request cancellation. Returns the state after that, which for a soft cancel may still be `running`."""
        ...

    async def register_schedule(self, agent_slug: str, cron: str | None) -> None:
        """Start a run at every instant of the cron expression from now on, in UTC; None removes the schedule.

        Registering the same expression again changes nothing. Raises CronInvalid.
        """
        ...

    async def schedules(self) -> list[Schedule]:
        """The registered schedules, by agent."""
        ...

    async def health(self) -> LayerHealth:
        """Whether the layer responds."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuiltinLayer:
    """The built-in layer: runs are jobs in the ledger.

    Orchestrator processes claim them and fire what the timetable says.
    """

    ledger: Ledger
    gateway: Actor
    orchestrator: Actor
    catalog: Catalog
    publisher: DocumentPublisher
    timetable: Timetable
    random_text: Callable[[], str]
    waiting_max: int = WAITING_MAX
    cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT
    """How long a run may go on after a soft cancel before it is ended (D19)."""

    def acting_as(self, gateway: Actor) -> "BuiltinLayer":
        return replace(self, gateway=gateway)

    async def trigger(
        self,
        agent_slug: str,
        params: Mapping[str, Any],
        *,
        kind: TriggerKind,
        key: str | None = None,
        retry_of: str | None = None,
        correlation_id: str | None = None,
    ) -> Submitted:
        """Check the agent, store the run, publish `requested`, and queue the run. A refused trigger stores nothing."""
        if correlation_id is not None and not re.fullmatch(CORRELATION_PATTERN, correlation_id):
            expected = "1 to 100 letters, digits, or . _ : -"
            raise OptionInvalid(option="correlation_id", value=correlation_id[:100], expected=expected)
        request = RunRequest(agent_slug, kind.value, dict(params), retry_of)
        fingerprint = sha256(request.to_bytes()).encode()
        own = kind is TriggerKind.CRON or (kind is TriggerKind.EVENT and key is not None and key.startswith(EVENT_KEY))
        scope = CRON_SCOPE if own else KEY_SCOPE
        earlier = None if key is None else await self.ledger.find_by_idempotency_key(scope, key, fingerprint)
        if isinstance(earlier, Mismatch):
            raise IdempotencyMismatch(key=key, job_id=earlier.job_id)
        if earlier is not None:  # even if the agent could not run any more
            return Submitted(job_id=earlier.job_id, created=False)
        await self._check(agent_slug, kind, again=retry_of is not None)
        run_id = ids.make_run_id(await self.ledger.now(), self.random_text())
        with tracing.span("job.submit", {"trellis.job_id": run_id, "trellis.type": TYPE}, kind=tracing.PRODUCER):
            job = NewJob(
                job_id=run_id,
                type=TYPE,
                lifecycle=RUN.name,
                payload=request.to_bytes(),
                concurrency_key=run_key(agent_slug),
                waiting_max=self.waiting_max,
                idempotency_key=key,
                idempotency_scope=scope,
                fingerprint=fingerprint,
                correlation_id=correlation_id,
                trace=tracing.here(),
            )
            try:
                (answer,) = await self.ledger.submit(self.gateway, [job])
            except QueueFull as full:
                waiting, limit = full.data["waiting"], full.data["limit"]
                raise TooManyWaiting(slug=agent_slug, waiting=waiting, limit=limit) from full
        if isinstance(answer, Mismatch):
            raise IdempotencyMismatch(key=key, job_id=answer.job_id)
        await self._take_in(answer.job_id, request)
        return answer

    async def _take_in(self, run_id: JobId, request: RunRequest) -> None:
        """Publish `requested` and queue the run. Does not raise if the store is unavailable or the ledger fails.

        The run is already in the ledger, so the caller must be told that it exists. What fails here, or is lost in a
        crash, is done by the projector and the orchestrators.
        """
        try:
            first = (await self.ledger.events(run_id))[:1]
            try:
                await self.publisher.publish(await self._first_documents(run_id, request, first))
            except (StoreUnavailable, DocumentDiffers) as error:
                _log.warning("status_left_to_projector", run_id=run_id, error=str(error))
            await accept(self.ledger, self.orchestrator, run_id)
        except LedgerError as error:
            _log.warning("run_left_to_orchestrators", run_id=run_id, error=str(error))

    async def _first_documents(self, run_id: JobId, request: RunRequest, first: list[Event]) -> list[Publication]:
        """What the first event publishes: its audit record, then the state documents, in the projector's order."""
        records = [
            Publication(ids.audit_key(record.event.ts, record.event.id), audit.to_bytes(record))
            for record in await self.ledger.recorded(first)
        ]
        return [*records, *run_documents.state_publications(RunFacts(run_id, request, tuple(first)))]

    async def _check(self, slug: str, kind: TriggerKind, *, again: bool) -> None:
        agent = await self.catalog.load(slug)
        match agent:
            case AgentMissing():
                raise AgentNotRunnable(slug=slug, reason=f"{agent}; `trellis agents` lists those there are")
            case AgentMalformed():
                raise AgentNotRunnable(slug=slug, reason=str(agent))
            case _ if not agent.may_run:
                raise AgentNotRunnable(slug=slug, reason=await why_not_runnable(self.ledger, agent))
            case _ if kind is TriggerKind.MANUAL and not agent.triggers.manual:
                raise AgentNotRunnable(slug=slug, reason="its file says `triggers.manual: false`")
            case _ if not again and not agent.triggers.manual and not _has_trigger(agent, kind):
                reason = f"its file says `triggers.manual: false` and names no trigger of the kind {kind.value}"
                raise AgentNotRunnable(slug=slug, reason=reason)
            case _:
                pass

    async def _waiting(self, slug: str) -> list[JobId]:
        """Runs of an agent that have not started, in the order in which they will."""
        waiting: list[Job] = []
        for state in WAITING_STATES:
            where = JobFilter(lifecycle=RUN.name, state=state, concurrency_key=run_key(slug))
            waiting += reversed((await self.ledger.jobs(where, limit=self.waiting_max + 1)).jobs)
        # The sort is stable: runs with the same timestamp keep the ledger's order. Their ids do not show which was
        # first.
        return [job.job_id for job in sorted(waiting, key=lambda job: job.created_at)]

    async def run_state(self, run_id: JobId) -> RunState:
        job = await self.ledger.job(run_id)
        if job is None or job.payload is None or job.lifecycle != RUN.name:
            raise RunNotFound(run_id=run_id)
        slug = RunRequest.read(job.payload).agent_slug
        done = sum(event.type == run_documents.STEP_DONE for event in await self.ledger.events(run_id))
        waiting = await self._waiting(slug) if job.state in WAITING_STATES else []
        position = waiting.index(run_id) if run_id in waiting else None
        return RunState(run_id=run_id, agent_slug=slug, status=job.state, steps_completed=done, position=position)

    async def cancel(
        self,
        run_id: JobId,
        *,
        mode: CancelMode,
        request_id: RequestId,
        cause: str | None,
        key: RequestKey | None = None,
    ) -> str:
        """Whichever of cancel and complete reaches the ledger first wins."""
        await self.run_state(run_id)
        answer = await self.ledger.cancel(
            self.orchestrator, run_id, mode, request_id, grace_s=self.cancel_grace_s, cause=cause, key=key
        )
        match answer:
            case Moved(target=state) | NotMoved(state=state) | CancelRequested(state=state):
                return state

    async def register_schedule(self, agent_slug: str, cron: str | None) -> None:
        """Store the schedule in the timetable, registered at the ledger's current time."""
        problem = None if cron is None else cron_problem(cron)
        if problem is not None:
            raise CronInvalid(slug=agent_slug, cron=cron, problem=problem, expected=CRON_EXPECTED)
        wanted = None if cron is None else " ".join(cron.split())
        await self.timetable.register(agent_slug, wanted, at=await self.ledger.now())

    async def schedules(self) -> list[Schedule]:
        return [entry.schedule for entry in await self.timetable.all()]

    async def health(self) -> LayerHealth:
        """Healthy if the ledger answers."""
        await self.ledger.now()
        return LayerHealth(healthy=True, vendor="builtin")


def _has_trigger(agent: AgentDefinition, kind: TriggerKind) -> bool:
    """Whether the agent's file names a trigger of this kind."""
    return agent.triggers.cron is not None if kind is TriggerKind.CRON else bool(agent.triggers.events)
