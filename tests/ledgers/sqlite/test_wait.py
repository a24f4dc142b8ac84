"""Waiting for work: a commit here wakes at once, a commit of another process soon, and time out ends it."""

import asyncio
import threading
from pathlib import Path
from typing import Any, Self

import pytest

from tests.ledgers.sqlite.people import ADMIN, WORKER, claim, submit
from trellis.engine.jobs import Claim, ClaimId, Turn, TypeClaim
from trellis.ledgers.sqlite import reads
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.ledgers.sqlite.notifier import UNTOLD_POLL_S, CommitWatch, FileWatch

LONG_S = 60.0
"""Longer than the test may last: a wait that returns was woken."""


async def waiting(ledger: SqliteLedger, *types: str) -> asyncio.Task[None]:
    task = asyncio.ensure_future(ledger.wait_for_work(types or ("work",), LONG_S))
    await asyncio.sleep(0)
    return task


async def test_a_submit_of_this_process_wakes(ledger: SqliteLedger):
    task = await waiting(ledger)
    await submit(ledger)
    await asyncio.wait_for(task, 10)


async def test_a_submit_of_another_process_wakes(ledger: SqliteLedger, reopen):
    other = await reopen()
    await ledger.wait_for_work(("work",), 0.05)
    task = await waiting(ledger)
    await submit(other)
    await asyncio.wait_for(task, 10)


async def test_a_job_that_came_between_an_empty_claim_and_the_wait_is_not_missed(ledger: SqliteLedger):
    assert await claim(ledger) == []
    await submit(ledger)
    await asyncio.wait_for(ledger.wait_for_work(("work",), LONG_S), 10)


async def test_what_a_waiter_for_other_types_has_seen_is_not_missed(ledger: SqliteLedger):
    assert await claim(ledger) == []
    await submit(ledger)
    await ledger.wait_for_work(("other",), 0.01)
    await asyncio.wait_for(ledger.wait_for_work(("work",), LONG_S), 10)


async def test_a_commit_elsewhere_that_a_waiter_for_other_types_has_seen_is_not_missed(ledger: SqliteLedger, reopen):
    other = await reopen()
    await ledger.wait_for_work(("other",), 0.05)
    events = asyncio.ensure_future(ledger.wait_for_events(ledger.events_mark(), LONG_S))
    await asyncio.sleep(0)
    await submit(other)
    await asyncio.wait_for(events, 10)
    await ledger.wait_for_work(("other",), 0.05)
    await asyncio.wait_for(ledger.wait_for_work(("work",), LONG_S), 10)


async def submit_elsewhere(ledger: SqliteLedger, other: SqliteLedger, jobs: int = 1) -> None:
    """Submit in another process, and come back when this one has seen the commit."""
    events = asyncio.ensure_future(ledger.wait_for_events(ledger.events_mark(), LONG_S))
    await asyncio.sleep(0)
    await submit(other, jobs)
    await asyncio.wait_for(events, 10)


async def test_a_commit_elsewhere_after_a_claim_that_took_all_is_not_missed(ledger: SqliteLedger, reopen):
    other = await reopen()
    await ledger.wait_for_events(ledger.events_mark(), 0.05)
    await submit_elsewhere(ledger, other)
    assert len(await claim(ledger, 2)) == 1
    await submit_elsewhere(ledger, other)
    await asyncio.wait_for(ledger.wait_for_work(("work",), LONG_S), 10)


async def test_jobs_of_another_process_that_a_claim_left_end_the_wait(ledger: SqliteLedger, reopen):
    other = await reopen()
    await ledger.wait_for_events(ledger.events_mark(), 0.05)
    await submit_elsewhere(ledger, other, 2)
    assert len(await claim(ledger)) == 1
    await asyncio.wait_for(ledger.wait_for_work(("work",), LONG_S), 10)


async def test_a_claim_that_is_repeated_has_not_looked_for_jobs_of_other_processes(ledger: SqliteLedger, reopen):
    """A worker repeats a claim whose answer was lost. It gets what it got, and nothing that came meanwhile."""
    other = await reopen()
    await submit(other)
    asked = Claim(claim_id=ClaimId("one"), types=(TypeClaim(type="work"),), start=2)
    assert len((await ledger.turn(Turn(actor=WORKER, claim=asked))).claimed) == 1
    await submit(other)
    assert ledger._watch is not None
    ledger._watch.commits += 1  # it was noticed while nobody waited for work
    assert len((await ledger.turn(Turn(actor=WORKER, claim=asked))).claimed) == 1
    await asyncio.wait_for(ledger.wait_for_work(("work",), LONG_S), 10)


async def test_a_wait_after_a_claim_that_took_all_reads_nothing(
    ledger: SqliteLedger, reopen, monkeypatch: pytest.MonkeyPatch
):
    other = await reopen()
    await ledger.wait_for_events(ledger.events_mark(), 0.05)
    await submit_elsewhere(ledger, other)
    looks: list[object] = []
    monkeypatch.setattr(reads, "any_ready", lambda _, types: looks.append(types))
    assert len(await claim(ledger, 2)) == 1
    await ledger.wait_for_work(("work",), 0.001)
    assert looks == []


async def test_without_work_the_wait_ends_by_itself(ledger: SqliteLedger):
    assert await claim(ledger) == []
    await ledger.wait_for_work(("work",), 0.01)


async def test_jobs_of_a_paused_type_do_not_make_the_wait_spin(ledger: SqliteLedger, reopen):
    await ledger.pause(ADMIN, "work", paused=True)
    await submit(ledger)
    assert await claim(ledger) == []
    task = await waiting(ledger)
    done, _ = await asyncio.wait({task}, timeout=0.1)
    assert done == set()
    task.cancel()


async def test_delayed_job_sends_no_notification(ledger: SqliteLedger):
    assert await claim(ledger) == []
    task = await waiting(ledger)
    await submit(ledger, delay_s=60.0)
    done, _ = await asyncio.wait({task}, timeout=0.1)
    assert done == set()
    task.cancel()


async def test_every_waiter_in_every_loop_is_woken(ledger: SqliteLedger):
    loop = asyncio.get_running_loop()
    here = [await waiting(ledger) for _ in range(3)]
    entered = asyncio.Event()

    async def elsewhere() -> None:
        loop.call_soon_threadsafe(entered.set)
        await asyncio.wait_for(ledger.wait_for_work(("work",), LONG_S), 10)

    there = loop.run_in_executor(None, lambda: asyncio.run(elsewhere()))
    await entered.wait()
    await submit(ledger)
    await asyncio.wait_for(asyncio.gather(*here), 10)
    await submit(ledger)
    await asyncio.wait_for(there, 10)


class ScriptedLog:
    """A log whose writes are reported at once, both before the first commit is visible. Later waits time out."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return len(self.waits) == 1

    def forget(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class ScriptedConnection:
    """Another process's commits become visible one by one: the second while its write is long reported."""

    def __init__(self, log: ScriptedLog) -> None:
        self.log = log

    def execute(self, _: str) -> Self:
        return self

    def fetchall(self) -> list[tuple[int]]:
        return [(0 if not self.log.waits else 1 if len(self.log.waits) < 4 else 2,)]

    def close(self) -> None: ...


def test_the_second_of_two_commits_whose_writes_were_reported_together_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A commit is visible after its sync, which nothing reports."""
    log, heard = ScriptedLog(), threading.Semaphore(0)
    monkeypatch.setattr(FileWatch, "of", lambda _: log)
    open_connection: Any = lambda: ScriptedConnection(log)  # noqa: E731
    watch = CommitWatch(open_connection, tmp_path, any_ready=lambda *_: False, on_events=heard.release)
    with watch.attend():
        assert heard.acquire(timeout=10)
        assert heard.acquire(timeout=10)
    watch.close()
    assert max(log.waits[1:4]) < UNTOLD_POLL_S


def test_a_watch_that_forgot_the_writes_until_now_reports_only_later_ones(tmp_path: Path):
    log = tmp_path / "log"
    log.touch()
    watch = FileWatch.of(log)
    assert watch is not None
    log.write_text("earlier")
    watch.forget()
    watch.forget()
    assert not watch.wait(0.0)
    log.write_text("later")
    assert watch.wait(10.0)
    watch.close()
