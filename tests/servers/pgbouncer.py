"""A real pgbouncer before a PostgreSQL server of the tests.

No wheel has it, so only long proofs need it. A binary that somebody chose comes first (`TRELLIS_TEST_PGBOUNCER`), then the
one of the machine. Where there is none, a test fails with the sentence `NEEDED`: it is never skipped.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from tests.servers.postgres import unprivileged_user

CHOSEN = "TRELLIS_TEST_PGBOUNCER"
NEEDED = f"this proof needs pgbouncer: `sudo apt-get install -y pgbouncer`, or name one by {CHOSEN}"
START_S = 20.0
LOOK_S = 0.05


def pgbouncer_binary() -> str:
    chosen = os.environ.get(CHOSEN)
    path = shutil.which(chosen) if chosen else shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    assert path is not None, NEEDED
    return path


@contextlib.contextmanager
def running_pgbouncer(url: str, users: list[str], *, mode: str = "transaction", sessions: int = 10) -> Iterator[str]:
    """A pgbouncer before the server of this URL, on loopback; yields `host:port`.

    Of each pair of user and database at most `sessions` server sessions are open.
    """
    server = urlsplit(url)
    folder = Path(tempfile.mkdtemp(prefix="trellis-pgbouncer-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "users.txt").write_text("".join(f'"{user}" ""\n' for user in users))
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={server.hostname} port={server.port}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = trust\n"
        f"auth_file = {folder}/users.txt\npool_mode = {mode}\ndefault_pool_size = {sessions}\nmax_client_conn = 1000\n"
    )
    folder.chmod(0o755)
    user = unprivileged_user()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [pgbouncer_binary(), folder / "pgbouncer.ini"],
            stdout=log,
            stderr=log,
            user=user,
            extra_groups=[] if user else None,
        )
    try:
        ends = time.monotonic() + START_S
        while not _answers(port):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < ends, (folder / "log").read_text()
            threading.Event().wait(LOOK_S)
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def through(url: str, pooler: str) -> str:
    """The URL with the address of the pooler in it."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    return urlunsplit(parts._replace(netloc=f"{user}@{pooler}"))


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
