"""A client of a gateway in the process of that gateway: its requests pass no network, and every rule of the routes."""

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx2
from fastapi import FastAPI

from trellis.app.system import SystemClock, new_id
from trellis.http.calls import CallOptions
from trellis.http.client import GatewayClient, open_client
from trellis.http_server.middleware import HEADER as CORRELATION

ADDRESS = "http://127.0.0.1"
TIMEOUT_S = 20.0
"""For one call with all its attempts, in seconds."""


def open_in_process(
    app: FastAPI,
    token: Callable[[], str | None],
    *,
    sender: tuple[str, int] = ("127.0.0.1", 0),
    correlation_id: str | None = None,
) -> AbstractAsyncContextManager[GatewayClient]:
    """A client that shows this token. `sender` is the address that the routes see, `correlation_id` that of its requests."""
    return open_client(
        ADDRESS,
        token=token,
        clock=SystemClock(),
        rng=random.Random(),  # noqa: S311 - spreads retries, nothing secret
        new_id=new_id,
        options=CallOptions(timeout_s=TIMEOUT_S),
        transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False, client=sender),
        headers=None if correlation_id is None else {CORRELATION: correlation_id},
    )
