"""Look-ups and claims go through their indexes on big tables."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.ledgers.conformance.rig import Rig, actor
from tests.ledgers.conformance.test_idle import read_statements
from tests.ledgers.lists import LISTS
from trellis.engine.jobs import JobId
from trellis.ledgers.postgres.migrate import sql_files
from trellis.ledgers.postgres.reads import BY_INDEX, FREQUENT_TYPES, READ_QUERIES
from trellis.lifecycles import Role

pytestmark = pytest.mark.only("postgres")

PARTITION_JOBS = 4_194_304
OURS = "relnamespace = 'trellis'::regnamespace AND relkind IN ('r', 'i')"


INDEX_SCANS = ("SET LOCAL enable_seqscan = off", "SET LOCAL enable_bitmapscan = off")


async def _pretend_big_tables(rig: Rig) -> None:
    """In the transaction that is open: tables of a million rows that nothing else is known about."""
    assert rig.admin_sql is not None
    await rig.admin_sql("DELETE FROM pg_statistic WHERE starelid IN (SELECT oid FROM pg_class WHERE " + OURS + ")")
    await rig.admin_sql("UPDATE pg_class SET reltuples = 1e6, relpages = 1 WHERE " + OURS)


async def _plan(rig: Rig, statement: str, *arguments: object, settings: tuple[str, ...] = INDEX_SCANS) -> str:
    """The plan on big tables that nothing else is known about: what earlier tests left in the statistics does not count."""
    assert rig.admin_sql is not None
    await rig.admin_sql("BEGIN")
    try:
        await rig.admin_sql("SET LOCAL search_path = trellis")
        for setting in settings:
            await rig.admin_sql(setting)
        await _pretend_big_tables(rig)
        rows = await rig.admin_sql("EXPLAIN (FORMAT JSON) " + statement, *arguments)
    finally:
        await rig.admin_sql("ROLLBACK")
    return json.dumps(json.loads(rows[0][0]) if isinstance(rows[0][0], str) else rows[0][0])


@asynccontextmanager
async def _arguments(rig: Rig, text: str, number: int, into: list[Any]) -> AsyncIterator[None]:
    """Collects one argument of each read whose statement has this text."""
    ledger: Any = rig.ledger

    def note(record: Any) -> None:
        if text in record.query:
            into.append(record.args[number])

    await ledger.job(JobId("none"))
    with ledger._read_lane._connection.query_logger(note):
        yield
        await asyncio.sleep(0)  # the last one is told in the next turn of the loop


@pytest.mark.requirement("DJ-13", "D52")
async def test_events_of_a_sealed_partition_are_found_by_type_and_time_through_their_index(rig: Rig):
    """A partition is sealed when the next jobs go elsewhere; only then does it get the dear index."""
    assert rig.admin_sql is not None
    await rig.admin_sql("SELECT setval('trellis.job_id_seq', $1::bigint)", PARTITION_JOBS - 3)
    jobs = await rig.submit(6)
    await rig.claim(6)
    assert "event_0_type_at" not in await _plan(rig, READ_QUERIES.events_by_frequent_type, 2, None, 10, None)
    await rig.sweep()
    assert await rig.admin_sql("SELECT 1 FROM pg_indexes WHERE indexname = 'event_0_type_at'")
    assert "event_0_type_at" in await _plan(rig, READ_QUERIES.events_by_frequent_type, 2, None, 10, None)
    hot = [row[0] for row in await rig.admin_sql("SELECT indexdef FROM pg_indexes WHERE tablename = 'event_1'")]
    assert [index for index in hot if "brin (batch, at)" in index], "the hot partition is found by time"
    rest = [index for index in hot if "(type" in index or "correlation" in index]
    assert [index for index in rest if "where (type <> all" not in index.lower()] == [], "and pays for nothing else"
    found = await rig.ledger.find_events(type_="job_claimed", correlation_id=None, since=None, limit=10)
    assert [event.job_id for event in found] == jobs
    assert len({row[0] for row in await rig.admin_sql("SELECT tableoid FROM trellis.event")}) == 2


@pytest.mark.requirement("DJ-13")
async def test_events_of_a_rare_type_are_found_through_an_index_that_has_no_entry_for_a_job_without_trouble(rig: Rig):
    """The types that the index leaves out stand in three places, which must agree: the index, the query, FREQUENT_TYPES."""
    assert rig.admin_sql is not None
    assert "_type_at_idx" in await _plan(rig, READ_QUERIES.events_by_rare_type, 5, None, 10)
    ((index,),) = await rig.admin_sql("SELECT indexdef FROM pg_indexes WHERE indexname = 'event_rare_type'")
    listed = re.search(r"ARRAY\[(.*?)\]", index)
    assert listed is not None
    assert {int(code) for code in re.findall(r"\d+", listed[1])} == FREQUENT_TYPES
    assert f"e.type not in ({', '.join(map(str, sorted(FREQUENT_TYPES)))})" in READ_QUERIES.events_by_rare_type


@pytest.mark.requirement("DJ-13")
async def test_a_page_of_a_frequent_event_type_reads_the_window_of_time_that_holds_it(rig: Rig):
    """Of jobs that were submitted an hour apart, the oldest three are found without asking for all of time."""
    jobs: list[JobId] = []
    for _ in range(5):
        jobs += await rig.submit(1)
        await rig.advance(3_600)
    await rig.advance(86_400)
    (third,) = [event.ts for event in await rig.ledger.events(jobs[2])]
    windows: list[datetime | None] = []

    async def page(since: datetime | None, limit: int) -> tuple[list[JobId], bool]:
        async with _arguments(rig, "o.at < coalesce", 3, windows):
            events = await rig.ledger.find_events(type_="job_queued", correlation_id=None, since=since, limit=limit)
        return [event.job_id for event in events], windows[-1] is None

    assert await page(None, 3) == (jobs[:3], False)
    assert await page(None, 10) == (jobs, True)
    assert await page(third, 2) == (jobs[2:4], False)
    assert await page(third + timedelta(days=1), 2) == ([], True)


@pytest.mark.requirement("DJ-13")
async def test_a_short_page_of_the_feed_reads_few_of_many_long_batches(rig: Rig):
    jobs = [await rig.submit(50) for _ in range(6)]
    asked: list[int] = []
    read: list[JobId] = []
    position = None
    for _ in range(12):
        async with _arguments(rig, "feed_places", 1, asked):
            page = await rig.ledger.feed(position, limit=25)
        position = page.position
        read += [event.job_id for event in page.events]
    assert read == [job_id for batch in jobs for job_id in batch]
    assert (asked[0] > 6, set(asked[1:])) == (True, {2}), (
        "every page but the first reads the batch it is in and the next"
    )


@pytest.mark.requirement("DJ-13")
async def test_events_are_found_by_correlation_through_an_index(rig: Rig):
    await rig.submit(3, correlation_id="c")
    assert "job_correlation" in await _plan(rig, READ_QUERIES.events_by_correlation, "c", None, 10, None)


async def test_a_feed_without_plain_jobs_reads_no_event_of_one(rig: Rig):
    await rig.submit(3)
    await rig.submit(3, lifecycle="run")
    arguments = (1, 100, 1, 100, 0, 0, 0, [1, 2], 10, [1, 2, 3], None)
    plan = await _plan(rig, READ_QUERIES.feed_infrequent_events, *arguments)
    assert "event_0_batch_idx" in re.findall(r'"Index Name": "(\w+)"', plan)


@pytest.mark.requirement("DJ-13")
async def test_events_of_few_lifecycles_are_counted_and_sampled_without_reading_plain_jobs(rig: Rig):
    await rig.submit(3)
    await rig.submit(3, lifecycle="run")
    since = await rig.ledger.now()
    for query, *more in ((READ_QUERIES.count_infrequent_events,), (READ_QUERIES.sample_events, 10)):
        plan = await _plan(rig, query, [25, 29], since, 1, *more)
        used = {name for name in re.findall(r'"Index Name": "(\w+)"', plan) if name.startswith("event_")}
        assert "event_0_lifecycle_type_at_idx" in used
        assert all(name.endswith("_lifecycle_type_at_idx") for name in used), "no other index, in any partition"


async def test_a_sweep_that_was_planned_while_no_job_had_ended_does_not_read_all_ended_jobs(rig: Rig):
    """A session keeps the first plan. On an empty table the planner would choose to read it whole, once for each state."""
    assert rig.admin_sql is not None
    scans = "SELECT seq_scan FROM pg_stat_xact_user_tables WHERE schemaname = 'trellis' AND relname = 'ended'"
    await rig.admin_sql("BEGIN")
    try:
        await rig.admin_sql("ANALYZE trellis.ended")
        before = await rig.admin_sql(scans)
        await rig.admin_sql("SELECT trellis._fill_types()")
        assert await rig.admin_sql(scans) == before
    finally:
        await rig.admin_sql("ROLLBACK")


@pytest.mark.requirement("DJ-13")
async def test_recent_events_of_all_jobs_are_counted_through_the_index_on_time(rig: Rig):
    """Also while nothing is known about the table: an alert counts them every minute."""
    await rig.submit(3)
    since = await rig.ledger.now()
    for query, *more in ((READ_QUERIES.count_events,), (READ_QUERIES.count_frequent_events, 4)):
        plan = await _plan(rig, query, [25, 29], since, *more, settings=(BY_INDEX,))
        assert "Seq Scan" not in plan
        used = re.findall(r'"Index Name": "(\w+)"', plan)
        assert used
        assert all(name.endswith(("_at_idx", "_type_at")) for name in used), "by time, or by type and time"
    async with read_statements(rig.ledger) as asked:
        await rig.ledger.count_events(["job_failed"], since=since)
    assert BY_INDEX in asked, "the ledger counts so"


@pytest.mark.requirement("DJ-13")
async def test_events_of_a_job_are_found_through_the_key(rig: Rig):
    await rig.submit(3)
    plan = await _plan(rig, READ_QUERIES.events, "job-1")
    assert "job_job_id_key" in plan
    assert "event_0_pkey" in plan


async def test_the_claim_walks_its_index_in_order_without_sorting(rig: Rig):
    await rig.submit(3)
    plan = await _plan(
        rig,
        "SELECT ctid FROM ready WHERE type = 1 AND prio = 2::smallint AND pos >= 0 AND lifecycle = 4::smallint ORDER BY pos LIMIT 10",
    )
    assert "ready_claim" in plan
    assert '"Sort"' not in plan


async def test_final_artifacts_are_paired_through_their_index(rig: Rig):
    await rig.submit(2, lifecycle="artifact")
    assert "resting_state" in await _plan(rig, READ_QUERIES.unpaired, [2], [6], [8], [2])


PAGE = 5
OTHERS = 120
"""How many jobs of each kind a list should pass over."""


async def _rows_read(rig: Rig, statement: str, arguments: Sequence[object]) -> dict[str, float]:
    """How many rows a statement takes from each table of jobs, with the plan for any arguments on big tables."""
    assert rig.admin_sql is not None
    given = ", ".join(_literal(one) for one in arguments)
    await rig.admin_sql("BEGIN")
    try:
        await rig.admin_sql("SET LOCAL search_path = trellis")
        await rig.admin_sql("SET LOCAL plan_cache_mode = force_generic_plan")
        await _pretend_big_tables(rig)
        await rig.admin_sql(f"PREPARE listing AS {statement}")
        rows = await rig.admin_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE listing ({given})")
        await rig.admin_sql("DEALLOCATE listing")
    finally:
        await rig.admin_sql("ROLLBACK")
    plans = [(json.loads(rows[0][0]) if isinstance(rows[0][0], str) else rows[0][0])[0]["Plan"]]
    read: dict[str, float] = {}
    while plans:
        plan = plans.pop()
        plans += plan.get("Plans", [])
        table = plan.get("Relation Name")
        if table in {"job", "ended", "ready", "resting", "parked", "lease", "dead_letter"}:
            taken = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
            read[table] = read.get(table, 0.0) + taken * plan["Actual Loops"]
    return read


def _literal(value: object) -> str:
    if value is None:
        return "null"
    return "'{" + ", ".join(map(str, value)) + "}'" if isinstance(value, list) else f"'{value}'"


async def test_every_list_is_one_statement_that_reads_no_other_jobs(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Whatever the filter: long histories and long queues of other jobs are passed over by an index."""
    ended = await rig.submit(OTHERS, type="other", concurrency_key="o", correlation_id="o", parent_id="o")
    for job_id in ended:
        await rig.cancel(job_id)
    await rig.submit(PAGE, type="rare", concurrency_key="k", correlation_id="c", parent_id="p")
    await rig.cancel(await rig.submit_one(type="rare"))
    await rig.submit(3, lifecycle="artifact")
    await rig.submit(5 * OTHERS, type="other")
    statements: list[tuple[str, tuple[object, ...]]] = []

    async def note(sql: str, *arguments: object) -> list[Any]:
        statements.append((sql, arguments))
        return []

    monkeypatch.setattr(rig.ledger, "fetch", note)
    for where in LISTS.values():
        before = len(statements)
        await rig.ledger.jobs(where, limit=PAGE)
        assert len(statements) == before + 1, "one statement"
        await rig.ledger.dead_letters(where, limit=PAGE)
        assert len(statements) <= before + 2, "one statement, or none for places without dead letters"
    await rig.ledger.jobs(LISTS["a type that waits"], limit=PAGE, oldest_first=True)

    too_many: dict[str, dict[str, float]] = {}
    for sql, arguments in statements:
        read = await _rows_read(rig, sql, arguments)
        ready = read.pop("ready", 0.0)
        if (
            max(read.values(), default=0.0) > OTHERS / 2 or ready > 4 * OTHERS
        ):  # the newest 400 that are ready are read first
            too_many[f"{arguments}"] = read
    assert too_many == {}


async def test_children_are_counted_through_their_index(rig: Rig):
    await rig.submit(2, parent_id="p")
    plan = await _plan(rig, READ_QUERIES.children, "p", 100, 10)
    assert "job_parent" in plan
    assert "Seq Scan" not in plan


async def test_heads_do_not_read_what_another_lifecycle_has_of_the_same_type(rig: Rig):
    """A long queue of leased jobs of the same type must not make a look at the bus dear."""
    plan = await _plan(
        rig,
        "SELECT id FROM ready WHERE type = 1 AND lifecycle = 5::smallint AND prio = 2::smallint ORDER BY pos LIMIT 10",
    )
    assert "ready_claim" in plan
    assert '"Sort"' not in plan
    assert '"Filter"' not in plan


async def test_the_function_of_the_heads_reads_no_more_than_it_gives(rig: Rig):
    assert rig.admin_sql is not None
    await rig.submit(400, type="shared")
    for job_id in await rig.submit(3, type="shared", lifecycle="bus-job"):
        await rig.move(job_id, "SCHEDULED", by=actor(Role.SCHEDULER))
    assert len(await rig.ledger.peek_ready("bus-job", each=100)) == 3
    await rig.admin_sql("ANALYZE trellis.ready")  # what other tests left in the statistics must not decide
    await rig.admin_sql("SELECT pg_stat_force_next_flush()")
    read = "SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'ready'"
    await rig.admin_sql("BEGIN")
    try:
        await rig.admin_sql("SELECT * FROM trellis.heads(5::smallint, 100, 1000)")
        assert await rig.admin_sql(read) == [(0, 6)]
    finally:
        await rig.admin_sql("ROLLBACK")


async def test_remarks_are_counted_through_their_own_index(rig: Rig):
    assert "signal_remark" in await _plan(rig, "SELECT count(*) FROM signal WHERE id = 1 AND type = 4")


def test_every_job_that_ends_takes_its_type_with_it():
    """A row of `ended` without a type is in no list by type until a sweep has filled it in."""
    written = [
        columns for _, text in sql_files("functions") for columns in re.findall(r"insert into ended \(([^)]*)\)", text)
    ]
    assert len(written) >= 4
    assert [columns for columns in written if "type" not in re.split(r",\s*", columns)] == []
