"""How a command that serves until it is stopped runs its event loop: `trellis up` and `trellis worker`."""

import asyncio
import gc
import importlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

ResultT = TypeVar("ResultT")
SWITCH_S = 0.0005
"""After how long a thread of a worker hands the interpreter on, in seconds."""


def run_tuned(work: Coroutine[Any, Any, ResultT], *, tune: Callable[[], None]) -> ResultT:
    """Run this coroutine to its end in a tuned process, on uvloop if it is installed."""
    tune()
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(work)


def tune_server() -> None:
    """Tune garbage collection of a process that serves until it is stopped.

    Many short-lived values trigger useless collections. Measured for workers (docs/benchmarks.md); in a gateway and a
    scheduler the gain was within the noise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def tune_worker() -> None:
    """Tune a process that works off jobs: also make its threads hand the interpreter on sooner.

    While handlers compute, the ledger's thread waits for the interpreter. Measured for workers (docs/benchmarks.md). Other
    processes keep Python's own interval: no gain was measured there.
    """
    tune_server()
    sys.setswitchinterval(SWITCH_S)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The uvloop event loop, if the `fast` extra is installed."""
    try:
        module = importlib.import_module("uvloop")
    except ImportError:
        return None
    return cast("Callable[[], asyncio.AbstractEventLoop]", module.new_event_loop)
