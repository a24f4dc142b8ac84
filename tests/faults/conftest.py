"""Ledgers to break: each test gets its own database, and at the end every history in it must replay."""

import asyncio
import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import asyncpg
import pytest

from tests.faults.fleet import Nursery
from tests.faults.history import Told, problems
from tests.faults.proxy import Proxy, proxied
from tests.ledgers.conformance.rig import Rig
from tests.servers.known_types import ASKED
from tests.servers.postgres import PostgresServer
from tests.servers.templates import CLOCKED_TEMPLATE, TEMPLATE
from tests.servers.templates import FAULTS_LOGIN as LOGIN
from trellis.engine.ledger import Ledger
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.lanes import LaneOptions

SEED = int(os.environ.get("TRELLIS_FAULT_SEED", "20261115"))
"""Every random choice of these tests comes from here; a failure prints it."""
PATIENT = LaneOptions(call_timeout_s=0.4, outcome_window_s=20.0, connect_timeout_s=5.0)
"""A silent connection is given up soon, a lost answer is asked for until it is known."""

_numbers = count(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed:
        report.sections.append(("faults", f"TRELLIS_FAULT_SEED={SEED}"))
    return report


@pytest.fixture(autouse=True)
def every_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault hits whatever the driver sends in production, also its own questions about types."""
    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", ASKED)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Notes what a proof measured, with its time, in `build/faults/`; `python -m tests.faults.figures` prints them."""

    def note(**measured: object) -> None:
        folder = request.config.rootpath / "build" / "faults"
        folder.mkdir(parents=True, exist_ok=True)
        name = request.node.nodeid.partition("::")[2]
        ran_at = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"test": name, "ran_at": ran_at, "seed": SEED, **measured})
        (folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.json").write_text(text + "\n", encoding="utf-8")

    return note


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where worker processes come from."""
    opened = Nursery()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def fault_server(postgres_server: PostgresServer) -> PostgresServer:
    """The server, with its templates: one whose clock tests set, one on the system's clock."""
    return postgres_server


@contextlib.contextmanager
def database(server: PostgresServer, template: str = TEMPLATE) -> Iterator[str]:
    """The name of a fresh ledger's database."""
    name = f"faults_{next(_numbers)}"
    server.create_database(name, template)
    try:
        yield name
    finally:
        server.drop_database(name)


@dataclass(kw_only=True)
class Bench:
    """A ledger behind a proxy. `rig` looks at it and arranges things from the side, past the proxy."""

    proxy: Proxy
    rig: Rig
    shaky: Ledger
    url: str
    """Through the proxy, as the application's login role."""
    direct_url: str
    admin_url: str
    sql: Callable[..., Awaitable[list[tuple]]]
    """Run SQL as the superuser."""
    told: Told = field(default_factory=Told)
    reached: Counter[str] = field(default_factory=Counter)
    """Rare paths that this test went through."""

    async def open_shaky(self, options: LaneOptions = PATIENT) -> Ledger:
        another = await open_ledger(self.url, options=options)
        self.rig.others.append(another)
        return another

    async def check(self) -> None:
        """What holds after every fault."""
        report = await verify(self.rig.ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))
        assert not await problems(self.told, self.rig.ledger)


@pytest.fixture(scope="module")
def clocked_database(fault_server: PostgresServer) -> Iterator[str]:
    """One for all tests of a module: ids never repeat, and a fault of one test must not disturb the next."""
    with database(fault_server, CLOCKED_TEMPLATE) as name:
        yield name


@pytest.fixture
def timed_database(fault_server: PostgresServer) -> Iterator[str]:
    with database(fault_server) as name:
        yield name


@pytest.fixture
async def bench(fault_server: PostgresServer, clocked_database: str) -> AsyncIterator[Bench]:
    """A ledger with a settable clock, reached through a proxy that can aim."""
    async with open_bench(fault_server, clocked_database) as opened:
        yield opened
        opened.proxy.heal()
        await opened.check()


@contextlib.asynccontextmanager
async def open_bench(server: PostgresServer, name: str, options: LaneOptions = PATIENT) -> AsyncIterator[Bench]:
    direct = server.url(name, LOGIN)
    admin = await asyncpg.connect(server.url(name))

    one_at_a_time = asyncio.Lock()

    async def advance(seconds: float) -> None:
        async with one_at_a_time:
            await admin.execute("UPDATE trellis.test_clock SET at = at + make_interval(secs => $1)", seconds)

    async def reopen() -> Ledger:
        return await open_ledger(direct, hints=False)

    async def admin_sql(statement: str, *arguments: object) -> list[tuple]:
        async with one_at_a_time:
            return [tuple(row) for row in await admin.fetch(statement, *arguments)]

    try:
        async with proxied(direct, seed=SEED) as (proxy, url):
            rig = Rig(
                kind="postgres",
                ledger=await reopen(),
                advance=advance,
                reopen=reopen,
                admin_sql=admin_sql,
                numbers=_numbers,
            )
            try:
                shaky = await open_ledger(url, hints=False, options=options)
                rig.others.append(shaky)
                yield Bench(
                    proxy=proxy,
                    rig=rig,
                    shaky=shaky,
                    url=url,
                    direct_url=direct,
                    admin_url=server.url(name),
                    sql=admin_sql,
                )
            finally:
                proxy.heal()
                await rig.close()
    finally:
        await admin.close()


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    server: PostgresServer = request.getfixturevalue("fault_server")
    return server.url(request.getfixturevalue("timed_database"), LOGIN)


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[Ledger]:
    opened = await open_ledger(ledger_url)
    yield opened
    await opened.close()
