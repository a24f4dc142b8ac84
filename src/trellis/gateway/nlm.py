"""The gateway's side of the NLM backend: signed callbacks from it, and its jobs for operators."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

import pydantic
from fastapi import APIRouter, Path, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader

from trellis.app.instance import Instance
from trellis.auth.matrices import permit
from trellis.auth.principals import Principal
from trellis.engine.errors import JobNotFound
from trellis.engine.jobs import JOB_ID_PATTERN, Actor, JobId
from trellis.engine.records import Job
from trellis.gateway.callers import Caller, InstanceOf, record_refusal
from trellis.gateway.idempotency import mark_replayed
from trellis.http_server.bodies import StrictRoute, parse, sender_of
from trellis.http_server.problems import PROBLEMS, REF_TEMPLATE, Problem
from trellis.lifecycles import Role
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.net.signatures import (
    SIGNATURE_HEADER,
    CallbackSignature,
    SignatureRefused,
    check_headers,
    check_signature,
    job_key,
)
from trellis.research.backend_client import EXAMPLE_JOB, Callback, callback_key
from trellis.research.errors import StageError, StageHopeless
from trellis.storage.objects.canonical_json import encode, timestamp
from trellis.storage.objects.store import CREATE, PutStored

# Callbacks: the NLM backend delivers the result of one job in a signed request (D26, NLM-4).
#
# Invariants:
# - the signature is the credential. It makes the sender the NLM backend, for this job, and nothing in the body is
#   trusted before it is verified. Invalid headers or a missing secret are refused before any of the body is read. Until
#   the signature is verified, the body has the small limits of unauthenticated senders (`http_server.bodies`);
# - each callback id takes effect once, over all replicas and forever: the callback is an object that is created only
#   once. The same callback again gets the same answer; another body under its id is refused;
# - only the attempt that waits for a callback accepts it: another epoch has lost its lease, and another state expects
#   none;
# - a refused callback changes nothing and leaves one audit record, limited per sender.

EXPECTED_STATE = "NOTEBOOKLM_CALL"
CAUSE_CHARS_MAX = 500
REFUSED, REPEATED = "callback.refused", "callback.repeated"
CALLBACK_ACTOR = "callback"
"""The actor of every act about a callback."""

router = APIRouter(tags=["jobs"], route_class=StrictRoute)
_signature = APIKeyHeader(
    name=SIGNATURE_HEADER,
    scheme_name="CallbackSignature",
    auto_error=False,
    description="`v1,BASE64` of HMAC-SHA256 over `webhook-id.webhook-timestamp.body`, with the key of this job.",
)


class CallbackAccepted(pydantic.BaseModel):
    """The callback is kept."""

    job_id: str
    id: str
    status: Literal["taken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallbackKeys:
    """The callback secrets and the clock. Kept in the app's state."""

    secrets: Sequence[bytes]
    now: Callable[[], float]

    def admit(self, request: Request) -> None:
        """Raise SignatureRefused for a request that no body could make valid."""
        if not self.secrets:
            raise SignatureRefused(problem="no secret for callbacks is configured here")
        check_headers(request.headers, now=self.now())

    def check(self, request: Request, job_id: str, body: bytes) -> CallbackSignature:
        """Verify the signature; raises SignatureRefused."""
        keys = [job_key(secret, Role.NLM_BACKEND.value, job_id) for secret in self.secrets]
        return check_signature(request.headers, body, keys, now=self.now())


@router.post(
    "/jobs/{job_id}/result",
    status_code=202,
    response_model=CallbackAccepted,
    responses=PROBLEMS,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": Callback.model_json_schema(ref_template=REF_TEMPLATE)}},
        }
    },
)
async def result(
    job_id: Annotated[str, Path(pattern=JOB_ID_PATTERN, examples=[EXAMPLE_JOB])],
    request: Request,
    response: Response,
    instance: InstanceOf,
    _: Annotated[str | None, Security(_signature)],
) -> dict[str, Any]:
    """The NLM backend brings the result of a job. It signs `webhook-id.webhook-timestamp.body` with the key of that job."""
    keys: CallbackKeys = request.app.state.callbacks
    try:
        keys.admit(request)
        signed = keys.check(request, job_id, body := await request.body())
        backend = Principal(name=Role.NLM_BACKEND.value, roles=frozenset({Role.NLM_BACKEND}))
        actor = permit(backend, "jobs.update", own=True)
        repeated = await _keep_callback(instance, actor, job_id, signed, body)
    except (SignatureRefused, JobNotFound, Problem, RequestValidationError) as refusal:
        is_invalid = isinstance(refusal, RequestValidationError)
        cause = "the body does not fit" if is_invalid else str(refusal)
        await _record(request, job_id, REFUSED, cause, signed=not isinstance(refusal, SignatureRefused))
        raise
    if repeated:
        await _record(request, job_id, REPEATED, f"{signed.id} came again")
    mark_replayed(response, replayed=repeated)
    return {"job_id": job_id, "id": signed.id, "status": "taken"}


async def _keep_callback(instance: Instance, actor: Actor, job_id: str, signed: CallbackSignature, body: bytes) -> bool:
    """Store the callback; returns whether it was stored before. Raises Problem, JobNotFound, RequestValidationError."""
    key = callback_key(job_id, signed.id)
    digest = hashlib.sha256(body).hexdigest()
    there = await instance.objects.get(key)
    if there is None:
        callback = _read(body, job_id)
        job = await instance.ledger.job(JobId(job_id))
        if job is None:
            raise JobNotFound(job_id=job_id)
        _check_expected(job, callback)
        kept = {
            "id": signed.id,
            "actor": actor.role.value,
            "received_at": timestamp(await instance.ledger.now()),
            "body_sha256": digest,
            "callback": callback.model_dump(),
        }
        if isinstance(await instance.objects.put(key, encode(kept), when=CREATE), PutStored):
            return False
        there = await instance.objects.get(key)
    if there is None or json.loads(there.body)["body_sha256"] != digest:
        raise Problem(
            "DUPLICATE_ENTRY", f"Another callback came as {signed.id}; use a new webhook-id for another body."
        )
    return True


def _read(body: bytes, job_id: str) -> Callback:
    if not body:
        raise Problem("VALIDATION_FAILED", "The callback has no body; send how the job ended, as JSON.")
    try:
        callback = Callback.model_validate(parse(body))
    except pydantic.ValidationError as error:
        names = [
            {**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False, include_context=False)
        ]
        raise RequestValidationError(names) from None
    if callback.job_id != job_id:
        raise Problem("VALIDATION_FAILED", f"The body is about {callback.job_id} and was sent to {job_id}.")
    return callback


def _check_expected(job: Job, callback: Callback) -> None:
    if job.lifecycle != QUEUE_JOB.name:
        raise Problem(
            "INVALID_TRANSITION", f"Job {job.job_id} is a {job.lifecycle}; only a queue-job takes a callback."
        )
    if callback.epoch != job.epoch:
        detail = f"Job {job.job_id} has epoch {job.epoch}; the attempt of epoch {callback.epoch} has lost it."
        raise Problem("LEASE_LOST", detail)
    if job.state != EXPECTED_STATE:
        detail = f"Job {job.job_id} is in {job.state} and expects no callback."
        raise Problem("INVALID_TRANSITION", detail, status_now=job.state)


async def _record(request: Request, job_id: str, event: str, cause: str, *, signed: bool = True) -> None:
    """Record a refused or repeated callback, with the sender's address as a fact.

    All callbacks have one actor, because the ledger keeps every actor's name for ever. The number of records is limited
    per address, and for all senders without a valid signature together.
    """
    await record_refusal(
        request,
        Principal(name=CALLBACK_ACTOR, roles=frozenset()),
        event=event,
        subject=job_id,
        cause=cause[:CAUSE_CHARS_MAX],
        job_id=job_id,
        sender=sender_of(request),
        authenticated=signed,
    )


# Jobs of the NLM backend, for operators. They are in the backend's own ledger (D42), and the gateway queries it.
# Nothing is cached, and only these reads depend on the backend: while it is unavailable they are answered with 502.

RULE = "nlm.read"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*@[0-9]+")
CURSOR = "nlm:"
"""Prefix of list cursors that belong to the backend."""


async def list_nlm_jobs(caller: Caller, *, limit: int, cursor: str | None, **where: str | None) -> dict[str, Any]:
    """A page of NLM jobs, newest first; raises Problem, NotAllowed."""
    caller.permit(RULE)
    query = {**where, "limit": str(limit), "cursor": None if cursor is None else cursor.removeprefix(CURSOR)}
    given = {name: value for name, value in query.items() if value is not None}
    page: Any = await _nlm_jobs_read(caller, f"/jobs?{urlencode(given)}") or {
        "items": [],
        "next_cursor": None,
    }
    following: str | None = page["next_cursor"]
    return {"items": page["items"], "next_cursor": None if following is None else f"{CURSOR}{following}"}


async def show_nlm_job(caller: Caller, job_id: str) -> dict[str, Any] | None:
    """One NLM job; None if the backend has no such job. Raises Problem."""
    return await _nlm_jobs_read(caller, f"/jobs/{quote(job_id, safe='')}") if _may_be(caller, job_id) else None


async def nlm_job_events(caller: Caller, job_id: str, *, limit: int, cursor: int | None) -> dict[str, Any] | None:
    """A page of the job's events, oldest first; None if the backend has no such job. Raises Problem."""
    if not _may_be(caller, job_id):
        return None
    given = {"limit": str(limit), **({} if cursor is None else {"cursor": str(cursor)})}
    return await _nlm_jobs_read(caller, f"/jobs/{quote(job_id, safe='')}/events?{urlencode(given)}")


def _may_be(caller: Caller, job_id: str) -> bool:
    """Whether to query the backend: its ids have the form `<job>@<epoch>`, and only operators see them."""
    return _ID.fullmatch(job_id) is not None and caller.may(RULE)


async def _nlm_jobs_read(caller: Caller, path: str) -> Any:
    try:
        return await caller.instance.nlm_reader.read(path, correlation_id=caller.correlation_id)
    except StageHopeless as error:
        raise Problem("VALIDATION_FAILED", str(error)) from error
    except StageError as error:
        raise Problem("NLM_UNAVAILABLE", f"The NLM backend has these jobs and was asked: {error}") from error
