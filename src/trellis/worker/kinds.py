"""What a job can be asked for as, over HTTP and by the inbox: each kind by the field that names it.

A kind is one entry of the table. One without `make` is known, and refused with that word, until something serves it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import pydantic

from trellis.engine.errors import InputError
from trellis.engine.jobs import ATTEMPTS_MAX, DELAY_S_MAX, NewJob
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.worker.options import KEY_LIMIT_MAX
from trellis.worker.requests import KEY_CHARS_MAX, SubmitSettings, new_job

PROBLEMS_MAX = 5


class KindUnclear(InputError):
    """A job is named by exactly one of {fields}; found {found}."""


class KindNotServed(InputError):
    """Jobs named by {field!r} ({lifecycle}) are not served here yet; name a leased-job by 'type'."""


class JobAsked(pydantic.BaseModel):
    """A job to submit: `type` for a leased-job; `job_type` (queue-job) and `topic` (bus-job) name kinds that are not served yet."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"type": "index.document", "payload": {"id": 7}, "priority": "interactive", "max_attempts": 3}]
        },
    )

    type: str | None = pydantic.Field(None, max_length=KEY_CHARS_MAX)
    job_type: str | None = pydantic.Field(None, max_length=KEY_CHARS_MAX)
    topic: str | None = pydantic.Field(None, max_length=KEY_CHARS_MAX)
    payload: Any = None
    priority: Literal["critical", "interactive", "batch"] | None = None
    run_at: pydantic.AwareDatetime | None = None
    delay_s: float | None = pydantic.Field(None, ge=0, le=DELAY_S_MAX)
    deadline_s: float | None = pydantic.Field(None, gt=0, le=DELAY_S_MAX)
    max_attempts: int | None = pydantic.Field(None, ge=1, le=ATTEMPTS_MAX)
    concurrency_key: str | None = pydantic.Field(None, min_length=1, max_length=KEY_CHARS_MAX)
    concurrency_limit: int | None = pydantic.Field(None, ge=1, le=KEY_LIMIT_MAX)
    correlation_id: str | None = pydantic.Field(None, min_length=1, max_length=KEY_CHARS_MAX)
    parent_id: str | None = pydantic.Field(None, min_length=1, max_length=KEY_CHARS_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One way to ask for a job: `field` names it."""

    field: str
    lifecycle: str
    make: Callable[[JobAsked, Callable[[], str]], NewJob] | None = None


def _leased_job(asked: JobAsked, new_id: Callable[[], str]) -> NewJob:
    said = asked.model_dump(exclude_none=True, exclude={kind.field for kind in KINDS} | {"payload"})
    return new_job(str(asked.type), asked.payload, cast("SubmitSettings", said), app=None, new_id=new_id)


KINDS: tuple[Kind, ...] = (
    Kind(field="type", lifecycle=LEASED_JOB.name, make=_leased_job),
    Kind(field="job_type", lifecycle=QUEUE_JOB.name),
    Kind(field="topic", lifecycle=BUS_JOB.name),
)


def job_of(asked: JobAsked, new_id: Callable[[], str]) -> NewJob:
    """The job that is asked for; raises an InputError that says what to change. Nothing is written."""
    named = [kind for kind in KINDS if getattr(asked, kind.field) is not None]
    if len(named) != 1:
        fields = ", ".join(repr(kind.field) for kind in KINDS)
        raise KindUnclear(fields=fields, found=" and ".join(repr(kind.field) for kind in named) or "none")
    if named[0].make is None:
        raise KindNotServed(field=named[0].field, lifecycle=named[0].lifecycle)
    return named[0].make(asked, new_id)


def read_job(asked: Mapping[str, Any], new_id: Callable[[], str]) -> NewJob:
    """The same, from JSON; raises InputError."""
    try:
        return job_of(JobAsked.model_validate(asked), new_id)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[:PROBLEMS_MAX]
        detail = "; ".join(f"{'/'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
        raise InputError(detail=detail) from None
