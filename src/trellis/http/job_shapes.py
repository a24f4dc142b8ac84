"""Jobs and their events as clients and gateways exchange them, each kind with its own fields."""

from typing import Any, Literal

import pydantic

from trellis.http.shapes import EXAMPLE_RUN


class JobShape(pydantic.BaseModel):
    """A job of any lifecycle; `status` is a state in that lifecycle's words."""

    job_id: str
    lifecycle: str
    status: str
    type: str
    version: int


class JobSubmitted(JobShape):
    """A job as it was made; not `created`: an earlier request with the same key made it."""

    created: bool = True


class JobDocument(JobShape):
    """A job as the ledger has it now."""

    priority: Literal["critical", "interactive", "batch"]
    generation: int
    attempt: int
    max_attempts: int
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
    artifacts: list[ArtifactShape] = pydantic.Field(default_factory=list[ArtifactShape])
    """What its handler named when it succeeded."""
    cancel_asked_by: str | None = None
    """Who asked its holder to stop: until that is carried out, and of a job that ended otherwise before it was."""
    cancel_asked_at: str | None = None
    """When."""
    cancel_cause: str | None = None
    """Why."""


class QueueJobContext(pydantic.BaseModel):
    """What a queue job is answered from; no snapshot before its first attempt has made one."""

    memory_snapshot_url: str | None
    entity_refs: list[str]


class QueueJob(JobWhole):
    """A job of the job queue (document 000, 1.3); `attempt` counts the retries already made, `error` is `CODE: message`.

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
    attempt: int
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
    """A job on a topic (document 004): the request, the worker, the result. Its payload is at `context_ptr`, its result at `result_ptr`.

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
    payload: dict[str, Any]
    version: int
