"""Jobs over a bus that breaks: who asks for them, what is broken meanwhile, and everything that must hold afterwards."""

import asyncio
import gc
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
from cap.client import submit_job

from tests.bus.chaos.bus_process import (
    AGAIN,
    AGENTS,
    ONCE,
    OURS,
    PLAIN,
    PLANE,
    SDK_AGENT,
    SDK_WORKER,
    Orders,
    pb,
)
from tests.faults.fleet import Fleet, Nursery, Running
from tests.servers.nats import NatsServer, running_nats
from tests.servers.nats_proxy import NatsProxy, Weather, nats_proxied
from trellis.app.wiring import SystemClock, new_id
from trellis.bus.messages import RESULT, JobResult
from trellis.bus.port import ReceivedPacket
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.topics import Topics
from trellis.bus.wire import BusOptions, open_bus
from trellis.engine.jobs import Actor, JobId, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job, JobHistory, JobPlace
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

GATEWAY = Actor(role=Role.GATEWAY, name="test")
LEASE_S = 12.0


def topics(lease_s: float) -> dict[str, Any]:
    """The lease of our topics is longer than the bus is ever away: what has begun must not be begun again.

    The SDK's workers say nothing while they work: what is lost there is found by a short lease, and done again.
    """
    sdk = {"lease_s": 2, "max_attempts": 50, "backoff_s": 0.1, "idempotent": True}
    ours = {"lease_s": lease_s, "max_attempts": 20, "backoff_s": 0.1}
    return {ONCE: ours, AGAIN: {**ours, "idempotent": True}, PLAIN: sdk, AGENTS: sdk}


SHARES = (ONCE, ONCE, ONCE, AGAIN, AGAIN, PLAIN, AGENTS, AGENTS)
"""Of eight jobs in a row."""
FOUL = Weather(lost=0.04, repeated=0.08, late=0.08, swapped=0.08, late_s=(0.05, 16.0))
"""Some messages come later than any lease is long."""
KINDS = ("lost", "repeated", "late", "swapped", "cut")
CLIENT = "client-1"
ENDS = frozenset({"job_succeeded", "job_failed", "job_cancelled", "job_denied", "job_timed_out"})
ASK_AGAIN_S = 1.0
PATIENCE_S = 240.0


def of_ours(topic: str) -> bool:
    return topic in {ONCE, AGAIN}


# --- who asks --------------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """Asks over the bus with the SDK's client, and hears how its jobs ended, at once and durably, all through the same bad network."""

    connection: Any
    heard: dict[str, list[JobResult]] = field(default_factory=dict[str, list[JobResult]])
    asked: Counter[str] = field(default_factory=Counter[str])

    async def submit(self, request: JobRequest) -> None:
        """Ask, or ask again: the same id and the same words."""
        self.asked[request.job_id] += 1
        said = pb.JobRequest(job_id=request.job_id, topic=request.topic, context_ptr=request.context_ptr)
        await submit_job(self.connection, said, request.job_id, CLIENT)

    async def hear(self, received: ReceivedPacket) -> None:
        said = received.packet.body
        if isinstance(said, JobResult) and received.packet.sender_id == "trellis":
            self.heard.setdefault(said.job_id, []).append(said)


@asynccontextmanager
async def a_client(url: str) -> AsyncGenerator[Client]:
    options = BusOptions(url=url, sender_id=CLIENT)
    bus = await open_bus(options, clock=SystemClock(), now=lambda: datetime.now(UTC), new_id=new_id)
    connection = await nats.connect(
        url, max_reconnect_attempts=-1, reconnect_time_wait=0.2, error_cb=_nothing, allow_reconnect=True
    )
    client = Client(connection)
    await bus.listen(RESULT, client.hear)
    await bus.listen(RESULT, client.hear, group=CLIENT, durable=True)
    try:
        yield client
    finally:
        await connection.close()
        await bus.close()
        gc.collect()  # the client library leaves sockets behind whose connection broke while it was made


async def _nothing(_: Exception) -> None:
    """A connection that breaks is what this is about."""


# --- the storm -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Storm:
    """Everything of one run."""

    ledger: Ledger
    server: NatsServer
    proxy: NatsProxy
    fleet: Fleet
    client: Client
    rng: random.Random
    topics: dict[str, Any]
    round_s: float
    """Between two faults, on average."""
    planes: list[Running] = field(default_factory=list[Running])
    done: Counter[str] = field(default_factory=Counter[str])
    requests: dict[str, JobRequest] = field(default_factory=dict[str, JobRequest])
    took: dict[str, float] = field(default_factory=dict[str, float])
    began_at: float = field(default_factory=time.monotonic)

    # --- what happens ----------------------------------------------------------------------------------------------

    async def start(self, **ours: Any) -> None:
        """Two control planes; of our workers three, of the SDK's two of each kind."""
        self.planes = self.fleet.start(2, part=PLANE)
        workers = self.fleet.start(3, part=OURS, hold_s=0.02, **ours)
        workers += self.fleet.start(2, part=SDK_WORKER)
        workers += self.fleet.start(2, part=SDK_AGENT, hold_s=0.02, parallel=4)
        await self.fleet.until_opened([*self.planes, *workers])

    async def rage(self, jobs: int, faults: Sequence[str]) -> None:
        """Ask for the jobs while one fault after another happens, in bad weather; then it is calm."""
        asking = asyncio.create_task(self._ask(_requests(jobs, self.rng), spread_s=len(faults) * self.round_s))
        self.proxy.weather = FOUL
        for fault in faults:
            await SystemClock().sleep(self.rng.uniform(0.5, 1.5) * self.round_s)
            self.done[fault] += 1
            await getattr(self, f"_{fault}")()
        await asking
        self.proxy.calm()
        self.took["calm"] = time.monotonic() - self.began_at

    async def _ask(self, requests: Iterator[JobRequest], spread_s: float) -> None:
        """Every other one over the bus; one that is not in the ledger after a while is asked for again."""
        wanted = list(requests)
        for number, request in enumerate(wanted):
            self.requests[request.job_id] = request
            if number % 2:
                await self.client.submit(request)
            else:
                job = new_bus_job(request, Topics.model_validate({"topics": self.topics}), trace_id=request.job_id)
                (answer,) = await self.ledger.submit(GATEWAY, [job])
                assert isinstance(answer, Submitted)
            await SystemClock().sleep(spread_s / len(wanted))
        missing = wanted
        while missing := [one for one in missing if await self.ledger.job(JobId(one.job_id)) is None]:
            for request in missing:
                await self.client.submit(request)
            await SystemClock().sleep(ASK_AGAIN_S)

    async def _restart(self) -> None:
        """The server dies and comes back with what it has kept."""
        await asyncio.to_thread(self.server.kill)
        await self.proxy.close()
        await SystemClock().sleep(self.rng.random())
        await asyncio.to_thread(self.server.restart)
        await self.proxy.open()

    async def _erase(self) -> None:
        """The server dies and comes back with nothing."""
        await asyncio.to_thread(self.server.kill)
        await self.proxy.close()
        await asyncio.to_thread(self.server.erase)
        await asyncio.to_thread(self.server.restart)
        await self.proxy.open()

    async def _cut(self) -> None:
        self.proxy.cut(4)

    async def _kill_plane(self) -> None:
        """Kill -9 of a control plane; another comes."""
        plane = self.planes.pop(self.rng.randrange(len(self.planes)))
        await self.fleet.kill(plane)
        self.planes += self.fleet.start(part=PLANE)

    async def settle(self) -> None:
        """Until every job has ended and the client has heard of each; it asks again for what it has not heard of."""
        end = time.monotonic() + PATIENCE_S
        while await open_jobs(self.ledger) or await self._open():
            dead = [one.name for one in self.fleet.alive if not one.is_alive]
            assert not dead, f"{dead} ended by themselves\n{self.fleet.last_words()}"
            assert time.monotonic() < end, f"have not ended: {await self._stuck(await self._open())}"
            await SystemClock().sleep(0.2)
        self.took["ended"] = time.monotonic() - self.began_at
        while unheard := [job_id for job_id in self.requests if job_id not in self.client.heard]:
            assert time.monotonic() < end, f"{len(unheard)} results were never heard: {unheard[:5]}"
            await SystemClock().sleep(ASK_AGAIN_S)
            for job_id in unheard:
                if job_id not in self.client.heard:
                    self.done["asked_for_result"] += 1
                    await self.client.submit(self.requests[job_id])

    async def _stuck(self, waiting: Sequence[str]) -> str:
        """What is known of the first of them, for whoever has to find out why."""
        first = await self.ledger.events(JobId(waiting[0].split()[0]))
        told = [f"{event.ts} {event.type} {event.epoch} {event.actor} {event.data}" for event in first]
        return "\n".join([f"{len(waiting)}: {waiting[:40]}", *told, self.fleet.last_words()])

    async def _open(self) -> list[str]:
        jobs = [history.job async for history in self.ledger.histories()]
        known = {job.job_id for job in jobs}
        missing = [job_id for job_id in self.requests if job_id not in known]
        waiting = [f"{job.job_id} {job.type} {job.state}" for job in jobs if job.place is not JobPlace.ENDED]
        # The end of a job may be known a moment before its linked retry is there.
        retried = {job.parent_id for job in jobs}
        due = [job.job_id for job in jobs if job.state == "TIMEOUT" and job.type == ONCE and job.job_id not in retried]
        return [*missing, *waiting, *due]

    # --- what must hold --------------------------------------------------------------------------------------------

    async def check(self) -> dict[str, object]:
        """All of it; the figures."""
        assert not self.fleet.said("pass_failed"), self.fleet.last_words()
        met = [what for what in KINDS if not self.proxy.met[what]]
        assert not met, f"this proves nothing: no message was {met}"
        report = await verify(self.ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))
        histories = {history.job.job_id: history async for history in self.ledger.histories()}
        assert set(self.requests) <= set(histories), "lost"
        for history in histories.values():
            ends = [event.type for event in history.events if event.type in ENDS]
            assert len(ends) == 1, f"{history.job.job_id} ended {ends}"
        effects = Counter(line.job for line in self.fleet.lines() if line.op == "effect")
        self._check_effects(histories, effects)
        self._check_heard(histories)
        refused = await self._refused(histories)
        reruns = {topic: _reruns(histories, effects, topic) for topic in self.topics}
        return {
            "jobs": len(self.requests),
            "jobs_with_retries": len(histories),
            "dispatched": sum(_count(history.events, "job_dispatched") for history in histories.values()),
            "leases_lost": sum(_count(history.events, "job_lease_expired") for history in histories.values()),
            "timed_out": sum(history.job.state == "TIMEOUT" for history in histories.values()),
            **{f"messages_{what}": number for what, number in sorted(self.proxy.met.items())},
            **{f"faults_{what}": number for what, number in sorted(self.done.items())},
            "orders_not_begun": self.fleet.said("not_begun"),
            "asked_again": sum(number - 1 for number in self.client.asked.values()),
            **{f"refused_{kind}": number for kind, number in sorted(refused.items())},
            **{f"run_again_{topic}": number for topic, number in reruns.items()},
            **{f"{what}_after_s": round(after_s, 1) for what, after_s in self.took.items()},
            "took_s": round(time.monotonic() - self.began_at, 1),
        }

    def _check_effects(self, histories: dict[JobId, JobHistory], effects: Counter[JobId]) -> None:
        """No job of ours was done twice, neither by itself nor by its retry; whatever succeeded was done."""
        wire_ids = Counter(line.what for line in self.fleet.lines() if line.op == "effect")
        started = {wire_id for history in histories.values() for wire_id in _started(history)}
        early = {one for one in wire_ids if one not in started and of_ours(histories[_job_of(one)].job.type)}
        assert not early, f"begun before the ledger said so: {early}"
        chains: Counter[JobId] = Counter()
        for job_id, history in histories.items():
            chains[_root(history.job, histories)] += effects[job_id]
            assert history.job.state != "SUCCEEDED" or effects[job_id], f"{job_id} succeeded and nobody did it"
            if of_ours(history.job.type):
                assert effects[job_id] <= 1, f"{job_id} was done {effects[job_id]} times\n{_told(history)}"
        twice = [
            wire_id
            for wire_id, number in wire_ids.items()
            if number > 1 and of_ours(histories[_job_of(wire_id)].job.type)
        ]
        assert not twice, f"done twice under one wire id: {twice}"
        again = {
            root: number for root, number in chains.items() if number > 1 and of_ours(histories[JobId(root)].job.type)
        }
        assert not again, f"done again by a retry: {again}"
        succeeded = {
            _root(history.job, histories) for history in histories.values() if history.job.state == "SUCCEEDED"
        }
        assert succeeded == set(self.requests), f"without success: {set(self.requests) - succeeded}"

    def _check_heard(self, histories: dict[JobId, JobHistory]) -> None:
        for job_id, results in self.client.heard.items():
            assert len(set(results)) == 1, f"{job_id}: {results}"
            assert results[0].status.name == histories[JobId(job_id)].job.state

    async def _refused(self, histories: dict[JobId, JobHistory]) -> Counter[str]:
        found: Counter[str] = Counter()
        for job_id in histories:
            for signal in await self.ledger.signals(job_id, limit=100):
                if signal.type == "job_result_refused":
                    found[json.loads(signal.data or b"{}")["kind"]] += 1
        return found


async def open_jobs(ledger: Ledger) -> int:
    """How many have not ended."""
    return sum(one.ready + one.scheduled + one.blocked + one.held for one in await ledger.queues())


def _requests(number: int, rng: random.Random) -> Iterator[JobRequest]:
    topics = [SHARES[one % len(SHARES)] for one in range(number)]
    rng.shuffle(topics)
    for one, topic in enumerate(topics):
        yield JobRequest.checked({"job_id": f"storm-{one}", "topic": topic, "context_ptr": f"redis://ctx:storm-{one}"})


def _root(job: Job, histories: dict[JobId, JobHistory]) -> JobId:
    """The job that was asked for, of which this one is a retry, or itself."""
    while job.parent_id is not None:
        job = histories[job.parent_id].job
    return job.job_id


def _job_of(wire_id: str) -> JobId:
    return JobId(wire_id.rpartition("@")[0])


def _started(history: JobHistory) -> list[str]:
    """The wire ids under which the ledger let it begin after a worker had asked."""
    started = [event for event in history.events if event.type == "job_started"]
    return [f"{event.job_id}@{event.epoch}" for event in started if "token" in json.loads(event.data or b"{}")]


def _count(events: Sequence[Event], type_: str) -> int:
    return sum(event.type == type_ for event in events)


def _reruns(histories: dict[JobId, JobHistory], effects: Counter[JobId], topic: str) -> int:
    """Effects beyond the first, of jobs of one topic."""
    done = [effects[job_id] for job_id, history in histories.items() if history.job.type == topic]
    return sum(max(0, number - 1) for number in done)


def _told(history: JobHistory) -> str:
    return "\n".join(f"{event.ts} {event.type} {event.epoch} {event.actor} {event.data}" for event in history.events)


@asynccontextmanager
async def a_storm(
    url: str, folder: Path, nursery: Nursery, *, seed: int, lease_s: float = LEASE_S, round_s: float = 1.25
) -> AsyncGenerator[Storm]:
    """Everything that is needed, with nobody started yet; it all ends with the block."""
    with running_nats(jetstream=True) as server:
        async with nats_proxied(server.port, seed=seed) as proxy:
            ledger = await open_ledger(url)
            try:
                known = topics(lease_s)
                orders = {"bus": proxy.address, "topics": known}
                with Fleet(nursery, url, folder, orders, Orders) as fleet:
                    async with a_client(proxy.address) as client:
                        yield Storm(
                            ledger=ledger,
                            server=server,
                            proxy=proxy,
                            fleet=fleet,
                            client=client,
                            rng=random.Random(seed),
                            topics=known,
                            round_s=round_s,
                        )
            finally:
                await ledger.close()
