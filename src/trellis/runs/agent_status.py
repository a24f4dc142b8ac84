"""The status of agents: changing it, stopping agents that keep failing, and reopening the runs of active ones."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from trellis.agents.catalog import AgentFile, AgentMissing, Catalog, StatusChanged
from trellis.agents.creation import NewAgent, create_agent
from trellis.agents.definition import AgentDefinition, AgentMalformed, AgentStatus, checked_slug
from trellis.agents.errors import AgentExists, AgentNotFound, DefinitionContended, DefinitionMalformed, SlugInvalid
from trellis.documents import run_documents
from trellis.documents.errors import NlmDown, UpstreamUnavailable
from trellis.documents.run_documents import RunFacts, RunRequest
from trellis.engine.admin_acts import ACTS_MAX, AdminAct, NewAct
from trellis.engine.jobs import Actor, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event, Job, JobFilter, JobPlace
from trellis.engine.subscription import FeedReport, FeedSubscriber, SubscriptionOptions
from trellis.lifecycles.run import RUN
from trellis.storage.objects.canonical_json import timestamp
from trellis.storage.objects.store import ObjectStore

# Creating an agent and changing its status, each recorded as one administrative act (OBS-1, D24).

CHANGED = "agent.status.changed"
CREATED = "agent.created"
NOT_CREATED = "agent.create.refused"
"""Event names of the administrative acts on an agent."""
ACT_PAGES_MAX = 20
"""Pages of acts that are searched for the last one on an agent. With more pages than that, none is returned."""


async def recorded_creation(
    objects: ObjectStore,
    ledger: Ledger,
    actor: Actor,
    agent: NewAgent,
    sources: Mapping[str, bytes],
    *,
    reason: str | None,
) -> tuple[AgentDefinition, Sequence[str]]:
    """Create an agent. The act is recorded before the agent's file is written, so no agent exists without an act.

    A crash between the act and the file leaves an act without an agent; creating the agent again records another act.
    If another file was written first, a second act says that this creation was refused. Raises what `create_agent`
    raises.
    """

    async def record() -> None:
        await ledger.record_act(actor, NewAct(event=CREATED, subject=agent.slug, target="active", cause=reason))

    try:
        return await create_agent(objects, agent, sources, at=await ledger.now(), before_file=record)
    except AgentExists as error:
        if error.data.get("recorded"):
            await ledger.record_act(actor, NewAct(event=NOT_CREATED, subject=agent.slug, cause=str(error)))
        raise


async def set_status(
    catalog: Catalog,
    ledger: Ledger,
    actor: Actor,
    slug: str,
    status: AgentStatus,
    *,
    reason: str | None,
    correlation_id: str | None = None,
) -> StatusChanged:
    """Change an agent's status on a person's behalf, and record it as an administrative act.

    The file is changed before the act is recorded. If a process died in between, the next call finds the file changed
    already and the last act with another status, and records the act then.

    Raises AgentNotFound, DefinitionMalformed, StatusChangeRefused, DefinitionContended.
    """
    changed = await catalog.change_status(slug, status, at=await ledger.now())
    match changed:
        case AgentMissing():
            raise AgentNotFound(slug=slug)
        case AgentMalformed():
            raise DefinitionMalformed(problems=changed)
        case StatusChanged():
            source: str | None = changed.previous.value
            if changed.previous is changed.agent.status:
                act = await last_act_on(ledger, slug)
                source = None if act is None else act.target
                if source is None or source == changed.agent.status.value:
                    return changed
            new = NewAct(
                event=CHANGED,
                subject=slug,
                source=source,
                target=changed.agent.status.value,
                cause=reason,
                correlation_id=correlation_id,
            )
            await ledger.record_act(actor, new)
            await catalog.index()
            return changed


async def last_act_on(ledger: Ledger, slug: str) -> AdminAct | None:
    """The last administrative act on an agent; None if there is none, or if there are too many acts to search."""
    last, after = None, 0
    for _ in range(ACT_PAGES_MAX):
        page = await ledger.acts(after=after)
        for act in page:
            after = act.no
            if act.subject == slug and act.event in {CREATED, CHANGED}:
                last = act
        if len(page) < ACTS_MAX:
            return last
    return None


# Stops agents that keep failing (D24): after three failed runs in a row an active agent's status becomes `error`.
#
# Invariants:
# - A cancelled run neither counts nor ends the row (D19). The same holds for a run that failed for an upstream reason:
#   the alert `agent-failing` reports a row of those (`UnservedAgents`).
#   Only runs that ended after the last change of the agent's file count, so a reactivated agent has three new tries.
# - The status is written by compare-and-set over the file it was decided on. Every other byte of the file stays.
# - Every change of status is one administrative act (OBS-1). The act's id is derived from the run's event, so repeating
#   the work after a crash writes nothing twice.
# - A run with an unreadable payload is logged and does not stop the check of other agents.

RUN_KEY = "run:"
SUBSCRIBER_NAME = "agent-health"
FAILURES_MAX = 3
CANCELLED = "CANCELLED:"
UPSTREAM = (f"{UpstreamUnavailable.code}:", f"{NlmDown.code}:")
"""Prefixes of run errors that a server caused: the model's, the NLM backend's, the object store's."""
NO_FAULT_OF_THE_AGENT = (CANCELLED, *UPSTREAM)
"""Prefixes of run errors that the agent did not cause."""
PAGE = 100
PAGES_MAX = 10
"""Most pages of runs that are searched for a row of failures."""
DECIDE_TRIES_MAX = 5

_log = log_of("trellis.health")


def run_key(slug: str) -> str:
    """The concurrency key of an agent's runs."""
    return f"{RUN_KEY}{slug}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """A failed run that counts against its agent."""

    run_id: JobId
    error: str


async def failures(ledger: Ledger, slug: str, *, since: datetime | None = None) -> AsyncIterator[RunFailure]:
    """The failed runs of an agent since its last completed one, newest first.

    With `since`, only those that ended later.
    """
    where = JobFilter(lifecycle=RUN.name, concurrency_key=run_key(slug))
    cursor: str | None = None
    for _ in range(PAGES_MAX):
        page = await ledger.jobs(where, limit=PAGE, cursor=cursor)
        for job in page.jobs:
            if job.state == "completed":
                return
            if job.state == "failed" and (since is None or job.updated_at > since):
                failure = await _failure(ledger, slug, job)
                if failure is not None:
                    yield failure
        cursor = page.cursor
        if cursor is None:
            return


async def last_failure(ledger: Ledger, slug: str) -> RunFailure | None:
    """The agent's latest failure, unless it has completed a run since."""
    return await anext(failures(ledger, slug), None)


async def why_not_runnable(ledger: Ledger, agent: AgentDefinition) -> str:
    """Why an agent that is not active does not run, and how to let it run, if it can."""
    why = f"it is {agent.status.value}; only an active agent runs"
    if agent.status is AgentStatus.ERROR:
        failure = await last_failure(ledger, agent.slug)
        why += f"; its last run {failure.run_id} ended with {failure.error.rstrip('.')}" if failure else ""
    if agent.status is not AgentStatus.ARCHIVED:
        why += f"; `trellis agents activate {agent.slug}` lets it run"
    return why


async def failed_in_a_row(ledger: Ledger, slug: str, file: AgentFile) -> int:
    """How many runs of the agent failed in its current row, at most FAILURES_MAX: with so many it is stopped."""
    agent = file.agent
    if isinstance(agent, AgentMalformed):
        return 0
    # The file of a stopped agent was changed after its failures, by whoever stopped it.
    stopped = agent.status is AgentStatus.ERROR
    since = None if stopped else _last_change(agent, file.modified_at, now=await ledger.now())
    row = 0
    async for _ in failures(ledger, slug, since=since):
        row += 1
        if row == FAILURES_MAX:
            break
    return row


@dataclass(kw_only=True)
class UnservedAgents:
    """Finds the active agents whose last three runs failed, one or more of them for an upstream reason.

    Such an agent is not stopped, so nothing else shows that it achieves nothing. Cancelled runs are left out, and so are
    runs that ended before the last change of the agent's file. Only agents with three runs among the newest PAGE failed
    ones are looked at. The errors of ended runs are kept, so that a round reads no events that an earlier one has read.
    """

    ledger: Ledger
    catalog: Catalog
    _errors: dict[JobId, str] = field(default_factory=dict[JobId, str])

    async def __call__(self) -> Mapping[str, str]:
        """The agents by slug, each with its last error."""
        failed = (await self.ledger.jobs(JobFilter(lifecycle=RUN.name, state="failed"), limit=PAGE)).jobs
        by_agent: dict[str, list[Job]] = {}
        for job in failed:
            if job.concurrency_key is not None:
                by_agent.setdefault(job.concurrency_key.removeprefix(RUN_KEY), []).append(job)
        rows = {slug: jobs for slug, jobs in by_agent.items() if len(jobs) >= FAILURES_MAX}
        if rows:
            rows = await self._since_completed(rows)
        await self._read_errors(rows)
        unserved: dict[str, str] = {}
        for slug, jobs in sorted(rows.items()):
            if self._upstream_errors(jobs, since=None) is None:
                continue
            file = await self.catalog.file(slug)
            if isinstance(file, AgentMissing) or isinstance(file.agent, AgentMalformed) or not file.agent.may_run:
                continue
            since = _last_change(file.agent, file.modified_at, now=await self.ledger.now())
            errors = self._upstream_errors(jobs, since=since)
            if errors is not None:
                unserved[slug] = errors[0]
        return unserved

    async def _since_completed(self, rows: Mapping[str, list[Job]]) -> dict[str, list[Job]]:
        """The failed runs of each agent that are newer than its last completed one."""
        page = (await self.ledger.jobs(JobFilter(lifecycle=RUN.name, state="completed"), limit=PAGE)).jobs
        last: dict[str, datetime] = {}
        for job in page:
            last.setdefault((job.concurrency_key or "").removeprefix(RUN_KEY), job.created_at)
        left: dict[str, list[Job]] = {}
        for slug, jobs in rows.items():
            if slug not in last and len(page) == PAGE and page[-1].created_at > jobs[FAILURES_MAX - 1].created_at:
                where = JobFilter(lifecycle=RUN.name, state="completed", concurrency_key=run_key(slug))
                for job in (await self.ledger.jobs(where, limit=1)).jobs:
                    last[slug] = job.created_at
            newer = [job for job in jobs if slug not in last or job.created_at > last[slug]]
            if len(newer) >= FAILURES_MAX:
                left[slug] = newer
        return left

    async def _read_errors(self, rows: Mapping[str, list[Job]]) -> None:
        slugs = {job.job_id: slug for slug, jobs in rows.items() for job in jobs}
        self._errors = {job_id: error for job_id, error in self._errors.items() if job_id in slugs}
        unread = [job_id for job_id in slugs if job_id not in self._errors]
        events = await self.ledger.events_of(unread) if unread else {}
        self._errors |= {job_id: error_of(slugs[job_id], job_id, listed) for job_id, listed in events.items()}

    def _upstream_errors(self, jobs: Sequence[Job], *, since: datetime | None) -> list[str] | None:
        """The errors of the newest three failures, without cancels; None if they are fewer or all the agent's own."""
        failures = [self._errors.get(job.job_id, "") for job in jobs if since is None or job.updated_at > since]
        errors = [error for error in failures if error and not error.startswith(CANCELLED)][:FAILURES_MAX]
        of_upstream = any(error.startswith(UPSTREAM) for error in errors)
        return errors if len(errors) == FAILURES_MAX and of_upstream else None


async def _failure(ledger: Ledger, slug: str, job: Job) -> RunFailure | None:
    error = error_of(slug, job.job_id, await ledger.events(job.job_id))
    return None if error.startswith(NO_FAULT_OF_THE_AGENT) else RunFailure(run_id=job.job_id, error=error)


def error_of(slug: str, run_id: JobId, events: list[Event]) -> str:
    """The error that status.json shows after the last of these events."""
    return json.loads(run_documents.status(RunFacts(run_id, RunRequest(slug, "", {}), tuple(events))))["error"] or ""


# --- three failed runs in a row --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthOptions(SubscriptionOptions):
    """Settings of the subscriber."""

    batch: int = 100
    lease_s: float = 15.0
    poll_s: float = 0.5
    standby_tries: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport(FeedReport):
    """Result of one pass."""

    stopped: tuple[str, ...] = ()
    """Agents whose status became `error`."""


@dataclass(kw_only=True)
class AgentHealth(FeedSubscriber[HealthOptions]):
    """The service. Each pass reads a page of run events, checks every failure, and stores its position in the feed."""

    catalog: Catalog
    options: HealthOptions = field(default_factory=HealthOptions)
    name: str = SUBSCRIBER_NAME
    follows_as: str = SUBSCRIBER_NAME
    lifecycle: str | frozenset[str] | None = RUN.name

    async def run_once(self) -> HealthReport:
        """Process one page. After an error the next pass starts from the same position."""
        stopped: list[str] = []

        async def judge(events: Sequence[Event]) -> None:
            for event in events:
                slug = await self._judge(event)
                stopped.extend([] if slug is None else [slug])

        done = await self.take(judge)
        return HealthReport(following=done.following, events=done.events, stopped=tuple(stopped))

    async def _judge(self, event: Event) -> str | None:
        """Set the agent's status to `error` if this event is its third failure in a row.

        Returns the agent's slug if it was.
        """
        job = await self.ledger.job(event.job_id) if event.type == run_documents.FAILED else None
        if job is None or job.payload is None:
            return None
        slug = _slug(job)
        if slug is None:
            return None
        for _ in range(DECIDE_TRIES_MAX):
            agent_file = await self.catalog.file(slug)
            if isinstance(agent_file, AgentMissing) or isinstance(agent_file.agent, AgentMalformed):
                return None
            agent = agent_file.agent
            if _was_stopped_by(event, agent):
                return await self._recorded(event, slug)
            since = _last_change(agent, agent_file.modified_at, now=await self.ledger.now())
            if agent.status is not AgentStatus.ACTIVE or not await self._in_a_row(slug, event.job_id, since):
                return None
            changed = await self.catalog.change_status(slug, AgentStatus.ERROR, at=event.ts, seen=agent.sha256)
            if isinstance(changed, StatusChanged) and changed.agent.status is AgentStatus.ERROR:
                return await self._recorded(event, slug)
        raise DefinitionContended(slug=slug, tries=DECIDE_TRIES_MAX)

    async def _in_a_row(self, slug: str, last: JobId, since: datetime | None) -> bool:
        """Whether this run is at least the third failure in the agent's current row."""
        row = 0
        async for failure in failures(self.ledger, slug, since=since):
            row += bool(row) or failure.run_id == last
            if row >= FAILURES_MAX:
                return True
        return False

    async def _recorded(self, event: Event, slug: str) -> str:
        """Record the act (idempotent across processes) and refresh the agents' index."""
        error = error_of(slug, event.job_id, await self.ledger.events(event.job_id))
        act = NewAct(
            event=CHANGED,
            subject=slug,
            source=AgentStatus.ACTIVE.value,
            target=AgentStatus.ERROR.value,
            cause=f"{FAILURES_MAX} failed runs in a row, the last with {error}",
            correlation_id=event.correlation_id,
            job_id=event.job_id,
            id=f"{event.id}-agent",
        )
        await self.ledger.record_act(Actor(role=self.actor.role, name=SUBSCRIBER_NAME), act)
        _log.warning("agent_stopped", agent=slug, run_id=event.job_id, error=error)
        await self.catalog.index()
        return slug


def _slug(job: Job) -> str | None:
    """The agent of a run; None if the payload is not a run request."""
    try:
        return checked_slug(RunRequest.read(job.payload or b"").agent_slug)
    except (ValueError, KeyError, TypeError, SlugInvalid) as error:
        _log.error("run_unreadable", run_id=job.job_id, error=f"{type(error).__name__}: {error}")
        return None


def _was_stopped_by(event: Event, agent: AgentDefinition) -> bool:
    """Whether this event has already set the status. Then only its act may be missing."""
    same_moment = timestamp(agent.updated_at) == timestamp(event.ts)
    return agent.status is AgentStatus.ERROR and same_moment


def _last_change(agent: AgentDefinition, modified_at: datetime, *, now: datetime) -> datetime | None:
    """When the agent's file was last changed, by its own `updated_at` or the store's time.

    Times in the future are ignored.
    """
    return max((moment for moment in (agent.updated_at, modified_at) if moment <= now), default=None)


# Reopens the concurrency key of an agent's runs once a stopped agent may run again (D24).
#
# Runs of a stopped agent stay queued until the agent is active again or the runs are cancelled. The ledger's claim
# decides which run starts, but the agent's status is in its file. So the first driver that finds the agent stopped sets
# the limit of the agent's concurrency key to 0. From then on no run of that agent is claimed, and none takes a slot
# that other agents need.
#
# This service restores the limit when the file says that the agent may run. It also does so when the file is gone or
# unreadable: the runs are then claimed and fail with that error.

BLOCKED_PAGE = 200
PAGE_PAUSE_S = 0.2
RUNS_AT_ONCE = 1

_gate_log = log_of("trellis.gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReport:
    """Result of one pass: the agents whose runs may start again."""

    agents: tuple[str, ...] = ()


@dataclass(kw_only=True)
class AgentGate:
    """The service.

    Each pass checks one page of the runs that are blocked by their concurrency key, all pages in turn.
    """

    ledger: Ledger
    actor: Actor
    catalog: Catalog
    poll_s: float = 5.0
    name: str = "agent-gate"
    _cursor: str | None = None

    async def run_once(self) -> GateReport:
        """Restore the limit of keys whose agent may run again."""
        where = JobFilter(lifecycle=RUN.name, place=JobPlace.BLOCKED)
        page = await self.ledger.jobs(where, limit=BLOCKED_PAGE, cursor=self._cursor)
        self._cursor = page.cursor
        keys = {job.concurrency_key for job in page.jobs if job.concurrency_key is not None}
        opened = [key.removeprefix(RUN_KEY) for key in sorted(keys) if await self._is_to_open(key)]
        for slug in opened:
            await self.ledger.limit_key(self.actor, run_key(slug), RUNS_AT_ONCE, cause="its agent may run again")
            _gate_log.info("agent_goes_on", agent=slug)
        return GateReport(agents=tuple(opened))

    def pause_s(self, report: GateReport) -> float:  # noqa: ARG002 - the shape of every service
        """A short pause while there are more pages to check, else `poll_s`."""
        return self.poll_s if self._cursor is None else PAGE_PAUSE_S

    async def _is_to_open(self, key: str) -> bool:
        """Whether no run of this key is leased or ready although its agent may run.

        Otherwise its runs only wait for each other.

        Only the agent's status decides. To hold back an agent's runs, pause the agent, not the key.
        """
        for place in (JobPlace.LEASED, JobPlace.READY):
            where = JobFilter(lifecycle=RUN.name, concurrency_key=key, place=place)
            if (await self.ledger.jobs(where, limit=1)).jobs:
                return False
        agent = await self.catalog.load(key.removeprefix(RUN_KEY))
        return not isinstance(agent, AgentDefinition) or agent.may_run
