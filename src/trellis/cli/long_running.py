"""How a command that serves until it is stopped runs its event loop: `trellis up` and `trellis worker`."""

import asyncio
import gc
import importlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

ResultT = TypeVar("ResultT")


def run_tuned(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run this coroutine to its end in a tuned process, on uvloop if it is installed."""
    tune_process()
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(work)


def tune_process() -> None:
    """Tune garbage collection of a process that serves until it is stopped.

    Many short-lived values trigger useless collections. Measured for workers (docs/benchmarks.md); in a gateway and a
    scheduler the gain was within the noise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The uvloop event loop, if the `fast` extra is installed."""
    try:
        module = importlib.import_module("uvloop")
    except ImportError:
        return None
    return cast("Callable[[], asyncio.AbstractEventLoop]", module.new_event_loop)
