"""Files that are no ledger, cannot be one, or are one of another time: a typed error, and nothing half written."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import apsw
import pytest

from tests.ledgers.sqlite.people import SUBMITTER, claim, complete, new_job, submit
from tests.ledgers.sqlite.shell import Shell
from trellis.engine.closing import closing
from trellis.engine.errors import (
    LedgerDamaged,
    LedgerFull,
    LedgerNewer,
    LedgerNotMigrated,
    LedgerReadOnly,
    LedgerTooOld,
    LedgerUnavailable,
    LedgerUpgraded,
    LedgerUrlInvalid,
    OutcomeUnknown,
)
from trellis.engine.jobs import JobId, ReasonCode
from trellis.engine.records import JobFilter
from trellis.ledgers import migrate, open_ledger
from trellis.ledgers.sqlite import connection, schema
from trellis.ledgers.sqlite.connection import BUSY_TIMEOUT_S, connect, parse_url, refuse_old_library
from trellis.ledgers.sqlite.lanes import QUICK_RUNS_MIN, Transaction
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.ledgers.sqlite.schema import SCHEMA_VERSION
from trellis.ledgers.sqlite.schema import migrate as migrate_file


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:/one.db",
        "sqlite://relative.db",
        "sqlite:///",
        "sqlite:///folder/",
        "sqlite:///a.db?mode=ro",
        "mysql://x",
        "x.db",
    ],
)
async def test_a_url_that_names_no_file_is_refused(url: str):
    with pytest.raises(LedgerUrlInvalid, match=r"is no ledger address"):
        await open_ledger(url)


def test_three_slashes_are_relative_and_four_absolute():
    assert parse_url("sqlite:///a/b.db").path == Path("a/b.db")
    assert parse_url("sqlite:////a/b.db").path == Path("/a/b.db")
    assert parse_url("sqlite://").path is None


async def test_a_relative_url_is_a_file_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    await (await open_ledger("sqlite:///here.db")).close()
    assert (tmp_path / "here.db").exists()


async def test_a_ledger_in_memory_submits_claims_and_completes_a_job():
    ledger = await open_ledger("sqlite://")
    await submit(ledger, 3)
    held = await claim(ledger, 3)
    await complete(ledger, held)
    assert (await ledger.queues())[0].held == 0
    assert [event.type for event in await ledger.events(held[0].lease.job_id)][-1] == "job_succeeded"
    await ledger.close()


async def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(LedgerUrlInvalid, match=r"folder .*nowhere does not exist"):
        await open_ledger(f"sqlite:///{tmp_path}/nowhere/ledger.db")


async def test_a_folder_is_no_ledger(tmp_path: Path):
    with pytest.raises(LedgerUrlInvalid, match="is a folder"):
        await open_ledger(f"sqlite:///{tmp_path}")


def test_a_file_that_is_no_database_is_left_alone(path: Path):
    path.write_bytes(b"dear diary, " * 1000)
    with pytest.raises(LedgerUrlInvalid, match="not an SQLite database"):
        asyncio.run(open_ledger(f"sqlite:///{path}"))
    assert path.read_bytes() == b"dear diary, " * 1000


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root; the test with a mount is for root")
def test_a_file_this_user_may_not_write_is_refused(path: Path, shell: Shell):
    path.chmod(0o444)
    with pytest.raises(LedgerReadOnly, match="may not be written"):
        asyncio.run(open_ledger(f"sqlite:///{path}"))


@pytest.mark.quiet
def test_a_file_on_a_device_that_is_read_only_is_refused(device: Path):
    path = device / "ledger.db"
    migrate_file(parse_url(f"sqlite:///{path}"))
    remount(device, "ro")
    with pytest.raises(LedgerReadOnly, match="may not be written"):
        asyncio.run(open_ledger(f"sqlite:///{path}"))


async def test_full_disk_is_reported_until_there_is_space(tmp_path: Path):
    """SQLite's own page limit stands in for the device: it fails with the same code in the same places."""
    ledger = await SqliteLedger.open(f"sqlite:///{tmp_path}/ledger.db", clock=lambda: 1.8e9)
    await submit(ledger, 5)
    pages = await ledger.writer.run(lambda tx: tx.db.execute("PRAGMA page_count").fetchall()[0][0])
    await ledger.writer.run(lambda tx: tx.db.execute(f"PRAGMA max_page_count = {pages + 3}").fetchall())
    with pytest.raises(LedgerFull):
        await ledger.submit(SUBMITTER, [new_job(payload=b"x" * 100_000) for _ in range(20)])
    assert await ledger.feed_end() == f"{5:016d}"
    await ledger.writer.run(lambda tx: tx.db.execute("PRAGMA max_page_count = 1000000").fetchall())
    assert len(await submit(ledger, 5)) == 5
    assert len(await claim(ledger, 20)) == 10
    await ledger.close()


@pytest.mark.quiet
async def test_full_device_is_reported_until_there_is_space(device: Path):
    ledger = await SqliteLedger.open(f"sqlite:///{device}/ledger.db", clock=lambda: 1.8e9)
    with pytest.raises(LedgerFull):
        await submit_until_full(ledger)
    before = await ledger.feed_end()
    with pytest.raises(LedgerFull):
        await ledger.submit(SUBMITTER, [new_job(payload=b"x" * 20_000) for _ in range(40)])
    assert await ledger.feed_end() == before
    remount(device, "size=16m")
    await submit(ledger, 5)
    assert len([one async for one in ledger.histories()]) == int(before) + 5
    await ledger.close()


async def submit_until_full(ledger: SqliteLedger) -> None:
    for _ in range(200):
        await ledger.submit(SUBMITTER, [new_job(payload=b"x" * 20_000)])


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A device of one mebibyte."""
    folder = tmp_path / "device"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mount is not permitted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(device: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(device)], check=True)


NEWER = f"schema version {SCHEMA_VERSION + 1}, and this program knows schema version {SCHEMA_VERSION}. Use the program"


async def test_a_newer_schema_is_not_touched(path: Path, shell: Shell):
    shell.db.execute("UPDATE trellis_meta SET value = ? WHERE key = 'schema_version'", (SCHEMA_VERSION + 1,))
    for opening in (open_ledger, migrate):
        with pytest.raises(LedgerNewer, match=NEWER):
            await opening(f"sqlite:///{path}")


@pytest.mark.parametrize("removed", ["DROP INDEX trellis_job_listed", "DROP TABLE trellis_dead_letter"])
async def test_a_process_whose_file_a_newer_program_changed_is_told_to_restart(
    removed: str, ledger: SqliteLedger, path: Path
):
    await submit(ledger)
    await ledger.jobs(JobFilter(type="work", reason_code=ReasonCode.TIMEOUT), limit=5)
    Shell(path).db.execute(removed)
    with pytest.raises(LedgerUpgraded, match="restart this process"):
        await ledger.jobs(JobFilter(type="work", reason_code=ReasonCode.TIMEOUT), limit=5)


async def test_migrating_twice_changes_nothing(path: Path):
    await migrate(f"sqlite:///{path}")
    before = Shell(path).dump()
    await migrate(f"sqlite:///{path}")
    assert Shell(path).dump() == before


async def test_the_ledger_lives_beside_the_tables_of_an_application(path: Path):
    own = apsw.Connection(str(path))
    own.execute("CREATE TABLE job (id INTEGER PRIMARY KEY, note TEXT); INSERT INTO job VALUES (1, 'mine')")
    ledger = await open_ledger(f"sqlite:///{path}")
    await submit(ledger)
    await ledger.close()
    assert own.execute("SELECT note FROM job").fetchall() == [("mine",)]


async def test_processes_that_open_a_new_file_at_once_all_get_it(path: Path):
    ledgers = await asyncio.gather(*(open_ledger(f"sqlite:///{path}") for _ in range(8)))
    await asyncio.gather(*(submit(one) for one in ledgers))
    assert await ledgers[0].feed_end() == f"{8:016d}"
    await asyncio.gather(*(one.close() for one in ledgers))


def test_an_opener_waits_for_another_that_makes_the_file(path: Path):
    """The other one is about to write in the old journal mode: SQLite says busy at once, whatever its busy timeout is."""
    other = apsw.Connection(str(path))
    other.execute("CREATE TABLE made (n INTEGER); BEGIN IMMEDIATE; INSERT INTO made VALUES (1)")
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            other.execute("COMMIT")

    connection = connect(parse_url(f"sqlite:///{path}"), sleep=sleep)
    assert len(waited) == 3
    assert connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
    connection.close()


def test_an_opener_waits_no_longer_than_a_writer_does(path: Path):
    other = apsw.Connection(str(path))
    other.execute("CREATE TABLE made (n INTEGER); BEGIN IMMEDIATE; INSERT INTO made VALUES (1)")
    waited: list[float] = []
    with pytest.raises(LedgerUnavailable, match="another process has been writing"):
        connect(parse_url(f"sqlite:///{path}"), sleep=waited.append)
    assert 0.9 * BUSY_TIMEOUT_S < sum(waited) <= BUSY_TIMEOUT_S


@pytest.mark.requirement("DJ-22")
async def test_lifecycles_of_a_newer_program_are_kept(path: Path, shell: Shell):
    """An older program meets a state it does not know: it adds its own and takes nothing away."""
    shell.db.execute("INSERT INTO trellis_meta VALUES ('contract_loading', 1)")
    shell.db.execute("INSERT INTO trellis_state VALUES (79, 4, 'from_the_future', 2, 3, 64, 0)")
    shell.db.execute("DELETE FROM trellis_meta WHERE key IN ('contract', 'contract_loading')")
    await migrate(f"sqlite:///{path}")
    assert shell.rows("SELECT name FROM trellis_state WHERE id = 79") == [("from_the_future",)]
    assert shell.value("SELECT value FROM trellis_meta WHERE key = 'contract'") == schema.contract_hash()


@pytest.mark.requirement("DJ-22")
async def test_a_number_that_means_another_state_is_refused(path: Path, shell: Shell):
    shell.db.execute("INSERT INTO trellis_meta VALUES ('contract_loading', 1)")
    shell.db.execute("UPDATE trellis_state SET name = 'paused' WHERE id = 65")
    shell.db.execute("DELETE FROM trellis_meta WHERE key IN ('contract', 'contract_loading')")
    with pytest.raises(LedgerNotMigrated, match="another meaning of paused"):
        await open_ledger(f"sqlite:///{path}")


def test_a_library_that_damages_files_is_refused():
    refuse_old_library("3.51.3")
    with pytest.raises(LedgerTooOld, match=r"SQLite 3\.51\.2 is too old: 3\.51\.3"):
        refuse_old_library("3.51.2")


async def test_a_writer_that_never_ends_is_waited_for_with_a_bound(ledger: SqliteLedger, shell: Shell):
    assert ledger.writer._room is not None
    ledger.writer._room._patience_s = 0.05
    shell.db.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="another process has been writing"):
        await submit(ledger)
    shell.db.execute("COMMIT")
    assert len(await submit(ledger)) == 1


async def test_a_sound_file_is_called_sound(ledger: SqliteLedger):
    findings = {finding.check: finding for finding in await ledger.inspect()}
    assert {finding.severity.value for finding in findings.values()} == {"ok"}
    assert findings["sqlite"].detail == f"SQLite {apsw.sqlite_lib_version()}"


async def test_an_unknown_job_has_no_events(ledger: SqliteLedger):
    assert await ledger.events(JobId("nobody")) == []


def damage(path: Path) -> None:
    """Spoil twenty pages in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(b"\xff" * 4096 * 20)


@pytest.fixture
async def damaged(path: Path) -> AsyncIterator[SqliteLedger]:
    """A ledger with jobs of several types, of which a page in the middle of the file is no page any more."""
    ledger = await SqliteLedger.open(f"sqlite:///{path}", clock=lambda: 1.8e9)
    for _ in range(20):
        await ledger.submit(SUBMITTER, [new_job(payload=b"x" * 2_000) for _ in range(50)])
    await ledger.close()
    damage(path)
    opened = await SqliteLedger.open(f"sqlite:///{path}", clock=lambda: 1.8e9)
    yield opened
    async with asyncio.timeout(30):
        await opened.close()


async def test_a_damaged_file_fails_the_calls_that_meet_the_damage_and_no_other(damaged: SqliteLedger):
    await damaged.ping()
    async with asyncio.timeout(30):
        with pytest.raises(LedgerDamaged, match="malformed"):
            [history async for history in damaged.histories()]
        for _ in range(3):  # the thread that reads goes on
            assert (await damaged.queues())[0].ready > 0
            assert await damaged.events(JobId("nobody")) == []
        with pytest.raises(LedgerDamaged):
            await damaged.ping()
        findings = {finding.check: finding.severity.value for finding in await damaged.inspect()}
    assert findings["file"] == "error"


async def test_a_process_that_met_damage_is_not_ready_until_it_is_restarted(damaged: SqliteLedger):
    with pytest.raises(LedgerDamaged, match="malformed"):
        [history async for history in damaged.histories()]
    with pytest.raises(LedgerDamaged, match="restart this process when the ledger is restored"):
        await damaged.ping()


async def test_a_file_that_is_replaced_while_it_is_used_takes_no_write_and_is_not_ready(
    ledger: SqliteLedger, path: Path
):
    await submit(ledger, 1)
    used, away = path.parent / path.name, path.parent / "away.db"
    used.rename(away)
    await refuses_writes(ledger, "there is no file")
    used.touch()
    await refuses_writes(ledger, "was replaced by another file.*restart every process")
    away.rename(used)
    await ledger.ping()
    assert len(await submit(ledger, 1)) == 1
    assert await ledger.feed_end() == f"{2:016d}"


async def test_a_ledger_at_a_relative_address_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A handler may change the folder of its process."""
    monkeypatch.chdir(tmp_path)
    async with closing(await open_ledger("sqlite:///here.db")) as ledger:
        monkeypatch.chdir("/")
        await ledger.ping()
        assert len(await submit(cast("SqliteLedger", ledger), 1)) == 1


async def refuses_writes(ledger: SqliteLedger, why: str) -> None:
    assert ledger._file is not None
    ledger._file._checked_at = float("-inf")  # the time between two checks has passed
    with pytest.raises(LedgerUnavailable, match=why):
        await ledger.ping()
    for _ in range(2):
        with pytest.raises(LedgerUnavailable, match=why):
            await submit(ledger, 1)


COUNT = "SELECT count(*) FROM trellis_submission NOT INDEXED WHERE length(payload) > 1"


@pytest.mark.parametrize("size", [None, 1], ids=["thread", "event loop"])
async def test_damage_that_one_read_meets_is_no_other_readers_error(damaged: SqliteLedger, size: int | None):
    def good(tx: Transaction) -> int:
        return tx.now

    def bad(tx: Transaction) -> object:
        return tx.db.execute(COUNT).fetchall()

    lane = damaged.reader
    async with asyncio.timeout(30):
        for _ in range(QUICK_RUNS_MIN + 1):
            await lane.run(good, size=1)
        calls = (lane.run(work, size=size) for work in (good, bad, good, bad, good))
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [int, LedgerDamaged, int, LedgerDamaged, int]


def break_down(_: object) -> bool:
    raise RuntimeError("nobody foresaw this")


async def test_a_call_that_breaks_its_lane_is_answered_and_the_next_one_works(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for lane in (ledger.reader, ledger.writer):
        with monkeypatch.context() as patch:
            patch.setattr(lane, "_run_batch", break_down)
            async with asyncio.timeout(30):
                with pytest.raises(OutcomeUnknown, match="nobody foresaw this"):
                    await lane.run(lambda tx: tx.now)
        async with asyncio.timeout(30):
            assert await lane.run(lambda tx: tx.db.execute("SELECT 1").fetchall()) == [(1,)]
    assert [record.getMessage().split()[0] for record in caplog.records] == ["ledger_call_broke"] * 2


async def test_a_file_that_another_process_deletes_meanwhile_is_no_refusal(path: Path, monkeypatch: pytest.MonkeyPatch):
    await (await open_ledger(f"sqlite:///{path}")).close()
    log = path.with_name(f"{path.name}-wal")
    log.touch()

    def access(name: Path, *_: object, **__: object) -> bool:
        if name == log:
            log.unlink()
        return name != log

    monkeypatch.setattr(connection.os, "access", access)
    await (await open_ledger(f"sqlite:///{path}")).close()


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
async def test_a_file_of_the_ledger_that_may_not_be_written_is_named_and_no_other_is_made(
    end: str, path: Path, monkeypatch: pytest.MonkeyPatch
):
    await (await open_ledger(f"sqlite:///{path}")).close()
    file = path.with_name(path.name + end)
    file.touch()
    before = {one.name for one in path.parent.iterdir()}
    monkeypatch.setattr(connection.os, "access", lambda name, *_, **__: name != file)  # permissions do not bind root
    with pytest.raises(LedgerReadOnly, match=f"ledger.db{end} may not be written by this user"):
        await open_ledger(f"sqlite:///{path}")
    assert {one.name for one in path.parent.iterdir()} == before
