"""A gateway and the orchestration layer of the job queue in one process, on a clock that only a test moves.

Everything is real but the NLM backend, which answers as the test says: it stages its artifacts and sends its callbacks through the
gateway, signed and with a credential of its own, as the real one does. `tests/research/test_chain.py` has the real one.
"""

import asyncio
import json
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from tests.gateway.conftest import FREE, KEY, VIOLIN, opened
from trellis.app.instance import Instance
from trellis.app.wiring import new_id
from trellis.artifacts.content import ARTIFACT_TYPE_OF_JOB_TYPE
from trellis.auth.tokens import issue
from trellis.engine.jobs import Actor, JobId
from trellis.engine.records import Event, SweepOptions
from trellis.engine.verify import verify
from trellis.gateway import create_app
from trellis.lifecycles import Role
from trellis.net.signatures import job_key, signed_headers
from trellis.research.backend_client import ExecutionRequest, ExecutionUnderWay, JobFailedAnswer, JobFinished
from trellis.research.orchestrator import QueueOrchestrator
from trellis.testing import FakeClock

SECRET = b"s" * 32
PATIENCE_S = 60.0
OVER = frozenset({"COMPLETE", "FAILED", "DEAD"})
"""States that no pass of an orchestrator leaves while time stands still."""
OTHER = "architect-guardian"
QUESTION = {"query": "Who made the violin?"}
Answers = Callable[["Nlm", ExecutionRequest], Awaitable[ExecutionUnderWay | JobFinished]]
Looks = Callable[["Nlm", ExecutionRequest], Awaitable[ExecutionUnderWay | JobFinished | JobFailedAnswer]]


@dataclass
class Nlm:
    """A backend that does what it is told; by default it makes a brief, stages it and calls back before it answers."""

    rig: "Rig"
    answer: Answers | None = None
    stands: Looks | None = None
    """How an execution stands, to whoever looks; by default it is under way."""
    asked: list[ExecutionRequest] = field(default_factory=list)
    looked: list[ExecutionRequest] = field(default_factory=list)
    stopped: list[ExecutionRequest] = field(default_factory=list)
    stops: Callable[[ExecutionRequest], Awaitable[None]] | None = None
    """What happens when it is told to stop an execution; by default nothing goes wrong."""

    async def process(self, execution: ExecutionRequest, /) -> ExecutionUnderWay | JobFinished:
        self.asked.append(execution)
        return await (self.answer or finish)(self, execution)

    async def look(self, execution: ExecutionRequest, /) -> ExecutionUnderWay | JobFinished | JobFailedAnswer:
        self.looked.append(execution)
        return under_way(execution) if self.stands is None else await self.stands(self, execution)

    async def stop(self, execution: ExecutionRequest, /) -> None:
        self.stopped.append(execution)
        if self.stops is not None:
            await self.stops(execution)

    async def close(self) -> None:
        pass

    async def stage(self, execution: ExecutionRequest, **changed: Any) -> httpx2.Response:
        """POST /artifacts, as the backend does."""
        body = {"job_id": execution.job_id, "epoch": execution.epoch, **draft(execution)} | changed
        return await self.rig.client(Role.NLM_BACKEND, job_id=execution.job_id).post("/artifacts", json=body)

    async def call_back(
        self,
        execution: ExecutionRequest,
        *,
        id_: str | None = None,
        secret: bytes = SECRET,
        at: float | None = None,
        **body: Any,
    ) -> httpx2.Response:
        """POST /jobs/…/result, signed."""
        told = json.dumps({"job_id": execution.job_id, "epoch": execution.epoch} | body).encode()
        key = job_key(secret, "nlm-backend", execution.job_id)
        id_ = id_ or f"{execution.epoch}-{body['status']}"
        stamp = int(self.rig.clock() if at is None else at)
        headers = signed_headers(key, id_=id_, timestamp=stamp, body=told)
        return await self.rig.anonymous.post(
            f"/jobs/{execution.job_id}/result", content=told, headers={**headers, "content-type": "application/json"}
        )

    async def complete(self, execution: ExecutionRequest, staged: httpx2.Response, **changed: Any) -> httpx2.Response:
        """The callback of a staged artifact."""
        told = staged.json()
        body = {"artifact_id": told["artifact_id"], "sha256": told["sha256"], "size": told["size"]} | changed
        return await self.call_back(execution, status="COMPLETE", **body)


def draft(execution: ExecutionRequest) -> dict[str, Any]:
    """An artifact of the right type."""
    type_ = ARTIFACT_TYPE_OF_JOB_TYPE[execution.request.job_type].value
    contents: dict[str, dict[str, Any]] = {
        "RESEARCH_BRIEF": {
            "title": "Research Brief: the violin",
            "summary": f"Attempt of epoch {execution.epoch}.",
            "sections": [{"heading": "Maker", "body": "Somebody made it.", "sources": ["sources/a.md"]}],
            "conclusions": ["It was made."],
            "open_questions": [],
        },
        "BRIEF": {"title": "Brief", "body": "two words", "entity_map": {}, "word_count": 2},
        "PREPROCESSED_PROPOSAL": {"original": {"a": 1}, "enriched": {"a": 1}, "issues": [], "entity_matches": []},
    }
    sources = [{"ref": "sources/a.md", "excerpt": "Somebody made it."}] if type_ == "RESEARCH_BRIEF" else []
    return {"type": type_, "content": contents[type_], "sources": sources}


def under_way(execution: ExecutionRequest) -> ExecutionUnderWay:
    return ExecutionUnderWay(accepted=True, job_id=execution.job_id, estimated_seconds=1)


async def finish(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
    """Stage, call back, and only then answer."""
    staged = await nlm.stage(execution)
    assert staged.status_code == 201, staged.text
    called = await nlm.complete(execution, staged)
    assert called.status_code == 202, called.text
    return under_way(execution)


async def accept_only(_: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
    """Take it and say no more."""
    return under_way(execution)


def failing(error: Exception) -> Answers:
    async def answer(_: Nlm, __: ExecutionRequest) -> ExecutionUnderWay:
        raise error

    return answer


def saying(code: str, message: str = "no") -> Answers:
    """Take it, and call back that it failed."""

    async def answer(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
        called = await nlm.call_back(execution, status="FAILED", error={"code": code, "message": message})
        assert called.status_code == 202, called.text
        return under_way(execution)

    return answer


@dataclass
class Rig:
    """What a test works with."""

    instance: Instance
    app: FastAPI
    clock: FakeClock
    orchestrator: QueueOrchestrator
    nlm: Nlm = field(init=False)
    draw: float = 0.0
    _clients: list[httpx2.AsyncClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nlm = Nlm(self)
        self.orchestrator.clock = self.orchestrator.driver.clock = self.clock
        self.orchestrator.driver.backend = self.nlm
        self.orchestrator.driver.gateway = "http://gateway"
        self.orchestrator.driver.draw = lambda: self.draw
        self.owner = self.client(Role.OWNER, name="iryna")
        self.admin = self.client(Role.CONTROL_PLANE, name="operator")
        self.anonymous = self._client({})

    # --- who asks --------------------------------------------------------------------------------------------------

    def client(self, *roles: Role, name: str | None = None, job_id: str | None = None) -> httpx2.AsyncClient:
        token = issue(KEY, name=name or roles[0].value, roles=list(roles), ttl_s=3600.0, now=time.time(), job_id=job_id)
        return self._client({"Authorization": f"Bearer {token}"})

    def _client(self, headers: dict[str, str]) -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(app=self.app)
        made = httpx2.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)
        self._clients.append(made)
        return made

    # --- what is asked ---------------------------------------------------------------------------------------------

    async def submit(self, **changed: Any) -> str:
        """A job by its owner, which is PENDING then."""
        body = {"job_type": "RESEARCH", "agent_slug": VIOLIN, "payload": QUESTION} | changed
        answer = await self.owner.post("/jobs", json=body)
        assert answer.status_code == 202, answer.text
        assert answer.json()["status"] == "PENDING"
        return answer.json()["job_id"]

    async def job(self, job_id: str) -> dict[str, Any]:
        answer = await self.owner.get(f"/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def status(self, job_id: str) -> str:
        return (await self.job(job_id))["status"]

    async def events(self, job_id: str) -> list[dict[str, Any]]:
        return (await self.owner.get(f"/jobs/{job_id}/events?limit=200")).json()["items"]

    async def path(self, job_id: str) -> list[str]:
        """The states it went through."""
        return [event["payload"]["to"] for event in await self.events(job_id)]

    async def recorded(self, job_id: str) -> list[Event]:
        return await self.instance.ledger.events(JobId(job_id))

    async def cancel(self, job_id: str, **body: Any) -> httpx2.Response:
        return await self.admin.post(f"/jobs/{job_id}/cancel", json={"mode": "hard"} | body)

    async def requeue(self, job_id: str) -> httpx2.Response:
        return await self.admin.post(f"/jobs/{job_id}/requeue", json={"reason": "again"})

    # --- what happens ----------------------------------------------------------------------------------------------

    async def work(self, job_id: str, *states: str) -> dict[str, Any]:
        """Passes of the orchestrator until the job is in one of these states; time stands still."""
        async with asyncio.timeout(PATIENCE_S):
            while (job := await self.job(job_id))["status"] not in states:
                assert job["status"] not in OVER or "DEAD" in states, f"it is {job['status']} for good: {job['error']}"
                await self.orchestrator.run_once()
        return job

    async def live(self, job_id: str, *states: str) -> dict[str, Any]:
        """The same while time passes: whoever waits for something looks again and again."""
        async with asyncio.timeout(PATIENCE_S):
            while (job := await self.job(job_id))["status"] not in states:
                await self.orchestrator.run_once()
                await self.pass_time(1.0)
        return job

    @asynccontextmanager
    async def ending_nothing(self) -> AsyncGenerator[None]:
        """The orchestrator drives, and does not look for what another one left behind."""
        ending = self.orchestrator._end_failed

        async def nothing() -> None:
            pass

        self.orchestrator._end_failed = nothing  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.orchestrator._end_failed = ending  # type: ignore[method-assign]

    async def until(self, reached: Callable[[], bool]) -> None:
        """Let others work until it is so; time stands still."""
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                await self.instance.ledger.queues()

    async def pass_time(self, seconds: float) -> None:
        """Move the clock in small steps: holders renew, drives wake, and the sweep ends what is over."""
        left = seconds
        while left > 0:
            step = min(left, 5.0)
            self.clock.advance(step)
            left -= step
            await self.orchestrator.renew()
            await self.sweep()

    async def pass_until(self, reached: Callable[[], bool]) -> None:
        """Let time pass until it is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                await self.pass_time(1.0)

    async def lose_leases(self) -> None:
        """Let every holder fall silent until its lease is over; the sweep looks often, so that there is no amnesty."""
        await self.sweep()
        for _ in range(11):
            self.clock.advance(2.0)
            await self.sweep(passes=1)
        await self.sweep()

    async def leap(self, seconds: float) -> None:
        """Move the clock at once."""
        self.clock.advance(seconds)
        await self.sweep()

    async def sweep(self, passes: int = 3) -> None:
        sweeper = Actor(role=Role.SWEEPER, name="sweeper@test")
        for _ in range(passes):
            await self.instance.ledger.sweep(sweeper, SweepOptions(elect=False))

    async def close(self) -> None:
        await self.orchestrator.drain()
        for client in self._clients:
            await client.aclose()


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def seconds_to_due(job: dict[str, Any]) -> float:
    return (moment(job["due_at"]) - moment(job["updated_at"])).total_seconds()


@asynccontextmanager
async def rigged(planted: Path, folder: Path) -> AsyncGenerator[Rig]:
    """A rig over a copy of the garden; when it ends, the ledger must verify."""
    shutil.copytree(planted, folder)
    clock = FakeClock()
    async with opened(folder, clock) as found:
        instance = replace(found, settings=found.settings.model_copy(update={"gateway": "http://gateway"}))
        app = create_app(
            instance,
            [KEY],
            monotonic=clock.monotonic,
            new_id=new_id,
            options=FREE,
            now=clock,
            callback_secrets=(SECRET,),
        )
        rig = Rig(instance=instance, app=app, clock=clock, orchestrator=instance.queue_orchestrator())
        try:
            yield rig
        finally:
            await rig.close()
        report = await verify(instance.ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))
