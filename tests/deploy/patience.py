"""Waiting for what another process does."""

import threading
import time
from collections.abc import Callable

LOOK_S = 0.05


def wait_until(holds: Callable[[], object], what: str, *, patience_s: float = 60.0) -> None:
    """Return once it holds; fails with `what` was waited for."""
    ends = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < ends, f"after {patience_s:g} s: {what}"
        threading.Event().wait(LOOK_S)
