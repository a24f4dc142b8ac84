"""How long the machine stood still: what a clock judges may take so much longer.

A thread sleeps for moments and adds up by how much each was too long. A busy machine makes moments a little longer, which does not
count; one that is held for seconds makes a moment as long as that.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MOMENT_S = 0.05
LATE_S = 0.25


class Pace:
    """Made by `keeping_pace`."""

    def __init__(self) -> None:
        self.stood_still_s = 0.0

    def _watch(self, ended: threading.Event) -> None:
        before = time.monotonic()
        while not ended.wait(MOMENT_S):
            now = time.monotonic()
            late_s = now - before - MOMENT_S
            self.stood_still_s += late_s if late_s > LATE_S else 0.0
            before = now


@contextmanager
def keeping_pace() -> Iterator[Pace]:
    """Watch from now on until the end of the block."""
    pace, ended = Pace(), threading.Event()
    watcher = threading.Thread(target=pace._watch, args=(ended,), daemon=True)  # pyright: ignore[reportPrivateUsage]
    watcher.start()
    try:
        yield pace
    finally:
        ended.set()
        watcher.join()
