"""The gateway's HTTP application: routes over one instance. It keeps no state: all data is in the stores."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI

from trellis.app.instance import Instance
from trellis.app.system import SystemClock
from trellis.auth.tokens import TrustedKey
from trellis.engine.clock import Clock
from trellis.engine.errors import NotAllowed
from trellis.engine.extras import program_version
from trellis.engine.jobs import JobId
from trellis.engine.recent_entries import LruCache
from trellis.gateway import console, docs_page, nlm
from trellis.gateway.callers import GatewayState, refusal_answer
from trellis.gateway.event_stream import StreamServices, Tickets
from trellis.gateway.hub import EventHub, StreamOptions
from trellis.gateway.routes import (
    agents,
    artifacts,
    batches,
    dead_letters,
    inbox,
    job_changes,
    jobs,
    mcp,
    memory,
    proposals,
    rules,
    runs,
    safety,
    schedules,
    sign_in,
    stream,
    system,
)
from trellis.gateway.sign_in import SignInCodes
from trellis.gateway.visibility import PublishedVersions
from trellis.http_server import problems
from trellis.http_server.application import HttpApplication
from trellis.http_server.bodies import BodiesUnderWay, BodyLimits
from trellis.http_server.health import ProcessHealth
from trellis.http_server.limits import RateLimits, RefusalBounds
from trellis.http_server.middleware import RequestMiddleware
from trellis.operations.metrics import ledger_gauges

DESCRIPTION = """Run AI agents and background jobs so that nothing is lost, nothing happens twice, and a person stays in control.

Errors are `application/problem+json` with a `code` and the `correlation_id` that logs have. Listings are pages:
`{items, next_cursor}`. A POST that creates takes an `Idempotency-Key`; the same key and body again give the same answer."""

ROUTES = (
    runs,
    job_changes,
    jobs,
    batches,
    agents,
    artifacts,
    nlm,
    dead_letters,
    inbox,
    mcp,
    memory,
    proposals,
    rules,
    safety,
    schedules,
    sign_in,
    stream,
    system,
)
"""The modules whose routers make up the application."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayOptions:
    """Limits and timeouts of the gateway."""

    requests_per_second: float = 200.0
    """Average rate of one principal, per process."""
    burst: int = 400
    entries_per_minute: int = 60
    """Inbox entries of one principal, per process."""
    streams: StreamOptions = field(default_factory=StreamOptions)
    read_s: float = 5.0
    """How long a GET may take until its response starts, in seconds."""


def create_app(
    instance: Instance,
    keys: Sequence[TrustedKey],
    *,
    monotonic: Callable[[], float],
    new_id: Callable[[], str],
    options: GatewayOptions | None = None,
    clock: Clock | None = None,
    now: Callable[[], float] = time.time,
    callback_secrets: Sequence[bytes] = (),
    health: ProcessHealth | None = None,
    sign_in_codes: SignInCodes | None = None,
) -> FastAPI:
    """The application over an open instance.

    Without a callback secret no callback is accepted, and without sign-in codes no sign-in link.
    """
    chosen = options or GatewayOptions()
    app = _routes()
    app.state.sign_in = sign_in_codes
    app.state.gateway = GatewayState(
        instance=instance,
        keys=keys,
        limits=RateLimits(chosen.requests_per_second, chosen.burst, monotonic),
        inbox_limits=RateLimits(chosen.entries_per_minute / 60, chosen.entries_per_minute, monotonic, "inbox"),
        refusals=RefusalBounds(monotonic),
        new_id=new_id,
    )
    used_clock = clock or SystemClock()
    app.state.streams = StreamServices(
        hub=EventHub(
            ledger=instance.ledger,
            published=PublishedVersions(objects=instance.objects, clock=used_clock),
            clock=used_clock,
            rng=random.Random(),  # noqa: S311 - spreads retries, nothing secret
            options=chosen.streams,
        ),
        tickets=Tickets(objects=instance.objects, keys=keys, now=now, new_id=new_id),
        now=now,
    )
    app.state.slugs = LruCache[JobId, str]()
    app.state.published = instance.published
    app.state.callbacks = nlm.CallbackKeys(secrets=callback_secrets, now=now)
    app.state.bodies = BodiesUnderWay()
    settings = instance.settings
    app.state.body_limits = BodyLimits(bytes_max=settings.body_bytes, large_bytes_max=settings.large_body_bytes)
    app.state.instance_name = new_id()
    app.state.health = health or ProcessHealth(instance.probes())
    app.state.health.measures(partial(ledger_gauges, instance.ledger), app.state.streams.hub.gauges)
    app.add_middleware(RequestMiddleware, new_id=new_id, read_s=chosen.read_s)
    return app


def _routes() -> FastAPI:
    """The routes without an instance."""
    app = HttpApplication(title="Trellis", version=program_version(), description=DESCRIPTION)
    problems.install(app)
    app.add_exception_handler(NotAllowed, refusal_answer)  # type: ignore[arg-type]
    for module in ROUTES:  # as they are: an included router matches each path twice, and once more for every route
        app.router.routes.extend(module.router.routes)
    docs_page.install(app)
    console.install(app)
    return app


def openapi_document() -> dict[str, Any]:
    """The OpenAPI description that every gateway serves at `/openapi.json`."""
    return _routes().openapi()
