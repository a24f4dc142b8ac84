"""What handlers leave behind: a file of shared memory for each worker process, one record for each handler start.

A mark costs well under a microsecond and no system call, so that it weighs the same on every engine.
"""

import itertools
import mmap
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

RECORD = struct.Struct("<qq")
CAPACITY = 200_000
BLOCK = 4_096
"""Records that the driver reads at a time: a file has room for far more than there are new ones."""


class Marker:
    """The worker's side: `mark(sent_ns)` says that a handler starts now."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}.marks"
        with path.open("w+b") as file:
            file.truncate(CAPACITY * RECORD.size)
            self._memory = mmap.mmap(file.fileno(), CAPACITY * RECORD.size)
        self._next = itertools.count()  # atomic, so handlers on threads need no lock
        self._pack = RECORD.pack_into

    def mark(self, sent_ns: int) -> None:
        """One handler start; `sent_ns` is when its job was submitted, as its payload says."""
        self._pack(self._memory, next(self._next) * RECORD.size, sent_ns, time.time_ns())


@dataclass(frozen=True, slots=True)
class Mark:
    """When a job was sent and when its handler started, in nanoseconds of the machine's clock."""

    sent_ns: int
    began_ns: int


@dataclass(slots=True)
class Marks:
    """The driver's side: everything the workers have marked so far."""

    folder: Path
    records: list[Mark] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def poll(self) -> int:
        """Take in new marks; returns how many there are in all."""
        for path in self.folder.glob("*.marks"):
            self._read[path] = self._take(path, self._read.get(path, 0))
        return len(self.records)

    def _take(self, path: Path, count: int) -> int:
        with path.open("rb", buffering=0) as file:
            file.seek(count * RECORD.size)
            while body := file.read(BLOCK * RECORD.size):
                for sent_ns, began_ns in RECORD.iter_unpack(body[: len(body) // RECORD.size * RECORD.size]):
                    if not began_ns:
                        return count
                    self.records.append(Mark(sent_ns, began_ns))
                    count += 1
        return count
