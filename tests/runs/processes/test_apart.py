"""An orchestrator on a host without a memory repository and without a provider's key: it asks the gateway and the NLM backend."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.nlm.endpoint import running_endpoint
from tests.servers.ready_python import ready_python
from tests.servers.temporal import free_port
from trellis.app.instance import Instance, open_instance
from trellis.app.roles import role_of
from trellis.app.settings import Settings, read_settings
from trellis.app.wiring import check_destination
from trellis.engine.errors import SettingsInvalid
from trellis.engine.jobs import JobId
from trellis.engine.records import Event, JobFilter
from trellis.http_server.problems import problem_document, problem_of_error
from trellis.lifecycles import Role
from trellis.runs.memory_readers import GatewayReader, MemoryRefused, RepositoryReader
from trellis.runs.orchestration import TriggerKind
from trellis.storage.memory.errors import MemoryOverLimit, MemoryUnavailable
from trellis.storage.memory.layout import DeepPart, ReadMode

VIOLIN = "archivist-violin"
PATIENCE_S = 60.0
LOOK_AGAIN_S = 0.05
REST = "gateway,nlm,projector,apply-engine,sweeper"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Two folders in place of two hosts: one with the ledger, the objects and the memory, one with nothing."""

    home: Path
    other: Path
    gateway: str
    nlm: str

    @property
    def url(self) -> str:
        return f"sqlite:///{self.home / 'ledger.db'}"

    def settings(self, **more: str) -> Settings:
        return read_settings(self.environment(**more), self.other)

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "TRELLIS_MEMORY": "gateway",
            "TRELLIS_NLM": "backend",
            "TRELLIS_GATEWAY": self.gateway,
            "TRELLIS_NLM_BACKEND": self.nlm,
            **more,
        }


@contextmanager
def process(hosts: Hosts, folder: Path, *words: str, **environment: str) -> "Iterator[subprocess.Popen[str]]":
    """`trellis` in a folder, ready."""
    log = (folder / "log").open("a+")
    running = subprocess.Popen(
        [ready_python(), "-m", "trellis", *words, "--ledger", hosts.url],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=log,
        stderr=log,
        text=True,
    )
    try:
        end = time.monotonic() + PATIENCE_S
        while "Ctrl-C" not in (folder / "log").read_text():
            assert running.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(PATIENCE_S)
        log.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    home, other = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("other")
    gateway, nlm = free_port(), free_port()
    made = Hosts(home=home, other=other, gateway=f"http://127.0.0.1:{gateway}", nlm=f"http://127.0.0.1:{nlm}")
    addresses = {"TRELLIS_PORT": str(gateway), "TRELLIS_NLM_PORT": str(nlm)}
    with process(made, home, "up", "--demo", "--roles", REST, **addresses):
        yield made


@pytest.fixture
async def home(hosts: Hosts) -> AsyncIterator[Instance]:
    async with open_instance(read_settings({}, hosts.home), hosts.url) as opened:
        yield opened


@pytest.fixture
async def apart(hosts: Hosts) -> AsyncIterator[Instance]:
    async with open_instance(hosts.settings(), hosts.url) as opened:
        yield opened


async def ended(instance: Instance, run_id: JobId) -> list[Event]:
    """The events of a run that has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            events = await instance.ledger.events(run_id)
            if events[-1].target in {"completed", "failed"}:
                return events
            await asyncio.sleep(LOOK_AGAIN_S)


def course(events: list[Event]) -> list[tuple[object, ...]]:
    """What happened, without times and ids."""
    return [(one.type, one.role, one.cause, one.source, one.target, one.attempt, one.epoch) for one in events]


async def started(instance: Instance) -> JobId:
    return (await instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id


async def run_on_one_host(folder: Path) -> list[Event]:
    """The events of the same run in an instance whose only process does everything."""
    async with open_instance(read_settings({}, folder), f"sqlite:///{folder / 'ledger.db'}") as instance:
        await instance.plant()
        run_id, stop = await started(instance), asyncio.Event()
        serving = asyncio.ensure_future(instance.serve_run(run_id, stop))
        try:
            return await ended(instance, run_id)
        finally:
            stop.set()
            await serving


@pytest.mark.requirement("PIPE-4", "PIPE-7", "NLM-7")
async def test_run_is_driven_without_a_repository_and_is_the_same_run(hosts: Hosts, home: Instance, tmp_path: Path):
    run_id = await started(home)
    with process(hosts, hosts.other, "up", "--roles", "orchestrator", **hosts.environment()):
        events = await ended(home, run_id)
    assert course(events) == course(await run_on_one_host(tmp_path))
    assert events[-1].target == "completed"
    assert f"memory    through {hosts.gateway}" in (hosts.other / "log").read_text()
    assert [path.name for path in hosts.other.iterdir()] == ["log"], "nothing of the instance is on this host"
    proposals = (await home.ledger.jobs(JobFilter(lifecycle="proposal"), limit=50)).jobs
    assert {one.state for one in proposals} >= {"pending", "applied"}
    view = home.memory.read(VIOLIN, ReadMode.WIDE)
    assert view.last_run_id == run_id, "its memory update was applied by the engine of the other host"


async def test_memory_read_through_the_gateway_is_what_the_repository_has(home: Instance, apart: Instance):
    there, here = RepositoryReader(home.memory), apart.memory_reader
    assert isinstance(here, GatewayReader)
    for mode in ReadMode:
        stored = await there.read(VIOLIN, mode)
        assert await here.read(VIOLIN, mode) == replace(stored, last_update=None, last_run_id=None)
    for part in DeepPart:
        before = None
        while True:
            page = await there.read_deep(VIOLIN, part, before=before, limit=1)
            assert await here.read_deep(VIOLIN, part, before=before, limit=1) == page
            before = page.more
            if before is None:
                break


@pytest.mark.requirement("PIPE-4")
async def test_memory_over_its_limit_is_the_same_refusal_through_the_gateway():
    over = MemoryOverLimit(what="The wide memory", agent_id=VIOLIN, tokens=4_200, limit=4_100)
    with running_endpoint() as endpoint:
        document = problem_document(problem_of_error(over), None)
        endpoint.raw(document["status"], json.dumps(document).encode())
        reader = GatewayReader(url=endpoint.base_url, token=lambda: "x", deep_token=str)
        with pytest.raises(MemoryOverLimit) as refused:
            await reader.read(VIOLIN, ReadMode.WIDE)
        await reader.close()
    assert str(refused.value) == str(over)


async def test_refusals_and_outages_are_told_apart(hosts: Hosts, apart: Instance):
    with pytest.raises(MemoryRefused, match="404"):
        await apart.memory_reader.read("nobody", ReadMode.BASIC)
    stranger = GatewayReader(url=hosts.gateway, token=lambda: "not.a.token", deep_token=lambda _: "not.a.token")
    with pytest.raises(MemoryRefused, match=r"401.*needs a token with the role orchestrator"):
        await stranger.read(VIOLIN, ReadMode.BASIC)
    await stranger.close()
    token = apart._token_as(Role.ORCHESTRATOR)
    reader = GatewayReader(url=hosts.gateway, token=token, deep_token=lambda _: token())
    with pytest.raises(MemoryRefused, match=r"403.*a key that signs for its agents"):
        await reader.read_deep(VIOLIN, DeepPart.DECISIONS, before=None, limit=1)
    await reader.close()
    away = GatewayReader(url="http://127.0.0.1:9", token=lambda: "x", deep_token=str)
    with pytest.raises(MemoryUnavailable, match=r"127\.0\.0\.1:9"):
        await away.read(VIOLIN, ReadMode.BASIC)
    await away.close()


async def test_only_the_orchestrator_can_do_without_a_repository(apart: Instance):
    assert {role_of(one.name) for one in apart.services_of(frozenset({"orchestrator"}))} == {"orchestrator"}
    for roles in (None, frozenset({"gateway"}), frozenset({"orchestrator", "apply-engine"})):
        with pytest.raises(SettingsInvalid, match="only a process with --roles orchestrator"):
            apart.services_of(roles)
    with pytest.raises(SettingsInvalid, match="no memory of its own"):
        _ = apart.memory


async def test_tokens_go_unencrypted_to_another_machine_only_where_it_is_allowed(hosts: Hosts):
    for name, address in (
        ("TRELLIS_GATEWAY", "http://10.77.0.9:8420"),
        ("TRELLIS_NLM_BACKEND", "http://10.77.0.9:8421"),
    ):
        with pytest.raises(SettingsInvalid, match=f"{name}.*unencrypted to {re.escape(address)}"):
            async with open_instance(hosts.settings(**{name: address}), hosts.url) as refused:
                refused.services_of(frozenset({"orchestrator"}))
        allowed = hosts.settings(**{name: address, "TRELLIS_GATEWAY_PLAIN_HTTP": "1"})
        async with open_instance(allowed, hosts.url) as instance:
            assert instance.services_of(frozenset({"orchestrator"}))


@pytest.mark.parametrize("setting", ["nlm_backend", "gateway"])
@pytest.mark.parametrize("key", ["development", "configured"])
def test_address_from_a_file_of_the_working_folder_gets_no_token_that_a_key_elsewhere_signs(
    tmp_path: Path, setting: str, key: str
):
    (tmp_path / "trellis.toml").write_text(f'{setting} = "https://elsewhere.example"\n')
    elsewhere = {"TRELLIS_LEDGER": "sqlite:////srv/ledger.db"} if key == "development" else {}
    elsewhere |= {"TRELLIS_TOKEN_KEY_FILE": "/srv/key"} if key == "configured" else {}
    settings = read_settings(elsewhere, tmp_path)
    with pytest.raises(SettingsInvalid, match="does not decide where a key goes"):
        check_destination(settings, setting, "https://elsewhere.example")
    named = read_settings({**elsewhere, f"TRELLIS_{setting.upper()}": "https://elsewhere.example"}, tmp_path)
    check_destination(named, setting, "https://elsewhere.example")
