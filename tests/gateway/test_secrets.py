"""Secrets stay where they were put: no output of a whole run repeats one, also not when others do."""

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.cli.test_up import up
from tests.servers.echo import repeating_server
from trellis.cli import main

PATIENCE_S = 60.0
PLANTED = {
    "TRELLIS_NLM_KEY": "planted-nlm-key-1f2e3d",
    "TRELLIS_MODEL_KEY": "planted-model-key-4c5b6a",
    "AWS_SECRET_ACCESS_KEY": "planted-s3-secret-7a8b9c",
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
}


@pytest.fixture
def nlm() -> Iterator[str]:
    """A server that refuses every question and repeats the key in its answer."""
    with repeating_server() as address:
        yield address


def test_no_secret_appears_in_logs_events_documents_errors_or_the_doctor(
    tmp_path: Path, nlm: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    environment = {
        **PLANTED,
        "TRELLIS_NLM": "openai",
        "TRELLIS_NLM_BASE_URL": nlm,
        "TRELLIS_NLM_MODEL": "m",
        "TRELLIS_LOG_LEVEL": "debug",
        "TRELLIS_LOG_FORMAT": "json",
    }
    with up(tmp_path, "--demo", **environment) as running:
        capsys.readouterr()
        assert main(["token", "issue", "--role", "owner", "--data", str(tmp_path)]) == 0
        token = capsys.readouterr().out.strip()
        shown = _a_run(running.address, token)
        running.process.send_signal(signal.SIGTERM)
        out, err = running.process.communicate(timeout=PATIENCE_S)
        shown += running.said + out + err
    for name, value in {**environment, "TRELLIS_TOKEN": token}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for arguments in (["doctor"], ["doctor", "--json"], ["events", "--limit", "100"], ["runs", "--json"]):
        main(arguments)
        shown += "".join(capsys.readouterr())
    development = (tmp_path / "trellis.db.key").read_text().strip()
    secrets = [value for name, value in PLANTED.items() if name != "AWS_ACCESS_KEY_ID"] + [token, development]
    assert '"event": "refused"' in shown, "there is no log to look at"
    assert "NLM" in shown, "the run never met the server that repeats the key"
    found = [secret for secret in secrets if secret in shown]
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "trellis.db.key"]
    found += [f"{secret} in {path}" for path in stored for secret in secrets if secret.encode() in path.read_bytes()]
    assert found == []
    assert len(stored) > 10


def _a_run(address: str, token: str) -> str:
    """Everything the gateway says about a run, and about requests that it refuses."""
    headers = {"Authorization": f"Bearer {token}"}
    with httpx2.Client(base_url=address, headers=headers, timeout=PATIENCE_S, trust_env=False) as client:
        begun = client.post("/agents/run", json={"agent_slug": "archivist-violin"})
        assert begun.status_code == 202, begun.text
        run_id = begun.json()["run_id"]
        told = [begun.text]
        with client.stream("GET", f"/events/stream?run={run_id}&last_event_id=0000000000000000") as events:
            for line in events.iter_lines():
                told.append(line)
                if '"completed"' in line or '"failed"' in line:
                    break
        paths = (f"/runs/{run_id}", f"/runs/{run_id}/steps", f"/runs/{run_id}/manifest", "/system/health", "/nothing")
        told += [client.get(path).text for path in paths]
        told += [
            client.get("/agents", headers={"Authorization": f"Bearer {bad}"}).text
            for bad in (f"{token}x", "Bearer", token[:40])
        ]
        refused = client.post("/dlq/requeue", json={})
        assert refused.status_code == 403, refused.text
    return "\n".join([*told, refused.text])
