"""Runs on a real S3 server whose answers get lost, late or wrong.

What holds: the run completes, or it fails with UPSTREAM_UNAVAILABLE; in both cases what is published is whole and is what the
ledger says, no proposal and no commit is there twice, and when the store is back everything that was not published is.
A run without a fault lists the requests; then each of them fails once, in each way.
"""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import SEED
from tests.faults.fleet import Nursery
from tests.runs.processes.run_process import Orders, Watch, watched
from tests.runs.processes.stories import LOOK_S, PATIENCE_S, VIOLIN, Story, a_story, make_small
from tests.servers.seaweedfs import SeaweedServer
from tests.storage.conftest import CREDENTIALS
from tests.storage.proxy import Fault, Kind, Proxy, proxied
from trellis.agents.garden import plant
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.open import open_objects

AT_ONCE = 6
SHORT_S = 1.0
"""How long the store waits for an answer that will not come."""
ORDERS = {
    "lease_s": 20.0,
    "heartbeat_s": 5.0,
    "follow_s": 5.0,
    "retry_delays_s": (0.1, 0.2, 0.4),
    "upstream_wait_s": 20.0,
}
WRITE_FAULTS = (Kind.ANSWER, Kind.SILENT, Kind.STORED_ANSWER, Kind.STORED_SILENT, Kind.STORED_RESET)
READ_FAULTS = (Kind.ANSWER, Kind.SILENT, Kind.STORED_RESET, Kind.CUT)
PROBABILITIES = (0.04, 0.1, 0.2, 0.4)
NAMES = (
    (re.compile(r"run_\d{4}-\d{2}-\d{2}_\d{6}_\w{6}"), "<run>"),
    (re.compile(r"prop_\d{4}-\d{2}-\d{2}_\w{12}"), "<proposal>"),
    (re.compile(r"audit/\d{8}"), "audit/<day>"),
    (re.compile(r"^.*?/faults-\d+/"), ""),
)


_numbers = count(1)


def named(path: str) -> str:
    """A path without what differs between two runs."""
    for pattern, name in NAMES:
        path = pattern.sub(name, path)
    return path


@dataclass
class Aimed(Fault):
    """Happens to the nth request of its name, once."""

    nth: int = 1
    met: int = 0

    def hits(self, method: str, path: str) -> bool:
        if (method, named(path)) != (self.method, self.path):
            return False
        self.met += 1
        return self.met == self.nth


@dataclass
class Anywhere(Fault):
    """Happens to any request, with a probability."""

    rng: random.Random = field(default_factory=random.Random)
    probability: float = 0.0

    def hits(self, method: str, path: str) -> bool:
        if self.rng.random() >= self.probability or method not in {"GET", "PUT", "HEAD"}:
            return False
        self.kind = self.rng.choice(WRITE_FAULTS if method == "PUT" else READ_FAULTS[: 3 if method == "HEAD" else 4])
        return True


@dataclass(kw_only=True)
class Bucket(Story):
    """A story whose services see the object store through a proxy; the test looks past it."""

    proxy: Proxy
    serving: asyncio.Task[None]

    async def outcome(self, *, heal: bool = False) -> dict[str, Any]:
        """When everything is published, the run's status; `heal`: the store is well again when the run has ended."""
        async with asyncio.timeout(PATIENCE_S):
            while heal and ((job := await self.ledger.job(self.run_id)) is None or job.place != "ended"):
                await self._look_again()
            if heal:
                self.proxy.faults.clear()
            while not await self.is_over():
                await self._look_again()
        found = await self.instance.published.status(VIOLIN, self.run_id)
        assert found is not None
        return found

    async def _look_again(self) -> None:
        assert not self.serving.done(), self.serving
        await asyncio.sleep(LOOK_S)


@dataclass(frozen=True)
class Place:
    """Where buckets are made."""

    template: Path
    folder: Path
    nursery: Nursery
    server: SeaweedServer

    @asynccontextmanager
    async def bucket(self, faults: Sequence[Fault] = (), **orders: Any) -> AsyncGenerator[Bucket]:
        """A run that was asked for, on an instance that serves in this process behind a proxy of its own."""
        name = f"faults-{next(_numbers)}"
        direct = await open_objects(self.server.url(name), credentials=CREDENTIALS)
        await plant(direct)
        await make_small(direct)
        async with (
            proxied(self.server.endpoint) as proxy,
            a_story(self.template, self.folder / name, self.nursery) as story,
        ):
            through = await open_objects(
                self.server.url(name, endpoint=proxy.endpoint), credentials=CREDENTIALS, timeout_s=SHORT_S
            )
            told = Orders(
                url=story.fleet.url,
                trace=str(story.fleet.trace),
                name=name,
                objects="",
                memory="",
                **{**ORDERS, **orders},
            )
            behind = watched(replace(story.instance, objects=through), told, Watch(told))
            looking, stop = replace(story.instance, objects=direct), asyncio.Event()
            proxy.faults += faults
            serving = asyncio.create_task(behind.serve(stop))
            bucket = Bucket(fleet=story.fleet, instance=looking, proxy=proxy, serving=serving)
            try:
                await bucket.begin()
                yield bucket
            finally:
                stop.set()
                await serving


@pytest.fixture
def place(template: Path, tmp_path: Path, orchestrators: Nursery, seaweedfs: SeaweedServer) -> Place:
    return Place(template, tmp_path, orchestrators, seaweedfs)


@dataclass(frozen=True)
class Golden:
    """The requests of a run without a fault, by name, and what it left."""

    requests: Counter[tuple[str, str]]
    form: dict[str, bytes]


async def undisturbed(place: Place) -> Golden:
    async with place.bucket() as bucket:
        assert (await bucket.outcome())["status"] == "completed"
        requests = Counter((method, named(path)) for method, path in bucket.proxy.requests)
        return Golden(requests, await bucket.check(None))


def aims(golden: Golden) -> list[Aimed]:
    """Every request of an undisturbed run, failing in every way, but how often a status is looked for is up to time."""
    return [
        Aimed(kind, method, path, status=500 if kind is Kind.STORED_ANSWER else 503, nth=nth)
        for (method, path), times in golden.requests.items()
        for nth in range(1, (1 if method == "GET" and path.endswith("status.json") else times) + 1)
        for kind in (WRITE_FAULTS if method == "PUT" else READ_FAULTS if method == "GET" else READ_FAULTS[:3])
    ]


async def with_fault(place: Place, golden: Golden, aim: Aimed) -> str:
    """What went wrong, if anything did; one fault is always survived."""
    about = f"{aim.kind.name} at {aim.method} {aim.path} number {aim.nth}"
    try:
        async with place.bucket([aim]) as bucket:
            status = await bucket.outcome()
            assert status["status"] == "completed", status["error"]
            await bucket.check(golden.form)
    except (AssertionError, TimeoutError) as error:
        return f"{about}: {error!r}"
    return ""


async def all_survived(place: Place, golden: Golden, chosen: Sequence[Aimed]) -> None:
    """Nearly all of the requests are made in every run; how many statuses are skipped is up to time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(aim: Aimed) -> str:
        async with slots:
            return await with_fault(place, golden, aim)

    problems = [problem for problem in await asyncio.gather(*map(one, chosen)) if problem]
    assert not problems, f"{len(problems)} of {len(chosen)}:\n" + "\n".join(text[:2_000] for text in problems[:5])
    never = [f"{aim.method} {aim.path} {aim.nth}" for aim in chosen if aim.met < aim.nth]
    assert len(never) <= 1 + len(chosen) // 20, never


@pytest.mark.requirement("PIPE-12", "PIPE-11", "D14")
async def test_a_request_may_fail_once_in_any_way(place: Place, figures):
    golden = await undisturbed(place)
    chosen: dict[Kind, Aimed] = {}
    every = aims(golden)
    random.Random(SEED).shuffle(every)
    for aim in every:
        chosen.setdefault(aim.kind, aim)
    await all_survived(place, golden, list(chosen.values()))
    figures(requests=golden.requests.total(), faults=len(chosen), of=len(every))


@pytest.mark.requirement("PIPE-12", "PIPE-11", "D14")
@pytest.mark.prove
@pytest.mark.timeout(1800)
async def test_every_request_may_fail_once_in_any_way(place: Place, figures):
    golden = await undisturbed(place)
    every = aims(golden)
    await all_survived(place, golden, every)
    figures(requests=golden.requests.total(), faults=len(every))


async def shaken(place: Place, golden: Golden, seed: int, probability: float) -> str:
    """How a run ended whose every request could fail; what it left is right in any case."""
    storm = Anywhere(Kind.ANSWER, "", rng=random.Random(seed), probability=probability)
    async with place.bucket([storm]) as bucket:
        status = await bucket.outcome(heal=True)
        if status["status"] == "completed":
            await bucket.check(golden.form)
        else:
            assert status["error"].startswith("UPSTREAM_UNAVAILABLE: "), status["error"]
            await bucket.check(None)
        return status["status"]


@pytest.mark.requirement("PIPE-12", "PIPE-11", "RUN-7", "D14")
@pytest.mark.parametrize("runs", [2, pytest.param(60, marks=[pytest.mark.prove, pytest.mark.timeout(1800)])])
async def test_a_run_with_faults_all_along_completes_or_says_that_the_store_failed(place: Place, runs: int, figures):
    golden, slots = await undisturbed(place), asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> str:
        async with slots:
            return await shaken(place, golden, SEED + number, PROBABILITIES[number % len(PROBABILITIES)])

    ended = Counter(await asyncio.gather(*map(one, range(runs))))
    figures(runs=runs, **ended)


@pytest.mark.requirement("PIPE-12", "PIPE-11", "RUN-7", "D14")
async def test_a_store_that_is_gone_for_longer_than_runs_wait_fails_the_run_and_shows_it_when_it_is_back(place: Place):
    gone = Fault(Kind.ANSWER, "PUT", "steps/02-execute-agent.json", times=1_000)
    async with place.bucket([gone], upstream_wait_s=0.5, wait_noted_s=0.1) as bucket:
        status = await bucket.outcome(heal=True)
        assert (status["status"], status["steps_completed"]) == ("failed", 2)
        assert status["error"].startswith("UPSTREAM_UNAVAILABLE: steps/02-execute-agent.json is not published yet")
        left = await bucket.left()
        await bucket.check(None)
        folder = {key.partition(f"{bucket.run_id}/")[2] for key in left.files}
        steps = {"steps/01-load-context.json", "steps/02-execute-agent.json"}
        assert folder == {"status.json", "manifest.json", *steps}
        manifest = json.loads(next(body for key, body in left.files.items() if key.endswith("manifest.json")))
        digests = {sha256(body) for key, body in left.files.items() if "/steps/" in key}
        assert {step["sha256"] for step in manifest["steps"]} == digests
