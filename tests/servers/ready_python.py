"""A `python` for tests that has imported the program already: one process imports everything and forks for each start.

A new interpreter that imports the gateway uses 1 to 2.5 s of processor time, a fork some 0.05 s. The process has driven
a run of an agent, too: what a process does for the first time costs it half as much again. `ready_python()` is a script that
takes the place of `sys.executable` before `-m MODULE`, `-c CODE` or the name of a file. The script hands
its arguments, its environment, its folder and its open files to the ready process, passes SIGTERM, SIGINT and SIGHUP
on, and ends as the fork ends. When the script is killed, the fork is killed. The script does not pass on other signals,
the limits of its process and its process id. The script `trellis` beside it is the program by its own name.

There is one ready process for the whole suite. The first test that needs it starts it, and it ends when the suite ends.
"""

import asyncio
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
SHARED_FOLDER = "TRELLIS_TEST_READY_PYTHON"
"""The variable that names the folder of the ready process."""
SUITE_PID = "suite.pid"
SIZE_BYTES = 4
WATCHED_S = 0.01
PRELOADED = (
    "anyio._backends._asyncio",
    "asyncpg",
    "dulwich.config",
    "dulwich.repo",
    "dulwich.worktree",
    "encodings.idna",
    "fastapi.telemetry._runtime",
    "joserfc.jwk",
    "joserfc.jwt",
    "nats",
    "trellis.agents.conversation",
    "trellis.agents.offline.model",
    "trellis.api.artifacts",
    "trellis.app.instance",
    "trellis.bus.services",
    "trellis.bus.wire.nats",
    "trellis.bus.wire.streams",
    "trellis.gateway",
    "trellis.http_server.server",
    "trellis.ledgers.postgres.ledger",
    "trellis.ledgers.sqlite.ledger",
    "trellis.nlm_backend.app",
    "trellis.storage.objects.local",
    "trellis.worker.on_bus.worker",
    "uvicorn.lifespan.on",
    "uvloop",
)
"""Imported beside what the commands of `trellis` import; also what they import only when they run."""
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
def sharing_python() -> Iterator[None]:
    """Meanwhile, this process and all that it starts share one ready process."""
    folder = Path(tempfile.mkdtemp(prefix="trellis-python-"))
    (folder / SUITE_PID).write_text(str(os.getpid()), encoding="ascii")
    os.environ[SHARED_FOLDER] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(SHARED_FOLDER, None)
        shutil.rmtree(folder, ignore_errors=True)


def ready_python() -> str:
    """The script to start instead of `sys.executable`."""
    folder = Path(os.environ[SHARED_FOLDER])
    program = folder / "python"
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _start(folder)
            for name in ("trellis", "python"):
                text = CLIENT.format(python=sys.executable, path=str(folder / "socket"), size=SIZE_BYTES)
                (folder / name).write_text(text, encoding="utf-8")
                (folder / name).chmod(0o700)
    return str(program)


def _start(folder: Path) -> None:
    """Come back when the ready process listens: what is started here leaves it behind and ends."""
    with (folder / "log").open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "tests.servers.ready_python", folder],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )


# --- the ready process ---------------------------------------------------------------------------------------------


def serve(folder: Path) -> None:
    """Fork for everybody who connects, until the suite ends."""
    suite = os.pidfd_open(int((folder / SUITE_PID).read_text(encoding="ascii")))
    _import_everything()
    with tempfile.TemporaryDirectory(prefix="trellis-run-") as place:
        asyncio.run(_drive_a_run(Path(place)))
    assert threading.active_count() == 1, "no thread goes along into a fork"
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen()
        if os.fork():
            os._exit(0)
        while suite not in (ready := select.select([listening, suite], [], [])[0]):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if listening in ready:
                connection, _ = listening.accept()
                if os.fork() == 0:
                    listening.close()
                    os.close(suite)
                    attend(connection)
                connection.close()


def _import_everything() -> None:
    from trellis.cli.program import LISTED, commands_of

    for module in {module for module, _, _ in LISTED.values()}:
        commands_of(module)
    for name in PRELOADED:
        importlib.import_module(name)
    make_ready()


async def _drive_a_run(folder: Path) -> None:
    """A run of an agent, from its request to its end, on an instance that is then closed."""
    from trellis.app.instance import open_instance
    from trellis.app.settings import Settings
    from trellis.runs.orchestration import TriggerKind

    stop = asyncio.Event()
    async with open_instance(Settings.model_validate({}), f"sqlite:///{folder / 'ledger.db'}") as instance:
        await instance.plant()
        serving = asyncio.create_task(instance.serve(stop))
        run = await instance.layer.trigger("archivist-violin", {}, kind=TriggerKind.MANUAL)
        while (job := await instance.ledger.job(run.job_id)) is None or job.place != "ended":
            assert not serving.done(), serving
            await asyncio.sleep(WATCHED_S)
        stop.set()
        await serving


def make_ready() -> None:
    """What a process would do at its first use: messages of models, outgoing connections, routes of a gateway."""
    from pydantic_ai.messages import ModelMessagesTypeAdapter

    from tests.gateway.description import description
    from trellis.net.guard import system_authorities

    for prepare in (ModelMessagesTypeAdapter.rebuild, system_authorities, description):
        prepare()


def attend(connection: socket.socket) -> NoReturn:
    """Run one program for whoever is connected."""
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
    """The program, from its beginning to its end."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    time.tzset()
    tempfile.tempdir = None
    code = 1
    try:
        run(order["argv"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - what an interpreter does with it
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(argv: list[str]) -> None:
    """As `trellis ARGUMENTS` or `python`, `-m MODULE`, `-c CODE` or FILE, `ARGUMENTS` would."""
    program, *arguments = argv
    if Path(program).name == "trellis":
        from trellis.cli import main

        sys.argv = argv
        sys.exit(main(arguments))
    option, *rest = arguments
    if option not in {"-m", "-c"}:
        _find_modules_in(Path(option).resolve().parent)
        sys.argv = arguments
        runpy.run_path(option, run_name="__main__")
        return
    _find_modules_in(Path.cwd())
    what, *rest = rest
    sys.argv = [option, *rest]
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})


def _find_modules_in(folder: Path) -> None:
    """This folder comes first, as where a program was started, then the variable of the program's own environment."""
    sys.path[:1] = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
