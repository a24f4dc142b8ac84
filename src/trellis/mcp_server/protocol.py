"""The messages of the protocol: JSON-RPC requests, and their answers.

The server keeps nothing between two messages. A client of the revisions up to 2025-11-25 begins with `initialize`, one of
2026-07-28 names its revision in each request; both get the same answers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import pydantic

from trellis.engine.errors import TrellisError
from trellis.engine.extras import program_version
from trellis.engine.field_names import fields_beside
from trellis.engine.text import no_such, no_such_field
from trellis.http.client import GatewayClient
from trellis.mcp_server.tools import TOOLS, McpTool

INITIALIZED_REVISIONS = ("2025-03-26", "2025-06-18", "2025-11-25")
"""Revisions of the protocol that begin with `initialize`, oldest first."""
STATELESS_REVISIONS = ("2026-07-28",)
"""Revisions of the protocol in which each request names its revision."""
REVISION_KEY = "io.modelcontextprotocol/protocolVersion"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
HEADER_MISMATCH, REVISION_UNSUPPORTED = -32020, -32022
TOOLS_FRESH_MS = 3_600_000
"""How long a client may keep the list of tools, which changes only with the program."""
ERRORS_MAX = 10
STATUS_OF_CODE: Mapping[int, int] = MappingProxyType(
    {
        INVALID_REQUEST: 400,
        INVALID_PARAMS: 400,
        HEADER_MISMATCH: 400,
        REVISION_UNSUPPORTED: 400,
        METHOD_NOT_FOUND: 404,
    }
)
"""The HTTP status of a JSON-RPC error in a revision without sessions. Older clients expect 200 for every answer."""
INSTRUCTIONS = (
    "Trellis runs agents and durable jobs, and a person decides about what agents propose. Ask job_explain why a job waits "
    "or failed. Never approve or reject a proposal unless the person you work for has read it and said so."
)
UNDECIDED = (
    "Deciding about proposals needs a token whose role may decide; this server has none. Set TRELLIS_TOKEN to a token of a person "
    "(`trellis token issue --role owner --sub NAME`), or let the person decide with `trellis proposals`."
)


class McpRefused(Exception):
    """A message that is answered with a JSON-RPC error."""

    def __init__(self, code: int, text: str, data: Any = None) -> None:
        super().__init__(text)
        self.code, self.text, self.data = code, text, data

    def document(self, message_id: Any) -> dict[str, Any]:
        """The answer that is sent."""
        error = {"code": self.code, "message": self.text, **({} if self.data is None else {"data": self.data})}
        return {"jsonrpc": "2.0", "id": message_id, "error": error}


@dataclass(frozen=True, kw_only=True, slots=True)
class McpServer:
    """Answers messages with requests to a gateway, in the name of whoever the client's token names."""

    client: GatewayClient
    decides: bool
    """Whether the tools that decide for a person are offered: only where the caller has shown a token."""
    explain: Callable[[TrellisError], str] = str
    """The text of an error for the caller."""

    async def answer(self, message: Any) -> dict[str, Any] | None:
        """The answer to one message; None for a notification, which has none."""
        message_id: Any = None
        try:
            method, params, message_id, is_request = read_message(message)
            if not is_request:
                return None
            check_revision(params)
            return {"jsonrpc": "2.0", "id": message_id, "result": await self._result(method, params)}
        except McpRefused as refused:
            return refused.document(message_id)

    async def _result(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        match method:
            case "initialize":
                return _initialized(params)
            case "server/discover":
                return _complete(_ABOUT, supportedVersions=[*INITIALIZED_REVISIONS, *STATELESS_REVISIONS], **_FRESH)
            case "ping":
                return {}
            case "tools/list":
                return _complete({"tools": [tool.document for tool in self._offered().values()]}, **_FRESH)
            case "tools/call":
                return _complete(await self._call(params))
            case _:
                raise McpRefused(METHOD_NOT_FOUND, no_such("method", method[:100], METHODS))

    def _offered(self) -> Mapping[str, McpTool]:
        return TOOLS if self.decides else {name: tool for name, tool in TOOLS.items() if not tool.decides}

    async def _call(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a tool. What the gateway refuses is the tool's own error, which a model can read."""
        name, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str) or name not in TOOLS:
            raise McpRefused(INVALID_PARAMS, no_such("tool", str(name)[:100], self._offered()))
        if not isinstance(arguments, dict):
            raise McpRefused(INVALID_PARAMS, "arguments must be an object")
        tool = TOOLS[name]
        if tool.decides and not self.decides:
            return _failed(UNDECIDED)
        try:
            document = await tool.call(self.client, cast("dict[str, Any]", arguments))
        except pydantic.ValidationError as error:
            return _failed(_problems(error, tool))
        except TrellisError as error:
            return _failed(self.explain(error))
        return {"content": [_text(json.dumps(document))], "structuredContent": document, "isError": False}


METHODS = ("initialize", "ping", "server/discover", "tools/call", "tools/list")
_FRESH: Mapping[str, Any] = MappingProxyType({"ttlMs": TOOLS_FRESH_MS, "cacheScope": "private"})
_ABOUT: Mapping[str, Any] = MappingProxyType({"capabilities": {"tools": {}}, "instructions": INSTRUCTIONS})


def read_message(message: Any) -> tuple[str, Mapping[str, Any], Any, bool]:
    """The method, the parameters and the id of a message, and whether it is a request. Raises McpRefused."""
    if not isinstance(message, dict):
        raise McpRefused(INVALID_REQUEST, "send one JSON-RPC message at a time, as an object")
    fields = cast("dict[str, Any]", message)
    method, message_id, params = fields.get("method"), fields.get("id"), fields.get("params", {})
    is_request = "id" in fields
    known_id = isinstance(message_id, str | int) and not isinstance(message_id, bool)
    if fields.get("jsonrpc") != "2.0" or not isinstance(method, str) or (is_request and not known_id):
        raise McpRefused(INVALID_REQUEST, 'a message has "jsonrpc": "2.0", a "method", and as a request an "id"')
    if not isinstance(params, dict):
        raise McpRefused(INVALID_PARAMS, "params must be an object")
    return method, cast("dict[str, Any]", params), message_id, is_request


def revision_of(params: Mapping[str, Any]) -> Any:
    """The revision that a request names for itself; None for a request of a revision with `initialize`."""
    meta = params.get("_meta")
    return cast("dict[str, Any]", meta).get(REVISION_KEY) if isinstance(meta, dict) else None


def check_revision(params: Mapping[str, Any]) -> None:
    """Raise McpRefused for a request of a revision that this server does not know."""
    revision = revision_of(params)
    if revision is not None and revision not in STATELESS_REVISIONS:
        supported = [*STATELESS_REVISIONS]
        data = {"supported": supported, "requested": str(revision)[:100]}
        raise McpRefused(REVISION_UNSUPPORTED, f"this server speaks {', '.join(supported)}", data)


def check_headers(message: Any, headers: Mapping[str, str]) -> None:
    """Raise McpRefused if the headers of an HTTP request contradict its message, which a proxy may have read instead."""
    method, params, _, is_request = read_message(message)
    header, revision = headers.get("mcp-protocol-version"), revision_of(params)
    if revision is None and header not in STATELESS_REVISIONS:
        if header is not None and header not in INITIALIZED_REVISIONS:
            known = [*INITIALIZED_REVISIONS, *STATELESS_REVISIONS]
            data = {"supported": known, "requested": header[:100]}
            raise McpRefused(REVISION_UNSUPPORTED, f"this server speaks {', '.join(known)}", data)
        return
    if not is_request:
        return
    expected = {"mcp-protocol-version": revision, "mcp-method": method}
    if method == "tools/call":
        expected["mcp-name"] = params.get("name")
    for name, value in expected.items():
        if headers.get(name) != value:
            raise McpRefused(HEADER_MISMATCH, f"the header {name} is not what the message says")


def _initialized(params: Mapping[str, Any]) -> dict[str, Any]:
    wanted = params.get("protocolVersion")
    revision = wanted if wanted in INITIALIZED_REVISIONS else INITIALIZED_REVISIONS[-1]
    return {"protocolVersion": revision, "serverInfo": _server(), **_ABOUT}


def _server() -> dict[str, str]:
    return {"name": "trellis", "version": program_version()}


def _complete(result: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A result with the fields that revision 2026-07-28 adds; clients of older ones do not look at them."""
    return {**result, **more, "resultType": "complete", "_meta": {SERVER_KEY: _server()}}


def _failed(text: str) -> dict[str, Any]:
    return {"content": [_text(text)], "isError": True}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _problems(error: pydantic.ValidationError, tool: McpTool) -> str:
    """What is wrong with the arguments of a tool, each in a line."""
    lines: list[str] = []
    for one in error.errors(include_url=False, include_input=False, include_context=False)[:ERRORS_MAX]:
        if one["type"] == "extra_forbidden":
            lines.append(no_such_field(one["loc"], fields_beside(tool.takes, one["loc"])))
        else:
            lines.append(f"{'.'.join(map(str, one['loc']))}: {one['msg']}")
    return f"{tool.name} was not called. " + "; ".join(lines)
