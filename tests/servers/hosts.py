"""Hosts of their own on this machine: network namespaces with addresses, joined by a switch. Only root can make them.

What holds:
- a host reaches another only over its own cable, and `cut` pulls it out: packets are lost, connections stay half open;
- a host may have further addresses, and `hide` takes one away: whoever is there is unreachable in the same way;
- a process that is started on a host has that host's network and no other, its own loopback included;
- everything ends with the test process: namespaces live as long as the processes that hold them.
"""

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import IO, TypeVar

NETWORK = "10.77.0"
PREFIX_BITS = 24
FURTHER = 200
"""Where further addresses begin."""
PIECE_BYTES = 64 * 1024
_CLONE_NEWNET = 0x40000000
_HOLDER = "import sys; sys.stdin.read()"

ResultT = TypeVar("ResultT")


class HostsFailed(Exception):
    """The namespaces could not be made; the message says what is missing."""


class Host:
    """One namespace. `address` is how the other hosts reach it."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._holder = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-I", "-S", "-c", _HOLDER], stdin=subprocess.PIPE
        )
        self._wait_for_own_network()

    @property
    def pid(self) -> int:
        return self._holder.pid

    def run(self, *command: str) -> None:
        """A command on this host; raises HostsFailed."""
        _run("nsenter", f"--net={self._path}", *command)

    def enter(self) -> None:
        """The thread that calls this, and what it starts, are on this host from now on."""
        with self._path.open("rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise HostsFailed(f"cannot enter the network of {self.name}: {os.strerror(ctypes.get_errno())}")

    def do(self, act: Callable[[], ResultT]) -> ResultT:
        """Do something on this host, in a thread that ends afterwards."""
        outcome: list[ResultT] = []
        errors: list[BaseException] = []

        def on_host() -> None:
            try:
                self.enter()
                outcome.append(act())
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                errors.append(error)

        thread = threading.Thread(target=on_host, name=f"on {self.name}")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return outcome[0]

    def popen(
        self, command: list[str], *, cwd: Path, env: Mapping[str, str], log: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        """Start a program on this host."""
        return self.do(lambda: subprocess.Popen(command, cwd=cwd, env=env, stdout=log, stderr=log))

    def show(self, address: str) -> None:
        """Give the host a further address, or one that was hidden again."""
        self.run("ip", "address", "add", f"{address}/{PREFIX_BITS}", "dev", "eth0")

    def hide(self, address: str) -> None:
        """Take a further address away: packets to it are lost, and its connections stay half open."""
        self.run("ip", "address", "del", f"{address}/{PREFIX_BITS}", "dev", "eth0")

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()

    @property
    def _path(self) -> Path:
        return Path(f"/proc/{self.pid}/ns/net")

    def _wait_for_own_network(self) -> None:
        here = Path("/proc/self/ns/net").readlink()
        while True:
            if self._holder.poll() is not None:
                raise HostsFailed("no network namespace can be made here: it takes root")
            with contextlib.suppress(OSError):
                if self._path.readlink() != here and "python" in Path(f"/proc/{self.pid}/comm").read_text():
                    return


class Network:
    """A switch and the hosts at it."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self._switch = Host("switch", "")
        self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
        self._switch.run("ip", "link", "set", "bridge", "up")

    def add(self, name: str) -> Host:
        """A new host with a cable to the switch."""
        number = len(self.hosts) + 1
        host = self.hosts[name] = Host(name, f"{NETWORK}.{number}")
        cable = f"cable{number}"
        self._switch.run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._switch.run("ip", "link", "set", cable, "master", "bridge", "up")
        host.show(host.address)
        for device in ("lo", "eth0"):
            host.run("ip", "link", "set", device, "up")
        return host

    def address_for(self, number: int) -> str:
        """A further address in this network, for any host to show."""
        return f"{NETWORK}.{FURTHER + number}"

    def cut(self, name: str) -> None:
        """Pull the host's cable out of the switch."""
        self._switch.run("ip", "link", "set", self._cable(name), "down")

    def heal(self, name: str) -> None:
        """Put it back."""
        self._switch.run("ip", "link", "set", self._cable(name), "up")

    def close(self) -> None:
        for host in (*self.hosts.values(), self._switch):
            host.close()

    def _cable(self, name: str) -> str:
        return f"cable{list(self.hosts).index(name) + 1}"


@contextlib.contextmanager
def running_network() -> Generator[Network]:
    network = Network()
    try:
        yield network
    finally:
        network.close()


async def forward(address: str, port: int) -> asyncio.Server:
    """Let other hosts reach a server on the loopback of this host, at this address of it. The caller's thread is on it."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        try:
            await asyncio.gather(pump(reader, back), pump(there, writer))
        except asyncio.CancelledError:
            pass  # the end of the loop
        finally:
            back.transport.abort()
            writer.transport.abort()

    return await asyncio.start_server(serve, address, port)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise HostsFailed(f"{command[0]} is missing: install util-linux and iproute2") from None
    if done.returncode != 0:
        raise HostsFailed(f"{' '.join(command)}: {done.stderr.strip()}")
