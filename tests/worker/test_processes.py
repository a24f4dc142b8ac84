"""Handlers with `runner="process"`: they use processes of their own, can really be stopped, and may crash."""

import asyncio
import os
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from tests.servers.ready_python import ready_python
from tests.worker.conftest import Stand
from tests.worker.process_jobs import app
from trellis import App, OptionInvalid, ProcessContext
from trellis.engine.event_data import last_traceback
from trellis.engine.jobs import JobId
from trellis.testing import sandbox
from trellis.worker import processes
from trellis.worker.options import WorkerOptions

one_turn = pytest.mark.parametrize("stand", [1], indirect=True, ids=["one-turn"])
"""How many turns are in flight makes no difference here, and each process costs a second."""


def lives(file: Path) -> bool:
    """Whether the process whose id is in the file runs. One that has ended, and that nobody waits for, does not."""
    stat = Path(f"/proc/{file.read_text()}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    yield (file := tmp_path / "process-id")
    assert not lives(file), "the test has left its process behind"


async def test_jobs_run_in_a_process_of_their_own_that_is_used_again(tmp_path: Path):
    async with sandbox(app) as box:
        jobs = [await box.submit("square", {"file": str(tmp_path), "n": n}) for n in range(4)]
        await box.run_until_idle(options=WorkerOptions(processes=1))
        results = [await job.result(timeout_s=0) for job in jobs]
        assert [one.value for one in results] == [0, 1, 4, 9]
        assert len({one.process for one in results} - {os.getpid()}) == 1
        assert (await jobs[0].status()).progress == b'{"attempt":1}'
        assert await box.run("halve", Fraction(1, 3)) == Fraction(1, 6)


async def test_a_crash_costs_its_job_an_attempt_and_nobody_else_anything(tmp_path: Path):
    async with sandbox(app) as box:
        crashing = {how: await box.submit("crash", how) for how in ("segfault", "exit", "kill")}
        other = await box.submit("square", {"file": str(tmp_path), "n": 3})
        await box.run_until_idle(skip_waits=True, options=WorkerOptions(processes=2))
        whys = {"segfault": "was killed by SIGSEGV", "exit": "exited with status 3", "kill": "was killed by SIGKILL"}
        for how, job in crashing.items():
            assert await job.result(timeout_s=0) == "attempt 2 worked"
            (retry,) = [event for event in await job.events() if event.type == "job_retry_scheduled"]
            assert f"ProcessCrashed: the process of the handler {whys[how]}" in (retry.cause or "")
            assert (await job.status()).deaths == 0
        assert (await other.result(timeout_s=0)).value == 9
        assert [event.type for event in await other.events()].count("job_claimed") == 1


@one_turn
async def test_a_timeout_ends_the_process_of_a_handler_that_never_returns(stand: Stand, file: Path):
    job = await stand.submit("spin", {"file": str(file)}, max_attempts=1)
    async with stand.running(app):
        await stand.until(lambda: file.exists() and file.read_text() != "")
        assert lives(file)
        await stand.in_state(job, "dead_lettered", step_s=0.1)
        assert not lives(file)
    assert "no end after 1 s (timeout_s)" in (last_traceback(await job.events()) or "")


@one_turn
async def test_a_soft_cancel_reaches_the_handler_and_ends_the_process_of_one_that_does_not_stop(
    stand: Stand, file: Path, tmp_path: Path
):
    hearing_file, unlimited = tmp_path / "hearing", App()
    for type_ in ("spin", "crunch"):
        unlimited.job(type_, runner="process", heartbeat_s=10)(app.spec(type_).handler)
    deaf = await stand.submit("spin", {"file": str(file)})
    hearing = await stand.submit("crunch", {"file": str(hearing_file)})
    async with stand.running(unlimited, processes=2) as worker:
        for one in (file, hearing_file):
            await stand.until(lambda one=one: one.exists() and one.read_text() != "")
        await hearing.cancel()
        await stand.until(lambda: any(one.cancel_requested for one in worker.held_jobs.jobs.values()), step_s=0.5)
        # The clock stands still from here on, so the grace period does not pass.
        await stand.in_state(hearing, "cancelled")
        assert "the handler returned after a soft cancel" in ((await hearing.events())[-1].cause or "")
        await deaf.cancel()
        await stand.in_state(deaf, "cancelled", step_s=0.1)
        assert "did not stop within 2 s" in ((await deaf.events())[-1].cause or "")
        assert not lives(file)
        assert lives(hearing_file)  # it waits for its next job
    assert not lives(hearing_file)


@one_turn
async def test_a_lost_lease_ends_the_process(stand: Stand, file: Path):
    job = await stand.submit("crunch", {"file": str(file)})
    async with stand.running(app, hints=False):
        await stand.until(lambda: file.exists() and file.read_text() != "")
        await job.cancel("hard")
        await stand.until(lambda: not lives(file), step_s=0.5)
    assert (await job.status()).state == "cancelled"


@one_turn
async def test_a_drain_ends_the_process_and_gives_the_job_back(stand: Stand, file: Path):
    job = await stand.submit("crunch", {"file": str(file)})
    worker, hurry = stand.worker(app), asyncio.Event()
    await worker.start()
    await stand.until(lambda: file.exists() and file.read_text() != "")
    hurry.set()
    drained = await worker.drain(hurry)
    assert (drained.cut_short, drained.unsettled) == (1, 0)
    assert (await job.status()).state == "queued"


@one_turn
async def test_errors_of_another_process_keep_their_class_data_and_traceback(stand: Stand):
    jobs = {
        what: await stand.submit("raise", what, max_attempts=1)
        for what in ("permanent", "snooze", "strange", "exit", "long")
    }
    await stand.run_until_idle(app)
    letter = await stand.ledger.dead_letter(jobs["permanent"].id)
    assert letter is not None
    assert letter.reason_code == "policy_violation"
    assert "process_jobs.py" in (last_traceback(await jobs["permanent"].events()) or "")
    assert (await stand.events(jobs["snooze"]))[-1] == "job_snoozed"
    texts = {"strange": "RuntimeError: Strange", "exit": "RuntimeError: SystemExit: 4", "long": "ValueError: xxx"}
    for what, text in texts.items():
        lost = await stand.ledger.dead_letter(JobId(jobs[what].id))
        assert lost is not None
        assert text in lost.last_error


async def test_a_fork_that_comes_out_of_the_handler_does_not_act_for_it(tmp_path: Path):
    async with sandbox(app) as box:
        jobs = [await box.submit("fork"), await box.submit("square", {"file": str(tmp_path), "n": 3})]
        await box.run_until_idle(options=WorkerOptions(processes=1))
        assert await jobs[0].result(timeout_s=0) == "the handler"
        assert (await jobs[1].result(timeout_s=0)).value == 9


async def test_a_process_is_replaced_after_its_last_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "CALLS_MAX", 1)
    async with sandbox(app) as box:
        jobs = [await box.submit("square", {"file": str(tmp_path)}) for _ in range(2)]
        await box.run_until_idle(options=WorkerOptions(processes=1))
        assert len({(await job.result(timeout_s=0)).process for job in jobs}) == 2


@one_turn
async def test_what_cannot_run_in_a_process_is_refused_before_the_worker_starts(stand: Stand):
    local = App()

    @local.job("t", runner="process")
    def handler(ctx: ProcessContext) -> None: ...

    with pytest.raises(OptionInvalid, match="must be at the top level of a module"):
        stand.worker(local)

    async def runs_on_the_loop(ctx: ProcessContext) -> None: ...

    with pytest.raises(OptionInvalid, match="is for a `def` handler without batch"):
        local.job("a", runner="process")(runs_on_the_loop)
    with pytest.raises(OptionInvalid, match="choose one of thread, process"):
        local.job("b", runner="rocket")
    with pytest.raises(OptionInvalid, match="processes is 0"):
        WorkerOptions(processes=0)


SCRIPT = """
from dataclasses import dataclass

import uvloop
from trellis import App, ProcessContext
from trellis.testing import sandbox

app = App()

class Wrong(Exception): ...

@dataclass
class Sum:
    a: int
    b: int

@app.job("add", runner="process", max_attempts=1)
def add(ctx: ProcessContext, both: Sum) -> int:
    if both.a < 0:
        raise Wrong("negative")
    return both.a + both.b

async def main() -> None:
    async with sandbox(app) as box:
        print(await box.run("add", Sum(40, 2)))
        lost = await box.submit("add", Sum(-1, 2))
        await box.run_until_idle()
        print((await box.ledger.dead_letter(lost.id)).last_error)

if __name__ == "__main__":
    uvloop.run(main())
"""


async def test_a_script_runs_handlers_of_its_own_main_module_in_processes_on_the_loop_of_production(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().splitlines() == ["42", "Wrong: negative"]


@one_turn
async def test_a_process_ends_with_its_worker(tmp_path: Path, stand: Stand):
    file = tmp_path / "process-id"
    job = await stand.submit("crunch", {"file": str(file)})
    body = f"from tests.worker.process_worker import serve; serve('sqlite:///{tmp_path / 'ledger.db'}')"
    worker = await asyncio.create_subprocess_exec(ready_python(), "-c", body)
    await stand.until(lambda: file.exists() and file.read_text() != "")
    worker.kill()
    await worker.wait()
    await stand.until(lambda: not lives(file))
    assert (await job.status()).state == "running"
