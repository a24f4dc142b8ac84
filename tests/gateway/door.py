"""The gateway in this process, over a real instance on SQLite, with keys of the test's choice."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from fastapi import FastAPI

from trellis.app.instance import Instance, open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import new_id
from trellis.auth.tokens import TrustedKey, issue, symmetric_key
from trellis.gateway import GatewayOptions, create_app
from trellis.lifecycles import Role

KEY = symmetric_key(b"for tests of the door: 32 bytes.", issuer="tests")
QUICK = GatewayOptions(requests_per_second=1e6, burst=1_000_000, read_s=60.0)


@dataclass(frozen=True, kw_only=True)
class Door:
    """What a test works with."""

    app: FastAPI
    client: httpx2.AsyncClient
    instance: Instance

    async def __call__(
        self,
        method: str,
        path: str,
        token: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> httpx2.Response:
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await self.client.request(method, path, headers={**shown, **(headers or {})}, content=content)


@asynccontextmanager
async def opened(
    folder: Path,
    *,
    keys: Sequence[TrustedKey] = (KEY,),
    now: Callable[[], float] = time.time,
    secrets: Sequence[bytes] = (),
) -> AsyncIterator[Door]:
    """Open everything in a folder, and a client that goes straight to the application."""
    async with open_instance(Settings.model_validate({}), f"sqlite:///{folder}/door.db") as instance:
        app = create_app(
            instance,
            keys,
            monotonic=time.monotonic,
            new_id=new_id,
            options=QUICK,
            now=now,
            callback_secrets=secrets,
        )
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Door(app=app, client=client, instance=instance)


def token(*roles: Role, key: TrustedKey = KEY, name: str = "iryna", ttl_s: float = 600) -> str:
    """A good token."""
    return issue(key, name=name, roles=roles or [Role.OWNER], ttl_s=ttl_s, now=time.time())
