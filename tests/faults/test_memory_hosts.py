"""The host that served memory dies for good, with its disk: another goes on, and no acknowledged change is lost."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.platform import free_ports, until
from tests.servers.seaweedfs import running_seaweedfs
from tests.stopped_tasks import stopped
from tests.storage.memory.rig import ENVIRONMENT
from trellis.app.instance import open_instance
from trellis.app.settings import Settings, read_settings
from trellis.app.wiring import connect, trusted_keys
from trellis.auth.tokens import issue
from trellis.engine.retry_policy import RetryPolicy
from trellis.http.calls import CallOptions
from trellis.http.client import GatewayClient
from trellis.http.errors import GatewayUnavailable
from trellis.lifecycles import Role
from trellis.storage.memory.trees import AgentFolder

AGENTS = ("archivist-violin", "architect-guardian")
WRITERS = 6
BEFORE, AFTER = 20, 40
"""Changes that are acknowledged before the host dies, and after it."""
OPTIONS = CallOptions(timeout_s=10.0, attempt_s=10.0, retry=RetryPolicy(base_s=0.02, max_s=0.3))


@dataclass
class Host:
    """Everything of one host: a folder, and processes in one group."""

    folder: Path
    environment: dict[str, str]
    port: int
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        self.folder.mkdir()
        own = {"TRELLIS_PORT": str(self.port), "TRELLIS_MEMORY_CACHE": str(self.folder / "memory-cache.git")}
        with (self.folder.with_suffix(".log")).open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trellis", "up", "--roles", "gateway,apply-engine,sweeper"],
                cwd=self.folder,
                env={**os.environ, **self.environment, **own},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_ready(self) -> bool:
        log = self.folder.with_suffix(".log").read_text()
        assert self.process.poll() is None, log
        return "Ctrl-C" in log

    def die_for_good(self) -> None:
        """Kill the whole process group and remove the disk."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        shutil.rmtree(self.folder)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)


@pytest.fixture
def environment(tmp_path: Path, postgres_url: str) -> Iterator[dict[str, str]]:
    """What all hosts have in common: PostgreSQL, S3 and keys."""
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    with running_seaweedfs() as seaweed:
        yield {
            **ENVIRONMENT,
            "TRELLIS_LEDGER": postgres_url,
            "TRELLIS_OBJECTS": seaweed.url("fleet"),
            "TRELLIS_MEMORY": "objects",
            "TRELLIS_TOKEN_KEY_FILE": str(key),
            "TRELLIS_CALLBACK_KEY_FILE": str(key),
        }


async def write(clients: list[GatewayClient], name: str, acknowledged: dict[str, tuple[str, str]]) -> None:
    """Propose one change after the other, through each gateway in turn, and note those said to be applied.

    A gateway that does not answer is left alone, and another is asked with the same key what became of the change.
    """
    left = list(clients)
    for number in itertools.count():
        agent, line = AGENTS[number % len(AGENTS)], f"- {name} {number}"
        update = {"file": "decisions.md", "operation": "append", "content": line}
        while True:
            client = left[number % len(left)]
            try:
                answer = await client.memory.propose(agent, line, [update], idempotency_key=f"{name}-{number}")
            except GatewayUnavailable:
                left.remove(client)
                continue
            break
        if answer.status == "auto_applied":
            acknowledged[answer.proposalId] = (agent, line)


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.requirement("D23", "PIPE-11")
async def test_host_that_served_memory_dies_for_good_and_no_acknowledged_change_is_lost(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    url = environment["TRELLIS_LEDGER"]
    here = read_settings({**os.environ, "TRELLIS_MEMORY_CACHE": str(tmp_path / "observer.git")}, tmp_path)
    async with open_instance(here, url) as instance:
        await instance.plant()
    token = issue(
        next(iter(trusted_keys(url, here))), name="w", roles=[Role.ORCHESTRATOR], ttl_s=3_600, now=time.time()
    )
    hosts = [Host(tmp_path / f"host-{number}", environment, port) for number, port in enumerate(free_ports(2), start=1)]
    acknowledged: dict[str, tuple[str, str]] = {}
    async with contextlib.AsyncExitStack() as stack:
        for host in hosts:
            host.start()
            stack.callback(host.end)
            await until(lambda host=host: host.is_ready, "the gateway listens")
        clients = [
            await stack.enter_async_context(
                connect(gateway=f"http://127.0.0.1:{host.port}", token=token, options=OPTIONS)
            )
            for host in hosts
        ]
        writers = [asyncio.create_task(write(clients, f"w{number}", acknowledged)) for number in range(WRITERS)]

        def have(number: int) -> bool:
            for writer in writers:
                if writer.done():
                    writer.result()
            return len(acknowledged) >= number

        await until(lambda: have(BEFORE), f"{BEFORE} changes are acknowledged")
        hosts[0].die_for_good()
        then = len(acknowledged)
        await until(lambda: have(then + AFTER), "the other host goes on")
        for writer in writers:
            writer.cancel()
        await stopped(*writers)
        await _check(here, url, acknowledged)
    print(f"{then} changes acknowledged before the death, {len(acknowledged) - then} after it", flush=True)  # noqa: T201 - figures of the proof
    command = [sys.executable, "-m", "trellis", "verify"]
    verified = await asyncio.to_thread(
        subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "no damage" in verified.stdout


async def _check(settings: Settings, url: str, acknowledged: dict[str, tuple[str, str]]) -> None:
    """Every acknowledged change is in the history exactly once, and so is its text in the memory."""
    proposals: Counter[str | None] = Counter()
    lines: dict[str, Counter[str]] = {}
    async with open_instance(settings, url) as instance:
        for agent in AGENTS:
            before = None
            while True:
                page = await asyncio.to_thread(instance.memory.history, agent, limit=200, before=before)
                proposals.update(entry.proposal_id for entry in page.entries)
                if (before := page.more) is None:
                    break
            with instance.memory.objects() as objects:
                folder = AgentFolder(objects, instance.memory.head(), agent)  # pyright: ignore[reportArgumentType]
                lines[agent] = Counter(folder.text("decisions.md").splitlines())
    assert [id_ for id_ in acknowledged if proposals[id_] != 1] == []
    assert [line for agent, line in acknowledged.values() if lines[agent][line] != 1] == []
    assert max(proposals.values()) == 1
