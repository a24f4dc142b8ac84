"""Submitting inside the caller's own transaction, from any driver, through the SQL function."""

import asyncio
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from tests.ledgers.conformance.rig import SUBMITTER, Rig, claimed_ids
from trellis.engine.jobs import JobId, Priority, RequestKey, Submitted
from trellis.engine.records import JobFilter, JobPlace
from trellis.ledgers.postgres.lanes import LaneOptions, PostgresLane
from trellis.ledgers.postgres.submit import submit_one
from trellis.lifecycles import Trigger

pytestmark = [pytest.mark.only("postgres"), pytest.mark.oldest_server]


@pytest_asyncio.fixture(loop_scope="session")
async def shell(rig: Rig):
    """The caller's own connection, with the application's role."""
    connection = await asyncpg.connect(rig.app_url)
    await connection.execute("SELECT trellis.type_id('work')")  # a type is known before it is submitted
    yield connection
    await connection.close()


async def _ask(connection: asyncpg.Connection, statement: str, *arguments: object) -> JobId:
    answer = await connection.fetchval(statement, *arguments)
    assert answer is not None
    return JobId(answer)


@pytest.mark.requirement("DJ-5")
async def test_a_submit_that_is_rolled_back_leaves_nothing(rig: Rig, shell: asyncpg.Connection):
    transaction = shell.transaction()
    await transaction.start()
    job_id = await _ask(shell, "SELECT trellis.submit_job('work', p_idempotency_key => 'k', p_concurrency_key => 'c')")
    assert await rig.ledger.job(job_id) is None, "nobody else sees it yet"
    await transaction.rollback()
    assert await rig.ledger.job(job_id) is None
    assert (await rig.ledger.jobs(JobFilter(), limit=5)).jobs == ()
    assert (await rig.ledger.feed(None, limit=5)).events == ()
    await rig.submit_one(concurrency_key="c")
    assert len(await rig.claim()) == 1, "the key's slot was given back"
    keyed = "SELECT trellis.submit_job('work', p_idempotency_key => 'k')"
    again = await _ask(shell, keyed)
    assert await rig.ledger.job(again) is not None, "the idempotency key was given back"
    assert await _ask(shell, keyed) == again, "a submit that is committed keeps its key"


@pytest.mark.requirement("D6")
async def test_a_submit_that_commits_late_is_not_passed_over_by_the_feed(rig: Rig, shell: asyncpg.Connection):
    """Its transaction began first and ends last: a reader in between must wait for it or come back to it."""
    known = await rig.submit(1)
    transaction = shell.transaction()
    await transaction.start()
    late = await _ask(shell, "SELECT trellis.submit_job('work')")
    early = await rig.submit(3)
    seen, position = [], None
    for _ in range(5):
        page = await rig.ledger.feed(position, limit=10)
        seen += page.events
        position = page.position
    await transaction.commit()
    while (page := await rig.ledger.feed(position, limit=10)).events:
        seen += page.events
        position = page.position
    assert sorted(event.job_id for event in seen) == sorted([late, *known, *early])


async def test_a_submit_that_commits_is_a_job_like_any_other(rig: Rig, shell: asyncpg.Connection):
    job_id = await _ask(
        shell,
        "SELECT trellis.submit_job('work', $1, p_priority => 'critical', p_correlation_id => 'c-1', p_delay_s => 5)",
        '{"n": 1}',
    )
    job = await rig.job(job_id)
    assert (job.state, job.place, job.priority, job.correlation_id) == (
        "queued",
        JobPlace.SCHEDULED,
        Priority.CRITICAL,
        "c-1",
    )
    await rig.pass_time(5)
    (held,) = await rig.claim()
    assert claimed_ids([held]) == [job_id]
    await rig.pull(held, Trigger.COMPLETE)


@pytest.mark.requirement("DJ-5")
async def test_the_same_key_again_answers_with_the_same_job(rig: Rig, shell: asyncpg.Connection):
    ask = "SELECT trellis.submit_job('work', $1, p_idempotency_key => 'k')"
    first = await _ask(shell, ask, "1")
    assert await shell.fetchval(ask, "1") == first
    with pytest.raises(asyncpg.PostgresError):
        await shell.fetchval(ask, "2")
    assert len(await rig.ledger.events(first)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        "'no good name'",
        "'work', p_delay_s => -1",
        "'work', p_priority => 'urgent'",
        "'work', p_max_attempts => 0",
        "'work', p_concurrency_key => 'k', p_concurrency_limit => 0",
        "'work', p_payload => to_jsonb(repeat('x', 1048577))",
    ],
)
async def test_bad_input_is_refused_and_nothing_is_written(rig: Rig, shell: asyncpg.Connection, arguments: str):
    with pytest.raises(asyncpg.PostgresError):
        await shell.fetchval(f"SELECT trellis.submit_job({arguments})")
    assert (await rig.ledger.jobs(JobFilter(), limit=5)).jobs == ()


async def test_sql_submit_of_an_unknown_type_is_refused(rig: Rig, shell: asyncpg.Connection):
    """A typing error, or a row that an open transaction would keep from everybody else."""
    with pytest.raises(asyncpg.PostgresError, match="unknown here"):
        await shell.fetchval("SELECT trellis.submit_job('wrok')")


@pytest.mark.parametrize(
    "arguments",
    [
        "p_correlation_id => ''",
        "p_job_id => 'a/b'",
        "p_concurrency_key => ''",
        "p_delay_s => -1",
        "p_deadline_s => 0",
        "p_run_at => '20000-01-01'",
        "p_run_at => 'infinity'",
        "p_priority => 'now'",
    ],
)
async def test_options_out_of_bounds_are_refused_and_nothing_is_written(
    rig: Rig, shell: asyncpg.Connection, arguments: str
):
    with pytest.raises(asyncpg.PostgresError) as refused:
        await shell.fetchval(f"SELECT trellis.submit_job('work', {arguments})")
    assert getattr(refused.value, "sqlstate", "") == "TR004"
    assert (await rig.ledger.jobs(JobFilter(), limit=5)).jobs == ()


@pytest.mark.requirement("D49")
async def test_an_open_transaction_keeps_nobody_from_working(rig: Rig, shell: asyncpg.Connection):
    """Whoever submits a keyed job and is slow to commit must not stop others of that key, nor the sweep."""
    first, second = await rig.submit(2, concurrency_key="user:k")
    held = await rig.claim_one()
    transaction = shell.transaction()
    await transaction.start()
    await _ask(shell, "SELECT trellis.submit_job('work', p_concurrency_key => 'k')")
    await _ask(shell, "SELECT trellis.submit_job('work', p_concurrency_key => 'new')")
    async with asyncio.timeout(5):
        await rig.submit_one(concurrency_key="user:k")
        await rig.submit_one(concurrency_key="user:new")
        await rig.pull(held, Trigger.COMPLETE)
        assert (await rig.sweep()).elected
        assert second in claimed_ids(await rig.claim(5))
    await transaction.rollback()
    assert await rig.state(first) == "succeeded"


@pytest.mark.requirement("D49")
async def test_sql_and_python_submits_share_concurrency_keys(rig: Rig, shell: asyncpg.Connection):
    await _ask(shell, "SELECT trellis.submit_job('work', p_concurrency_key => 'acct')")
    await rig.submit_one(concurrency_key="user:acct")
    await rig.sweep()
    assert len(await rig.claim(5)) == 1


@pytest.mark.requirement("DJ-5")
async def test_sql_and_python_submits_share_idempotency_keys(rig: Rig, shell: asyncpg.Connection):
    await _ask(shell, "SELECT trellis.submit_job('work', p_idempotency_key => 'order-1')")
    await rig.offer(rig.new_job(idempotency_key="order-1", fingerprint=b"mine"))
    assert len((await rig.ledger.jobs(JobFilter(), limit=5)).jobs) == 1


@pytest.mark.parametrize(
    "key", [None, RequestKey(scope="s", key="k", fingerprint=b"f", about="jobs", given="k")], ids=["bare", "with a key"]
)
@pytest.mark.requirement("DJ-2")
async def test_an_id_that_another_transaction_takes_meanwhile_does_not_touch_the_jobs_beside_it(
    rig: Rig, shell: asyncpg.Connection, key: RequestKey | None
):
    """All four go in by one statement, which waits for the other transaction: its job is the one that exists then."""
    jobs = [
        rig.new_job(job_id=JobId(f"mine-{n}"), type="work", id_is_given=True, fingerprint=b"x", payload=b"1")
        for n in range(4)
    ]
    await shell.execute("SET search_path = trellis")
    by: Any = await shell.fetchval("SELECT register_actor('sql', $1::smallint)", SUBMITTER.role.code)
    types: dict[str, Any] = {"work": await shell.fetchval("SELECT type_id('work')")}
    transaction = shell.transaction()
    await transaction.start()
    connection: Any = shell  # its answers are typed by the driver
    await submit_one(connection, by, jobs[2], types, repeat=False)
    submitting = asyncio.create_task(rig.ledger.submit(SUBMITTER, jobs, key=key))
    watcher = await asyncpg.connect(rig.app_url)
    try:
        async with asyncio.timeout(20):
            while not await watcher.fetchval("select count(*) from pg_locks where not granted"):
                pass
    finally:
        await watcher.close()
    await transaction.commit()
    assert await submitting == [Submitted(job_id=job.job_id, created=job is not jobs[2]) for job in jobs]
    assert [(await rig.ledger.events(job.job_id))[0].actor for job in jobs] == [
        *[SUBMITTER.name] * 2,
        "sql",
        SUBMITTER.name,
    ]


@pytest.mark.requirement("DJ-2")
async def test_jobs_with_chosen_ids_wait_for_the_keys_of_their_ids_before_any_job_is_inserted(
    rig: Rig, shell: asyncpg.Connection
):
    """A submit of one job takes its key first and then inserts it. In another order, two transactions could deadlock."""
    first = await rig.submit_one(type="work")
    jobs = [
        rig.new_job(job_id=JobId(f"mine-{n}"), type="work", id_is_given=True, fingerprint=b"x", payload=b"1")
        for n in range(3)
    ]
    one, watcher = await asyncpg.connect(rig.admin_url), await asyncpg.connect(rig.app_url)
    try:
        transaction = one.transaction()
        await transaction.start()
        await one.execute(
            "insert into trellis.idempotency (scope, key, at, id, fingerprint) values ('job_id', 'mine-2', now(), 0, 'x')"
        )
        submitting = asyncio.create_task(rig.ledger.submit(SUBMITTER, jobs))
        async with asyncio.timeout(20):
            while not await watcher.fetchval("select count(*) from pg_locks where not granted"):
                pass
        await one.execute("set local lock_timeout = '200ms'")
        await one.execute(
            """insert into trellis.job select (jsonb_populate_record(j, '{"id": -1, "job_id": "mine-2"}')).*
               FROM trellis.job j where j.job_id = $1""",
            first,
        )
        await transaction.rollback()
        assert await submitting == [Submitted(job_id=job.job_id, created=True) for job in jobs]
    finally:
        await one.close()
        await watcher.close()


@pytest.mark.requirement("DJ-2")
async def test_a_call_that_conflicted_is_not_a_repeat_of_one_that_may_have_had_its_effect(rig: Rig):
    """Otherwise a job with a chosen id that another caller made meanwhile would be reported as created by this one."""
    lane, said = PostgresLane(rig.app_url, LaneOptions()), list[bool]()
    failures = [asyncpg.DeadlockDetectedError("conflict"), asyncpg.InterfaceError("lost"), None]

    async def ask(connection: object, repeat: bool) -> None:
        said.append(repeat)
        failure = failures.pop(0)
        if failure is not None:
            raise failure

    await lane.call("submit", "", ask)
    await lane.close()
    assert said == [False, False, True]
