"""Commands that serve until they are stopped run on the fast event loop, with fewer garbage collections."""

import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from trellis.cli import up, workers
from trellis.cli.long_running import tune_server, tune_worker
from trellis.cli.program import main
from trellis.worker.app import App

APP = App()


@APP.job("nothing")
async def nothing(ctx: Any, payload: None) -> None:
    """Nothing."""


TUNED = """
import asyncio, gc, sys
from trellis.cli.long_running import run_tuned, tune_server, tune_worker

async def look():
    return type(asyncio.get_running_loop()).__module__, gc.get_threshold()[0], gc.get_freeze_count() > 0, sys.getswitchinterval()

print(*run_tuned(look(), tune={}))
"""


@pytest.mark.parametrize("tune, switch_s", [(tune_server, "0.005"), (tune_worker, "0.0005")])
def test_a_tuned_process_runs_on_uvloop_and_collects_seldom(tune: Callable[[], None], switch_s: str):
    pytest.importorskip("uvloop")
    program = [sys.executable, "-c", TUNED.format(tune.__name__)]
    ran = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["uvloop", "50000", "True", switch_s]


@pytest.mark.parametrize(
    "module, command, tuned",
    [(up, ["up"], tune_server), (workers, ["worker", "tests.cli.test_long_running:APP"], tune_worker)],
)
def test_the_command_runs_tuned(
    module: Any, command: list[str], tuned: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ran: list[Callable[[], None]] = []

    def run(work: Coroutine[Any, Any, int], *, tune: Callable[[], None]) -> int:
        ran.append(tune)
        work.close()
        return 0

    monkeypatch.setattr(module, "run_tuned", run)
    monkeypatch.setattr(module, "log_only", lambda *_: None)
    monkeypatch.setattr(module, "configure_tracing", lambda: None)
    assert main([*command, "--ledger", f"sqlite:///{tmp_path}/t.db"]) == 0
    assert ran == [tuned]
