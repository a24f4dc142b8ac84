"""A gateway in this process, over an instance of its own: SQLite, a folder of objects, git, and the two agents of the garden.

The ledger's time, and the time of rate limits, moves only when a test moves it. Tokens have the time of this machine.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from trellis.app.instance import Instance, storage_locations
from trellis.app.settings import Settings
from trellis.app.wiring import SystemClock, new_id
from trellis.auth.tokens import TrustedKey, issue, symmetric_key
from trellis.engine.jobs import Actor
from trellis.engine.records import SweepOptions
from trellis.engine.verify import verify
from trellis.gateway import GatewayOptions, create_app
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.nlm.open import open_provider
from trellis.storage.memory.repository import open_memory
from trellis.storage.objects.open import open_objects
from trellis.testing import FakeClock

VIOLIN = "archivist-violin"
KEY = symmetric_key(b"for the tests of the gateway, and for nothing else", issuer="trellis")
TOKEN_S = 3600.0
FREE = GatewayOptions(requests_per_second=1e6, burst=1_000_000, entries_per_minute=1_000_000, read_s=60.0)
"""No limit that a test meets without meaning to: on a machine that stands still, a large read takes more than 5 s."""

Client = httpx2.AsyncClient


@dataclass(kw_only=True)
class Gateway:
    """An application over an instance. Clients are closed with it."""

    instance: Instance
    app: FastAPI
    clock: FakeClock
    key: TrustedKey
    _clients: AsyncExitStack = field(default_factory=AsyncExitStack)

    def client(
        self,
        *roles: Role | str,
        name: str | None = None,
        job_id: str | None = None,
        token: str | None = None,
        tenant: str | None = None,
        agent: str | None = None,
    ) -> Client:
        """A client with these roles, by default named after the first of them; with `token` none of our making."""
        made = self.token(*roles, name=name, job_id=job_id, tenant=tenant, agent=agent) if token is None else token
        return self.anonymous(headers={"Authorization": f"Bearer {made}"} if made else {})

    def token(
        self,
        *roles: Role | str,
        name: str | None = None,
        job_id: str | None = None,
        tenant: str | None = None,
        agent: str | None = None,
    ) -> str:
        """A token that is good for an hour. One of an agent's runtime is for an agent, as those of `trellis token issue` are."""
        chosen = [Role(role) for role in roles]
        if chosen == [Role.AGENT_RUNTIME] and agent is None:
            agent = VIOLIN
        return issue(
            self.key,
            name=name or chosen[0].value,
            roles=chosen,
            ttl_s=TOKEN_S,
            now=time.time(),
            job_id=job_id,
            tenant=tenant,
            agent=agent,
        )

    def anonymous(self, **options: Any) -> Client:
        """A client without a token."""
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=False)
        client = httpx2.AsyncClient(transport=transport, base_url="http://gateway", **options)
        self._clients.push_async_callback(client.aclose)
        return client

    async def sweep(self, passes: int = 1) -> None:
        """End what time has ended."""
        for _ in range(passes):
            sweeper = Actor(role=Role.SWEEPER, name="sweeper@test")
            await self.instance.ledger.sweep(sweeper, SweepOptions(elect=False))

    async def close(self) -> None:
        """Close the clients."""
        await self._clients.aclose()


@asynccontextmanager
async def opened(folder: Path, clock: FakeClock) -> AsyncGenerator[Instance]:
    """The instance in a folder, on this clock."""
    settings = Settings.model_validate({})
    found = storage_locations(settings, f"sqlite:///{folder / 'ledger.db'}")
    ledger = await open_ledger(found.ledger, clock=clock)
    objects = await open_objects(found.objects)
    provider = open_provider(settings.nlm, clock=SystemClock())
    try:
        yield Instance(
            places=found,
            ledger=ledger,
            objects=objects,
            repository=open_memory(found.memory_folder or folder),
            provider=provider,
            settings=settings,
            name="gateway@test",
        )
    finally:
        await provider.close()
        await objects.close()
        await ledger.close()


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the garden in it, made once and copied."""
    folder = tmp_path_factory.mktemp("planted")

    async def plant() -> None:
        async with opened(folder, FakeClock()) as instance:
            await instance.plant()

    asyncio.run(plant())
    return folder


@pytest.fixture
async def make_gateway(planted: Path, tmp_path: Path) -> AsyncGenerator[Callable[..., Gateway]]:
    """Gateways over one instance: `make_gateway(options)`."""
    folder = tmp_path / "instance"
    shutil.copytree(planted, folder)
    clock, made = FakeClock(), list[Gateway]()
    async with opened(folder, clock) as instance:

        def make(options: GatewayOptions = FREE) -> Gateway:
            app = create_app(instance, [KEY], monotonic=clock.monotonic, new_id=new_id, options=options)
            made.append(Gateway(instance=instance, app=app, clock=clock, key=KEY))
            return made[-1]

        yield make
        for gateway in made:
            await gateway.close()
        report = await verify(instance.ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))


@pytest.fixture
def gateway(make_gateway: Callable[..., Gateway]) -> Gateway:
    """A gateway without limits that a test meets by chance."""
    return make_gateway()
