"""The orchestration layer's client of the NLM backend, and the callbacks that the backend sends."""

import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, TypeVar

import pydantic

from trellis.engine import tracing
from trellis.engine.errors import KeyUnusable
from trellis.engine.jobs import JOB_ID_PATTERN
from trellis.net.components import AnswerUnreadable, ComponentClient, problem_detail, problem_fields, read_shape
from trellis.net.guard import FetchedResponse
from trellis.net.targets import AnswerRefused, OutgoingError
from trellis.research.errors import (
    BackendRefused,
    BackendUnavailable,
    ExecutionForgotten,
    NlmAnswerInvalid,
    NlmFailed,
    RateLimited,
    StageError,
    StageHopeless,
)
from trellis.research.queue_job import QueueRequest
from trellis.storage.objects.canonical_json import timestamp
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import ObjectStore

# The orchestration layer's client of the NLM backend: one request per execution (NLM-9), and what answers mean (D8).
#
# An execution is requested once. If its callback does not come, the client reads its state, which starts nothing. A
# repeated request just after a failure would start, and pay for, another execution. The client does not retry and
# follows no redirects. Size and time are bounded.

PROCESS_PATH = "/jobs/process"
EXECUTION_PATH = "/jobs/{job_id}/executions/{epoch}"
HEALTH_PATH = "/health"
UNKNOWN = "unknown"
PERMANENT_CODE = "VALIDATION_ERROR"
"""The backend's code for a permanent error."""
ANSWER_BYTES_MAX = 64 * 1024
READ_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of an answer about jobs: one job with its payload, or a page of jobs without payloads."""
ANSWER_S = 10.0
SAID_CHARS_MAX = 300
WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429})
"""Transient refusals."""
CREDENTIAL_STATUSES = frozenset({401, 403})
"""Refusals of our credential. Any other 4xx is about the request itself."""
CANCEL_ACCEPTED_STATUSES = frozenset({202, 404})

ShapeT = TypeVar("ShapeT", bound=pydantic.BaseModel)
BackendEndT = TypeVar("BackendEndT", "JobFinished", "JobFailedAnswer")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionRequest:
    """A request to the backend: exactly the eight fields of NLM-9."""

    job_id: str
    epoch: int
    request: QueueRequest
    context_snapshot_url: str
    callback_url: str
    deadline: datetime
    correlation_id: str
    """Sent in a header, for logs and traces."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "job_type": self.request.job_type.value,
            "agent_slug": self.request.agent_slug,
            "payload": dict(self.request.payload),
            "context_snapshot_url": self.context_snapshot_url,
            "callback_url": self.callback_url,
            "deadline": timestamp(self.deadline),
            "epoch": self.epoch,
        }


class ExecutionUnderWay(pydantic.BaseModel):
    """Status 202: the backend accepted the execution."""

    accepted: Literal[True]
    job_id: str
    estimated_seconds: float | None = None


class JobFinished(pydantic.BaseModel):
    """Status 200: the execution is complete, now or before, and its artifact is staged."""

    job_id: str
    epoch: int
    status: Literal["COMPLETE"]
    artifact_id: str = pydantic.Field(max_length=200)
    artifact_url: str | None = pydantic.Field(None, max_length=2_048)
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    size: int = pydantic.Field(ge=0, lt=2**53)


class JobFailure(pydantic.BaseModel):
    """Why there is no artifact."""

    code: str = pydantic.Field(min_length=1, max_length=100)
    message: str = pydantic.Field(max_length=2_000)


class JobFailedAnswer(pydantic.BaseModel):
    """Status 200: the execution ended without a result."""

    job_id: str
    epoch: int
    status: Literal["FAILED"]
    error: JobFailure


class ExecutionBackend(Protocol):
    """A service that executes queue jobs."""

    async def process(self, execution: ExecutionRequest, /) -> ExecutionUnderWay | JobFinished:
        """Requests an execution. Raises a StageError."""
        ...

    async def look(self, execution: ExecutionRequest, /) -> ExecutionUnderWay | JobFinished | JobFailedAnswer:
        """Returns the state of an execution. Raises ExecutionForgotten if it is unknown, or another StageError."""
        ...

    async def stop(self, execution: ExecutionRequest, /) -> None:
        """Cancels an execution. Raises a StageError if the backend could not be told."""
        ...

    async def close(self) -> None:
        """Closes open connections."""
        ...


class NlmBackend:
    """The backend at the configured address; no other is ever asked.

    `token` returns a credential for each request. `tls` verifies its certificate where the system's CAs do not.
    """

    def __init__(
        self,
        url: str,
        token: Callable[[], str],
        tls: ssl.SSLContext | None = None,
        *,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        self._token = token
        self._client = ComponentClient(url=url, tls=tls, answer_bytes_max=answer_bytes_max, answer_s=ANSWER_S)

    async def process(self, execution: ExecutionRequest, /) -> ExecutionUnderWay | JobFinished:
        body = json.dumps(execution.to_dict(), ensure_ascii=False).encode()
        return read_answer(await self._asked(execution, "POST", PROCESS_PATH, body), execution)

    async def look(self, execution: ExecutionRequest, /) -> ExecutionUnderWay | JobFinished | JobFailedAnswer:
        path = EXECUTION_PATH.format(job_id=execution.job_id, epoch=execution.epoch)
        answer = await self._asked(execution, "GET", path)
        if answer.status == 404 and problem_fields(answer.body).get("execution") == UNKNOWN:
            raise ExecutionForgotten(detail=f"the NLM backend knows nothing of epoch {execution.epoch} any more")
        if answer.status == 200 and problem_fields(answer.body).get("status") == "FAILED":
            return _checked_identity(_read(JobFailedAnswer, answer.body), execution)
        return read_answer(answer, execution)

    async def stop(self, execution: ExecutionRequest, /) -> None:
        """Cancels an execution. 202: it is being cancelled; 404: there is nothing to cancel. Raises a StageError."""
        path = EXECUTION_PATH.format(job_id=execution.job_id, epoch=execution.epoch)
        answer = await self._asked(execution, "DELETE", path)
        if answer.status not in CANCEL_ACCEPTED_STATUSES:
            raise error_of_refusal(answer.status, answer.body)

    async def read(self, path: str, *, correlation_id: str) -> Any:
        """Reads JSON at a path; None if the backend answers 404. Raises a StageError."""
        headers = {"authorization": f"Bearer {self._token_now()}", "x-correlation-id": correlation_id}
        answer = await self._sent("GET", path, headers | tracing.headers())
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise error_of_refusal(answer.status, answer.body)
        try:
            return json.loads(answer.body)
        except ValueError as error:
            raise NlmAnswerInvalid(detail="the answer of the NLM backend is not JSON") from error

    async def health(self) -> str:
        """Returns `ok` or `degraded`; empty if another program answers. Raises a StageError if it cannot serve."""
        answer = await self._sent("GET", HEALTH_PATH, {})
        if answer.status >= 500:
            raise error_of_refusal(answer.status, answer.body)
        return str(problem_fields(answer.body).get("status", ""))[:SAID_CHARS_MAX] if answer.status == 200 else ""

    async def _asked(
        self, execution: ExecutionRequest, method: str, path: str, body: bytes | None = None
    ) -> FetchedResponse:
        headers = {"authorization": f"Bearer {self._token_now()}", "x-correlation-id": execution.correlation_id}
        if body is not None:
            headers["content-type"] = "application/json"
        with tracing.span(f"nlm_backend.{method}", {"trellis.job_id": execution.job_id}, kind=tracing.CLIENT):
            return await self._sent(method, path, headers | tracing.headers(), body)

    async def _sent(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> FetchedResponse:
        try:
            return await self._client.send(method, path, headers=headers, content=body)
        except AnswerRefused as error:
            raise NlmAnswerInvalid(detail=str(error)) from error
        except OutgoingError as error:
            raise BackendUnavailable(detail=str(error)) from error

    def _token_now(self) -> str:
        try:
            return self._token()
        except KeyUnusable as error:
            raise BackendUnavailable(detail=f"the NLM backend cannot be asked: {error}") from error

    async def close(self) -> None:
        await self._client.close()


def read_answer(answer: FetchedResponse, execution: ExecutionRequest) -> ExecutionUnderWay | JobFinished:
    """Interprets an answer. Raises a StageError."""
    if answer.status == 202:
        under_way = _read(ExecutionUnderWay, answer.body)
        if under_way.job_id != execution.job_id:
            raise NlmAnswerInvalid(detail=f"the NLM backend answered about job {under_way.job_id[:SAID_CHARS_MAX]}")
        return under_way
    if answer.status == 200:
        return _checked_identity(_read(JobFinished, answer.body), execution)
    raise error_of_refusal(answer.status, answer.body)


def error_of_failure(code: str, message: str) -> StageError:
    """Maps a failure reported by the backend to an error (D8)."""
    if code == PERMANENT_CODE:
        return StageHopeless(detail=message)
    return NlmFailed(said=code, detail=message)


def _checked_identity(answer: BackendEndT, execution: ExecutionRequest) -> BackendEndT:
    if (answer.job_id, answer.epoch) != (execution.job_id, execution.epoch):
        detail = f"the NLM backend answered about job {answer.job_id[:SAID_CHARS_MAX]} in epoch {answer.epoch}"
        raise NlmAnswerInvalid(detail=detail)
    return answer


def error_of_refusal(status: int, body: bytes) -> StageError:
    """Maps an error status to an error of the job (D8)."""
    detail = f"the NLM backend answered {status}{problem_detail(body, SAID_CHARS_MAX)}"
    if status == 429:
        return RateLimited(detail=detail)
    if status >= 500 or status in WORTH_ANOTHER_TRY:
        return BackendUnavailable(detail=detail)
    if status in CREDENTIAL_STATUSES:
        return BackendRefused(detail=detail)
    if 400 <= status < 500:
        return StageHopeless(detail=detail)
    return NlmAnswerInvalid(detail=detail)


def _read(shape: type[ShapeT], body: bytes) -> ShapeT:
    try:
        return read_shape(shape, body)
    except AnswerUnreadable as error:
        raise NlmAnswerInvalid(detail=f"the answer of the NLM backend cannot be read: {error}") from None


# Callbacks of the NLM backend: their content (D26), and where accepted ones are stored.
#
# The gateway accepts a callback only for the attempt that waits for it, and stores it create-only. So whatever is
# stored under a job's id with the epoch of an attempt was signed for that job, meant for that attempt, and never
# changes.

CALLBACKS_FOLDER = "callbacks"
CALLBACK_PAGES_MAX = 10
"""Maximum pages of one job's callbacks. An attempt has one or two, so requeues never produce this many."""
EXAMPLE_JOB = "7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d"
EXAMPLE_ARTIFACT = "art-0f9d2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d"


class CallbackError(JobFailure, extra="forbid"):
    """Why there is no artifact."""


class Callback(pydantic.BaseModel):
    """How the NLM backend ended with a job."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "job_id": EXAMPLE_JOB,
                    "epoch": 3,
                    "status": "COMPLETE",
                    "artifact_id": EXAMPLE_ARTIFACT,
                    "artifact_url": f"https://gateway.example/artifacts/{EXAMPLE_ARTIFACT}",
                    "sha256": "0" * 64,
                    "size": 2_048,
                    "error": None,
                }
            ]
        },
    )

    job_id: str = pydantic.Field(pattern=JOB_ID_PATTERN)
    epoch: int = pydantic.Field(ge=0, lt=2**53)
    status: Literal["COMPLETE", "FAILED"]
    artifact_id: str | None = pydantic.Field(None, max_length=200)
    artifact_url: str | None = pydantic.Field(None, max_length=2_048)
    sha256: str | None = pydantic.Field(None, pattern=r"^[0-9a-f]{64}$")
    size: int | None = pydantic.Field(None, ge=0, lt=2**53)
    error: CallbackError | None = None

    @pydantic.model_validator(mode="after")
    def _check_status(self) -> "Callback":
        if self.status == "COMPLETE" and (self.artifact_id is None or self.sha256 is None or self.size is None):
            raise ValueError("COMPLETE comes with artifact_id, sha256 and size")
        if self.status == "FAILED" and self.error is None:
            raise ValueError("FAILED comes with error")
        return self


def callback_key(job_id: str, webhook_id: str) -> str:
    return object_key(CALLBACKS_FOLDER, job_id, f"{webhook_id}.json")


async def first_callback(objects: ObjectStore, job_id: str, epoch: int, seen: set[str]) -> Callback | None:
    """Returns the first stored callback for an attempt; None if there is none. Keys in `seen` are not read again."""
    received: list[tuple[str, str, Callback]] = []
    for key in await _callback_keys(objects, job_id):
        stored = None if key in seen else await objects.get(key)
        if stored is None:
            continue
        document: Mapping[str, Any] = json.loads(stored.body)
        callback = Callback.model_validate(document["callback"])
        if (callback.job_id, callback.epoch) == (job_id, epoch):
            received.append((str(document["received_at"]), key, callback))
        else:
            seen.add(key)
    return min(received, key=lambda entry: entry[:2])[2] if received else None


async def _callback_keys(objects: ObjectStore, job_id: str) -> list[str]:
    keys: list[str] = []
    for _ in range(CALLBACK_PAGES_MAX):
        after = keys[-1] if keys else None
        page = await objects.list(f"{object_key(CALLBACKS_FOLDER, job_id)}/", after=after)
        keys += [info.key for info in page.items]
        if not page.more:
            break
    return keys
