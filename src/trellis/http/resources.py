"""The gateway's resources as typed calls: runs, agents, proposals, artifacts, memory, dead letters, inbox, safety."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack

from trellis.bus.topics import HELD_ACTION
from trellis.engine.alerts import ALERTS_MAX
from trellis.http.agent_shapes import AgentDetail, AgentSourcesShape, MemoryDiff
from trellis.http.calls import LIMIT_DEFAULT, GatewayRequest, GatewayResource, listed, path_of, read_shape
from trellis.http.errors import NotFound
from trellis.http.operation_shapes import (
    AlertPage,
    EventPage,
    QueuePaused,
    QueueShape,
    RuleShape,
    RunRequestShape,
    ScheduleDetail,
    ScheduleRemoved,
    ScheduleRun,
    ScheduleShape,
    SloShape,
    WorkerShape,
)
from trellis.http.pages import EVENTS_MAX
from trellis.http.policy_shapes import ExplanationShape, SimulationShape
from trellis.http.shapes import (
    REPLAYED,
    AgentChanged,
    AgentShape,
    Artifact,
    ArtifactListed,
    ArtifactStaged,
    CleanedUpShape,
    DeadLetterShape,
    InboxEntry,
    InboxStats,
    InboxTaken,
    LogicProposed,
    MemoryChange,
    MemoryProposed,
    MemoryRead,
    Page,
    ProposalDiff,
    ProposalShape,
    Requeued,
    RunDetail,
    RunListed,
    RunManifest,
    RunStarted,
    RunStatus,
    StepFile,
    Stopped,
)
from trellis.http.streams import changes, follow, wait_for_last


class Agents(GatewayResource):
    """The agents: `client.agents`."""

    async def list(self, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[AgentShape]:
        """The agents, by name."""
        return await listed(self._calls, AgentShape, "/agents", limit, cursor)

    async def get(self, agent: str) -> AgentDetail:
        """One agent with its whole definition."""
        return await self._calls.get(AgentDetail, path_of("agents", agent))

    async def sources(self, agent: str) -> AgentSourcesShape:
        """What an agent would read if it ran now."""
        return await self._calls.get(AgentSourcesShape, path_of("agents", agent, "sources"))

    async def activate(self, agent: str, *, reason: str | None = None) -> AgentChanged:
        """Let an agent run."""
        return await self._change(agent, "active", reason)

    async def pause(self, agent: str, *, reason: str | None = None) -> AgentChanged:
        """Let no further run of it begin."""
        return await self._change(agent, "paused", reason)

    async def _change(self, agent: str, status: str, reason: str | None) -> AgentChanged:
        body = {"status": status, "reason": reason}
        path = path_of("agents", agent, "status")
        return await self._calls.asked(
            AgentChanged, GatewayRequest(method="PATCH", path=path, body=body, key=self._calls.key(None))
        )


# Only the NLM backend creates artifacts, and only an operator's cleanup removes them.


class Artifacts(GatewayResource):
    """What queue jobs left behind: `client.artifacts`."""

    async def list(
        self,
        *,
        type_: str | None = None,
        job_id: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[ArtifactListed]:
        """Finalized artifacts, newest first, without their content."""
        return await listed(self._calls, ArtifactListed, "/artifacts", limit, cursor, type=type_, job_id=job_id)

    async def get(self, artifact_id: str) -> Artifact:
        """One finalized artifact."""
        return await self._calls.get(Artifact, path_of("artifacts", artifact_id))

    async def content(self, artifact_id: str) -> bytes:
        """The stored bytes of a finalized artifact: their SHA-256 is the one in the result of its job."""
        ask = GatewayRequest(method="GET", path=path_of("artifacts", artifact_id, "content"))
        return (await self._calls.ask(ask)).body

    async def stage(
        self,
        job_id: str,
        type_: str,
        content: Mapping[str, Any],
        *,
        epoch: int | None = None,
        entity_refs: Sequence[str] = (),
        tags: Sequence[str] = (),
        sources: Sequence[Mapping[str, str]] = (),
        idempotency_key: str | None = None,
    ) -> ArtifactStaged:
        """Stage the artifact of a job that waits for it, as the NLM backend.

        The one that is there already is the answer.
        """
        body: dict[str, Any] = {
            "job_id": job_id,
            "epoch": epoch,
            "type": type_,
            "entity_refs": [*entity_refs],
            "tags": [*tags],
            "content": dict(content),
            "sources": [dict(source) for source in sources],
        }
        return await self._calls.post(ArtifactStaged, "/artifacts", body, key=idempotency_key)

    async def discard(self, artifact_id: str, *, reason: str | None = None) -> ArtifactListed:
        """Discard a staged artifact that no job waits for, as an operator."""
        return await self._calls.post(ArtifactListed, path_of("artifacts", artifact_id, "discard"), {"reason": reason})

    async def cleanup(
        self,
        *,
        older_than_days: int | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        idempotency_key: str | None = None,
    ) -> CleanedUpShape:
        """Remove artifacts that are old enough, as an operator; with `dry_run` only say which those are."""
        wish = {"older_than_days": older_than_days, "dry_run": dry_run, "limit": limit}
        given = {name: value for name, value in wish.items() if value is not None}
        return await self._calls.post(CleanedUpShape, "/artifacts/cleanup", given, key=idempotency_key)


class DeadLetters(GatewayResource):
    """Dead letters: `client.dead_letters`."""

    async def list(
        self,
        *,
        type_: str | None = None,
        reason: str | None = None,
        lifecycle: str | None = None,
        correlation_id: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[DeadLetterShape]:
        """The dead letters, newest first; with `lifecycle` only those of leased-jobs or of queue-jobs."""
        chosen = {"type": type_, "reason_code": reason, "lifecycle": lifecycle, "correlation_id": correlation_id}
        return await listed(self._calls, DeadLetterShape, "/dlq", limit, cursor, **chosen)

    async def get(self, job_id: str) -> DeadLetterShape:
        """The dead letter of one job."""
        return await self._calls.get(DeadLetterShape, path_of("dlq", job_id))

    async def requeue(
        self, job_ids: Sequence[str], *, reason: str | None = None, idempotency_key: str | None = None
    ) -> Requeued:
        """Run these jobs again; an operator's act. Each is answered for."""
        body = {"job_ids": list(job_ids), "reason": reason}
        return await self._calls.post(Requeued, "/dlq/requeue", body, key=idempotency_key)


class Inbox(GatewayResource):
    """The inbox: `client.inbox`."""

    async def submit(
        self,
        action: str,
        target: str,
        payload: Mapping[str, Any] | None = None,
        *,
        entry_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> InboxTaken:
        """Put a wish in, such as `run` of an agent; the same entry again is the same entry."""
        entry: dict[str, Any] = {
            "intent": {"action": action, "target": target, "payload": dict(payload or {})},
            "metadata": dict(metadata or {}),
            **({} if entry_id is None else {"id": entry_id}),
        }
        return await self._calls.post(InboxTaken, "/inbox/submit", entry, key=idempotency_key)

    async def entries(
        self, *, status: str | None = None, limit: int = LIMIT_DEFAULT, cursor: str | None = None
    ) -> Page[InboxEntry]:
        """Entries, newest first."""
        return await listed(self._calls, InboxEntry, "/inbox/entries", limit, cursor, status=status)

    async def stats(self) -> InboxStats:
        """How much lies there, and what became of today's."""
        return await self._calls.get(InboxStats, "/inbox/stats")


class Backing(TypedDict, total=False):
    """What can be said for a proposal."""

    reasoning: str
    """Why."""
    run_id: str
    """The run of this agent that it comes from."""
    priority: Literal["normal", "high"]
    """Of high priority a person decides, also about memory."""


class Memory(GatewayResource):
    """What agents remember: `client.memory`."""

    async def list(self, *, limit: int = LIMIT_DEFAULT) -> Page[MemoryRead]:
        """The memories of the agents, by name, each with its facts. Each is one request."""
        agents = (await listed(self._calls, AgentShape, "/agents", limit)).items
        slugs = [agent.slug for agent in agents if agent.slug is not None and agent.status != "malformed"]
        return Page[MemoryRead](items=[await self.read(slug, mode="wide") for slug in slugs], next_cursor=None)

    async def read(self, agent: str, *, mode: Literal["basic", "wide"] = "basic") -> MemoryRead:
        """Layer 1 of an agent's memory; wide adds its facts."""
        return await self._calls.get(MemoryRead, path_of("memory", agent, "read"), mode=mode)

    async def history(self, agent: str, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[MemoryChange]:
        """The changes of a memory, newest first."""
        return await listed(self._calls, MemoryChange, path_of("memory", agent, "history"), limit, cursor)

    async def diff(self, agent: str, from_version: int, to_version: int | None = None) -> MemoryDiff:
        """What changed in a memory from one version to another, or to the newest, as a unified diff."""
        versions = {"from_version": from_version, "to_version": to_version}
        return await self._calls.get(MemoryDiff, path_of("memory", agent, "diff"), **versions)

    async def propose(
        self,
        agent: str,
        summary: str,
        updates: Sequence[Mapping[str, Any]],
        *,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
        **backing: Unpack[Backing],
    ) -> MemoryProposed:
        """Propose changes that belong together, each {file, operation, content, …}.

        Of normal priority they are applied at once, and lines that are added are kept whatever others changed meanwhile.
        Text that replaces another is for one version: `expected_version`, else the newest. Look at `status` of the
        answer: with `failed` nothing was changed, and `error` says why.
        """
        body: dict[str, Any] = {"summary": summary, "updates": [dict(update) for update in updates], **backing}
        if expected_version is not None:
            body["expected_version"] = expected_version
        return await self._calls.post(MemoryProposed, path_of("memory", agent, "propose"), body, key=idempotency_key)


class Logic(GatewayResource):
    """What agents go by: `client.logic`."""

    async def propose(
        self,
        agent: str,
        summary: str,
        text: str,
        *,
        change: Literal["replace", "append"] = "replace",
        idempotency_key: str | None = None,
        **backing: Unpack[Backing],
    ) -> LogicProposed:
        """Propose another text of an agent's logic; a person decides, always."""
        body: dict[str, Any] = {"summary": summary, "text": text, "change": change, **backing}
        return await self._calls.post(LogicProposed, path_of("logic", agent, "propose"), body, key=idempotency_key)


# --- proposals ---

OPEN = frozenset({"approved", "auto_approved", "applying"})
"""Approved, and neither applied nor failed yet."""
AGAIN_S = 1.0


class Proposals(GatewayResource):
    """What agents propose: `client.proposals`."""

    async def list(
        self,
        *,
        status: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
        conflicts: bool = False,
    ) -> Page[ProposalShape]:
        """Proposals, newest first; with `conflicts` those that can no longer be applied say why."""
        query = {"conflicts": "true"} if conflicts else {}
        return await listed(self._calls, ProposalShape, "/proposals", limit, cursor, status=status, **query)

    async def pending(self, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[ProposalShape]:
        """Those that wait for a person."""
        return await listed(self._calls, ProposalShape, "/proposals/pending", limit, cursor)

    async def get(self, proposal_id: str) -> ProposalShape:
        """One proposal."""
        return await self._calls.get(ProposalShape, path_of("proposals", proposal_id))

    async def diff(self, proposal_id: str) -> ProposalDiff:
        """What applying it would change now, as a unified diff. That of a memory is for those who may read memory."""
        return await self._calls.get(ProposalDiff, path_of("proposals", proposal_id, "diff"))

    async def approve(
        self,
        proposal_id: str,
        note: str | None = None,
        *,
        version: int | None = None,
        idempotency_key: str | None = None,
    ) -> ProposalShape:
        """Approve a proposal, which is then applied; with `version` only as it was seen, else VersionDiffers."""
        return await self._decide(proposal_id, "approve", note, version, idempotency_key)

    async def reject(
        self, proposal_id: str, note: str, *, version: int | None = None, idempotency_key: str | None = None
    ) -> ProposalShape:
        """Reject a proposal and say why."""
        return await self._decide(proposal_id, "reject", note, version, idempotency_key)

    async def apply(self, proposal_id: str, *, idempotency_key: str | None = None) -> ProposalShape:
        """Have an approved proposal applied now.

        While another engine is at it, ask again for as long as one call may take.
        """
        calls, key = self._calls, self._calls.key(idempotency_key)
        ends_at = calls.clock.monotonic() + calls.options.timeout_s
        ask = GatewayRequest(method="POST", path=path_of("proposals", proposal_id, "apply"), key=key)
        proposal = await calls.asked(ProposalShape, ask)
        while (
            proposal.status in OPEN
            and proposal.action != HELD_ACTION
            and (left_s := ends_at - calls.clock.monotonic() - AGAIN_S) > 0
        ):
            await calls.clock.sleep(AGAIN_S)
            proposal = await calls.asked(ProposalShape, replace(ask, timeout_s=left_s))
        return proposal

    async def _decide(
        self, proposal_id: str, decision: str, note: str | None, version: int | None, key: str | None
    ) -> ProposalShape:
        ask = GatewayRequest(
            method="PATCH",
            path=path_of("proposals", proposal_id),
            body={"decision": decision, "note": note},
            key=self._calls.key(key),
            headers={} if version is None else {"If-Match": f'"{version}"'},
        )
        return await self._calls.asked(ProposalShape, ask)


# --- runs ---

ENDED = frozenset({"completed", "failed"})
NOT_MODIFIED = 304
CHANGES = ("run.status.changed", "run.step.completed")
"""Events after which status.json has changed."""


class Runs(GatewayResource):
    """Runs of agents: `client.runs`."""

    async def start(
        self,
        agent: str,
        params: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        correlation_id: str | None = None,
    ) -> RunStarted:
        """Start a run of an agent. The same key and request again is the same run, and then it is not `created`.

        `correlation_id` is your own name for what the run belongs to; its events, proposals and audit records carry it.
        """
        body = {"agent_slug": agent, "params": dict(params or {})}
        body |= {} if correlation_id is None else {"correlation_id": correlation_id}
        ask = GatewayRequest(method="POST", path="/agents/run", body=body, key=self._calls.key(idempotency_key))
        answer = await self._calls.ask(ask)
        created = answer.headers.get(REPLAYED) is None
        return read_shape(RunStarted, answer, ask).model_copy(update={"created": created})

    async def get(self, run_id: str) -> RunDetail:
        """One run, as its status.json says."""
        return await self._calls.get(RunDetail, path_of("runs", run_id))

    async def request(self, run_id: str) -> RunRequestShape:
        """What a run was started with: the agent, its parameters and the trigger, while the ledger has the run."""
        return await self._calls.get(RunRequestShape, path_of("runs", run_id, "request"))

    async def status(self, run_id: str, *, unless: RunStatus | None = None) -> RunStatus | None:
        """One run, as its status.json says; None when it is still as `unless` says."""
        headers = {} if unless is None else {"If-None-Match": f'"{unless.version}"'}
        path = path_of("runs", run_id, "status")
        ask = GatewayRequest(method="GET", path=path, headers=headers, takes=frozenset({NOT_MODIFIED}))
        answer = await self._calls.ask(ask)
        return None if answer.status == NOT_MODIFIED else read_shape(RunStatus, answer, ask)

    async def list(
        self,
        *,
        agent: str | None = None,
        status: str | None = None,
        archived: bool = False,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[RunListed]:
        """Runs, newest first; with `archived` only those that have ended."""
        only = "true" if archived else None
        return await listed(self._calls, RunListed, "/runs", limit, cursor, agent=agent, status=status, archived=only)

    async def steps(self, run_id: str) -> Sequence[StepFile]:
        """The files of the steps that are done, in order."""
        return (await self._calls.get(Page[StepFile], path_of("runs", run_id, "steps"))).items

    async def manifest(self, run_id: str) -> RunManifest:
        """What a run that ended left; raises NotFound before."""
        return await self._calls.get(RunManifest, path_of("runs", run_id, "manifest"))

    async def wait(self, run_id: str, timeout_s: float | None = None) -> RunStatus:
        """The run once it has completed or failed; raises TimeoutError."""
        return await wait_for_last(self.watch(run_id), self._calls.clock, timeout_s, f"run {run_id}")

    def watch(self, run_id: str) -> AsyncGenerator[RunStatus]:
        """How the run stands, each time it has changed, until it has ended; never an older state after a newer one."""
        hints = follow(self._calls, {"run": run_id, "type": list(CHANGES)}, None)
        return changes(lambda last: self._look(run_id, last), hints, ended=has_ended, clock=self._calls.clock)

    async def cancel(
        self, run_id: str, *, mode: str = "soft", reason: str | None = None, idempotency_key: str | None = None
    ) -> Stopped:
        """End a run: soft asks it to stop, hard ends it now. Raises WrongState once it has ended."""
        body = {"mode": mode, "reason": reason}
        return await self._calls.post(Stopped, path_of("runs", run_id, "cancel"), body, key=idempotency_key)

    async def _look(self, run_id: str, last: RunStatus | None) -> RunStatus | None:
        try:
            return await self.status(run_id, unless=last)
        except NotFound as error:
            if error.retry_after_s is None:
                raise
            return None  # recorded in the ledger, but not published yet


def has_ended(run: RunStatus) -> bool:
    """Whether the run has ended."""
    return run.status in ENDED


class System(GatewayResource):
    """What the instance does now: `client.system`."""

    async def queues(self) -> Page[QueueShape]:
        """How many jobs of each type wait and are held, by type."""
        return await self._calls.get(Page[QueueShape], "/queues")

    async def pause(self, type_: str, *, reason: str | None = None, force: bool = False) -> QueuePaused:
        """Pause a job type: no more of its jobs are claimed.

        Held jobs continue. An operator's act. Raises Conflict for an unknown type.
        """
        return await self._set(type_, {"paused": True, "reason": reason, "force": force})

    async def resume(self, type_: str, *, reason: str | None = None, force: bool = False) -> QueuePaused:
        """Resume a job type: its jobs are claimed again. An operator's act."""
        return await self._set(type_, {"paused": False, "reason": reason, "force": force})

    async def _set(self, type_: str, body: Mapping[str, Any]) -> QueuePaused:
        ask = GatewayRequest(method="PATCH", path=path_of("queues", type_), body=body)
        return await self._calls.asked(QueuePaused, ask)

    async def workers(self) -> Page[WorkerShape]:
        """Worker processes that were seen lately, the last one first, and how much each holds."""
        return await self._calls.get(Page[WorkerShape], "/workers")

    async def alerts(self, *, only_open: bool = False, limit: int = ALERTS_MAX) -> AlertPage:
        """Open alerts, then resolved ones while they are kept, each newest first."""
        return await self._calls.get(AlertPage, "/alerts", open=only_open or None, limit=limit)

    async def metrics(self) -> str:
        """Queues, workers and followers in Prometheus' text format, and what the gateway's process has counted."""
        return (await self._calls.ask(GatewayRequest(method="GET", path="/metrics"))).body.decode()

    async def slo(self) -> Page[SloShape]:
        """The service level objectives, each measured over its window from what the ledger has stored."""
        return await self._calls.get(Page[SloShape], "/slo")

    async def authority(self) -> Page[RuleShape]:
        """The authority matrices: for each action, how far the right of each role goes."""
        return await self._calls.get(Page[RuleShape], "/authority")


class Schedules(GatewayResource):
    """When agents run and jobs are submitted by themselves: `client.schedules`."""

    async def list(self) -> Page[ScheduleShape]:
        """All schedules, those of agents first, each by name, with the next and the last time."""
        return await self._calls.get(Page[ScheduleShape], "/schedules")

    async def get(self, name: str) -> ScheduleDetail:
        """One schedule of jobs, and when its next five instants fire."""
        return await self._calls.get(ScheduleDetail, path_of("schedules", name))

    async def add(
        self,
        name: str,
        *,
        cron: str,
        tz: str = "UTC",
        type_: str | None = None,
        topic: str | None = None,
        payload: Any = None,
        concurrency_key: str | None = None,
        misfire: str = "once",
        overlap: str = "allow",
        jitter_s: float = 0.0,
        paused: bool = False,
        reason: str | None = None,
    ) -> ScheduleDetail:
        """Add a schedule of jobs of a type, or on a topic. The same again changes nothing. Raises Conflict."""
        body = {
            "name": name,
            "cron": cron,
            "tz": tz,
            "type": type_,
            "topic": topic,
            "payload": payload,
            "concurrency_key": concurrency_key,
            "misfire": misfire,
            "overlap": overlap,
            "jitter_s": jitter_s,
            "paused": paused,
            "reason": reason,
        }
        return await self._calls.post(ScheduleDetail, "/schedules", body)

    async def change(
        self, name: str, changes: Mapping[str, Any], *, paused: bool | None = None, reason: str | None = None
    ) -> ScheduleDetail:
        """Change fields of a schedule of jobs, or pause or resume it."""
        body = {**changes, "paused": paused, "reason": reason}
        ask = GatewayRequest(method="PATCH", path=path_of("schedules", name), body=body)
        return await self._calls.asked(ScheduleDetail, ask)

    async def pause(self, name: str, *, reason: str | None = None) -> ScheduleDetail:
        """Fire no instant of a schedule of jobs until it is resumed."""
        return await self.change(name, {}, paused=True, reason=reason)

    async def resume(self, name: str, *, reason: str | None = None) -> ScheduleDetail:
        """Fire a schedule of jobs again, from now on."""
        return await self.change(name, {}, paused=False, reason=reason)

    async def remove(self, name: str, *, reason: str | None = None) -> ScheduleRemoved:
        """Remove a schedule of jobs. The jobs that it submitted stay."""
        ask = GatewayRequest(method="DELETE", path=path_of("schedules", name), params={"reason": reason})
        return await self._calls.asked(ScheduleRemoved, ask)

    async def run(self, name: str) -> ScheduleRun:
        """Submit the job of a schedule now, whether it is paused or not."""
        return await self._calls.post(ScheduleRun, path_of("schedules", name, "run"))


class Feed(GatewayResource):
    """Events of all jobs: `client.feed`. `client.events` follows them as they happen, with less in each."""

    async def find(
        self,
        *,
        job_id: str | None = None,
        type_: str | None = None,
        correlation_id: str | None = None,
        since: datetime | None = None,
        lifecycle: str | None = None,
        limit: int = LIMIT_DEFAULT,
    ) -> EventPage:
        """The events of one job, or those of a type or a correlation id, oldest first; at most EVENTS_MAX."""
        filters = {"job_id": job_id, "type": type_, "correlation_id": correlation_id, "lifecycle": lifecycle}
        moment, size = None if since is None else since.isoformat(), min(limit, EVENTS_MAX)
        return await self._calls.get(EventPage, "/events", since=moment, limit=size, **filters)

    async def page(
        self, after: str | None = None, *, lifecycle: str | None = None, limit: int = LIMIT_DEFAULT
    ) -> EventPage:
        """The events after a position of the feed, at most EVENTS_MAX; go on from `position`.

        Without a position it begins with the first event; `latest` is the present end.
        """
        size = min(limit, EVENTS_MAX)
        return await self._calls.get(EventPage, "/events", after=after, lifecycle=lifecycle, limit=size)


class Safety(GatewayResource):
    """The safety policy: `client.safety`."""

    async def explain(self, request: Mapping[str, Any], *, policy: str | None = None) -> ExplanationShape:
        """Explain what the policy in force, or the one given as text, decides about a job request."""
        body = {"request": dict(request), "policy": policy}
        return await self._calls.post(ExplanationShape, "/safety/explain", body)

    async def simulate(
        self, policy: str, *, requests: Sequence[Mapping[str, Any]] | None = None, last: int = 100
    ) -> SimulationShape:
        """What a policy, given as text, decides about these requests, or about the last jobs on the bus."""
        body = {
            "policy": policy,
            "requests": None if requests is None else [dict(one) for one in requests],
            "last": last,
        }
        return await self._calls.post(SimulationShape, "/safety/simulate", body)
