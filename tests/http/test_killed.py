"""A gateway that is killed -9 under load, again and again: clients ask again, and nothing is lost or doubled (DJ-5, PIPE-12)."""

import asyncio
import itertools
import json
import random
import secrets
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.fleet import Nursery, Running, until
from tests.http.gateway_process import POINTS, Orders
from trellis.app.wiring import ISSUER, connect
from trellis.auth.tokens import issue, symmetric_key
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter
from trellis.engine.retry_policy import RetryPolicy
from trellis.http.calls import CallOptions
from trellis.http.client import GatewayClient
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

AGENTS = ("archivist-violin", "architect-guardian")
TYPE = "work"
OPTIONS = CallOptions(timeout_s=90.0, attempt_s=20.0, retry=RetryPolicy(base_s=0.02, max_s=0.3))
SEED = 7


@dataclass
class Load:
    """What clients were told: by what they asked for, the id that they got."""

    jobs: dict[int, str] = field(default_factory=dict)
    runs: dict[int, str] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by every answer."""

    @property
    def answered(self) -> int:
        return len(self.jobs) + len(self.runs)


@dataclass
class Ward:
    """Gateway processes on one address, one at a time."""

    nursery: Nursery
    orders: Orders
    folder: Path
    started: int = 0
    now: Running | None = None

    def start(self, die_at: str = "", die_after: int = 0) -> Running:
        log = self.folder / f"gateway-{self.started}.log"
        said = Orders(**{**self.orders.__dict__, "die_at": die_at, "die_after": die_after})
        self.now = Running(self.nursery.fork(log, said), log.stem, log)
        self.started += 1
        return self.now

    def end(self) -> None:
        if self.now is not None and self.now.is_alive:
            self.now.send(signal.SIGKILL)


@pytest.mark.requirement("DJ-5", "PIPE-12", "PIPE-13")
async def test_no_request_is_lost_or_doubled_when_the_gateway_is_killed(
    gateways: Nursery, template: Path, tmp_path: Path
):
    shutil.copytree(template, tmp_path / "instance")
    url = f"sqlite:///{tmp_path / 'instance' / 'ledger.db'}"
    await story(gateways, tmp_path, Orders(url=url, port=free_port(), secret=secrets.token_hex(32)), deaths=6)


@pytest.fixture(params=["sqlite", "postgres"])
def anywhere(request: pytest.FixtureRequest, template: Path, tmp_path: Path) -> Orders:
    """For a gateway on either ledger."""
    folder = tmp_path / "instance"
    shutil.copytree(template, folder)
    local = request.param == "sqlite"
    return Orders(
        url=f"sqlite:///{folder / 'ledger.db'}" if local else request.getfixturevalue("postgres_url"),
        port=free_port(),
        secret=secrets.token_hex(32),
        objects=f"file://{folder / 'objects'}",
        memory=str(folder / "memory.git"),
    )


@pytest.mark.prove
@pytest.mark.requirement("DJ-5", "PIPE-12", "PIPE-13")
async def test_no_request_is_lost_or_doubled_over_many_deaths_of_the_gateway(
    gateways: Nursery, anywhere: Orders, tmp_path: Path
):
    await story(gateways, tmp_path, anywhere, deaths=45, clients=12, each=60)


async def story(
    nursery: Nursery, folder: Path, orders: Orders, *, deaths: int, clients: int = 8, each: int = 12
) -> None:
    ward, load = Ward(nursery, orders, folder), Load()
    key = symmetric_key(bytes.fromhex(orders.secret), issuer=ISSUER)
    token = issue(key, name="load", roles=[Role.OWNER], ttl_s=600, now=time.time())
    numbers = itertools.count()
    try:
        async with connect(gateway=f"http://127.0.0.1:{orders.port}", token=token, options=OPTIONS) as client:
            asking = asyncio.gather(*(ask(client, load, numbers, clients * each) for _ in range(clients)))
            dying = asyncio.ensure_future(die_and_rise(ward, load, deaths, clients * each, asking))
            await asking  # every call ended well, or the test ends with its error
            await dying
    finally:
        ward.end()
    assert ward.started == deaths + 1
    ledger = await open_ledger(orders.url)
    try:
        await check(ledger, load, clients * each)
    finally:
        await ledger.close()


async def ask(client: GatewayClient, load: Load, numbers: "itertools.count[int]", total: int) -> None:
    """Take numbers and ask for what each stands for, until there are none left."""
    while (number := next(numbers)) < total:
        if number % 12 == 0:
            run = await client.runs.start(AGENTS[number // 12 % 2], {"number": number})
            load.runs[number] = run.run_id
        else:
            load.jobs[number] = (await client.jobs.submit(TYPE, {"number": number})).job_id
        load.news.set()


async def die_and_rise(ward: Ward, load: Load, deaths: int, total: int, asking: "asyncio.Future[list[None]]") -> None:
    """Each process dies at one of the points, or is killed from outside, a few requests into its life; the last one lives."""
    rng = random.Random(SEED)
    share = total // (2 * deaths)  # so many requests for each life, that work is left for the last one
    for number in range(deaths):
        point = (*POINTS, "")[number % 4]
        process = ward.start(point, rng.randint(1, share))
        if point:
            await until(lambda process=process: not process.is_alive, f"{process.name} died at {point}")
        else:
            load.news.clear()
            await load.news.wait()
            ward.end()
            await until(lambda process=process: not process.is_alive, f"{process.name} is dead")
        assert not asking.done(), "there was nothing left to ask for"
    ward.start()


async def check(ledger: Ledger, load: Load, total: int) -> None:
    assert load.answered == total
    jobs = await everything(ledger, JobFilter(type=TYPE))
    assert {job.job_id for job in jobs} == set(load.jobs.values())
    assert await numbers_of(ledger, jobs) == Counter(load.jobs.keys())
    runs = await everything(ledger, JobFilter(lifecycle="run"))
    assert {run.job_id for run in runs} == set(load.runs.values())
    for asked, run_id in (*load.jobs.items(), *load.runs.items()):
        found = await ledger.job(run_id)  # type: ignore[arg-type]
        assert found is not None
        body = json.loads(found.payload or b"{}")
        assert body.get("number", body.get("params", {}).get("number")) == asked, "an answer was for another request"
        events = await ledger.events(found.job_id)
        assert [event.version for event in events] == list(range(1, len(events) + 1))


async def everything(ledger: Ledger, where: JobFilter) -> list[Job]:
    found: list[Job] = []
    cursor: str | None = None
    while True:
        page = await ledger.jobs(where, limit=500, cursor=cursor)
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            return found


async def numbers_of(ledger: Ledger, jobs: Sequence[Job]) -> Counter[int]:
    whole = [await ledger.job(job.job_id) for job in jobs]
    return Counter(json.loads(job.payload or b"{}")["number"] for job in whole if job is not None)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
