"""Starts worker processes quickly: one process imports everything once and forks a worker for each order it reads.
Another module can tend processes of its own kind in the same way.

Each worker is a process of its own with its own connections, made after the fork. Workers end with the nursery, and the
nursery ends when its input closes, so a test run that is killed leaves nothing behind.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.faults.worker_process import Orders, main, shift_clocks
from trellis.ledgers.postgres import ledger as _postgres  # noqa: F401 - imported before the fork
from trellis.ledgers.sqlite import ledger as _sqlite  # noqa: F401 - imported before the fork

PR_SET_PDEATHSIG = 1


def be_worker(orders: dict[str, Any]) -> int:
    said = Orders(**orders)
    if said.skew_s:
        shift_clocks(said.skew_s)
    return asyncio.run(main(said))


def become(order: dict[str, Any], be: Callable[[dict[str, Any]], int]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] - a killed process tells what it had said
    code = be(order["orders"])
    os.write(out, f"exit {code}\n".encode())
    return code


def tend(be: Callable[[dict[str, Any]], int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: whoever looks for a dead worker finds none
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = become(order, be)
            except BaseException:  # noqa: BLE001 - its log tells; nobody else could
                traceback.print_exc()
            finally:
                os._exit(code)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    tend(be_worker)
