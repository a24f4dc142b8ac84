"""Handlers that run in another process. They are at the top level of a module, because that process imports them.

Each such process imports this module when it starts, so it imports no more than handlers need.
"""

import ctypes
import json
import os
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from trellis import App, PermanentError, ProcessContext, Snooze

app = App()


class Fractions:
    """Fractions as `[1, 3]`. Pydantic writes text."""

    def dumps(self, value: Any) -> bytes:
        return json.dumps([value.numerator, value.denominator]).encode()

    def loads(self, body: bytes, annotation: Any) -> Any:
        assert annotation is Fraction
        return Fraction(*json.loads(body))


@dataclass
class Task:
    """What a handler should do, and where it leaves the id of its process."""

    file: Path
    n: int = 0


class Strange(Exception):
    """An error that cannot be pickled: its constructor takes no message."""

    def __init__(self) -> None:
        super().__init__("strange", lambda: None)


@dataclass
class Squared:
    value: int
    process: int


@app.job("square", runner="process")
def square(ctx: ProcessContext, task: Task) -> Squared:
    assert ctx.idempotency_key == ctx.job_id
    ctx.progress({"attempt": ctx.attempt})
    return Squared(task.n**2, os.getpid())


@app.job("spin", runner="process", timeout_s=1, heartbeat_s=10)
def spin(ctx: ProcessContext, task: Task) -> None:
    """Never ends, and never looks whether it should."""
    task.file.write_text(str(os.getpid()))
    while True:
        task.n += 1


@app.job("crunch", runner="process", heartbeat_s=10)
def crunch(ctx: ProcessContext, task: Task) -> str:
    """Goes on until it is told to stop."""
    task.file.write_text(str(os.getpid()))
    while not ctx.cancelled:
        time.monotonic()
    return "stopped"


@app.job("crash", runner="process")
def crash(ctx: ProcessContext, how: str) -> str:
    if ctx.attempt == 1:
        {"segfault": lambda: ctypes.string_at(0), "exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), 9)}[
            how
        ]()
    return f"attempt {ctx.attempt} worked"


@app.job("raise", runner="process")
def raises(ctx: ProcessContext, what: str) -> None:
    raise {
        "permanent": PermanentError("never again", reason_code="policy_violation"),
        "snooze": Snooze(3600),
        "strange": Strange(),
        "exit": SystemExit(4),
        "long": ValueError("x" * 3_000_000),
    }[what]


@app.job("halve", runner="process", serializer=Fractions())
def halve(ctx: ProcessContext, n: Fraction) -> Fraction:
    return n / 2


@app.job("fork", runner="process", timeout_s=20)
def fork(ctx: ProcessContext) -> str:
    """Its fork comes out of the handler, as it does when the fork raises. Such a process must not act for the handler."""
    if not (other := os.fork()):
        return "the fork"
    os.waitpid(other, 0)
    return "the handler"
