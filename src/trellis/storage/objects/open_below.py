"""Opens a file or folder some levels below an open folder, following no links, with one system call where possible.

Without links means a step for each level: five opens and closes for a folder of a run, each of which gives up the
interpreter. Linux has a call that takes the whole path and refuses links itself (`openat2`, since 5.6). It is asked
first. What it cannot open is opened step by step, which also says what is wrong.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from functools import cache

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a folder of the store is opened: no link."""

OPENAT2 = ctypes.c_long(437)
"""The number of the system call on the machines below. The C library has no function for it."""
_MACHINES = {"x86_64", "aarch64"}
_NO_LINKS, _BENEATH = 0x04, 0x08
"""RESOLVE_NO_SYMLINKS and RESOLVE_BENEATH of the kernel."""


class _OpenHow(ctypes.Structure):
    """`struct open_how` of the kernel."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW_BYTES = ctypes.c_size_t(ctypes.sizeof(_OpenHow))
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
HAS_OPENAT2 = platform.system() == "Linux" and platform.machine() in _MACHINES
"""Whether the kernel may have the call. One that is too old, or forbids it, gets steps."""


def open_below(folder: int, names: Sequence[bytes], flags: int) -> int:
    """Open what is at this path below an open folder, or the folder itself anew; raises OSError.

    Every level but the last must be a folder.
    """
    if HAS_OPENAT2 and names:
        fd = _libc.syscall(OPENAT2, ctypes.c_long(folder), b"/".join(names), _how(flags), _HOW_BYTES)
        if fd >= 0:
            return fd
        if ctypes.get_errno() == errno.ENOENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return open_stepwise(folder, names, flags)


def open_stepwise(folder: int, names: Sequence[bytes], flags: int) -> int:
    """`open_below` with a call for each level."""
    # Opened anew: a duplicated descriptor would share its directory position.
    *above, last = names or (b".",)
    at = folder
    try:
        for name in above:
            upper, at = at, os.open(name, OPEN_FOLDER, dir_fd=at)
            if upper != folder:
                os.close(upper)
        return os.open(last, flags, dir_fd=at)
    finally:
        if at != folder:
            os.close(at)


@cache
def _how(flags: int) -> object:
    """A pointer to the flags, as the call takes them."""
    return ctypes.byref(_OpenHow(flags, 0, _NO_LINKS | _BENEATH))
