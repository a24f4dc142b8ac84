"""Files that this process creates: their modes, and syncing them. Checks on the secret files that it reads.

Files in a store follow the mode of the store's top folder, as in PostgreSQL's data directory: the group gets what that
mode gives a group, others get nothing. A new top folder is its owner's alone; `chmod` and `chgrp` share it.
"""

import os
import stat
from itertools import chain, takewhile
from pathlib import Path

from trellis.engine.errors import KeyUnusable

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
SECRET_BYTES_MAX = 1024 * 1024
_GROUP = 0o070
_NOT_OWN_SECRET, _NOT_ROOT_SECRET = 0o077, 0o037
"""Bits that the mode of a secret file of this user, or of root for another user, must not have."""


def file_mode(top: int) -> int:
    """The mode of a file in a store whose top folder has the mode `top`."""
    return PRIVATE_FILE | top & 0o060


def folder_mode(top: int) -> int:
    """The mode of a folder in a store whose top folder has the mode `top`."""
    return PRIVATE_FOLDER | top & (_GROUP | stat.S_ISGID)


def share(descriptor: int, mode: int) -> None:
    """Set exactly this mode on a new file or folder shared with a group: the umask may have removed bits."""
    if mode & _GROUP:
        os.fchmod(descriptor, mode)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_beside(path: Path, beside: Path, flags: int) -> int:
    """Open a file. If missing, create it with the mode of the file `beside`, as SQLite does with its own files."""
    mode = file_mode(beside.stat().st_mode)
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return os.open(path, flags | os.O_CREAT, mode)
    share(descriptor, mode)
    return descriptor


def is_open_to_others(path: Path) -> bool:
    """Whether users other than owner and group can access this path, by its mode and its folder's mode."""
    try:
        return bool(path.stat().st_mode & 0o007 and path.absolute().parent.stat().st_mode & 0o001)
    except OSError:
        return False


def make_private_folder(path: Path) -> None:
    """Create a folder and the missing ones above it, all of them their owner's alone. Existing ones keep their modes.

    `Path.mkdir(mode, parents=True)` gives the mode to the last folder only.
    """
    missing = takewhile(lambda folder: not folder.is_dir(), chain([path], path.parents))
    for folder in reversed([*missing]):
        folder.mkdir(PRIVATE_FOLDER, exist_ok=True)


def make_private(path: Path) -> None:
    """Create an empty file that only its owner can read, unless the file exists.

    Errors are ignored: opening the file later reports them.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
    except OSError:
        return


def write_private(path: Path, text: str) -> None:
    """Create a file that only its owner can read. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def read_private(path: Path) -> bytes:
    """The bytes of a secret file. Raises KeyUnusable unless this user or root owns it and no other user can read it.

    The group may read a file of root, and not write it: so Kubernetes and systemd give secrets to a process that is not
    root.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            file_status = os.fstat(descriptor)
            body = file.read(SECRET_BYTES_MAX)
    except OSError as error:
        raise KeyUnusable(reason=f"the key {path} cannot be read: {error.strerror}") from error
    check_owner(path, file_status)
    is_own = file_status.st_uid == os.geteuid()
    if stat.S_IMODE(file_status.st_mode) & (_NOT_OWN_SECRET if is_own else _NOT_ROOT_SECRET):
        reason = f"others can read {path}; run: chmod 600 {path}"
        if not is_own:
            reason = f"others can read {path}, or its group can change it; run: chmod 640 {path}"
        raise KeyUnusable(reason=reason)
    return body


def check_owner(path: Path, status: os.stat_result) -> None:
    """Raise KeyUnusable for a key file of another user, who could replace the key at any time."""
    if status.st_uid not in {os.geteuid(), 0}:
        reason = f"{path} belongs to another user ({status.st_uid}); run: chown {os.geteuid()} {path}"
        raise KeyUnusable(reason=reason)
