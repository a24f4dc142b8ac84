"""Starts the processes that `deploy/` describes, with their own arguments and environments, on servers of the tests.

Only addresses and places are replaced: names of hosts by loopback, folders of a container by folders of the test.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from tests.deploy.patience import wait_until
from tests.deploy.shipped import ShippedProcess

START_S = 120.0


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def replaced(text: str, places: Mapping[str, str]) -> str:
    for old, new in places.items():
        text = text.replace(old, new)
    return text


@dataclass
class RunningFleet(AbstractContextManager["RunningFleet"]):
    """The processes of a fleet. `places` says what stands for each address and folder."""

    folder: Path
    places: Mapping[str, str]
    ports: Mapping[str, int]
    """The port of the gateway, the NLM backend and the safety kernel, by setting."""
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    health: dict[str, str] = field(default_factory=dict)

    def environment(self, process: ShippedProcess) -> dict[str, str]:
        return {name: replaced(value, self.places) for name, value in process.environment.items()}

    def run(self, process: ShippedProcess) -> None:
        """Run a process that ends by itself."""
        subprocess.run(
            self._command(process), cwd=self.folder, env=self._started_with(process), check=True, timeout=START_S
        )

    def start(self, processes: Sequence[ShippedProcess]) -> None:
        for process, port in zip(processes, free_ports(len(processes)), strict=True):
            environment = self._started_with(process)
            environment["TRELLIS_HEALTH_ADDRESS"] = f"127.0.0.1:{port}"
            self.health[process.name] = f"http://127.0.0.1:{port}/system/ready"
            with self.log(process.name).open("wb") as log:
                self.running[process.name] = subprocess.Popen(
                    self._command(process), cwd=self.folder, env=environment, stdout=log, stderr=log
                )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_until_ready(self) -> None:
        for name in self.running:
            wait_until(lambda name=name: self.is_ready(name), f"{name} is ready", patience_s=START_S)

    def is_ready(self, name: str) -> bool:
        assert self.running[name].poll() is None, f"{name} ended:\n{self.log(name).read_text()[-3000:]}"
        try:
            return httpx2.get(self.health[name], trust_env=False).status_code == 200
        except httpx2.HTTPError:
            return False

    def stop(self) -> dict[str, tuple[int, float]]:
        """Send SIGTERM to all; the exit code of each, and the seconds that it took."""
        began = time.monotonic()
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        return {name: (one.wait(START_S), time.monotonic() - began) for name, one in self.running.items()}

    def _command(self, process: ShippedProcess) -> list[str]:
        return [sys.executable, "-m", "trellis", *(replaced(word, self.places) for word in process.arguments)]

    def _started_with(self, process: ShippedProcess) -> dict[str, str]:
        """Nothing of this machine's own settings, but what is needed to start Python."""
        inherited = {name: value for name, value in os.environ.items() if name in {"PATH", "LANG", "TZ"}}
        own = {name: str(port) for name, port in self.ports.items()}
        return {**inherited, "HOME": str(self.folder), **own, **self.environment(process)}

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
