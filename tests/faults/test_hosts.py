"""The roles on hosts of their own: one is cut off for longer than a lease and heals, another one dies for good.

PostgreSQL, S3 and NATS are on one host, every other host has processes of some roles. Whoever runs this must be root.
"""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from tests.faults.platform import (
    BUS_WORKER,
    PATIENCE_S,
    POLL_S,
    SUCCESS,
    WORKER,
    Load,
    Platform,
    loaded,
    until,
    write_files,
)
from tests.servers.hosts import Host, Network, forward, running_network
from tests.servers.nats import running_nats
from tests.servers.postgres import running_postgres
from tests.servers.seaweedfs import ACCESS_KEY, SECRET_KEY, running_seaweedfs
from trellis.cli.up_process import GATEWAY, NLM, ROLES, SAFETY_KERNEL
from trellis.engine.jobs import JobId
from trellis.ledgers.postgres.migrate import migrate

LEASE_S = 30
"""The lease of jobs, runs and queue jobs."""
CUT_S = 1.5 * LEASE_S
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


@dataclass
class HostedPlatform(Platform):
    """The processes of one instance, each on its host."""

    network: Network = field(default_factory=Network)

    def command(self, role: str) -> list[str]:
        return super().command(role.partition("#")[0])

    def spawn(self, role: str, command: list[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        host = self.network.hosts[HOMES[role]]
        own = self.folder / host.name
        own.mkdir(exist_ok=True)
        addresses = {f"TRELLIS_{name}": host.address for name in ("HOST", "NLM_HOST")}
        env = {**self.environment_of(role.partition("#")[0]), **addresses, "PYTHONPATH": str(self.folder)}
        if GATE in host.name:  # each gateway has the NLM backend of its host
            env["TRELLIS_NLM_BACKEND"] = f"http://{host.address}:{NLM_PORT}"
        return host.popen(command, cwd=own, env=env, log=log)

    def kill_host(self, name: str) -> None:
        """Every process of a host dies, and nothing on its disk is left."""
        for role, home in HOMES.items():
            if home == name:
                self.running[role].kill()
                self.running.pop(role).wait()
        for path in sorted((self.folder / name).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


@contextlib.asynccontextmanager
async def running_platform(folder: Path, network: Network) -> AsyncGenerator[HostedPlatform]:
    """The stores, which the caller's thread has on its own host, and the settings of all other processes."""
    data = network.hosts[DATA]
    with contextlib.ExitStack() as servers:
        postgres = servers.enter_context(running_postgres())
        seaweed = servers.enter_context(running_seaweedfs())
        nats = servers.enter_context(running_nats(jetstream=True))
        urls: dict[str, str] = {}
        for name in ("ledger", "nlm_ledger"):
            await migrate(postgres.create_database(name))
            urls[f"TRELLIS_{name.upper()}"] = postgres.url(name).replace("127.0.0.1", data.address)
        forwarders = [await forward(data, port) for port in (postgres.port, seaweed.ports["s3"], nats.port)]
        gate_2 = network.hosts[GATE_2].address
        environment = {
            **write_files(folder),
            **urls,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "TRELLIS_OBJECTS": seaweed.url("hosts", endpoint=f"http://{data.address}:{seaweed.ports['s3']}"),
            "TRELLIS_MEMORY": "objects",
            "TRELLIS_PORT": str(PORT),
            "TRELLIS_NLM_PORT": str(NLM_PORT),
            "TRELLIS_SAFETY_PORT": str(SAFETY_PORT),
            "TRELLIS_GATEWAY": f"http://{gate_2}:{PORT}",
            "TRELLIS_GATEWAY_PLAIN_HTTP": "1",
            "TRELLIS_NLM_BACKEND": f"http://{gate_2}:{NLM_PORT}",
            "TRELLIS_POLICY": str(folder / "policy.toml"),
            "TRELLIS_BUS": nats.url.replace("127.0.0.1", data.address),
        }
        try:
            with HostedPlatform(folder, environment, network=network) as platform:
                yield platform
        finally:
            for one in forwarders:
                one.close()


async def progress(load: Load, kinds: tuple[str, ...], n: int = 3) -> None:
    """Wait until so many more of each kind were acknowledged and have ended."""
    for kind in kinds:
        first = len(load.acknowledged[kind])
        await until(lambda kind=kind, first=first: load.count and len(load.acknowledged[kind]) >= first + n, kind)
        for job_id in load.acknowledged[kind][first : first + n]:
            end = time.monotonic() + 2 * PATIENCE_S
            while (job := await load.ledger.job(JobId(job_id))) is None or job.place != "ended":
                assert time.monotonic() < end, f"{kind} {job_id} does not end: {job}"
                await asyncio.sleep(5 * POLL_S)


async def story(folder: Path, network: Network, figures: Callable[..., None]) -> None:
    async with running_platform(folder, network) as platform, contextlib.AsyncExitStack() as stack:
        platform.start(SAFETY_KERNEL)
        platform.start(GATEWAY)  # it plants the agents
        await platform.ready(GATEWAY)
        for role in [role for role in HOMES if role not in platform.running]:
            platform.start(role)
        for role in HOMES:
            await platform.ready(role)
        load = await stack.enter_async_context(loaded(platform))
        everything = ("plain", "bus", "queue", "run")
        async with load.flowing():
            await until(lambda: load.count and platform.effects(), "work is done")
            for host in ("worker", "orchestrator"):
                network.cut(host)
                await asyncio.sleep(CUT_S)
                network.heal(host)
                await progress(load, everything)
            platform.kill_host(GATE)
            await progress(load, everything)
        ended = await load.all_ended(platform.logs)
        counts = {kind: len(set(ids)) for kind, ids in load.acknowledged.items()}
        assert ended == {(kind, SUCCESS[kind]): n for kind, n in counts.items()}, "each succeeded, and once"
        effects = platform.effects()
        assert set(effects) == {f"{kind}-{n}" for kind in ("plain", "bus") for n in range(counts[kind])}, "none is lost"
        assert await load.finalized_artifacts() == dict.fromkeys(load.acknowledged["queue"], 1)
        repeated = sum(times > 1 for times in effects.values())
        retried = await _retried(load)
        assert repeated <= retried, "a handler ran again only where a lease was lost"
        assert await asyncio.to_thread(platform.run, "verify") == 0, platform.logs()
        history = platform.folder / "memory.log"
        ledger = platform.environment["TRELLIS_LEDGER"]
        shown = await asyncio.to_thread(platform.run, "memory", "history", "archivist-violin", "--ledger", ledger)
        assert shown == 0, history.read_text()
        figures(hosts=len(network.hosts), **counts, repeated=repeated, retried=retried)


async def _retried(load: Load) -> int:
    """How many plain jobs and jobs on the bus had more than one attempt."""
    n = 0
    for kind in ("plain", "bus"):
        for job_id in load.acknowledged[kind]:
            job = await load.ledger.job(JobId(job_id))
            assert job is not None
            n += job.epoch > 1
    return n


@pytest.mark.prove
@pytest.mark.timeout(1_800)
@pytest.mark.requirement("PIPE-12", "D16", "JQ-7")
def test_host_that_is_cut_off_or_dies_for_good_costs_no_accepted_work(tmp_path: Path, figures: Callable[..., None]):
    with running_network() as network:
        for name in dict.fromkeys((DATA, *HOMES.values())):
            network.add(name)
        data: Host = network.hosts[DATA]
        data.do(lambda: asyncio.run(story(tmp_path, network, figures)))
