"""What a reader in another process sees while runs go on and processes die: status never goes back and never promises too much."""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import SEED
from tests.faults.fleet import ROOT, Nursery, until, wait_ended
from tests.runs.processes.reader import Reader
from tests.runs.processes.stories import PATIENCE_S, a_fleet
from tests.runs.processes.test_fleet import kill_one, submit_runs


@contextlib.contextmanager
def reading(objects: Path, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A reader process beside the test."""
    command = [sys.executable, "-S", "-m", "tests.runs.processes.reader", str(objects), str(out)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def watch_runs(folder: Path, nursery: Nursery, *, agents: int, each: int, kills: int) -> dict[str, Any]:
    rng, out = random.Random(SEED), folder / "seen.json"
    orders = {"runs": agents, "hold_s": 0.02, "sweep_s": 0.25}
    url = f"sqlite:///{folder / 'ledger.db'}"
    async with a_fleet(url, folder, nursery, **orders) as (instance, fleet):
        with reading(folder / "objects", out) as process:
            runs = await submit_runs(instance.ledger, agents, each)
            fleet.start(2)
            for _ in range(kills):
                await kill_one(fleet, rng)
            everything = [run_id for mine in runs.values() for run_id in mine]
            await wait_ended(instance.ledger, everything, fleet)
            async with asyncio.timeout(PATIENCE_S):
                for slug, mine in runs.items():
                    for run_id in mine:
                        last = (await instance.ledger.events(run_id))[-1]
                        await instance.published.reached(slug, run_id, last.version)
            assert set(await fleet.drain()) == {0}
            out.with_suffix(".stop").touch()
            await until(lambda: out.exists() or process.poll() is not None, "the reader has told")
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.requirement("RUN-2", "RUN-3", "PIPE-8", "PIPE-10")
@pytest.mark.parametrize(
    "agents, each, kills", [(3, 2, 1), pytest.param(10, 10, 10, marks=[pytest.mark.prove, pytest.mark.timeout(600)])]
)
async def test_a_reader_never_sees_a_status_go_back_or_count_a_step_that_is_not_there(
    orchestrators: Nursery, tmp_path: Path, agents: int, each: int, kills: int, figures
):
    seen = await watch_runs(tmp_path, orchestrators, agents=agents, each=each, kills=kills)
    assert seen["problems"] == []
    assert (seen["runs"], seen["ended"]) == (agents * each, agents * each)
    assert {"running", "completed"} <= set(seen["states"]), "it looked too late to see anything happen"
    assert seen["changes"] > 2 * agents * each
    figures(looks=seen["looks"], changes=seen["changes"], runs=seen["runs"], kills=kills)


def published(folder: Path, version: int, steps: int, state: str = "running", files: int | None = None) -> Path:
    run = folder / "agents" / "a" / "runs" / "run_1"
    (run / "steps").mkdir(parents=True, exist_ok=True)
    for number in range(1, (steps if files is None else files) + 1):
        (run / "steps" / f"{number:02}-x.json").write_text(json.dumps({"step": number}))
    (run / "status.json").write_text(json.dumps({"version": version, "steps_completed": steps, "status": state}))
    return run


def test_the_reader_of_these_tests_notices_each_broken_rule(tmp_path: Path):
    """Each rule is broken once, by hand."""
    reader = Reader(tmp_path)
    published(tmp_path, 4, 1)
    reader.look()
    assert reader.problems == []
    published(tmp_path, 3, 1)
    reader.look()
    assert "went back" in reader.problems.pop()
    published(tmp_path, 5, 2, files=1)
    reader.look()
    assert "step 2 is not there" in reader.problems.pop()
    run = published(tmp_path, 8, 2, "completed")
    reader.look()
    assert "has no manifest" in reader.problems.pop()
    (run / "steps" / "03-late.json").write_text("{}")
    reader.look()
    assert "was written to" in reader.problems.pop()
