"""The OpenAPI description of the gateway, made once for each test process: it takes most of a second."""

from typing import Any

from fastapi import FastAPI

_made: list[dict[str, Any]] = []


def share_description(app: FastAPI) -> FastAPI:
    """The app, which takes over the description of an earlier app: all have the same routes and texts."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if not _made:
            _made.append(make())
        app.openapi_schema = _made[0]
        return _made[0]

    app.openapi = openapi  # type: ignore[method-assign]
    return app
