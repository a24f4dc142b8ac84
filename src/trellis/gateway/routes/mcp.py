"""The Model Context Protocol over HTTP: the tools of `trellis mcp`, in the name of each request's token.

A request carries one message and is answered with one; there are no sessions, and the server sends nothing unasked. A tool
is a request to this gateway with the same token, so that the rule of its route decides, and a refusal is recorded there.
"""

from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import JSONResponse, Response

from trellis.app.instance import Instance
from trellis.gateway.callers import Caller, gateway_of, requires
from trellis.gateway.in_process import open_in_process
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.http_server.tokens import bearer
from trellis.mcp_server.protocol import (
    STATELESS_REVISIONS,
    STATUS_OF_CODE,
    McpRefused,
    McpServer,
    check_headers,
)

router = APIRouter(tags=["mcp"], route_class=StrictRoute)

EXAMPLE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "jobs_list", "arguments": {"status": "failed"}},
}


class OriginCheck:
    """Refuses a request of a web page from elsewhere, before its body is read."""

    async def __call__(self, request: Request) -> None:
        """Raise Problem 403 for such a page: a browser could let it reach a gateway that only this machine reaches."""
        origin = request.headers.get("origin")
        if origin is not None and not _is_own(origin, gateway_of(request).instance):
            detail = f"A web page of {origin[:200]} may not use the tools; open them from the gateway's own address."
            raise Problem("FORBIDDEN", detail)

    async def admit(self, request: Request) -> None:
        """Raise the error that calling the dependency would raise."""
        await self(request)


def _is_own(origin: str, instance: Instance) -> bool:
    """Whether the page comes from this machine or from the gateway itself."""
    try:
        page, own = urlsplit(origin), urlsplit(instance.gateway_url)
        if (page.scheme, page.hostname, page.port) == (own.scheme, own.hostname, own.port):
            return True
        return page.hostname == "localhost" or ip_address(page.hostname or "").is_loopback
    except ValueError:
        return False


@router.post(
    "/mcp",
    responses={
        **PROBLEMS,
        202: {"description": "A notification, which has no answer."},
        400: {"description": "No message of the protocol, or not the one that the headers name: a JSON-RPC error."},
    },
    dependencies=[Depends(OriginCheck())],
)
async def message(
    body: Annotated[dict[str, Any], Body(examples=[EXAMPLE])],
    request: Request,
    caller: Annotated[Caller, requires("rules.read")],
) -> Response:
    """Answer one message of the Model Context Protocol, with the authority of the token.

    The tools are those of `trellis mcp`; `tools/list` describes them. What the token may not do is the error of the tool.
    """
    is_stateless = request.headers.get("mcp-protocol-version") in STATELESS_REVISIONS
    try:
        check_headers(body, request.headers)
    except McpRefused as refused:
        return _response(refused.document(body.get("id")), is_stateless=True)
    token = await bearer(request)
    sender = ("unknown", 0) if request.client is None else (request.client.host, request.client.port)
    async with open_in_process(
        request.app, lambda: token, sender=sender, correlation_id=caller.correlation_id
    ) as client:
        answer = await McpServer(client=client, decides=True).answer(body)
    return Response(status_code=202) if answer is None else _response(answer, is_stateless=is_stateless)


def _response(answer: dict[str, Any], *, is_stateless: bool) -> Response:
    code = answer["error"]["code"] if "error" in answer else None
    return JSONResponse(answer, STATUS_OF_CODE.get(code, 200) if is_stateless and code is not None else 200)
