"""A server that falls silent: what the log says, and that nobody who stops waiting spoils the connection for the next."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.faults.proxy import proxied
from tests.ledgers.conformance.rig import ADMIN, SUBMITTER, WORKER
from tests.servers.postgres import SUPERUSER
from trellis.app.wiring import SystemClock, new_id
from trellis.engine import outage_log
from trellis.engine.errors import (
    InputError,
    LedgerDamaged,
    LedgerError,
    LedgerFull,
    LedgerLoginRefused,
    LedgerReadOnly,
    LedgerUnavailable,
    OutcomeUnknown,
    Refused,
    TrellisError,
)
from trellis.engine.jobs import Advance, Claim, ClaimId, JobId, NewJob, StepApplied, Submitted, Turn, TypeClaim
from trellis.engine.outage_log import Outage
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.lanes import LaneOptions, PostgresLane, to_trellis_error


def _first_line() -> asyncio.Event:
    """Set when the log has a line about an outage."""
    logged = asyncio.Event()
    handler = logging.Handler()
    handler.emit = lambda record: logged.set()
    logging.getLogger("trellis.outage").addHandler(handler)
    return logged


async def test_a_short_outage_of_the_server_is_logged_with_its_end_though_no_call_fails(
    postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO, "trellis")
    monkeypatch.setattr(outage_log, "LEDGER", Outage("ledger_unavailable"))
    options = LaneOptions(call_timeout_s=0.1, connect_timeout_s=5.0)
    async with proxied(postgres_url, seed=1, aimed=False) as (proxy, url):
        ledger = await open_ledger(url, options=options)
        await ledger.now()
        caplog.clear()  # a busy machine may have been slow to open it
        proxy.black_hole()
        logged = _first_line()
        asking = asyncio.create_task(ledger.now())
        async with asyncio.timeout(30):
            await logged.wait()
            proxy.reset_all()
            proxy.heal()
            await asking
        await ledger.close()
    events = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert events[0] == "ledger_unavailable"
    assert events.count("recovered") == 1
    assert "no answer to" in caplog.text
    assert "bus" not in caplog.text


async def test_a_caller_who_stops_waiting_leaves_the_lane_usable(postgres_url: str):
    async with proxied(postgres_url, seed=1, aimed=False) as (proxy, url):
        ledger = await open_ledger(url)
        await ledger.now()
        proxy.black_hole()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ledger.now()
        proxy.heal()
        async with asyncio.timeout(10):
            await ledger.now()
        await ledger.close()


async def test_a_wait_for_work_ends_in_time_while_the_listener_cannot_connect_and_hears_once_it_can(postgres_url: str):
    """The listener may try for an hour here; whoever waits for work waits no longer than it asked to."""
    async with proxied(postgres_url, seed=1, aimed=False) as (proxy, url):
        ledger = await open_ledger(url, options=LaneOptions(connect_timeout_s=3600.0))
        await ledger.now()
        proxy.black_hole()
        async with asyncio.timeout(30):
            await ledger.wait_for_work(("work",), 0.05)
            await ledger.wait_for_events(ledger.events_mark(), 0.05)
            proxy.heal()  # the attempt under way is not given up: what it asked is answered now
            await ledger.wait_for_work(("work",), 3600.0)  # the first time it listens counts as a hint
        await ledger.close()


@asynccontextmanager
async def a_fleet_login(url: str) -> AsyncGenerator[tuple[str, asyncpg.Connection]]:
    """The address of a login of the application, and a superuser's connection to change it."""
    name = f"fleet_{new_id()[:8]}"
    admin = await asyncpg.connect(url)
    await admin.execute(f"create role {name} login password 'first' in role trellis_app")
    try:
        yield url.replace(f"//{SUPERUSER}@", f"//{name}:first@"), admin
    finally:
        await _end_sessions(admin, name)
        await admin.execute(f"drop owned by {name}; drop role {name}")
        await admin.close()


async def _end_sessions(admin: asyncpg.Connection, login: str) -> None:
    await admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = $1", login)


@asynccontextmanager
async def locked(url: str, table: str) -> AsyncGenerator[None]:
    """Nobody else reads or writes this table within the block."""
    other = await asyncpg.connect(url)
    try:
        async with other.transaction():
            await other.execute(f"lock table trellis.{table} in access exclusive mode")
            yield
    finally:
        await other.close()


def _login(url: str) -> str:
    return str(urlsplit(url).username)


@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout"])
async def test_a_call_that_a_time_limit_of_the_login_cancels_is_repeated(postgres_url: str, limit: str):
    async with a_fleet_login(postgres_url) as (url, admin):
        await admin.execute(f"alter role {_login(url)} set {limit} = '1s'")
        ledger = await open_ledger(url)
        async with locked(postgres_url, "job"):
            asking = asyncio.create_task(ledger.submit(SUBMITTER, [NewJob(job_id=JobId("late"), type="work")]))
            await until_cancelled(admin, _login(url))
        assert await asking == [Submitted(JobId("late"), created=True)]
        await ledger.close()


async def test_a_call_that_is_cancelled_again_and_again_is_given_up_and_logged(
    postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outage_log, "LEDGER", Outage("ledger_unavailable"))
    async with a_fleet_login(postgres_url) as (url, admin):
        await admin.execute(f"alter role {_login(url)} set lock_timeout = '50ms'")
        ledger = await open_ledger(url)
        async with locked(postgres_url, "job"):
            with pytest.raises(LedgerUnavailable, match="lock timeout"):
                await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("late"), type="work")])
        assert await ledger.job(JobId("late")) is None
        await ledger.close()
    assert [record.getMessage().partition(" ")[0] for record in caplog.records][:1] == ["ledger_unavailable"]


async def test_a_call_that_may_have_been_done_before_the_server_took_no_more_writes_has_an_unknown_outcome(
    postgres_url: str,
):
    """The primary died with the answer, and the repeat comes to a standby."""
    errors = [asyncpg.ConnectionDoesNotExistError("gone"), asyncpg.ReadOnlySQLTransactionError("no writes")]

    async def ask(_: object, sent_before: bool) -> None:
        raise errors[sent_before]

    lane = PostgresLane(postgres_url, LaneOptions())
    with pytest.raises(OutcomeUnknown):
        await lane.call("submit", "one", ask)
    errors.reverse()
    with pytest.raises(LedgerReadOnly):
        await lane.call("submit", "two", ask)
    await lane.close()


async def test_a_turn_whose_statements_an_operator_cancels_is_delivered_all_the_same(
    postgres_url: str,
):
    async with a_fleet_login(postgres_url) as (url, admin):
        ledger = await open_ledger(url)
        await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("one"), type="work")])
        claim = Claim(claim_id=ClaimId("c"), types=(TypeClaim(type="work"),), start=1)
        lease = (await ledger.turn(Turn(actor=WORKER, claim=claim))).claimed[0].lease
        done = Advance(lease=lease, source="running", trigger="complete")
        async with locked(postgres_url, "lease"):
            completing = asyncio.create_task(ledger.turn(Turn(actor=WORKER, advances=(done,))))
            await until_waiting(admin, _login(url))
            await admin.execute("select pg_cancel_backend(pid) from pg_stat_activity where usename = $1", _login(url))
        assert [type(one) for one in (await completing).outcomes] == [StepApplied]
        await ledger.close()


async def test_a_login_that_may_write_again_is_used_again_and_until_then_the_server_is_not_ready(
    postgres_url: str,
):
    async with a_fleet_login(postgres_url) as (url, admin):
        ledger = await open_ledger(url)
        await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("one"), type="work")])
        await admin.execute(f"alter role {_login(url)} set default_transaction_read_only = on")
        await _end_sessions(admin, _login(url))
        with pytest.raises(OutcomeUnknown):  # it was sent on the session that ended, too
            await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("two"), type="work")])
        with pytest.raises(LedgerReadOnly):
            await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("two"), type="work")])
        with pytest.raises(LedgerReadOnly, match="standby, or default_transaction_read_only is on"):
            await ledger.ping()
        checks = {finding.check: finding.severity.value for finding in await ledger.inspect()}
        assert checks["postgresql writes"] == "error"
        await admin.execute(f"alter role {_login(url)} reset default_transaction_read_only")
        await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("two"), type="work")])
        await ledger.ping()
        await ledger.close()


async def test_a_login_that_is_taken_away_is_an_outage_for_who_was_let_in_and_an_error_for_who_was_not(
    postgres_url: str,
):
    async with a_fleet_login(postgres_url) as (url, admin):
        ledger = await open_ledger(url, options=LaneOptions(outcome_window_s=0.2))
        await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("one"), type="work")])
        await admin.execute(f"alter role {_login(url)} nologin")
        await _end_sessions(admin, _login(url))
        with pytest.raises(LedgerError):  # it may have been sent on the session that ends
            await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("two"), type="work")])
        with pytest.raises(LedgerUnavailable, match="lets this login in no more"):
            await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("two"), type="work")])
        with pytest.raises(LedgerLoginRefused, match="lets nobody in with this login"):
            await open_ledger(url)
        await admin.execute(f"alter role {_login(url)} login")
        again = await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("two"), type="work")])
        assert again == [Submitted(JobId("two"), created=True)]
        await ledger.close()


async def test_a_server_without_a_connection_left_is_named_with_where_to_read_how_many_are_needed(postgres_url: str):
    async with a_fleet_login(postgres_url) as (url, admin):
        await admin.execute(f"alter role {_login(url)} connection limit 0")
        with pytest.raises(LedgerUnavailable, match=r"no connection left \(too many connections.*size-a-fleet"):
            await open_ledger(url)


async def test_a_server_with_too_few_connections_is_logged_once_and_not_with_every_call_that_has_one(
    postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO, "trellis")
    monkeypatch.setattr(outage_log, "LEDGER", Outage("ledger_unavailable"))
    async with a_fleet_login(postgres_url) as (url, admin):
        await admin.execute(f"alter role {_login(url)} connection limit 1")
        ledger = await open_ledger(url, hints=False, options=LaneOptions(outcome_window_s=0.0))
        for turn in range(3):
            with pytest.raises(LedgerUnavailable, match="no connection left"):
                await ledger.now()
            await ledger.pause(ADMIN, "work", paused=bool(turn % 2))  # on the connection that opened the ledger
        await admin.execute(f"alter role {_login(url)} connection limit -1")
        await ledger.now()
        await ledger.close()
    events = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert [event for event in events if event in {"ledger_unavailable", "recovered"}] == [
        "ledger_unavailable",
        "recovered",
    ]


async def until_waiting(admin: asyncpg.Connection, login: str) -> None:
    """Until a session of this login waits for a lock."""
    question = "select count(*) from pg_stat_activity where usename = $1 and wait_event_type = 'Lock'"
    async with asyncio.timeout(30):
        while not await admin.fetchval(question, login):
            await SystemClock().sleep(0.01)


async def until_cancelled(admin: asyncpg.Connection, login: str) -> None:
    """Until a session of this login waited for a lock, was cancelled, and waits again."""
    began = "select max(query_start) from pg_stat_activity where usename = $1 and wait_event_type = 'Lock'"
    first = None
    async with asyncio.timeout(30):
        while True:
            now = await admin.fetchval(began, login)
            first = first or now
            if first is not None and now is not None and now > first:
                return
            await SystemClock().sleep(0.01)


async def test_who_opens_a_ledger_that_is_away_hears_it_and_the_log_does_not(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "trellis")
    for _ in range(3):
        with pytest.raises(LedgerUnavailable, match="nothing listens"):
            await open_ledger("postgresql://nobody@127.0.0.1:1/nothing")
    assert not caplog.records


@pytest.mark.parametrize(
    "error, kind",
    [
        (asyncpg.ConfigurationLimitExceededError, LedgerUnavailable),
        (asyncpg.DatabaseDroppedError, LedgerUnavailable),
        (asyncpg.UndefinedFileError, LedgerUnavailable),
        (asyncpg.DiskFullError, LedgerFull),
        (asyncpg.IndexCorruptedError, LedgerDamaged),
        (asyncpg.CheckViolationError, InputError),
        (asyncpg.RaiseError, Refused),
    ],
)
def test_only_what_the_database_says_of_the_call_is_a_refusal(error: type[Exception], kind: type[TrellisError]):
    assert type(to_trellis_error(error("why"))) is kind
