"""Requests of the orchestration layer, and how the ledger stores them: one execution is one job of lifecycle `nlm-job`.

Its id is `<job_id>@<epoch>` and, after an ERROR in the same epoch, `<job_id>@<epoch>.<n>`. The same request always has
the same id, so the ledger alone decides whether it is new. Its type names the origin of its gateway: backends that
share a ledger but serve different gateways claim only their own gateway's executions.
"""

import hashlib
import json
import re
from typing import Annotated, Any

import pydantic

from trellis.artifacts.content import JobType
from trellis.engine.jobs import TYPE_PATTERN, JobId
from trellis.net.targets import URL_CHARS_MAX, read_target

TYPE_PREFIX = "nlm:"
EPOCH_MAX = 2**53 - 1
NAMED_JOB_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,149}$"
"""A job id short enough to append the epoch and the number of the execution."""
EXAMPLE: dict[str, Any] = {
    "job_id": "7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d",
    "job_type": "RESEARCH",
    "agent_slug": "archivist-violin",
    "payload": {"query": "Who made the violin?"},
    "context_snapshot_url": "http://127.0.0.1:8420/jobs/7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d/context/3",
    "callback_url": "http://127.0.0.1:8420/jobs/7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d/result",
    "deadline": "2026-02-14T08:10:00Z",
    "epoch": 3,
}

Url = Annotated[str, pydantic.Field(min_length=1, max_length=URL_CHARS_MAX)]


class ProcessRequest(pydantic.BaseModel):
    """A job to do: exactly these eight fields (NLM-9)."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [EXAMPLE]})

    job_id: Annotated[str, pydantic.Field(pattern=NAMED_JOB_PATTERN)]
    job_type: JobType
    agent_slug: Annotated[str, pydantic.Field(min_length=1, max_length=200)]
    payload: dict[str, Any]
    context_snapshot_url: Url
    callback_url: Url
    deadline: pydantic.AwareDatetime
    epoch: Annotated[int, pydantic.Field(ge=0, le=EPOCH_MAX, strict=True)]

    @property
    def fingerprint(self) -> bytes:
        """Hashes everything but the deadline, which may differ slightly when a request is repeated."""
        same = self.model_dump(mode="json", include=set(ProcessRequest.model_fields) - {"deadline"})
        return hashlib.sha256(json.dumps(same, sort_keys=True, ensure_ascii=False).encode()).digest()


class StoredOrder(ProcessRequest):
    """A request as stored in the ledger."""

    execution: int = 1
    """Number of the execution in its epoch, from 1."""
    estimated_seconds: int

    @classmethod
    def of(cls, request: ProcessRequest, *, execution: int, estimated_seconds: int) -> "StoredOrder":
        return cls(**request.model_dump(), execution=execution, estimated_seconds=estimated_seconds)

    @classmethod
    def read(cls, body: bytes) -> "StoredOrder":
        return cls.model_validate_json(body)

    def to_bytes(self) -> bytes:
        return json.dumps(self.model_dump(mode="json"), ensure_ascii=False).encode()

    @property
    def gateway(self) -> str:
        """The URL that receives artifacts: the part before `/jobs/<job_id>/result`, else the callback's origin."""
        shaped = f"/jobs/{self.job_id}/result"
        if self.callback_url.endswith(shaped):
            return self.callback_url.removesuffix(shaped)
        return read_target(self.callback_url).origin

    @property
    def scope(self) -> tuple[str, int, int]:
        """Job id, epoch and number of the execution."""
        return self.job_id, self.epoch, self.execution


def type_of(origin: str) -> str:
    """Returns the type of executions whose gateway has this origin (`Target.origin`): `nlm:http:127.0.0.1:8420`."""
    named = TYPE_PREFIX + origin.replace("://", ":").translate({ord("["): None, ord("]"): None})
    if re.fullmatch(TYPE_PATTERN, named) is not None:
        return named
    return f"{TYPE_PREFIX}sha256:{hashlib.sha256(origin.encode()).hexdigest()}"  # an origin may be longer than a type


def execution_id(job_id: str, epoch: int, execution: int) -> JobId:
    """Returns the id in the backend's ledger."""
    return JobId(f"{job_id}@{epoch}" + (f".{execution}" if execution > 1 else ""))


def read_execution_id(id_: str) -> tuple[str, int, int]:
    """Splits such an id into job id, epoch and execution number."""
    job_id, _, rest = id_.rpartition("@")
    epoch, _, execution = rest.partition(".")
    return job_id, int(epoch), int(execution or 1)
