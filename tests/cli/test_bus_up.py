"""`trellis up` and the bus: an application on the local bus, a NATS server that is not there yet, the kernel that others ask."""

import asyncio
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal
from tests.cli.test_up import PATIENCE_S, up
from tests.servers.nats import NatsServer
from trellis.app.settings import read_settings
from trellis.app.wiring import elapsed_s
from trellis.bus.requests import JobRequest
from trellis.bus.safety.kernel import PolicyKernel, open_kernel
from trellis.bus.services import BusRole
from trellis.bus.topics import Topics
from trellis.cli.invocation import Cli
from trellis.cli.output import Output
from trellis.cli.up_bus import BusProcess
from trellis.ledgers import open_ledger

SHOP = """
from trellis import App, Context

app = App()


@app.job("job.echo")
async def echo(ctx: Context, text: str) -> dict[str, str]:
    return {"echo": text, "job": ctx.job_id}
"""
POLICY = """
[[rules]]
id = "all"
decision = "allow"
match = { topics = ["job.>"] }
"""
BUS_ROLES = "scheduler,reconciler,sweeper"


@pytest.mark.requirement("BUS-1", "BUS-2", "D53")
def test_an_application_is_served_on_the_local_bus_and_leaves_its_result_behind_a_pointer(
    local: Terminal, tmp_path: Path
):
    (tmp_path / "shop.py").write_text(SHOP)
    with up(tmp_path, "--roles", BUS_ROLES, "--app", "shop:app", "--ledger", local.url) as running:
        assert "bus       local: reconciler, scheduler; serves job.echo" in running.said
        answer = local("submit", "--topic", "job.echo", '"hello"', "--wait", "30s", "--json")
        result = answer.record["result"]
        assert (result["status"], result["error_code"]) == ("SUCCEEDED", "")
        shown = local("job", "show", answer.record["job_id"], "--json").record
        types = [event["type"] for event in shown["events"]]
        assert types == ["job_accepted", "job_scheduled", "job_dispatched", "job_started", "job_succeeded"]
        kept = local("job", "result", answer.record["job_id"])
        assert json.loads(kept.out) == {"echo": "hello", "job": answer.record["job_id"]}
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("roles, woken", [(frozenset(BusRole), 1), (frozenset({BusRole.RECONCILER}), 0)])
async def test_intake_wakes_the_scheduler_of_its_process(roles: frozenset[BusRole], woken: int, tmp_path: Path):
    ledger = await open_ledger(f"sqlite:///{tmp_path / 'trellis.db'}")
    schedulers = list[Callable[[], None]]()
    part = BusProcess(
        settings=read_settings({}, tmp_path),
        ledger=ledger,
        topics=Topics(),
        kernel=PolicyKernel(),
        roles=roles,
        schedulers=schedulers,
    )
    try:
        async with part.opened(Cli(ledger=None, data=None, out=Output(as_json=False))):
            assert len(schedulers) == woken
        assert schedulers == []
    finally:
        await ledger.close()


@pytest.mark.requirement("D53")
@pytest.mark.parametrize(
    "ledger_url, policy, warned",
    [("postgresql://db/app", None, True), ("postgresql://db/app", "policy.toml", False), (None, None, False)],
)
async def test_a_scheduler_that_can_only_deny_says_so_at_the_start(
    ledger_url: str | None, policy: str | None, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ledger = await open_ledger(f"sqlite:///{tmp_path / 'trellis.db'}")
    settings = read_settings({} if policy is None else {"TRELLIS_POLICY": policy}, tmp_path)
    roles = frozenset({BusRole.SCHEDULER})
    part = BusProcess(settings=settings, ledger=ledger, topics=Topics(), kernel=PolicyKernel(), roles=roles)
    try:
        async with part.opened(Cli(ledger=ledger_url, data=None, out=Output(as_json=False))):
            pass
    finally:
        await ledger.close()
    assert ("there is no safety policy" in capsys.readouterr().err) is warned


@pytest.mark.requirement("BUS-10")
def test_trellis_up_starts_without_the_bus_and_dispatches_when_it_is_back(
    local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "policy.toml").write_text(POLICY)
    server = NatsServer.start(jetstream=True)
    try:
        monkeypatch.setenv("TRELLIS_BUS", server.url)
        monkeypatch.setenv("TRELLIS_POLICY", "policy.toml")
        server.kill()
        with up(tmp_path, "--roles", BUS_ROLES, "--ledger", local.url) as running:
            assert "it does not answer yet, jobs wait" in running.said
            job_id = local.submit("--topic", "job.echo", '"hello"')
            server.restart()
            answer = asyncio.run(echoed(server.url, local.url, job_id))
            assert answer == "SUCCEEDED"
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(PATIENCE_S) == 0
    finally:
        server.stop()


async def echoed(bus: str, url: str, job_id: str) -> str:
    """Serve the topic until the job has ended; how it did."""
    from datetime import UTC, datetime

    from trellis import App, Context
    from trellis.app.fleet import open_pointers
    from trellis.app.settings import Settings
    from trellis.app.wiring import SystemClock, connect, new_id
    from trellis.bus.wire import BusOptions, open_bus
    from trellis.worker.on_bus.worker import BusWorker
    from trellis.worker.options import BusWorkerOptions

    app = App(testing=True)

    @app.job("job.echo")
    async def echo(ctx: Context, text: str) -> str:
        return text

    clock = SystemClock()
    options = BusOptions(url=bus, sender_id="echo-1")
    opened = await open_bus(options, clock=clock, now=lambda: datetime.now(UTC), new_id=new_id)
    try:
        async with open_pointers(Settings.model_validate({}), url) as pointers, connect(url) as trellis:
            worker = BusWorker(app, opened, BusWorkerOptions(), clock=clock, new_id=new_id, resolver=pointers)
            async with worker:
                return (await trellis.wait(job_id, PATIENCE_S)).state
    finally:
        await opened.close()


@pytest.mark.requirement("BUS-4")
def test_a_kernel_alone_is_asked_by_others(local: Terminal, tmp_path: Path):
    (tmp_path / "policy.toml").write_text(POLICY)
    settings = {"TRELLIS_POLICY": "policy.toml", "TRELLIS_SAFETY_PORT": "0"}
    with up(tmp_path, "--roles", "safety-kernel", "--ledger", local.url, **settings) as running:
        address = re.search(r"^kernel +(\S+)$", running.said, re.MULTILINE)
        assert address is not None

        async def ask() -> str:
            kernel = open_kernel(address[1], monotonic=elapsed_s)
            try:
                return (await kernel.check(JobRequest.checked({"job_id": "a", "topic": "job.echo"}))).rule
            finally:
                await kernel.close()

        assert asyncio.run(ask()) == "all"
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE_S) == 0


def test_invalid_bus_settings_are_reported_before_services_start(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    refused = local("up", "--roles", "safety-kernel")
    assert (refused.code, "set it to a policy file" in refused.err) == (2, True)
    refused = local("up", "--roles", "gateway", "--app", "shop:app")
    assert (refused.code, "role scheduler" in refused.err) == (2, True)
    monkeypatch.setenv("TRELLIS_BUS", "nats://127.0.0.1:1")
    refused = local("up", "--app", "shop:app")
    assert (refused.code, "trellis worker MODULE:APP --bus" in refused.err) == (2, True)
    monkeypatch.setenv("TRELLIS_BUS_CONFIG", "nowhere.toml")
    monkeypatch.setenv("TRELLIS_POLICY", "nowhere.toml")
    refused = local("up", "--roles", "scheduler")
    assert (refused.code, "nowhere.toml" in refused.err) == (2, True)
