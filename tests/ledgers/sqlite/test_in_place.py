"""Small calls run in their caller's event loop while that is quick; whatever may take long is left to the thread."""

import asyncio
import math
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.ledgers.sqlite.conftest import leave_upkeep
from tests.ledgers.sqlite.people import SUBMITTER, WORKER, claim, complete, new_job, submit
from tests.ledgers.sqlite.shell import Shell
from trellis.engine.errors import LedgerUnavailable, OutcomeUnknown
from trellis.engine.jobs import Advance, JobId, Renewed, Turn
from trellis.ledgers.sqlite import lanes
from trellis.ledgers.sqlite.lanes import SharedCall, Transaction
from trellis.ledgers.sqlite.ledger import CLAIM_IN_PLACE_MAX, SqliteLedger

HERE, WRITER = threading.main_thread().name, "trellis-writer"


@pytest.fixture(autouse=True)
def always_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is slow here, however busy the machine is."""
    monkeypatch.setattr(lanes, "QUICK_RUNS_MIN", 0)
    monkeypatch.setattr(lanes, "IN_PLACE_S_MAX", math.inf)


def committers(ledger: SqliteLedger) -> list[str]:
    """The threads that commit from now on, one name for each commit."""
    leave_upkeep(ledger)
    names: list[str] = []

    def note() -> bool:
        names.append(threading.current_thread().name)
        return False

    with ledger.writer._connection_lock:  # the thread may still be busy with what a commit left
        ledger.writer._connection.set_commit_hook(note)
        ledger.writer._quiet_since = (
            ledger.writer._clock()
        )  # the first commit ends no period, which would occupy the thread
    return names


async def turns_of_loop(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def test_small_calls_that_come_together_are_one_commit_in_the_event_loop(ledger: SqliteLedger):
    names = committers(ledger)
    await asyncio.gather(*(submit(ledger) for _ in range(16)))
    assert names == [HERE]
    claimed = await claim(ledger, 3)
    await complete(ledger, claimed)
    assert names == [HERE] * 3
    assert len({event.job_id for event in (await ledger.feed(None, limit=100)).events}) == 16


@pytest.mark.parametrize("sizes", [[lanes.IN_PLACE_ITEMS_MAX + 1], [lanes.IN_PLACE_ITEMS_MAX, 1]])
async def test_calls_that_are_large_together_run_in_the_thread(ledger: SqliteLedger, sizes: list[int]):
    names = committers(ledger)
    await asyncio.gather(*(submit(ledger, size) for size in sizes))
    assert set(names) == {WRITER}, "one commit, or two if the thread begins before it has both calls"
    names.clear()
    await submit(ledger, lanes.IN_PLACE_ITEMS_MAX)
    assert names == [HERE]


LONG = b"x" * 256 * 1024


async def test_calls_with_long_bodies_run_in_the_thread(ledger: SqliteLedger):
    """What a call takes depends on its bytes, too: 16 jobs of a megabyte would keep the event loop for 0.2 s."""
    names = committers(ledger)
    await submit(ledger, payload=LONG)
    await asyncio.gather(*(submit(ledger, payload=LONG[:16_384]) for _ in range(8)))
    assert names == [WRITER] * 2
    (one,) = await claim(ledger)
    assert names == [WRITER] * 2 + [HERE]
    await ledger.journal(one.lease, "long", LONG)
    await ledger.save_checkpoint(one.lease, LONG)
    done = Advance(lease=one.lease, source="running", trigger="complete", result=LONG)
    await ledger.turn(Turn(actor=WORKER, advances=(done,)))
    assert names[3:] == [WRITER] * 3


async def test_what_may_be_long_is_read_in_the_thread(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch):
    ids = await submit(ledger, 5)
    in_place: list[int] = []
    run = ledger.reader._run_in_place
    monkeypatch.setattr(ledger.reader, "_run_in_place", lambda calls: in_place.append(len(calls)) or run(calls))
    await ledger.read_journal(ids[0])
    for read in (ledger.payloads, ledger.contents_of, ledger.outcomes):
        await read(ids)
    assert in_place == []
    await ledger.payloads(ids[:4])
    assert in_place == [1]


async def test_a_claim_that_may_get_many_jobs_runs_in_the_thread_whatever_the_last_one_got(ledger: SqliteLedger):
    await submit(ledger, CLAIM_IN_PLACE_MAX + 1)
    names = committers(ledger)
    assert len(await claim(ledger, CLAIM_IN_PLACE_MAX + 1)) == CLAIM_IN_PLACE_MAX + 1
    assert names == [WRITER]


async def test_a_call_may_name_its_arguments(ledger: SqliteLedger):
    await submit(ledger)
    (one,) = await claim(ledger)
    assert await ledger.renew(WORKER, leases=[one.lease]) == [Renewed(cancel=False)]


async def test_slow_calls_keep_later_ones_in_the_thread_until_some_in_a_row_were_quick(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lanes, "QUICK_RUNS_MIN", 2)
    names = committers(ledger)
    for n in range(3):
        await submit(ledger)
        assert names == [*[WRITER] * 2, HERE][: n + 1]
    monkeypatch.setattr(lanes, "IN_PLACE_S_MAX", -1.0)
    await submit(ledger)
    assert names[3:] == [HERE], "it was slow, but nobody knew before"
    monkeypatch.setattr(lanes, "IN_PLACE_S_MAX", math.inf)
    for _ in range(3):
        await submit(ledger)
    assert names[4:] == [WRITER, WRITER, HERE]


async def test_a_call_that_meets_another_writer_waits_in_the_thread_and_the_loop_goes_on(
    ledger: SqliteLedger, shell: Shell
):
    names = committers(ledger)
    shell.db.execute("BEGIN IMMEDIATE")
    waiting = [asyncio.ensure_future(submit(ledger)) for _ in range(2)]
    await turns_of_loop()
    assert not any(call.done() for call in waiting)
    shell.db.execute("COMMIT")
    await asyncio.gather(*waiting)
    assert set(names) == {WRITER}, "one commit, or two if the thread begins before it has both calls"
    assert len(await claim(ledger, 9)) == 2


async def test_a_read_that_may_not_wait_in_the_loop_is_made_in_the_thread(ledger: SqliteLedger, path: Path):
    (job_id,) = await submit(ledger)
    readers: list[str] = []

    def busy_once(_: object, *__: object) -> bool:
        readers.append(threading.current_thread().name)
        if len(readers) == 1:
            raise apsw.BusyError
        return True

    assert await ledger.reader.run(busy_once, size=1)
    assert readers == [HERE, "trellis-reader"]
    assert (await ledger.job(job_id)) is not None


async def test_calls_that_follow_a_large_one_stay_behind_it(ledger: SqliteLedger):
    calls = [submit(ledger, 1), submit(ledger, lanes.IN_PLACE_ITEMS_MAX + 1), submit(ledger, 1)]
    first, large, last = await asyncio.gather(*calls)
    assert [one.lease.job_id for one in await claim(ledger, 99)] == [*first, *large, *last]


async def test_a_long_log_is_checkpointed_in_the_thread(
    ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lanes, "LOG_PAGES_MAX", 40)
    keepers, keep_up = list[str](), ledger.writer._keep_up

    def noted() -> None:
        keepers.append(threading.current_thread().name)
        keep_up()

    monkeypatch.setattr(ledger.writer, "_keep_up", noted)
    names = committers(ledger)
    for _ in range(60):
        await submit(ledger)
    assert HERE in names
    assert set(keepers) == {WRITER}
    assert path.with_name(f"{path.name}-wal").stat().st_size < 80 * lanes.PAGE_BYTES


async def test_a_writer_gives_way_to_others_between_its_calls(ledger: SqliteLedger, reopen):
    """While another writer waits in the queue of the file, this one pauses in its thread after each commit."""
    other: SqliteLedger = await reopen()
    assert other.writer._room is not None
    other.writer._room.wait(0)
    names = committers(ledger)
    await submit(ledger)
    await submit(ledger)
    other.writer._room.enter()
    await submit(ledger)
    assert names[:2] == [HERE, WRITER]


async def test_closing_finishes_small_calls_that_have_not_begun(ledger: SqliteLedger, reopen):
    gathered = [asyncio.ensure_future(submit(ledger)) for _ in range(4)]
    await asyncio.sleep(0)
    closing_ledger = asyncio.ensure_future(ledger.close())
    assert len(await asyncio.gather(*gathered)) == 4
    await closing_ledger
    with pytest.raises(LedgerUnavailable, match="closed"):
        await submit(ledger)
    assert len((await (await reopen()).feed(None, limit=9)).events) == 4


async def test_small_calls_of_another_loop_are_refused_after_the_ledger_was_closed(ledger: SqliteLedger):
    """Its calls were gathered in that loop before `close`, and the thread has ended when they would begin."""
    begun, closed = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        call = asyncio.ensure_future(submit(ledger))
        await asyncio.sleep(0)
        begun.set()
        closed.wait(30)
        async with asyncio.timeout(10):
            await call

    there = asyncio.get_running_loop().run_in_executor(None, asyncio.run, elsewhere())
    await asyncio.get_running_loop().run_in_executor(None, begun.wait, 30)
    await ledger.close()
    closed.set()
    with pytest.raises(LedgerUnavailable, match="closed"):
        await there


async def test_a_small_call_whose_caller_gave_up_before_it_began_writes_nothing(ledger: SqliteLedger):
    given_up, kept = asyncio.ensure_future(submit(ledger)), asyncio.ensure_future(submit(ledger))
    await asyncio.sleep(0)
    given_up.cancel()
    await kept
    assert len((await ledger.feed(None, limit=9)).events) == 1


async def test_the_caller_that_goes_on_first_runs_the_calls_of_all_and_each_gives_way_once(ledger: SqliteLedger):
    """A caller that submits in a loop would otherwise never let the other tasks of its event loop go on."""
    order: list[str] = []

    async def submits(name: str) -> None:
        for _ in range(2):
            await submit(ledger)
            order.append(name)

    async def others() -> None:
        for _ in range(2):
            await asyncio.sleep(0)
            order.append("other")

    names = committers(ledger)
    await asyncio.gather(submits("first"), others(), submits("second"))
    assert order == ["first", "other", "second"] * 2
    assert names == [HERE] * 2


async def test_when_the_first_caller_gives_up_the_next_one_runs_the_others_calls(ledger: SqliteLedger):
    calls = [asyncio.ensure_future(submit(ledger)) for _ in range(3)]
    await asyncio.sleep(0)
    names = committers(ledger)
    calls[0].cancel()
    assert [type(one) for one in await asyncio.gather(*calls, return_exceptions=True)] == [
        asyncio.CancelledError,
        list,
        list,
    ]
    assert names == [HERE]
    assert ledger.writer.waiting == 0


async def test_a_loop_that_was_closed_with_a_small_call_gathered_harms_nobody(ledger: SqliteLedger):
    async def begin() -> Coroutine[Any, Any, Any]:
        call = submit(ledger)
        call.send(None)
        return call

    def elsewhere() -> Coroutine[Any, Any, Any]:
        with closing(asyncio.new_event_loop()) as loop:
            return loop.run_until_complete(begin())

    abandoned = await asyncio.get_running_loop().run_in_executor(None, elsewhere)
    assert len(await submit(ledger)) == 1
    abandoned.close()


async def test_an_interrupt_between_two_statements_leaves_no_transaction_open(
    reopen: Callable[[], Awaitable[SqliteLedger]], monkeypatch: pytest.MonkeyPatch
):
    """The user presses Ctrl-C while the event loop is inside the transaction of a call."""
    ledger = await reopen()

    def interrupted() -> float:
        assert ledger.writer._connection.in_transaction
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ledger.writer, "_clock", interrupted)
        callers = lanes._callers_loop(asyncio.get_running_loop())
        with pytest.raises(KeyboardInterrupt):
            ledger.writer._run_in_place([lanes._LaneCall(lambda _: None, callers, size=1)])
    assert not ledger.writer._connection.in_transaction
    assert len(await submit(ledger)) == 1


def outcomes_after_interrupt(
    interrupt: type[BaseException], calls: Sequence[Callable[[], Awaitable[Any]]]
) -> list[Any]:
    """What callers hear in an event loop that an interrupt ends, when it goes on later."""

    async def begin() -> None:
        begun.extend(asyncio.ensure_future(call()) for call in calls)
        await asyncio.Event().wait()

    async def hear() -> list[Any]:
        async with asyncio.timeout(10):
            return await asyncio.gather(*begun, return_exceptions=True)

    begun: list[asyncio.Future[Any]] = []
    with closing(asyncio.new_event_loop()) as loop:
        main = loop.create_task(begin())
        with pytest.raises(interrupt):
            loop.run_until_complete(main)
        main.cancel()
        return loop.run_until_complete(hear())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_inside_joined_calls_ends_the_loop_and_leaves_no_caller_waiting(
    ledger: SqliteLedger, interrupt: type[BaseException]
):
    """A signal handler has raised it in the work of calls that run as one. It is not tried again call by call."""
    tries: list[int] = []

    def work(tx: Transaction, items: Any) -> list[Any]:
        tries.append(len(items))
        raise interrupt

    calls = [partial(ledger.writer.share, SharedCall("kind", [n], work), 1) for n in range(2)]
    answers = await asyncio.to_thread(outcomes_after_interrupt, interrupt, calls)
    assert [type(answer) for answer in answers] == [OutcomeUnknown] * 2
    assert tries == [2]
    assert len(await submit(ledger)) == 1


@pytest.mark.parametrize("is_reader", [False, True])
async def test_an_interrupt_inside_a_lone_call_is_not_its_callers(ledger: SqliteLedger, is_reader: bool):
    lane = ledger.reader if is_reader else ledger.writer

    def work(tx: Transaction) -> None:
        raise KeyboardInterrupt

    answers = await asyncio.to_thread(outcomes_after_interrupt, KeyboardInterrupt, [partial(lane.run, work, size=1)])
    assert [type(answer) for answer in answers] == [OutcomeUnknown]
    assert (await ledger.job(JobId("nobody"))) is None


async def test_a_call_that_an_interrupted_caller_had_taken_has_no_answer(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
):
    """The interrupt comes before the first caller runs the calls of all: None would say that they were done."""
    take = lanes._Callers.take

    def interrupted(callers: Any) -> Any:
        assert len(take(callers)) == 2
        raise KeyboardInterrupt

    runs: list[int] = []
    calls = [partial(ledger.writer.run, lambda _: runs.append(1), size=1) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(lanes._Callers, "take", interrupted)
        answers = await asyncio.to_thread(outcomes_after_interrupt, KeyboardInterrupt, calls)
    assert [type(answer) for answer in answers] == [KeyboardInterrupt, OutcomeUnknown]
    assert runs == []
    assert len(await submit(ledger)) == 1


async def test_an_interrupt_right_after_a_caller_got_the_connection_leaves_it_to_others(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
):
    lock = ledger.writer._connection_lock

    class Interrupted:
        release = lock.release

        def acquire(self, *, blocking: bool) -> bool:
            assert lock.acquire(blocking=blocking)
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ledger.writer, "_connection_lock", Interrupted())
        calls = [partial(submit, ledger) for _ in range(2)]
        answers = await asyncio.to_thread(outcomes_after_interrupt, KeyboardInterrupt, calls)
    is_free = lock.acquire(timeout=10)
    lock.release()
    assert is_free
    assert [type(answer) for answer in answers] == [OutcomeUnknown] * 2
    assert len(await submit(ledger, lanes.IN_PLACE_ITEMS_MAX + 1)) == lanes.IN_PLACE_ITEMS_MAX + 1


async def test_a_forked_process_uses_no_connection_of_its_parent(ledger: SqliteLedger):
    """It has none of the threads, and SQLite allows a connection only in the process that opened it."""

    async def ask() -> Any:
        answers = await asyncio.gather(submit(ledger), ledger.job(JobId("one")), return_exceptions=True)
        await asyncio.wait_for(ledger.writer.close(), 10)
        return answers

    await submit(ledger)
    said, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            asyncio.events._set_running_loop(None)
            with closing(asyncio.new_event_loop()) as loop:
                os.write(says, repr(loop.run_until_complete(ask())).encode())
        finally:
            os._exit(0)
    os.close(says)
    with os.fdopen(said, "rb") as answer:
        assert (await asyncio.get_running_loop().run_in_executor(None, answer.read)).count(b"closed") == 2
    await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
    assert len(await submit(ledger)) == 1
    assert len((await ledger.feed(None, limit=9)).events) == 2


async def test_a_call_in_the_loop_wakes_the_waiters_for_work(ledger: SqliteLedger):
    assert await claim(ledger) == []
    waiting = asyncio.ensure_future(ledger.wait_for_work(["work"], 30.0))
    await turns_of_loop()
    assert not waiting.done()
    await ledger.submit(SUBMITTER, [new_job("mine")])
    async with asyncio.timeout(20):
        await waiting
    assert [one.lease.job_id for one in await claim(ledger)] == [JobId("mine")]
    await ledger.heartbeat_worker(WORKER, None)
