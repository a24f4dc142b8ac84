"""Three schedulers and three reconcilers at once, each a process: nothing is handed out twice, and what follows from an end happens once."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.bus.chaos.bus_process import ONCE, OURS, PLANE, SILENT, Orders
from tests.bus.chaos.storm import open_jobs
from tests.faults.fleet import Fleet, Nursery, Running, until
from tests.servers.nats import running_nats
from trellis.app.wiring import SystemClock
from trellis.bus.messages import JobOrder
from trellis.bus.port import ReceivedPacket
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.services import BusRole
from trellis.bus.topics import Topics
from trellis.engine.jobs import Actor, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobHistory, JobPlace
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

pytestmark = pytest.mark.quiet

LEASE_S = 60
"""Longer than the work takes. Who waits longer still sees a lost order as the lease that ran out."""
TOPICS: dict[str, Any] = {
    ONCE: {"lease_s": LEASE_S},
    SILENT: {"lease_s": 1, "max_attempts": 2, "backoff_s": 0.1},
}
GATEWAY = Actor(role=Role.GATEWAY, name="test")
SILENT_SHARE = 25
"""One job in so many goes where nobody answers."""
DONE = ["job_accepted", "job_scheduled", "job_dispatched", "job_started", "job_succeeded"]
BATCH = 500
PATIENT_S = 15.0
"""How long a worker waits for an answer: on a busy machine nobody shall give up what is only slow."""
LOOK_S = 0.3


@dataclass
class Wiretap:
    """Hears every order that is sent to anybody."""

    orders: Counter[str] = field(default_factory=Counter[str])

    async def hear(self, received: ReceivedPacket) -> None:
        assert isinstance(received.packet.body, JobOrder)
        self.orders[received.packet.body.request.job_id] += 1


@dataclass(kw_only=True)
class Crowd:
    """The fleet on its ledger and its bus."""

    ledger: Ledger
    fleet: Fleet
    tap: Wiretap

    async def begin(self, jobs: int, **of_schedulers: Any) -> tuple[list[Running], list[Running]]:
        """Ask for the jobs and start everybody; the schedulers and the reconcilers.

        The workers are there first. The tap listens to their topics, so a scheduler would send them orders without a
        worker, too, and each of those would wait for the end of its lease.
        """
        await self._submit(jobs)
        await self.fleet.until_opened(self.fleet.start(2, part=OURS, parallel=16, ask_s=PATIENT_S))
        schedulers = self.fleet.start(3, part=PLANE, roles=(BusRole.SCHEDULER.value,), **of_schedulers)
        reconcilers = self.fleet.start(3, part=PLANE, roles=(BusRole.RECONCILER.value,))
        return schedulers, reconcilers

    async def run(self, jobs: int, *, patience_s: float) -> dict[str, object]:
        """All of them, from the request to the end; the figures."""
        schedulers, reconcilers = await self.begin(jobs)
        began = time.monotonic()
        await self._until_ended(jobs, began + patience_s)
        took_s = time.monotonic() - began
        histories = {history.job.job_id: history async for history in self.ledger.histories()}
        self._check(jobs, histories)
        self._check_shared({one.name for one in schedulers}, histories)
        assert not self.fleet.said("pass_failed"), self.fleet.last_words()
        report = await verify(self.ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))
        return {
            "jobs": jobs,
            "jobs_with_retries": len(histories),
            "orders": self.tap.orders.total(),
            **{f"by_{name}": number for name, number in sorted(_by(histories, "job_dispatched").items())},
            **{f"taken_back_by_{name}": number for name, number in sorted(_by(histories, "job_timed_out").items())},
            "reconcilers": len(reconcilers),
            "took_s": round(took_s, 1),
        }

    async def _submit(self, jobs: int) -> None:
        topics = Topics.model_validate({"topics": TOPICS})
        made = [
            new_bus_job(
                JobRequest.checked({"job_id": f"crowd-{one}", "topic": SILENT if one % SILENT_SHARE == 0 else ONCE}),
                topics,
                trace_id=f"crowd-{one}",
            )
            for one in range(jobs)
        ]
        for start in range(0, jobs, BATCH):
            await self.ledger.submit(GATEWAY, made[start : start + BATCH])

    async def _until_ended(self, jobs: int, end: float) -> None:
        """Until all are there, with their retries, and nothing is open any more."""
        last = JobId(f"crowd-{(jobs - 1) // SILENT_SHARE * SILENT_SHARE}.r1")
        while await open_jobs(self.ledger) or await self.ledger.job(last) is None:
            assert time.monotonic() < end, f"{await self._waiting()}\n{self.fleet.last_words()}"
            await SystemClock().sleep(LOOK_S)

    async def _waiting(self) -> str:
        """Which jobs are open, by the events that they have; for each an example with its times."""
        by_events: dict[tuple[str, ...], list[JobHistory]] = {}
        async for history in self.ledger.histories():
            if history.job.place is not JobPlace.ENDED:
                by_events.setdefault(tuple(event.type for event in history.events), []).append(history)
        return "\n".join(
            f"{len(histories)} jobs are open after {', '.join(events)}; {histories[0].job.job_id}: "
            + ", ".join(f"{event.ts:%T} by {event.actor}" for event in histories[0].events)
            for events, histories in by_events.items()
        )

    def check_sent_once(self) -> None:
        """Of what was sent until now."""
        twice = [wire_id for wire_id, number in self.tap.orders.items() if number > 1]
        assert not twice, f"sent twice: {twice}"

    def _check(self, jobs: int, histories: dict[JobId, JobHistory]) -> None:
        silent = {JobId(f"crowd-{one}") for one in range(0, jobs, SILENT_SHARE)}
        retries = {JobId(f"{job_id}.r1"): job_id for job_id in silent}
        assert set(histories) == {JobId(f"crowd-{one}") for one in range(jobs)} | set(retries)
        for job_id, history in histories.items():
            told = [event.type for event in history.events]
            if job_id in silent or job_id in retries:
                assert Counter(told)["job_dispatched"] == Counter(told)["job_timed_out"] == 1, f"{job_id}: {told}"
                assert told[-1] == "job_timed_out"
            else:
                assert told == DONE, f"{job_id}: {told}"
            assert history.job.attempt == 0
        assert {retry: histories[retry].job.parent_id for retry in retries} == retries
        effects = Counter(line.job for line in self.fleet.lines() if line.op == "effect")
        self.check_sent_once()
        assert effects == Counter(set(histories) - silent - set(retries)), "every job is done once"
        assert self.tap.orders == Counter(f"{job_id}@1" for job_id in histories), "every order is sent once"

    def _check_shared(self, schedulers: set[str], histories: dict[JobId, JobHistory]) -> None:
        """A proof with one scheduler that does everything would be none."""
        assert set(_by(histories, "job_dispatched")) == schedulers


def _by(histories: dict[JobId, JobHistory], type_: str) -> Counter[str]:
    """Who made the events of this type."""
    return Counter(event.actor for history in histories.values() for event in history.events if event.type == type_)


@asynccontextmanager
async def a_crowd(url: str, folder: Path, nursery: Nursery) -> AsyncGenerator[Crowd]:
    """Nobody has begun yet; everybody ends with the block."""
    with running_nats(jetstream=True) as server:
        orders = {"bus": server.url, "topics": TOPICS}
        ledger = await open_ledger(url)
        listener = Orders(url=url, trace="", name="tap", part="", bus=server.url)
        bus = await listener.open_bus("tap")
        tap = Wiretap()
        try:
            for subject in ("job.>", "worker.*.jobs"):
                await bus.listen(subject, tap.hear)
            with Fleet(nursery, url, folder, orders, Orders) as fleet:
                yield Crowd(ledger=ledger, fleet=fleet, tap=tap)
        finally:
            await bus.close()
            await ledger.close()


@pytest.mark.requirement("BUS-1", "BUS-3", "BUS-5", "BUS-7", "D29")
@pytest.mark.parametrize("ledger_url", ["postgres"], indirect=True)
async def test_three_schedulers_and_three_reconcilers_do_everything_once(
    ledger_url: str, tmp_path: Path, bus_nursery: Nursery, figures: Callable[..., None]
):
    async with a_crowd(ledger_url, tmp_path, bus_nursery) as crowd:
        figures(**await crowd.run(300, patience_s=LEASE_S + 40))


@pytest.mark.parametrize("ledger_url", ["postgres"], indirect=True)
async def test_schedulers_that_hand_out_what_another_has_are_noticed(
    ledger_url: str, tmp_path: Path, bus_nursery: Nursery
):
    async with a_crowd(ledger_url, tmp_path, bus_nursery) as crowd:
        await crowd.begin(150, minds_others=False)
        await until(lambda: crowd.tap.orders.total() >= 150, "as many orders as there are jobs are sent")
        with pytest.raises(AssertionError, match=r"sent twice: .*crowd-"):
            crowd.check_sent_once()


@pytest.mark.requirement("BUS-1", "BUS-3", "BUS-5", "BUS-7", "D29")
@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ledger_url", ["sqlite", "postgres"], indirect=True)
async def test_three_schedulers_and_three_reconcilers_do_ten_thousand_jobs_once(
    ledger_url: str, tmp_path: Path, bus_nursery: Nursery, figures: Callable[..., None]
):
    async with a_crowd(ledger_url, tmp_path, bus_nursery) as crowd:
        figures(**await crowd.run(10_000, patience_s=600))
