"""Where the processes of the bus come from, and the databases that they share."""

from collections.abc import Iterator

import pytest

from tests.faults.conftest import figures
from tests.faults.fleet import Nursery

__all__ = ["figures"]  # a fixture of these tests too


@pytest.fixture(scope="session")
def bus_nursery() -> Iterator[Nursery]:
    opened = Nursery("tests.bus.chaos.bus_process")
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite"])
def ledger_url(request: pytest.FixtureRequest) -> str:
    """A fresh ledger, which several processes share; a test says on which kinds it runs."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{request.getfixturevalue('tmp_path') / 'ledger.db'}"
