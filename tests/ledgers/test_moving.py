"""The rows of an SQLite ledger in PostgreSQL: all of them arrive, and the moved ledger goes on as the old one would have."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import pytest

from tests.cli.moving import fill, records
from tests.ledgers.conformance.histories import compare_histories
from tests.ledgers.conformance.opening import postgres_rig, sqlite_rig
from tests.ledgers.conformance.rig import SUBMITTER, Rig
from tests.ledgers.conformance.story import Player, Story
from tests.servers.postgres import PostgresServer
from trellis.engine.admin_acts import NewAct
from trellis.engine.errors import LedgerReadOnly, OptionInvalid, Refused
from trellis.engine.jobs import Actor, JobId, NewJob, Submitted
from trellis.engine.positions import of_sqlite, to_postgres
from trellis.gateway.hub import EventHub
from trellis.ledgers import open_ledger
from trellis.ledgers.migration import migrated_by
from trellis.ledgers.moving import rows
from trellis.ledgers.moving.parts import PARTS, with_postgres_positions
from trellis.ledgers.moving.source import MoveMark, MoveRefused, SqliteSource
from trellis.ledgers.moving.target import PostgresTarget, TargetStage, open_target, public_address
from trellis.ledgers.postgres.migrate import migrate
from trellis.ledgers.sqlite.connection import connect, parse_url
from trellis.ledgers.sqlite.schema import prepare
from trellis.lifecycles import LIFECYCLES, Role

SEEDS = 16
STEPS = 24
MOVER = Actor(role=Role.CONTROL_PLANE, name="mover@here")

_FROM_CODE = "the program loads it from its lifecycles into every ledger"
_PASSING = "it is empty outside of a transaction"
NOT_COPIED = {
    "trellis_lifecycle": _FROM_CODE,
    "trellis_role": _FROM_CODE,
    "trellis_event_type": _FROM_CODE,
    "trellis_state": _FROM_CODE,
    "trellis_arrow": _FROM_CODE,
    "trellis_finalizer": _FROM_CODE,
    "trellis_claim": "it answers a process that repeats a claim, and no process of the source goes on",
    "trellis_purge": _PASSING,
    "trellis_finalizing": _PASSING,
    "trellis_restoring": _PASSING,
    "trellis_kept": "retention notes there which jobs it looks at again, and looks at all of them in the new ledger",
}
"""SQLite tables whose rows stay behind, each with the reason."""


def mark(id_: str = "m1") -> MoveMark:
    targets = {"ledger": "postgresql://db/x", "objects": "s3://bucket/", "memory": None, "nlm_ledger": None}
    return MoveMark(id=id_, by="mover", version="1", **targets)


@asynccontextmanager
async def closed_source(path: Path) -> AsyncIterator[SqliteSource]:
    source = SqliteSource(path)
    try:
        source.begin_alone()
        source.close_for_writers(mark())
        yield source
    finally:
        source.close_connection()


async def moved(source: SqliteSource, target: PostgresTarget) -> None:
    """Copy and compare the rows."""
    assert await target.judge(None) is None
    await target.prepare("m1", migrated_by("mover"))
    await rows.copy_rows(source, target, "m1", lambda _what, _count: None)
    _, differences = await rows.compare_rows(source, target, lambda _what, _count: None)
    assert differences == []


async def opened(target: PostgresTarget, source: SqliteSource) -> None:
    act = NewAct(event="instance.moved", subject="instance")
    assert await target.open("m1", source.numbers()[1], MOVER, act)


def test_every_table_of_a_ledger_is_copied_or_left_for_a_reason(tmp_path: Path):
    database = connect(parse_url(f"sqlite:///{tmp_path / 'new.db'}"))
    prepare(database, "sqlite:///new.db")
    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    database.close()
    copied = {table for part in PARTS for table in part.tables}
    assert tables - {"sqlite_sequence"} == copied | NOT_COPIED.keys()
    assert copied.isdisjoint(NOT_COPIED)
    assert all(NOT_COPIED.values())


@pytest.mark.requirement("DJ-12", "D1")
async def test_a_moved_ledger_plays_on_as_the_one_it_was(clocked_postgres: PostgresServer, tmp_path: Path):
    """Two SQLite ledgers play the same stories. One is moved, and both go on: every answer and record stays the same."""
    async with sqlite_rig(tmp_path / "stays.db") as stays, postgres_rig(clocked_postgres, "postgres") as postgres:
        async with sqlite_rig(tmp_path / "moves.db") as moves:
            for seed in range(SEEDS):
                await Story(seed=seed, players=(Player(rig=stays), Player(rig=moves))).play(STEPS)
            # The leases that holders have, and the story that they are in the middle of.
            last = Story(seed=99, players=(Player(rig=stays), Player(rig=moves)))
            await last.play(STEPS)
        assert postgres.admin_url is not None
        assert postgres.admin_sql is not None
        postgres.used_up = True
        target = await open_target(postgres.admin_url)
        async with closed_source(tmp_path / "moves.db") as source:
            await moved(source, target)
            await opened(target, source)
        await target.close()
        await migrate(postgres.admin_url, clock="test")
        now = (await stays.ledger.now()).timestamp()
        await postgres.admin_sql("UPDATE trellis.test_clock SET at = to_timestamp($1)", now)
        # Both claimers count their claims from here: every eighth takes the least urgent first.
        stays.others.append(stays.ledger)
        stays.ledger = await stays.reopen()
        last.players = (last.players[0], Player(rig=postgres, leases=last.players[1].leases))
        await compare_histories(stays, postgres)
        for seed in range(SEEDS, 2 * SEEDS):
            await Story(seed=seed, players=(Player(rig=stays), Player(rig=postgres))).play(STEPS)
        await compare_histories(stays, postgres)
        assert (await postgres.verify()).ok


async def test_every_state_of_every_lifecycle_arrives_as_readers_see_it(new_postgres_database, tmp_path: Path):
    path, url = tmp_path / "ledger.db", new_postgres_database()
    await fill(f"sqlite:///{path}", lifecycles=LIFECYCLES)
    before = await records(f"sqlite:///{path}")
    states = {(job.lifecycle, job.state) for job in before["jobs"]}
    assert states == {(one.name, state.name) for one in LIFECYCLES.values() for state in one.states}
    target = await open_target(url)
    async with closed_source(path) as source:
        await moved(source, target)
        await opened(target, source)
    await target.close()
    after = await records(url)
    for what, value in before.items():
        assert after[what] == value, what


# --- the source ------------------------------------------------------------------------------------------------------


async def filled(path: Path, jobs: int = 30) -> None:
    ledger = await open_ledger(f"sqlite:///{path}")
    new = [NewJob(job_id=JobId(f"job-{n}"), type=f"type-{n % 3}", payload=b"%d" % n) for n in range(jobs)]
    await ledger.submit(SUBMITTER, new)
    await ledger.pause(MOVER, "type-1", paused=True)
    await ledger.close()


async def test_a_closed_ledger_refuses_every_writer_and_says_how_to_go_on(tmp_path: Path):
    path = tmp_path / "ledger.db"
    await filled(path)
    async with closed_source(path):
        pass
    ledger = await open_ledger(f"sqlite:///{path}")
    with pytest.raises(Refused) as refused:
        await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("late"), type="type-0")])
    assert "`trellis move --to-ledger postgresql://db/x --to-objects s3://bucket/` goes on" in str(refused.value)
    assert "`trellis move --undo --to-ledger postgresql://db/x" in str(refused.value)
    assert await ledger.job(JobId("job-3")) is not None, "it can be read"
    await ledger.close()
    old_program = apsw.Connection(str(path))
    for (table,) in old_program.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
        if table != "sqlite_sequence":
            with pytest.raises(apsw.ConstraintError, match="This ledger is closed"):
                old_program.execute(f"INSERT INTO {table} DEFAULT VALUES")
    for statement in (
        "UPDATE trellis_type_control SET paused = 0",
        "DELETE FROM trellis_act",
        "DELETE FROM trellis_meta",
    ):
        with pytest.raises(apsw.ConstraintError, match="This ledger is closed"):
            old_program.execute(statement)
    old_program.close()


async def test_an_open_ledger_has_no_trace_of_moves_also_after_one_was_undone(tmp_path: Path):
    path = tmp_path / "ledger.db"
    await filled(path)
    before = schema(path)
    async with closed_source(path) as source:
        assert schema(path) != before
        source.reopen()
        assert source.mark() is None
    assert schema(path) == before
    ledger = await open_ledger(f"sqlite:///{path}")
    assert (await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("late"), type="type-0")]))[0].job_id == "late"
    await ledger.close()


def schema(path: Path) -> list[tuple[str, str]]:
    database = apsw.Connection(str(path))
    found = database.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall()
    database.close()
    return found  # type: ignore[return-value]


async def test_a_ledger_that_another_process_has_open_is_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "ledger.db"
    await filled(path)
    monkeypatch.setattr("trellis.ledgers.sqlite.connection.BUSY_TIMEOUT_S", 0.1)
    serving = await open_ledger(f"sqlite:///{path}")
    await serving.heartbeat_worker(Actor(role=Role.WORKER, name="worker@alpine:7"), None)
    source = SqliteSource(path)
    with pytest.raises(MoveRefused, match=r"another process has .* open, such as worker@alpine:7; stop"):
        source.begin_alone()
    await serving.submit(SUBMITTER, [NewJob(job_id=JobId("still"), type="type-0")])
    await serving.close()
    source.begin_alone()
    source.abandon()
    source.close_connection()


@pytest.mark.parametrize(
    "place, there",
    [
        (None, None),
        ("", ""),
        ("- work", "- work"),
        ("rebuilding", "rebuilding"),
        (of_sqlite(7), "00000000000000000007.09223372036854775807.0000000000"),
        (f"!{of_sqlite(7)}", "!00000000000000000007.09223372036854775807.0000000000"),
        (
            f"{of_sqlite(7)} 1234567890123456,b documents={of_sqlite(9)}",
            f"{to_postgres(of_sqlite(7))} 1234567890123456,b documents={to_postgres(of_sqlite(9))}",
        ),
    ],
)
def test_stored_positions_of_subscribers_are_translated(place: str | None, there: str | None):
    assert with_postgres_positions(place) == there


# --- the target ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, address",
    [
        ("postgresql://anna:se@cret@db:5432/x", "postgresql://anna@db:5432/x"),
        ("postgres://anna:se%2Fcret@db/x?sslmode=require&sslpassword=hush", "postgresql://anna@db/x"),
        ("postgresql:///x?host=/run/pg&user=anna&password=hush", "postgresql:///x?host=/run/pg&user=anna"),
        ("postgresql://anna@[::1]:5432/x", "postgresql://anna@[::1]:5432/x"),
        ("postgresql://a:hush@one:1,two:2/x", "postgresql://a@one:1,two:2/x"),
    ],
)
def test_an_address_is_shown_without_any_secret(url: str, address: str):
    assert public_address(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://anna:hu/sh@db/x",
        "postgresql://anna:hu?sh@db/x",
        "postgresql://anna:hu#sh@db/x",
        "mysql://a:hush@b/c",
    ],
)
def test_an_address_whose_password_cannot_be_told_apart_is_refused_without_repeating_it(url: str):
    with pytest.raises(Exception, match="its password has characters") as refused:
        public_address(url)
    assert "hu" not in str(refused.value)
    assert "sh@" not in str(refused.value)


async def test_a_target_that_is_in_use_or_of_another_move_is_refused_and_unchanged(postgres_url: str, tmp_path: Path):
    target = await open_target(postgres_url)
    ledger = await open_ledger(postgres_url)
    await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("there"), type="x")])
    with pytest.raises(MoveRefused, match="is in use: it has jobs, events, job types; name an empty database"):
        await target.judge(None)
    assert await target.mark() is None
    await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("there-too"), type="x")])
    await ledger.close()
    await target.close()


async def test_a_target_refuses_all_others_until_it_is_open(new_postgres_database, tmp_path: Path):
    await filled(tmp_path / "ledger.db")
    url = new_postgres_database()
    target = await open_target(url)
    async with closed_source(tmp_path / "ledger.db") as source:
        await moved(source, target)
        with pytest.raises(MoveRefused, match="another instance is being moved there"):
            await target.judge("another")
        ledger = await open_ledger(url)
        with pytest.raises(LedgerReadOnly, match="`trellis move` fills it"):
            await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("early"), type="x")])
        await opened(target, source)
        await opened(target, source)
    answers = await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("now"), type="x")])
    assert answers == [Submitted(job_id=JobId("now"), created=True)]
    acts = [act.event for act in await ledger.acts()]
    assert acts == ["type.paused", "instance.moved"]
    with pytest.raises(MoveRefused, match="another instance was moved there"):
        await target.judge("another")
    assert not await target.undo("m1"), "it is open"
    await ledger.close()
    await target.close()


async def test_opening_and_undoing_at_once_is_decided_once(new_postgres_database, tmp_path: Path):
    await filled(tmp_path / "ledger.db", 1)
    async with closed_source(tmp_path / "ledger.db") as source:
        act = NewAct(event="instance.moved", subject="instance")
        for _ in range(6):
            url = new_postgres_database()
            opener, undoer = await open_target(url), await open_target(url)
            await opener.prepare("m1", migrated_by("mover"))
            answers = await asyncio.gather(opener.open("m1", 1, MOVER, act), undoer.undo("m1"))
            assert sorted(answers) == [False, True]
            decided = await opener.mark()
            assert decided is not None
            assert decided.stage is (TargetStage.OPEN if answers[0] else TargetStage.UNDONE)
            again = await undoer.open("m1", 1, MOVER, act), await opener.undo("m1")
            assert again == tuple(answers), "and it stays so"
            await opener.close()
            await undoer.close()
    assert source.path.exists()


async def test_an_undone_target_is_empty_again(new_postgres_database, tmp_path: Path):
    await filled(tmp_path / "ledger.db")
    url = new_postgres_database()
    target = await open_target(url)
    async with closed_source(tmp_path / "ledger.db") as source:
        await moved(source, target)
        assert await target.undo("m1")
        await target.clear("m1")
        assert await target.mark() is None
        await moved(source, target)  # which judges it as empty first
    await target.close()


class Stopped(Exception):
    """The process ends here."""


async def test_a_copy_that_is_stopped_anywhere_goes_on_without_loss_or_repetition(
    new_postgres_database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trellis.ledgers.moving.source.PAGE_ROWS", 4)
    await filled(tmp_path / "ledger.db", 11)
    url = new_postgres_database()
    async with closed_source(tmp_path / "ledger.db") as source:
        target = await open_target(url)
        await target.prepare("m1", migrated_by("mover"))
        stops = 0
        for stop_after in range(1, 60):
            pages = 0

            def progress(_what: str, _count: int, last: int = stop_after) -> None:
                nonlocal pages
                pages += 1
                if pages == last:
                    raise Stopped

            try:
                await rows.copy_rows(source, target, "m1", progress)
            except Stopped:
                stops += 1
                await target.close()
                target = await open_target(url)
            else:
                break
        counts, differences = await rows.compare_rows(source, target, lambda _what, _count: None)
        assert differences == []
        assert (counts["jobs"], counts["events"], counts["types"]) == (11, 11, 3)
        await target.close()
    assert stops > 3


async def test_a_move_may_go_on_with_another_login_that_is_no_superuser(
    postgres_url: str, postgres_server: PostgresServer, tmp_path: Path
):
    postgres_server.sql(
        "do $$ begin create role mover login in role trellis_owner; exception when duplicate_object then null; end $$"
    )
    await filled(tmp_path / "ledger.db", 9)
    first = await open_target(postgres_url)
    second = await open_target(postgres_server.url(postgres_url.rpartition("/")[2], "mover"))

    def stop(what: str, _count: int) -> None:
        if what == "rows of jobs copied":
            raise Stopped

    async with closed_source(tmp_path / "ledger.db") as source:
        assert await first.judge(None) is None, "a schema without anything in it is empty"
        await first.prepare("m1", migrated_by("mover"))
        with pytest.raises(Stopped):
            await rows.copy_rows(source, first, "m1", stop)
        await rows.copy_rows(source, second, "m1", lambda _what, _count: None)
        _, differences = await rows.compare_rows(source, second, lambda _what, _count: None)
        assert differences == []
        await opened(second, source)
    await first.close()
    await second.close()


async def test_a_difference_is_found_in_any_column(
    new_postgres_database, postgres_server: PostgresServer, tmp_path: Path
):
    await filled(tmp_path / "ledger.db", 5)
    url = new_postgres_database()
    target = await open_target(url)
    async with closed_source(tmp_path / "ledger.db") as source:
        await moved(source, target)
        name = url.rpartition("/")[2]
        for statement, part in (
            ("update trellis.job set payload = 'x' where job_id = 'job-1'", "jobs: the rows differ"),
            ("update trellis.ready set pos = pos + 1 where id = 2", "jobs: the rows differ"),
            ("delete from trellis.feed where pos = 3", "events: the rows differ"),
            ("update trellis.job_type set paused = false", "types: the rows differ"),
        ):
            postgres_server.sql(f"begin; set local trellis.move = 'm1'; {statement}; commit", name)
            _, differences = await rows.compare_rows(source, target, lambda _what, _count: None)
            assert any(one.startswith(part) for one in differences), (statement, differences)
    await target.close()


# --- after the move --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("DJ-12")
async def test_positions_numbers_and_leases_go_on_in_the_moved_ledger(new_postgres_database, tmp_path: Path):
    path, now = tmp_path / "ledger.db", 1_800_000_000.0
    old = await open_ledger(f"sqlite:///{path}", clock=lambda: now)
    rig = Rig(kind="sqlite", ledger=old, advance=None, reopen=None)  # type: ignore[arg-type]
    held = await rig.running(type="work")
    await rig.submit(3, type="rest")
    page = await old.feed(None, limit=3)
    end = await old.feed_end()
    keys = [history.job.job_id async for history in old.histories()]
    await old.close()
    url = new_postgres_database()
    target = await open_target(url)
    async with closed_source(path) as source:
        await moved(source, target)
        await opened(target, source)
    await target.close()
    new = await open_ledger(url)
    rest = await new.feed(page.position, limit=100)
    assert [event.id for event in rest.events][:1] == ["job-3-1"], "a position of the old ledger is one of this"
    assert not (await new.feed(end, limit=100)).events
    hub = EventHub(ledger=new, published=None, clock=None, rng=None)  # type: ignore[arg-type]
    assert await hub.begin(end) == await new.feed_end(), "a live stream begins there too"
    with pytest.raises(OptionInvalid):
        await hub.begin(of_sqlite(int(end) + 1))
    with pytest.raises(OptionInvalid):
        await new.feed(of_sqlite(int(end) + 1), limit=1)
    await new.submit(SUBMITTER, [NewJob(job_id=JobId("next"), type="work")])
    after = await new.feed(end, limit=100)
    assert [event.id for event in after.events] == ["next-1"]
    assert [history.job.job_id async for history in new.histories()] == [*keys, "next"]
    job = await new.job(held.lease.job_id)
    assert job is not None
    assert (job.state, job.attempt, job.owner) == ("running", 0, "worker-1")
    assert job.lease_expires_at is not None
    assert job.lease_expires_at.timestamp() > now
    await new.close()


async def test_a_ledger_that_was_not_moved_refuses_positions_of_another(postgres_url: str):
    ledger = await open_ledger(postgres_url)
    await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("one"), type="x")])
    with pytest.raises(OptionInvalid):
        await ledger.feed(of_sqlite(0), limit=1)
    await ledger.close()


def test_the_mark_is_one_row_of_json_without_anything_secret(tmp_path: Path):
    fields = json.loads(json.dumps(mark().__dict__))
    assert fields.keys() == {"id", "ledger", "objects", "memory", "nlm_ledger", "by", "version", "stage", "format"}
