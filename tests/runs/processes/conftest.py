"""Where orchestrator processes come from, and the garden that every story begins with."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import fault_server, figures, timed_database
from tests.faults.fleet import Nursery
from tests.runs.processes.stories import make_template
from tests.storage.conftest import seaweedfs

__all__ = ["fault_server", "figures", "seaweedfs", "timed_database"]  # fixtures of these tests too


@pytest.fixture(scope="session")
def orchestrators() -> Iterator[Nursery]:
    opened = Nursery("tests.runs.processes.run_process")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(make_template(tmp_path_factory.mktemp("template")))


@pytest.fixture(scope="session")
def small_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with little to read and to ask, for tests of many runs."""
    return asyncio.run(make_template(tmp_path_factory.mktemp("small-template"), small=True))
