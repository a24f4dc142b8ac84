"""Live events: a resumable stream, and tickets for clients that cannot send headers (RUN-5, RUN-10)."""

from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Depends, Header, Query, Request, Security

from trellis.gateway.callers import Authenticated, Caller, RequiresRule, authenticate, bearer, gateway_of, requires
from trellis.gateway.event_stream import (
    MEDIA_TYPE,
    TICKET_CHARS_MAX,
    TTL_S,
    EventStream,
    ListenPermit,
    StreamPlan,
    StreamServices,
    streams_of,
)
from trellis.gateway.events import StreamFilter, StreamType, view_of
from trellis.http.shapes import EXAMPLE_RUN
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.lifecycles import LIFECYCLES

RULE = "events.read"
FOR_S_MAX = 24 * 3600.0
TYPES_MAX = 10

router = APIRouter(tags=["events"], route_class=StrictRoute)
StreamsOf = Annotated[StreamServices, Depends(streams_of)]


class StreamTicket(pydantic.BaseModel):
    """A ticket for one stream: `GET /events/stream?ticket=…`. It can be used once."""

    model_config = pydantic.ConfigDict(
        json_schema_extra={"examples": [{"ticket": f"1771056030.{'0123456789abcdef' * 4}", "expires_in": TTL_S}]}
    )

    ticket: str
    expires_in: int


class EventData(pydantic.BaseModel):
    """The `data` of one event; which of the ids it has follows from its type."""

    type: StreamType
    runId: str | None = None  # noqa: N815 - as document 002 spells it
    proposalId: str | None = None  # noqa: N815 - as above
    jobId: str | None = None  # noqa: N815 - as above
    lifecycle: str | None = None
    status: str | None = None
    step: int | None = None
    proposals_created: list[str] | None = None  # at the end of a run, named as in its status.json
    event: str | None = None
    agentSlug: str | None = None  # noqa: N815 - as above
    eventId: str  # noqa: N815 - as above
    version: int
    ts: str
    correlationId: str  # noqa: N815 - as above


class RequiresStreamPass(RequiresRule):
    """Yields the caller and its stream permit: from a token in the header, or a ticket in the URL."""

    def __init__(self) -> None:
        super().__init__(RULE)

    async def __call__(  # type: ignore[override] - FastAPI reads the parameters of each
        self,
        request: Request,
        token: Annotated[str | None, Security(bearer)],
        ticket: Annotated[
            str | None, Query(max_length=TICKET_CHARS_MAX, description="Of POST /events/tickets, instead of a token.")
        ] = None,
    ) -> tuple[Caller, ListenPermit]:
        """Raises Problem 401 and 429, TokenRefused, TicketRefused, NotAllowed."""
        keys = gateway_of(request).keys
        if token is not None or ticket is None:
            principal, identity = await authenticate(request, token)
            allowed = ListenPermit(identity=identity, keys=keys, token=token)
        else:
            identity = await (await streams_of(request)).tickets.take(ticket)
            principal, allowed = identity.principal(), ListenPermit(identity=identity, keys=keys)
            request.scope["trellis.principal"] = principal
            gateway_of(request).limits.take(request, principal)
        return await super().__call__(request, (principal, identity)), allowed

    async def admit(self, request: Request) -> None:
        """Raise the error of a token; a ticket works once, so it is not used up for a request that is refused anyway."""
        if "ticket" not in request.query_params:
            await super().__call__(request, await authenticate(request, await bearer(request)))


async def stream_filter(
    run: Annotated[
        str | None, Query(max_length=100, description="Of this run and its proposals.", examples=[EXAMPLE_RUN])
    ] = None,
    agent: Annotated[str | None, Query(max_length=100, description="Of this agent's runs and proposals.")] = None,
    job: Annotated[
        str | None, Query(max_length=200, description="Of this job; runs and proposals are jobs, too.")
    ] = None,
    type_: Annotated[
        list[StreamType], Query(alias="type", max_length=TYPES_MAX, description="Of these types; may be repeated.")
    ] = [],  # noqa: B006 - FastAPI copies it
    lifecycle: Annotated[str | None, Query(max_length=50, description="Of jobs of this lifecycle.")] = None,
) -> StreamFilter:
    """The filter; raises Problem 422."""
    if lifecycle is not None and lifecycle not in LIFECYCLES:
        known = ", ".join(LIFECYCLES)
        raise Problem("VALIDATION_FAILED", f"There is no lifecycle {lifecycle!r}; choose one of {known}.")
    return StreamFilter(run=run, agent=agent, job=job, types=frozenset(type_), lifecycle=lifecycle)


STREAM: dict[int | str, dict[str, Any]] = {
    **PROBLEMS,
    200: {
        "description": "Events as they happen, until the token ends. `id` is where to go on.",
        "content": {
            MEDIA_TYPE: {
                "schema": {"type": "string", "description": "`data` is JSON as `x-event-data` says."},
                "x-event-data": EventData.model_json_schema(),
                "example": (
                    "retry: 1874\nid: 0000000000000041\n\n"
                    "id: 0000000000000042\n"
                    f'data: {{"type":"run.status.changed","runId":"{EXAMPLE_RUN}","status":"completed",'
                    f'"proposals_created":[],'
                    f'"agentSlug":"archivist-violin","eventId":"{EXAMPLE_RUN}-8","version":8,'
                    f'"ts":"2026-02-14T08:00:31.250Z","correlationId":"{EXAMPLE_RUN}"}}\n\n'
                ),
            }
        },
    },
}


@router.get("/events/stream", status_code=200, response_class=EventStream, responses=STREAM)
async def stream(
    streams: StreamsOf,
    follows: Annotated[tuple[Caller, ListenPermit], Depends(RequiresStreamPass())],
    what: Annotated[StreamFilter, Depends(stream_filter)],
    last_event_id: Annotated[str | None, Header(description="The last `id` that was received.")] = None,
    last_event_id_first: Annotated[
        str | None, Query(alias="last_event_id", description="The same, for a first connection by EventSource.")
    ] = None,
    for_s: Annotated[
        float | None, Query(ge=0, le=FOR_S_MAX, description="End after so long; 0 gives what there is and ends.")
    ] = None,
) -> EventStream:
    """Live events, each once and in the order of the ledger: of one job never a later one before an earlier one.

    Send the last `id` as `Last-Event-ID` to go on exactly behind it, at any replica; without it the stream begins now. Events that retention has
    removed meanwhile are left out. What you get is what you may read, and what you can read by then: an event of a run
    comes when its status document shows it. The stream ends with your token, and with a comment that says why; connect again after `retry`.
    """
    caller, allowed = follows
    view = view_of(caller.principal, what)
    begins = await streams.hub.begin(last_event_id or last_event_id_first)
    first = await streams.hub.read(view, begins)
    return EventStream(streams, StreamPlan(view=view, begins=begins, first=first, allowed=allowed, for_s=for_s))


@router.post("/events/tickets", status_code=201, response_model=StreamTicket, responses=PROBLEMS)
async def ticket(streams: StreamsOf, who: Authenticated, _: Annotated[Caller, requires(RULE)]) -> dict[str, Any]:
    """Get a ticket for a stream by EventSource, which cannot send a header.

    It has your rights, works once and is valid for half a minute.
    """
    return {"ticket": await streams.tickets.issue(who[1]), "expires_in": TTL_S}
