"""Look-ups that people and services make go through an index, however long the history is."""

import re
from typing import Any

import apsw
import pytest

from tests.ledgers.lists import LISTS
from tests.ledgers.sqlite.people import claim, complete, submit
from tests.ledgers.sqlite.shell import Shell
from trellis.engine.jobs import JobId
from trellis.engine.records import JobFilter
from trellis.ledgers.sqlite import claims, lists, reads, sweep, turn
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.ledgers.sqlite.steps import STEP_QUERIES
from trellis.lifecycles import LIFECYCLES, event_code

LOOKUPS = {
    "events of a job": reads._READ_QUERIES.events,
    "events by type and time": reads._READ_QUERIES.events_by_type,
    "events by correlation": reads._READ_QUERIES.events_by_correlation,
    "the feed": reads._READ_QUERIES.feed,
    "children that are known": reads._READ_QUERIES.children_below,
    "children that are new": reads._READ_QUERIES.children_above,
    **{f"a page {name}": sql for name, sql in lists.PAGES.items()},
    **{f"dead letters {name}": sql for name, sql in lists.LETTERS.items() if name != "all_jobs"},
    "a page oldest first": lists.OLDEST,
    "ready jobs": claims._CLAIM_QUERIES.ready_of_type,
    "jobs to claim": claims._CLAIM_QUERIES.to_claim,
    "standings": STEP_QUERIES.standings,
    "jobs that make a plain step": STEP_QUERIES.held_plainly,
    "expired leases": sweep._SWEEP_QUERIES.expired,
    "due timers": sweep._SWEEP_QUERIES.due,
    "passed deadlines": sweep._SWEEP_QUERIES.past_deadline,
    "overdue cancels": sweep._SWEEP_QUERIES.overdue_cancels,
    "the next due time": sweep._SWEEP_QUERIES.next_due,
    "taken slots": STEP_QUERIES.taken_slots,
    "parked jobs": STEP_QUERIES.parked_first,
    "heads of what is ready": reads._READ_QUERIES.heads,
    "held jobs by their ids": reads._READ_QUERIES.holds,
    "leases that end soon": reads._READ_QUERIES.expiring,
    "remarks about a job": turn._HOLDER_QUERIES.put_remark,
}
BIG = {"trellis_job", "trellis_event", "trellis_submission", "trellis_signal", *"jhreps"}
"""Big tables, and what the queries call them."""


@pytest.fixture
def shell(shell: Shell) -> Shell:
    """A shell that plans queries as the ledger's own connections do: without a look at the values that are bound."""
    shell.db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    return shell


async def test_a_repeated_read_is_not_prepared_again(ledger: SqliteLedger):
    """Preparing a listing takes ten times as long as the listing: an idle instance lists every second."""
    await submit(ledger, 2)
    prepared: list[tuple[object, ...]] = []

    def note(*what: object) -> int:
        """SQLite calls an authorizer while it prepares a statement, and never while it runs one."""
        prepared.append(what)
        return apsw.SQLITE_OK

    async def read() -> None:
        for where in (JobFilter(), JobFilter(lifecycle="run", state="requested"), JobFilter(lifecycle="artifact")):
            await ledger.jobs(where, limit=10)
            await ledger.jobs(JobFilter(lifecycle="leased-job", state="queued"), limit=10, oldest_first=True)

    ledger.reader._connection.authorizer = note
    await read()
    assert prepared
    prepared.clear()
    await read()
    assert prepared == []


@pytest.mark.requirement("DJ-13")
@pytest.mark.parametrize("name", LOOKUPS)
def test_no_lookup_reads_a_whole_table(shell: Shell, name: str):
    names = dict.fromkeys(
        [
            "type",
            "since",
            "limit",
            "correlation",
            "after",
            "end",
            "lifecycle",
            "lifecycles",
            "types",
            "before",
            "states",
            "key",
            "parent",
            "place",
            "buried",
            "narrowed",
            "each",
            "job_id",
            "most",
            "data",
        ]
    )
    bindings = names | dict.fromkeys(["reason", "now"])
    sql = LOOKUPS[name]
    plan = shell.db.execute(
        f"EXPLAIN QUERY PLAN {sql}", bindings if ":" in sql else (None,) * sql.count("?")
    ).fetchall()
    for detail in (row[3] for row in plan):
        whole = detail.startswith("SCAN") and detail.split()[1] in BIG and not re.search("USING|VIRTUAL TABLE", detail)
        assert not whole, f"{name}: {detail}"


@pytest.mark.requirement("DJ-13")
def test_events_by_type_and_time_use_their_index(shell: Shell):
    values = {"type": 1, "since": 0, "limit": 1}
    plan = shell.db.execute(f"EXPLAIN QUERY PLAN {reads._READ_QUERIES.events_by_type}", values).fetchall()
    assert any("trellis_event_type_at (type=? AND at>?)" in row[3] for row in plan)


@pytest.mark.requirement("OBS-3")
def test_objectives_read_the_failures_of_queue_jobs_and_of_no_others(shell: Shell):
    values = {"type": 5, "since": 0, "limit": 1}
    sample = shell.db.execute(f"EXPLAIN QUERY PLAN {reads._READ_QUERIES.sample_failed_queue_jobs}", values).fetchall()
    assert [row[3] for row in sample] == [
        "SEARCH e USING INDEX trellis_event_queue_failed (type=? AND at>?)",
        "SEARCH s USING INTEGER PRIMARY KEY (rowid=?)",
    ]
    count = shell.db.execute(
        f"EXPLAIN QUERY PLAN {reads._READ_QUERIES.count_failed_queue_jobs}", {"types": "[5, 7]", "since": 0}
    ).fetchall()
    assert "trellis_event_queue_failed (type=? AND at>?)" in count[0][3]


def test_only_queue_jobs_have_the_events_of_the_index_of_their_failures():
    """The index names them by numbers, and an event does not say its lifecycle."""
    indexed = {(5, 8), (7, 9)}
    for lifecycle in LIFECYCLES.values():
        steps = {(event_code(one.event), lifecycle.code_of(one.target)) for one in lifecycle.transitions}
        assert steps & indexed == (indexed if lifecycle.name == "queue-job" else set()), lifecycle.name


def test_children_are_read_from_their_index_alone_and_in_order(shell: Shell):
    """Whoever asks whether there are new ones must not pay for those that are known."""
    below = shell.db.execute(f"EXPLAIN QUERY PLAN {reads._READ_QUERIES.children_below}", ("p", 9)).fetchall()
    above = shell.db.execute(f"EXPLAIN QUERY PLAN {reads._READ_QUERIES.children_above}", ("p", 9, 1)).fetchall()
    assert [row[3] for row in below] == [
        "SEARCH trellis_submission USING COVERING INDEX trellis_submission_parent (parent=? AND rowid<?)"
    ]
    assert [row[3] for row in above] == [
        "SEARCH trellis_submission USING INDEX trellis_submission_parent (parent=? AND rowid>?)"
    ]


async def _steps_of_lists(ledger: SqliteLedger) -> dict[str, int]:
    """How many steps SQLite makes for each list, which must be one statement."""
    steps: dict[str, int] = {}
    profiles: list[dict[str, Any]] = []
    connection = ledger.reader._connection
    connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, profiles.append)
    try:
        for name, where in LISTS.items():
            for kind, read in (("jobs", ledger.jobs), ("dead letters", ledger.dead_letters)):
                profiles.clear()
                await read(where, limit=5)
                (steps[f"{kind} of {name}"],) = (
                    one["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]
                    for one in profiles
                    if one["sql"].startswith("SELECT")
                )
        profiles.clear()
        await ledger.jobs(LISTS["a type that waits"], limit=5, oldest_first=True)
        (steps["oldest jobs"],) = (
            one["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"] for one in profiles if one["sql"].startswith("SELECT")
        )
    finally:
        connection.trace_v2(0, None)
    return steps


@pytest.mark.requirement("DJ-13")
async def test_every_list_is_one_statement_whose_work_does_not_grow_with_other_jobs(ledger: SqliteLedger):
    async def others(number: int) -> None:
        """Of another type, key, correlation and parent: some end, some wait for a time, some for their key, some are ready."""
        await complete(ledger, await claim(ledger, len(await submit(ledger, number))))
        marks = {"type": "other", "correlation_id": "o", "parent_id": JobId("o")}
        await submit(ledger, number, concurrency_key="o", **marks)
        await submit(ledger, number, delay_s=600.0, **marks)
        await submit(ledger, number, **marks)

    await submit(
        ledger, 5, type="rare", concurrency_key="k", concurrency_limit=9, correlation_id="c", parent_id=JobId("p")
    )
    await others(20)
    few = await _steps_of_lists(ledger)
    await others(200)
    many = await _steps_of_lists(ledger)

    assert {name: (steps, few[name]) for name, steps in many.items() if steps > 1.3 * few[name]} == {}


def test_the_heads_of_a_type_are_read_in_order_from_the_index_of_claims(shell: Shell):
    values = {"lifecycle": 5, "each": 3, "limit": 10}
    rows = shell.db.execute(f"EXPLAIN QUERY PLAN {reads._READ_QUERIES.heads}", values).fetchall()
    (index,) = [row for row in rows if "trellis_job_ready (type=? AND prio=?)" in row[3]]
    beside = [row[3] for row in rows if row[1] == index[1]]
    assert beside == [index[3]], "nothing is sorted there"


async def test_the_events_of_a_drained_job_take_few_steps_of_the_database(ledger: SqliteLedger):
    """What each event costs besides its own row, counted by SQLite: indexes, guards and what they look up.

    A new index on jobs or a new trigger adds to every event. 1,495 steps on 2026-11-18, with 500 jobs a statement.
    """
    steps = 0

    def note(ended: dict[str, Any]) -> None:
        nonlocal steps
        if ended["sql"] == STEP_QUERIES.insert_events:
            steps += ended["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]

    await submit(ledger, 100)
    await ledger.writer.run(lambda tx: tx.db.trace_v2(apsw.SQLITE_TRACE_PROFILE, note))  # type: ignore[attr-defined]
    await complete(ledger, await claim(ledger, 100))
    await ledger.writer.run(lambda tx: tx.db.trace_v2(0, None))  # type: ignore[attr-defined]
    assert 1_000 < steps / 100 < 1_550


async def test_a_filtered_feed_gets_ahead_past_events_it_leaves_out(ledger: SqliteLedger):
    await submit(ledger, 5)
    page = await ledger.feed(None, limit=2, lifecycle="run")
    assert page.events == ()
    assert page.position == await ledger.feed_end()


async def test_leased_jobs_are_counted_by_owner(ledger: SqliteLedger):
    await submit(ledger, 3)
    held = await claim(ledger, 2)
    (depth,) = await ledger.queues()
    assert (depth.ready, depth.held) == (1, 2)
    await complete(ledger, held)
    (depth,) = await ledger.queues()
    assert (depth.ready, depth.held) == (1, 0)


def test_no_index_has_a_list_of_values_as_its_condition(shell: Shell):
    """SQLite builds a table of three or more values for each row that a trigger writes. That doubled the cost of an event."""
    indexes = shell.db.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql LIKE '% WHERE %'"
    ).fetchall()
    assert "trellis_job_listed" in dict(indexes)
    assert [name for name, sql in indexes if re.search(r"\bIN \([^)]*,[^)]*,", sql)] == []
