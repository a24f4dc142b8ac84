"""The command line of an instance whose runs a Temporal server drives."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal
from tests.cli.test_runs import VIOLIN, planted
from tests.servers.temporal import TemporalServer
from trellis.app.instance import open_instance
from trellis.app.roles import role_of
from trellis.app.settings import read_settings
from trellis.cli import up_process

__all__ = ["planted"]  # a fixture of these tests too

SERVER = "TRELLIS_ORCHESTRATOR"
ROLES = frozenset(up_process.ROLES)
AWAY = "temporal://127.0.0.1:1/default"


def finding(local: Terminal) -> dict[str, str]:
    """What the doctor says of the orchestrator; nothing if it says nothing."""
    return next((one for one in local("doctor", "--json").records if one.get("check") == "orchestrator"), {})


@pytest.mark.requirement("PIPE-2")
def test_doctor_says_whether_the_temporal_server_can_be_used(
    local: Terminal, monkeypatch: pytest.MonkeyPatch, temporal_server: TemporalServer, tmp_path: Path
):
    assert finding(local) == {}, "the built-in orchestrators need no server"
    monkeypatch.setenv(SERVER, AWAY)
    away = finding(local)
    assert (away["severity"], "127.0.0.1:1" in away["detail"]) == ("error", True)
    assert SERVER in away["remedy"]
    assert "wait in the ledger" in away["remedy"]
    monkeypatch.setenv(SERVER, f"temporal://{temporal_server.address}/nowhere")
    assert "namespace nowhere, cannot be used: it has no such namespace" in finding(local)["detail"]
    monkeypatch.setenv(SERVER, f"temporal://{temporal_server.address}/default")
    assert finding(local)["severity"] == "ok"
    monkeypatch.setenv("TRELLIS_TEMPORAL_TLS", "true")
    assert "it does not speak TLS; remove the settings TRELLIS_TEMPORAL_TLS" in finding(local)["detail"]
    monkeypatch.setenv("TRELLIS_TEMPORAL_CA_FILE", str(tmp_path))
    refused = f"TRELLIS_TEMPORAL_CA_FILE: {tmp_path} holds no certificates in PEM"
    assert refused in finding(local)["detail"]
    started = local("up", "--roles", "orchestrator")
    assert (started.code, refused in started.err) == (2, True)
    monkeypatch.setenv(SERVER, "temporal://")
    assert "say builtin or temporal://host:port/namespace" in local("doctor").out


@pytest.mark.requirement("PIPE-2", "PIPE-10")
def test_a_run_from_the_command_line_is_driven_by_the_temporal_server(
    planted: Terminal, monkeypatch: pytest.MonkeyPatch, temporal_server: TemporalServer
):
    monkeypatch.setenv(SERVER, f"temporal://{temporal_server.address}/default")
    monkeypatch.setenv("TRELLIS_TEMPORAL_QUEUE", "command-line")
    status = planted("run", VIOLIN, "--watch", "--json").record
    assert (status["status"], status["steps_completed"]) == ("completed", 4)
    assert planted("verify").code == 0
    assert "command-line/" + status["run_id"] in temporal_server.workflows()


@pytest.fixture
def no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an installation without the extra `temporal`."""
    for module in [name for name in sys.modules if name.startswith(("temporalio.", "trellis.runs.temporal."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "temporalio", None)


@pytest.mark.usefixtures("no_extra")
@pytest.mark.requirement("PIPE-2", "D19", "D32")
def test_without_server_and_extra_runs_are_accepted_and_cancelled_and_only_orchestrators_do_not_start(
    planted: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(SERVER, AWAY)
    run_id = planted("run", VIOLIN, "--json").record["run_id"]
    (run,) = planted("runs", "--json").records
    assert (run["run_id"], run["status"]) in {(run_id, "queued"), (run_id, "requested")}
    assert planted("runs", "cancel", run_id).code == 0
    assert [one["status"] for one in planted("runs", "--json").records] == ["failed"]
    needed = "Driving runs by a Temporal server needs packages that are not installed (temporalio): "
    assert needed in finding(planted)["detail"]
    assert finding(planted)["severity"] == "warning"
    refused = planted("up", "--roles", "orchestrator")
    assert refused.code == 2
    assert f"{needed}pip install 'trellis-engine[temporal]'" in refused.err
    assert {role_of(name) for name in served(planted.url, ROLES - {"orchestrator"})} >= {"schedules", "projector"}


def served(url: str, roles: frozenset[str]) -> list[str]:
    """The services of a process with these roles."""

    async def names() -> list[str]:
        async with open_instance(read_settings(os.environ, Path()), url) as instance:
            return [service.name for service in instance.services_of(roles)]

    return asyncio.run(names())
