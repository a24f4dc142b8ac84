"""The second belt: what the tables refuse even to a role that may write them, so that a wrong function cannot lie."""

import asyncpg
import pytest

from tests.ledgers.conformance.rig import Rig

pytestmark = [pytest.mark.only("postgres"), pytest.mark.requirement("D55")]

EVENT = """
INSERT INTO trellis.event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role)
SELECT e.id, e.batch, e.at, {version}, e.actor, {epoch}, 2, e.lifecycle, {source}, {target}, {generation}, {attempt}, 9
  FROM trellis.event e ORDER BY e.version DESC LIMIT 1
"""
NEXT = {"version": "e.version + 1", "epoch": "e.epoch", "source": "e.to_state", "generation": 0, "attempt": 0}


async def _refused(rig: Rig, statement: str) -> asyncpg.PostgresError:
    assert rig.admin_sql is not None
    with pytest.raises(asyncpg.PostgresError) as refused:
        await rig.admin_sql(statement)
    return refused.value


async def test_the_declared_next_event_would_be_taken(rig: Rig):
    """The control: the same statement with nothing wrong passes the guard, so that the refusals below mean something."""
    await rig.submit_one()
    await rig.claim_one(start=False)
    assert rig.admin_sql is not None
    await rig.admin_sql("BEGIN")
    await rig.admin_sql(EVENT.format(**NEXT, target=3))
    await rig.admin_sql("ROLLBACK")


WRONG: dict[str, dict[str, object]] = {
    "illegal transition": {"target": 4},  # assigned → succeeded
    "version gap": {"target": 3, "version": "e.version + 2"},
    "wrong predecessor": {"target": 3, "source": 1},
    "falling epoch": {"target": 3, "epoch": "e.epoch - 1"},
    "falling attempt": {"target": 3, "attempt": -1},
    "falling generation": {"target": 3, "generation": -1},
}


@pytest.mark.requirement("D1", "D2", "DJ-1", "DJ-3")
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_an_event_that_does_not_follow_is_refused(rig: Rig, wrong: dict[str, object]):
    await rig.submit_one()
    await rig.claim_one(start=False)
    error = await _refused(rig, EVENT.format(**(NEXT | wrong)))
    assert getattr(error, "sqlstate", "") == "TR001"


MANY = 25
COUNTS_PASSES = 170_000
"""Older servers search an index once for each value of an array, and count every search."""
MANY_EVENTS = """
INSERT INTO trellis.event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role)
SELECT e.id, e.batch, e.at, CASE WHEN n.last THEN {version} ELSE e.version + 1 END, e.actor, CASE WHEN n.last THEN {epoch} ELSE e.epoch END, 2,
       e.lifecycle, CASE WHEN n.last THEN {source} ELSE e.to_state END, CASE WHEN n.last THEN {target} ELSE 3 END,
       CASE WHEN n.last THEN {generation} ELSE 0 END, CASE WHEN n.last THEN {attempt} ELSE 0 END, 9
  FROM trellis.event e, LATERAL (SELECT e.id = (SELECT max(id) FROM trellis.event) AS last) n WHERE e.version = 2
"""
"""The next event of each of `MANY` jobs in one statement; only the last one is as the arguments say."""


@pytest.mark.oldest_server
@pytest.mark.requirement("D1", "D2", "DJ-1", "DJ-3")
async def test_one_wrong_event_among_many_is_refused_also_where_they_are_checked_in_one_pass(rig: Rig):
    sql = rig.admin_sql
    assert sql is not None
    await rig.submit(MANY)
    await rig.claim(MANY, start=False)
    reads = "SELECT sum(idx_scan) FROM pg_stat_xact_user_tables WHERE relname LIKE 'event\\__'"
    await sql("BEGIN")
    try:
        await sql("SET LOCAL trellis.many_events = on")
        await sql("SAVEPOINT s")
        ((before,),) = await sql(reads)
        await sql(MANY_EVENTS.format(**NEXT, target=3))
        ((after,),) = await sql(reads)
        ((version,),) = await sql("SHOW server_version_num")
        if int(version) >= COUNTS_PASSES:
            assert after - before < MANY, "the events before them were read in one pass"
        await sql("ROLLBACK TO s")
        for name, wrong in WRONG.items():
            error = await _refused(rig, MANY_EVENTS.format(**(NEXT | wrong)))
            assert getattr(error, "sqlstate", "") == "TR001", name
            await sql("ROLLBACK TO s")
    finally:
        await sql("ROLLBACK")


FIRST_EVENT = """
INSERT INTO trellis.event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role)
SELECT e.id + 1, e.batch, e.at, 1, e.actor, 0, e.type, e.lifecycle, {source}, {target}, {generation}, {attempt}, e.role
  FROM trellis.event e WHERE e.version = 1 LIMIT 1
"""
FIRST = {"source": 0, "target": "e.to_state", "generation": 0, "attempt": 0}
WRONG_FIRST: dict[str, dict[str, object]] = {
    "illegal transition": {"target": 4},
    "wrong predecessor": {"source": 1, "target": 2},
    "attempt": {"attempt": 1},
    "generation": {"generation": 1},
}


@pytest.mark.requirement("D1", "D2", "DJ-1", "DJ-3")
@pytest.mark.parametrize("first_events", ["on", "off"])
async def test_a_wrong_event_is_refused_whether_or_not_its_statement_says_that_it_makes_first_events(
    rig: Rig, first_events: str
):
    sql = rig.admin_sql
    assert sql is not None
    await rig.submit_one()
    await rig.claim_one(start=False)
    await sql("BEGIN")
    try:
        await sql(f"SET LOCAL trellis.first_events = {first_events}")
        await sql("SAVEPOINT s")
        for control in (FIRST_EVENT.format(**FIRST), EVENT.format(**NEXT, target=3)):
            await sql(control)
            await sql("ROLLBACK TO s")
        wrong_ones = {name: FIRST_EVENT.format(**(FIRST | wrong)) for name, wrong in WRONG_FIRST.items()}
        wrong_ones |= {f"later, {name}": EVENT.format(**(NEXT | wrong)) for name, wrong in WRONG.items()}
        for name, statement in wrong_ones.items():
            error = await _refused(rig, statement)
            assert getattr(error, "sqlstate", "") == "TR001", name
            await sql("ROLLBACK TO s")
    finally:
        await sql("ROLLBACK")


async def test_a_second_event_for_a_version_is_refused(rig: Rig):
    await rig.submit_one()
    await rig.claim_one(start=False)
    error = await _refused(rig, EVENT.format(**(NEXT | {"version": "e.version", "target": 3})))
    assert isinstance(error, asyncpg.UniqueViolationError)


@pytest.mark.parametrize("statement", ["UPDATE trellis.event SET cause = 'x'", "TRUNCATE trellis.event"])
async def test_history_is_never_rewritten(rig: Rig, statement: str):
    await rig.submit_one()
    assert getattr(await _refused(rig, statement), "sqlstate", "") == "TR001"


@pytest.mark.requirement("D49")
async def test_two_jobs_cannot_own_one_slot(rig: Rig):
    await rig.submit(2, concurrency_key="k")
    error = await _refused(rig, "INSERT INTO trellis.slot SELECT ckey, 1, id FROM trellis.parked")
    assert isinstance(error, asyncpg.UniqueViolationError)


@pytest.mark.parametrize(
    "column, value",
    [
        ("reason_code", "NULL"),
        ("reason_code", "'because'"),
        ("stage", "'later'"),
        ("last_error", "''"),
        ("attempts", "NULL"),
        ("correlation_id", "''"),
        ("last_lease_expires_at", "NULL"),
    ],
)
@pytest.mark.requirement("DJ-12")
async def test_a_dead_letter_is_complete_or_refused(rig: Rig, column: str, value: str):
    await rig.submit_one()
    fields = {
        "reason_code": "'timeout'",
        "stage": "'exec'",
        "last_error": "'late'",
        "attempts": "1",
        "last_owner": "1",
        "last_lease_expires_at": "now()",
        "correlation_id": "'c'",
    }
    names = ", ".join(fields)
    insert = "INSERT INTO trellis.dead_letter (id, version, at, {names}) SELECT id, 9, now(), {values} FROM trellis.job"
    assert rig.admin_sql is not None
    await rig.admin_sql("BEGIN")
    await rig.admin_sql(insert.format(names=names, values=", ".join(fields.values())))
    await rig.admin_sql("ROLLBACK")
    await _refused(rig, insert.format(names=names, values=", ".join((fields | {column: value}).values())))
