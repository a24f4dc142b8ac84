"""An application over a real instance on SQLite, for tests of streams: its time is the test's, and there is no orchestrator."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from tests.gateway.listening import Listening, listening
from tests.gateway.serving import settings_in
from trellis.app.instance import open_instance
from trellis.app.wiring import SystemClock, new_id
from trellis.auth.tokens import TrustedKey, issue, symmetric_key
from trellis.documents.ids import status_key
from trellis.documents.publisher import DocumentPublisher
from trellis.documents.run_documents import Publication, RunFacts, RunRequest, status
from trellis.engine.clock import Clock
from trellis.engine.jobs import Actor, Advance, Claim, Claimed, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.gateway import GatewayOptions, create_app
from trellis.gateway.event_stream import Tickets
from trellis.gateway.hub import EventHub, StreamOptions
from trellis.lifecycles import Role, Trigger
from trellis.lifecycles.run import RUN
from trellis.proposals import proposal
from trellis.runs.orchestrator import TYPE, accept
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock

KEY = symmetric_key(b"for tests of streams: 32 bytes..", issuer="tests")
GATEWAY = Actor(role=Role.GATEWAY, name="gateway@test")
ORCHESTRATOR = Actor(role=Role.ORCHESTRATOR, name="orchestrator@test")
WORKER = Actor(role=Role.WORKER, name="worker@test")
BEGINNING = "0000000000000000"


@dataclass(kw_only=True)
class Stand:
    """What a test works with."""

    app: FastAPI
    ledger: Ledger
    objects: ObjectStore
    keys: list[TrustedKey]
    clock: FakeClock | None
    began: float
    _numbers: count = field(default_factory=lambda: count(1))

    @property
    def hub(self) -> EventHub:
        return self.app.state.streams.hub

    @property
    def tickets(self) -> Tickets:
        return self.app.state.streams.tickets

    def token(
        self, role: Role = Role.OWNER, *, name: str = "iryna", ttl_s: float = 3_600.0, job_id: str | None = None
    ) -> str:
        return issue(KEY, name=name, roles=[role], ttl_s=ttl_s, now=self.began, job_id=job_id)

    def listen(
        self,
        query: str = "",
        *,
        role: Role = Role.OWNER,
        name: str = "iryna",
        job_id: str | None = None,
        **headers: str,
    ) -> AbstractAsyncContextManager[Listening]:
        """Listen in process as somebody."""
        token = self.token(role, name=name, job_id=job_id)
        return listening(self.app, query, Authorization=f"Bearer {token}", **headers)

    async def heard(self, query: str = "", **who: Any) -> Listening:
        """What there is now."""
        async with self.listen(f"for_s=0&{query}", **who) as listener:
            await listener.ended()
        return listener

    def client(self, role: Role | None = Role.OWNER, *, name: str = "iryna") -> httpx2.AsyncClient:
        headers = {} if role is None else {"Authorization": f"Bearer {self.token(role, name=name)}"}
        transport = httpx2.ASGITransport(app=self.app)
        return httpx2.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    # --- things that happen ----------------------------------------------------------------------------------------

    async def run_requested(self, slug: str = "archivist-violin", *, published: bool = True) -> JobId:
        run_id = JobId(f"run_2026-02-14_080000_{next(self._numbers):06}")
        payload = RunRequest(slug, "manual", {}).to_bytes()
        job = NewJob(job_id=run_id, type=TYPE, lifecycle=RUN.name, payload=payload, concurrency_key=f"run:{slug}")
        await self.ledger.submit(GATEWAY, [job])
        if published:
            await self.publish(run_id)
        return run_id

    async def publish(self, run_id: JobId) -> None:
        """Publish the status.json of a run, as a projector does."""
        job = await self.ledger.job(run_id)
        assert job is not None
        facts = RunFacts(run_id, RunRequest.read(job.payload or b""), tuple(await self.ledger.events(run_id)))
        key, version = status_key(facts.request.agent_slug, run_id), facts.events[-1].version
        await DocumentPublisher(self.objects).publish([Publication(key, status(facts), version)])

    async def run_to_its_end(self, slug: str = "archivist-violin", *, published: bool = True) -> JobId:
        """Requested, queued, running, one step, completed: five events; then its status.json."""
        run_id = await self.run_requested(slug, published=published)
        await accept(self.ledger, ORCHESTRATOR, run_id)
        held = await self._claim(ORCHESTRATOR, TYPE, RUN.name)
        counted = {"step": 1, "name": "load-context", "proposals_created": ["prop_1"]}
        for trigger, data in (("step", counted), (Trigger.COMPLETE, {"summary": None})):
            advance = Advance(held.lease, "running", trigger, data=json.dumps(data).encode())
            await self.ledger.turn(Turn(actor=ORCHESTRATOR, advances=(advance,)))
        if published:
            await self.publish(run_id)
        return run_id

    async def proposal_of(self, run_id: str, slug: str = "archivist-violin") -> JobId:
        draft = proposal.ProposalContent(
            action="file-create", target=f"{next(self._numbers)}.md", content={"text": "new"}
        )
        made = proposal.make_proposal(run_id, slug, 1, draft)
        assert await proposal.store_proposals(self.ledger, ORCHESTRATOR, [made]) == [made.id]
        return made.id

    async def jobs(self, number: int, *, by: str = "submitter@test", type_: str = "index") -> list[JobId]:
        """Submitted and no more: one event each."""
        ids = [JobId(f"job-{next(self._numbers)}") for _ in range(number)]
        submitter = Actor(role=Role.SUBMITTER, name=by)
        await self.ledger.submit(submitter, [NewJob(job_id=job_id, type=type_) for job_id in ids])
        return ids

    async def claim_job(self, type_: str = "index") -> Claimed:
        """Claimed and started: two events."""
        return await self._claim(WORKER, type_, "leased-job")

    async def _claim(self, actor: Actor, type_: str, lifecycle: str) -> Claimed:
        claim = Claim(
            claim_id=ClaimId(f"claim-{next(self._numbers)}"), types=(TypeClaim(type=type_),), lifecycle=lifecycle
        )
        (held,) = (await self.ledger.turn(Turn(actor=actor, claim=claim))).claimed
        return held


@asynccontextmanager
async def standing(
    folder: Path, streams: StreamOptions | None = None, *, clock: FakeClock | None = None
) -> AsyncIterator[Stand]:
    """Open everything. With a clock, the hub looks and tokens end when the test moves it."""
    began = time.time()
    used: Clock = clock or SystemClock()
    async with open_instance(settings_in(folder), f"sqlite:///{folder / 'ledger.db'}") as instance:
        keys = [KEY]
        app = create_app(
            instance,
            keys,
            monotonic=time.monotonic,
            new_id=new_id,
            options=replace(GatewayOptions(), **({} if streams is None else {"streams": streams})),
            clock=used,
            now=time.time if clock is None else lambda: began + clock.monotonic() - start,
        )
        start = used.monotonic()
        stand = Stand(app=app, ledger=instance.ledger, objects=instance.objects, keys=keys, clock=clock, began=began)
        try:
            yield stand
        finally:
            async with asyncio.timeout(60):
                await stand.hub.close()
