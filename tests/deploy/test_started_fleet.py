"""The processes of the compose file and of the units, started for real on PostgreSQL, SeaweedFS and NATS."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.running import RunningFleet, free_ports
from tests.deploy.shipped import (
    COMPOSE,
    CREDENTIALS,
    ShippedProcess,
    compose_processes,
    environment_file,
    systemd_processes,
)
from tests.faults.platform import POLICY, QUESTION, STOP_S
from tests.servers.nats import NatsServer, running_nats
from tests.servers.pgbouncer import running_pgbouncer
from tests.servers.postgres import PostgresServer, running_postgres
from tests.servers.seaweedfs import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedServer, running_seaweedfs
from trellis import connect
from trellis.app.settings import Settings
from trellis.app.wiring import trusted_keys
from trellis.auth.tokens import issue
from trellis.http.calls import CallOptions
from trellis.lifecycles import Role

APPLICATION = """
from trellis import App, Context

app = App()


@app.job("job.double")
async def double(ctx: Context, number: int) -> int:
    return 2 * number
"""
AGENT = "luthier"
PATIENCE_S = 120.0


@dataclass
class Servers:
    """What a fleet stands on, with the databases and logins that the compose file's script makes."""

    postgres: PostgresServer
    s3: SeaweedServer
    nats: NatsServer
    variables: dict[str, str]


@pytest.fixture(scope="module")
def servers(compose_folder: Path) -> Iterator[Servers]:
    variables = environment_file(compose_folder / ".env")
    users = f"authorization {{ user: trellis, password: {variables['NATS_PASSWORD']} }}"
    with ExitStack() as stack:
        postgres = stack.enter_context(running_postgres(max_connections=200))
        s3 = stack.enter_context(running_seaweedfs())
        nats = stack.enter_context(running_nats(jetstream=True, settings=users))
        environment = {
            "PATH": f"{postgres.binaries.bin_dir}:{os.environ['PATH']}",
            "PGHOST": "127.0.0.1",
            "PGPORT": str(postgres.port),
            "TRELLIS_DB_PASSWORD": variables["TRELLIS_DB_PASSWORD"],
        }
        subprocess.run([COMPOSE / "postgres-init.sh"], env=environment, check=True, capture_output=True, timeout=60)
        yield Servers(postgres, s3, nats, variables)


def fleet_of(servers: Servers, folder: Path, secrets: Path, database: str) -> RunningFleet:
    """A fleet with nothing started yet. `database` is `host:port` of PostgreSQL, or of a pooler before it."""
    gateway, nlm, kernel = free_ports(3)
    state = folder / "state"
    state.mkdir()
    (folder / "policy.toml").write_text(POLICY)
    (folder / "topics.py").write_text(APPLICATION)
    password = servers.variables["NATS_PASSWORD"]
    direct = f"127.0.0.1:{servers.postgres.port}"
    places = {
        "@postgres:5432/trellis": f"@{database}/trellis",
        f"postgres:{servers.variables['POSTGRES_PASSWORD']}@{database}": f"postgres@{direct}",
        "trellis:password@db.example:5432": f"trellis:{servers.variables['TRELLIS_DB_PASSWORD']}@{database}",
        "s3://trellis/fleet": f"s3://{BUCKET}/{folder.name}",
        "http://seaweedfs:8333": servers.s3.endpoint,
        "https://s3.example": servers.s3.endpoint,
        "@nats:4222": f"@127.0.0.1:{servers.nats.port}",
        "nats://nats.example:4222": f"nats://trellis:{password}@127.0.0.1:{servers.nats.port}",
        "http://gateway:8420": f"http://127.0.0.1:{gateway}",
        "http://127.0.0.1:8420": f"http://127.0.0.1:{gateway}",
        "http://nlm:8421": f"http://127.0.0.1:{nlm}",
        "http://127.0.0.1:8421": f"http://127.0.0.1:{nlm}",
        "safety-kernel:8422": f"localhost:{kernel}",
        "grpc://127.0.0.1:8422": f"grpc://127.0.0.1:{kernel}",
        "0.0.0.0": "127.0.0.1",
        "/run/secrets": str(secrets),
        CREDENTIALS: str(secrets),
        "/var/lib/trellis/memory/": f"{state}/",
        "/var/lib/trellis/": f"{state}/",
        "/etc/trellis/policy.toml": str(folder / "policy.toml"),
    }
    ports = {"TRELLIS_PORT": gateway, "TRELLIS_NLM_PORT": nlm, "TRELLIS_SAFETY_PORT": kernel}
    return RunningFleet(folder, places, ports)


async def works(fleet: RunningFleet, environment: dict[str, str]) -> None:
    """Give the fleet a job of a topic and a job of the job queue, and wait until both are done."""
    settings = Settings.model_validate({"token_key_file": environment["TRELLIS_TOKEN_KEY_FILE"]})
    key = next(iter(trusted_keys(environment["TRELLIS_LEDGER"], settings)))
    token = issue(key, name="tests", roles=[Role.OWNER], ttl_s=600, now=time.time())
    address = f"http://127.0.0.1:{fleet.ports['TRELLIS_PORT']}"
    async with connect(gateway=address, token=token, options=CallOptions(timeout_s=PATIENCE_S)) as client:
        on_topic = await client.jobs.submit_topic("job.double", 21)
        queued = await client.jobs.submit_for(AGENT, "RESEARCH", QUESTION)
        wanted = {on_topic.job_id: "SUCCEEDED", queued.job_id: "COMPLETE"}
        async with asyncio.timeout(PATIENCE_S):
            for job_id, state in wanted.items():
                while (job := await client.jobs.get(job_id)).status != state:
                    assert job.status not in {"DEAD", "DENIED", "FAILED"}, job
                    await asyncio.sleep(0.2)


def started(way: str, variables: dict[str, str]) -> list[ShippedProcess]:
    return compose_processes(variables) if way == "compose" else systemd_processes()


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way, pooled", [("compose", False), ("systemd", False), ("compose", True)])
async def test_every_process_becomes_ready_works_and_stops_in_time(
    way: str, pooled: bool, servers: Servers, compose_folder: Path, tmp_path: Path
):
    with ExitStack() as stack:
        database = f"127.0.0.1:{servers.postgres.port}"
        if pooled:
            database = stack.enter_context(running_pgbouncer(servers.postgres.url(), ["trellis"], sessions=8))
        secrets = shutil.copytree(compose_folder / "secrets", tmp_path / "secrets")  # of the user of this test
        fleet = stack.enter_context(fleet_of(servers, tmp_path, secrets, database))
        shipped = started(way, servers.variables)
        for process in compose_processes(servers.variables):
            if process.arguments[0] == "migrate":
                fleet.run(process)
        s3 = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        roles = [ShippedProcess(p.name, p.arguments, {**p.environment, **s3}) for p in shipped if p.roles]
        bus = fleet.environment(roles[0])["TRELLIS_BUS"]
        fleet.start([*roles, ShippedProcess("worker", ("worker", "topics:app", "--bus", bus), roles[0].environment)])
        fleet.wait_until_ready()
        (tmp_path / "violin.txt").write_text("The violin was made in Cremona by Antonio Stradivari.")
        agent = ("agents", "create", AGENT, "--purpose", "Knows the violin.", "--source", "violin.txt")
        fleet.run(ShippedProcess("agent", agent, roles[0].environment))
        await works(fleet, fleet.environment(roles[0]))
        stopped = fleet.stop()
    late = {name: (code, round(took_s, 1)) for name, (code, took_s) in stopped.items() if code or took_s > STOP_S}
    assert late == {}
    print(way, "through pgbouncer:" if pooled else "directly:", {name: round(s, 1) for name, (_, s) in stopped.items()})  # noqa: T201 - figures of the proof
    noticed = "pooler_noticed" in "".join(fleet.log(process.name).read_text() for process in roles)
    assert noticed == pooled
