"""Worker processes to kill, and what they leave behind."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.worker_process import EFFECT, Orders, Work
from tests.ledgers.conformance.rig import SUBMITTER
from tests.servers.ready_python import ready_python
from trellis.engine.jobs import JobId, NewJob
from trellis.engine.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.02
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Line:
    """One line of the trace."""

    op: str
    job: JobId
    epoch: int
    pid: int
    at: float
    what: str = ""


class Nursery:
    """The process that forks workers, or what else the module tends."""

    def __init__(self, module: str = "tests.faults.nursery") -> None:
        self._process = subprocess.Popen(
            [ready_python(), "-m", module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt at the terminal is for the tests
        )
        assert self._answer() == "ready"

    def fork(self, log: Path, orders: Any) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"log": str(log), "orders": asdict(orders)}) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass(frozen=True)
class Running:
    """A worker process."""

    pid: int
    name: str
    log: Path

    @property
    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def stop(self) -> None:
        """SIGSTOP. Returns when every thread of the process stands still: one inside the kernel ends its call first."""
        self.send(signal.SIGSTOP)
        await until(lambda: set(self._states()) == {"T"}, f"{self.name} stands still")

    def _states(self) -> list[str]:
        stats = list[str]()
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
                stats.append(stat.read_text())
        return [stat.rpartition(")")[2].split()[0] for stat in stats]

    @property
    def exit_code(self) -> int | None:
        """What it said at its end, if it could. One that was ended before it began has no log."""
        if not self.log.exists():
            return None
        last = self.log.read_text(errors="replace").rstrip().rpartition("\n")[2]
        return int(last.removeprefix("exit ")) if last.startswith("exit ") else None


@dataclass
class Fleet(AbstractContextManager["Fleet"]):
    """Starts worker processes on one ledger and ends those that are left."""

    nursery: Nursery
    url: str
    folder: Path
    orders: dict[str, Any] = field(default_factory=dict)
    make_orders: Callable[..., Any] = Orders
    alive: list[Running] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    killed: dict[str, float] = field(default_factory=dict)
    """By the name of each worker that was killed: the time of day just before."""
    _read: int = 0
    _noted: int = 0
    _lines: list[Line] = field(default_factory=list)
    _open: dict[int, set[tuple[JobId, int]]] = field(default_factory=dict)

    @property
    def trace(self) -> Path:
        return self.folder / "trace.jsonl"

    def start(self, n: int = 1, **orders: Any) -> list[Running]:
        return [self._start({**self.orders, **orders}) for _ in range(n)]

    def _start(self, orders: dict[str, Any]) -> Running:
        name = f"worker-{len(self.logs)}"
        log = self.folder / f"{name}.log"
        said = self.make_orders(**{"url": self.url, "trace": str(self.trace), "name": name, **orders})
        running = Running(self.nursery.fork(log, said), name, log)
        self.alive.append(running)
        self.logs.append(log)
        return running

    async def kill(self, worker: Running) -> float:
        """SIGKILL now, and wait until it is gone; the time of day at which it was sent."""
        at = self.killed[worker.name] = time.time()
        worker.send(signal.SIGKILL)
        self.alive.remove(worker)
        await until(lambda: not worker.is_alive, f"{worker.name} is dead")
        return at

    def __exit__(self, *_: object) -> None:
        for worker in self.alive:
            with contextlib.suppress(ProcessLookupError):
                worker.send(signal.SIGKILL)

    async def drain(self) -> list[int | None]:
        """SIGTERM to all; their exit codes."""
        for worker in self.alive:
            with contextlib.suppress(ProcessLookupError):
                worker.send(signal.SIGTERM)
        for worker in self.alive:
            await until(lambda worker=worker: not worker.is_alive, f"{worker.name} drained")
        ended, self.alive = self.alive, []
        return [worker.exit_code for worker in ended]

    # --- what they left ----------------------------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        """The trace so far; only what is new is read."""
        if self.trace.exists():
            with self.trace.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
            self._read += len(whole) + bool(whole)
            self._lines += [Line(**json.loads(line)) for line in whole.splitlines()]
            for line in self._lines[self._noted :]:
                opened = self._open.setdefault(line.pid, set())
                if line.op == "began":
                    opened.add((line.job, line.epoch))
                elif line.op == "ended":
                    opened.discard((line.job, line.epoch))
            self._noted = len(self._lines)
        return self._lines

    async def until_opened(self, started: Sequence[Running]) -> None:
        """Until each of these has noted that it serves."""
        names = {one.name for one in started}
        await until(lambda: names <= {line.what for line in self.lines() if line.op == "opened"}, "all of them serve")

    def open_jobs(self, pid: int) -> set[tuple[JobId, int]]:
        """What a process had begun and not ended."""
        self.lines()
        return set(self._open.get(pid, ()))

    def said(self, event: str) -> int:
        """How often the workers' logs tell of something."""
        return sum(log.read_text(errors="replace").count(event) for log in self.logs)

    def extended(self) -> int:
        """How many leases the workers' sweeps extended because nobody had swept for more than half a lease."""
        texts = [log.read_text(errors="replace") for log in self.logs if log.exists()]  # one may only just have begun
        found = [re.findall(r"leases_extended jobs=(\d+)", text) for text in texts]
        return sum(int(jobs) for of_log in found for jobs in of_log)

    def last_words(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in self.logs[-4:])


async def until(holds: Callable[[], Any], what: str, *, patience_s: float = PATIENCE_S) -> Any:
    """Look until it holds; only other processes can make it so."""
    end = time.monotonic() + patience_s
    while not (found := holds()):
        assert time.monotonic() < end, f"waited {patience_s:g} s until {what}"
        await asyncio.sleep(POLL_S)
    return found


async def submit_work(ledger: Ledger, works: Iterable[Work], prefix: str, **options: Any) -> list[JobId]:
    jobs = [
        NewJob(
            job_id=JobId(f"{prefix}-{number}"),
            type=EFFECT,
            payload=json.dumps(asdict(work)).encode(),
            max_attempts=100,
            **options,
        )
        for number, work in enumerate(works)
    ]
    for start in range(0, len(jobs), 1_000):
        await ledger.submit(SUBMITTER, jobs[start : start + 1_000])
    return [job.job_id for job in jobs]


async def wait_ended(ledger: Ledger, jobs: Sequence[JobId], fleet: Fleet, *, patience_s: float = PATIENCE_S) -> None:
    """Until every job has ended; a fleet that died by itself is an error at once."""
    waiting = list(jobs)
    end = time.monotonic() + patience_s
    while waiting:
        job = await ledger.job(waiting[-1])
        assert job is not None
        if job.place == "ended":
            waiting.pop()
            continue
        dead = [worker.name for worker in fleet.alive if not worker.is_alive]
        assert not dead, f"{dead} ended by themselves\n{fleet.last_words()}"
        assert time.monotonic() < end, f"{job.job_id} is {job.state} after {patience_s:g} s\n{fleet.last_words()}"
        await asyncio.sleep(POLL_S)
