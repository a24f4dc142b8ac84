"""Job requests on the bus, and the wire ids under which workers know jobs.

A request has all the fields of document 004. The payload of a bus job is the JSON of its request and never changes. The
fields that the engine needs (topic, priority, deadline, idempotency key) are also stored in the job's own columns.
Pointers are opaque here (BUS-9).
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict

import pydantic
import pydantic_core

from trellis.bus.errors import BusRequestInvalid
from trellis.bus.topics import TENANT_KEY, Topics
from trellis.engine.jobs import DELAY_S_MAX, JOB_ID_PATTERN, Epoch, JobId, NewJob, Priority
from trellis.engine.records import Job
from trellis.lifecycles.bus_job import BUS_JOB

# Wire ids: `<job id>@<epoch>`, a new one for each dispatch (D29). No job id ends in `@` and a number
# (`trellis.engine.jobs`), so a wire id names exactly one job.


def wire_id(job_id: JobId, epoch: Epoch) -> str:
    """The id under which workers see one dispatch of a job."""
    return f"{job_id}@{epoch}"


def read_wire_id(text: str) -> tuple[JobId, Epoch] | None:
    """Parse a wire id into job id and epoch; None if the text is not a wire id."""
    job_id, at, epoch = text.rpartition("@")
    if not at or not job_id or not (epoch.isascii() and epoch.isdigit()) or len(epoch) > 18:
        return None
    return JobId(job_id), Epoch(int(epoch))


def job_id_of(text: str) -> str:
    """The job id in `text`, which is either a job id or a wire id of the job."""
    parsed = read_wire_id(text)
    return text if parsed is None else parsed[0]


TOPIC_PATTERN = r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){0,15}$"
FIELD_PATTERNS = {
    "topic": "up to 16 words of letters, digits, _ and -, with dots between them, as in job.echo; no wildcards",
    "job_id": "letters, digits and . _ : @ -, beginning with a letter or a digit",
}
"""Description of a field's pattern, for error messages."""
ENTRIES_MAX = 1_000
CALLER_ENV_MAX = ENTRIES_MAX - 6
"""Entry limit for `env` in a request from outside.

The dispatch order adds up to 6 entries of its own: the job's ids, how the job starts, the lease, the trace and the
constraints.
"""
CALLER_ID_CHARS_MAX = 160
"""Length limit for a job id from outside. Wire ids and the ids of retries are longer and must also fit."""
RETRY_OF = "retry_of"
"""Label that marks a job as the retry of another (BUS-7).

Its parent is then the job that it retries, not the parent of its workflow.
"""
RETRY_ATTEMPT = "trellis.retry_attempt"
"""Label with the number of the retry, from 1."""
FIRST_PARENT = "trellis.parent"
"""Label in which a retry keeps the parent of the first job."""
REQUEUE_CAUSE = "trellis.requeue_cause"
"""Label with an operator's reason for requeueing a job. Workers do not receive it."""
COMPENSATES = "trellis.compensates"
"""Label of a job that compensates another."""
TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})")
"""Time format of CAP's JSON form. The packet encoder reads no other format."""
TIME_FRACTION = re.compile(r"\.[0-9]+")
RESERVED_TOPIC_PREFIXES = ("sys.", "worker.", "_")
"""Reserved subject prefixes of the bus.

A topic is also the subject its jobs are sent to, so requests may not use these prefixes.
"""
RESERVED_LABEL_PREFIX = "trellis."
"""Prefix of the control plane's own labels. Requests from outside that use it are refused.

Placement ignores these labels.
"""

Text = Annotated[str, pydantic.Field(max_length=2_000)]
Name = Annotated[str, pydantic.Field(max_length=200)]
Tokens = Annotated[int, pydantic.Field(ge=0, le=10_000_000_000)]
Pairs = Annotated[dict[Name, Text], pydantic.Field(max_length=ENTRIES_MAX)]
Names = Annotated[tuple[Name, ...], pydantic.Field(max_length=ENTRIES_MAX)]
PriorityName = Literal["critical", "interactive", "batch"]


class _RequestModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Budget(_RequestModel):
    """How much a job may use; `deadline_ms` counts from its submission."""

    max_input_tokens: Tokens = 0
    max_output_tokens: Tokens = 0
    max_total_tokens: Tokens = 0
    deadline_ms: int = pydantic.Field(0, ge=0, le=int(DELAY_S_MAX * 1000))


class ContextHints(_RequestModel):
    """How a worker may treat the context."""

    max_input_tokens: int = pydantic.Field(0, ge=0, lt=2**31)
    allow_summarization: bool = False
    allow_retrieval: bool = False
    tags: Names = ()


class JobMeta(_RequestModel):
    """Who asks, and what the job needs."""

    tenant_id: Name = ""
    actor_id: Name = ""
    actor_type: Literal["", "human", "service"] = ""
    idempotency_key: Name = ""
    capability: Name = ""
    risk_tags: Names = ()
    requires: Names = ()
    pack_id: Name = ""
    labels: Pairs = pydantic.Field(default_factory=dict[str, str])


class ResourceRef(_RequestModel):
    """Where data is and what it must be: CAP's structured form of a pointer. `sha256` is in hexadecimal, `expires_at` as in RFC 3339."""

    resolver_id: Name = ""
    uri: Text = ""
    sha256: str = pydantic.Field("", pattern=r"^([0-9a-f]{64})?$")
    media_type: Name = ""
    size_bytes: int = pydantic.Field(0, ge=0, lt=2**64)
    expires_at: str = pydantic.Field("", max_length=40)
    purpose: Name = ""

    @pydantic.field_validator("expires_at")
    @classmethod
    def _is_a_time(cls, text: str) -> str:
        """Rejects times that a packet cannot carry; otherwise the error would appear only at dispatch."""
        if not text:
            return text
        try:
            if TIME.fullmatch(text):
                datetime.fromisoformat(TIME_FRACTION.sub("", text)).astimezone(UTC)
                return text
        except (ValueError, OverflowError):
            pass
        raise pydantic_core.PydanticCustomError("time", "a time as in RFC 3339, such as 2030-01-31T12:00:00Z")


class IdentityBinding(_RequestModel):
    """For whom a job acts, in one place. What other fields say of it must be the same."""

    tenant_id: Name = ""
    principal_id: Name = ""
    actor_id: Name = ""
    delegation_id: Name = ""


class Compensation(_RequestModel):
    """How to undo a job that succeeded; what is empty is as in the job itself."""

    topic: str = pydantic.Field("", pattern=f"^$|{TOPIC_PATTERN}", max_length=200)
    context_ptr: Text = ""
    priority: PriorityName | None = None
    adapter_id: Name = ""
    env: Pairs = pydantic.Field(default_factory=dict[str, str])
    memory_id: Name = ""
    context_hints: ContextHints | None = None
    budget: Budget | None = None
    labels: Pairs = pydantic.Field(default_factory=dict[str, str])
    meta: JobMeta | None = None
    context_ref: ResourceRef | None = None


class JobRequest(_RequestModel):
    """A request to run a job on a topic."""

    job_id: str = pydantic.Field(pattern=JOB_ID_PATTERN)
    topic: str = pydantic.Field(pattern=TOPIC_PATTERN, max_length=200)
    priority: PriorityName | None = None
    context_ptr: Text = ""
    adapter_id: Name = ""
    env: Pairs = pydantic.Field(default_factory=dict[str, str])
    parent_job_id: Name = ""
    workflow_id: Name = ""
    step_index: int = pydantic.Field(0, ge=0, lt=2**31)
    memory_id: Name = ""
    context_hints: ContextHints | None = None
    budget: Budget | None = None
    tenant_id: Name = ""
    principal_id: Name = ""
    labels: Pairs = pydantic.Field(default_factory=dict[str, str])
    meta: JobMeta | None = None
    compensation: Compensation | None = None
    identity: IdentityBinding | None = None
    context_ref: ResourceRef | None = None

    @property
    def tenant(self) -> str:
        """The tenant, from the first of three fields that names one."""
        tenants = (self.tenant_id, self.meta and self.meta.tenant_id, self.identity and self.identity.tenant_id)
        return next(filter(None, tenants), "")

    @property
    def context(self) -> str:
        """The pointer to the payload, from `context_ptr` or `context_ref`; empty when there is none."""
        return self.context_ptr or (self.context_ref.uri if self.context_ref else "")

    @property
    def is_retry(self) -> bool:
        """Whether the job is a retry, so that its parent is the job it retries."""
        return RETRY_OF in self.labels

    @property
    def step_of(self) -> str:
        """The parent job whose step this is, also for a retry; empty when it is not a step."""
        return self.labels.get(FIRST_PARENT, "") if self.is_retry else self.parent_job_id

    @property
    def body(self) -> bytes:
        """The stored form: canonical JSON, so that equal requests have equal bytes."""
        return _canonical_json(self.stored)

    @property
    def hash(self) -> str:
        """The SHA-256 of the stored form. An approval is bound to it."""
        return hashlib.sha256(self.body).hexdigest()

    @property
    def fingerprint(self) -> bytes:
        """Identifies "the same request" for idempotency.

        Covers everything but the job id, so one key under two ids is one request.
        """
        return self.body_and_fingerprint[1]

    @property
    def body_and_fingerprint(self) -> tuple[bytes, bytes]:
        """Both `body` and `fingerprint`, read from the fields once."""
        stored = self.stored
        body = _canonical_json(stored)
        del stored["job_id"]
        return body, hashlib.sha256(_canonical_json(stored)).digest()

    @property
    def stored(self) -> dict[str, Any]:
        """The stored form as a dict: without fields that have their default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def read(cls, body: bytes) -> "JobRequest":
        """Parse a stored request; raises BusRequestInvalid."""
        try:
            return cls.model_validate_json(body)
        except pydantic.ValidationError as error:
            raise BusRequestInvalid(detail=_first_problem(error)) from None

    @classmethod
    def valid(cls, fields: Mapping[str, Any]) -> "JobRequest":
        """Validate the fields of a request of our own; raises BusRequestInvalid."""
        try:
            return cls.model_validate(fields)
        except pydantic.ValidationError as error:
            raise BusRequestInvalid(detail=_first_problem(error)) from None

    @classmethod
    def checked(cls, fields: Mapping[str, Any]) -> "JobRequest":
        """Validate a request from outside; raises BusRequestInvalid."""
        request = cls.valid(fields)
        if len(request.job_id) > CALLER_ID_CHARS_MAX:
            raise BusRequestInvalid(detail=f"job_id: at most {CALLER_ID_CHARS_MAX} characters; choose a shorter one")
        contradiction = _contradiction(request)
        if contradiction is not None:
            raise BusRequestInvalid(detail=contradiction)
        for place, env in (
            ("env", request.env),
            ("compensation/env", request.compensation.env if request.compensation else {}),
        ):
            if len(env) > CALLER_ENV_MAX:
                raise BusRequestInvalid(
                    detail=f"{place}: at most {CALLER_ENV_MAX} entries; put the others into the payload"
                )
        for place, topic in (("topic", request.topic), ("compensation/topic", _undo_topic(request))):
            if topic.startswith(RESERVED_TOPIC_PREFIXES):
                raise BusRequestInvalid(
                    detail=f"{place}: {topic} is a subject of the bus itself; choose one like job.{topic}"
                )
        for place, labels in _labels(request):
            ours = next((name for name in labels if name.startswith(RESERVED_LABEL_PREFIX) or name == RETRY_OF), None)
            if ours is not None:
                raise BusRequestInvalid(detail=f"{place}/{ours}: this label is set by the control plane; leave it out")
        return request


def request_of(job: Job) -> JobRequest:
    """The request stored in a job.

    Raises BusRequestInvalid, also when the request names another job or topic: the safety kernel judges the request.
    """
    request = JobRequest.read(job.payload or b"")
    if (request.job_id, request.topic) != (job.job_id, job.type):
        raise BusRequestInvalid(detail=f"it is a request for job {request.job_id} on {request.topic}")
    return request


def new_bus_job(
    request: JobRequest, topics: Topics, *, trace_id: str, trace: str | None = None, compensates: JobId | None = None
) -> NewJob:
    """The ledger job for a request. The same id and body again is the same job; another body is refused (BUS-11).

    If the parent is given by one of its wire ids, the job with that wire id is the parent.
    """
    parent_id = job_id_of(request.parent_job_id)
    if parent_id != request.parent_job_id:
        request = request.model_copy(update={"parent_job_id": parent_id})
    body, fingerprint = request.body_and_fingerprint
    topic, tenant = topics.of(request.topic), request.tenant
    key = request.meta.idempotency_key if request.meta else ""
    limit = topics.tenant(tenant).held_max if tenant else None
    deadline_ms = request.budget.deadline_ms if request.budget else 0
    attempts = topic.max_attempts if topic.idempotent else 1
    return NewJob(
        job_id=JobId(request.job_id),
        type=request.topic,
        payload=body,
        lifecycle=BUS_JOB.name,
        priority=Priority[(request.priority or "batch").upper()],
        deadline_s=deadline_ms / 1000 if deadline_ms else topic.deadline_s,
        max_attempts=attempts,
        max_deaths=attempts,
        concurrency_key=None if limit is None else f"{TENANT_KEY}{tenant}",
        concurrency_limit=limit or 1,
        idempotency_key=key or None,
        idempotency_scope=f"bus:{tenant}",
        fingerprint=fingerprint,
        id_is_given=True,
        correlation_id=trace_id or None,
        trace=trace,
        parent_id=JobId(request.parent_job_id) if request.parent_job_id else None,
        compensates=compensates,
    )


_NO_META = JobMeta.model_validate({})


def _contradiction(request: JobRequest) -> str | None:
    """Describe where the identity fields of a request contradict each other; None when they agree.

    Contradictions are not repaired.
    """
    identity, meta = request.identity, request.meta or _NO_META
    if identity is None:
        return None
    mirrors = (
        ("tenant_id", identity.tenant_id, (request.tenant_id, meta.tenant_id)),
        ("principal_id", identity.principal_id, (request.principal_id,)),
        ("actor_id", identity.actor_id, (meta.actor_id,)),
    )
    for name, bound, others in mirrors:
        if bound and any(other not in {"", bound} for other in others):
            return (
                f"identity/{name}: another field of the request says otherwise; say the same in both, or in one alone"
            )
    return None


def _labels(request: JobRequest) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Every place in a request that has labels. The safety policy and follow-up jobs use all of them."""
    undo = request.compensation
    yield "labels", request.labels
    yield "meta/labels", request.meta.labels if request.meta else {}
    yield "compensation/labels", undo.labels if undo else {}
    yield "compensation/meta/labels", undo.meta.labels if undo and undo.meta else {}


def _undo_topic(request: JobRequest) -> str:
    return request.compensation.topic if request.compensation else ""


_CANONICAL = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _canonical_json(fields: Mapping[str, Any]) -> bytes:
    return _CANONICAL.encode(fields).encode()


def _first_problem(error: pydantic.ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    shaped = problem["type"] == "string_pattern_mismatch"
    expected = FIELD_PATTERNS.get(str(problem["loc"][-1])) if shaped else None
    return f"{'/'.join(map(str, problem['loc']))}: {expected or problem['msg']}"


# The same fields as keyword arguments, for callers in Python.


class TopicSubmitOptions(TypedDict, total=False):
    """What can be said about a new job on a topic beside its payload (document 004)."""

    job_id: str
    """Choose the id: the same id and request again is the same job, another request is refused."""
    priority: str
    """`critical`, `interactive` or `batch`."""
    context_ptr: str
    """Where the payload is, instead of giving it."""
    adapter_id: str
    """Which adapter its worker shall use, in the worker's own words."""
    env: Mapping[str, str]
    """What its worker is told beside the payload."""
    parent_job_id: str
    """The job whose step it is."""
    workflow_id: str
    """Steps of one workflow and parent go in the order of `step_index`."""
    step_index: int
    """Its place among the steps, from 0."""
    memory_id: str
    """The memory that its worker may use."""
    context_hints: Mapping[str, Any]
    """`max_input_tokens`, `allow_summarization`, `allow_retrieval`, `tags`."""
    budget: Mapping[str, int]
    """`deadline_ms` from now, and how many tokens it may use."""
    tenant_id: str
    """Whom it is for; how many of a tenant's jobs may run at the same time can be limited."""
    labels: Mapping[str, str]
    """`worker.<name>` must be the same label of its worker."""
    meta: Mapping[str, Any]
    """`requires`, `risk_tags`, `capability` and who asks."""
    compensation: Mapping[str, Any]
    """How it is undone when a later step of its workflow fails."""
    identity: Mapping[str, str]
    """For whom it acts: `tenant_id`, `principal_id`, `actor_id`, `delegation_id`; the same as other fields say."""
    context_ref: Mapping[str, Any]
    """Where the payload is, and what it must be: `uri`, `sha256`, `size_bytes`, `media_type` and more of CAP's ResourceRef."""
