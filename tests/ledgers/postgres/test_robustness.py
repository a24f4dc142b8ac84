"""What one odd row, one odd clock or one busy key must not do to everybody else."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, OTHER_WORKER, SUBMITTER, SWEEPER, WORKER, Rig, claimed_ids
from trellis.app.wiring import SystemClock, new_id
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Actor, CancelMode, JobId, LeaseLost, NewJob, RequestId, Submitted
from trellis.engine.records import RetentionOptions, SweepOptions
from trellis.ledgers import migrate
from trellis.ledgers.postgres import ledger as postgres_ledger
from trellis.ledgers.postgres.ledger import PostgresLedger
from trellis.lifecycles import Trigger
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.options import WorkerOptions
from trellis.worker.worker import Worker

pytestmark = pytest.mark.only("postgres")


async def _sql(rig: Rig, statement: str, *arguments: object) -> list[tuple]:
    assert rig.admin_sql is not None
    return await rig.admin_sql(statement, *arguments)


async def test_a_job_that_cannot_be_swept_keeps_no_other_from_it(rig: Rig):
    bad = await rig.submit_one(deadline_s=1.0)
    good = await rig.submit_one(deadline_s=1.0)
    late = await rig.submit_one(delay_s=1.0)
    await _sql(rig, "ALTER TABLE trellis.dead_letter ADD CONSTRAINT spoilt CHECK (id <> 1)")
    await rig.advance(2.0)
    await rig.sweep()
    assert [await rig.state(job) for job in (bad, good)] == ["queued", "dead_lettered"]
    assert claimed_ids(await rig.claim(5))[-1] == late
    await _sql(rig, "ALTER TABLE trellis.dead_letter DROP CONSTRAINT spoilt")
    await rig.sweep()
    assert await rig.state(bad) in {"dead_lettered", "running"}


@pytest.mark.requirement("D6")
async def test_positions_of_the_feed_are_never_given_twice(rig: Rig):
    """Retention may empty the feed; a reader that stands at its end must still see what comes."""
    for held in [await rig.running() for _ in range(3)]:
        await rig.pull(held, Trigger.COMPLETE)
    position = await rig.ledger.feed_end()
    await rig.advance(40 * 24 * 3600.0)
    while (await rig.ledger.retain(RetentionOptions(ended_s=3600.0, batch=100, testing=True))).more:
        pass
    assert await _sql(rig, "SELECT 1 FROM trellis.feed") == []
    new = await rig.submit_one()
    assert [event.job_id for event in (await rig.ledger.feed(position, limit=10)).events] == [new]


@pytest.mark.requirement("D6")
async def test_the_feed_keeps_the_events_of_jobs_that_are_kept(rig: Rig):
    old = await rig.submit_one(delay_s=90 * 24 * 3600.0)
    await rig.ledger.feed_end()
    await rig.advance(40 * 24 * 3600.0)
    await rig.ledger.retain(RetentionOptions(ended_s=3600.0, testing=True))
    assert [event.job_id for event in (await rig.ledger.feed(None, limit=10)).events] == [old]


async def test_many_submitters_of_many_keys_do_not_deadlock(rig: Rig):
    async def submit(number: int) -> None:
        ledger = await rig.open_another()
        for turn in range(3):
            keys = [f"user:{(n * (7 + number) + turn) % 20}" for n in range(60)]
            jobs = [NewJob(job_id=rig.new_id(), type="work", concurrency_key=key) for key in keys]
            await ledger.submit(SUBMITTER, jobs)

    before = await _sql(rig, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    await asyncio.gather(*(submit(number) for number in range(4)))
    await _sql(rig, "SELECT pg_stat_clear_snapshot()")
    assert await _sql(rig, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == before
    await rig.sweep()
    assert len(await rig.claim(100)) == 20


async def test_delay_of_an_unvalidated_bus_job_does_not_wake_the_sweeper(rig: Rig):
    """A bus-job rests in its first state until the scheduler validates it, whatever delay it was given."""
    await rig.submit_one(lifecycle="bus-job", delay_s=1.0)
    await rig.advance(2.0)
    await rig.sweep()
    assert (await rig.sweep()).next_due_s is None


@pytest.mark.requirement("D33")
async def test_a_clock_that_was_set_back_does_not_stop_the_sweep(rig: Rig):
    await rig.ledger.sweep(SWEEPER, SweepOptions())
    await rig.advance(-3600.0)
    assert (await rig.ledger.sweep(SWEEPER, SweepOptions())).elected


@pytest.mark.requirement("D39")
async def test_a_requeued_job_has_its_whole_deadline_again(rig: Rig):
    job = await rig.submit_one(deadline_s=100.0)
    await rig.move(job, "dead_lettered", by=ADMIN, death=DEATH)
    await rig.advance(500.0)
    await rig.ledger.requeue(ADMIN, [job], rig.request(), limit=1, cause=None)
    await rig.sweep()
    held = await rig.claim_one()
    assert held.deadline_s == pytest.approx(100.0)
    await rig.advance(101.0)
    await rig.sweep(interval_s=1000.0)
    assert await rig.state(job) == "dead_lettered"


async def test_snoozing_for_years_is_no_overflow(rig: Rig):
    held = await rig.running()
    await _sql(rig, "UPDATE trellis.lease SET attempt = 40000, max_attempts = 40005")
    await rig.pull(held, Trigger.SNOOZE, spare_attempt=True)
    assert await _sql(rig, "SELECT attempt, max_attempts FROM trellis.ready") == [(40001, 40006)]
    await _sql(rig, "DELETE FROM trellis.job")  # its made-up past would not verify


async def test_retention_reports_more_for_the_feed(rig: Rig):
    for _ in range(25):
        await rig.pull(await rig.running(), Trigger.COMPLETE)
    await rig.ledger.feed_end()
    await rig.advance(40 * 24 * 3600.0)
    passes = 0
    while (await rig.ledger.retain(RetentionOptions(ended_s=3600.0, batch=2, testing=True))).more:
        passes += 1
    assert passes >= 10
    assert await _sql(rig, "SELECT 1 FROM trellis.feed") == []


@pytest.mark.requirement("D55", "D46")
async def test_job_leased_by_another_database_role_cannot_be_changed(rig: Rig):
    """Epochs can be read by everyone; they are no secret and no right."""
    held = await rig.running()
    await _sql(rig, "UPDATE trellis.actor SET db_role = 'somebody_else' WHERE name = $1", WORKER.name)
    assert (await rig.ledger.save_checkpoint(held.lease, b"1")).__class__.__name__ == "LeaseLost"
    assert (await rig.ledger.journal(held.lease, "a", b"1")).__class__.__name__ == "LeaseLost"
    assert (await rig.ledger.signal(held.lease, [("job_log", b"1")])).__class__.__name__ == "LeaseLost"
    until = await _sql(rig, "SELECT until FROM trellis.lease")
    await rig.advance(1.0)
    assert await rig.ledger.renew(OTHER_WORKER, [held.lease]) == [LeaseLost(held.lease)]
    assert await _sql(rig, "SELECT until FROM trellis.lease") == until


@pytest.mark.requirement("D55", "D46")
@pytest.mark.parametrize(
    "call",
    [
        "set_paused($1, 'work', true)",
        "set_key_limit($1, 'k', 9)",
        "sweep($1, false, 1.0, 10, null)",
        "set_rate($1, 'work', 1.0, 1)",
    ],
)
async def test_the_functions_themselves_ask_for_the_role(rig: Rig, call: str):
    """Past the program's own check, as from a SQL shell with the application's role."""
    shell = await asyncpg.connect(rig.app_url)
    try:
        submitter = await shell.fetchval("SELECT trellis.register_actor('me', $1::smallint)", SUBMITTER.role.code)
        with pytest.raises(asyncpg.PostgresError) as refused:
            await shell.execute(f"SELECT trellis.{call}", submitter)
    finally:
        await shell.close()
    assert getattr(refused.value, "sqlstate", "") == "TR002"


async def _work_off(rig: Rig, jobs: int, disturb: Callable[[], Awaitable[bool]]) -> None:
    """A worker works off its jobs while somebody does something to the database, until that was often enough."""
    app, ran, enough = App(), Counter[str](), asyncio.Event()

    @app.job("work")
    async def work(ctx: Context) -> None:
        ran[ctx.job_id] += 1
        if len(ran) > jobs // 2:
            await enough.wait()

    submitted = await rig.submit(jobs)
    options = WorkerOptions(name="w", concurrency=20, hints=False, sweep=None, poll_s=0.05)
    worker = Worker(app, rig.ledger, options, clock=SystemClock(), rng=random.Random(1), new_id=new_id)
    await worker.start()
    working = asyncio.ensure_future(worker.until_stopped(asyncio.Event()))
    try:
        async with asyncio.timeout(60):
            while not working.done() and len(ran) < jobs:
                if await disturb():
                    enough.set()
        assert not working.done(), working
        drained = await worker.drain()
    finally:
        working.cancel()
        await worker.drain()
    assert drained.unsettled == 0
    assert ran == Counter(dict.fromkeys(submitted, 1))
    for job in submitted:
        assert await rig.state(job) == "succeeded"


async def test_a_worker_outlives_the_end_of_its_sessions(rig: Rig):
    ended = Counter[str]()

    async def disturb() -> bool:
        rows = await _sql(
            rig,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND query LIKE '%turn(%' AND $1 < 12",
            ended["sessions"],
        )
        ended["sessions"] += len(rows)
        await asyncio.sleep(0.05)
        return ended["sessions"] >= 6

    await _work_off(rig, 600, disturb)


async def test_a_worker_outlives_a_migration_to_the_version_it_has(rig: Rig):
    made, url = Counter[str](), rig.admin_url
    assert url is not None

    async def disturb() -> bool:
        await migrate(url, clock="test")
        made["migrations"] += 1
        return made["migrations"] >= 3

    await _work_off(rig, 600, disturb)


async def test_a_connection_lost_while_a_ledger_is_opened_is_a_ledger_that_does_not_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    async def lose(*_: object) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(postgres_ledger, "_check", lose)
    with pytest.raises(LedgerUnavailable, match="lost while it was opened") as caught:
        await PostgresLedger.open(rig.ledger.url)
    assert rig.ledger.url not in str(caught.value)


async def test_requester_of_a_cancel_in_an_earlier_generation_is_not_named_again(rig: Rig):
    held = await rig.running(max_attempts=1)
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    await rig.pull(held, Trigger.FAIL, death=DEATH)
    await rig.ledger.requeue(ADMIN, [held.lease.job_id], RequestId("again"), limit=1, cause=None)
    assert await _sql(rig, "SELECT 1 FROM trellis.wish") == []


WAITING = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"


@asynccontextmanager
async def _holding(rig: Rig, lock: str, *arguments: object) -> AsyncIterator[asyncpg.Connection]:
    """A transaction of somebody else that holds a lock."""
    connection = await asyncpg.connect(rig.app_url)
    try:
        async with connection.transaction():
            await connection.execute(f"SELECT pg_advisory_xact_lock({lock})", *arguments)
            yield connection
    finally:
        await connection.close()


async def _waiting(rig: Rig, task: asyncio.Future) -> int:
    """Who waits for an advisory lock, as soon as somebody does."""
    while not (found := await _sql(rig, WAITING)):
        assert not task.done(), "it waits for nobody"
    return found[0][0]


@pytest.mark.requirement("D6")
async def test_bounded_submits_of_several_callers_lock_their_keys_in_one_order_before_anything_else(rig: Rig):
    """Two processes whose callers name the same keys the other way round would else wait for each other."""
    keys = [f"k{n}" for n in range(5)]
    locks = dict(await _sql(rig, "SELECT k, hashtextextended(k, 43) FROM unnest($1::text[]) k", keys))
    first, *_, low, high = sorted(keys, key=lambda key: (key != "k0", locks[key]))
    ledger = await rig.open_another()
    other = replace(SUBMITTER, name="another")

    def offer(by: Actor, key: str) -> asyncio.Task:
        job = rig.new_job(concurrency_key=key, waiting_max=10)
        return asyncio.create_task(ledger.submit(by, [job]))

    await asyncio.gather(offer(SUBMITTER, "other"), offer(other, "other"))
    async with _holding(rig, "$1::bigint", locks[low]):
        async with _holding(rig, "$1::bigint", locks[first]):
            blocked = offer(SUBMITTER, first)
            await _waiting(rig, blocked)
            both = asyncio.gather(offer(SUBMITTER, high), offer(other, low))
            await asyncio.sleep(0)
        await blocked
        pid = await _waiting(rig, both)
        assert await _sql(rig, "SELECT backend_xid FROM pg_stat_activity WHERE pid = $1", pid) == [(None,)], (
            "the feed waits"
        )
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = $1"
        assert await _sql(rig, held, pid) == [(0,)], "it waits with nothing in its hands"
    assert all(answer.created for (answer,) in await both)


@pytest.mark.requirement("D6")
async def test_job_that_waits_forever_holds_back_no_position_of_the_feed(rig: Rig):
    for _ in range(12):
        await rig.submit_one(delay_s=300 * 24 * 3600.0)
    for _ in range(3):
        await rig.pull(await rig.running(), Trigger.COMPLETE)
    await rig.ledger.feed_end()
    await rig.advance(40 * 24 * 3600.0)
    for _ in range(8):
        await rig.ledger.retain(RetentionOptions(ended_s=3600.0, batch=1, testing=True))
    assert await _sql(rig, "SELECT count(*) FROM trellis.feed") == [(12,)]
    assert len((await rig.ledger.feed(None, limit=50)).events) == 12


@pytest.mark.requirement("D61")
async def test_a_job_that_is_requeued_while_retention_chose_it_is_not_removed(rig: Rig):
    """The remover does not wait for whoever has the job."""
    held = await rig.running()
    await rig.pull(held, Trigger.FAIL)
    job_id = held.lease.job_id
    await rig.ledger.pause(ADMIN, "work", paused=False)  # so that this actor has a number
    await rig.advance(2 * 86_400.0)
    connection = await asyncpg.connect(rig.app_url, server_settings={"search_path": "trellis"})
    try:
        async with connection.transaction():
            number = await connection.fetchval("select id from actor where name = $1", ADMIN.name)
            await connection.fetch("select * from requeue($1, $2, $3, $4)", number, [job_id], "again", None)
            async with asyncio.timeout(30):
                report = await rig.ledger.retain(RetentionOptions(ended_s=3600.0, testing=True))
    finally:
        await connection.close()
    assert report.jobs == 0
    assert await rig.state(job_id) == "queued"
    assert (await rig.verify()).ok


@pytest.mark.requirement("DJ-5", "D27", "D61")
async def test_a_key_given_to_a_job_that_retention_has_just_chosen_never_means_nothing(rig: Rig):
    """A transaction of somebody's own may have found the old job and not have committed yet."""
    asked = "select trellis.submit_job('work', '{}', p_job_id => 'order-7', p_idempotency_key => $1)"
    options = RetentionOptions(ended_s=3600.0, testing=True)
    await rig.submit_one()
    await rig.cancel(JobId("job-1"))
    connection = await asyncpg.connect(rig.app_url)
    try:
        await connection.fetchval(asked, "k-1")
        await rig.pull(await rig.claim_one(), Trigger.COMPLETE)
        await rig.advance(2 * 86_400.0)
        async with connection.transaction():
            assert await connection.fetchval(asked, "k-2") == "order-7"
            async with asyncio.timeout(30):
                assert (await rig.ledger.retain(options)).jobs == 1, "the other one"
        assert await connection.fetchval(asked, "k-2") == "order-7"
        job = await rig.job(JobId("order-7"))
        assert job.state == "succeeded", "its new key answers for a day"
        await rig.advance(2 * 86_400.0)
        assert (await rig.ledger.retain(options)).jobs == 1
        assert await connection.fetchval(asked, "k-2") == "order-7"
        assert await rig.state(JobId("order-7")) == "queued", "and then it is a new one"
    finally:
        await connection.close()


@pytest.mark.requirement("D61")
async def test_idempotency_key_of_a_removed_job_is_free(rig: Rig):
    job_id = await rig.submit_one(idempotency_key="k", fingerprint=b"x")
    await _sql(rig, "UPDATE trellis.idempotency SET id = 1000000 WHERE key = 'k'")
    again = rig.new_job(idempotency_key="k", fingerprint=b"y")
    assert await rig.offer(again) == Submitted(job_id=again.job_id, created=True)
    assert again.job_id != job_id


class CountingLedger(PostgresLedger):
    """Keeps which names it asked the database for."""

    asked: list[str]

    async def _admin(self, verb: str, sql: str, *args: object) -> object:
        self.asked.append(verb)
        return await super()._admin(verb, sql, *args)


async def test_concurrent_first_calls_of_an_actor_register_it_and_the_type_once(rig: Rig):
    ledger = await CountingLedger.open(rig.app_url)
    ledger.asked = []
    newcomer = Actor(role=SUBMITTER.role, name="newcomer")
    jobs = [NewJob(job_id=JobId(f"met-{n}"), type="never seen") for n in range(40)]
    try:
        await asyncio.gather(*(ledger.submit(newcomer, [job]) for job in jobs))
    finally:
        await ledger.close()
    assert sorted(ledger.asked) == ["register_actor", "type_id"]
    assert await _sql(rig, "SELECT count(*) FROM trellis.actor WHERE name = 'newcomer'") == [(1,)]
    assert {(await rig.ledger.events(job.job_id))[0].actor for job in jobs[:3]} == {"newcomer"}
