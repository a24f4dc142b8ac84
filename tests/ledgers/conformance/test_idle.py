"""What a ledger costs on which nothing happens: sweeps that move nothing, followers that find nothing, hints that wake them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ledgers.conformance.rig import LEASE_S, SWEEPER, Rig, actor
from trellis.documents.audit_chain import AuditSealer
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.records import SWEEP_QUIET_S, SweepOptions
from trellis.lifecycles import Role, Trigger
from trellis.operations.doctor import follower_findings
from trellis.runs.projector import Projector
from trellis.storage.objects.open import open_objects
from trellis.testing import FakeClock

IDLE_S = 20_000.0
PASSES = 20
LONG_S = 60.0
"""Longer than the test may last: a wait that returns was woken."""


@asynccontextmanager
async def read_statements(ledger: Any) -> AsyncIterator[list[str]]:
    """What the ledger's connection for reading is asked, without the begin and the end of transactions."""
    asked: list[str] = []
    if hasattr(ledger, "reader"):
        connection = ledger.reader._connection

        def trace(_: object, statement: str, __: object) -> bool:
            if statement not in {"BEGIN", "COMMIT"}:
                asked.append(statement)
            return True

        connection.exec_trace = trace
        try:
            yield asked
        finally:
            connection.exec_trace = None
        return
    with ledger._read_lane._connection.query_logger(lambda record: asked.append(record.query)):
        yield asked
        await asyncio.sleep(0)  # the last one is told in the next turn of the loop


async def some_work(rig: Rig, n: int = 3) -> None:
    await rig.submit(n)
    for held in await rig.claim(n):
        await rig.pull(held, Trigger.COMPLETE)


async def idle(rig: Rig, seconds: float = IDLE_S) -> None:
    for _ in range(PASSES):
        await rig.advance(seconds / PASSES)
        await rig.sweep()


@pytest.mark.requirement("D6")
async def test_idle_sweeps_open_no_place_in_the_feed(rig: Rig):
    await some_work(rig)
    end = await rig.ledger.feed_end()
    await idle(rig)
    assert await rig.ledger.feed_end() == end
    await rig.submit_one()
    (event,) = (await rig.ledger.feed(end, limit=10)).events
    assert event.version == 1


@pytest.mark.requirement("D6")
async def test_a_sweep_that_can_end_nothing_opens_no_place_either(rig: Rig):
    """A deadline that the job's state does not know stays, and comes back with every sweep."""
    job_id = await rig.submit_one(lifecycle="proposal", deadline_s=1.0)
    end = await rig.ledger.feed_end()
    await idle(rig, 10.0)
    assert (await rig.job(job_id)).version == 1
    assert await rig.ledger.feed_end() == end


async def test_a_quiet_ledger_is_signed_by_few_sweeps(rig: Rig):
    await some_work(rig)
    await rig.submit_one(delay_s=3600.0)
    seconds = 100
    elected = 0
    for _ in range(seconds):
        await rig.advance(1.0)
        elected += (await rig.ledger.sweep(SWEEPER, SweepOptions())).elected
    assert 1 <= elected <= seconds / SWEEP_QUIET_S + 1


@pytest.mark.requirement("D33")
async def test_timer_on_an_idle_ledger_is_served_in_time(rig: Rig):
    await rig.sweep()
    job_id = await rig.submit_one(delay_s=3.2)
    due = 0
    for _ in range(4):
        await rig.advance(1.0)
        report = await rig.ledger.sweep(SWEEPER, SweepOptions())
        due += report.due
        if report.elected and report.next_due_s is not None and report.next_due_s < 1.0:
            await rig.advance(report.next_due_s)
            due += (await rig.sweep()).due
    assert due == 1
    assert (await rig.claim_one()).lease.job_id == job_id


@pytest.mark.requirement("D31", "D33")
async def test_a_lease_taken_after_a_quiet_time_is_not_forgiven_anything(rig: Rig):
    await rig.ledger.sweep(SWEEPER, SweepOptions())
    await rig.advance(4.0)
    assert not (await rig.ledger.sweep(SWEEPER, SweepOptions())).elected
    job_id = await rig.submit_one()
    await rig.claim_one(lease_s=4.0, heartbeat_s=1.0)
    until = (await rig.job(job_id)).lease_expires_at
    await rig.advance(1.0)
    report = await rig.ledger.sweep(SWEEPER, SweepOptions())
    assert (report.elected, report.amnesty) == (True, 0)
    assert (await rig.job(job_id)).lease_expires_at == until


@pytest.mark.requirement("D31")
async def test_an_outage_that_follows_a_quiet_time_is_forgiven(rig: Rig):
    await rig.ledger.sweep(SWEEPER, SweepOptions())
    await rig.advance(4.0)
    job_id = await rig.submit_one()
    await rig.claim_one()
    await rig.advance(LEASE_S)
    report = await rig.ledger.sweep(SWEEPER, SweepOptions())
    assert (report.amnesty, report.expired) == (1, 0)
    assert (await rig.job(job_id)).owner is not None


async def test_follower_at_the_end_of_the_feed_reads_no_page_again(rig: Rig):
    await some_work(rig)
    page = await rig.ledger.feed(None, limit=100)
    async with read_statements(rig.ledger) as asked:
        for _ in range(PASSES):
            again = await rig.ledger.feed(page.position, limit=100)
            assert (again.events, again.position) == ((), page.position)
    assert len(asked) == PASSES, "one statement finds out that there is nothing"
    assert not [statement for statement in asked if "e.version" in statement]


@pytest.mark.requirement("D14")
async def test_a_projector_of_an_idle_ledger_is_never_behind(rig: Rig, tmp_path: Path):
    clock = FakeClock(0.0)
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    projector = Projector(
        ledger=rig.ledger, actor=actor(Role.PROJECTOR), publisher=DocumentPublisher(objects), clock=clock
    )
    for _ in range(PASSES):
        await idle(rig, 1_000.0)
        clock.advance(1.0)
        assert (await projector.run_once()).following
        (seen,) = await rig.ledger.followers()
        assert seen.unread_since is None
    (finding,) = follower_findings(await rig.ledger.followers(), await rig.ledger.now())
    assert finding.severity == "ok"
    await objects.close()


async def test_sealing_asks_an_idle_ledger_nothing(rig: Rig, tmp_path: Path):
    clock, by = FakeClock(0.0), actor(Role.PROJECTOR)
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    sealer = AuditSealer(ledger=rig.ledger, actor=by, objects=objects, clock=clock)
    publisher = DocumentPublisher(objects)
    projector = Projector(ledger=rig.ledger, actor=by, publisher=publisher, clock=clock, sealer=sealer)
    await some_work(rig)
    for _ in range(4):
        clock.advance(11.0)
        await projector.run_once()
    head = await rig.ledger.audit_head()
    assert head is not None
    assert head.number == 1
    asked = list[int]()
    for sealing in (sealer, None):
        projector.sealer = sealing
        async with read_statements(rig.ledger) as statements:
            for _ in range(PASSES):
                clock.advance(11.0)
                await projector.run_once()
        asked.append(len(statements))
    assert asked[0] == asked[1]
    assert await rig.ledger.audit_head() == head
    await objects.close()


@pytest.mark.only("postgres")  # a position of SQLite's feed is an event
async def test_a_projector_moves_on_over_places_without_events(rig: Rig, tmp_path: Path):
    assert rig.admin_sql is not None
    clock = FakeClock(0.0)
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    projector = Projector(
        ledger=rig.ledger, actor=actor(Role.PROJECTOR), publisher=DocumentPublisher(objects), clock=clock
    )
    await projector.run_once()
    await rig.admin_sql("insert into trellis.feed select n, -n, trellis.now() from generate_series(1, 100) n")
    await rig.admin_sql("update trellis.feed_end set pos = 100")
    await projector.run_once()
    async with read_statements(rig.ledger) as asked:
        await projector.run_once()
    assert len([one for one in asked if "from act " not in one]) == 1, "and one look for administrative acts"
    (seen,) = await rig.ledger.followers()
    assert seen.unread_since is None
    await objects.close()


# --- hints of events ---------------------------------------------------------------------------------------------


async def waiting(ledger: Any, mark: int) -> "asyncio.Task[None]":
    task = asyncio.ensure_future(ledger.wait_for_events(mark, LONG_S))
    await asyncio.sleep(0)
    return task


async def test_an_event_between_the_mark_and_the_wait_is_not_missed(rig: Rig):
    mark = rig.ledger.events_mark()
    await rig.submit_one()
    await asyncio.wait_for(rig.ledger.wait_for_events(mark, LONG_S), 30)


async def test_events_of_another_process_wake(rig: Rig):
    another = await rig.open_another()
    await another.wait_for_events(another.events_mark(), 0.2)
    for act in (rig.submit_one, rig.claim_one):
        task = await waiting(another, another.events_mark())
        await act()
        await asyncio.wait_for(task, 30)


async def test_idle_claims_and_sweeps_wake_nobody_who_waits_for_events(rig: Rig):
    await rig.ledger.wait_for_events(rig.ledger.events_mark(), 0.2)
    task = await waiting(rig.ledger, rig.ledger.events_mark())
    assert await rig.claim() == []
    await rig.sweep()
    await rig.ledger.heartbeat_worker(SWEEPER, None)
    done, _ = await asyncio.wait({task}, timeout=0.1)
    assert done == set()
    task.cancel()
