"""Files that are nobody else's: the secrets that this process is given."""

import os
import stat
from pathlib import Path

from trellis.engine.errors import KeyUnusable

SECRET_BYTES_MAX = 1024 * 1024


def read_private(path: Path) -> bytes:
    """The bytes of a secret's file; raises KeyUnusable unless this user or root owns it and nobody else can read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            body = file.read(SECRET_BYTES_MAX)
    except OSError as error:
        raise KeyUnusable(reason=f"the key {path} cannot be read: {error.strerror}") from error
    check_owner(path, found)
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise KeyUnusable(reason=f"others can read {path}; run: chmod 600 {path}")
    return body


def check_owner(path: Path, found: os.stat_result) -> None:
    """Raise KeyUnusable for a key file of another user, who could put another key there at any time."""
    if found.st_uid not in {os.geteuid(), 0}:
        reason = f"{path} belongs to another user ({found.st_uid}); run: chown {os.geteuid()} {path}"
        raise KeyUnusable(reason=reason)
