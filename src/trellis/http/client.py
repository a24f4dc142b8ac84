"""The gateway as a typed Python API, with the same resources and verbs as its paths.

async with connect(gateway="http://127.0.0.1:8420") as client:
    run = await client.runs.start("archivist-violin", {"topic": "bows"})
    done = await client.runs.wait(run.run_id, timeout_s=120)
"""

import random
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import httpx2

from trellis.engine.clock import Clock
from trellis.engine.errors import OptionInvalid
from trellis.http.address import PLAIN, checked_url
from trellis.http.calls import CallOptions, GatewayCalls, GatewayRequest
from trellis.http.jobs import Jobs
from trellis.http.operation_shapes import Health
from trellis.http.resources import (
    Agents,
    Artifacts,
    DeadLetters,
    Feed,
    Inbox,
    Logic,
    Memory,
    Proposals,
    Runs,
    Safety,
    Schedules,
    System,
)
from trellis.http.shapes import LiveEvent
from trellis.http.streams import follow, position

CONNECTIONS_MAX = 100
DEGRADED = 503


class GatewayClient:
    """One gateway, as seen by the holder of one token. Made by `connect(gateway=…)`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls
        self.agents = Agents(calls)
        self.runs = Runs(calls)
        self.proposals = Proposals(calls)
        self.artifacts = Artifacts(calls)
        self.jobs = Jobs(calls)
        self.dead_letters = DeadLetters(calls)
        self.memory = Memory(calls)
        self.logic = Logic(calls)
        self.inbox = Inbox(calls)
        self.safety = Safety(calls)
        self.schedules = Schedules(calls)
        self.system = System(calls)
        self.feed = Feed(calls)

    @property
    def responded_at(self) -> datetime | None:
        """When the gateway sent its last response, by its clock and to the second; None before that."""
        return self._calls.responded_at

    def events(
        self,
        *,
        run: str | None = None,
        agent: str | None = None,
        job: str | None = None,
        types: Sequence[str] = (),
        lifecycle: str | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[LiveEvent]:
        """Events as they happen, each once and in order, over any number of broken connections.

        `after` is the `id` of the last event that was taken care of; without it the events from now on. It has no end: leave
        the loop, under `contextlib.aclosing` to close the connection at once.
        """
        params = {"run": run, "agent": agent, "job": job, "type": list(types) or None, "lifecycle": lifecycle}
        return follow(self._calls, params, after)

    async def position(self) -> str:
        """Where the events end now: take it before you look at something, and follow what happens to it after that."""
        return await position(self._calls)

    async def health(self) -> Health:
        """Whether everything behind the gateway answers; needs no token."""
        ask = GatewayRequest(method="GET", path="/system/health", takes=frozenset({DEGRADED}))
        return await self._calls.asked(Health, ask)


@asynccontextmanager
async def open_client(
    url: str,
    *,
    token: Callable[[], str | None],
    clock: Clock,
    rng: random.Random,
    new_id: Callable[[], str],
    ca_file: Path | None = None,
    options: CallOptions | None = None,
    transport: httpx2.AsyncBaseTransport | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncGenerator[GatewayClient]:
    """A client of the gateway at `url`. Calls `token` before every request, and verifies certificates.

    `headers` go with every request.
    """
    chosen = options or CallOptions()
    async with httpx2.AsyncClient(
        base_url=checked_url(url),
        verify=_trust(url, ca_file),
        transport=transport,
        headers=headers,
        limits=httpx2.Limits(max_connections=CONNECTIONS_MAX),
        follow_redirects=False,
        trust_env=False,
    ) as http:
        yield GatewayClient(GatewayCalls(http, token=token, clock=clock, rng=rng, new_id=new_id, options=chosen))


def _trust(url: str, ca_file: Path | None) -> ssl.SSLContext | bool:
    if url.lower().startswith(PLAIN):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts no certificate, and avoids loading every authority
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise OptionInvalid(option="ca_file", value=str(ca_file), expected=f"it cannot be read ({error})") from error
