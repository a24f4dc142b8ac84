"""`trellis worker` and `trellis up` started while PostgreSQL is away: they wait, say for what, and stop when told to."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_processes import APPLICATION, running
from tests.servers.postgres import PostgresServer


def _nobodys_port() -> int:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return reserved.getsockname()[1]


def _arguments(command: str, folder: Path) -> list[str]:
    (folder / "waiting_shop.py").write_text(APPLICATION)
    return [command, "waiting_shop:app"] if command == "worker" else [command]


def _said_once_it_waits(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting_for_ledger" in line:
            return line
    raise AssertionError("it ended without waiting")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["worker", "up"])
def test_a_process_waits_for_postgresql_and_stops_while_it_waits(tmp_path: Path, command: str, number: signal.Signals):
    port = _nobodys_port()
    with running(
        *_arguments(command, tmp_path), "--ledger", f"postgresql://x@127.0.0.1:{port}/x", cwd=tmp_path
    ) as process:
        line = _said_once_it_waits(process)
        assert str(port) in line
        assert "waited_s" in line
        process.send_signal(number)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("command", ["worker", "up"])
def test_a_database_that_is_there_and_wrong_is_an_error_at_once(
    tmp_path: Path, postgres_server: PostgresServer, command: str
):
    for url in (postgres_server.url("no_such_database"), postgres_server.url("postgres")):
        with running(*_arguments(command, tmp_path), "--ledger", url, cwd=tmp_path) as process:
            _, told = process.communicate(timeout=60)
        assert process.returncode in {1, 2}
        assert "waiting_for_ledger" not in told
        assert "error" in told
