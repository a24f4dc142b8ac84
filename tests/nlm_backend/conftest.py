"""NLM backends over one ledger whose time the test moves, with a real way out to a gateway on this machine."""

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import httpx2
import pytest

from tests.nlm_backend.gatewaying import SECRET, FakeGateway, gateway_on_loopback
from trellis.artifacts.payloads import Snapshot
from trellis.auth.tokens import TrustedKey, issue, symmetric_key
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.metrics import NLM_PROVIDER_CALLS
from trellis.engine.records import JobFilter, SweepOptions
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.net.guard import GuardedClient, OutgoingPolicy
from trellis.net.targets import read_target
from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.provider import NlmProvider
from trellis.nlm.scripted import ProviderScript, ScriptedProvider
from trellis.nlm_backend.backend import BackendOptions, BackendProcess
from trellis.nlm_backend.delivery import BackendEnvironment, BackendLinks
from trellis.storage.objects.canonical_json import timestamp
from trellis.testing import FakeClock

KEY = symmetric_key(b"for tests of the NLM backend: 32 bytes or more", issuer="trellis")
PATIENCE_S = 60.0
TLS = ssl.create_default_context()
"""Made once: it reads all certificates of the system."""
AGENT = "archivist-violin"
SOURCES = [
    {
        "ref": "label.md",
        "text": "# The label\n\nThe violin was made by Anna Koval in Lviv in 1887. Its top is of spruce from the Carpathians.\n",
    },
    {
        "ref": "letters.md",
        "text": "# Letters\n\nAnna Koval wrote that the violin was sold to the conservatory in 1902.\n",
    },
]
EXTRACTIVE = {"extractive": True}


class Pauses(logging.Handler):
    """How long each pause before another try was, as the log tells."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", "") == "not_delivered":
            self.seconds.append(record.fields["again_in_s"])  # type: ignore[attr-defined]


async def until(holds: Callable[[], Any]) -> None:
    """Until it holds; what it waits for is done by this very event loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for says nothing by itself
            await asyncio.sleep(0.001)


def provider_calls(backend: BackendProcess) -> int:
    """How often a backend has asked its provider."""
    counted = backend.metrics.counted.samples()
    return int(sum(sample.value for sample in counted if sample.metric is NLM_PROVIDER_CALLS))


@dataclass(kw_only=True)
class Stand:
    """One ledger, one gateway, and as many backends as a test wants."""

    clock: FakeClock
    pauses: list[float]
    ledger: Ledger
    gateway: FakeGateway
    stack: AsyncExitStack
    numbers: Any = field(default_factory=lambda: count(1))
    passed: int = 0
    """How many pauses were gone through."""

    def backend(
        self,
        *steps: dict[str, Any],
        provider: NlmProvider | None = None,
        ledger: Ledger | None = None,
        outgoing: tuple[str, ...] = (),
        **options: Any,
    ) -> "Working":
        """A backend process; its provider plays these steps, or is the extractive one. `outgoing` may be asked beside the gateway."""
        script = ProviderScript.model_validate({"steps": steps or (EXTRACTIVE,)})
        chosen = provider or ScriptedProvider(script, clock=self.clock)
        policy = OutgoingPolicy(origins=(self.gateway.url, *outgoing), answer_bytes_max=8 * 1024 * 1024)
        client = GuardedClient(policy, tls=TLS)
        self.stack.push_async_callback(client.close)
        token = lambda job_id: issue(  # noqa: E731 - short, and used once
            KEY, name="nlm@test", roles=[Role.NLM_BACKEND], ttl_s=600.0, now=self.clock(), job_id=job_id
        )
        trusted = frozenset({read_target(self.gateway.url).origin})
        number = next(self.numbers)
        backend = BackendProcess(
            ledger=ledger or self.ledger,
            provider=chosen,
            links=BackendLinks(client=client, trusted=trusted, token=token, secret=SECRET),
            name=f"nlm-{number}@test",
            options=BackendOptions(**{"concurrency": 4, **options}),
            world=BackendEnvironment(
                clock=self.clock,
                rng=random.Random(7),
                now=self.clock,
                new_id=lambda: f"id-{next(self.numbers)}",
            ),
        )
        return Working(stand=self, backend=backend, provider=chosen)

    def order(self, job_id: str | None = None, *, epoch: int = 1, **changed: Any) -> dict[str, Any]:
        """A good request; its snapshot lies at the gateway, and its epoch is the job's."""
        job_id = job_id or f"job-{next(self.numbers)}"
        self.gateway.epochs[job_id] = max(epoch, self.gateway.epochs.get(job_id, 0))
        snapshot = Snapshot.of(job_id=job_id, epoch=epoch, agent_slug=AGENT, sources=SOURCES)
        self.gateway.snapshots[job_id, epoch] = snapshot.to_bytes()
        base = f"{self.gateway.url}/jobs/{job_id}"
        return {
            "job_id": job_id,
            "job_type": "RESEARCH",
            "agent_slug": AGENT,
            "payload": {"query": "Who made the violin?"},
            "context_snapshot_url": f"{base}/context/{epoch}",
            "callback_url": f"{base}/result",
            "deadline": self.in_s(600.0),
            "epoch": epoch,
        } | changed

    def in_s(self, seconds: float) -> str:
        return timestamp(datetime.fromtimestamp(self.clock(), UTC) + timedelta(seconds=seconds))

    async def states(self, id_: str) -> list[str]:
        """Every state the execution was in, in order."""
        return [event.target for event in await self.ledger.events(id_)]  # type: ignore[arg-type]

    async def executions(self) -> int:
        return len((await self.ledger.jobs(JobFilter(lifecycle="nlm-job"), limit=500)).jobs)

    async def lose_leases(self) -> None:
        """So long that whoever held something has it no longer."""
        for _ in range(11):  # in steps that no sweep takes for an outage
            self.clock.advance(2.0)
            await self.sweep()

    async def sweep(self) -> None:
        await self.ledger.sweep(Actor(role=Role.SWEEPER, name="sweeper@test"), SweepOptions(elect=False))


@dataclass(kw_only=True)
class Working:
    """One backend in a test's hands."""

    stand: Stand
    backend: BackendProcess
    provider: Any
    _client: httpx2.AsyncClient | None = None

    def client(self, *roles: Role, key: TrustedKey = KEY) -> httpx2.AsyncClient:
        """Somebody with these roles, nobody without any."""
        token = None
        if roles:
            token = issue(key, name=roles[0].value, roles=roles, ttl_s=600.0, now=self.stand.clock())
        transport = httpx2.ASGITransport(app=self.backend.app([KEY]), raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        client = httpx2.AsyncClient(transport=transport, base_url="http://nlm", headers=headers)
        self.stand.stack.push_async_callback(client.aclose)
        return client

    async def post(self, order: dict[str, Any], **more: Any) -> httpx2.Response:
        """As the orchestration layer, which has one token for all of it."""
        if self._client is None or self.stand.clock.monotonic() - self._made_at > 500:
            self._client, self._made_at = self.client(Role.ORCHESTRATOR), self.stand.clock.monotonic()
        return await self._client.post("/jobs/process", json=order, **more)

    _made_at: float = 0.0

    @property
    def driving(self) -> list["asyncio.Task[None]"]:
        return [mine.task for mine in self.backend.holder._driving.values()]

    async def begin(self) -> None:
        """Take up what is there."""
        await self.backend.holder.run_once()

    async def work(self) -> None:
        """Take up what is there, and go through every pause, until nothing is under way."""
        await self.begin()
        await self.finish()

    async def finish(self) -> None:
        pauses = self.stand.pauses
        while self.driving:
            await until(lambda: not self.driving or len(pauses) > self.stand.passed)
            for seconds in pauses[self.stand.passed :]:
                self.stand.passed += 1
                await self.pass_time(seconds)

    async def pass_time(self, seconds: float) -> None:
        """Time goes by, with heartbeats."""
        while seconds > 0:
            step = min(5.0, seconds)
            self.stand.clock.advance(step)
            await self.backend.holder.renew()
            seconds -= step

    async def die(self) -> None:
        """As a killed process: nothing more is written."""
        await self.backend.holder.drain()


@asynccontextmanager
async def standing(url: str = ":memory:") -> AsyncGenerator[Stand]:
    clock, pauses = FakeClock(), Pauses()
    logging.getLogger("trellis.nlm_backend").addHandler(pauses)
    ledger = await open_ledger(url, clock=clock)
    async with gateway_on_loopback(FakeGateway(KEY, clock)) as gateway, AsyncExitStack() as stack:
        yield Stand(clock=clock, pauses=pauses.seconds, ledger=ledger, gateway=gateway, stack=stack)
    await ledger.close()
    logging.getLogger("trellis.nlm_backend").removeHandler(pauses)


@pytest.fixture
async def stand() -> AsyncGenerator[Stand]:
    async with standing() as made:
        yield made


__all__ = ["EXTRACTIVE", "ExtractiveProvider", "Stand", "Working", "standing", "until"]
