"""Free space on the disks of an instance. With too little, a process does not begin, and a running one is not ready."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from trellis.engine.errors import DiskFull
from trellis.engine.jobs import PAYLOAD_BYTES_MAX

ROOM_BYTES_MIN = 2 * PAYLOAD_BYTES_MAX
"""A disk counts as full with less free space than this.

The longest payload is written to the log of an SQLite ledger and then to its file.
"""


def existing_above(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    absolute = path.absolute()
    return next((one for one in (absolute, *absolute.parents) if one.exists()), Path("/"))


def has_room(path: Path) -> bool:
    """Whether the disk that holds this path, or would hold it, can take writes. Raises OSError.

    A file system that reports no size is taken at its word only when it refuses a write.
    """
    usage = shutil.disk_usage(existing_above(path))
    return usage.total == 0 or usage.free >= ROOM_BYTES_MIN


def require_room(folders: Iterable[Path]) -> None:
    """Raise DiskFull for the first folder whose disk is full. Raises OSError."""
    for folder in folders:
        if not has_room(folder):
            raise DiskFull(folder=folder, needed_mib=ROOM_BYTES_MIN // 1024**2)
