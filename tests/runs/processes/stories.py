"""One run from request to its end, by processes that may be killed, and everything that must hold afterwards."""

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.conftest import SEED
from tests.faults.fleet import Fleet, Line, Nursery
from tests.runs.processes.normal import Left, left_by, normal
from tests.runs.processes.run_process import Orders
from trellis.agents.catalog import agent_key
from trellis.app.instance import Instance, open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import SystemClock
from trellis.documents import audit, ids
from trellis.documents.publisher import PublishedRuns
from trellis.engine.jobs import Actor, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import SweepOptions
from trellis.engine.service import Sweeper, serve
from trellis.engine.verify import verify
from trellis.lifecycles import Role
from trellis.runs.orchestration import TriggerKind
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.verification import verify as verify_memory
from trellis.storage.objects.store import ObjectStore

VIOLIN = "archivist-violin"
KEPT_SOURCES = ("02-instruments.md", "04-repairs.md")
KEPT_QUESTIONS = ("- Was the top of TS-03 taken off and a new bass bar fitted?",)
SWEEP_S = 0.2
LOOK_S = 0.05
PAID = ("keep model/", "keep tool/", "keep proposals ")
"""What a step keeps in the middle of its work, so that it is not made twice; its own result is kept at the first time it is done."""
PATIENCE_S = 60.0


async def make_template(folder: Path, *, small: bool = False) -> Path:
    """An instance with the garden planted; every story begins with a copy of it."""
    url = f"sqlite:///{folder / 'ledger.db'}"
    async with open_instance(Settings.model_validate({}), url) as instance:
        await instance.plant()
        if small:
            await make_small(instance.objects)
    return folder


async def make_small(objects: ObjectStore) -> None:
    """Leave the violin's agent two sources and one question: its run has every kind of point as before, and half of the tool calls."""
    for info in (await objects.list(f"agents/{VIOLIN}/sources/")).items:
        if not info.key.endswith(KEPT_SOURCES):
            await objects.delete(info.key)
    found = await objects.get(agent_key(VIOLIN))
    assert found is not None
    lines = found.body.decode().split("\n")
    asks = [line for line in lines if line.startswith("- ") and line.endswith("?")]
    assert len(asks) > len(KEPT_QUESTIONS)
    kept = [line for line in lines if line not in asks or line in KEPT_QUESTIONS]
    await objects.put(agent_key(VIOLIN), "\n".join(kept).encode())


@contextlib.asynccontextmanager
async def sweeping(ledger: Ledger) -> AsyncGenerator[None]:
    """A sweeper that lives, whoever is killed."""
    stop = asyncio.Event()
    service = Sweeper(
        ledger=ledger, actor=Actor(role=Role.SWEEPER, name="test"), options=SweepOptions(interval_s=SWEEP_S)
    )
    task = asyncio.create_task(serve(service, SystemClock(), random.Random(SEED), stop))
    try:
        yield
    finally:
        stop.set()
        await task


@dataclass(kw_only=True)
class Story:
    """One instance with one run in it."""

    fleet: Fleet
    instance: Instance
    patience_s: float = PATIENCE_S
    """How long a death or an end may take."""
    _run_id: JobId | None = None

    async def begin(self, slug: str = VIOLIN) -> None:
        """Ask for a run, as a gateway does."""
        self._run_id = (await self.instance.layer.trigger(slug, {"topic": "bows"}, kind=TriggerKind.MANUAL)).job_id

    @property
    def ledger(self) -> Ledger:
        return self.instance.ledger

    @property
    def objects(self) -> ObjectStore:
        return self.instance.objects

    @property
    def memory(self) -> MemoryRepository:
        return self.instance.memory

    @property
    def run_id(self) -> JobId:
        assert self._run_id is not None, "the story has not begun"
        return self._run_id

    async def until_dead(self) -> bool:
        """Until the first process is dead, True, or has finished without meeting its point, False."""
        (worker,) = self.fleet.alive
        end = time.monotonic() + self.patience_s
        while worker.is_alive:
            if await self.is_over():
                return False
            assert time.monotonic() < end, f"neither dead nor done: {self.last_words()}"
            await asyncio.sleep(LOOK_S)
        self.fleet.alive.remove(worker)
        return True

    async def is_over(self) -> bool:
        """The run and what it proposed are at rest, and every event is published."""
        status = await PublishedRuns(self.objects, SystemClock()).status(VIOLIN, self.run_id)
        if status is None or status["finished_at"] is None:
            return False
        return not await self.unpublished()

    async def unpublished(self) -> set[str]:
        """Keys of audit records that are not there yet; an event's audit record is the last that it publishes."""
        wanted = {ids.audit_key(event.ts, event.id) for event in await self.events()}
        wanted |= {ids.audit_key(act.at, act.id) for act in await self.ledger.acts()}
        return wanted - {info.key for info in (await self.objects.list("audit/")).items}

    async def events(self) -> list[Any]:
        return [event async for history in self.ledger.histories() for event in history.events]

    async def finish(self) -> None:
        """Until the run is over, by whoever is alive."""
        end = time.monotonic() + self.patience_s
        while not await self.is_over():
            assert self.fleet.alive, f"everybody died\n{self.last_words()}"
            assert all(worker.is_alive for worker in self.fleet.alive), self.last_words()
            job = await self.ledger.job(self.run_id)
            assert time.monotonic() < end, f"{job}\n{self.last_words()}"
            await asyncio.sleep(LOOK_S)

    def last_words(self) -> str:
        lines = [f"{line.at:.2f} {line.pid} {line.op} {line.what}" for line in self.fleet.lines()[-30:]]
        return "\n".join([*lines, self.fleet.last_words()])

    async def left(self) -> Left:
        return await left_by(self.ledger, self.objects, self.memory, VIOLIN, self.run_id)

    # --- what must hold ----------------------------------------------------------------------------------------------

    async def check(self, expected: Mapping[str, bytes] | None) -> dict[str, bytes]:
        """Everything that holds after any death; the normal form of what was left."""
        report = await verify(self.ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))
        left = await self.left()
        await self._check_audit()
        await self._check_memory(left)
        listed = {key for key in left.files if key.startswith(f"agents/{VIOLIN}/proposals/")}
        assert listed == {ids.proposal_key(VIOLIN, one) for one in left.proposals}, "proposals of nobody"
        assert len(set(left.proposals)) == len(left.proposals)
        found = normal(left)
        if expected is not None:
            different = [key for key in sorted({*found, *expected}) if found.get(key) != expected.get(key)]
            assert not different, f"{_difference(found, expected, different[0])}\n{_told(left)}"
        return found

    def recovery_s(self) -> list[float]:
        """From each death of a process that held the run to the next claim of it."""
        lines = self.fleet.lines()
        held, found = set[int](), list[float]()
        died: float | None = None
        for line in lines:
            if (line.op, line.what) == ("claimed", "run"):
                found += [] if died is None else [line.at - died]
                held.add(line.pid)
                died = None
            elif line.op == "died" and line.pid in held:
                died = line.at
        return found

    async def _check_audit(self) -> None:
        events = {ids.audit_key(event.ts, event.id): event for event in await self.events()}
        acts = [ids.audit_key(act.at, act.id) for act in await self.ledger.acts()]
        there = [info.key for info in (await self.objects.list("audit/2")).items]  # by day; not the audit chain
        assert sorted(there) == sorted([*events, *acts]), "one audit record for each event and act, and no other"
        for key, event in events.items():
            found = await self.objects.get(key)
            assert found is not None
            (known,) = await self.ledger.recorded([event])
            assert found.body == audit.to_bytes(known), key

    async def _check_memory(self, left: Left) -> None:
        applied = [one for one in left.proposals if left.events[one][-1].target == "applied"]
        entries = (await asyncio.to_thread(self.memory.history, VIOLIN, limit=200)).entries
        made = [entry.proposal_id for entry in entries if entry.run_id == self.run_id]
        assert sorted(filter(None, made)) == sorted(applied), "one commit for each applied proposal"
        assert (await asyncio.to_thread(verify_memory, self.memory)).complete

    def check_work(self) -> None:
        """A counted step is never done again, each claim does a step once, and what was kept is not asked for again."""
        lines = self.fleet.lines()
        claims = [line.at for line in lines if (line.op, line.what) == ("claimed", "run")]
        for name in ids.STEPS:
            counted = _counted_at(lines, name)
            done = [line.at for line in lines if (line.op, line.what) == ("did", name)]
            assert not [at for at in done if at > counted], f"{name} was counted and then done again"
            before = sum(at < counted for at in claims)
            assert 1 <= len(done) <= before, f"{name} was done {len(done)} times in {before} claims"
        if self.lost_while_alive():
            return
        kept = set[str]()
        for line in lines:
            what = line.what.removeprefix("keep ").partition(" ")[0]
            if line.op == "kept":
                kept.add(line.what)
            elif line.op == "point" and line.what.startswith(PAID) and " before " in line.what:
                assert what not in kept, f"{what} was kept, and made again"

    def lost_while_alive(self) -> int:
        """How often a living process lost the run, because the machine let it wait longer than its lease.

        What it does until it notices counts for nothing, but it may ask once more what the next one has been told.
        """
        claims = [line.pid for line in self.fleet.lines() if (line.op, line.what) == ("claimed", "run")]
        return len(claims) - len(set(claims))


def _told(left: Left) -> str:
    return "\n".join(
        f"{one}: {[(event.target, event.cause, event.data) for event in left.events[one]]}" for one in left.proposals
    )


def _counted_at(lines: list[Line], name: str) -> float:
    """When a step was counted. A process that died in that moment could not tell: then, when it was about to."""
    told = [line.at for line in lines if (line.op, line.what) == ("counted", name)]
    assert len(told) <= 1, f"{name} was counted {len(told)} times"
    return told[0] if told else max(line.at for line in lines if line.what.startswith(f"count {name} before"))


def _difference(found: Mapping[str, bytes], expected: Mapping[str, bytes], key: str) -> str:
    there, wanted = found.get(key), expected.get(key)
    if there is None or wanted is None:
        return f"{key}: {'missing' if there is None else 'nobody asked for it'}"
    at = next((n for n, (a, b) in enumerate(zip(there, wanted, strict=False)) if a != b), 0)
    return f"{key} differs: {there[max(0, at - 200) : at + 200]!r} instead of {wanted[max(0, at - 200) : at + 200]!r}"


@contextlib.asynccontextmanager
async def a_story(template: Path, folder: Path, nursery: Nursery, **orders: Any) -> AsyncGenerator[Story]:
    """A fresh instance with a living sweeper; its processes end with it."""
    await asyncio.to_thread(shutil.copytree, template, folder)
    try:
        async with a_fleet(f"sqlite:///{folder / 'ledger.db'}", folder, nursery, **orders) as (instance, fleet):
            yield Story(fleet=fleet, instance=instance)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


@contextlib.asynccontextmanager
async def a_fleet(url: str, folder: Path, nursery: Nursery, **orders: Any) -> AsyncGenerator[tuple[Instance, Fleet]]:
    """An instance with a living sweeper, and a fleet of its processes, none started."""
    places = {"objects": f"file://{folder / 'objects'}", "memory": str(folder / "memory.git"), **orders}
    known = {name: value for name, value in places.items() if name in {"objects", "memory"}}
    async with open_instance(Settings.model_validate(known), url, name="test") as instance:
        with Fleet(nursery, url, folder, places, Orders) as fleet:
            async with sweeping(instance.ledger):
                yield instance, fleet
