"""The program as a process: signals, pipes, terminals, workers, the demo."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from tests.cli.conftest import Terminal
from tests.servers.ready_python import ready_python
from trellis.cli import main
from trellis.engine.jobs import Actor
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

APPLICATION = """
import asyncio
from trellis import App, Context

app = App(testing=True)

@app.job("double", lease_s=5, heartbeat_s=1)
async def double(ctx: Context, number: int) -> int:
    return 2 * number

@app.job("linger", lease_s=5, heartbeat_s=1)
async def linger(ctx: Context) -> str:
    ctx.progress("begun")
    await ctx.cancel_requested()
    return "stopped"
"""
SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def running(*arguments: str, cwd: Path, **streams: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [ready_python(), "-m", "trellis", *arguments],
        cwd=cwd,
        text=True,
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def application(tmp_path: Path) -> str:
    (tmp_path / "process_shop.py").write_text(APPLICATION)
    return "process_shop:app"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_runs_jobs_until_it_is_told_to_stop(local: Terminal, application: str, tmp_path: Path, number):
    with running("worker", application, "--ledger", local.url, "--name", "w-7", cwd=tmp_path) as process:
        assert local("submit", "double", "21", "--wait", "60s").out == "42\n"
        (seen,) = local("workers", "--json").records
        assert (seen["name"], seen["info"]["types"]) == ("w-7", ["double", "linger"])
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_worker_on_postgresql(trellis: Terminal, application: str, tmp_path: Path):
    with running("worker", application, "--ledger", trellis.url, "--concurrency", "2", cwd=tmp_path) as process:
        assert trellis("submit", "double", "21", "--wait", "60s").out == "42\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_soft_cancel_reaches_the_handler(local: Terminal, application: str, tmp_path: Path):
    with running("worker", application, "--ledger", local.url, cwd=tmp_path):
        job_id = local.submit("linger")
        while local("job", "show", job_id, "--json").record["status"] != "running":
            pass
        assert "was asked to stop" in local("job", "cancel", job_id).out
        ended = local("submit", "linger", "--id", "other", "--delay", "1h")
        assert ended.code == 0
        while local("job", "show", job_id, "--json").record["status"] == "running":
            pass
    record = local("job", "show", job_id, "--json").record
    assert record["status"] == "cancelled"
    assert record["events"][-1]["payload"]["role"] == "worker"


@pytest.mark.parametrize(
    "spec, says",
    [
        ("process_shop", "write MODULE:APP"),
        ("no_such_shop:app", "there is no module no_such_shop"),
        ("process_shop:nothing", "nothing does not exist in process_shop; it has app"),
        ("process_shop:asyncio", "asyncio is no App"),
        ("broken_shop:app", "broken_shop.py:2: ZeroDivisionError"),
        ("misspelt_shop:app", "misspelt_shop.py:1: SyntaxError"),
        ("hungry_shop:app", "hungry_shop.py:1: ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("bold_shop:app", "bold_shop.py:3: lease_s is 1: it must be from 30 to 120"),
        ("typing_shop:app", "typing_shop.py:4: leese_s is 60: there is no such option (did you mean lease_s?)"),
        ("empty_shop:app", "register at least one"),
    ],
)
def test_an_application_that_cannot_be_used_says_where_it_breaks(
    local: Terminal, application: str, tmp_path: Path, spec: str, says: str
):
    (tmp_path / "broken_shop.py").write_text("x = 1\n1 / 0\n")
    (tmp_path / "misspelt_shop.py").write_text("def (:\n")
    (tmp_path / "hungry_shop.py").write_text("import no_such_dependency\n")
    (tmp_path / "empty_shop.py").write_text("from trellis import App\napp = App()\n")
    (tmp_path / "bold_shop.py").write_text(
        "from trellis import App\napp = App()\n@app.job('a', lease_s=1)\nasync def a(ctx): ...\n"
    )
    (tmp_path / "typing_shop.py").write_text(
        "from trellis import App\napp = App()\ndef options(): return {'leese_s': 60}\n@app.job('a', **options())\nasync def a(ctx): ...\n"
    )
    answer = local("worker", spec)
    assert answer.code == 2
    assert says in answer.err
    assert "Traceback" not in answer.err


def test_following_the_feed_shows_events_as_they_come_and_ends_with_ctrl_c(local: Terminal, tmp_path: Path):
    with running("events", "--follow", "--json", "--ledger", local.url, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "following" in process.stderr.readline()
        job_id = local.submit("a")
        assert json.loads(process.stdout.readline())["id"] == f"{job_id}-1"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.parametrize("arguments", [["jobs"], ["jobs", "--json"]], ids=["table", "json"])
def test_a_reader_that_has_had_enough_is_no_error(local: Terminal, tmp_path: Path, arguments: list[str]):
    local.submit("a")
    read, write = os.pipe()
    os.close(read)
    with running(*arguments, "--ledger", local.url, cwd=tmp_path, stdout=write) as process:
        os.close(write)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, "")


def test_up_serves_until_it_is_told_to_stop(local: Terminal, tmp_path: Path):
    address = f"sqlite:///{tmp_path / 'fresh' / 'ledger.db'}"
    with running("up", "--ledger", address, cwd=tmp_path) as process:
        assert process.stdout is not None
        told: dict[str, str] = {}
        while not (line := process.stdout.readline()).startswith("Ctrl-C"):
            told[line.partition(" ")[0]] = line
        assert "orchestrator" in told["services"]
        assert "sweeper, retention" in told["services"]
        assert "trellis worker" in told["workers"]
        assert told["gateway"].startswith("gateway   http://127.0.0.1:")
        assert told["nlm"].startswith("nlm       http://127.0.0.1:")
        assert f"trellis token issue --role owner --ledger {address}" in told["tokens"]
        assert local("doctor", ledger=address).code == 0
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (0, "stopped\n", "")


async def _beat(url: str) -> None:
    ledger = await open_ledger(url)
    await ledger.heartbeat_worker(
        Actor(role=Role.WORKER, name="worker@a-host-with-a-name:12345"), b'{"types": ["double", "refuse"]}'
    )
    await ledger.close()


class Screen(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def test_output_for_people_fits_eighty_columns(local: Terminal, work, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TRELLIS_LEDGER", local.url)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # a command is printed with the name that finds it
    refused = local.submit("refuse")
    local.submit("double", "1")
    work(local.url)
    asyncio.run(_beat(local.url))
    local.submit("a.type.with.a.rather.long.name.indeed", json.dumps("long " * 50))
    commands = [["jobs"], ["queues"], ["dlq"], ["workers"], ["events"], ["events", refused], ["lifecycles"]]
    commands += [["job", "show", refused], ["job", "explain", refused], ["dlq", "show", refused], ["doctor"]]
    commands += [["lifecycles", "queue-job"], ["verify"], ["version"]]
    for arguments in commands:
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        assert main(arguments) == 0
        plain = SEQUENCES.sub("", screen.getvalue())
        wide = [line for line in plain.splitlines() if len(line) > 80]
        assert plain, arguments
        assert not wide, arguments
        assert refused in plain or arguments[0] not in {"jobs", "dlq", "job"}, "an id is never cut"
        assert "\x1b[" in screen.getvalue(), arguments


def test_the_demo_shows_a_crash_and_leaves_nothing_running(tmp_path: Path):
    folder = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "trellis", "demo", "--crash", "--data", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "kill -9",
        "its worker is gone, the lease is over → attempt 2",
        "report.build: succeeded on attempt 2",
        "attempt 2 did steps",
        "job_lease_expired",
        "dependency_unavailable",
        "validation_failed",
        "1 cancelled",
        "no violation",
        f"cd {folder}",
        f"  {sys.executable} -m trellis jobs\n",  # as it can be typed: no `trellis` is in the PATH
    ):
        assert text in done.stdout, text
    for pid in re.findall(r"process (\d+)", done.stdout):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert (folder / "demo_app.py").is_file()
    assert main(["verify", "--data", str(folder)]) == 0


def test_a_demo_that_is_stopped_takes_its_workers_with_it(tmp_path: Path):
    with running("demo", "--crash", "--data", str(tmp_path / "demo"), cwd=tmp_path) as process:
        assert process.stdout is not None
        pid = next(int(found[1]) for line in process.stdout if (found := re.search(r"process (\d+)", line)))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_demo_ends_with_a_link_that_signs_in_and_opens_its_proposals(tmp_path: Path):
    with running("demo", "--serve", "--data", str(tmp_path / "demo"), cwd=tmp_path) as process:
        assert process.stdout is not None
        link = next(urlsplit(line.strip()) for line in process.stdout if "#code=" in line)
        (proposal,) = parse_qs(link.query)["id"]
        with httpx2.Client(base_url=f"{link.scheme}://{link.netloc}") as client:
            assert client.get(link.path).headers["content-type"].startswith("text/html")
            token = client.post("/sign-in", json={"code": link.fragment.removeprefix("code=")}).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            assert client.get(f"/proposals/{proposal}").json()["status"] == "pending"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (0, False)


def test_the_demo_does_not_take_a_ledger_that_is_not_its_own(local: Terminal):
    answer = local("demo")
    assert (answer.code, "--data DIR" in answer.err) == (2, True)
