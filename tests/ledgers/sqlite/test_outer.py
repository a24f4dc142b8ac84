"""Submitting in the caller's own transaction, on the caller's own connection."""

import sqlite3
from pathlib import Path

import apsw
import pytest

from tests.ledgers.sqlite.people import SUBMITTER, new_job
from trellis.engine.errors import LedgerNotMigrated, LedgerTooOld, OptionInvalid
from trellis.engine.jobs import Mismatch, Submitted
from trellis.ledgers.sqlite.connection import SQLITE_NEEDED
from trellis.ledgers.sqlite.ledger import SqliteLedger


@pytest.fixture
def own(path: Path, ledger: SqliteLedger) -> apsw.Connection:
    """The application's connection to the ledger's file, with a table of its own."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(5_000)  # the ledger's own writer may be folding back its log
    connection.execute("CREATE TABLE account (name TEXT)")
    return connection


async def test_the_job_is_there_when_the_caller_commits(ledger: SqliteLedger, own: apsw.Connection):
    job = new_job(concurrency_key="k")
    own.execute("BEGIN")
    own.execute("INSERT INTO account VALUES ('ada')")
    assert ledger.submit_on(own, SUBMITTER, [job]) == [Submitted(job_id=job.job_id, created=True)]
    assert await ledger.job(job.job_id) is None
    own.execute("COMMIT")
    stored = await ledger.job(job.job_id)
    assert stored is not None
    assert stored.state == "queued"


async def test_a_submit_that_is_rolled_back_leaves_nothing(ledger: SqliteLedger, own: apsw.Connection):
    before = own.execute("SELECT count(*) FROM trellis_job_type").fetchall()
    own.execute("BEGIN")
    own.execute("INSERT INTO account VALUES ('ada')")
    ledger.submit_on(own, SUBMITTER, [new_job(type="new-here", idempotency_key="k")])
    own.execute("ROLLBACK")
    assert own.execute("SELECT count(*) FROM trellis_job_type").fetchall() == before
    assert await ledger.feed_end() == f"{0:016d}"
    assert own.execute("SELECT * FROM account").fetchall() == []


async def test_idempotency_holds_between_both_ways(ledger: SqliteLedger, own: apsw.Connection):
    first = new_job(idempotency_key="k", fingerprint=b"a")
    await ledger.submit(SUBMITTER, [first])
    own.execute("BEGIN")
    again = ledger.submit_on(own, SUBMITTER, [new_job(idempotency_key="k", fingerprint=b"a")])
    other = ledger.submit_on(own, SUBMITTER, [new_job(idempotency_key="k", fingerprint=b"b")])
    own.execute("COMMIT")
    assert again == [Submitted(job_id=first.job_id, created=False)]
    assert other == [Mismatch(key="k", job_id=first.job_id)]


async def test_an_idempotency_scope_of_a_caller_does_not_collide_with_given_job_ids(
    ledger: SqliteLedger, own: apsw.Connection
):
    given = new_job(id_is_given=True, fingerprint=b"a")
    await ledger.submit(SUBMITTER, [given])
    keyed = new_job(idempotency_key=given.job_id, idempotency_scope="job_id", fingerprint=b"b")
    own.execute("BEGIN")
    assert ledger.submit_on(own, SUBMITTER, [keyed]) == [Submitted(job_id=keyed.job_id, created=True)]
    own.execute("COMMIT")
    again = new_job(idempotency_key=given.job_id, idempotency_scope="job_id", fingerprint=b"b")
    assert await ledger.submit(SUBMITTER, [again]) == [Submitted(job_id=keyed.job_id, created=False)]


async def test_submit_on_the_callers_connection_needs_an_open_transaction(ledger: SqliteLedger, own: apsw.Connection):
    with pytest.raises(OptionInvalid, match="begin one first"):
        ledger.submit_on(own, SUBMITTER, [new_job()])


async def test_a_connection_to_another_file_is_refused(ledger: SqliteLedger):
    other = apsw.Connection(":memory:")
    other.execute("BEGIN")
    with pytest.raises(LedgerNotMigrated):
        ledger.submit_on(other, SUBMITTER, [new_job()])


async def test_the_standard_library_serves_when_it_is_new_enough(ledger: SqliteLedger, path: Path):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN")
    try:
        if sqlite3.sqlite_version_info < SQLITE_NEEDED:
            with pytest.raises(LedgerTooOld):
                ledger.submit_on(connection, SUBMITTER, [new_job()])
        else:
            ledger.submit_on(connection, SUBMITTER, [new_job()])
            connection.execute("COMMIT")
            assert await ledger.feed_end() == f"{1:016d}"
    finally:
        connection.close()
