"""Lets every application of a test process use the routes that the first one has made ready.

The library prepares a route for each application at its first request: it reads the handler's signature and builds a validator for each
parameter. That takes longer than most tests of the gateway, and the outcome is the same whatever the application is made of, because no
test replaces a dependency (`app.dependency_overrides`). A route that is included in any special way is prepared each time.
The OpenAPI description takes longer still (0.6 s), and is that of every gateway: `description()` builds it once.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any

from fastapi import routing

from trellis.gateway.app import openapi_document

Prepare = Callable[..., Any]

PREPARED: Prepare = routing._EffectiveRouteContext.from_api_route  # type: ignore[attr-defined]
"""The library's own way."""

_ready: dict[Hashable, tuple[Any, Any]] = {}
"""The route, so that its identity stays its own, and what was made of it."""


def prepared_once(*, original_route: Any, include_context: Any) -> Any:
    key = _key(original_route, include_context)
    if key is None:
        return PREPARED(original_route=original_route, include_context=include_context)
    if key not in _ready:
        of_nobody = replace(include_context, dependency_overrides_provider=None)
        _ready[key] = original_route, PREPARED(original_route=original_route, include_context=of_nobody)
    return _ready[key][1]


def _key(route: Any, context: Any) -> Hashable | None:
    """What the outcome depends on; None when there is more to it."""
    provider = context.dependency_overrides_provider
    replaced = provider is not None and provider.dependency_overrides
    if replaced or context.dependencies or context.responses or context.callbacks:
        return None
    chosen = (context.default_response_class, context.generate_unique_id_function, context.strict_content_type)
    plain = tuple(getattr(one, "value", one) for one in chosen)
    return id(route), context.prefix, tuple(context.tags), context.deprecated, context.include_in_schema, plain


def share_routes() -> None:
    """From now on, in this process."""
    routing._EffectiveRouteContext.from_api_route = prepared_once  # type: ignore[attr-defined]


@cache
def description() -> dict[str, Any]:
    """The OpenAPI description of every gateway. Its routes are ready for all applications of this process afterwards."""
    share_routes()
    return openapi_document()
