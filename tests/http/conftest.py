"""A gateway that is really served, with the garden in it, and clients of it."""

import asyncio
import contextlib
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fleet import Nursery
from tests.gateway.serving import PATIENCE_S, Served, serving
from tests.runs.processes.conftest import template
from trellis.app.settings import Settings
from trellis.app.wiring import SystemClock, development_key, make_development_key
from trellis.auth.tokens import TrustedKey, issue
from trellis.cli import main
from trellis.engine.service import Service, serve
from trellis.lifecycles import Role
from trellis.runs.agent_status import AgentHealth
from trellis.runs.orchestrator import Orchestrator
from trellis.runs.projector import Projector

__all__ = ["template"]  # a fixture of these tests too

TOKEN_S = 3_600
Token = Callable[..., str]


@dataclass(frozen=True)
class Place:
    """A planted instance in a folder of its own, and the key that signs its tokens."""

    ledger: str
    key: TrustedKey

    def token(self, *roles: Role, name: str = "iryna", job_id: str | None = None) -> str:
        return issue(self.key, name=name, roles=list(roles), ttl_s=TOKEN_S, now=time.time(), job_id=job_id)


@pytest.fixture(scope="module")
def place(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One for the tests of a module: each looks only at what it made itself."""
    folder = tmp_path_factory.mktemp("place") / "instance"
    shutil.copytree(template, folder)
    url = f"sqlite:///{folder / 'ledger.db'}"
    make_development_key(url)
    return Place(url, development_key(url))


@pytest.fixture(scope="module")
def served(place: Place) -> Iterator[Served]:
    with serving(place.ledger, [place.key], settings=Settings.model_validate({})) as server:
        yield server


@contextlib.contextmanager
def at_work(served: Served, chosen: Callable[[Service[Any]], bool]) -> Iterator[None]:
    """Services of the instance that is served, in the server's own loop."""
    stop, instance = threading.Event(), served.instance

    async def work() -> None:
        ended = asyncio.Event()
        rng = random.Random(1)
        services = [service for service in instance.services() if chosen(service)]
        tasks = [asyncio.ensure_future(serve(service, SystemClock(), rng, ended)) for service in services]
        await asyncio.to_thread(stop.wait)
        ended.set()
        await asyncio.gather(*tasks)
        for service in services:
            if isinstance(service, Orchestrator):
                await service.drain()
            elif isinstance(service, Projector | AgentHealth):
                await service.release()

    working = asyncio.run_coroutine_threadsafe(work(), served.loop)
    try:
        yield
    finally:
        stop.set()
        working.result(PATIENCE_S)


@pytest.fixture
def publishing(served: Served) -> Iterator[None]:
    """What happens to runs is published, and nobody works on them."""
    with at_work(served, lambda service: isinstance(service, Projector)):
        yield


@pytest.fixture(scope="module")
def working(served: Served) -> Iterator[None]:
    """Everything that runs and proposals need."""
    with at_work(served, lambda _: True):
        yield


@pytest.fixture(scope="module")
def address(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}"


@pytest.fixture(scope="module")
def token(place: Place) -> Callable[..., str]:
    return place.token


@pytest.fixture(scope="session")
def gateways() -> Iterator[Nursery]:
    """Where gateway processes come from."""
    opened = Nursery("tests.http.gateway_process")
    yield opened
    opened.close()


@dataclass
class Shell:
    """Calls the program in this process."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, code: int = 0) -> str:
        self.capsys.readouterr()
        answer = main(list(arguments))
        out, err = self.capsys.readouterr()
        assert answer == code, err or out
        return out if code == 0 else err

    def records(self, *arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*arguments, "--json").splitlines()]


@pytest.fixture
def shell(
    address: str, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRELLIS_GATEWAY", address)
    monkeypatch.setenv("TRELLIS_TOKEN", place.token(Role.OWNER, Role.CONTROL_PLANE))
    return Shell(capsys)
