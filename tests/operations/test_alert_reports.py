"""Reports of alerts: through the ledger's own queue to a real listener, signed, in order, once for each change."""

import json
import re
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trellis.app.alerts import alert_services, report_channels
from trellis.app.settings import Settings, read_settings
from trellis.engine.errors import ExtraMissing, SettingsInvalid
from trellis.engine.jobs import Actor, CancelMode, JobId, NewJob, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, SweepOptions
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.net.signatures import SignatureRefused, check_signature
from trellis.operations.alert_reports import AlertReporter
from trellis.operations.alerts import ALERTS, AlertEvaluator
from trellis.testing import FakeClock

SECRET = "5a" * 32
GUIDE = Path(__file__).parents[2] / "docs/how-to/alerts.md"
SUBMITTER = Actor(role=Role.SUBMITTER, name="s")
CLAIMER = Actor(role=Role.CONTROL_PLANE, name="c")


@dataclass
class Listener:
    """An HTTP server that keeps what it was sent. It answers as `answers` say, then 204."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]


@pytest.fixture
def listener() -> Iterator[Listener]:
    kept = Listener()

    class Keeps(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = kept.answers.pop(0) if kept.answers else 204
            if status < 300:
                kept.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Keeps)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_address[1]}/hooks/trellis?team=on-call"
    yield kept
    server.shutdown()
    server.server_close()
    thread.join()


@dataclass
class Duty:
    """A ledger with an evaluator and a reporter, on a clock that the test moves."""

    ledger: Ledger
    clock: FakeClock
    settings: Settings

    def services(self) -> tuple[AlertEvaluator, AlertReporter]:
        """Those of one process, as after a restart under the same name."""
        evaluator, reporter = alert_services(self.settings, self.ledger, name="up@home", clock=self.clock)
        assert isinstance(evaluator, AlertEvaluator)
        assert isinstance(reporter, AlertReporter)
        return evaluator, reporter

    async def evaluate(self) -> list[str]:
        return [change.kind.value for change in (await self.services()[0].run_once()).changes]

    async def report(self) -> None:
        """Sweep, then send what can be sent now."""
        await self.ledger.sweep(Actor(role=Role.SWEEPER, name="s"), SweepOptions(elect=False))
        reporter = self.services()[1]
        await reporter.run_once()
        while not reporter.is_idle:
            await self.ledger.queues()
        await reporter.drain()

    async def state(self, job_id: str) -> str:
        job = await self.ledger.job(JobId(job_id))
        assert job is not None
        return job.state


@pytest.fixture
async def duty(listener: Listener, tmp_path: Path) -> AsyncIterator[Duty]:
    key = tmp_path / "alert.key"
    key.write_text(SECRET)
    key.chmod(0o600)
    environment = {
        "TRELLIS_ALERT_WEBHOOK": listener.url,
        "TRELLIS_ALERT_KEY_FILE": str(key),
        "TRELLIS_GATEWAY": "https://gateway.example/",
    }
    clock = FakeClock()
    ledger = await open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=clock)
    yield Duty(ledger=ledger, clock=clock, settings=read_settings(environment, tmp_path))
    await ledger.close()


def verifies_as_the_guide_says(headers: dict[str, str], body: bytes) -> bool:
    """What docs/how-to/alerts.md has a receiver write."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["is_ours"](headers, body, bytes.fromhex(SECRET))


async def a_job_waits(duty: Duty) -> None:
    await duty.ledger.submit(SUBMITTER, [NewJob(job_id=JobId("waits"), type="work")])
    duty.clock.advance(301.0)


async def nothing_waits(duty: Duty) -> None:
    await duty.ledger.cancel(CLAIMER, JobId("waits"), CancelMode.HARD, RequestId("r"), grace_s=0.0, cause=None)


@pytest.mark.requirement("OBS-4")
async def test_each_change_reaches_a_listener_that_failed_twice_signed_and_once(duty: Duty, listener: Listener):
    listener.answers = [500, 404]
    await a_job_waits(duty)
    assert await duty.evaluate() == ["raised"]
    assert await duty.evaluate() == [], "a restart raises nothing again"
    (alert,) = await duty.ledger.alerts()
    for wait_s in (5.0, 10.0):
        await duty.report()
        assert listener.got == []
        assert await duty.state(f"{alert.id}-raised-webhook") == "queued"
        duty.clock.advance(wait_s)
    await duty.report()
    await duty.report()
    ((headers, body),) = listener.got
    check_signature(headers, body, [bytes.fromhex(SECRET)], now=time.time())
    assert verifies_as_the_guide_says(headers, body)
    assert not verifies_as_the_guide_says(headers, body + b" ")
    assert not verifies_as_the_guide_says({**headers, "webhook-timestamp": "1"}, body)
    with pytest.raises(SignatureRefused):
        check_signature(headers, body + b" ", [bytes.fromhex(SECRET)], now=time.time())
    assert headers["webhook-id"] == f"{alert.id}-raised-webhook"
    sent = json.loads(body)
    assert (sent["change"], sent["sequence"], sent["name"], sent["subject"]) == ("raised", 1, "jobs-wait", "work")
    assert (sent["action"], sent["runbook"]) == (
        ALERTS["jobs-wait"].action,
        "https://gateway.example/runbooks/jobs-wait",
    )
    assert (sent["id"], sent["resolved_at"]) == (alert.id, None)
    await nothing_waits(duty)
    assert await duty.evaluate() == ["resolved"]
    await duty.report()
    assert [(one["change"], one["sequence"]) for one in listener.documents()] == [("raised", 1), ("resolved", 2)]
    opened, resolved = listener.documents()
    assert resolved["resolved_at"] is not None
    assert (resolved["text"], resolved["action"]) == (f"Resolved. It was: {opened['text']}", "Nothing: it is resolved.")


@pytest.mark.requirement("OBS-4")
async def test_the_report_of_the_end_waits_for_that_of_the_beginning(duty: Duty, listener: Listener):
    listener.answers = [503]
    await a_job_waits(duty)
    await duty.evaluate()
    await duty.report()
    await nothing_waits(duty)
    await duty.evaluate()
    await duty.report()
    assert listener.got == [], "the first waits for its retry, and the second for the first"
    for _ in range(3):
        duty.clock.advance(6.0)
        await duty.report()
    assert [one["change"] for one in listener.documents()] == ["raised", "resolved"]


@pytest.mark.requirement("OBS-4")
async def test_the_path_of_the_webhook_is_stored_and_logged_nowhere(
    duty: Duty, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Chat services keep the secret that lets its holder post in the path."""
    monkeypatch.setattr("trellis.engine.alerts.REPORT_ATTEMPTS_MAX", 2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        origin = f"http://127.0.0.1:{closed.getsockname()[1]}"
        hook = {
            "TRELLIS_ALERT_WEBHOOK": f"{origin}/services/hush",
            "TRELLIS_ALERT_KEY_FILE": str(tmp_path / "alert.key"),
        }
        duty.settings = read_settings(hook, tmp_path)
        await a_job_waits(duty)
        await duty.evaluate()
        (alert,) = await duty.ledger.alerts()
        job_id = JobId(f"{alert.id}-raised-webhook")
        for _ in range(2):
            await duty.report()
            duty.clock.advance(10.0)
    assert await duty.state(job_id) == "failed"
    assert await duty.ledger.dead_letters(JobFilter(), limit=10) == [], "it is none of the users' dead letters"
    events = await duty.ledger.events(job_id)
    assert f"{origin} did not answer" in str(events)
    assert "report_given_up" in caplog.text
    for kept in (str(events), caplog.text):
        assert "hush" not in kept


@pytest.mark.requirement("OBS-4")
async def test_nobody_who_may_submit_jobs_has_another_text_sent(duty: Duty, listener: Listener):
    await a_job_waits(duty)
    await duty.evaluate()
    (alert,) = await duty.ledger.alerts()
    named = json.dumps({"alert_id": alert.id, "change": "raised", "text": "all is well"}).encode()
    forged = {"again": named, "unknown": b'{"alert_id": "alert-x", "change": "raised"}', "odd": b"[]"}
    type_ = "trellis.alert.webhook"
    jobs = [NewJob(job_id=JobId(name), type=type_, payload=body) for name, body in forged.items()]
    await duty.ledger.submit(SUBMITTER, jobs)
    await duty.report()
    assert [await duty.state(name) for name in forged] == ["failed"] * 3
    assert [one["text"] for one in listener.documents()] == [alert.text]


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # one of its services asks for it
@pytest.mark.requirement("OBS-4")
async def test_apprise_gets_the_same_reports_with_what_to_do(duty: Duty, listener: Listener, tmp_path: Path):
    """`json://` is one of its services: it posts to a listener of one's own."""
    address = listener.url.removeprefix("http").partition("?")[0]
    duty.settings = read_settings({"TRELLIS_ALERT_APPRISE": f"json{address} json{address}"}, tmp_path)
    listener.answers = [500]
    await a_job_waits(duty)
    await duty.evaluate()
    await duty.report()
    assert len(listener.got) == 1, "one of the two URLs has failed"
    duty.clock.advance(5.0)
    await duty.report()
    await duty.report()
    assert [one["title"] for one in listener.documents()] == ["[raised] jobs-wait work"] * 2, "once for each URL"
    (alert,) = await duty.ledger.alerts()
    for channel in ("apprise", "apprise-2"):
        assert await duty.state(f"{alert.id}-raised-{channel}") == "succeeded"
    assert "Runbook: trellis alerts runbook jobs-wait" in listener.documents()[0]["message"]
    duty.settings = read_settings({"TRELLIS_ALERT_APPRISE": "json://127.0.0.1 pigeon://secret"}, tmp_path)
    with pytest.raises(SettingsInvalid, match="TRELLIS_ALERT_APPRISE: entry 2 is no URL that Apprise knows") as caught:
        duty.services()
    assert "secret" not in str(caught.value)
    with pytest.raises(SettingsInvalid, match="at most 20 URLs"):
        report_channels(read_settings({"TRELLIS_ALERT_APPRISE": "json://127.0.0.1 " * 21}, tmp_path))


def test_a_channel_that_cannot_work_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "apprise", None)  # as in an installation without the extra
    with pytest.raises(ExtraMissing, match=r"trellis-engine\[apprise\]"):
        report_channels(read_settings({"TRELLIS_ALERT_APPRISE": "mailto://a@b.example"}, tmp_path))
    with pytest.raises(SettingsInvalid, match="TRELLIS_ALERT_WEBHOOK needs TRELLIS_ALERT_KEY_FILE"):
        read_settings({"TRELLIS_ALERT_WEBHOOK": "https://hooks.example/x"}, tmp_path)
    key = tmp_path / "alert.key"
    key.write_text(SECRET)
    key.chmod(0o600)
    named = {"TRELLIS_ALERT_KEY_FILE": str(key)}
    settings = read_settings({"TRELLIS_ALERT_WEBHOOK": "ftp://hooks.example/secret", **named}, tmp_path)
    with pytest.raises(SettingsInvalid, match="only https and http") as caught:
        report_channels(settings)
    assert "secret" not in str(caught.value)
