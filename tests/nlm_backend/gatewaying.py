"""A gateway for tests of the NLM backend: the three addresses a backend uses, on a real socket of this machine.

It checks what the real one checks (tokens, signatures, epochs), keeps what it was given, and can be told to fail or to hold on.
"""

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response

from tests.stopped_tasks import stopped
from trellis.auth.tokens import TrustedKey, verify
from trellis.http_server.server import ServerOptions, listen, serve_gateway
from trellis.lifecycles import Role
from trellis.net.signatures import ID_HEADER, SignatureRefused, check_signature, job_key

LOOPBACK = ServerOptions(host="127.0.0.1", port=0, drain_s=1)
SECRET = b"signs callbacks in the tests of the NLM backend"


@dataclass
class Hold:
    """Requests of one kind wait here: before they have an effect, or after it and before they are answered."""

    after: bool = False
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FakeGateway:
    """What came in, and how it is answered. `epochs` is the present epoch of each job."""

    key: TrustedKey
    now: Any
    url: str = ""
    snapshots: dict[tuple[str, int], bytes] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    failing: dict[str, deque[int | tuple[int, dict[str, str]]]] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    staged: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By webhook-id: one effect each."""
    refused: list[tuple[str, int]] = field(default_factory=list)
    discarding: bool = False
    """Answers staging as one does whose artifact is gone."""

    def fail(self, kind: str, *statuses: int | tuple[int, dict[str, str]]) -> None:
        """Answer the next requests of this kind so."""
        self.failing.setdefault(kind, deque()).extend(statuses)

    def hold(self, kind: str, *, after: bool = False) -> Hold:
        """Let the next request of this kind wait."""
        self.holds[kind] = Hold(after=after)
        return self.holds[kind]

    def tokens(self, kind: str) -> list[str | None]:
        return [headers.get("authorization") for seen, headers in self.requests if seen == kind]

    def count(self, kind: str) -> int:
        return sum(seen == kind for seen, _ in self.requests)

    def of(self, job_id: str) -> list[dict[str, Any]]:
        """The callbacks that had an effect."""
        return [one for one in self.callbacks.values() if one["job_id"] == job_id]

    # --- the addresses -------------------------------------------------------------------------------------------

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/jobs/{job_id}/context/{epoch}")
        async def context(job_id: str, epoch: int, request: Request) -> Response:
            return await self._around("snapshot", request, lambda _: self._context(job_id, epoch, request))

        @app.post("/artifacts")
        async def artifacts(request: Request) -> Response:
            return await self._around("artifact", request, lambda body: self._stage(body, request))

        @app.post("/jobs/{job_id}/result")
        async def result(job_id: str, request: Request) -> Response:
            return await self._around("callback", request, lambda body: self._take(job_id, body, request))

        return app

    async def _around(self, kind: str, request: Request, effect: Any) -> Response:
        body = await request.body()
        self.requests.append((kind, dict(request.headers)))
        hold = self.holds.pop(kind, None)
        if hold is not None and not hold.after:
            hold.arrived.set()
            await hold.go.wait()
        script = self.failing.get(kind)
        if script:
            step = script.popleft()
            status, headers = step if isinstance(step, tuple) else (step, {})
            return Response(b"<html>no</html>", status, headers)
        answer = effect(body)
        if hold is not None and hold.after:
            hold.arrived.set()
            await hold.go.wait()
        return answer

    def _allowed(self, request: Request, job_id: str) -> bool:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        identity = verify(token, [self.key], now=self.now()) if token else None
        return identity is not None and Role.NLM_BACKEND in identity.roles and identity.job_id == job_id

    def _context(self, job_id: str, epoch: int, request: Request) -> Response:
        if not self._allowed(request, job_id):
            return _problem(403, "FORBIDDEN")
        found = self.snapshots.get((job_id, epoch))
        return _problem(404, "NOT_FOUND") if found is None else Response(found, media_type="application/json")

    def _stage(self, body: bytes, request: Request) -> Response:
        asked = json.loads(body)
        job_id, epoch = asked["job_id"], asked["epoch"]
        if not self._allowed(request, job_id):
            return _problem(403, "FORBIDDEN")
        if epoch != self.epochs.get(job_id, epoch):
            self.refused.append(("artifact", epoch))
            return _problem(409, "LEASE_LOST")
        if self.discarding:
            return _problem(409, "CONFLICT")
        content = json.dumps(asked, sort_keys=True).encode()
        known = self.staged.get((job_id, epoch))
        made = known or {
            "artifact_id": f"art-{hashlib.sha256(content).hexdigest()[:32]}",
            "job_id": job_id,
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "finalized": False,
            "url": None,
            "asked": asked,
        }
        self.staged[job_id, epoch] = made
        told = {name: value for name, value in made.items() if name != "asked"}
        return Response(json.dumps(told), 201 if known is None else 200, media_type="application/json")

    def _take(self, job_id: str, body: bytes, request: Request) -> Response:
        key = job_key(SECRET, Role.NLM_BACKEND.value, job_id)
        try:
            check_signature(request.headers, body, [key], now=self.now())
        except SignatureRefused:
            return _problem(401, "AUTH_REQUIRED")
        said = json.loads(body)
        if said["epoch"] != self.epochs.get(job_id, said["epoch"]):
            self.refused.append(("callback", said["epoch"]))
            return _problem(409, "LEASE_LOST")
        id_ = request.headers[ID_HEADER]
        if self.callbacks.setdefault(id_, said) != said:
            return _problem(409, "DUPLICATE_ENTRY")
        return Response(b"{}", 202)


@asynccontextmanager
async def gateway_on_loopback(gateway: FakeGateway) -> AsyncGenerator[FakeGateway]:
    """Serve it until the block ends."""
    place, ready = listen(LOOPBACK, key_configured=True), asyncio.Event()
    gateway.url = place.url
    serving = asyncio.ensure_future(serve_gateway(gateway.app(), place, LOOPBACK, asyncio.Event(), ready=ready.set))
    await ready.wait()
    try:
        yield gateway
    finally:
        for hold in gateway.holds.values():
            hold.go.set()
        serving.cancel()  # nobody is there to be drained
        await stopped(serving)


def _problem(status: int, code: str) -> Response:
    body = {"status": status, "code": code, "detail": f"refused with {code}"}
    return Response(json.dumps(body), status, media_type="application/problem+json")
