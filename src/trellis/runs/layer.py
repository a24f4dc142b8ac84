"""The orchestration layer as its callers see it, and the built-in one (PIPE-1, PIPE-2, PIPE-3, D13, D17, D25).

A layer is replaceable: it takes a trigger, says how a run stands, and cancels. Whatever layer it is, the ledger decides and status.json
tells; what the layer itself remembers is nobody's truth.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from trellis.agents.catalog import AgentMissing, Catalog
from trellis.agents.definition import AgentMalformed
from trellis.engine.jobs import Actor, CancelMode, CancelRequested, JobId, Moved, NewJob, NotMoved, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.lifecycles.run import RUN
from trellis.runs import documents, ids
from trellis.runs.documents import Facts, Publication, Request
from trellis.runs.errors import AgentNotRunnable, RunNotFound, TooManyWaiting
from trellis.runs.orchestrator import TYPE, accept
from trellis.runs.publishing import Publisher

WAITING_MAX = 100
WAITING_STATES = ("requested", "queued")
GRACE_S = 30.0


class TriggerKind(StrEnum):
    """What began a run."""

    MANUAL = "manual"
    CRON = "cron"
    EVENT = "event"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a run stands. `position` counts the runs of its agent that come first; None once it runs."""

    run_id: JobId
    agent_slug: str
    status: str
    steps_completed: int
    position: int | None


@dataclass(frozen=True, slots=True)
class LayerHealth:
    """Whether the layer would take a trigger now."""

    healthy: bool
    vendor: str


class OrchestrationLayer(Protocol):
    """The adapter: what gateway and command line know of an orchestration layer."""

    async def trigger(
        self, agent_slug: str, params: Mapping[str, Any], *, kind: TriggerKind, key: str | None = None
    ) -> JobId:
        """Begin a run and return its id; the same `key` again returns the same run."""
        ...

    async def standing(self, run_id: JobId) -> Standing:
        """How it stands; raises RunNotFound."""
        ...

    async def cancel(self, run_id: JobId, *, mode: CancelMode, request_id: RequestId, cause: str | None) -> str:
        """Ask for its end; the state it has then, which for a soft cancel may still be `running`."""
        ...

    async def health(self) -> LayerHealth:
        """Whether it answers."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuiltinLayer:
    """Runs are jobs of the ledger; orchestrator processes claim them."""

    ledger: Ledger
    gateway: Actor
    orchestrator: Actor
    catalog: Catalog
    publisher: Publisher
    random_text: Callable[[], str]
    waiting_max: int = WAITING_MAX

    async def trigger(
        self, agent_slug: str, params: Mapping[str, Any], *, kind: TriggerKind, key: str | None = None
    ) -> JobId:
        """Check the agent, write the run down, publish `requested`, and have it queued. Nothing is stored for a refusal."""
        await self._check(agent_slug)
        request = Request(agent_slug, kind.value, dict(params))
        run_id = ids.make_run_id(await self.ledger.now(), self.random_text())
        job = NewJob(
            job_id=run_id,
            type=TYPE,
            lifecycle=RUN.name,
            payload=request.to_bytes(),
            concurrency_key=f"run:{agent_slug}",
            idempotency_key=key,
            idempotency_scope="runs",
            fingerprint=documents.sha256(request.to_bytes()).encode(),
        )
        (answer,) = await self.ledger.submit(self.gateway, [job])
        run_id = answer.job_id
        # The first status is the caller's to publish; if it dies here, the projector does it.
        first = (await self.ledger.events(run_id))[:1]
        facts = Facts(run_id, request, tuple(first))
        await self.publisher.publish([Publication(ids.status_key(agent_slug, run_id), documents.status(facts), 1)])
        await accept(self.ledger, self.orchestrator, run_id)
        return run_id

    async def _check(self, slug: str) -> None:
        agent = await self.catalog.load(slug)
        match agent:
            case AgentMissing():
                raise AgentNotRunnable(slug=slug, reason=f"{agent}; `trellis agents` lists those there are")
            case AgentMalformed():
                raise AgentNotRunnable(slug=slug, reason=str(agent))
            case _ if not agent.may_run:
                raise AgentNotRunnable(slug=slug, reason=f"it is {agent.status.value}; only an active agent runs")
            case _:
                pass
        waiting = len(await self._waiting(slug))
        if waiting >= self.waiting_max:
            raise TooManyWaiting(slug=slug, waiting=waiting, limit=self.waiting_max)

    async def _waiting(self, slug: str) -> list[JobId]:
        """Runs of an agent that have not begun, in the order in which they will."""
        found: list[tuple[datetime, JobId]] = []
        for state in WAITING_STATES:
            where = JobFilter(lifecycle=RUN.name, state=state, concurrency_key=f"run:{slug}")
            page = await self.ledger.jobs(where, limit=self.waiting_max + 1)
            found += [(job.created_at, job.job_id) for job in page.jobs]
        return [run_id for _, run_id in sorted(found)]

    async def standing(self, run_id: JobId) -> Standing:
        """From the ledger, which decides."""
        job = await self.ledger.job(run_id)
        if job is None or job.payload is None or job.lifecycle != RUN.name:
            raise RunNotFound(run_id=run_id)
        slug = Request.read(job.payload).agent_slug
        done = sum(event.type == documents.STEP_DONE for event in await self.ledger.events(run_id))
        waiting = await self._waiting(slug) if job.state in WAITING_STATES else []
        position = waiting.index(run_id) if run_id in waiting else None
        return Standing(run_id=run_id, agent_slug=slug, status=job.state, steps_completed=done, position=position)

    async def cancel(self, run_id: JobId, *, mode: CancelMode, request_id: RequestId, cause: str | None) -> str:
        """First of cancel and complete wins."""
        await self.standing(run_id)
        answer = await self.ledger.cancel(self.orchestrator, run_id, mode, request_id, grace_s=GRACE_S, cause=cause)
        match answer:
            case Moved(target=state) | NotMoved(state=state):
                return state
            case CancelRequested():
                return "running"

    async def health(self) -> LayerHealth:
        """The ledger answers, so a run would be taken."""
        await self.ledger.now()
        return LayerHealth(healthy=True, vendor="builtin")
