"""The documents that clients and gateways exchange. Unknown fields of a newer gateway are no error."""

from typing import Any, Generic, Literal, TypeVar

import pydantic
from pydantic.alias_generators import to_camel

REPLAYED = "Idempotency-Replayed"
OUTCOME, REPLACED = "Submit-Outcome", "Replaced-Job"
"""The headers in which `POST /jobs` says what it did. The body of a repeated request is that of the first."""
"""Response header: the answer was given to an earlier request with the same idempotency key."""
EXAMPLE_RUN = "run_2026-02-14_080000_abc123"

ItemT = TypeVar("ItemT")


class Page(pydantic.BaseModel, Generic[ItemT]):
    """Some of the items; `next_cursor` asks for more, null at the end."""

    items: list[ItemT]
    next_cursor: str | None


class LiveEvent(pydantic.BaseModel):
    """Something that happened. `id` is its position: give it as `after` to go on behind it."""

    model_config = pydantic.ConfigDict(extra="allow", alias_generator=to_camel)

    id: str
    type: str
    run_id: str | None = None
    proposal_id: str | None = None
    job_id: str | None = None
    status: str | None = None
    step: Any = None
    version: int | None = None


class Begun(pydantic.BaseModel):
    """The run that was begun."""

    run_id: str
    agent_slug: str
    status: Literal["requested"]


class RunStarted(Begun):
    """The run that was begun; not `created`: an earlier request with the same key began it."""

    created: bool = True


class AlreadyProposed(pydantic.BaseModel):
    """What a run's agent wanted to propose, and the equal proposal that was there: pending, rejected on the same sources, or applied."""

    id: str
    """Of the equal proposal; empty where the file already has the text, and no known proposal put it there."""
    status: str
    """Of the equal proposal when the run looked."""
    action: str
    target: str


class RunStatus(pydantic.BaseModel):
    """status.json, with the version that rises."""

    model_config = pydantic.ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "run_id": EXAMPLE_RUN,
                    "agent_slug": "archivist-violin",
                    "status": "running",
                    "trigger": "manual",
                    "started_at": "2026-02-14T08:00:00.000Z",
                    "finished_at": None,
                    "current_step": "execute-agent",
                    "steps_total": 4,
                    "steps_completed": 1,
                    "proposals_created": [],
                    "error": None,
                    "version": 4,
                }
            ]
        }
    )

    run_id: str
    agent_slug: str
    status: str
    trigger: str
    started_at: str
    finished_at: str | None
    current_step: str | None
    steps_total: int
    steps_completed: int
    proposals_created: list[str]
    error: str | None
    version: int
    already_proposed: list[AlreadyProposed] = []
    refused_actions: int = 0
    """How many calls of tools were refused to the agent's model; the file of step execute-agent says which and why."""
    refused: list[dict[str, Any]] = []
    """Of a run that failed: calls that were refused to its model, with `tool`, `code`, `detail`, `action`, `target`."""


class RunDetail(RunStatus):
    """A run with what its ledger knows beside status.json; over HTTP that is None."""

    params: dict[str, Any] | None = None
    position: int | None = None
    """How many runs of the agent start before it; None once it has started."""
    cancel_requested: bool | None = None
    waits: dict[str, str] | None = None
    """Since when and for what it waits."""
    folder: str | None = None
    """Where its documents are stored."""


class StepFile(pydantic.BaseModel):
    """The file of one step."""

    model_config = pydantic.ConfigDict(extra="allow")

    step: int
    name: str
    run_id: str
    agent_slug: str
    started_at: str
    finished_at: str
    result: dict[str, Any]


class StepMade(pydantic.BaseModel):
    """A step in a manifest."""

    name: str
    file: str
    sha256: str
    started_at: str
    finished_at: str


class RunManifest(pydantic.BaseModel):
    """manifest.json of a run that ended."""

    model_config = pydantic.ConfigDict(extra="allow")

    run_id: str
    agent_slug: str
    trigger: str
    status: str
    started_at: str
    finished_at: str
    steps: list[StepMade]
    proposals_created: list[str]
    artifacts: list[str]
    summary: str | None
    error: str | None
    already_proposed: list[AlreadyProposed] = []
    refused_actions: int = 0
    refused: list[dict[str, Any]] = []


class Stopped(pydantic.BaseModel):
    """How it stands after the wish; a soft one leaves a running run running for a while."""

    run_id: str
    status: str


class RunListed(pydantic.BaseModel):
    """A run in a listing, as the ledger has it."""

    run_id: str
    agent_slug: str
    status: str
    trigger: str
    archived: bool
    """It has ended: its documents never change again, and there is nothing to poll for."""
    created_at: str
    updated_at: str
    proposals: int = 0
    """How many proposals it made."""
    already_proposed: int = 0
    refused_actions: int = 0


class AgentShape(pydantic.BaseModel):
    """An agent as its file says it; a malformed one says what to correct."""

    slug: str | None
    status: str
    name: str | None = None
    version: str | None = None
    description: str | None = None
    tools: list[str] = []
    cron: str | None = None
    problems: list[str] = []
    warnings: list[str] = []
    """What looks wrong in its file; it runs all the same."""
    last_run: str | None = None
    """Of an agent in error, for callers that may read every run: its last run."""
    last_error: str | None = None
    """How that run ended."""


class AgentChanged(AgentShape):
    """An agent after a change of its status."""

    previous: str | None = None
    """Its status before. None over HTTP, where a repeated request could not know it."""


class DeadLetterShape(pydantic.BaseModel):
    """Why a job needs a person."""

    job_id: str
    type: str
    lifecycle: str
    status: str
    reason_code: str
    stage: str
    last_error: str
    attempts: int
    last_owner: str | None
    last_lease_expires_at: str | None
    correlation_id: str
    at: str
    version: int


class Requeued(pydantic.BaseModel):
    """Which jobs run again, and which do not."""

    items: list[dict[str, Any]]


class ProposalShape(pydantic.BaseModel):
    """A proposal as it is published: what an agent wants changed, and what became of it. Its version is its ETag."""

    id: str
    status: str
    created_at: str
    updated_at: str
    expires_at: str
    agent_slug: str
    source: dict[str, Any]
    action: str
    target: str
    content: dict[str, Any]
    target_hash: str | None
    priority: str
    requiresHumanReview: bool  # noqa: N815 - the word of the documents
    approval: dict[str, Any] | None
    apply_result: dict[str, Any] | None
    version: int
    conflict: str | None = None
    """Why applying it would be refused now; only in a list that was asked for with `conflicts=true`."""


class ProposalDiff(pydantic.BaseModel):
    """What applying a proposal would change now: the current target against the proposed one."""

    id: str
    version: int
    diff: str | None
    """A unified diff; null for what changes no text or will not be applied any more."""
    conflict: str | None = None
    """Why applying it would be refused now; null while it can be applied. Approving it is then refused (409)."""
    rules_out: list[str] = []
    """Pending proposals for the same version of the same target, which can no longer be applied once this one is.

    Of the 1,000 newest pending proposals; there may be more.
    """
    ruled_out_by: list[str] = []
    """Pending proposals after which this one can no longer be applied; of the 1,000 newest, so there may be more."""
    source_warnings: list[str] = pydantic.Field([], description="Quoted sources that are gone or lost those words.")


class MemoryRead(pydantic.BaseModel):
    """Layer 1 of a memory at one commit: the files by name."""

    agent_id: str
    mode: str
    version: int
    commit: str | None
    files: dict[str, str]
    token_count: int
    last_update: str | None
    last_run_id: str | None


class FileChanged(pydantic.BaseModel):
    """One file in one change, with lines added and removed."""

    file: str
    kind: str
    added: int
    removed: int


class MemoryChange(pydantic.BaseModel):
    """One change of a memory. Without a proposal it was not made by the apply engine."""

    commit: str
    at: str
    author: str
    version: int | None
    proposal_id: str | None
    run_id: str | None
    auto_approved: bool | None
    reason: str | None
    files: list[FileChanged]


class MemoryProposed(pydantic.BaseModel):
    """A proposed change of memory. `failed`: it approved itself and could not be applied; `error` says why."""

    proposalId: str  # noqa: N815 - the word of the documents
    status: Literal["pending", "auto_applied", "failed"]
    error: str | None = None


class LogicProposed(pydantic.BaseModel):
    """A proposed change of logic, which waits for a person."""

    proposalId: str  # noqa: N815 - the word of the documents
    status: Literal["pending"]
    requiresHumanReview: Literal[True]  # noqa: N815 - as above


class Rejection(pydantic.BaseModel):
    """Why an entry of the inbox made nothing."""

    code: str
    reason: str


class InboxTaken(pydantic.BaseModel):
    """What became of an entry: one of the ids when it made something, the rejection when the gate refused it."""

    id: str
    status: str
    correlation_id: str
    run_id: str | None
    job_id: str | None
    proposal_id: str | None
    rejection: Rejection | None


class InboxEntry(InboxTaken):
    """An entry with what it asked for."""

    source: dict[str, Any]
    intent: dict[str, Any]
    metadata: dict[str, Any]
    created_at: str
    updated_at: str
    version: int


class InboxStats(pydantic.BaseModel):
    """How much waits in the inbox, and what became of what today."""

    pending: int
    processed_today: int
    rejected_today: int
    expired_today: int


EXAMPLE_ARTIFACT = "art-7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d"


class ArtifactListed(pydantic.BaseModel):
    """An artifact without what it says."""

    artifact_id: str
    job_id: str
    run_id: str = pydantic.Field(description="The run that asked for it; without one, an id of the job's own.")
    type: str
    agent_slug: str
    created_at: str
    finalized: bool
    finalized_at: str | None
    version: int | None
    url: str | None
    entity_refs: list[str]
    tags: list[str]


class ArtifactStaged(ArtifactListed):
    """What was staged: no reader sees it before its job is complete. Hash and size are those of the stored bytes."""

    sha256: str
    size: int


class ArtifactSourceShape(pydantic.BaseModel):
    """Where something comes from, in the source's own words."""

    ref: str
    excerpt: str


class Artifact(ArtifactListed):
    """A finalized artifact. What `content` holds, its type says."""

    model_config = pydantic.ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "artifact_id": EXAMPLE_ARTIFACT,
                    "job_id": "0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77",
                    "run_id": EXAMPLE_RUN,
                    "type": "BRIEF",
                    "agent_slug": "archivist-violin",
                    "created_at": "2026-02-14T08:00:10.000Z",
                    "finalized": True,
                    "finalized_at": "2026-02-14T08:00:12.000Z",
                    "version": 1,
                    "url": f"https://s3.example.org/garden/projects/5f3b9a1c2d4e6f70/artifacts/{EXAMPLE_ARTIFACT}.json",
                    "entity_refs": ["bow"],
                    "tags": ["brief"],
                    "content": {
                        "title": "Bows",
                        "body": "A bow is strung with horsehair.",
                        "entity_map": {"bow": "Bow"},
                        "word_count": 6,
                    },
                    "sources": [{"ref": "sources/bows.md", "excerpt": "A bow is strung with horsehair."}],
                }
            ]
        }
    )

    content: dict[str, Any]
    sources: list[ArtifactSourceShape]


class CleanedUpShape(pydantic.BaseModel):
    """What a cleanup removed, or with `dry_run` would remove. `more`: ask again. Bytes are deleted when the removal is recorded."""

    older_than_days: int
    dry_run: bool
    items: list[ArtifactListed]
    more: bool


# --- jobs and their events ---


class JobShape(pydantic.BaseModel):
    """A job of any lifecycle; `status` is a state in that lifecycle's words."""

    job_id: str
    lifecycle: str
    status: str
    type: str
    version: int


class JobSubmitted(JobShape):
    """A job as it was made; not `created`: an earlier request with the same key or unique key made it."""

    created: bool = True
    outcome: Literal["created", "returned", "replaced"] = "created"
    """What the request did; `replaced` is a new job in place of the waiting one with the same unique key."""
    replaced: str | None = None
    """The waiting job with the same unique key that was cancelled."""


class JobDocument(JobShape):
    """A job as the ledger has it now."""

    priority: Literal["critical", "interactive", "batch"]
    generation: int
    attempt: int = pydantic.Field(
        description="How many attempts were over before the present one, from 0: the retries already made. "
        "The command line and `ctx.attempt` show the number of the present attempt, which is one more."
    )
    max_attempts: int = pydantic.Field(
        description="How many attempts the job may have in all. A queue job counts retries here: it has one attempt more. "
        "`attempts_allowed` is the number of attempts of every job."
    )
    created_at: str
    updated_at: str
    due_at: str | None
    deadline_at: str | None
    owner: str | None
    lease_expires_at: str | None
    cancel_requested: bool
    correlation_id: str
    parent_id: str | None
    compensates: str | None
    epoch: int | None = pydantic.Field(None, description="How often it was claimed.")
    attempts_made: int | None = pydantic.Field(None, description="Attempts made, with the present or next one.")
    attempts_allowed: int | None = pydantic.Field(
        None,
        description="Attempts that the job may make in all, whatever `max_attempts` counts: `attempts_made` of these.",
    )


class ArtifactShape(pydantic.BaseModel):
    """Where something is that a job made, as its handler named it."""

    pointer: str
    name: str | None = None
    sha256: str | None = None
    size: int | None = None


class JobWhole(JobDocument):
    """A job with its payload and its result."""

    payload: Any
    progress: Any
    result: Any
    place: Literal["ready", "scheduled", "blocked", "held", "ended"] | None = None
    concurrency_key: str | None = None
    artifacts: list[ArtifactShape] = pydantic.Field(default_factory=list[ArtifactShape])
    """What its handler named when it succeeded."""
    traceback: str | None = None
    """The Python traceback of its handler's last failure; null if no attempt failed."""
    cancel_asked_by: str | None = None
    """Who asked its holder to stop: until that is carried out, and of a job that ended otherwise before it was."""
    cancel_asked_at: str | None = None
    """When."""
    cancel_cause: str | None = None
    """Why."""
    cancel_due_at: str | None = None
    """While the request is pending: when the job is ended if its holder has not stopped by then."""


class QueueJobContext(pydantic.BaseModel):
    """What a queue job is answered from; no snapshot before its first attempt has made one."""

    memory_snapshot_url: str | None
    entity_refs: list[str]


class QueueJob(JobWhole):
    """A job of the job queue; `attempt` counts the retries already made, `error` is `CODE: message`.

    What other jobs have too (`type`, `version`, `owner`, `result` and so on) is there beside the fields of the document.
    """

    model_config = pydantic.ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "job_id": "0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77",
                    "run_id": EXAMPLE_RUN,
                    "job_type": "RESEARCH",
                    "agent_slug": "archivist-violin",
                    "status": "NOTEBOOKLM_CALL",
                    "attempt": 0,
                    "max_attempts": 3,
                    "attempts_made": 1,
                    "attempts_allowed": 4,
                    "payload": {"query": "Who made the violin?"},
                    "context": {
                        "memory_snapshot_url": "https://gateway.example/jobs/0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77/context/1",
                        "entity_refs": ["violin"],
                    },
                    "callback": "https://gateway.example/jobs/0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77/result",
                    "created_at": "2026-02-14T08:00:00.000Z",
                    "updated_at": "2026-02-14T08:00:01.000Z",
                    "artifact_id": None,
                    "error": None,
                    "lifecycle": "queue-job",
                    "type": "RESEARCH",
                    "version": 4,
                    "priority": "batch",
                    "generation": 0,
                    "due_at": None,
                    "deadline_at": None,
                    "owner": "up@garden:1",
                    "lease_expires_at": "2026-02-14T08:00:21.000Z",
                    "cancel_requested": False,
                    "correlation_id": "0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77",
                    "parent_id": None,
                    "compensates": None,
                    "progress": None,
                    "result": None,
                }
            ]
        }
    )

    lifecycle: Literal["queue-job"]  # type: ignore[assignment] - narrower
    run_id: str
    job_type: Literal["RESEARCH", "BRIEF", "PROPOSAL_PREPROCESS"]
    agent_slug: str
    context: QueueJobContext
    callback: str
    artifact_id: str | None
    error: str | None


class BusHold(pydantic.BaseModel):
    """Why a job on a topic waits: for a person (`human`), for a while (`throttle`, `retry`), for an earlier step (`order`), for a worker that fits (`placement`) or can be reached (`listener`), for an answer of the safety kernel that can be used (`kernel`), or for others of its tenant (`tenant`)."""

    kind: Literal["human", "throttle", "kernel", "order", "placement", "listener", "retry", "tenant"]
    reason: str
    until: str | None


class BusDispatch(pydantic.BaseModel):
    """The last handing-out: to a worker alone, or with an empty `worker_id` to whoever listens at the subject."""

    dispatch_id: str
    attempt: int = pydantic.Field(description="The number of the attempt that was handed out, from 1.")
    epoch: int
    worker_id: str
    subject: str
    at: str


class BusRetry(pydantic.BaseModel):
    """The job that does a failed one again, the last of them; `due` while another one is about to be made."""

    job_id: str | None
    status: str | None
    due: bool


class BusJob(JobWhole):
    """A job on a topic: the request, the worker, the result. Its payload is at `context_ptr`, its result at `result_ptr`.

    `decision` is the safety kernel's last one; `refused_results` are reports that came late, twice or from somebody else and changed nothing.
    """

    model_config = pydantic.ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "job_id": "0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77",
                    "lifecycle": "bus-job",
                    "status": "SUCCEEDED",
                    "type": "job.echo",
                    "version": 5,
                    "priority": "interactive",
                    "generation": 0,
                    "attempt": 0,
                    "max_attempts": 1,
                    "attempts_made": 1,
                    "attempts_allowed": 1,
                    "created_at": "2026-02-14T08:00:00.000Z",
                    "updated_at": "2026-02-14T08:00:01.000Z",
                    "due_at": None,
                    "deadline_at": "2026-02-14T08:01:00.000Z",
                    "owner": None,
                    "lease_expires_at": None,
                    "cancel_requested": False,
                    "correlation_id": "press-1",
                    "parent_id": None,
                    "compensates": None,
                    "payload": None,
                    "progress": None,
                    "result": None,
                    "topic": "job.echo",
                    "context_ptr": "objects://ctx/2c26b46b68ffc68ff99b453c1d304134",
                    "adapter_id": "",
                    "env": {},
                    "parent_job_id": "",
                    "workflow_id": "",
                    "step_index": 0,
                    "memory_id": "",
                    "context_hints": None,
                    "budget": {"deadline_ms": 60_000},
                    "tenant_id": "acme",
                    "principal_id": "iryna",
                    "labels": {},
                    "meta": None,
                    "compensation": None,
                    "identity": None,
                    "context_ref": None,
                    "worker_id": "echo-1",
                    "execution_ms": 12,
                    "error_code": None,
                    "error_message": None,
                    "result_ptr": "objects://res/fcde2b2edba56bf408601fb721fe9b5c",
                    "artifact_ptrs": [],
                    "result_ref": None,
                    "artifact_refs": [],
                    "worker_status": "SUCCEEDED",
                    "hold": None,
                    "decision": {
                        "decision": "allow",
                        "rule": "everything",
                        "reason": "",
                        "policy_hash": "9f86d081",
                        "job_hash": "60303ae2",
                    },
                    "dispatch": {
                        "dispatch_id": "7b1f6c1e-8a54-4b0e-9d2e-3c5d1a2b3c4d",
                        "attempt": 1,
                        "epoch": 1,
                        "worker_id": "echo-1",
                        "subject": "worker.echo-1.jobs",
                        "at": "2026-02-14T08:00:00.500Z",
                    },
                    "refused_results": [],
                    "children": "/jobs?parent_id=0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77",
                    "retry": None,
                }
            ]
        }
    )

    lifecycle: Literal["bus-job"]  # type: ignore[assignment] - narrower
    topic: str
    context_ptr: str
    adapter_id: str
    env: dict[str, str]
    parent_job_id: str
    workflow_id: str
    step_index: int
    memory_id: str
    context_hints: dict[str, Any] | None
    budget: dict[str, Any] | None
    tenant_id: str
    principal_id: str
    labels: dict[str, str]
    meta: dict[str, Any] | None
    compensation: dict[str, Any] | None
    identity: dict[str, Any] | None
    context_ref: dict[str, Any] | None
    worker_id: str | None
    execution_ms: int | None
    error_code: str | None
    error_message: str | None
    result_ptr: str | None
    artifact_ptrs: list[str]
    result_ref: dict[str, Any] | None
    artifact_refs: list[dict[str, Any]]
    worker_status: str | None
    """How its worker named the end; FAILED_RETRYABLE, FAILED_FATAL, TIMEOUT, DENIED and CANCELLED are FAILED here."""
    hold: BusHold | None
    decision: dict[str, Any] | None
    dispatch: BusDispatch | None
    refused_results: list[dict[str, Any]]
    children: str
    retry: BusRetry | None


class AnyJob(pydantic.RootModel[QueueJob | BusJob | JobWhole]):
    """One job, as its kind is told."""


class EventShape(pydantic.BaseModel):
    """One transition: `payload.from` and `payload.to` are the states."""

    id: str
    job_id: str
    type: str
    ts: str
    actor: str
    correlation_id: str
    cause: str | None
    payload: dict[str, Any] = pydantic.Field(
        description="`from` and `to`, `role`, `generation`, `attempt` (from 0, as in the job), `epoch`, `trace_id`, and "
        "`data`: what the transition recorded."
    )
    version: int


class SignalReceipt(pydantic.BaseModel):
    """A signal that is stored for its job. Not `created`: an earlier request with the same key has sent it."""

    job_id: str
    name: str
    status: str
    created: bool
    waits_for: str | None = None
    """The signal that the job waits for, if it is another one."""


class SignalShape(pydantic.BaseModel):
    """A log line of a handler (`job_log`), or a sign of progress. It is no transition and is kept for a limited time."""

    ts: str
    type: str
    data: Any
