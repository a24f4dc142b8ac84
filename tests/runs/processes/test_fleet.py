"""Many runs of several agents on several orchestrator processes, some of them killed.

What holds: of one agent one run at a time is authorised, its runs start in the order in which they came, every run ends, no
agent waits while others have their second turn, and what is published is what the ledger says.
"""

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.conftest import LOGIN, SEED
from tests.faults.fleet import Fleet, Nursery, Running, until, wait_ended
from tests.pace import Pace
from tests.runs.conftest import GATEWAY
from tests.runs.processes.stories import LOOK_S, PATIENCE_S, a_fleet
from tests.servers.postgres import PostgresServer
from trellis.app.instance import Instance
from trellis.documents import ids
from trellis.documents.publisher import published_version
from trellis.documents.run_documents import RunRequest
from trellis.engine.jobs import JobId, NewJob
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event
from trellis.engine.verify import verify
from trellis.runs.orchestrator import TYPE

LEASE_S, HEARTBEAT_S = 1.0, 0.25
RECOVERY_S = min(LEASE_S, 2 * HEARTBEAT_S) + 1.0
"""D33."""
NOISE_S = 0.3
"""What a machine adds that does nothing else: the sweep's and the claim's own processes wait for a core."""
BUSY_S = 1.5
"""What a machine may add that runs a whole suite."""
AUDIT_PAGE = 1_000

pytestmark = [pytest.mark.quiet]


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    server: PostgresServer = request.getfixturevalue("fault_server")
    return server.url(request.getfixturevalue("timed_database"), LOGIN)


async def submit_runs(ledger: Ledger, agents: int, each: int) -> dict[str, list[JobId]]:
    """All at once, agent after agent in turn, as if they had been asked for one after the other; by agent, in that order."""
    runs: dict[str, list[JobId]] = {f"agent-{agent:02}": [] for agent in range(agents)}
    jobs: list[NewJob] = []
    for number in range(each):
        for at, slug in enumerate(runs):
            run_id = JobId(f"run_2026-02-14_08{at:02}00_{number:06}")
            runs[slug].append(run_id)
            payload = RunRequest(slug, "manual", {}).to_bytes()
            jobs.append(
                NewJob(job_id=run_id, type=TYPE, lifecycle="run", payload=payload, concurrency_key=f"run:{slug}")
            )
    await ledger.submit(GATEWAY, jobs)
    return runs


async def kill_one(fleet: Fleet, rng: random.Random) -> None:
    """Kill a process in the middle of runs, and start another one."""

    def busy() -> Running | None:
        found = [worker for worker in fleet.alive if fleet.open_jobs(worker.pid)]
        return rng.choice(found) if found else None

    await fleet.kill(await until(busy, "a process drives a run"))
    fleet.start(1)


def driven(fleet: Fleet) -> int:
    return sum(line.op == "ended" for line in fleet.lines())


def span(events: Sequence[Event]) -> tuple[datetime, datetime]:
    """From the start of a run to its end."""
    (started,) = [event.ts for event in events if event.type == "run.started"]
    return started, events[-1].ts


async def check(instance: Instance, runs: dict[str, list[JobId]], *, at_once: int) -> None:
    ledger = instance.ledger
    report = await verify(ledger)
    assert report.ok, "\n".join(map(str, report.violations[:20]))
    assert not await ledger.keys_over()
    started: list[tuple[datetime, str]] = []
    for slug, mine in runs.items():
        spans = [span(await ledger.events(run_id)) for run_id in mine]
        for (_, ended), (begun, _) in pairwise(sorted(spans)):
            assert ended <= begun, f"{slug}: two runs at once"
        assert spans == sorted(spans), f"{slug}: a run began before one that came first"
        started += [(begun, slug) for begun, _ in spans]
        states = [job.state for job in [await ledger.job(run_id) for run_id in mine] if job is not None]
        assert states == ["completed"] * len(mine)
    first: dict[str, int] = {}
    for rank, (_, slug) in enumerate(sorted(started)):
        first.setdefault(slug, rank)
    late = {slug: rank for slug, rank in first.items() if rank >= len(runs) + at_once}
    assert not late, f"others had their second turn first: {late}"


async def check_published(instance: Instance, runs: dict[str, list[JobId]]) -> None:
    """What is published in the end is the ledger's last word on every run, with one audit record for each event and act."""
    events = len(await instance.ledger.acts())
    for slug, mine in runs.items():
        for run_id in mine:
            last = (await instance.ledger.events(run_id))[-1]
            async with asyncio.timeout(PATIENCE_S):
                await instance.published.reached(slug, run_id, last.version)
            found = await instance.objects.get(ids.status_key(slug, run_id))
            assert found is not None
            assert published_version(found.body) == last.version
            events += last.version
    records, after = 0, None
    end = time.monotonic() + PATIENCE_S
    while True:
        page = await instance.objects.list("audit/", after=after, limit=AUDIT_PAGE)
        records += sum(not item.key.startswith("audit/chain/") for item in page.items)
        if page.more:
            after = page.items[-1].key
        elif records >= events or time.monotonic() > end:
            break
        else:
            records, after = 0, None
            await asyncio.sleep(LOOK_S)
    assert records == events


async def run_fleet(
    url: str, folder: Path, nursery: Nursery, *, agents: int, each: int, processes: int, kills: int, at_once: int
) -> dict[str, float]:
    rng = random.Random(SEED)
    orders = {"lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S, "runs": at_once, "hold_s": 0.05, "sweep_s": 0.25}
    async with a_fleet(url, folder, nursery, **orders) as (instance, fleet):
        began = time.monotonic()
        runs = await submit_runs(instance.ledger, agents, each)
        fleet.start(processes)
        everything = [run_id for mine in runs.values() for run_id in mine]
        for number in range(kills):
            due = number * len(everything) // (kills + 1)
            await until(lambda due=due: driven(fleet) >= due, f"{due} runs were driven")
            await kill_one(fleet, rng)
        await wait_ended(instance.ledger, everything, fleet, patience_s=PATIENCE_S + len(everything))
        took_s = time.monotonic() - began
        await check(instance, runs, at_once=at_once)
        await check_published(instance, runs)
        assert set(await fleet.drain()) == {0}
        claims = defaultdict[tuple[JobId, int], int](int)
        for line in fleet.lines():
            claims[line.job, line.epoch] += (line.op, line.what) == ("claimed", "run")
        assert max(claims.values()) == 1, "an epoch was handed out twice"
        return {"runs": len(everything), "kills": kills, "claims": sum(claims.values()), "took_s": round(took_s, 1)}


@pytest.mark.requirement("PIPE-3", "D16")
async def test_twenty_runs_on_two_processes_that_are_killed(orchestrators: Nursery, tmp_path: Path, figures):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    figures(
        **await run_fleet(url, tmp_path, orchestrators, agents=5, each=4, processes=2, kills=2, at_once=4),
    )


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.requirement("PIPE-3", "D16")
async def test_four_processes_complete_two_hundred_runs_of_twenty_agents(
    orchestrators: Nursery, tmp_path: Path, ledger_url: str, figures
):
    figures(
        **await run_fleet(ledger_url, tmp_path, orchestrators, agents=20, each=10, processes=4, kills=12, at_once=8),
    )


async def claimed_again_s(fleet: Fleet, run_id: JobId, kills: int) -> list[float]:
    """Kill whoever drives the run, again and again; how long each time until one that stands by has claimed it."""
    seconds: list[float] = []
    for _ in range(kills):
        driver = await until(
            lambda: next((one for one in fleet.alive if fleet.open_jobs(one.pid)), None), "somebody drives the run"
        )
        claims = len(claims_of(fleet, run_id))
        at = time.monotonic()
        await fleet.kill(driver)
        await until(lambda claims=claims: len(claims_of(fleet, run_id)) > claims, "the run is claimed again")
        seconds.append(claims_of(fleet, run_id)[claims] - at)
        fleet.start(1)
    return seconds


def claims_of(fleet: Fleet, run_id: JobId) -> list[float]:
    return [line.at for line in fleet.lines() if (line.op, line.what, line.job) == ("claimed", "run", run_id)]


@pytest.mark.requirement("D33", "D16")
async def test_a_dead_orchestrators_run_is_claimed_again_soon(
    orchestrators: Nursery, tmp_path: Path, figures, pace: Pace
):
    await recovers(f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path, orchestrators, pace, 2, BUSY_S, figures)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.requirement("D33", "D16")
async def test_thirty_dead_orchestrators_runs_are_claimed_again_within_the_recovery_time(
    orchestrators: Nursery, tmp_path: Path, ledger_url: str, figures, pace: Pace
):
    await recovers(ledger_url, tmp_path, orchestrators, pace, 30, NOISE_S, figures)


async def recovers(url: str, folder: Path, nursery: Nursery, pace: Pace, kills: int, noise_s: float, figures) -> None:
    """Idle processes stand by, so that the time is the engine's own: from the kill to the next claim.

    Leases are given the time back in which nobody could renew them, so that a pause of the machine counts twice.
    """
    orders = {"lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S, "hold_s": 300.0, "sweep_s": 0.25}
    async with a_fleet(url, folder, nursery, **orders) as (instance, fleet):
        runs = await submit_runs(instance.ledger, 1, 1)
        fleet.start(3)
        seconds = await claimed_again_s(fleet, runs["agent-00"][0], kills)
        longer_s = LEASE_S if fleet.extended() else 0.0  # a lease began again, because nobody had swept for half of one
    figures(
        kills=kills,
        claimed_again_p50_s=round(statistics.median(seconds), 2),
        claimed_again_max_s=round(max(seconds), 2),
        bound_s=RECOVERY_S,
        noise_s=noise_s,
    )
    assert max(seconds) <= RECOVERY_S + noise_s + 2 * pace.stood_still_s + longer_s
