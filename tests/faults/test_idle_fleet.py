"""What processes cost that have nothing to do, after a million events and many places of the feed without any."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from bench.preload import preload
from bench.stores import APPLICATION as BENCH_LOGIN
from bench.stores import Database
from tests.servers.postgres import PostgresServer
from trellis.documents.audit_chain import NO_BLOCK
from trellis.engine.jobs import Actor
from trellis.engine.records import AuditHead
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

JOBS = 250_000
"""Each left four events."""
EMPTY_PLACES = 20_000
"""Older versions opened one with every sweep."""
WARM_S = 12.0
"""A session that has become idle reports what it did up to 10 s later. What a process asks at its start is not meant."""
MEASURED_S = 10.0
STATEMENTS_PER_S_MAX = 5.0
CORE_SHARE_MAX = 0.01
APPLICATION = """
from trellis import App, Context

app = App()

@app.job("double")
async def double(ctx: Context, number: int) -> int:
    return 2 * number
"""
ROLES = ("projector", "orchestrator", "reconciler", "scheduler", "sweeper")


@contextmanager
def process(cwd: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the program that has been up for a while."""
    (cwd / "idle_shop.py").write_text(APPLICATION)
    with (cwd / "output").open("wb") as output:
        made = subprocess.Popen(
            [sys.executable, "-m", "trellis", *arguments],
            cwd=cwd,
            env={**os.environ, "TRELLIS_NLM_PORT": "0", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while b"Ctrl-C" not in (cwd / "output").read_bytes():
            assert made.poll() is None, (cwd / "output").read_text()
            stand_by(0.1)
        stand_by(WARM_S)
        yield made
    finally:
        made.send_signal(signal.SIGTERM)
        made.wait(30)


def stand_by(seconds: float) -> None:
    """What is measured here is what a process does in this time."""
    threading.Event().wait(seconds)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share_of_a_core(pid: int) -> float:
    before, began = cpu_s(pid), time.monotonic()
    stand_by(MEASURED_S)
    return (cpu_s(pid) - before) / (time.monotonic() - began)


def statements(server: PostgresServer, database: str) -> int:
    """Transactions that ended there: every statement of a role is one. What this question costs is asked elsewhere."""
    asked = f"select xact_commit + xact_rollback from pg_stat_database where datname = '{database}'"
    return int(server.sql(asked))


async def all_was_read(url: str) -> None:
    """Somebody has published and sealed everything; then the database idled for hours with an older version."""
    ledger = await open_ledger(url)
    before, end = Actor(role=Role.PROJECTOR, name="before"), await ledger.feed_end()
    following = await ledger.subscribe(before, "projector", lease_s=60.0)
    assert following is not None
    await ledger.ack(following, end, lease_s=60.0)
    await ledger.unsubscribe(following)
    assert await ledger.extend_audit_chain(before, AuditHead(number=1, sha256=NO_BLOCK, position=end), after=None)
    await ledger.close()
    connection = await asyncpg.connect(url, server_settings={"search_path": "trellis"})
    await connection.execute(
        f"insert into feed select f.pos + n, -n, now() from feed_end f, generate_series(1, {EMPTY_PLACES}) n;"
        f"update feed_end set pos = pos + {EMPTY_PLACES}"
    )
    await connection.close()


@pytest.mark.prove
@pytest.mark.quiet
@pytest.mark.timeout(1_200)
def test_no_role_of_an_idle_fleet_asks_more_than_five_times_a_second(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
):
    name = postgres_url.rpartition("/")[2].partition("?")[0]
    postgres_server.sql(f"create role {BENCH_LOGIN} login in role trellis_app")
    preload(Database(server=postgres_server, name=name), ready=0, finished=JOBS)
    asyncio.run(all_was_read(postgres_url))
    # Vacuuming what was loaded is the server's own work, and would be counted as somebody's statements.
    postgres_server.sql("alter system set autovacuum = off")
    postgres_server.sql("select pg_reload_conf()")
    places = {"TRELLIS_OBJECTS": f"file://{tmp_path / 'objects'}", "TRELLIS_MEMORY": str(tmp_path / "memory.git")}
    commands = {role: ("up", "--roles", role) for role in ROLES} | {"worker": ("worker", "idle_shop:app")}
    asked: dict[str, float] = {}
    for role, command in commands.items():
        with process(tmp_path, *command, TRELLIS_LEDGER=postgres_url, **places) as running:
            before = statements(postgres_server, name)
            share = share_of_a_core(running.pid)
            asked[role] = (statements(postgres_server, name) - before) / MEASURED_S
            print(f"{role:14} {asked[role]:5.1f} statements a second, {100 * share:.2f} % of a core", flush=True)  # noqa: T201 - figures of the proof
    assert {role: rate for role, rate in asked.items() if rate > STATEMENTS_PER_S_MAX} == {}


@pytest.mark.prove
@pytest.mark.quiet
def test_an_idle_instance_takes_less_than_a_hundredth_of_a_core_its_log_does_not_grow_and_doctor_is_quiet(
    tmp_path: Path,
):
    log, ledger = tmp_path / "trellis.db-wal", f"sqlite:///{tmp_path / 'trellis.db'}"
    with process(tmp_path, "up", "--port", "0", TRELLIS_LEDGER=ledger) as running:
        share = share_of_a_core(running.pid)
        print(f"{100 * share:.2f} % of a core, the log has {log.stat().st_size} bytes", flush=True)  # noqa: T201 - figures of the proof
        assert log.stat().st_size < 512 * 1024
        asked = [sys.executable, "-m", "trellis", "doctor", "--json", "--ledger", ledger]
        answer = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True)
        checks = [record for line in answer.stdout.splitlines() if "check" in (record := json.loads(line))]
        assert checks
        assert [check for check in checks if check["severity"] != "ok"] == []
    assert share < CORE_SHARE_MAX
