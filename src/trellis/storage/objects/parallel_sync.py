"""Syncs many open files to the disk at the same time, with one wait for all of them.

Syncing files one after the other costs a wait for each, and most of them wait for the same commit of the file system's
journal. Linux takes many syncs at once (its asynchronous I/O, `io_submit`) and executes them side by side in the kernel:
no threads are needed here. Each file is synced exactly as `fsync` does it, and has a result of its own. Where the calls
are missing or forbidden, the files are synced one after the other.
"""

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Sequence
from typing import NamedTuple

SYNCS_MAX = 256
"""Syncs under way in one context."""
CONTEXTS_MAX = 4
"""Calls that may wait at the same time. A further one syncs its files one after the other."""
_FSYNC = 2
_UNUSABLE = {errno.ENOSYS, errno.EPERM, errno.EACCES}
"""The kernel has no such calls, or forbids them to this process."""


class _CallNumbers(NamedTuple):
    setup: int
    getevents: int
    submit: int


_NUMBERS = {"x86_64": _CallNumbers(206, 208, 209), "aarch64": _CallNumbers(0, 4, 2)}
"""Numbers of the system calls, by machine. The C library has no functions for them."""


class _SyncRequest(ctypes.Structure):
    """`struct iocb` of the kernel, for little-endian machines."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_fd", ctypes.c_uint32),
    )


class _SyncCompletion(ctypes.Structure):
    """`struct io_event` of the kernel: the `data` of a request, and 0 or a negative error number."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class _Context:
    """A context of the kernel, with the memory of its calls: SYNCS_MAX requests that are used again and again."""

    def __init__(self) -> None:
        self.handle = ctypes.c_ulong(0)
        self.requests = (_SyncRequest * SYNCS_MAX)()
        self.pointers = (ctypes.c_void_p * SYNCS_MAX)()
        self.completions = (_SyncCompletion * SYNCS_MAX)()
        first, size = ctypes.addressof(self.requests), ctypes.sizeof(_SyncRequest)
        for index, request in enumerate(self.requests):
            request.data, request.opcode = index, _FSYNC
            self.pointers[index] = first + index * size


class _Contexts:
    """The contexts of this process. A context serves one call at a time and is used again after it."""

    def __init__(self) -> None:
        self._numbers = _NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Drop all contexts: those of a parent process cannot be used by its child."""
        self._lock = threading.Lock()
        self._free: list[_Context] = []
        self._count = 0

    def take(self) -> _Context | None:
        """A free context; None if there is none."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._numbers is None or self._count >= CONTEXTS_MAX:
                return None
            context = _Context()
            if self._call(self._numbers.setup, ctypes.c_uint(SYNCS_MAX), ctypes.byref(context.handle)) < 0:
                if ctypes.get_errno() in _UNUSABLE:
                    self._numbers = None
                return None
            self._count += 1
            return context

    def give_back(self, context: _Context) -> None:
        with self._lock:
            self._free.append(context)

    def sync(self, context: _Context, fds: Sequence[int]) -> dict[int, int]:
        """Sync files, at most SYNCS_MAX. Returns 0 or the error number by index, without those it did not take."""
        assert self._numbers is not None
        count = len(fds)
        for request, fd in zip(context.requests, fds, strict=False):
            request.fd = fd
        taken = 0
        while taken < count:
            rest = ctypes.byref(context.pointers, taken * ctypes.sizeof(ctypes.c_void_p))
            more = self._call(self._numbers.submit, context.handle, ctypes.c_long(count - taken), rest)
            if more <= 0:
                break
            taken += more
        completions, results = context.completions, dict[int, int]()
        while len(results) < taken:  # the requests belong to the kernel until each is answered
            left = ctypes.c_long(taken - len(results))
            answered = self._call(self._numbers.getevents, context.handle, left, left, completions, None)
            for one in completions[: max(0, answered)]:
                results[one.data] = -one.result
        return results

    def _call(self, number: int, *args: object) -> int:
        return self._libc.syscall(ctypes.c_long(number), *args)


_contexts = _Contexts()


def sync_all(fds: Sequence[int]) -> list[OSError | None]:
    """Sync these files to the disk. Returns for each what went wrong, or None."""
    problems: list[OSError | None] = []
    for first in range(0, len(fds), SYNCS_MAX):
        problems += _sync_some(fds[first : first + SYNCS_MAX])
    return problems


def _sync_some(fds: Sequence[int]) -> list[OSError | None]:
    context = _contexts.take() if len(fds) > 1 else None
    results: dict[int, int] = {}
    if context is not None:
        results = _contexts.sync(context, fds)
        _contexts.give_back(context)
    return [_problem(results[index]) if index in results else _sync_alone(fd) for index, fd in enumerate(fds)]


def _problem(number: int) -> OSError | None:
    return OSError(number, os.strerror(number)) if number else None


def _sync_alone(fd: int) -> OSError | None:
    try:
        os.fsync(fd)
    except OSError as error:
        return error
    return None
