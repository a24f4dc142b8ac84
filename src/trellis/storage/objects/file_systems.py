"""What the file system of a folder can do, by its type: whether it is local, and whether a file may begin unnamed."""

import contextlib
import fcntl
import platform
import struct
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""Where Linux lists the mounted file systems."""
LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems on disks or in the memory of this machine."""
LINKS_UNNAMED = frozenset({"ext4", "tmpfs", "xfs"})
"""File systems that keep the bytes of a file that was synced before it got its first name.

Others may not: btrfs skips the metadata when a file without a name is synced, because nobody could find it.
"""
TYPE_UNKNOWN = ""
_FLAGS = struct.Struct("l")
_GET_FLAGS, _SET_FLAGS, _TOP_OF_HIERARCHIES = 0x80086601, 0x40086602, 0x00020000
"""FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_TOPDIR_FL of the kernel, on the machines below."""
_MACHINES = {"x86_64", "aarch64"}


def is_on_local_disk(path: Path) -> bool:
    """Whether opening a file in this folder cannot wait for another machine. False where the system does not say."""
    return _type_of(path) in LOCAL


def links_unnamed_files(path: Path) -> bool:
    """Whether a file in this folder may be synced first and named afterwards. False where the system does not say."""
    return _type_of(path) in LINKS_UNNAMED


def spread_apart(folder: int) -> None:
    """Tell ext4 that new folders in this open folder do not belong together, as `chattr +T` does.

    They and their files then get inodes in other parts of the disk than what is around this folder. Without a journal,
    ext4 looks through all inodes near a new file that were freed in the last minutes. On other file systems nothing
    happens.
    """
    if platform.system() == "Linux" and platform.machine() in _MACHINES:
        with contextlib.suppress(OSError):
            (flags,) = _FLAGS.unpack(fcntl.ioctl(folder, _GET_FLAGS, _FLAGS.pack(0)))
            if not flags & _TOP_OF_HIERARCHIES:
                fcntl.ioctl(folder, _SET_FLAGS, _FLAGS.pack(flags | _TOP_OF_HIERARCHIES))


def _type_of(path: Path) -> str:
    """The type of the file system that a folder is on; TYPE_UNKNOWN where the system does not say."""
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return TYPE_UNKNOWN
    return file_system_type(path.resolve(), mounts)


def file_system_type(path: Path, mounts: str) -> str:
    """The type of the file system that an absolute path without links is on, by Linux's list of mounts.

    A mount lies over earlier ones at the same folder. TYPE_UNKNOWN if the list names none.
    """
    depth, type_ = 0, TYPE_UNKNOWN
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        point = Path(_unescaped(fields[4])) if len(fields) > 4 else None
        if point is not None and len(point.parts) >= depth and path.is_relative_to(point):
            depth, type_ = len(point.parts), source.partition(" ")[0]
    return type_


def _unescaped(point: str) -> str:
    """A mount point without the list's own form of blanks and backslashes."""
    for character in " \t\n\\":
        point = point.replace(f"\\{ord(character):03o}", character)
    return point
