"""Commands that serve until they are stopped run on the fast event loop, with fewer garbage collections."""

import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from trellis.cli import up, workers
from trellis.cli.program import main
from trellis.worker.app import App

APP = App()


@APP.job("nothing")
async def nothing(ctx: Any, payload: None) -> None:
    """Nothing."""


TUNED = """
import asyncio, gc
from trellis.cli.long_running import run_tuned

async def look():
    return type(asyncio.get_running_loop()).__module__, gc.get_threshold()[0], gc.get_freeze_count() > 0

print(*run_tuned(look()))
"""


def test_a_tuned_process_runs_on_uvloop_and_collects_seldom():
    pytest.importorskip("uvloop")
    ran = subprocess.run([sys.executable, "-c", TUNED], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["uvloop", "50000", "True"]


@pytest.mark.parametrize("module, command", [(up, ["up"]), (workers, ["worker", "tests.cli.test_long_running:APP"])])
def test_the_command_runs_tuned(module: Any, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def run(work: Coroutine[Any, Any, int]) -> int:
        ran.append(work.__qualname__)
        work.close()
        return 0

    monkeypatch.setattr(module, "run_tuned", run)
    monkeypatch.setattr(module, "log_only", lambda *_: None)
    monkeypatch.setattr(module, "configure_tracing", lambda: None)
    assert main([*command, "--ledger", f"sqlite:///{tmp_path}/t.db"]) == 0
    assert len(ran) == 1
