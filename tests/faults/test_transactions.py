"""A submit inside the caller's own transaction is part of it: it is there if and only if the caller commits."""

from pathlib import Path

import apsw
import asyncpg
import pytest

from tests.faults.conftest import Bench
from tests.ledgers.conformance.rig import SUBMITTER
from trellis.engine.jobs import JobId, NewJob, Submitted
from trellis.engine.records import JobFilter
from trellis.engine.verify import verify
from trellis.ledgers.sqlite.ledger import SqliteLedger

SUBMIT = """
select trellis.submit_job(p_type => 'order.ship', p_payload => '{"n": 1}', p_job_id => $1, p_concurrency_key => $2,
                          p_idempotency_key => $3)
"""


@pytest.fixture
async def shop(bench: Bench):
    """The caller's own table beside the ledger, and the caller's own connection, as the application's login role."""
    await bench.sql("create table if not exists orders (id text primary key)")
    await bench.sql("grant all on orders to trellis_app")
    connection = await asyncpg.connect(bench.direct_url)
    await connection.execute("select trellis.type_id('order.ship')")
    yield connection
    await connection.close()


@pytest.mark.parametrize("key", [None, "orders"])
@pytest.mark.parametrize("idempotency", [None, "once"])
async def test_a_submit_in_a_postgres_transaction_shares_its_fate(bench: Bench, shop, key: str | None, idempotency):
    ids = {fate: bench.rig.new_id(fate) for fate in ("rolled-back", "committed")}
    once = {fate: idempotency and f"{idempotency}-{job_id}" for fate, job_id in ids.items()}
    for fate, job_id in ids.items():
        transaction = shop.transaction()
        await transaction.start()
        await shop.execute("insert into orders values ($1)", job_id)
        assert await shop.fetchval(SUBMIT, job_id, key and f"{key}-{job_id}", once[fate]) == job_id
        await (transaction.commit() if fate == "committed" else transaction.rollback())
    assert await bench.rig.ledger.job(ids["rolled-back"]) is None
    assert await bench.rig.ledger.events(ids["rolled-back"]) == []
    assert await bench.rig.event_types(ids["committed"]) == ["job_queued"]
    assert await shop.fetchval("select count(*) from orders where id = any($1)", list(ids.values())) == 1
    # What was rolled back left no trace that stands in the way of doing it now.
    assert await shop.fetchval(SUBMIT, ids["rolled-back"], None, once["rolled-back"]) == ids["rolled-back"]


async def test_a_transaction_that_dies_with_its_connection_leaves_no_job(bench: Bench, shop):
    job_id = bench.rig.new_id("dropped")
    await shop.execute("begin")
    await shop.fetchval(SUBMIT, job_id, None, None)
    shop.terminate()
    again = await asyncpg.connect(bench.direct_url)
    assert await again.fetchval(SUBMIT, job_id, None, None) == job_id  # waits for the dead one, then finds nothing
    await again.close()
    assert await bench.rig.event_types(job_id) == ["job_queued"]


@pytest.mark.requirement("D6")
async def test_a_feed_reader_never_sees_what_was_rolled_back(bench: Bench, shop):
    start = await bench.rig.ledger.feed_end()
    transaction = shop.transaction()
    await transaction.start()
    await shop.fetchval(SUBMIT, bench.rig.new_id("rolled-back"), None, None)
    seen_before = await bench.rig.ledger.feed(start, limit=100)
    await transaction.rollback()
    committed = await bench.rig.submit_one(type=str(bench.rig.new_id("type")))
    await bench.rig.sweep()
    events = [*seen_before.events, *(await bench.rig.ledger.feed(seen_before.position, limit=100)).events]
    assert [event.job_id for event in events] == [committed]


async def test_a_submit_in_a_sqlite_transaction_shares_its_fate(tmp_path: Path):
    path = tmp_path / "ledger.db"
    ledger = await SqliteLedger.open(f"sqlite:///{path}", clock=lambda: 1_800_000_000.0)
    connection = apsw.Connection(str(path))
    connection.execute("create table orders (id text primary key)")
    for fate in ("rollback", "commit"):
        connection.execute("begin immediate")
        connection.execute("insert into orders values (?)", (fate,))
        (answer,) = ledger.submit_on(connection, SUBMITTER, [NewJob(job_id=JobId(fate), type="order.ship")])
        assert answer == Submitted(job_id=JobId(fate), created=True)
        connection.execute(fate)
    orders = connection.execute("select id from orders").fetchall()
    connection.close()
    jobs = (await ledger.jobs(JobFilter(), limit=10)).jobs
    report = await verify(ledger)
    await ledger.close()
    assert [job.job_id for job in jobs] == ["commit"]
    assert orders == [("commit",)]
    assert report.ok, report.violations
