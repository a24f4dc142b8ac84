"""The platform on hosts of its own: the stores on one, and processes of some roles on every other one.

Each store has an address of its own, so that it can be unreachable alone. Whoever runs this must be root.
"""

import asyncio
import contextlib
import itertools
import os
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.faults.platform import (
    BUS_WORKER,
    PATIENCE_S,
    SUCCESS,
    WORKER,
    Load,
    Platform,
    loaded,
    until,
    write_files,
)
from tests.servers.hosts import Network, forward, running_network
from tests.servers.nats import running_nats
from tests.servers.postgres import PostgresServer, running_postgres
from tests.servers.seaweedfs import ACCESS_KEY, SECRET_KEY, running_seaweedfs
from trellis.cli.up_process import GATEWAY, NLM, ROLES, SAFETY_KERNEL
from trellis.engine.jobs import JobId
from trellis.ledgers.postgres.migrate import migrate

LEASE_S = 30
"""The lease of jobs, runs and queue jobs."""
SUBMIT_S = 20.0
"""How long a submitter waits for its answer before it sends the request again: less than stores are away."""
STILL_AFTER_S = 20.0
"""How long after a store became unreachable what depends on it may still happen."""
EVERYTHING = tuple(SUCCESS)
"""The kinds of work that flow."""
PORT, NLM_PORT, SAFETY_PORT = 8420, 8421, 8422
DATA, GATE, GATE_2, CONTROL = "data", "gate", "gate-2", "control"
HOMES = {
    GATEWAY: GATE,
    NLM: GATE,
    "apply-engine": GATE,
    "gateway#2": GATE_2,
    "nlm#2": GATE_2,
    "apply-engine#2": GATE_2,
    "orchestrator": "orchestrator",
    "orchestrator#2": "orchestrator-2",
    WORKER: "worker",
    f"{WORKER}#2": "worker-2",
    BUS_WORKER: "bus-worker",
} | dict.fromkeys((role for role in ROLES if role not in {GATEWAY, NLM, "apply-engine", "orchestrator"}), CONTROL)
"""Each process, and the host that it runs on."""
POSTGRES, OBJECTS, NATS = "postgres", "objects", "nats"


@dataclass
class HostedPlatform(Platform):
    """The processes of one instance, each on its host, and the stores on theirs."""

    network: Network = field(default_factory=Network)
    postgres: PostgresServer = field(kw_only=True)

    def command(self, role: str) -> list[str]:
        return super().command(role.partition("#")[0])

    def spawn(self, role: str, command: list[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        host = self.network.hosts[HOMES[role]]
        own = self.folder / host.name
        own.mkdir(exist_ok=True)
        addresses = {f"TRELLIS_{name}": host.address for name in ("HOST", "NLM_HOST")}
        env = self.environment_of(role.partition("#")[0]) | addresses
        env["PYTHONPATH"] = os.pathsep.join([str(self.folder), *filter(None, [env.get("PYTHONPATH")])])
        if GATE in host.name:  # each gateway has the NLM backend of its host
            env["TRELLIS_NLM_BACKEND"] = f"http://{host.address}:{NLM_PORT}"
        return host.popen(command, cwd=own, env=env, log=log)

    async def start_all(self) -> None:
        self.start(SAFETY_KERNEL)
        self.start(GATEWAY)  # it plants the agents
        await self.ready(GATEWAY)
        for role in [role for role in HOMES if role not in self.running]:
            self.start(role)
        for role in HOMES:
            await self.ready(role)

    def kill_host(self, name: str) -> None:
        """Every process of a host dies, and nothing on its disk is left."""
        for role, home in HOMES.items():
            if home == name:
                self.running[role].kill()
                self.running.pop(role).wait()
        for path in sorted((self.folder / name).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    async def without(self, store: str, seconds: float) -> None:
        """A store is unreachable for so long: packets to its address are lost, and connections stay half open.

        Jobs on the bus need each of them, so that none is done meanwhile.
        """
        data, address = self.network.hosts[DATA], _address(self.network, store)
        data.hide(address)
        await asyncio.sleep(STILL_AFTER_S)
        done = self._done_on_bus()
        await asyncio.sleep(seconds - STILL_AFTER_S)
        assert self._done_on_bus() == done, f"{store} could be reached"
        data.show(address)

    def _done_on_bus(self) -> int:
        return sum(word.startswith("bus-") for word in self.effects())

    def ended_by_themselves(self) -> list[str]:
        return [role for role, process in self.running.items() if process.poll() is not None]


def _address(network: Network, store: str) -> str:
    return network.address_for((POSTGRES, OBJECTS, NATS).index(store))


@contextlib.asynccontextmanager
async def running_platform(folder: Path, network: Network) -> AsyncGenerator[tuple[HostedPlatform, Load]]:
    """All processes, with load that can flow. The caller's thread is on the host of the stores."""
    data = network.hosts[DATA]
    with contextlib.ExitStack() as servers:
        postgres = servers.enter_context(running_postgres())
        seaweed = servers.enter_context(running_seaweedfs())
        nats = servers.enter_context(running_nats(jetstream=True))
        addresses: dict[str, str] = {}
        forwarders: list[asyncio.Server] = []
        for store, port in {POSTGRES: postgres.port, OBJECTS: seaweed.ports["s3"], NATS: nats.port}.items():
            address = addresses[store] = _address(network, store)
            data.show(address)
            forwarders.append(await forward(address, port))
        urls: dict[str, str] = {}
        for name in ("ledger", "nlm_ledger"):
            await migrate(postgres.create_database(name))
            urls[f"TRELLIS_{name.upper()}"] = postgres.url(name).replace("127.0.0.1", addresses[POSTGRES])
        gate_2 = network.hosts[GATE_2].address
        environment = {
            **write_files(folder),
            **urls,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "TRELLIS_OBJECTS": seaweed.url("hosts", endpoint=f"http://{addresses[OBJECTS]}:{seaweed.ports['s3']}"),
            "TRELLIS_MEMORY": "objects",
            "TRELLIS_PORT": str(PORT),
            "TRELLIS_NLM_PORT": str(NLM_PORT),
            "TRELLIS_SAFETY_PORT": str(SAFETY_PORT),
            "TRELLIS_GATEWAY": f"http://{gate_2}:{PORT}",
            "TRELLIS_GATEWAY_PLAIN_HTTP": "1",
            "TRELLIS_NLM_BACKEND": f"http://{gate_2}:{NLM_PORT}",
            "TRELLIS_POLICY": str(folder / "policy.toml"),
            "TRELLIS_BUS": nats.url.replace("127.0.0.1", addresses[NATS]),
        }
        try:
            with HostedPlatform(folder, environment, network=network, postgres=postgres) as platform:
                await platform.start_all()
                async with loaded(platform, postgres.url("ledger"), timeout_s=SUBMIT_S) as load:
                    yield platform, load
        finally:
            for one in forwarders:
                one.close()


Story = Callable[[HostedPlatform, Load], Awaitable[None]]


def tell(folder: Path, story: Story) -> None:
    """Run a story on a network of its own."""

    async def told(network: Network) -> None:
        async with running_platform(folder, network) as (platform, load):
            await story(platform, load)

    with running_network() as network:
        for name in dict.fromkeys((DATA, *HOMES.values())):
            network.add(name)
        network.hosts[DATA].do(lambda: asyncio.run(told(network)))


async def progress(load: Load, n: int = 3) -> None:
    """Wait until so many more of each kind were acknowledged and have ended."""
    for kind in EVERYTHING:
        first = len(load.acknowledged[kind])
        await until(lambda kind=kind, first=first: load.count and len(load.acknowledged[kind]) >= first + n, kind)
        for job_id in load.acknowledged[kind][first : first + n]:
            await load.ended(job_id, patience_s=2 * PATIENCE_S)


@dataclass(frozen=True)
class Outcome:
    """What a story came to."""

    counts: dict[str, int]
    """By kind: how much was acknowledged."""
    effects: Counter[str]
    lost_leases: Counter[str]
    """Events of plain jobs and jobs on the bus that ended an attempt otherwise than by its result."""
    repeated: dict[str, list[str]]
    """By word of each handler that ran more than once: those events of its job."""


async def check_nothing_lost(platform: HostedPlatform, load: Load) -> Outcome:
    """Whatever was acknowledged has ended well, once; the ledger verifies, and so does the memory of an agent."""
    ended = await load.all_ended(platform.logs)
    counts = {kind: len(set(ids)) for kind, ids in load.acknowledged.items()}
    assert ended == {(kind, SUCCESS[kind]): n for kind, n in counts.items()}, f"each succeeded, and once: {ended}"
    effects = platform.effects()
    expected = {f"{kind}-{n}" for kind in ("plain", "bus") for n in range(counts[kind])}
    assert {word for word in effects if not word.startswith("held")} == expected, "none is lost"
    assert await load.finalized_artifacts() == dict.fromkeys(load.acknowledged["queue"], 1)
    lost = {word: await _lost_leases(load, word) for word in expected}
    repeated = {word: lost[word] for word in expected if effects[word] > 1}
    assert all(repeated.values()), f"a handler ran again only where a lease was lost: {repeated}"
    assert await asyncio.to_thread(platform.run, "verify") == 0, platform.logs()
    ledger = platform.environment["TRELLIS_LEDGER"]
    shown = await asyncio.to_thread(platform.run, "memory", "history", "archivist-violin", "--ledger", ledger)
    assert shown == 0, (platform.folder / "memory.log").read_text()
    return Outcome(counts, effects, Counter(itertools.chain(*lost.values())), repeated)


async def _lost_leases(load: Load, word: str) -> list[str]:
    """The events that ended attempts of the job with this word, other than its success, and the states that they ended."""
    kind, _, number = word.partition("-")
    job_id = load.acknowledged[kind][int(number)]
    types = {"job_lease_expired", "job_timed_out", "job_retry_scheduled"}
    events = await load.ledger.events(JobId(job_id))
    return [f"{event.type} in {event.source}" for event in events if event.type in types]
