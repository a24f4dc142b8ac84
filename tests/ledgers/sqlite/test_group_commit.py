"""Calls that share a transaction: none hurts its neighbour, all are answered, and closing finishes them."""

import asyncio
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, Self

import pytest

from tests.ledgers.sqlite.conftest import leave_upkeep
from tests.ledgers.sqlite.people import SUBMITTER, WORKER, claim, new_job, submit
from trellis.engine.errors import JobNotFound, LedgerUnavailable, NotAllowed, UnknownLifecycle
from trellis.engine.jobs import CancelMode, JobId, Mismatch, RequestId, Submitted
from trellis.ledgers.sqlite import lanes
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.ledger import SqliteLedger


@pytest.fixture(params=["in the thread", "in the loop"])
async def ledger(
    reopen: Callable[[], Awaitable[SqliteLedger]], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> SqliteLedger:
    """A ledger that runs small calls in its thread, and one that runs them in their caller's event loop."""
    monkeypatch.setattr(lanes, "QUICK_RUNS_MIN", 0 if request.param == "in the loop" else sys.maxsize)
    monkeypatch.setattr(lanes, "IN_PLACE_S_MAX", math.inf)
    return leave_upkeep(await reopen())


def is_in_loop() -> bool:
    return lanes.QUICK_RUNS_MIN == 0


class Gate:
    """Holds the writer inside a call, so that the calls after it gather."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self.ledger, self.entered, self.opened = ledger, threading.Event(), threading.Event()

    async def __aenter__(self) -> Self:
        self._held = asyncio.ensure_future(self.ledger.writer.run(self._wait))
        await asyncio.get_running_loop().run_in_executor(None, self.entered.wait)
        return self

    async def __aexit__(self, *_) -> None:
        self.opened.set()
        await self._held

    def _wait(self, _: Transaction) -> None:
        self.entered.set()
        self.opened.wait(30)


async def gathered(ledger: SqliteLedger, *calls) -> list:
    """Run calls that wait together and therefore share one transaction."""
    async with nullcontext() if is_in_loop() else Gate(ledger):
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


def commits(ledger: SqliteLedger) -> list[int]:
    """Counts the transactions the writer commits from now on."""
    seen = [0]

    def hook() -> bool:
        seen[0] += 1
        return False

    ledger.writer._connection.set_commit_hook(hook)
    return seen


async def test_waiting_calls_are_committed_together(ledger: SqliteLedger):
    seen = commits(ledger)
    answers = await gathered(ledger, *(submit(ledger, 2) for _ in range(16)))
    assert all(len(answer) == 2 for answer in answers)
    assert seen[0] == (1 if is_in_loop() else 2), "one for the gate that held them back, one for all of them"
    assert await ledger.feed_end() == f"{32:016d}"


async def test_submits_that_wait_together_are_one_and_know_each_other(ledger: SqliteLedger):
    job = new_job(idempotency_key="k", fingerprint=b"a")
    twin = new_job(idempotency_key="k", fingerprint=b"a")
    other = new_job(idempotency_key="k", fingerprint=b"b")
    calls = [ledger.submit(SUBMITTER, [one]) for one in (job, job, twin, other)]
    assert await gathered(ledger, *calls) == [
        [Submitted(job_id=job.job_id, created=True)],
        [Submitted(job_id=job.job_id, created=False)],
        [Submitted(job_id=job.job_id, created=False)],
        [Mismatch(key="k", job_id=job.job_id)],
    ]


async def test_a_refused_call_takes_nothing_of_its_neighbours_with_it(ledger: SqliteLedger):
    bad = new_job(lifecycle="no-such")
    answers = await gathered(
        ledger,
        submit(ledger),
        ledger.submit(SUBMITTER, [new_job(), bad]),
        submit(ledger),
        ledger.submit(SUBMITTER, [new_job(lifecycle="run")]),
        ledger.cancel(WORKER, JobId("nobody"), CancelMode.HARD, RequestId("r"), grace_s=1, cause=None),
        submit(ledger),
    )
    assert [type(answer) for answer in answers] == [list, UnknownLifecycle, list, NotAllowed, JobNotFound, list]
    assert await ledger.feed_end() == f"{3:016d}"
    assert len(await claim(ledger, 10)) == 3


async def test_call_that_fails_midway_writes_nothing(ledger: SqliteLedger):
    """The last of its jobs compensates a job that is not there: the first ones, and the names they brought, go too."""
    lost = [new_job(type="brand-new"), new_job(compensates=JobId("nobody"))]
    answers = await gathered(ledger, submit(ledger), ledger.submit(SUBMITTER, lost), submit(ledger, type="brand-new"))
    assert [type(answer) for answer in answers] == [list, JobNotFound, list]
    assert [depth.ready for depth in await ledger.queues()] == [1, 1]
    assert await ledger.job(lost[0].job_id) is None


async def test_an_error_of_our_own_is_its_callers_alone(ledger: SqliteLedger):
    def broken(tx: Transaction) -> None:
        tx.db.execute("INSERT INTO trellis_actor (name) VALUES ('half')")
        raise ZeroDivisionError

    answers = await gathered(ledger, submit(ledger), ledger.writer.run(broken), submit(ledger))
    assert [type(answer) for answer in answers] == [list, ZeroDivisionError, list]
    with pytest.raises(ZeroDivisionError):
        await ledger.writer.run(broken)
    left = await ledger.reader.run(
        lambda tx: tx.db.execute("SELECT 1 FROM trellis_actor WHERE name = 'half'").fetchall()
    )
    assert left == []


async def test_closing_finishes_the_calls_under_way(ledger: SqliteLedger, reopen):
    async with Gate(ledger):
        under_way = [asyncio.ensure_future(submit(ledger)) for _ in range(10)]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(ledger.close())
        await asyncio.sleep(0)
        with pytest.raises(LedgerUnavailable, match="closed"):
            await submit(ledger)
    await closing
    assert len(await asyncio.gather(*under_way)) == 10
    assert await (await reopen()).feed_end() == f"{10:016d}"


async def test_closing_a_ledger_twice_is_allowed(ledger: SqliteLedger):
    await ledger.close()
    await ledger.close()


async def test_a_caller_who_gave_up_harms_nobody(ledger: SqliteLedger):
    async with Gate(ledger):
        given_up, kept = asyncio.ensure_future(submit(ledger)), asyncio.ensure_future(submit(ledger))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
    await kept
    assert await ledger.feed_end() == f"{1:016d}"


async def test_event_loops_in_other_threads_use_the_same_ledger(ledger: SqliteLedger):
    def elsewhere() -> int:
        return len(asyncio.run(submit(ledger, 3)))

    loop = asyncio.get_running_loop()
    there = [loop.run_in_executor(None, elsewhere) for _ in range(4)]
    await submit(ledger, 3)
    assert await asyncio.gather(*there) == [3, 3, 3, 3]
    assert await ledger.feed_end() == f"{15:016d}"


class UnwatchingLoop(asyncio.SelectorEventLoop):
    """An event loop that watches no descriptors, as that of Windows."""

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        raise NotImplementedError


async def test_callers_in_a_loop_that_watches_no_descriptors_get_their_answers(ledger: SqliteLedger):
    def elsewhere() -> int:
        with closing(UnwatchingLoop()) as loop:
            return len(loop.run_until_complete(submit(ledger, 3)))

    assert await asyncio.get_running_loop().run_in_executor(None, elsewhere) == 3


@pytest.mark.parametrize("kind", [asyncio.SelectorEventLoop, UnwatchingLoop])
async def test_a_loop_that_was_closed_with_a_call_under_way_harms_nobody(
    ledger: SqliteLedger, kind: type[asyncio.SelectorEventLoop]
):
    async def begin() -> Coroutine[Any, Any, Any]:
        call = submit(ledger)
        call.send(None)
        return call

    def elsewhere() -> Coroutine[Any, Any, Any]:
        with closing(kind()) as loop:
            return loop.run_until_complete(begin())

    async with Gate(ledger):
        abandoned = await asyncio.get_running_loop().run_in_executor(None, elsewhere)
        kept = asyncio.ensure_future(submit(ledger))
        await asyncio.sleep(0)
    assert len(await kept) == 1
    assert await ledger.feed_end() == f"{2:016d}"
    abandoned.close()


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="only Linux has such descriptors")
async def test_a_closed_ledger_leaves_no_descriptor_in_the_event_loop(tmp_path: Path):
    def signals() -> int:
        links = list(Path("/proc/self/fd").iterdir())
        return sum(os.path.lexists(link) and str(link.readlink()) == "anon_inode:[eventfd]" for link in links)

    before = signals()
    ledger = await SqliteLedger.open(f"sqlite:///{tmp_path}/jobs.db", clock=lambda: 1.0)
    await submit(ledger)
    await ledger.feed_end()
    assert signals() == before + 2, "one for the writer, one for the reader"
    await ledger.close()
    assert signals() == before


async def test_alike_jobs_of_which_one_exists_and_two_callers_submit_another_are_each_made_once(ledger: SqliteLedger):
    first, second, third = (new_job(payload=b"1") for _ in range(3))
    await ledger.submit(SUBMITTER, [first, second])
    again = await gathered(ledger, *(ledger.submit(SUBMITTER, [job]) for job in (third, third, first)))
    assert [(one.job_id, one.created) for (one,) in again] == [
        (third.job_id, True),
        (third.job_id, False),
        (first.job_id, False),
    ]
    assert [len(await ledger.events(job.job_id)) for job in (first, second, third)] == [1, 1, 1]
    assert [one.lease.job_id for one in await claim(ledger, 9)] == [first.job_id, second.job_id, third.job_id]
