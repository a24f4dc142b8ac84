"""Problem documents: every error response, and its schema in the OpenAPI description."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import pydantic
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from trellis.engine.errors import IdempotencyMismatch, InvalidTransition, TrellisError
from trellis.engine.field_names import fields_beside
from trellis.engine.logs import log_of
from trellis.engine.text import no_such
from trellis.http_server.security_headers import SECURITY_HEADERS
from trellis.storage.memory.errors import MemoryOverLimit

# Every error response is application/problem+json (RFC 9457, D27), with one shape that also covers crashes.
# A problem says what the caller can change. It never carries internal details: an unexpected error is logged under the
# correlation id that the caller gets.

MEDIA_TYPE = "application/problem+json"
DETAIL_CHARS_MAX = 1_000
ERRORS_MAX = 20

STATUS_OF_CODE: Mapping[str, int] = MappingProxyType(
    {
        "BAD_REQUEST": 400,
        "VALIDATION_FAILED": 422,
        "AUTH_REQUIRED": 401,
        "TOKEN_EXPIRED": 401,
        "FORBIDDEN": 403,
        "NOT_FOUND": 404,
        "METHOD_NOT_ALLOWED": 405,
        "REQUEST_TIMEOUT": 408,
        "INVALID_TRANSITION": 409,
        "DUPLICATE_ENTRY": 409,
        "LEASE_LOST": 409,
        "CONFLICT": 409,
        "DEADLINE_OVER": 409,
        "PRECONDITION_FAILED": 412,
        "PAYLOAD_TOO_LARGE": 413,
        "UNSUPPORTED_MEDIA_TYPE": 415,
        "IDEMPOTENCY_MISMATCH": 422,
        "RATE_LIMITED": 429,
        "HEADERS_TOO_LARGE": 431,
        "OVERLOADED": 503,
        "INTERNAL_ERROR": 500,
        "UPSTREAM_UNAVAILABLE": 502,
        "NLM_UNAVAILABLE": 502,
        "AGENT_TIMEOUT": 504,
    }
)
OTHER_WORDS = MappingProxyType({"cause": "reason"})
"""What the command line and Python call a field of a body, by the name that it has there."""
_CODE_OF_STATUS = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "PAYLOAD_TOO_LARGE"}

_log = log_of("trellis.gateway")


class Problem(Exception):
    """A refusal by the gateway itself; `code` determines the status."""

    def __init__(self, code: str, detail: str, *, headers: Mapping[str, str] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.code, self.detail, self.headers, self.extra = code, detail, dict(headers or {}), extra


def problem_response(request: Request, problem: Problem) -> Response:
    """The problem as a response."""
    status = STATUS_OF_CODE[problem.code]
    headers = {**SECURITY_HEADERS, **problem.headers}  # a crash is answered outside of the middleware that adds them
    if status == HTTPStatus.UNAUTHORIZED:
        headers.setdefault("WWW-Authenticate", 'Bearer realm="trellis"')
    return JSONResponse(problem_document(problem, correlation_of(request)), status, headers, media_type=MEDIA_TYPE)


def problem_document(problem: Problem, correlation_id: str | None) -> dict[str, Any]:
    """The problem as the JSON document that is sent."""
    status = STATUS_OF_CODE[problem.code]
    return {
        "type": f"urn:trellis:problem:{problem.code.lower().replace('_', '-')}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": problem.detail[:DETAIL_CHARS_MAX],
        "code": problem.code,
        "correlation_id": correlation_id,
        **problem.extra,
    }


def correlation_of(request: Request) -> str | None:
    """The correlation id of this request, as used in responses and logs."""
    return request.scope.get("trellis.correlation_id")


def install(app: FastAPI) -> None:
    """Register handlers that turn every exception into a problem."""
    app.add_exception_handler(Problem, _problem)  # type: ignore[arg-type]
    app.add_exception_handler(TrellisError, _trellis)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _crash)
    _complete_description(app)


def problem_of_error(error: TrellisError) -> Problem:
    """The problem that a caller sees for a Trellis error."""
    code = error.code if error.code in STATUS_OF_CODE else "INTERNAL_ERROR"
    status = STATUS_OF_CODE[code]
    headers = {"Retry-After": "1"} if status in {429, 502, 504} else {}
    detail = error.shown if status >= HTTPStatus.INTERNAL_SERVER_ERROR else None
    status_now = error.data.get("source") if isinstance(error, InvalidTransition) else None
    extra = {} if status_now is None else {"status_now": status_now}
    if isinstance(error, IdempotencyMismatch):
        extra = {name: error.data[name] for name in ("key", "job_id") if name in error.data}
    if isinstance(error, MemoryOverLimit):  # an orchestrator that reads through the gateway tells its agent the same
        extra = {name: error.data[name] for name in ("what", "tokens", "limit")}
    return Problem(code, detail or str(error), headers=headers, **extra)


async def _problem(request: Request, problem: Problem) -> Response:
    return problem_response(request, problem)


async def _trellis(request: Request, error: TrellisError) -> Response:
    problem = problem_of_error(error)
    if STATUS_OF_CODE[problem.code] >= HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.warning("request_failed", path=request.url.path, error=str(error), correlation_id=correlation_of(request))
    return problem_response(request, problem)


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    error_list: Sequence[Any] = error.errors()
    body = _body_type(request)
    errors = [{"at": _pointer(one["loc"]), "message": _message(one, body)} for one in error_list[:ERRORS_MAX]]
    detail = "; ".join(f"{one['at'] or 'body'}: {one['message']}" for one in errors[:3])
    return problem_response(request, Problem("VALIDATION_FAILED", detail, errors=errors))


def _body_type(request: Request) -> Any:
    """The type of the body that the route of this request takes; None if it takes none."""
    field = getattr(request.scope.get("route"), "body_field", None)
    return None if field is None else field.field_info.annotation


def _message(error: Mapping[str, Any], body: Any) -> str:
    """What is wrong. For a field that does not exist, the one that may be meant."""
    if error["type"] != "extra_forbidden":
        return error["msg"]
    known = fields_beside(body, error["loc"][1:])
    name = str(error["loc"][-1])
    return no_such("field", OTHER_WORDS[name] if OTHER_WORDS.get(name) in known else name, known)


def _pointer(location: Sequence[str | int]) -> str:
    """The location as a path such as `body/params/topic`."""
    return "/".join(str(part) for part in location)


async def _http(request: Request, error: HTTPException) -> Response:
    code = _CODE_OF_STATUS.get(error.status_code)
    if code is None:
        code = "VALIDATION_FAILED" if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else "INTERNAL_ERROR"
    detail = {
        "NOT_FOUND": f"There is nothing at {request.url.path}; GET /openapi.json lists what there is.",
        "METHOD_NOT_ALLOWED": f"{request.method} is not for {request.url.path}; the Allow header says what is.",
    }.get(code, str(error.detail))
    return problem_response(request, Problem(code, detail, headers=error.headers))


async def _client_gone(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the form of a handler
    """Answer without logging: the client is gone, and nothing failed on the server."""
    return problem_response(
        request, Problem("BAD_REQUEST", "The connection was closed before the whole body had come.")
    )


async def _crash(request: Request, error: Exception) -> Response:
    """Log a crash with the correlation id. Starlette re-raises the error afterwards, so the server logs it too."""
    _log.error("request_crashed", path=request.url.path, correlation_id=correlation_of(request), exc_info=error)
    return problem_response(
        request, Problem("INTERNAL_ERROR", "Something went wrong here; the log has it under correlation_id.")
    )


# How problems look in the OpenAPI description. All other documents are in `trellis.http.shapes`, shared with clients.


class ProblemShape(pydantic.BaseModel):
    """Why not, and what to change (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    correlation_id: str | None


REF_TEMPLATE = "#/components/schemas/{model}"
"""Where the schema of a body that a route describes itself refers to: `model_json_schema(ref_template=…)`."""


def _complete_description(app: FastAPI) -> None:
    """Put the schemas into the description that routes refer to without having them as their models.

    These are problems, and what the schema of a body that a route describes itself defines (`$defs`). A generator of
    clients refuses a description with a reference that leads nowhere.
    """
    described = app.openapi

    def complete() -> dict[str, Any]:
        description = described()
        schemas = description["components"]["schemas"]
        schemas.setdefault(ProblemShape.__name__, ProblemShape.model_json_schema())
        for operation in (one for path in description["paths"].values() for one in path.values()):
            for media in operation.get("requestBody", {}).get("content", {}).values():
                schemas.update(media.get("schema", {}).pop("$defs", {}))
        return description

    app.openapi = complete


def _shapes_problem(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemShape"}}},
    }


PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: _shapes_problem("No token, or one that is refused."),
    403: _shapes_problem("The role may not; `detail` names the rule."),
    404: _shapes_problem("There is no such thing."),
    408: _shapes_problem("The body came too slowly."),
    409: _shapes_problem("Not as things are now."),
    413: _shapes_problem("The body is too large."),
    415: _shapes_problem("The body is not JSON."),
    422: _shapes_problem("The request cannot be taken; `errors` says where."),
    429: _shapes_problem("Too many requests, or too much waits; `Retry-After` says when."),
    500: _shapes_problem("Something went wrong here."),
    502: _shapes_problem("A store or the orchestration layer does not answer."),
    504: _shapes_problem("It took too long."),
}
