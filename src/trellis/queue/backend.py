"""The NLM backend as the orchestration layer asks it: one request for one execution (NLM-9), and what its answer means (D8).

Asking again for the same job and epoch is safe: the backend answers what it already has, or that it is still at it. So the request is
also how one looks for a result whose callback did not come. Nothing is tried again here, no redirect is followed, and bytes and time
have a bound.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, TypeVar

import pydantic

from trellis.engine.errors import KeyUnusable
from trellis.net.errors import AnswerRefused, OutgoingError
from trellis.net.guard import Fetched, GuardedClient, OutgoingPolicy, guarded_client
from trellis.net.targets import read_target
from trellis.queue.errors import NlmAnswerInvalid, NlmUnavailable, RateLimited, StageError, StageHopeless
from trellis.queue.requests import QueueRequest
from trellis.storage.documents import timestamp

PROCESS_PATH = "/jobs/process"
ANSWER_BYTES_MAX = 64 * 1024
CONNECT_S = 5.0
ANSWER_S = 10.0
SAID_CHARS_MAX = 300
WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429})
"""Refusals that say something about this moment; any other 4xx says something about the request."""

ShapeT = TypeVar("ShapeT", bound=pydantic.BaseModel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """What the backend is asked for: exactly the eight fields of NLM-9."""

    job_id: str
    epoch: int
    request: QueueRequest
    context_snapshot_url: str
    callback_url: str
    deadline: datetime
    correlation_id: str
    """Travels in a header, for logs and traces."""

    def to_dict(self) -> dict[str, Any]:
        """The body."""
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


class UnderWay(pydantic.BaseModel):
    """202: the backend has it."""

    accepted: Literal[True]
    job_id: str
    estimated_seconds: float | None = None


class Finished(pydantic.BaseModel):
    """200: the backend has finished it, and what came of it is staged."""

    job_id: str
    epoch: int
    status: Literal["COMPLETE"]
    artifact_id: str = pydantic.Field(max_length=200)
    artifact_url: str | None = pydantic.Field(None, max_length=2_048)
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    size: int = pydantic.Field(ge=0, lt=2**53)


class Backend(Protocol):
    """Whoever executes."""

    async def process(self, execution: Execution, /) -> UnderWay | Finished:
        """Have it executed, or learn how it stands; raises a StageError."""
        ...

    async def close(self) -> None:
        """Let go of what is open."""
        ...


class NlmBackend:
    """The backend at an address of the operator's: no other is ever asked. `token` gives a credential for each request anew."""

    def __init__(self, url: str, token: Callable[[], str]) -> None:
        self._url, self._token = url.rstrip("/"), token
        self._client: GuardedClient | None = None

    async def process(self, execution: Execution, /) -> UnderWay | Finished:
        """Have it executed, or learn how it stands; raises a StageError."""
        try:
            answer = await self._opened().send(
                "POST",
                self._url + PROCESS_PATH,
                headers={
                    "authorization": f"Bearer {self._token()}",
                    "content-type": "application/json",
                    "x-correlation-id": execution.correlation_id,
                },
                content=json.dumps(execution.to_dict(), ensure_ascii=False).encode(),
            )
        except KeyUnusable as error:
            raise NlmUnavailable(detail=f"the NLM backend cannot be asked: {error}") from error
        except AnswerRefused as error:
            raise NlmAnswerInvalid(detail=str(error)) from error
        except OutgoingError as error:
            raise NlmUnavailable(detail=str(error)) from error
        return read_answer(answer, execution)

    async def close(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _opened(self) -> GuardedClient:
        """The client, made when it is first needed; raises UrlRefused."""
        if self._client is None:
            policy = OutgoingPolicy(
                origins=(read_target(self._url).origin,),
                public=False,
                answer_bytes_max=ANSWER_BYTES_MAX,
                connect_s=CONNECT_S,
                total_s=ANSWER_S,
            )
            self._client = guarded_client(policy)
        return self._client


def read_answer(answer: Fetched, execution: Execution) -> UnderWay | Finished:
    """What an answer means; raises a StageError."""
    if answer.status == 202:
        under_way = _read(UnderWay, answer.body)
        if under_way.job_id != execution.job_id:
            raise NlmAnswerInvalid(detail=f"the NLM backend answered about job {under_way.job_id[:SAID_CHARS_MAX]}")
        return under_way
    if answer.status == 200:
        finished = _read(Finished, answer.body)
        if (finished.job_id, finished.epoch) != (execution.job_id, execution.epoch):
            detail = f"the NLM backend answered about job {finished.job_id[:SAID_CHARS_MAX]} in epoch {finished.epoch}"
            raise NlmAnswerInvalid(detail=detail)
        return finished
    raise refusal(answer.status, answer.body)


def refusal(status: int, body: bytes) -> StageError:
    """What an answer that is no result means for the job (D8)."""
    detail = f"the NLM backend answered {status}{_said(body)}"
    if status == 429:
        return RateLimited(detail=detail)
    if status >= 500 or status in WORTH_ANOTHER_TRY:
        return NlmUnavailable(detail=detail)
    if 400 <= status < 500:
        return StageHopeless(detail=detail)
    return NlmAnswerInvalid(detail=detail)


def _read(shape: type[ShapeT], body: bytes) -> ShapeT:
    try:
        return shape.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "/".join(map(str, first["loc"])) or "the body"
        raise NlmAnswerInvalid(
            detail=f"the answer of the NLM backend cannot be read: {where}: {first['msg']}"
        ) from None


def _said(body: bytes) -> str:
    """The reason in a problem+json body, if that is what it is."""
    try:
        found: Any = json.loads(body)
    except ValueError:
        return ""
    detail: Any = found.get("detail") if isinstance(found, Mapping) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return f": {detail[:SAID_CHARS_MAX]}" if isinstance(detail, str) else ""
