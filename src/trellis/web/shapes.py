"""How problems look in the OpenAPI description. The documents that are no problem are in `trellis.http.shapes`, for clients too."""

from typing import Any

import pydantic

from trellis.web.problems import MEDIA_TYPE


class ProblemShape(pydantic.BaseModel):
    """Why not, and what to change (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    correlation_id: str | None


def _problem(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemShape"}}},
    }


PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: _problem("No token, or one that is refused."),
    403: _problem("The role may not; `detail` names the rule."),
    404: _problem("There is no such thing."),
    408: _problem("The body came too slowly."),
    409: _problem("Not as things are now."),
    413: _problem("The body is too large."),
    415: _problem("The body is not JSON."),
    422: _problem("The request cannot be taken; `errors` says where."),
    429: _problem("Too many requests, or too much waits; `Retry-After` says when."),
    500: _problem("Something went wrong here."),
    502: _problem("A store or the orchestration layer does not answer."),
    504: _problem("It took too long."),
}
