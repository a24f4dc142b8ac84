"""Look-ups and claims go through their indexes on big tables."""

import json
import re

import pytest

from tests.ledgers.conformance.rig import Rig, actor
from tests.ledgers.conformance.test_idle import read_statements
from trellis.ledgers.postgres.reads import BY_INDEX, READ_QUERIES
from trellis.lifecycles import Role

pytestmark = pytest.mark.only("postgres")

PARTITION_JOBS = 4_194_304
OURS = "relnamespace = 'trellis'::regnamespace AND relkind IN ('r', 'i')"


INDEX_SCANS = ("SET LOCAL enable_seqscan = off", "SET LOCAL enable_bitmapscan = off")


async def _plan(rig: Rig, statement: str, *arguments: object, settings: tuple[str, ...] = INDEX_SCANS) -> str:
    """The plan on big tables that nothing else is known about: what earlier tests left in the statistics does not count."""
    assert rig.admin_sql is not None
    await rig.admin_sql("BEGIN")
    try:
        await rig.admin_sql("SET LOCAL search_path = trellis")
        for setting in settings:
            await rig.admin_sql(setting)
        await rig.admin_sql("DELETE FROM pg_statistic WHERE starelid IN (SELECT oid FROM pg_class WHERE " + OURS + ")")
        await rig.admin_sql("UPDATE pg_class SET reltuples = 1e6, relpages = 1 WHERE " + OURS)
        rows = await rig.admin_sql("EXPLAIN (FORMAT JSON) " + statement, *arguments)
    finally:
        await rig.admin_sql("ROLLBACK")
    return json.dumps(json.loads(rows[0][0]) if isinstance(rows[0][0], str) else rows[0][0])


@pytest.mark.requirement("DJ-13", "D52")
async def test_events_of_a_sealed_partition_are_found_by_type_and_time_through_their_index(rig: Rig):
    """A partition is sealed when the next jobs go elsewhere; only then does it get the dear index."""
    assert rig.admin_sql is not None
    await rig.admin_sql("SELECT setval('trellis.job_id_seq', $1::bigint)", PARTITION_JOBS - 3)
    jobs = await rig.submit(6)
    await rig.claim(6)
    assert "event_0_type_at" not in await _plan(rig, READ_QUERIES.events_by_type, 2, None, 10)
    await rig.sweep()
    assert await rig.admin_sql("SELECT 1 FROM pg_indexes WHERE indexname = 'event_0_type_at'")
    assert "event_0_type_at" in await _plan(rig, READ_QUERIES.events_by_type, 2, None, 10)
    hot = [row[0] for row in await rig.admin_sql("SELECT indexdef FROM pg_indexes WHERE tablename = 'event_1'")]
    assert [index for index in hot if "brin (at)" in index], "the hot partition is found by time"
    assert not [index for index in hot if "(type" in index or "correlation" in index], "and pays for nothing else"
    found = await rig.ledger.find_events(type_="job_claimed", correlation_id=None, since=None, limit=10)
    assert [event.job_id for event in found] == jobs
    assert len({row[0] for row in await rig.admin_sql("SELECT tableoid FROM trellis.event")}) == 2


@pytest.mark.requirement("DJ-13")
async def test_events_are_found_by_correlation_through_an_index(rig: Rig):
    await rig.submit(3, correlation_id="c")
    assert "job_correlation" in await _plan(rig, READ_QUERIES.events_by_correlation, "c", None, 10, None)


async def test_a_feed_without_plain_jobs_reads_no_event_of_one(rig: Rig):
    await rig.submit(3)
    await rig.submit(3, lifecycle="run")
    arguments = (1, 100, 1, 100, 0, 0, 0, [1, 2], 10, [1, 2, 3])
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


async def test_jobs_of_an_ended_state_are_listed_through_their_index(rig: Rig):
    await rig.cancel(await rig.submit_one())
    plan = await _plan(rig, READ_QUERIES.jobs_ended, 100, 10, [4], None, [4])
    assert "ended_state" in plan


@pytest.mark.parametrize("query, before, more", [("jobs_open", 100, ()), ("jobs_oldest", 0, (None, None))])
async def test_jobs_that_rest_in_a_state_are_listed_through_their_index_and_no_others_are_read(
    rig: Rig, query: str, before: int, more: tuple[None, ...]
):
    """What is final rests for good: a look at what waits, or a page of it, must not cost more with every artifact."""
    await rig.submit(2, lifecycle="artifact")
    plan = await _plan(rig, getattr(READ_QUERIES, query), before, 10, [8], None, False, [2], None, *more)
    scans = [line for line in re.findall(r'"Index Name": "(\w+)"', plan) if line.startswith("resting")]
    assert scans[0] == "resting_state", "the others look up what was found"


async def test_final_artifacts_are_paired_through_their_index(rig: Rig):
    await rig.submit(2, lifecycle="artifact")
    assert "resting_state" in await _plan(rig, READ_QUERIES.unpaired, [2], [6], [8], [2])


RELATED = {"job_parent": ("p", None, None), "job_correlation": (None, "c", None), "job_ckey": (None, None, "k")}


@pytest.mark.parametrize("index", RELATED)
async def test_jobs_of_a_parent_a_correlation_or_a_key_are_listed_through_their_index(rig: Rig, index: str):
    """Prepared once for every value: that is how a server runs a statement that it has seen often."""
    parent, correlation, key = RELATED[index]
    await rig.submit(2, parent_id="p", correlation_id="c", concurrency_key="k")
    arguments = (100, 10, parent, None, None, correlation, key, None, None, None, None)

    plan = await _plan(rig, READ_QUERIES.jobs_related, *arguments)

    named = re.findall(r'"Index Name": "(\w+)"', plan)
    assert index in named
    assert "job_pkey" in named, "the rest is looked up"
    assert '"Seq Scan"' not in plan


async def _rows_read(rig: Rig, query: str, types: str, *arguments: object) -> float:
    """How many rows a statement takes from the tables of jobs, with the plan for any arguments."""
    assert rig.admin_sql is not None
    given = ", ".join("null" if one is None else f"'{one}'" for one in arguments)
    await rig.admin_sql("BEGIN")
    try:
        await rig.admin_sql("SET LOCAL search_path = trellis")
        await rig.admin_sql("SET LOCAL plan_cache_mode = force_generic_plan")
        for setting in INDEX_SCANS:  # as on a big table
            await rig.admin_sql(setting)
        await rig.admin_sql(f"PREPARE listing ({types}) AS {query}")
        rows = await rig.admin_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE listing ({given})")
        await rig.admin_sql("DEALLOCATE listing")
    finally:
        await rig.admin_sql("ROLLBACK")
    plans = [json.loads(rows[0][0])[0]["Plan"]] if isinstance(rows[0][0], str) else [rows[0][0][0]["Plan"]]
    read = 0.0
    while plans:
        plan = plans.pop()
        plans += plan.get("Plans", [])
        if plan.get("Relation Name") in {"job", "ended", "ready"}:
            read += (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    return read


async def test_a_list_by_a_rare_state_reads_no_jobs_of_another_state(rig: Rig):
    assert rig.admin_sql is not None
    for job_id in await rig.submit(200):
        await rig.cancel(job_id)
    types = "bigint, int, smallint[], int, smallint[]"

    # No leased-job has succeeded: the newest cancelled ones are a page, and of those that succeeded there are none.
    succeeded = await _rows_read(rig, READ_QUERIES.jobs_ended, types, 10**9, 5, "{4}", None, "{4}")
    cancelled = await _rows_read(rig, READ_QUERIES.jobs_ended, types, 10**9, 5, "{4}", None, "{6}")

    assert (succeeded, 0 < cancelled < 50) == (0, True), (succeeded, cancelled)


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
