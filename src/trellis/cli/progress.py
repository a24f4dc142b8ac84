"""How far a long command is: a line that counts on a terminal; elsewhere, such as in a job's log, a line every ten seconds."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeAlias

from trellis.cli.output import Output

EVERY_S = 10.0

Report: TypeAlias = Callable[[str, int], None]
"""What is counted, and how many there are by now."""


@contextmanager
def counting(out: Output, monotonic: Callable[[], float] = time.monotonic) -> Generator[Report]:
    """What to call as the work goes on. It writes to standard error, beside the answer."""
    if not out.errors.is_terminal:
        yield _notes(out, monotonic)
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn  # loaded by those who look on

    columns = (SpinnerColumn(), TextColumn("{task.completed:,} {task.description}"))
    with Progress(*columns, console=out.errors, transient=True) as bars:
        bar = bars.add_task("begun", total=None)
        yield lambda what, count: bars.update(bar, completed=count, description=what)


def _notes(out: Output, monotonic: Callable[[], float]) -> Report:
    last = monotonic()

    def report(what: str, count: int) -> None:
        nonlocal last
        if monotonic() - last >= EVERY_S:
            last = monotonic()
            out.note(f"{count:,} {what}")

    return report
