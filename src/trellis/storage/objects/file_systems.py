"""Whether a folder is on a disk of this machine, so that opening a file there cannot wait for another machine."""

from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""Where Linux lists the mounted file systems."""
LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems on disks or in the memory of this machine."""
TYPE_UNKNOWN = ""


def is_on_local_disk(path: Path) -> bool:
    """Whether the folder's file system is known to be local. False where the system does not say."""
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    return file_system_type(path.resolve(), mounts) in LOCAL


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
