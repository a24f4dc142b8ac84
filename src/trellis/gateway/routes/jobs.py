"""Jobs of every kind: submit, read, explain, cancel, requeue and dead-letter them, and decide about held ones.

Implements DJ-5, DJ-11, DJ-12, DJ-13, D9, D19, D43, JQ-11. Runs, proposals and inbox entries are jobs of the ledger too,
but have routes and rules of their own: here they are not found.
"""

from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Path, Query, Response

from trellis.api.jobs import WORK, LocalJobs
from trellis.app.instance import Instance
from trellis.artifacts.payloads import Snapshot
from trellis.auth.ownership import acting_or_gateway, within_scope
from trellis.bus.documents import SIGNALS_READ_MAX
from trellis.bus.documents import document as bus_document
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.requests import JobRequest
from trellis.engine import tracing
from trellis.engine.errors import IdempotencyMismatch
from trellis.engine.event_data import artifacts_of, last_traceback
from trellis.engine.jobs import (
    SIGNAL_NAME_CHARS_MAX,
    CancelMode,
    JobId,
    Mismatch,
    NewJob,
    ReasonCode,
)
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Job, JobFilter, JobPlace
from trellis.engine.text import nearest
from trellis.gateway.callers import Caller, requires, within_job_agent
from trellis.gateway.idempotency import IdempotentRequest, IdempotentRequestOf
from trellis.gateway.nlm import list_nlm_jobs, nlm_job_events, show_nlm_job
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page, page_document
from trellis.http.operation_shapes import JobExplained, JobListed
from trellis.http.shapes import (
    OUTCOME,
    REPLACED,
    BusJob,
    EventShape,
    JobShape,
    JobWhole,
    QueueJob,
    SignalReceipt,
    SignalShape,
)
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.job_documents import (
    event_document,
    job_document,
    signal_document,
    whole_document,
)
from trellis.proposals.proposal import NOTE_CHARS_MAX
from trellis.research.context import snapshot_key
from trellis.research.errors import RequestUnreadable
from trellis.research.queue_job import QueueRequest, snapshot_digest
from trellis.research.queue_job import document as queue_document
from trellis.storage.objects.canonical_json import sha256
from trellis.worker.kinds import JobRequestBody, make_job

_log = log_of("trellis.gateway.routes.jobs")

router = APIRouter(tags=["jobs"], route_class=StrictRoute)

JobIdPath = Annotated[str, Path(max_length=200, examples=["0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77"])]


class JobCancelRequest(pydantic.BaseModel):
    """How to cancel: soft asks the worker to stop and becomes hard after a grace period, hard ends the job now."""

    model_config = body_config({"mode": "soft"})

    mode: CancelMode = CancelMode.SOFT
    reason: str | None = pydantic.Field(None, max_length=500)


class JobSignalRequest(pydantic.BaseModel):
    """A signal to a job: `ctx.wait_signal(name)` of its handler returns the payload."""

    model_config = body_config({"name": "approved", "payload": {"by": "ada"}})

    name: str = pydantic.Field(min_length=1, max_length=SIGNAL_NAME_CHARS_MAX)
    payload: Any = None


class JobRequeue(pydantic.BaseModel):
    """Why the job is requeued."""

    model_config = body_config({"reason": "the disk has room"})

    reason: str | None = pydantic.Field(None, max_length=500)


class JobDeadLetter(pydantic.BaseModel):
    """Why the job is dead-lettered."""

    model_config = body_config({"reason_code": "policy_violation", "reason": "it mails people who opted out"})

    reason_code: str = pydantic.Field(ReasonCode.POLICY_VIOLATION.value, max_length=50)
    reason: str = pydantic.Field(min_length=1, max_length=500)


class Approval(pydantic.BaseModel):
    """A person's decision. Rejecting needs a note of at least ten characters.

    With `policy_hash`, the decision applies only to a hold under that policy.
    """

    model_config = body_config({"decision": "approve", "note": "the backup is from today"})

    decision: Literal["approve", "reject"]
    note: str | None = pydantic.Field(None, max_length=NOTE_CHARS_MAX)
    policy_hash: str | None = pydantic.Field(None, min_length=1, max_length=200)


@router.post("/jobs", status_code=202, response_model=JobShape, responses=PROBLEMS)
async def submit(
    body: JobRequestBody,
    caller: Annotated[Caller, requires("jobs.create")],
    request_key: IdempotentRequestOf,
    response: Response,
) -> dict[str, Any]:
    """Submit a job.

    It is stored in the ledger before the answer is sent. The answer shows the job as it was created. The header
    `Submit-Outcome` says whether this request created it, returned it or replaced a waiting one, which is then named in
    `Replaced-Job`.
    """
    with tracing.span("job.submit", kind=tracing.PRODUCER) as span:
        asked_as = None if request_key.key is None else (request_key.key.scope, request_key.key.key)
        making = caller.instance.job_factory(
            caller.principal, asked_as=asked_as, correlation_id=caller.given_correlation_id
        )
        job = _keyed(await make_job(body, making), request_key)
        job = job.traced(correlation_id=job.correlation_id or caller.correlation_id, trace=tracing.here() or job.trace)
        actor = acting_or_gateway(caller.actor, job.lifecycle)
        (answer,) = await caller.instance.ledger.submit(actor, [job])
        about = {"trellis.job_id": answer.job_id, "trellis.type": job.type, "trellis.lifecycle": job.lifecycle}
        span.note({**about, "trellis.correlation_id": job.correlation_id or ""})
    if isinstance(answer, Mismatch):
        by_id = answer.key == answer.job_id  # the id is taken, whatever the key
        raise IdempotencyMismatch(key=answer.key if by_id else request_key.given or answer.key, job_id=answer.job_id)
    if answer.created and job.lifecycle == BUS_JOB.name:
        caller.instance.wake_bus()
    request_key.note(replayed=not answer.created)
    response.headers["Location"] = f"/jobs/{answer.job_id}"
    response.headers[OUTCOME] = answer.outcome
    if answer.replaced is not None:
        response.headers[REPLACED] = answer.replaced
    first = LIFECYCLES[job.lifecycle].initial.name
    return {"job_id": answer.job_id, "lifecycle": job.lifecycle, "status": first, "type": job.type, "version": 1}


def _keyed(job: NewJob, request_key: IdempotentRequest) -> NewJob:
    """The job with the request's idempotency key.

    A job on a topic defines itself when two requests are the same, and may have its own key (DJ-5, BUS-11).
    """
    key = request_key.key
    if key is None:
        return job
    if job.lifecycle != BUS_JOB.name:
        return replace(
            job, idempotency_key=key.key, idempotency_scope=key.scope, fingerprint=key.fingerprint, id_is_given=False
        )
    if job.idempotency_key is None:
        return replace(job, idempotency_key=key.key, idempotency_scope=key.scope)
    if job.idempotency_key != request_key.given:
        detail = "Idempotency-Key and meta.idempotency_key name the same thing; send one of them, or the same in both."
        raise Problem("VALIDATION_FAILED", detail)
    return job


@router.get("/jobs", response_model=Page[JobListed], responses=PROBLEMS)
async def listing(
    caller: Annotated[Caller, requires("jobs.read")],
    *,
    lifecycle: Literal["leased-job", "queue-job", "bus-job", "nlm-job"] | None = None,
    type: Annotated[str | None, Query(max_length=200)] = None,  # noqa: A002 - the word of the interface
    status: Annotated[str | None, Query(max_length=50, examples=["queued"])] = None,
    correlation_id: Annotated[str | None, Query(max_length=200)] = None,
    parent_id: Annotated[str | None, Query(max_length=200, description="Only jobs that this one caused.")] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """List jobs, newest first.

    A caller that may read only its own jobs gets those; a page may then be short and have a next one.

    With lifecycle=nlm-job, for operators, those of the NLM backend, wherever it keeps them; nobody else finds them here.
    """
    filters = {"status": _state(status), "correlation_id": correlation_id, "parent_id": parent_id}
    if lifecycle == NLM_JOB.name and not await _has_nlm_jobs(caller.instance.ledger):
        return await list_nlm_jobs(caller, limit=limit, cursor=cursor, type=type, **filters)
    jobs = _jobs(caller)
    page = await jobs.list(lifecycle=lifecycle, type_=type, limit=limit, cursor=cursor, **filters)
    waits = await jobs.waits(page.items)
    attempts = await jobs.attempts_made(page.items)
    documents = [
        {**job_document(job), "attempts_made": attempts[job.job_id], "waits_for": waits.get(job.job_id)}
        for job in page.items
    ]
    return page_document(documents, page.next_cursor)


def _jobs(caller: Caller, request: IdempotentRequest | None = None) -> LocalJobs:
    """The jobs that these routes serve, as this caller may read and change them."""
    return caller.api_for(request).jobs.only(WORK)


async def _has_nlm_jobs(ledger: Ledger) -> bool:
    """Whether the NLM backend shares this ledger."""
    return bool((await ledger.jobs(JobFilter(lifecycle=NLM_JOB.name), limit=1)).jobs)


def _state(status: str | None) -> str | None:
    """A state of one of the lifecycles served here; raises Problem."""
    known = {state.name for name in WORK for state in LIFECYCLES[name].states}
    if status is not None and status not in known:
        near = nearest(status, sorted(known))
        hint = "" if near is None else f"did you mean {near}? "
        raise Problem("VALIDATION_FAILED", f"No job is {status!r}; {hint}Choose one of {', '.join(sorted(known))}.")
    return status


@router.get("/jobs/{job_id}", response_model=QueueJob | BusJob | JobWhole, responses=PROBLEMS)
async def one(job_id: JobIdPath, caller: Annotated[Caller, requires("jobs.read")]) -> dict[str, Any]:
    """Get a job with its payload, its progress and its result.

    A queue job and a job on a topic have the further fields of their documents.
    """
    if await caller.instance.ledger.job(JobId(job_id)) is None and (there := await show_nlm_job(caller, job_id)):
        return there
    jobs = _jobs(caller)
    job = await jobs.find(job_id)
    whole = whole_document(job, await caller.instance.ledger.result(job.job_id))
    whole |= {"attempts_made": (await jobs.attempts_made([job]))[job.job_id]}
    if job.lifecycle == LEASED_JOB.name and (job.place is JobPlace.ENDED or job.attempt):
        events = await caller.instance.ledger.events(job.job_id)
        whole["artifacts"] = [asdict(one) for one in artifacts_of(events)]
        whole["traceback"] = last_traceback(events)
    if job.lifecycle == BUS_JOB.name:
        return {**whole, **await _bus_job(caller.instance, jobs, job)}
    return whole if job.lifecycle != QUEUE_JOB.name else {**whole, **await _queue_job(caller.instance, job)}


async def _bus_job(instance: Instance, jobs: LocalJobs, job: Job) -> dict[str, Any]:
    """The fields of the JobRequest and of its outcome; none if the stored request is not in our format."""
    try:
        request = JobRequest.read(job.payload or b"")
    except BusRequestInvalid:
        return {}
    events = await instance.ledger.events(job.job_id)
    signals = await instance.ledger.signals(job.job_id, limit=SIGNALS_READ_MAX)
    return {**bus_document(job, request, events, signals), "retry": await _retry(jobs, job)}


async def _retry(jobs: LocalJobs, job: Job) -> dict[str, Any] | None:
    """The job that retries a failed, timed out or denied job; None if there is none."""
    again = await jobs.successor(job)
    if again is None:
        return None
    job_id, status = (None, None) if again.last is None else (again.last.job_id, again.last.state)
    return {"job_id": job_id, "status": status, "due": again.due}


async def _queue_job(instance: Instance, job: Job) -> dict[str, Any]:
    """The fields of the job's document; none if the stored request is not in our format."""
    try:
        request = QueueRequest.read(job.job_id, job.payload or b"")
    except RequestUnreadable:
        return {}
    events = await instance.ledger.events(job.job_id)
    return queue_document(job, request, events, gateway=instance.gateway_url)


@router.get("/jobs/{job_id}/context/{epoch}", response_model=Snapshot, responses=PROBLEMS)
async def context(
    job_id: JobIdPath,
    epoch: Annotated[int, Path(ge=0, lt=2**53, examples=[1])],
    caller: Annotated[Caller, requires("memory.read")],
) -> Response:
    """Get the context of one attempt of a queue job: memory, entities and sources, as they were when it began."""
    within_scope(caller.principal, "memory.read", job_id)
    job = await caller.instance.ledger.job(JobId(job_id))
    await within_job_agent(caller, "memory.read", job_id)
    stored = None
    if job is not None and job.lifecycle == QUEUE_JOB.name:
        stored = await caller.instance.objects.get(snapshot_key(caller.instance.artifacts.cid, job_id, epoch))
    if stored is None:
        raise Problem("NOT_FOUND", f"There is no context of job {job_id[:200]} in epoch {epoch}.")
    recorded = snapshot_digest(await caller.instance.ledger.events(JobId(job_id)), epoch)
    if recorded is not None and sha256(stored.body) != recorded:
        _log.error("content_changed", job_id=job_id, key=stored.key, recorded=recorded)
        raise Problem(
            "CONFLICT", f"The context of job {job_id[:200]} in epoch {epoch} was changed after it was stored."
        )
    return Response(stored.body, media_type="application/json")


@router.get("/jobs/{job_id}/result", responses={200: {"content": {"application/octet-stream": {}}}, **PROBLEMS})
async def result(job_id: JobIdPath, caller: Annotated[Caller, requires("jobs.read")]) -> Response:
    """Get the result of a job: the bytes at `result_ptr` for a job on a topic, else the result as JSON."""
    body, media_type = await _jobs(caller).typed_result(job_id)
    return Response(body, media_type=media_type, headers={"X-Content-Type-Options": "nosniff"})


@router.get("/jobs/{job_id}/context", responses={200: {"content": {"application/octet-stream": {}}}, **PROBLEMS})
async def payload(job_id: JobIdPath, caller: Annotated[Caller, requires("jobs.read")]) -> Response:
    """Get the payload that the worker of a job on a topic gets: the bytes at `context_ptr`, or at the redacted pointer.

    A payload that came with the request may be read by all who may read the job. A payload at a pointer that the
    submitter chose may belong to somebody else, so only those who decide about held jobs may read it.
    """
    body = await _jobs(caller).context(job_id)
    return Response(body, media_type="application/octet-stream", headers={"X-Content-Type-Options": "nosniff"})


@router.get("/jobs/{job_id}/events", response_model=Page[EventShape], responses=PROBLEMS)
async def events(
    job_id: JobIdPath,
    caller: Annotated[Caller, requires("jobs.read")],
    limit: Limit = LIMIT_DEFAULT,
    cursor: Annotated[int | None, Query(ge=0, description="The `next_cursor` of the page_document before.")] = None,
) -> dict[str, Any]:
    """List the events of a job, oldest first. `payload.from` and `payload.to` are its states."""
    if await caller.instance.ledger.job(JobId(job_id)) is None:
        there = await nlm_job_events(caller, job_id, limit=limit, cursor=cursor)
        if there is not None:
            return there
    job = await _jobs(caller).find(job_id)
    later = [event for event in await caller.instance.ledger.events(job.job_id) if event.version > (cursor or 0)]
    more = len(later) > limit
    documents = [event_document(event, tracing.trace_id(job.trace)) for event in later[:limit]]
    return page_document(documents, str(later[limit - 1].version) if more else None)


@router.get("/jobs/{job_id}/explanation", responses=PROBLEMS)
async def explanation(job_id: JobIdPath, caller: Annotated[Caller, requires("jobs.read")]) -> JobExplained:
    """Explain why a job has its status and what happens next. `you_can` lists commands that help.

    A caller that may read only its own jobs is not told about workers and other jobs.
    """
    return await _jobs(caller).explain(job_id)


@router.get("/jobs/{job_id}/signals", response_model=Page[SignalShape], responses=PROBLEMS)
async def signals(job_id: JobIdPath, caller: Annotated[Caller, requires("jobs.read")]) -> dict[str, Any]:
    """List the last log lines and progress signals of a job, oldest first: at most 20, while they are kept."""
    return page_document([signal_document(one) for one in await _jobs(caller).signals(job_id)], None)


@router.post("/jobs/{job_id}/signals", responses=PROBLEMS)
async def send_signal(
    job_id: JobIdPath,
    body: JobSignalRequest,
    caller: Annotated[Caller, requires("jobs.signal")],
    request_key: IdempotentRequestOf,
) -> SignalReceipt:
    """Send a signal to a job that has not ended. A job that waits for it goes on at once."""
    return await _jobs(caller, request_key).signal(job_id, body.name, body.payload)


@router.post("/jobs/{job_id}/cancel", responses=PROBLEMS)
async def cancel(
    job_id: JobIdPath,
    caller: Annotated[Caller, requires("jobs.cancel")],
    request_key: IdempotentRequestOf,
    body: JobCancelRequest | None = None,
) -> JobShape:
    """End a job. A soft cancel leaves a running job running for a grace period.

    A job that has ended stays as it is: 409 with its status, and with the job that retries it if there is one.
    """
    stop = body or JobCancelRequest(mode=CancelMode.SOFT, reason=None)
    return await _jobs(caller, request_key).cancel(job_id, mode=stop.mode, reason=stop.reason)


@router.post("/jobs/{job_id}/requeue", responses=PROBLEMS)
async def requeue(
    job_id: JobIdPath,
    caller: Annotated[Caller, requires("jobs.requeue")],
    request_key: IdempotentRequestOf,
    response: Response,
    body: JobRequeue | None = None,
) -> JobShape:
    """Run a failed or dead-lettered job again, in its next generation; a job on a topic as a new, linked one.

    Only an operator may.
    """
    cause = None if body is None else body.reason
    job = await caller.api_for(request_key).jobs.requeue(job_id, reason=cause)
    if job.lifecycle == BUS_JOB.name:
        caller.instance.wake_bus()
        response.headers["Location"] = f"/jobs/{job.job_id}"
    return job


@router.post("/jobs/{job_id}/dead-letter", responses=PROBLEMS)
async def bury(
    job_id: JobIdPath,
    body: JobDeadLetter,
    caller: Annotated[Caller, requires("jobs.dead-letter")],
    request_key: IdempotentRequestOf,
) -> JobShape:
    """End a job that has not ended with a dead letter, without a retry. Only an operator may."""
    return await _jobs(caller, request_key).dead_letter(job_id, reason=body.reason, reason_code=body.reason_code)


@router.post("/jobs/{job_id}/approval", responses=PROBLEMS)
async def approval(
    job_id: JobIdPath,
    body: Approval,
    caller: Annotated[Caller, requires("jobs.approve")],
    request_key: IdempotentRequestOf,
) -> JobShape:
    """Approve or deny a job that the safety kernel held.

    409 if the job does not wait for a person, or is held under another policy.

    An approval is good for this job under the policy that held it: when the policy changes before the job goes, the job
    is held again.
    """
    jobs = caller.api_for(request_key).jobs
    if body.decision == "approve":
        job = await jobs.approve(job_id, body.note, policy_hash=body.policy_hash)
    else:
        job = await jobs.deny(job_id, body.note or "", policy_hash=body.policy_hash)
    caller.instance.wake_bus()
    return job
