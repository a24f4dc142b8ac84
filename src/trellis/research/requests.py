"""The request of a queue job, stored as its payload, and the job built from it (D34, D38, D41, JQ-11).

A stored request was checked completely: the type is known, the payload fits it, the slug is valid, and no source is an
address.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pydantic

from trellis.agents.definition import checked_slug
from trellis.artifacts.content import JobType
from trellis.artifacts.payloads import ENTITY_REFS_MAX, ResearchPayload, read_payload
from trellis.documents import ids
from trellis.documents.run_documents import encode
from trellis.engine import tracing
from trellis.engine.errors import InputError, PayloadInvalid, TrellisError
from trellis.engine.jobs import JobId, NewJob, Priority
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.research.errors import RequestUnreadable, SourceNotARef
from trellis.research.retry_policy import EXECUTIONS

ENTITY_REF_CHARS_MAX = 200
KEY_NAMESPACE = "queue-job:"
"""Prefix of the concurrency key that limits an agent to one held job at a time (JQ-7)."""
SHOWN_CHARS_MAX = 60


class _StoredRequest(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    run_id: str
    job_type: JobType
    agent_slug: str
    payload: dict[str, Any]
    entity_refs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueRequest:
    """One request. `payload` is stored as submitted, and parsed again where it is used."""

    run_id: str
    job_type: JobType
    agent_slug: str
    payload: Mapping[str, Any]
    entity_refs: tuple[str, ...] = ()

    @classmethod
    def read(cls, job_id: str, body: bytes) -> "QueueRequest":
        """Reads the request from the job's payload. Raises RequestUnreadable."""
        try:
            stored = _StoredRequest.model_validate_json(body)
            return checked_request(
                run_id=stored.run_id,
                job_type=stored.job_type,
                agent_slug=stored.agent_slug,
                payload=stored.payload,
                entity_refs=stored.entity_refs,
            )
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            problem = f"{'/'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
            raise RequestUnreadable(job_id=job_id, problem=problem) from None
        except TrellisError as error:
            raise RequestUnreadable(job_id=job_id, problem=str(error)) from error

    def to_bytes(self) -> bytes:
        """Encodes the request as the job's payload."""
        return encode(
            {
                "run_id": self.run_id,
                "job_type": self.job_type.value,
                "agent_slug": self.agent_slug,
                "payload": dict(self.payload),
                "entity_refs": list(self.entity_refs),
            }
        )


def checked_request(
    *, run_id: str, job_type: str, agent_slug: str | None, payload: Any, entity_refs: Sequence[str] = ()
) -> QueueRequest:
    """Checks and builds a request. Raises an InputError, SlugInvalid or RunIdInvalid that says what to change."""
    kind = _job_type_of(job_type)
    if agent_slug is None:
        raise InputError(detail=f"a {kind.value} job is an agent's: name it as agent_slug")
    if not isinstance(payload, dict):
        raise PayloadInvalid(type=kind.value, detail="it must be an object with the fields of its type.")
    body = cast("dict[str, Any]", payload)
    fits = read_payload(kind, body)
    for source in fits.sources if isinstance(fits, ResearchPayload) else ():
        if "://" in source:
            raise SourceNotARef(source=source[:SHOWN_CHARS_MAX])
    ids.run_date(run_id)
    return QueueRequest(
        run_id=run_id,
        job_type=kind,
        agent_slug=checked_slug(agent_slug),
        payload=body,
        entity_refs=_refs(entity_refs),
    )


def _job_type_of(job_type: str) -> JobType:
    try:
        return JobType(job_type)
    except ValueError:
        known = ", ".join(kind.value for kind in JobType)
        raise InputError(detail=f"there is no job_type {job_type[:SHOWN_CHARS_MAX]!r}; choose one of {known}") from None


def _refs(refs: Sequence[str]) -> tuple[str, ...]:
    if len(refs) > ENTITY_REFS_MAX:
        raise InputError(detail=f"entity_refs has {len(refs)} entries and the limit is {ENTITY_REFS_MAX}")
    for ref in refs:
        if not 1 <= len(ref) <= ENTITY_REF_CHARS_MAX or not ref.isprintable() or not ref.strip():
            detail = f"an entity ref is 1 to {ENTITY_REF_CHARS_MAX} printable characters, not {ref[:SHOWN_CHARS_MAX]!r}"
            raise InputError(detail=detail)
    return tuple(dict.fromkeys(refs))


def new_queue_job(
    request: QueueRequest,
    new_id: Callable[[], str],
    *,
    priority: Priority = Priority.BATCH,
    deadline_s: float | None = None,
    correlation_id: str | None = None,
    parent_id: str | None = None,
) -> NewJob:
    """Builds the job of a request. The queue sets attempts and concurrency key; callers cannot choose them."""
    return NewJob(
        job_id=JobId(new_id()),
        type=request.job_type.value,
        payload=request.to_bytes(),
        lifecycle=QUEUE_JOB.name,
        priority=priority,
        deadline_s=deadline_s,
        max_attempts=EXECUTIONS,
        max_deaths=0,
        concurrency_key=f"{KEY_NAMESPACE}{request.agent_slug}",
        correlation_id=correlation_id,
        trace=tracing.here(),
        parent_id=None if parent_id is None else JobId(parent_id),
    )


def data_of(body: bytes | None) -> dict[str, Any]:
    """Decodes the data of an event."""
    found: Any = json.loads(body) if body is not None else {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
