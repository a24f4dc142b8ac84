"""A real HTTP server that stands in for a model: each request gets the next reply of a list, down to its bytes."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Received:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Endpoint:
    """Where the server is, what it will say, and what it was asked. `open` lets replies that hang come to an end."""

    base_url: str
    replies: list[Reply] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)

    def says(self, answer: str, *citations: tuple[str, str], **fields: Any) -> None:
        """A whole answer."""
        self.content(reply_text(answer, *citations), **fields)

    def content(self, content: str, *, finish: str = "stop", model: str = "test-1", refusal: str | None = None) -> None:
        """A chat completion with this content."""
        message = {"role": "assistant", "content": content, "refusal": refusal}
        usage = {"prompt_tokens": 120, "completion_tokens": 30, "total_tokens": 150}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        body = {"id": "c1", "object": "chat.completion", "model": model, "choices": [choice], "usage": usage}
        self.raw(200, json.dumps(body).encode())

    def calls(self, *made: tuple[str, Any]) -> None:
        """A chat completion that calls these tools."""
        tools = [
            {"id": "call_0", "type": "function", "function": {"name": name, "arguments": json.dumps(args)}}
            for name, args in made
        ]
        message = {"role": "assistant", "content": None, "tool_calls": tools}
        body = {
            "id": "c1",
            "object": "chat.completion",
            "created": 1,
            "model": "test-1",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
        }
        self.raw(200, json.dumps(body).encode(), Content_Type="application/json")

    def raw(self, status: int, body: bytes, **headers: str) -> None:
        """Any response; underscores in header names are dashes."""
        self.replies.append(lambda handler: _send(handler, status, body, headers))

    def breaks_off(self) -> None:
        """Promises more than it sends."""

        def reply(handler: BaseHTTPRequestHandler) -> None:
            _send(handler, 200, b'{"choices": [', {"Content_Length": "5000"})
            handler.close_connection = True

        self.replies.append(reply)

    def hangs(self) -> None:
        """Says nothing until the test is over."""

        def reply(_: BaseHTTPRequestHandler) -> None:
            self.open.wait(30)

        self.replies.append(reply)


def reply_text(answer: str, *citations: tuple[str, str], found: bool = True) -> str:
    cited = [{"ref": ref, "excerpt": excerpt} for ref, excerpt in citations]
    return json.dumps({"found": found, "answer": answer, "citations": cited}, ensure_ascii=False)


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    handler.send_response_only(status)
    for name, value in ({"Content-Length": str(len(body))} | named).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def running_endpoint() -> Iterator[Endpoint]:
    """The server, for the length of a test."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self._answer({})

        def _answer(self, body: dict[str, Any]) -> None:
            endpoint.received.append(Received(self.command, self.path, dict(self.headers.items()), body))
            endpoint.replies.pop(0)(self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            """Tests are quiet."""

    endpoint = Endpoint("")
    with serving(Handler) as base_url:
        endpoint.base_url = base_url
        try:
            yield endpoint
        finally:
            endpoint.open.set()


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server with this handler in a thread of its own; the base URL of its API."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
