"""The only place that joins parts, and where real time, ids and randomness come in."""

import asyncio
import os
import random
import re
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
from trellis.engine.errors import KeyUnusable, NotAllowed
from trellis.engine.ledger import Ledger
from trellis.identity import Identity, TrustedKey, symmetric_key, verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.settings import Settings, read_settings
from trellis.worker.app import App
from trellis.worker.drain import open_until_signalled, run_until_signalled
from trellis.worker.options import WorkerOptions
from trellis.worker.worker import Worker

KEY_SUFFIX = ".key"
KEY_BYTES = 32
"""As many as HS256 needs; written in hexadecimal."""
KEY_MODE = 0o600
ISSUER = "trellis"
"""Who signs with a key file of ours."""
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
    url: str | None = None,
    *,
    token: str | None = None,
    app: App | None = None,
    name: str | None = None,
    operator: bool = False,
) -> AsyncGenerator[Trellis]:
    """A ledger to submit to and to read; without an address the one of the settings.

    With a `token` (or the settings' `TRELLIS_TOKEN`, `TRELLIS_TOKEN_FILE`) the caller has the roles and the name that the
    token gives, and no others, until it expires; raises TokenRefused. Without one the caller is worker and submitter on a
    local SQLite file, and `operator=True` adds the control plane if the file's development key can be read. On PostgreSQL the
    database role decides: the ledger refuses what it may not do, and a token can only take away from that.
    """
    settings = read_settings(os.environ, Path.cwd())
    address = url or settings.ledger
    identity = identify(address, settings, token)
    principal = principal_for(address, name=name or process_name("client"), operator=operator, identity=identity)
    ledger = await open_ledger(address)
    try:
        yield Trellis(ledger, principal, clock=SystemClock(), new_id=new_id, app=app)
    finally:
        await ledger.close()


def make_worker(app: App, ledger: Ledger, options: WorkerOptions) -> Worker:
    """A worker on this process's clock."""
    return Worker(app, ledger, options, clock=SystemClock(), rng=random.Random(), new_id=new_id)  # noqa: S311 - jitter


async def open_when_there(url: str) -> Ledger | None:
    """The ledger, waited for while it does not answer; None when SIGTERM or SIGINT came first."""
    return await open_until_signalled(lambda: open_ledger(url), SystemClock(), random.Random())  # noqa: S311 - jitter


async def run_worker(app: App, ledger: Ledger, options: WorkerOptions | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT and drain it; the exit code of the process (see `ExitCode`)."""
    worker = make_worker(app, ledger, options or WorkerOptions(name=process_name("worker")))
    return int(await run_until_signalled(worker))


# --- authority without HTTP ----------------------------------------------------------------------------------------


def identify(url: str, settings: Settings, token: str | None = None) -> Identity | None:
    """Whom the token names, given or of the settings; None without one. Raises TokenRefused."""
    shown = settings.shown_token() if token is None else token
    return None if shown is None else verify(shown, [token_key(url, settings)], now=time.time())


def principal_for(url: str, *, name: str, operator: bool, identity: Identity | None = None) -> Principal:
    """Who a process is: what its token says, else what the place of the ledger gives."""
    local = url.startswith("sqlite:")
    if identity is not None:
        because = f"the token of {identity.name} gives {_listed(identity.roles)}"
        if not local:
            because += ", and the database role decides about the rest"
        until = time.monotonic() + identity.expires_at - time.time()
        return Principal(name=identity.name, roles=identity.roles, because=because, until=until)
    if not local:
        return Principal(name=name, roles=frozenset(Role), because="the database role decides")
    if not operator:
        return Principal(name=name, roles=LOCAL_ROLES, because=f"a local file gives {_listed(LOCAL_ROLES)}")
    try:
        read_key(development_key_path(url))
    except KeyUnusable as error:
        reason = str(error.data["reason"])
        raise NotAllowed(role=Role.CONTROL_PLANE.value, action="be taken on this ledger", reason=reason) from error
    return Principal(name=name, roles=LOCAL_ROLES | {Role.CONTROL_PLANE})


def token_key(url: str, settings: Settings) -> TrustedKey:
    """The key that signs and verifies tokens: on SQLite the development key beside the file, elsewhere the configured one."""
    if url.startswith("sqlite:"):
        # Not the configured one: whoever could name the key that verifies a token could sign any.
        return symmetric_key(read_key(development_key_path(url)), issuer=ISSUER)
    path = settings.token_key_file
    if path is None:
        reason = "none is configured; set TRELLIS_TOKEN_KEY_FILE, or go without a token: on PostgreSQL the database role decides"
        raise KeyUnusable(reason=reason)
    return symmetric_key(read_key(path), issuer=ISSUER)


def _listed(roles: frozenset[Role]) -> str:
    return " and ".join(sorted(role.value for role in roles))


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


def read_key(path: Path) -> bytes:
    """The key in a private file; raises KeyUnusable. One that others can read proves nothing."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise KeyUnusable(reason=f"the key {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyUnusable(reason=f"{path} holds no key") from error
    if stat.S_IMODE(mode) & 0o077:
        raise KeyUnusable(reason=f"others can read {path}; run: chmod 600 {path}")
    if not re.fullmatch(f"(?:[0-9a-fA-F]{{2}}){{{KEY_BYTES},}}", text):
        raise KeyUnusable(reason=f"{path} holds no key: it must be {2 * KEY_BYTES} hexadecimal digits or more")
    return bytes.fromhex(text)
