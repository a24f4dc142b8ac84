"""The HTTP application of the NLM backend: authentication, routes and models."""

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Security
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from trellis.auth.matrices import permit
from trellis.auth.principals import Principal
from trellis.auth.tokens import TrustedKey
from trellis.engine import tracing
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import JOB_ID_PATTERN, Actor, JobId
from trellis.engine.logs import log_of
from trellis.engine.metrics import MEDIA_TYPE
from trellis.engine.records import Job, JobFilter
from trellis.http.shapes import EventShape, JobDocument, JobWhole, Page
from trellis.http_server import problems
from trellis.http_server.application import HttpApplication
from trellis.http_server.bodies import BodiesUnderWay, LargeBodyRoute, StrictRequest, StrictRoute
from trellis.http_server.health import PROBE_S, ProcessHealth
from trellis.http_server.limits import RateLimits
from trellis.http_server.middleware import RequestMiddleware
from trellis.http_server.problems import PROBLEMS, Problem, ProblemShape, correlation_of, problem_response
from trellis.http_server.tokens import VerifiedTokens, bearer
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.nlm.provider import (
    PASSAGES_DEFAULT,
    PASSAGES_MAX,
    QUESTION_CHARS_MAX,
    REF_CHARS_MAX,
    SOURCE_CHARS_MAX,
    SOURCES_MAX,
    Language,
    NlmQuestion,
    NlmSource,
)
from trellis.nlm.retrying_provider import RetryingProvider
from trellis.nlm_backend.intake import ExecutionAccepted, JobIntake
from trellis.nlm_backend.orders import ProcessRequest
from trellis.operations.job_documents import event_document, job_document, whole_document
from trellis.research.backend_client import JobFailedAnswer, JobFinished

# Authentication: a bearer token gives a principal, and the route's rule is checked before the body is read (AUTH-5).

CALLER_STATE_KEY = "trellis.who"

_log = log_of("trellis.nlm_backend")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendAccess:
    """What authentication needs; stored in the app's state."""

    keys: Sequence[TrustedKey]
    limits: RateLimits
    now: Callable[[], float]
    """Seconds since 1970, for token expiry."""
    tokens: VerifiedTokens = field(default_factory=VerifiedTokens)


async def authenticate(request: Request, token: Annotated[str | None, Security(bearer)]) -> Principal:
    """Returns the principal of the token, verified once per request. Raises Problem 401, TokenRefused, Problem 429."""
    known: Principal | None = request.scope.get(CALLER_STATE_KEY)
    if known is not None:
        return known
    access: BackendAccess = request.app.state.access
    principal, _ = access.tokens.caller(token, access.keys, now=access.now())
    access.limits.take(request, principal)
    request.scope[CALLER_STATE_KEY] = principal
    return principal


class RequiresBackendRule:
    """A dependency that returns the caller in a role that the rule permits."""

    def __init__(self, rule: str) -> None:
        self.rule = rule

    async def __call__(self, who: Annotated[Principal, Depends(authenticate)]) -> Actor:
        """Returns the caller. Raises NotAllowed."""
        return permit(who, self.rule)

    async def admit(self, request: Request) -> None:
        """Raises what `__call__` would raise, before the body is read."""
        await self(await authenticate(request, await bearer(request)))


def requires(rule: str) -> Any:
    """Declares the rule of a route parameter, which receives the caller."""
    return Depends(RequiresBackendRule(rule))


async def refusal_answer(request: Request, error: NotAllowed) -> Response:
    """Answers a refused caller with 403 and logs it."""
    principal: Principal | None = request.scope.get(CALLER_STATE_KEY)
    caller = None if principal is None else principal.name
    rule = error.data.get("rule")
    _log.warning("refused", caller=caller, rule=rule, path=request.url.path, correlation_id=correlation_of(request))
    return problem_response(request, Problem("FORBIDDEN", str(error), rule=rule))


# Routes: jobs to process, questions to answer, and health (NLM-1, NLM-7, NLM-9).
#
# The application holds no state: an accepted job is in the ledger before the answer is sent.

QUERY_S = 60.0
LIST_DEFAULT = 50
LIST_MAX = 200
ExecutionId = Annotated[str, Path(pattern=JOB_ID_PATTERN, examples=["7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d@3"])]
"""The id of an NLM job: the queue job's id, `@`, and the epoch of the execution."""
QueueJobId = Annotated[str, Path(pattern=JOB_ID_PATTERN)]
JobEpoch = Annotated[int, Path(ge=0, lt=2**53)]
UNKNOWN = "unknown"
"""Marks the 404 for an unknown execution, in contrast to a 404 for an unknown path."""
REQUESTS_PER_SECOND = 200.0
BURST = 400
DESCRIPTION = "Makes artifacts of queue jobs, and answers questions from sources and from nothing else."


@contextmanager
def _unreadable_is_bad_request() -> Generator[None]:
    """Turns VALIDATION_FAILED from reading the body into BAD_REQUEST."""
    try:
        yield
    except Problem as problem:
        if problem.code == "VALIDATION_FAILED":
            problem.code = "BAD_REQUEST"
        raise


class ProcessRoute(StrictRoute):
    """Answers 400 to an unreadable body, and 422 to a readable but invalid one."""

    async def planned(self, strict: StrictRequest) -> Response | None:
        with _unreadable_is_bad_request():
            return await super().planned(strict)

    async def by_fastapi(self, strict: StrictRequest) -> Response:
        with _unreadable_is_bad_request():
            return await super().by_fastapi(strict)


jobs = APIRouter(tags=["jobs"], route_class=ProcessRoute)
questions = APIRouter(tags=["questions"], route_class=LargeBodyRoute)
system = APIRouter(tags=["system"], route_class=StrictRoute)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendServices:
    """What the routes use; stored in the app's state."""

    intake: JobIntake
    asking: RetryingProvider


def _services(request: Request) -> BackendServices:
    return request.app.state.services


Services = Annotated[BackendServices, Depends(_services)]


class JobAccepted(pydantic.BaseModel):
    """The job is accepted. Its callback follows."""

    accepted: Literal[True]
    job_id: str
    estimated_seconds: int


class JobCancelling(pydantic.BaseModel):
    """The open executions of the job in this epoch are being cancelled."""

    job_id: str
    epoch: int
    executions: int
    """How many were open; 0 if all had ended."""


class SourceIn(pydantic.BaseModel):
    """A text that may be cited."""

    model_config = pydantic.ConfigDict(extra="forbid")

    ref: Annotated[str, pydantic.Field(min_length=1, max_length=REF_CHARS_MAX)]
    text: Annotated[str, pydantic.Field(max_length=SOURCE_CHARS_MAX)]


class QueryIn(pydantic.BaseModel):
    """A question about sources."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"question": "Who made it?", "sources": [{"ref": "label.md", "text": "Made by Anna Koval in 1887."}]}
            ]
        },
    )

    question: Annotated[str, pydantic.Field(min_length=1, max_length=QUESTION_CHARS_MAX)]
    sources: Annotated[list[SourceIn], pydantic.Field(max_length=SOURCES_MAX)]
    agent: Annotated[str, pydantic.Field(min_length=1, max_length=200)] | None = None
    """Questions of one agent are asked one after the other."""
    language: Language | None = None
    """The language of the answer; without it, the letters of the question decide."""
    max_passages: Annotated[int, pydantic.Field(ge=1, le=PASSAGES_MAX)] = PASSAGES_DEFAULT
    """From how many passages of the sources the answer is made at most."""


class CitationOut(pydantic.BaseModel):
    """A citation and its position: `text[start:end]` of the source is the excerpt."""

    ref: str
    excerpt: str
    start: int
    end: int


class QueryOut(pydantic.BaseModel):
    """A verified answer."""

    answer: str
    citations: list[CitationOut]
    flags: list[str]
    confident: bool


class HealthOut(pydantic.BaseModel):
    """The current state of the backend."""

    status: Literal["ok", "degraded"]
    circuit: str
    waiting: int
    under_way: int


@jobs.post(
    "/jobs/process",
    status_code=202,
    response_model=JobAccepted,
    responses={
        **PROBLEMS,
        200: {
            "model": JobFinished | JobFailedAnswer,
            "description": "The result of this epoch, whether or not its callback was delivered.",
        },
        400: {"model": ProblemShape, "description": "The body cannot be read."},
        503: {
            "model": ProblemShape,
            "description": "Too many jobs wait, or the provider is down; `Retry-After` says when to try again.",
        },
    },
)
async def process(
    body: ProcessRequest, request: Request, services: Services, _: Annotated[Actor, requires("nlm.process")]
) -> Response | JobAccepted:
    """Accept a job. A repeated request for the same job and epoch gets the state or result of its one execution."""
    taken = await services.intake.take(body, correlation_id=correlation_of(request) or "")
    if isinstance(taken, ExecutionAccepted):
        return JobAccepted(accepted=True, job_id=taken.job_id, estimated_seconds=taken.estimated_seconds)
    return JSONResponse(taken.result)


@jobs.get(
    "/jobs/{job_id}/executions/{epoch}",
    response_model=JobFinished | JobFailedAnswer,
    responses={**PROBLEMS, 202: {"model": JobAccepted, "description": "The execution is running."}},
)
async def execution(
    job_id: QueueJobId, epoch: JobEpoch, services: Services, _: Annotated[Actor, requires("nlm.process")]
) -> Response:
    """The state of the last execution of a job in an epoch, for a caller that got no callback. Starts nothing."""
    known = await services.intake.look(job_id, epoch)
    if known is None:
        raise _unknown(job_id, epoch)
    if isinstance(known, ExecutionAccepted):
        taken = JobAccepted(accepted=True, job_id=known.job_id, estimated_seconds=known.estimated_seconds)
        return JSONResponse(taken.model_dump(), 202)
    return JSONResponse(known.result)


@jobs.delete("/jobs/{job_id}/executions/{epoch}", status_code=202, responses=PROBLEMS)
async def cancel(
    job_id: QueueJobId, epoch: JobEpoch, services: Services, _: Annotated[Actor, requires("nlm.process")]
) -> JobCancelling:
    """Cancel the open executions of a job in an epoch: softly at first, hard after the grace period. Idempotent."""
    stopping = await services.intake.cancel(job_id, epoch)
    if stopping is None:
        raise _unknown(job_id, epoch)
    return JobCancelling(job_id=job_id, epoch=epoch, executions=stopping)


@jobs.get("/jobs", response_model=Page[JobDocument], responses=PROBLEMS)
async def listing(
    services: Services,
    _: Annotated[Actor, requires("nlm.read")],
    *,
    type: Annotated[str | None, Query(max_length=200)] = None,  # noqa: A002 - the word of the interface
    status: Annotated[str | None, Query(max_length=50)] = None,
    correlation_id: Annotated[str | None, Query(max_length=200)] = None,
    parent_id: Annotated[str | None, Query(max_length=200, description="Only executions of this queue job.")] = None,
    limit: Annotated[int, Query(ge=1, le=LIST_MAX)] = LIST_DEFAULT,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> dict[str, Any]:
    """NLM jobs, newest first: one for each execution of a queue job."""
    where = JobFilter(
        lifecycle=NLM_JOB.name,
        type=type,
        state=_known_state(status),
        correlation_id=correlation_id,
        parent_id=None if parent_id is None else JobId(parent_id),
    )
    page = await services.intake.ledger.jobs(where, limit=limit, cursor=cursor)
    return {"items": [job_document(job) for job in page.jobs], "next_cursor": page.cursor}


@jobs.get("/jobs/{job_id}", response_model=JobWhole, responses=PROBLEMS)
async def show(job_id: ExecutionId, services: Services, _: Annotated[Actor, requires("nlm.read")]) -> dict[str, Any]:
    """One NLM job with its payload."""
    job = await _get_nlm_job(services, job_id)
    return whole_document(job, await services.intake.ledger.result(job.job_id))


@jobs.get("/jobs/{job_id}/events", response_model=Page[EventShape], responses=PROBLEMS)
async def events(
    job_id: ExecutionId,
    services: Services,
    _: Annotated[Actor, requires("nlm.read")],
    limit: Annotated[int, Query(ge=1, le=LIST_MAX)] = LIST_DEFAULT,
    cursor: Annotated[int | None, Query(ge=0)] = None,
) -> dict[str, Any]:
    """What happened to an NLM job, oldest first."""
    job = await _get_nlm_job(services, job_id)
    later = [event for event in await services.intake.ledger.events(job.job_id) if event.version > (cursor or 0)]
    documents = [event_document(event, tracing.trace_id(job.trace)) for event in later[:limit]]
    return {"items": documents, "next_cursor": str(later[limit - 1].version) if len(later) > limit else None}


async def _get_nlm_job(services: BackendServices, job_id: str) -> Job:
    job = await services.intake.ledger.job(JobId(job_id))
    if job is None or job.lifecycle != NLM_JOB.name:
        raise Problem("NOT_FOUND", f"There is no NLM job {job_id} here; GET /jobs lists them.")
    return job


def _known_state(status: str | None) -> str | None:
    if status is not None and status not in NLM_JOB.by_name:
        raise Problem("VALIDATION_FAILED", f"No NLM job is {status!r}; choose one of {', '.join(NLM_JOB.by_name)}.")
    return status


def _unknown(job_id: str, epoch: int) -> Problem:
    detail = f"No execution of job {job_id} in epoch {epoch} is known here."
    return Problem("NOT_FOUND", detail, execution=UNKNOWN)


@questions.post("/query", responses=PROBLEMS)
async def query(body: QueryIn, services: Services, actor: Annotated[Actor, requires("nlm.query")]) -> QueryOut:
    """Answer from the sources; every citation was found in its source, letter by letter."""
    sources = tuple(NlmSource(source.ref, source.text) for source in body.sources)
    question = NlmQuestion(text=body.question, sources=sources, language=body.language, max_passages=body.max_passages)
    answer = await services.asking.ask(question, agent=body.agent or actor.name, deadline_s=QUERY_S)
    return QueryOut(
        answer=answer.text,
        citations=[
            CitationOut(ref=one.ref, excerpt=one.excerpt, start=one.start, end=one.end) for one in answer.citations
        ],
        flags=list(answer.flags),
        confident=answer.confident,
    )


@system.get("/health", responses={502: PROBLEMS[502]})
async def health(services: Services) -> HealthOut:
    """Whether jobs are accepted, and how many wait; needs no token."""
    try:
        async with asyncio.timeout(PROBE_S):
            depth, circuit = await services.intake.depth(), services.intake.circuit
    except TimeoutError as error:
        raise Problem("UPSTREAM_UNAVAILABLE", f"The ledger said nothing for {PROBE_S:g} s; try again.") from error
    return HealthOut(
        status="degraded" if circuit.closed_for_s() > 0 else "ok",
        circuit=circuit.state.value,
        waiting=depth.waiting,
        under_way=depth.under_way,
    )


@system.get("/system/live")
async def live() -> dict[str, str]:
    """Whether this process answers; needs no token."""
    return {"status": "ok"}


@system.get("/system/ready", responses={503: {"description": "Something that is needed does not answer."}})
@system.get("/system/health", responses={503: {"description": "Something that is needed does not answer."}})
async def ready(request: Request) -> JSONResponse:
    """Whether jobs can be accepted: each dependency with its own result, in under a second; needs no token."""
    readiness = await request.app.state.health.ready()
    return JSONResponse(
        {"status": readiness.status, "checks": dict(readiness.checks)}, 200 if readiness.is_ready else 503
    )


@system.get("/metrics", response_class=PlainTextResponse, responses={502: PROBLEMS[502]})
async def metrics_text(services: Services) -> Response:
    """Counters of this process in Prometheus' text form; needs no token."""
    intake = services.intake
    text = intake.metrics.text(await intake.depth(), intake.circuit.state.value)
    return Response(text, media_type=MEDIA_TYPE)


def create_backend_app(
    services: BackendServices,
    keys: Sequence[TrustedKey],
    *,
    monotonic: Callable[[], float],
    new_id: Callable[[], str],
    now: Callable[[], float] = time.time,
) -> FastAPI:
    """Builds the application for an open backend."""
    app = HttpApplication(title="Trellis NLM backend", version="0.1.0", description=DESCRIPTION)
    app.state.services = services
    app.state.access = BackendAccess(keys=keys, limits=RateLimits(REQUESTS_PER_SECOND, BURST, monotonic), now=now)
    app.state.bodies = BodiesUnderWay()
    app.state.health = ProcessHealth({"ledger": services.intake.ledger.ping})
    problems.install(app)
    app.add_exception_handler(NotAllowed, refusal_answer)  # type: ignore[arg-type]
    for router in (jobs, questions, system):
        app.router.routes.extend(router.routes)
    app.add_middleware(RequestMiddleware, new_id=new_id)
    return app
