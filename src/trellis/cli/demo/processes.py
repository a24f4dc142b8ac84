"""The worker processes of the demo: started, killed, stopped, and never left running."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

STOP_S_MAX = 10.0


class DemoWorkers:
    """The worker processes of the demo. Leaving the context ends those that still run."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._running: list[subprocess.Popen[bytes]] = []
        self._started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def start(self) -> int:
        """Start another worker; returns its process id."""
        self._started += 1
        name = f"worker-{self._started}"
        options = ["--concurrency", "4", "--prefetch", "0", "--name", name, "--ledger", self._url]
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - this program's own worker
                [sys.executable, "-m", "trellis", "worker", "demo_app:app", *options],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._running.append(process)
        return process.pid

    def kill(self) -> int:
        """SIGKILL the oldest worker: it cannot clean up."""
        process = self._running.pop(0)
        process.kill()
        process.wait()
        return process.pid

    def stop(self) -> int:
        """Ask the oldest worker to drain; returns its exit code."""
        process = self._running[0]
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_S_MAX)
        self._running.pop(0)
        return code

    def ended_early(self) -> int | None:
        """The exit code of a worker that should be running but has ended."""
        return next((code for process in self._running if (code := process.poll()) is not None), None)
