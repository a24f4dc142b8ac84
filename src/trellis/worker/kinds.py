"""Kinds of job that the HTTP API and the inbox accept: a leased job, a job of the job queue, and a job on a bus topic.

The request field `type`, `job_type` or `topic` selects the kind. Each kind is one entry of `JOB_KINDS`.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import pydantic

from trellis.agents.catalog import AgentMissing, Catalog
from trellis.agents.definition import AgentMalformed
from trellis.artifacts.content import problems_of
from trellis.artifacts.payloads import ENTITY_REFS_MAX
from trellis.auth.ownership import admitted_submission, within_agent
from trellis.auth.principals import Principal
from trellis.bus.requests import (
    Budget,
    Compensation,
    ContextHints,
    IdentityBinding,
    JobMeta,
    JobRequest,
    Name,
    Pairs,
    ResourceRef,
    Text,
)
from trellis.bus.submitter import BusSubmitter, IdempotencyScopeAndKey
from trellis.documents import ids
from trellis.documents.errors import AgentNotRunnable, RunError, RunOfAnother
from trellis.documents.lookup import find_run
from trellis.documents.run_documents import RunRequest
from trellis.engine import tracing
from trellis.engine.errors import InputError
from trellis.engine.jobs import ATTEMPTS_MAX, DELAY_S_MAX, NewJob
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job
from trellis.engine.text import nearest
from trellis.engine.uniqueness import WINDOW_S_MAX, OnConflict, WhileHeld
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.research.errors import SettingNotForQueue, SourceUnreadable
from trellis.research.queue_job import QueueRequest, checked_request, new_queue_job, requested_sources
from trellis.runs.agent_status import why_not_runnable
from trellis.worker.app import priority_of
from trellis.worker.options import KEY_LIMIT_MAX
from trellis.worker.requests import KEY_CHARS_MAX, UNIQUE_SETTINGS, BatchJob, SubmitSettings, new_job

QUEUE_FIELDS = ("agent_slug", "entity_refs", "run_id")
"""Fields that only a job of the job queue has."""
BUS_FIELDS = tuple(name for name in JobRequest.model_fields if name not in {"topic", "priority", "principal_id"})
"""Fields that only a job on a topic has: those of a JobRequest (document 004)."""
NOT_OF_QUEUE = ("run_at", "delay_s", "max_attempts", "concurrency_key", "concurrency_limit", *sorted(UNIQUE_SETTINGS))
NOT_OF_BUS = (*NOT_OF_QUEUE, "deadline_s", "parent_id")
NOT_SETTINGS = frozenset({"type", "job_type", "topic", "payload", *QUEUE_FIELDS, *BUS_FIELDS})
"""The fields that are no setting of a submit."""


class KindUnclear(InputError):
    """A job is named by exactly one of {fields}; found {found}."""


class FieldsNotOfKind(InputError):
    """{fields} belongs to jobs named by {kind!r}; leave it out, or name the job so."""


class SettingNotForBus(InputError):
    """{fields} is not for jobs on a topic: say budget.deadline_ms for a deadline and parent_job_id for a parent; attempts and limits are the topic's and the tenant's, and time is given by whoever submits."""


class AgentUnknown(InputError):
    """There is no agent {slug!r}; {hint}`trellis agents` lists those there are."""


class RunUnknown(InputError):
    """run_id names no run of this instance: {reason}"""


class JobRequestBody(pydantic.BaseModel):
    """A job to submit: `type` for a leased-job, `job_type` with `agent_slug` for the job queue, `topic` with the fields of a JobRequest for the bus."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"type": "index.document", "payload": {"id": 7}, "priority": "interactive", "max_attempts": 3},
                {
                    "job_type": "RESEARCH",
                    "agent_slug": "archivist-violin",
                    "payload": {"query": "Who made the violin?"},
                    "entity_refs": ["violin"],
                },
                {
                    "topic": "job.echo",
                    "payload": {"text": "hello"},
                    "priority": "interactive",
                    "tenant_id": "acme",
                    "labels": {"worker.region": "eu"},
                    "budget": {"deadline_ms": 60_000},
                },
            ]
        },
    )

    type: str | None = pydantic.Field(None, max_length=KEY_CHARS_MAX)
    job_type: str | None = pydantic.Field(None, max_length=KEY_CHARS_MAX)
    topic: str | None = pydantic.Field(None, max_length=KEY_CHARS_MAX)
    payload: Any = None
    agent_slug: str | None = pydantic.Field(None, max_length=KEY_CHARS_MAX)
    entity_refs: list[str] | None = pydantic.Field(None, max_length=ENTITY_REFS_MAX)
    run_id: str | None = pydantic.Field(None, max_length=KEY_CHARS_MAX)
    priority: Literal["critical", "interactive", "batch"] | None = None
    run_at: pydantic.AwareDatetime | None = None
    delay_s: float | None = pydantic.Field(None, ge=0, le=DELAY_S_MAX)
    deadline_s: float | None = pydantic.Field(None, gt=0, le=DELAY_S_MAX)
    max_attempts: int | None = pydantic.Field(None, ge=1, le=ATTEMPTS_MAX)
    concurrency_key: str | None = pydantic.Field(None, min_length=1, max_length=KEY_CHARS_MAX)
    concurrency_limit: int | None = pydantic.Field(None, ge=1, le=KEY_LIMIT_MAX)
    unique: str | None = pydantic.Field(None, min_length=1, max_length=KEY_CHARS_MAX)
    while_: WhileHeld | None = None
    window_s: float | None = pydantic.Field(None, gt=0, le=WINDOW_S_MAX)
    on_conflict: OnConflict | None = None
    debounce_s: float | None = pydantic.Field(None, gt=0, le=WINDOW_S_MAX)
    debounce_max_s: float | None = pydantic.Field(None, gt=0, le=WINDOW_S_MAX)
    correlation_id: str | None = pydantic.Field(None, min_length=1, max_length=KEY_CHARS_MAX)
    parent_id: str | None = pydantic.Field(None, min_length=1, max_length=KEY_CHARS_MAX)
    job_id: Name | None = None
    context_ptr: Text | None = None
    adapter_id: Name | None = None
    env: Pairs | None = None
    parent_job_id: Name | None = None
    workflow_id: Name | None = None
    step_index: int | None = pydantic.Field(None, ge=0, lt=2**31)
    memory_id: Name | None = None
    context_hints: ContextHints | None = None
    budget: Budget | None = None
    tenant_id: Name | None = None
    labels: Pairs | None = None
    meta: JobMeta | None = None
    compensation: Compensation | None = None
    identity: IdentityBinding | None = None
    context_ref: ResourceRef | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFactory:
    """What is needed to build and check new jobs."""

    new_id: Callable[[], str]
    new_job_id: Callable[[], str]
    """Makes the ids of jobs. Other ids, of which only a part is used, come from `new_id`."""
    ledger: Ledger
    catalog: Catalog
    bus_submitter: Callable[[], BusSubmitter]
    """Returns the submitter for jobs on topics. The bus configuration is read only when it is called."""
    principal: Principal
    asked_as: IdempotencyScopeAndKey | None = None
    """The idempotency key of the request, if any. A repeated request is never refused because the backlog is full."""
    correlation_id: str | None = None
    """The correlation id that the caller gave outside of the job's own fields: the header of its request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobKind:
    """One kind of job, selected by the request field `field`."""

    field: str
    lifecycle: str
    make: Callable[[JobRequestBody, JobFactory], Awaitable[NewJob]]


async def _leased_job(body: JobRequestBody, making: JobFactory) -> NewJob:
    job = _plain_job(body)
    return new_job(job.type, job.payload, job.settings, app=None, new_id=making.new_job_id)


def _plain_job(body: JobRequestBody) -> BatchJob:
    """The type, payload and settings of a leased job. Raises FieldsNotOfKind."""
    _refuse_foreign(body, queue=QUEUE_FIELDS, bus=BUS_FIELDS)
    given = body.model_fields_set - NOT_SETTINGS
    settings = {name: value for name in given if (value := getattr(body, name)) is not None}
    return BatchJob(str(body.type), body.payload, **cast("SubmitSettings", settings))


def batch_job_from_json(value: Any) -> BatchJob:
    """A job of a batch from decoded JSON, with the fields of `POST /jobs`. Raises InputError."""
    try:
        body = JobRequestBody.model_validate(value)
    except pydantic.ValidationError as error:
        raise InputError(detail=problems_of(error, JobRequestBody)) from None
    if body.type is None:
        raise InputError(detail="it names no `type`: only jobs of a type can be in a batch")
    return _plain_job(body)


async def _queue_job(body: JobRequestBody, making: JobFactory) -> NewJob:
    _refuse_foreign(body, bus=BUS_FIELDS)
    foreign = _given_fields(body, NOT_OF_QUEUE)
    if foreign:
        raise SettingNotForQueue(fields=foreign)
    run_id = ids.make_run_id(await making.ledger.now(), making.new_id())
    slug = making.principal.agent if body.agent_slug is None else body.agent_slug
    within_agent(making.principal, "jobs.create", slug or "")
    run = None if body.run_id is None else await _run(body.run_id, slug, making)
    request = checked_request(
        run_id=run_id if run is None else run.job_id,
        job_type=str(body.job_type),
        agent_slug=slug,
        payload=body.payload,
        entity_refs=body.entity_refs or (),
    )
    try:
        await _check_agent(request, making)
    except (AgentUnknown, AgentNotRunnable, SourceUnreadable):
        if not await _was_asked(making):
            raise
    settings: dict[str, Any] = {} if body.priority is None else {"priority": priority_of(body.priority)}
    return new_queue_job(
        request,
        making.new_job_id,
        deadline_s=body.deadline_s,
        correlation_id=body.correlation_id or making.correlation_id or (run.correlation_id if run else None),
        trace=tracing.here() or (run.trace if run else None),
        parent_id=body.parent_id,
        **settings,
    )


async def _bus_job(body: JobRequestBody, making: JobFactory) -> NewJob:
    _refuse_foreign(body, queue=QUEUE_FIELDS)
    foreign = _given_fields(body, NOT_OF_BUS)
    if foreign:
        raise SettingNotForBus(fields=foreign)
    fields = body.model_dump(exclude_none=True, include={"topic", "priority", *BUS_FIELDS})
    return await making.bus_submitter().job(
        fields,
        payload=body.payload,
        principal=making.principal,
        correlation_id=body.correlation_id,
        asked_as=making.asked_as,
    )


async def _check_agent(request: QueueRequest, making: JobFactory) -> None:
    """Checks that the agent may run and has the sources that the request names, so that the job does not fail at once.

    Raises AgentUnknown, AgentNotRunnable, SourceUnreadable.
    """
    agent = await making.catalog.load(request.agent_slug)
    if isinstance(agent, AgentMissing):
        raise AgentUnknown(slug=request.agent_slug, hint=await _similar_agent(request.agent_slug, making))
    if isinstance(agent, AgentMalformed):
        raise AgentNotRunnable(slug=request.agent_slug, reason=str(agent))
    if not agent.may_run:
        raise AgentNotRunnable(slug=agent.slug, reason=await why_not_runnable(making.ledger, agent))
    if request.payload.get("sources"):
        requested_sources(request, await making.catalog.sources(agent.slug, agent))


async def _was_asked(making: JobFactory) -> bool:
    """Whether a job was submitted under the request's idempotency key before: its repetition has that one's answer."""
    if making.asked_as is None:
        return False
    return await making.ledger.find_by_idempotency_key(*making.asked_as, b"") is not None


async def _similar_agent(slug: str, making: JobFactory) -> str:
    """Suggests the agent that was probably meant; empty if there is none, or for a tenant, which reads no agents."""
    if making.principal.tenant is not None:
        return ""
    near = nearest(slug, await making.catalog.indexed_slugs())
    return "" if near is None else f"did you mean {near}? "


async def _run(run_id: str, slug: str | None, making: JobFactory) -> Job:
    """Returns the named run, which must belong to the agent. Raises RunUnknown or RunOfAnother."""
    try:
        run_job_id = await find_run(making.ledger, run_id)
    except RunError as error:
        raise RunUnknown(reason=str(error)) from error
    run = await making.ledger.job(run_job_id)
    of = "" if run is None or run.payload is None else RunRequest.read(run.payload).agent_slug
    if run is None or of != slug:
        raise RunOfAnother(run_id=run_job_id, found=of, slug=slug)
    return run


def _refuse_foreign(body: JobRequestBody, *, queue: tuple[str, ...] = (), bus: tuple[str, ...] = ()) -> None:
    """Raises FieldsNotOfKind if the request sets fields of another kind."""
    for kind, fields in (("job_type", queue), ("topic", bus)):
        if given := _given_fields(body, fields):
            raise FieldsNotOfKind(fields=given, kind=kind)


def _given_fields(body: JobRequestBody, fields: tuple[str, ...]) -> str:
    """Lists those of `fields` that the request sets, for an error message."""
    if body.model_fields_set.isdisjoint(fields):
        return ""
    return " and ".join(repr(name) for name in fields if getattr(body, name) is not None)


JOB_KINDS: tuple[JobKind, ...] = (
    JobKind(field="type", lifecycle=LEASED_JOB.name, make=_leased_job),
    JobKind(field="job_type", lifecycle=QUEUE_JOB.name, make=_queue_job),
    JobKind(field="topic", lifecycle=BUS_JOB.name, make=_bus_job),
)


async def make_job(body: JobRequestBody, making: JobFactory) -> NewJob:
    """Builds the requested job without submitting it.

    For a job on a topic, its payload is already stored where the topic's workers read it. Raises an InputError (also
    AgentError, RunError) that says what to change, or NotAllowed.
    """
    named = [kind for kind in JOB_KINDS if getattr(body, kind.field) is not None]
    if len(named) != 1:
        fields = ", ".join(repr(kind.field) for kind in JOB_KINDS)
        raise KindUnclear(fields=fields, found=" and ".join(repr(kind.field) for kind in named) or "none")
    return await admitted_submission(making.principal, making.ledger, await named[0].make(body, making))


async def make_job_from_json(body: Mapping[str, Any], making: JobFactory) -> NewJob:
    """Like `make_job`, from decoded JSON."""
    try:
        return await make_job(JobRequestBody.model_validate(body), making)
    except pydantic.ValidationError as error:
        raise InputError(detail=problems_of(error, JobRequestBody)) from None
