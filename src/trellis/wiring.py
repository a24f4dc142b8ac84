"""The only place that joins parts, and where real time, ids and randomness come in."""

import asyncio
import os
import random
import secrets
import socket
import stat
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from trellis.client import Trellis
from trellis.engine.authority import Principal
from trellis.engine.errors import NotAllowed
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.settings import read_settings
from trellis.worker.app import App
from trellis.worker.drain import run_until_signalled
from trellis.worker.options import WorkerOptions
from trellis.worker.worker import Worker

KEY_SUFFIX = ".key"
KEY_BYTES = 32
KEY_MODE = 0o600
LOCAL_ROLES = frozenset({Role.WORKER, Role.SUBMITTER})


class SystemClock:
    """This process's own clock."""

    def monotonic(self) -> float:
        """Seconds that only ever grow."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait that long."""
        await asyncio.sleep(seconds)


class RandomIds:
    """Random uuids (version 4) cut from a page of random bytes: asking the kernel for each one costs far more than the
    id, because the interpreter lock is given up around every such call.
    """

    PAGE_BYTES = 4096

    def __init__(self, read: Callable[[int], bytes] = os.urandom) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._page, self._at = b"", 0
        os.register_at_fork(after_in_child=self._forget)

    def __call__(self) -> str:
        with self._lock:
            if self._at >= len(self._page):
                self._page, self._at = self._read(self.PAGE_BYTES), 0
            raw = bytearray(self._page[self._at : self._at + 16])
            self._at += 16
        raw[6] = raw[6] & 0x0F | 0x40
        raw[8] = raw[8] & 0x3F | 0x80
        text = raw.hex()
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def _forget(self) -> None:
        """A forked child must not give out its parent's ids."""
        self._lock = threading.Lock()
        self._page, self._at = b"", 0


new_id = RandomIds()


def process_name(kind: str) -> str:
    """A name people can find the process by."""
    return f"{kind}@{socket.gethostname()}:{os.getpid()}"


@asynccontextmanager
async def connect(
    url: str | None = None, *, app: App | None = None, name: str | None = None, operator: bool = False
) -> AsyncGenerator[Trellis]:
    """A ledger to submit to and to read; without an address the one of the settings.

    On a local SQLite file the caller is worker and submitter; `operator=True` adds the control plane and needs the
    file's development key. On PostgreSQL the database role decides, and the ledger refuses what it may not do.
    """
    address = url or read_settings(os.environ, Path.cwd()).ledger
    principal = principal_for(address, name=name or process_name("client"), operator=operator)
    ledger = await open_ledger(address)
    try:
        yield Trellis(ledger, principal, clock=SystemClock(), new_id=new_id, app=app)
    finally:
        await ledger.close()


def make_worker(app: App, ledger: Ledger, options: WorkerOptions) -> Worker:
    """A worker on this process's clock."""
    return Worker(app, ledger, options, clock=SystemClock(), rng=random.Random(), new_id=new_id)  # noqa: S311 - jitter


async def run_worker(app: App, ledger: Ledger, options: WorkerOptions | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT and drain it; the exit code of the process (see `ExitCode`)."""
    worker = make_worker(app, ledger, options or WorkerOptions(name=process_name("worker")))
    return int(await run_until_signalled(worker))


# --- authority without HTTP ----------------------------------------------------------------------------------------


def principal_for(url: str, *, name: str, operator: bool) -> Principal:
    """Who a process is that shows no token."""
    if not url.startswith("sqlite:"):
        return Principal(name=name, roles=frozenset(Role), because="the database role decides")
    if not operator:
        because = f"a local file gives {' and '.join(sorted(role.value for role in LOCAL_ROLES))}"
        return Principal(name=name, roles=LOCAL_ROLES, because=because)
    _check_development_key(development_key_path(url))
    return Principal(name=name, roles=LOCAL_ROLES | {Role.CONTROL_PLANE})


def development_key_path(url: str) -> Path:
    """Where the development key of a SQLite ledger lies: next to the file."""
    path = url.removeprefix("sqlite:///").partition("?")[0]
    return Path(path + KEY_SUFFIX)


def make_development_key(url: str) -> Path:
    """Make the development key if there is none; only its owner can read it."""
    path = development_key_path(url)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, KEY_MODE)
    except FileExistsError:
        return path
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")
    return path


def _check_development_key(path: Path) -> None:
    """Being able to read a private key file is what makes an operator here; a key that others can read proves nothing."""
    try:
        mode = path.stat().st_mode
        present = len(path.read_text(encoding="ascii").strip()) == 2 * KEY_BYTES
    except OSError as error:
        raise _no_operator(f"the development key {path} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise _no_operator(f"others can read {path}; run: chmod 600 {path}")
    if not present:
        raise _no_operator(f"{path} holds no key")


def _no_operator(reason: str) -> NotAllowed:
    return NotAllowed(role=Role.CONTROL_PLANE.value, action="be taken on this ledger", reason=reason)
