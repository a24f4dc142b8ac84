"""A bare server that answers what the gateway answers: Starlette on uvicorn, from memory, with nothing durable.

It checks a token by its signature once and then knows it. Who asks is the same as for the gateway.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from bench.subjects.gateway import (
    JOB_PREFIX,
    KEY,
    Place,
    hear,
    not_modified,
    post_job,
    request_again,
    status,
    submits,
)
from bench.task import Task
from trellis.app.wiring import new_id
from trellis.auth.tokens import verify

__all__ = ["fan_out", "not_modified", "status", "submits", "worker"]
DOCUMENT = json.dumps(
    {"run_id": "run", "agent": "archivist-violin", "status": "queued", "version": 2, "steps": [], "padding": "x" * 400}
).encode()
TAG = '"2"'


class _Server(uvicorn.Server):
    """Says where it is when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


class _Answers:
    """The routes, with the tokens that were checked and the listeners that are connected."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._listeners: set[asyncio.Queue[bytes]] = set()
        self.app = Starlette(
            routes=[
                Route("/runs/{run_id}/status", self.status),
                Route("/jobs", self.submit, methods=["POST"]),
                Route("/events/stream", self.stream),
            ]
        )

    def _check(self, request: Request) -> None:
        token = request.headers["authorization"].removeprefix("Bearer ")
        if token not in self._known:
            self._known[token] = verify(token, [KEY], now=time.time()).name

    async def status(self, request: Request) -> Response:
        self._check(request)
        if TAG in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers={"ETag": TAG})
        return Response(DOCUMENT, media_type="application/json", headers={"ETag": TAG})

    async def submit(self, request: Request) -> Response:
        self._check(request)
        job_id = (await request.json()).get("jobId") or new_id()
        event = f'data: {{"jobId":"{job_id}"}}\n\n'.encode()
        for listener in self._listeners:
            listener.put_nowait(event)
        return Response(json.dumps({"jobId": job_id}), status_code=202, media_type="application/json")

    async def stream(self, request: Request) -> Response:
        self._check(request)
        if request.query_params.get("for_s") == "0":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncGenerator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield b": connected\n\n"
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)


async def worker(task: Task) -> None:
    """Serve until ended."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2_048)
    config = uvicorn.Config(
        _Answers().app,
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )
    port = listener.getsockname()[1]
    await _Server(config, lambda: task.write_place(port=port, run_id="run")).serve(sockets=[listener])


async def fan_out(task: Task) -> dict[str, float]:
    """As from the gateway; a job is announced by the request that submits it."""

    async def submit(number: int) -> None:
        await request_again(Place.read(task).port, post_job(jobId=f"{JOB_PREFIX}{number}"), b"202")

    return await hear(task, submit)
