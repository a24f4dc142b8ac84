"""Where and when a run was made, and how much of the machine it really had."""

import contextlib
import datetime as dt
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.peers import PEERS
from tests.servers.postgres import PostgresServer

PACKAGES = ("trellis-engine", *sorted(peer.package for peer in PEERS.values()), "asyncpg", "apsw", "uvloop")


def describe(server: PostgresServer, files: Path) -> dict[str, str]:
    """What a reader of the figures must know."""
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{os.cpu_count()} cores of {_processor()}, Linux {platform.release()}",
        "load before": load(),
        "files on": f"{_filesystem(files)} (SQLite), {_filesystem(server.folder)} (PostgreSQL)",
        "python": sys.version.split()[0],
        "postgresql": server.sql("select version()").split(" on ")[0],
        "durability": server.sql(
            "select string_agg(name || '=' || setting, ' ' order by name) from pg_settings"
            " where name in ('fsync', 'synchronous_commit', 'full_page_writes', 'data_checksums')"
        ),
        "packages": ", ".join(_packages()),
    }


def load() -> str:
    """How many processes wanted to run in the last 1, 5 and 15 minutes."""
    return " ".join(f"{average:.2f}" for average in os.getloadavg())


class Steal:
    """The share of processor time that went to others: the hypervisor, and other programs of this machine."""

    def __init__(self) -> None:
        self._before = self._read()

    def share(self) -> float:
        """Stolen by the hypervisor since this was made, as a part of all busy time."""
        busy, stolen = (now - then for now, then in zip(self._read(), self._before, strict=True))
        return stolen / busy if busy else 0.0

    @staticmethod
    def _read() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
        return sum(fields) - fields[3] - fields[4], fields[7]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _filesystem(folder: Path) -> str:
    """The type of the file system a folder is on: the longest mount point that leads to it."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split()
        if folder.resolve().is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1] + _journal(folder, best[1])


def _journal(folder: Path, kind: str, *, root: Path = Path("/")) -> str:
    """For ext4, whether it has a journal: that decides what a new file costs. Empty where the kernel does not say."""
    journals = root / "proc/fs/jbd2"
    number = folder.stat().st_dev
    device = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if kind != "ext4" or not journals.is_dir() or not device.exists():
        return ""
    return f" {'with' if any(journals.glob(f'{device.resolve().name}-*')) else 'without'} a journal"


def _packages() -> Iterator[str]:
    """Names and versions; a peer that is not installed is left out, as its lines are."""
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"
