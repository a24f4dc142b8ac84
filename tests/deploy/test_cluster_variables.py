"""A Service named like Trellis puts variables into every pod. No entrance that reads settings may take them for its own."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.deploy.cluster import INJECTED
from trellis import connect, connect_sync
from trellis.app.settings import Settings
from trellis.cli import main


@pytest.fixture
def in_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Puts what a cluster injects into the environment of this process; the file of the ledger there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRELLIS_LEDGER", "sqlite:///here.db")
    for name, value in INJECTED.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "here.db"


@pytest.mark.requirement("D64")
async def test_the_python_client_opens_its_ledger_in_a_pod(in_a_cluster: Path, caplog: pytest.LogCaptureFixture):
    async with connect():
        assert await asyncio.to_thread(in_a_cluster.exists)
    assert "unknown_variable" not in caplog.text


@pytest.mark.requirement("D64")
def test_the_client_of_a_gateway_is_made_in_a_pod(in_a_cluster: Path, caplog: pytest.LogCaptureFixture):
    with connect_sync("http://127.0.0.1:9") as gateway:
        assert gateway is not None
    assert "unknown_variable" not in caplog.text


@pytest.mark.requirement("D64")
def test_the_command_line_keeps_its_settings_in_a_pod(in_a_cluster: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["migrate"]) == 0
    capsys.readouterr()
    assert main(["doctor", "--settings", "--json"]) == 0
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [one for one in records if one.get("check") == "settings"] == []
    assert err == ""
    in_force = {one["setting"]: (one["value"], one["source"]) for one in records if "setting" in one}
    defaults = Settings.model_validate({})
    assert in_force["ledger"] == ("sqlite:///here.db", "TRELLIS_LEDGER")
    for name in ("port", "nlm_port", "safety_port"):
        assert in_force[name] == (getattr(defaults, name), "default"), "an address of a Service is no source of a port"
