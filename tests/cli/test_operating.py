"""What an operator sees of processes: their health, their log, their roles, how far long commands are."""

import io
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rich.console import Console

from tests.cli.conftest import Terminal
from tests.deploy.cluster import INJECTED
from tests.deploy.patience import wait_until
from tests.servers.ready_python import ready_python
from trellis.cli import ledgers, main
from trellis.cli.output import EVERY_S, Output, counting
from trellis.cli.up_process import ROLES

SHOP = """
from trellis import App, Context

app = App()


@app.job("double")
async def double(ctx: Context, number: int) -> int:
    return 2 * number
"""
STUBBORN = """
import asyncio
from pathlib import Path

from trellis import App, Context

app = App()


@app.job("hold")
async def hold(ctx: Context) -> None:
    Path("begun").touch()
    while not Path("may-end").exists():
        await asyncio.sleep(0.05)
"""


@contextmanager
def process(folder: Path, *arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """The program, with a log for machines."""
    set_ = {"TRELLIS_LOG_FORMAT": "json", "TRELLIS_HEALTH_ADDRESS": "127.0.0.1:0", **INJECTED, **environment}
    started = subprocess.Popen(
        [ready_python(), "-m", "trellis", *arguments],
        cwd=folder,
        env={**os.environ, **set_},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def lines_until(started: "subprocess.Popen[str]", text: str) -> list[dict[str, Any]]:
    """What it logs until a line says this; every line is JSON."""
    assert started.stderr is not None
    lines: list[dict[str, Any]] = []
    while not lines or text not in str(lines[-1]):
        line = started.stderr.readline()
        assert line, lines
        lines.append(json.loads(line))
    return lines


def address_in(lines: list[dict[str, Any]]) -> str:
    return next(word for line in lines for word in line.get("text", "").split() if word.startswith("http://"))


@pytest.mark.requirement("D64")
def test_roles_without_a_gateway_have_health_and_a_log_of_json_alone(tmp_path: Path):
    with process(tmp_path, "up", "--roles", "sweeper,scheduler", TRELLIS_LEGDER="x") as started:
        lines = lines_until(started, "Ctrl-C")
        assert "did you mean TRELLIS_LEDGER?" in str(lines)
        address = address_in(lines)
        assert httpx2.get(address.replace("ready", "live")).json() == {"status": "ok"}
        ready = httpx2.get(address)
        assert ready.json() == {"status": "ok", "checks": {"ledger": "ok", "objects": "ok", "disk": "ok", "bus": "ok"}}
        started.send_signal(signal.SIGTERM)
        out, errors = started.communicate(timeout=60)
    assert started.returncode == 0
    assert out == ""
    assert [json.loads(line)["text"] for line in errors.splitlines() if '"status"' in line][-1] == "stopped"


def test_a_worker_has_health_and_a_log_of_json_alone(local: Terminal, tmp_path: Path):
    (tmp_path / "shop.py").write_text(SHOP)
    with process(tmp_path, "worker", "shop:app", "--ledger", local.url) as started:
        address = address_in(lines_until(started, "serves double"))
        assert httpx2.get(address).json() == {"status": "ok", "checks": {"ledger": "ok"}}
        started.send_signal(signal.SIGTERM)
        out, errors = started.communicate(timeout=60)
    assert started.returncode == 0
    assert out == ""
    assert all(json.loads(line) for line in errors.splitlines())


def test_a_worker_that_was_told_to_stop_is_alive_and_not_ready_until_its_handlers_end(local: Terminal, tmp_path: Path):
    (tmp_path / "shop.py").write_text(STUBBORN)
    local("submit", "hold", "null")
    with process(tmp_path, "worker", "shop:app", "--ledger", local.url) as started:
        address = address_in(lines_until(started, "serves hold"))
        wait_until((tmp_path / "begun").exists, "the handler begins")
        started.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx2.get(address).json() == {"status": "stopping", "checks": {}}, "it is not ready")
        assert httpx2.get(address).status_code == 503
        assert httpx2.get(address.replace("ready", "live")).status_code == 200
        (tmp_path / "may-end").touch()
        started.communicate(timeout=60)
    assert started.returncode == 0


def test_an_error_at_the_start_is_json_too(tmp_path: Path):
    with process(tmp_path, "up", "--roles", "sweeper", TRELLIS_HEALTH_ADDRESS="127.0.0.1:99999") as started:
        out, errors = started.communicate(timeout=60)
    assert (started.returncode, out) == (2, "")
    (line,) = map(json.loads, errors.splitlines())
    assert (line["event"], line["level"]) == ("failed", "error")
    assert "TRELLIS_HEALTH_ADDRESS" in line["error"]


def test_help_names_every_role(capsys: pytest.CaptureFixture[str]):
    assert main(["up", "--help"]) == 0
    printed = "".join(capsys.readouterr().out.split())  # a line may end at a hyphen
    assert ",".join(ROLES) in printed


def test_a_long_command_says_in_a_log_how_far_it_is():
    now = 0.0
    out, text = Output(as_json=False), io.StringIO()
    out.errors = Console(file=text, width=200)
    with counting(out, lambda: now) as report:
        for second in range(26):
            now = float(second)
            report("jobs put back", 1_000 * second)
    assert text.getvalue().splitlines() == ["10,000 jobs put back", "20,000 jobs put back"]
    assert EVERY_S == 10.0


def test_command_without_gateway_support_notes_that_a_local_ledger_is_used(
    local: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRELLIS_GATEWAY", "http://127.0.0.1:9")
    monkeypatch.setenv("TRELLIS_LEDGER", local.url)
    note = f"from the local ledger {local.url.removeprefix('sqlite:///')}: this command does not go through the gateway"
    assert note in local.bare("verify").err
    assert "from the local ledger" not in local("verify").err, "the ledger was named"


def test_the_doctor_asks_the_configured_gateway_and_misses_no_ledger_beside_it(
    local: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(ledgers, "GATEWAY_S", 0.2)
    monkeypatch.setenv("TRELLIS_GATEWAY", "http://127.0.0.1:9")
    monkeypatch.setenv("TRELLIS_LEDGER", f"sqlite:///{tmp_path / 'none.db'}")
    monkeypatch.setenv("TRELLIS_XYZZY", "1")
    asked = local.bare("doctor", "--json")
    found = {one["check"]: one for one in asked.records}
    assert (asked.code, found["gateway"]["severity"], found["ledger"]["severity"]) == (1, "error", "ok")
    assert "http://127.0.0.1:9" in found["gateway"]["detail"]
    assert "there is none at" in found["ledger"]["detail"]
    assert "XYZZY" not in asked.err, "an unknown variable is a finding, and is told once"
    assert "TRELLIS_XYZZY" in found["settings"]["detail"]
