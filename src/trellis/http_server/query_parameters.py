"""Refuses query parameters that a route does not declare: a misspelt filter would return everything."""

from collections.abc import Iterable, Iterator, Mapping

from fastapi import Request
from fastapi.dependencies.models import Dependant

from trellis.engine.text import NAME_CHARS_COMPARED, no_such
from trellis.http_server.problems import ERRORS_MAX, Problem


def declared_names(dependant: Dependant) -> Iterator[str]:
    """The query parameters of a route, those of its dependencies included, as a URL spells them."""
    yield from (one.alias for one in dependant.query_params)
    for inner in dependant.dependencies:
        yield from declared_names(inner)


def unknown_parameters(request: Request, declared: Iterable[str]) -> Problem | None:
    """The problem with the query of this request; None if it has declared parameters only."""
    if not request.scope["query_string"]:
        return None
    known = sorted(set(declared))
    unknown = [name for name in request.query_params if name not in known][:ERRORS_MAX]
    if not unknown:
        return None
    errors = [_error(name, known) for name in unknown]
    detail = "; ".join(f"{one['at']}: {one['message']}" for one in errors[:3])
    there_are = f"its query parameters are {', '.join(known)}" if known else "it takes no query parameters"
    path = request.url.path[:NAME_CHARS_COMPARED]
    return Problem("VALIDATION_FAILED", f"{detail}. {request.method} {path}: {there_are}.", errors=errors)


def _error(name: str, known: Iterable[str]) -> Mapping[str, str]:
    return {"at": f"query/{name[:NAME_CHARS_COMPARED]}", "message": no_such("parameter", name, known)}
