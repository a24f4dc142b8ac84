"""Where the processes of queue jobs come from, and the garden that every story begins with."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import figures
from tests.faults.fleet import Nursery
from tests.research.processes.stories import make_template

__all__ = ["figures"]  # a fixture of these tests too


@pytest.fixture(scope="session")
def parts() -> Iterator[Nursery]:
    """Forks platforms and NLM backends."""
    opened = Nursery("tests.research.processes.queue_process")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(make_template(tmp_path_factory.mktemp("template")))
