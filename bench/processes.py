"""Processes of a run: started in groups of their own, gated, counted, and ended with it."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY = "ready"
GRACE_S = 5.0
TASK_TIMEOUT_S = 120.0
PROCESS_CLOCK = 2
"""In the number of a process's clock, as clock_getcpuclockid(3) makes it: time on a processor, of all threads."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
"""What starts a child."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """Another checkout of this project with an environment of its own, whose subjects are measured by our program."""

    root: Path
    options: frozenset[str]
    """The options that its tasks know; a child there gets no others."""

    @property
    def python(self) -> str:
        """Its interpreter, with its packages."""
        return str(self.root / ".venv" / "bin" / "python")


_checkout: ContextVar[Checkout | None] = ContextVar("checkout", default=None)


@contextmanager
def children_from(checkout: Checkout | None) -> Iterator[None]:
    """Start children there meanwhile, or here without one."""
    token = _checkout.set(checkout)
    try:
        yield
    finally:
        _checkout.reset(token)


class ChildFailed(Exception):
    """A process of the benchmark ended with an error; the message holds the end of what it said."""


class Child:
    """One process that works for a subject. Its errors go to a file, so that a full pipe never stops it."""

    def __init__(self, subject: str, action: str, options: dict[str, Any], folder: Path) -> None:
        self.name = f"{subject} {action}"
        self._errors = folder / f"{subject}-{action}-{os.urandom(4).hex()}.log"
        python, root, there = PYTHON, ROOT, _checkout.get()
        if there is not None:
            python, root = there.python, there.root
            options = {name: value for name, value in options.items() if name in there.options}
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [python, "-m", "bench.child", subject, action, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=root,
                text=True,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Come back when everything is imported and the child waits at the gate."""
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != READY:
            raise self._failed()

    def go(self) -> None:
        """Open the gate."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What a task that ends by itself reports, after `wait_ready`."""
        try:
            out, _ = self.process.communicate("go\n", timeout=TASK_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(f"{self.name} did not end within {TASK_TIMEOUT_S:g} s") from error
        if self.process.returncode or not out.strip():
            raise self._failed()
        return json.loads(out.strip().splitlines()[-1])

    def check(self) -> None:
        """Raise when the process has ended although nobody asked it to."""
        if self.process.poll() is not None:
            raise self._failed()

    def stop(self) -> None:
        """End this process group: gently, then not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _failed(self) -> ChildFailed:
        said = self._errors.read_text(errors="replace")[-4000:]
        return ChildFailed(f"{self.name} ended with {self.process.poll()}:\n{said}")


@contextmanager
def children(subject: str, action: str, options: list[dict[str, Any]], folder: Path) -> Iterator[list[Child]]:
    """Several processes, all at the gate; stopped at the end, whatever happens."""
    started: list[Child] = []
    try:
        started += [Child(subject, action, each, folder) for each in options]
        for child in started:
            child.wait_ready()
        yield started
    finally:
        for child in started:
            child.stop()


def ask(subject: str, action: str, options: dict[str, Any], folder: Path) -> Any:
    """Run one task in a process of its own and return its report."""
    return ask_and_count(subject, action, options, folder)[0]


def ask_and_count(
    subject: str, action: str, options: dict[str, Any], folder: Path, server: int | None = None
) -> tuple[Any, float]:
    """`ask`, with the seconds of processor time that the process and the server that it asks took for it."""
    child = Child(subject, action, options, folder)
    try:
        child.wait_ready()
        servers = [] if server is None else [server]
        began = cpu_s([child.process.pid]) + sum(cpu_s(family(pid)) for pid in servers)
        before = _reaped_cpu_s()
        answer = child.answer()
        return answer, _reaped_cpu_s() - before + sum(cpu_s(family(pid)) for pid in servers) - began
    finally:
        child.stop()


# --- processor time ------------------------------------------------------------------------------------------------


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time these processes have used so far, in user and kernel mode, with their reaped children."""
    return sum(_own_cpu_s(pid) + sum(_stat(pid)[13:15]) / TICKS_PER_S for pid in pids)


def _own_cpu_s(pid: int) -> float:
    """All threads of a process. The clock that Linux keeps for it is finer than the ticks in /proc."""
    try:
        return time.clock_gettime((~pid << 3) | PROCESS_CLOCK)
    except OSError:  # it has ended
        return 0.0


def _reaped_cpu_s() -> float:
    """All children of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def family(parent: int) -> list[int]:
    """A process and its living children, as a PostgreSQL server and its backends are."""
    entries = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [parent, *(pid for pid in entries if _stat(pid)[1:2] == [parent])]


def _stat(pid: int) -> list[int]:
    """The numbers of /proc/PID/stat from the state on; the command before them may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [0, *map(int, text.rpartition(")")[2].split()[1:])]
