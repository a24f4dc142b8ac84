"""Outgoing requests of one job: fetches its snapshot, stages its artifact, sends its callback (NLM-4, D15, D26).

Invariants:
- Every request goes through the outgoing guard. Artifacts, callbacks and our tokens are sent only to the gateway's
  origin. A token is issued for this job alone (AUTH-3).
- A transient failure (no connection, 408, 429, 5xx) is retried after 1, 2, 4 … 30 s, or later if the server says so,
  until the time is over.
- A callback has the same bytes and id in every try, and is signed anew each time, so that a repetition has no effect.
- The gateway's answer decides: what it refuses permanently is given up.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import httpx2
import pydantic

from trellis.artifacts.content import ArtifactDraft
from trellis.engine import tracing
from trellis.engine.clock import Clock, within
from trellis.engine.logs import log_of
from trellis.engine.retry_policy import RetryPolicy
from trellis.http_server.middleware import HEADER as CORRELATION_HEADER
from trellis.lifecycles import Role
from trellis.net.components import problem_fields
from trellis.net.guard import FetchedResponse, GuardedClient
from trellis.net.retry_after import retry_after_s
from trellis.net.signatures import job_key, signed_headers
from trellis.net.targets import AddressRefused, OutgoingError, UrlRefused, read_target, url_for_message
from trellis.nlm_backend.errors import Fault, FaultCode, Superseded
from trellis.nlm_backend.metrics import Metrics
from trellis.nlm_backend.orders import StoredOrder

RETRY = RetryPolicy(base_s=1.0, factor=2.0, max_s=30.0, jitter=0.2)
RETRY_AFTER_S_MAX = 300.0
DETAIL_CHARS_MAX = 1_500
TRANSIENT = frozenset({408, 425, 429})
"""Transient statuses. So are all from 500 on, and redirects: a proxy may be wrong for a while."""
UNRECOGNISED = frozenset({401, 403})
"""Statuses for a wrong secret or clock. An operator may fix these before the deadline."""
JOB_LOST_CODES = frozenset({"LEASE_LOST", "INVALID_TRANSITION"})
COMPLETE: Literal["COMPLETE"] = "COMPLETE"
FAILED: Literal["FAILED"] = "FAILED"

_log = log_of("trellis.nlm_backend")


class StagedAnswer(pydantic.BaseModel):
    """The artifact store's answer. Other fields are ignored."""

    model_config = pydantic.ConfigDict(frozen=True)

    artifact_id: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]
    job_id: str
    sha256: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, pydantic.Field(ge=0, lt=2**53)]


@dataclass(frozen=True, slots=True)
class Delivered:
    """The gateway accepted the callback."""


@dataclass(frozen=True, slots=True)
class DeliveryGivenUp:
    """The callback was not delivered and is not tried again."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingRequest:
    """One request that may be repeated."""

    method: str
    url: str
    headers: Callable[[], Mapping[str, str]]
    """Builds the headers for each try, because signatures and tokens are time-dependent."""
    content: bytes | None = None
    transient: frozenset[int] = TRANSIENT

    def may_pass(self, status: int) -> bool:
        """Whether the same request may succeed later."""
        return status in self.transient or status >= 500 or 300 <= status < 400


@dataclass(frozen=True, kw_only=True)
class BackendLinks:
    """How a backend reaches other services."""

    client: GuardedClient
    trusted: frozenset[str]
    """Origins, in the form of `Target.origin`, that receive artifacts, callbacks and our tokens: the gateway's.

    Only executions of these gateways are claimed.
    """
    token: Callable[[str], str]
    """Returns a token of the NLM backend for one job."""
    secret: bytes
    """The secret that signs callbacks."""


@dataclass(frozen=True, kw_only=True)
class BackendEnvironment:
    """Clock, randomness and ids, injected for tests."""

    clock: Clock
    rng: random.Random
    now: Callable[[], float]
    """Returns seconds since 1970."""
    new_id: Callable[[], str]


@dataclass(frozen=True, kw_only=True)
class JobDelivery:
    """Sends the requests of a job."""

    links: BackendLinks
    world: BackendEnvironment
    metrics: Metrics
    retry: RetryPolicy = RETRY

    async def snapshot(self, order: StoredOrder, correlation_id: str, *, until: float) -> bytes:
        """Fetches the context snapshot of the job. Raises Fault."""
        url = order.context_snapshot_url
        request = OutgoingRequest(method="GET", url=url, headers=lambda: self._as_ours(order, url, correlation_id))
        try:
            answer = await self._sent(request, until)
        except (UrlRefused, AddressRefused) as error:
            raise Fault(fault=FaultCode.CONTEXT_INVALID, detail=str(error)) from None
        if isinstance(answer, DeliveryGivenUp):
            detail = f"The context snapshot did not come in time: {answer.reason}"
            raise Fault(fault=FaultCode.CONTEXT_TIMEOUT, detail=detail)
        if answer.status != 200:
            detail = f"The context snapshot was answered with {_answer_text(answer)}"
            raise Fault(fault=FaultCode.CONTEXT_INVALID, detail=detail)
        return answer.body

    async def stage(
        self, order: StoredOrder, draft: ArtifactDraft, correlation_id: str, *, until: float
    ) -> StagedAnswer:
        """Stages the artifact in the artifact store, where no reader sees it yet. Raises Fault, Superseded."""
        url = f"{order.gateway}/artifacts"
        if not self._is_trusted(url):
            detail = f"Artifacts go to the gateway alone, and {url_for_message(url)} is not it."
            raise Fault(fault=FaultCode.STAGING_REFUSED, detail=detail)
        body = {"job_id": order.job_id, "epoch": order.epoch, **draft.model_dump(mode="json")}
        json_headers = {"content-type": "application/json"}
        request = OutgoingRequest(
            method="POST",
            url=url,
            headers=lambda: self._as_ours(order, url, correlation_id) | json_headers,
            content=json.dumps(body, ensure_ascii=False).encode(),
        )
        try:
            answer = await self._sent(request, until)
        except (UrlRefused, AddressRefused) as error:
            raise Fault(fault=FaultCode.STAGING_REFUSED, detail=str(error)) from None
        if isinstance(answer, DeliveryGivenUp):
            detail = f"The artifact could not be staged before the deadline: {answer.reason}"
            raise Fault(fault=FaultCode.DEADLINE, detail=detail)
        return _staged(answer, order)

    async def call_back(
        self, order: StoredOrder, notice: bytes, correlation_id: str, *, until: float
    ) -> Delivered | DeliveryGivenUp:
        """Reports to the orchestration layer how the job ended, retrying until it is accepted or the time is over."""
        if not self._is_trusted(order.callback_url):
            return DeliveryGivenUp(
                f"Callbacks go to the gateway alone, and {url_for_message(order.callback_url)} is not it."
            )
        key = job_key(self.links.secret, Role.NLM_BACKEND.value, order.job_id)
        id_ = callback_id(order, json.loads(notice)["status"])
        around = {"content-type": "application/json", CORRELATION_HEADER: correlation_id}
        request = OutgoingRequest(
            method="POST",
            url=order.callback_url,
            headers=lambda: (
                around | tracing.headers() | signed_headers(key, id_=id_, timestamp=int(self.world.now()), body=notice)
            ),
            content=notice,
            transient=TRANSIENT | UNRECOGNISED,
        )
        try:
            answer = await self._sent(request, until, tried=self.metrics.delivery_tried)
        except (UrlRefused, AddressRefused) as error:
            return DeliveryGivenUp(str(error))
        if isinstance(answer, DeliveryGivenUp):
            return answer
        return Delivered() if answer.status < 300 else DeliveryGivenUp(_answer_text(answer))

    def _as_ours(self, order: StoredOrder, url: str, correlation_id: str) -> dict[str, str]:
        headers = {CORRELATION_HEADER: correlation_id, "accept": "application/json", **tracing.headers()}
        if self._is_trusted(url):
            headers["authorization"] = f"Bearer {self.links.token(order.job_id)}"
        return headers

    def _is_trusted(self, url: str) -> bool:
        return read_target(url).origin in self.links.trusted

    async def _sent(
        self, request: OutgoingRequest, until: float, *, tried: Callable[[str], None] | None = None
    ) -> FetchedResponse | DeliveryGivenUp:
        """Returns the first non-transient answer, or why there was none in time. Raises UrlRefused, AddressRefused."""
        number = 0
        while True:
            answer = await self._try(request, until)
            if tried is not None:
                tried("unanswered" if isinstance(answer, DeliveryGivenUp) else f"{answer.status // 100}xx")
            if isinstance(answer, FetchedResponse) and not request.may_pass(answer.status):
                return answer
            problem = answer.reason if isinstance(answer, DeliveryGivenUp) else _answer_text(answer)
            wait_s = self._wait_s(number, answer)
            number += 1
            about = {"method": request.method, "problem": problem, "tries": number}
            if self.world.clock.monotonic() + wait_s >= until:
                _log.warning("delivery_given_up", **about)
                return DeliveryGivenUp(problem)
            _log.warning("not_delivered", **about, again_in_s=wait_s)
            await self.world.clock.sleep(wait_s)

    async def _try(self, request: OutgoingRequest, until: float) -> FetchedResponse | DeliveryGivenUp:
        left_s = max(0.0, until - self.world.clock.monotonic())
        sending = self.links.client.send(
            request.method, request.url, headers=request.headers(), content=request.content
        )
        try:
            return await within(self.world.clock, left_s, sending)
        except (UrlRefused, AddressRefused):
            raise
        except OutgoingError as error:
            return DeliveryGivenUp(str(error))
        except TimeoutError:
            return DeliveryGivenUp(f"no answer within {left_s:g} s")

    def _wait_s(self, number: int, answer: FetchedResponse | DeliveryGivenUp) -> float:
        """Returns the backoff of the retry policy, or the server's `Retry-After` if longer."""
        asked_s = retry_after_s(httpx2.Headers(dict(answer.headers))) if isinstance(answer, FetchedResponse) else None
        return max(self.retry.delay_s(number, self.world.rng.random()), min(asked_s or 0.0, RETRY_AFTER_S_MAX))


def callback_id(order: StoredOrder, status: str) -> str:
    """Returns an id that is the same for the same outcome, so that the gateway recognises a repetition."""
    outcome = json.dumps([*order.scope, status]).encode()
    return f"nlm_{hashlib.sha256(outcome).hexdigest()[:40]}"


def complete_notice(order: StoredOrder, staged: StagedAnswer) -> dict[str, Any]:
    """Builds the callback of a completed job. Repeated requests for the job get the same content."""
    return {
        "job_id": order.job_id,
        "epoch": order.epoch,
        "status": COMPLETE,
        "artifact_id": staged.artifact_id,
        "artifact_url": f"{order.gateway}/artifacts/{staged.artifact_id}",
        "sha256": staged.sha256,
        "size": staged.size,
    }


def failed_notice(order: StoredOrder, fault: Fault) -> dict[str, Any]:
    error = {"code": fault.fault.value, "message": str(fault)[:DETAIL_CHARS_MAX]}
    return {"job_id": order.job_id, "epoch": order.epoch, "status": FAILED, "error": error}


def as_bytes(notice: Mapping[str, Any]) -> bytes:
    return json.dumps(notice, ensure_ascii=False, sort_keys=True).encode()


def _staged(answer: FetchedResponse, order: StoredOrder) -> StagedAnswer:
    if answer.status in {200, 201}:
        try:
            staged = StagedAnswer.model_validate_json(answer.body)
        except pydantic.ValidationError:
            raise Fault(fault=FaultCode.STAGING_REFUSED, detail="The artifact store sent no usable answer.") from None
        if staged.job_id != order.job_id:
            detail = f"The artifact store answered about job {staged.job_id[:100]}."
            raise Fault(fault=FaultCode.STAGING_REFUSED, detail=detail)
        return staged
    detail = f"The artifact store answered {_answer_text(answer)}"
    if answer.status == 409 and problem_fields(answer.body).get("code") in JOB_LOST_CODES:
        raise Superseded(detail=detail)
    code = FaultCode.VALIDATION_ERROR if answer.status in {413, 422} else FaultCode.STAGING_REFUSED
    raise Fault(fault=code, detail=detail)


def _answer_text(answer: FetchedResponse) -> str:
    """Returns the status, with the code and detail of a problem document."""
    problem = problem_fields(answer.body)
    detail = " ".join(str(problem[name]) for name in ("code", "detail") if isinstance(problem.get(name), str))
    return f"{answer.status} {detail}".strip()[:DETAIL_CHARS_MAX]
