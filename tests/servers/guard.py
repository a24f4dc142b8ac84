"""Ends a server with the process that started it, however that ends: a guard process waits on a pipe."""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

# Reads "pid" lines; the last one is in force. End of input without a closing "0" means that the owner died.
PROGRAM = """
import os, shutil, signal, sys, time
pid = 0
for line in sys.stdin:
    pid = int(line)
if pid:
    try:
        os.kill(pid, int(sys.argv[2]))
        for _ in range(1000):
            os.kill(pid, 0)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Guard:
    """Watches over one server and its folder. `last_signal` is what an orphaned server gets first."""

    def __init__(self, folder: Path, last_signal: signal.Signals) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, folder, str(int(last_signal))],
            stdin=subprocess.PIPE,
            start_new_session=True,  # an interrupt at the terminal is for the tests, not for their servers
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, pid: int) -> None:
        """End this process when the owner is gone; 0 for none."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{pid}\n".encode())
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """The server has been ended: nothing is left to guard, and its folder goes. Calling it again does nothing."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self.watch(0)
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
