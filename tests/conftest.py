"""Fixtures that every test can use. A server is started once per test process, and only if a test asks for it."""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.compiled import compile_everything, remember_constants
from tests.pace import Pace, keeping_pace
from tests.servers.known_schema import remember_schema
from tests.servers.known_types import remember_types
from tests.servers.postgres import (
    PostgresBinaries,
    PostgresServer,
    available_servers,
    running_postgres,
    sharing_clusters,
)
from tests.servers.ready_python import make_ready, ready_python, sharing_python
from tests.servers.templates import IN_A_HURRY, TEMPLATE, TEMPLATES
from tests.servers.temporal import TemporalServer, running_temporal
from tests.servers.warm_connections import WarmConnections, keeping_connections

# A suite that was started in the background has Ctrl-C switched off, and so would have every process it starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.processes", "tests.requirement_report", "tests.quiet", "tests.second_run"]

os.environ.setdefault("TRELLIS_PORT", "0")  # several gateways run at the same time
# Servers start as another user, so through a real fork(). gRPC's handlers of a fork can abort or block the child.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# The suite's servers offer no TLS. A driver that may use it reads the certificates of this machine before each connection, to ask in vain.
os.environ.setdefault("PGSSLMODE", "disable")
# The suite starts some hundred interpreters: what one of them has compiled is kept for the others, whatever the habit of this machine.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
remember_types()
remember_schema()

MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 6 << 30


def keep_files_in_memory() -> None:
    """Temporary files go to memory where there is room for them. Everything is synced as ever, but nobody waits for a disk."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir():
        return
    may_run_programs = not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    if may_run_programs and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


keep_files_in_memory()
gc.disable()  # until the tests are collected: nearly all that is made until then stays


def pytest_configure(config: pytest.Config) -> None:
    """The first process keeps the shared folders; those that it forks find them in their environment."""
    if config.option.processes:
        compile_everything(config)
    if not config.option.collectonly:
        sharing = contextlib.ExitStack()
        sharing.enter_context(sharing_clusters())
        sharing.enter_context(sharing_python())
        config.add_cleanup(sharing.close)
        if is_whole_run(config):
            sharing.callback(os.waitpid, prepare_meanwhile(), 0)


def is_whole_run(config: pytest.Config) -> bool:
    """Whether all tests run, in several processes: then each thing that many of them need is needed."""
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    return everything and bool(config.option.processes)


def prepare_meanwhile() -> int:
    """The id of a process that prepares what the tests share while they are collected on another core."""
    child = os.fork()
    if child == 0:
        try:
            ready_python()
            with running_postgres(contents=TEMPLATES):
                pass
            remember_constants()
        finally:
            os._exit(0)  # what could not be made is made, or reported, by the first test that needs it
    return child


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded by now stays: the collector need not look through all of it again and again."""
    if is_whole_run(session.config):
        make_ready()
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # Python's own numbers take 2 to 4 % of a test process's time


@pytest.fixture
def pace() -> Iterator[Pace]:
    """For what a clock judges: how long the machine stood still meanwhile."""
    with keeping_pace() as pace:
        yield pace


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real PostgreSQL; TRELLIS_TEST_POSTGRES=15 chooses another major version than the default."""
    with running_postgres(_chosen_binaries().bin_dir, TEMPLATES) as server:
        yield server


@pytest.fixture(scope="session")
def clocked_postgres() -> Iterator[PostgresServer]:
    """The wheel's server, not durable. Its tests copy the template whose clock they set, or a used copy that was set back."""
    with running_postgres(contents=TEMPLATES, **IN_A_HURRY) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def warm_connections() -> AsyncIterator[WarmConnections]:
    async with keeping_connections() as warm:
        yield warm


@pytest.fixture(scope="session")
def postgres_template() -> str:
    """The name of a migrated database that tests copy."""
    return TEMPLATE


@pytest.fixture
def new_postgres_database(
    postgres_server: PostgresServer, request: pytest.FixtureRequest
) -> Iterator[Callable[..., str]]:
    """Makes databases that end with the test: `new_postgres_database()` is empty, `(template=name)` a copy."""
    made: list[str] = []

    def make(template: str | None = None) -> str:
        name = f"test_{next(_numbers)}"
        made.append(name)
        return postgres_server.create_database(name, template)

    yield make
    for name in made:
        postgres_server.drop_database(name)


@pytest.fixture
def postgres_url(new_postgres_database: Callable[..., str], postgres_template: str) -> str:
    """The URL of a fresh database with the schema in it, as the superuser."""
    return new_postgres_database(template=postgres_template)


@pytest.fixture(scope="session")
def temporal_server() -> Iterator[TemporalServer]:
    """A Temporal server that the tests of one process share. Each uses a task queue of its own."""
    with running_temporal() as server:
        yield server


_numbers = iter(range(1, 1_000_000))


def _chosen_binaries() -> PostgresBinaries:
    wanted = os.environ.get("TRELLIS_TEST_POSTGRES")
    for binaries in available_servers():
        if wanted is None or str(binaries.version) == wanted:
            return binaries
    pytest.fail(f"PostgreSQL {wanted or ''} is not available; found {[b.version for b in available_servers()]}")
