"""A real orchestrator process that tells of every point it passes and can kill itself at any of them.

The process is the shipped instance with its own services; only its times are shorter. Every call that changes something
(ledger, object store, memory), every question that costs something and every step is a point, before and after it. Points are
named and counted as they are met, so that a run without a fault lists them all and none is forgotten when the code changes.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic_ai.messages import ModelResponse

from tests.faults.nursery import tend
from trellis.agents import conversation as _conversation  # noqa: F401 - imported before the fork
from trellis.agents.offline.model import OfflineModel
from trellis.app.instance import Instance, open_instance
from trellis.app.settings import Settings
from trellis.documents.ids import STEPS
from trellis.engine.jobs import Advance, Claimed, Lease, LeaseLost, Move, NewJob, StepApplied, Turn, TurnResult
from trellis.engine.records import SweepOptions
from trellis.engine.service import Service, Sweeper
from trellis.engine.step_runner import DriveOutcome
from trellis.proposals.apply import ApplyEngine, ApplyOptions
from trellis.runs.orchestrator import (
    Orchestrator,
    OrchestratorOptions,
    RunDriver,
    RunDriverOptions,
    RunStep,
    StepContext,
    StepResult,
)
from trellis.runs.projector import Projector, ProjectorOptions
from trellis.storage.objects import local as _local  # noqa: F401 - imported before the fork
from trellis.storage.objects import s3 as _s3  # noqa: F401 - imported before the fork
from trellis.storage.objects.store import OVERWRITE, PutCondition, PutRefused, PutStored, put_one_by_one

BEFORE, AFTER = "before", "after"
DRIVER = RunDriverOptions()


@dataclass(frozen=True, kw_only=True)
class Orders:
    """How an orchestrator process behaves; passed as JSON."""

    url: str
    trace: str
    name: str
    objects: str
    memory: str
    die_at: str = ""
    """The point at which it kills itself."""
    die_after: int = 0
    """Or the number of points after which it does."""
    lease_s: float = 2.0
    heartbeat_s: float = 0.5
    follow_s: float = 1.0
    sweep_s: float | None = None
    """The sweep's interval; None leaves sweeping to another process."""
    runs: int = 10
    hold_s: float | None = None
    """Instead of a real agent: steps that take so long and do nothing."""
    orchestrator: str = "builtin"
    """What drives runs, as in the setting of this name."""
    retry_delays_s: tuple[float, ...] = DRIVER.retry_delays_s
    upstream_wait_s: float = DRIVER.upstream_wait_s
    wait_noted_s: float = DRIVER.wait_noted_s

    def driver(self) -> RunDriverOptions:
        return RunDriverOptions(
            retry_delays_s=tuple(self.retry_delays_s),
            upstream_wait_s=self.upstream_wait_s,
            wait_noted_s=self.wait_noted_s,
        )


class Watch:
    """Writes the trace, one line for each thing met, and dies where it was told to."""

    def __init__(self, orders: Orders) -> None:
        self._fd = os.open(orders.trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._die_at, self._die_after = orders.die_at, orders.die_after
        self._met: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, op: str, what: str, *, job: str = "", epoch: int = 0) -> None:
        line = {"op": op, "what": what, "job": job, "epoch": epoch, "pid": os.getpid(), "at": time.monotonic()}
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def reach(self, what: str, side: str) -> None:
        with self._lock:
            self._met[f"{what} {side}"] += 1
            point = f"{what} {side} {self._met[f'{what} {side}']}"
        self.note("point", point)
        if point == self._die_at or sum(self._met.values()) == self._die_after:
            self.note("died", point)
            os.kill(os.getpid(), signal.SIGKILL)

    async def around(self, what: str, work: Coroutine[Any, Any, Any]) -> Any:
        self.reach(what, BEFORE)
        answer = await work
        self.reach(what, AFTER)
        return answer


class Wrapped:
    """Everything that is not watched goes straight through."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedLedger(Wrapped):
    """A ledger whose writes are points. Renewals and looks at nothing are none: how many there are is up to time."""

    async def submit(self, actor: Any, jobs: Sequence[NewJob], **options: Any) -> Any:
        return await self._watch.around(f"submit {jobs[0].lifecycle}", self._inner.submit(actor, jobs, **options))

    async def move(self, actor: Any, move: Move) -> Any:
        return await self._watch.around(f"move {move.target}", self._inner.move(actor, move))

    async def journal(self, lease: Lease, entry: str, body: bytes) -> Any:
        self._watch.reach(f"keep {entry}", BEFORE)
        answer = await self._inner.journal(lease, entry, body)
        if not isinstance(answer, LeaseLost):
            self._watch.note("kept", entry, job=lease.job_id, epoch=lease.epoch)
        self._watch.reach(f"keep {entry}", AFTER)
        return answer

    async def turn(self, turn: Turn) -> TurnResult:
        what = " and ".join(_named(advance) for advance in turn.advances)
        if what:
            self._watch.reach(what, BEFORE)
        answer: TurnResult = await self._inner.turn(turn)
        for advance, outcome in zip(turn.advances, answer.outcomes, strict=True):
            if isinstance(outcome, StepApplied) and advance.trigger == "step":
                number = json.loads(advance.data or b"")["step"]
                self._watch.note("counted", STEPS[number - 1], job=advance.lease.job_id, epoch=advance.lease.epoch)
        if what:
            self._watch.reach(what, AFTER)
        for claimed in answer.claimed:
            self._watch.note("claimed", claimed.lease.lifecycle, job=claimed.lease.job_id, epoch=claimed.lease.epoch)
            self._watch.reach(f"claim {claimed.lease.lifecycle}", AFTER)
        return answer


def _named(advance: Advance) -> str:
    if advance.trigger == "step":
        return f"count {json.loads(advance.data or b'')['name']}"
    return f"{advance.trigger} {advance.lease.lifecycle}"


class WatchedObjects(Wrapped):
    """An object store whose puts are points, named by what is put and not by ids."""

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        return await self._watch.around(f"put {_kind(key, body)}", self._inner.put(key, body, when=when))

    async def put_many(self, sequences: Any) -> Any:
        return await put_one_by_one(self.put, sequences)


def _kind(key: str, body: bytes) -> str:
    parts = key.split("/")
    if parts[:2] == ["audit", "chain"]:
        return "audit block"
    if parts[0] == "audit":
        return f"audit {json.loads(body)['event']}"
    if len(parts) > 4 and parts[2] == "runs":
        name = "/".join(parts[4:])
        return f"status {json.loads(body)['version']}" if name == "status.json" else name
    if len(parts) > 3 and parts[2] == "proposals":
        return f"proposal {json.loads(body)['status']}"
    return "something else"


class WatchedMemory(Wrapped):
    """A memory whose commits are points; they are made in a thread."""

    def commit(self, agent_id: str, updates: Any, **order: Any) -> Any:
        self._watch.reach("commit", BEFORE)
        answer = self._inner.commit(agent_id, updates, **order)
        self._watch.note("committed", type(answer).__name__, job=order["proposal_id"])
        self._watch.reach("commit", AFTER)
        return answer


class WatchedProvider(Wrapped):
    """What answers grounded questions; each is paid for."""

    async def query(self, prepared: Any, question: Any, *, deadline_s: float) -> Any:
        self._watch.note("asked", "sources")
        return await self._watch.around("ask sources", self._inner.query(prepared, question, deadline_s=deadline_s))


def watch_model(watch: Watch) -> None:
    """Requests to the model are points of this process, each paid for."""
    ask = OfflineModel.request

    async def request(
        self: OfflineModel, messages: Any, model_settings: Any, model_request_parameters: Any
    ) -> ModelResponse:
        watch.note("asked", "model")
        return await watch.around("ask model", ask(self, messages, model_settings, model_request_parameters))

    OfflineModel.request = request


def watched_step(watch: Watch, name: str, step: RunStep) -> RunStep:
    async def do(context: StepContext, /) -> StepResult:
        watch.note("did", name, job=context.run_id)
        return await watch.around(f"do {name}", step(context))

    return do


def idle_steps(hold_s: float) -> dict[str, RunStep]:
    """Four steps that do nothing for a while, for proofs about who runs when."""

    async def step(context: StepContext, /) -> StepResult:
        if context.name == "execute-agent":
            await asyncio.sleep(hold_s)
            return StepResult(result={"summary": "nothing"})
        return StepResult(result={}, output=b"{}\n" if context.name == "persist-results" else None)

    return dict.fromkeys(STEPS, step)


def watch_driver(watch: Watch, driver: RunDriver) -> None:
    published, drive = driver.published, driver.drive

    async def shown(slug: str, run_id: str, version: int) -> None:
        await watch.around(f"show {version}", published(slug, run_id, version))

    async def driven(claimed: Claimed) -> DriveOutcome:
        watch.note("began", "drive", job=claimed.lease.job_id, epoch=claimed.lease.epoch)
        try:
            return await drive(claimed)
        finally:
            watch.note("ended", "drive", job=claimed.lease.job_id, epoch=claimed.lease.epoch)

    driver.steps = {name: watched_step(watch, name, step) for name, step in driver.steps.items()}
    driver.published = shown
    driver.drive = driven  # type: ignore[method-assign]


class ShortInstance(Instance):
    """The shipped instance; only its times are shorter, and the sweep is left out where another process does it."""

    orders: Orders
    watch: Watch

    def services(self, *, alerts: bool = True, runs: bool = True) -> list[Service[Any]]:
        orders = self.orders
        kept: list[Service[Any]] = []
        for service in super().services(alerts=alerts, runs=runs):
            match service:
                case Orchestrator():
                    service.options = OrchestratorOptions(
                        concurrency=orders.runs, lease_s=orders.lease_s, heartbeat_s=orders.heartbeat_s, poll_s=0.05
                    )
                    if orders.hold_s is not None:
                        service.driver.steps = idle_steps(orders.hold_s)
                    service.driver.options = orders.driver()
                    watch_driver(self.watch, service.driver)
                case Projector():
                    service.options = ProjectorOptions(lease_s=orders.follow_s)
                case ApplyEngine():
                    service.options = ApplyOptions(lease_s=orders.lease_s, heartbeat_s=orders.heartbeat_s, poll_s=0.05)
                case Sweeper() if orders.sweep_s is None:
                    continue
                case Sweeper():
                    service.options = SweepOptions(interval_s=orders.sweep_s or 1.0)
                case _:
                    pass
            kept.append(service)
        return kept


def watched(instance: Instance, orders: Orders, watch: Watch) -> ShortInstance:
    parts = {part.name: getattr(instance, part.name) for part in fields(instance)}
    parts["ledger"] = WatchedLedger(instance.ledger, watch)
    parts["objects"] = WatchedObjects(instance.objects, watch)
    parts["repository"] = WatchedMemory(instance.memory, watch)
    parts["provider"] = WatchedProvider(instance.provider, watch)
    short = ShortInstance(**parts)
    # The instance is frozen; what makes this one special is set once, here.
    object.__setattr__(short, "orders", orders)
    object.__setattr__(short, "watch", watch)
    return short


async def main(orders: Orders) -> int:
    watch, stop = Watch(orders), asyncio.Event()
    watch_model(watch)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = {"objects": orders.objects, "memory": orders.memory, "runs": orders.runs}
    settings |= {"orchestrator": orders.orchestrator, "temporal_queue": Path(orders.trace).parent.name}
    async with open_instance(Settings.model_validate(settings), orders.url, name=orders.name) as instance:
        watch.note("opened", orders.name)
        await watched(instance, orders, watch).serve(stop)
    return 0


def be_orchestrator(orders: dict[str, Any]) -> int:
    return asyncio.run(main(Orders(**orders)))


if __name__ == "__main__":
    tend(be_orchestrator)
