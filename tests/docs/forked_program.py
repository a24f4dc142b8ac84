"""Runs `trellis` for a document without a new interpreter: a process that has imported everything forks one for each command.

The script in `CLIENT` takes the place of `trellis` in the PATH. It hands its arguments, its environment, its folder and its open files
to that process, passes signals on, and ends as the command ends. When the script is killed, the command is killed.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from trellis.cli.program import LISTED, commands_of, main

ROOT = Path(__file__).resolve().parents[2]
SIZE_BYTES = 4
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
order = json.dumps({{"argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ)}}).encode()
socket.send_fds(server, [len(order).to_bytes({size}, "big")], [0, 1, 2])
server.sendall(order)
code = server.recv(1)
os._exit(code[0] if code else 70)
"""


@contextlib.contextmanager
def forked_program(folder: Path) -> Iterator[Path]:
    """The folder of a `trellis` for the PATH."""
    path = folder / "socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.forked_program", path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    program = folder / "trellis"
    program.write_text(CLIENT.format(python=sys.executable, path=str(path), size=SIZE_BYTES))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    yield folder
    server.communicate()


def serve(path: str) -> None:
    """Until the standard input is closed."""
    for module in {module for module, _, _ in LISTED.values()}:
        commands_of(module)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if sys.stdin in ready:
                return
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                attend(connection)
            connection.close()


def attend(connection: socket.socket) -> NoReturn:
    """Run one command for whoever is connected."""
    head, files, _, _ = socket.recv_fds(connection, SIZE_BYTES, 3)
    order = json.loads(connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(order, files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    while ended not in select.select([connection, ended], [], [])[0]:
        number = connection.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """The command, from the beginning to its end."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = order["argv"]
    code = 1
    try:
        code = main(sys.argv[1:])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - what an interpreter does with it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
