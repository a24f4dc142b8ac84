"""The audit chain on PostgreSQL and S3: clean while nobody touches it, and every change is found."""

import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import asyncpg
import pytest

from tests.runs.conftest import Stand
from tests.runs.tampering import ObjectTampering, Tampering
from tests.runs.test_audit_chain import audited, publish, sealing_projector
from tests.runs.test_audit_segments import work
from tests.runs.test_rebuild import ADMIN
from tests.storage.conftest import CREDENTIALS
from trellis.engine.admin_acts import RETAINED
from trellis.engine.ledger import Ledger
from trellis.engine.records import RetentionOptions
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock

TABLES = ("job", "ended", "event", "act", "audit_head")
FOR_DEFAULT = 10
FOR_PROOF = 120


class PostgresTampering:
    """Changes of rows by a superuser, who is stopped by no trigger."""

    def __init__(self, sql: asyncpg.Connection) -> None:
        self.sql = sql

    def kinds(self) -> dict[str, Tampering]:
        return {
            "edit an event": self.edit,
            "delete an event": self.delete,
            "delete a job": self.delete_job,
            "insert an event": self.insert,
            "swap two batches": self.swap,
            "edit a payload": self.payload,
            "edit an act": self.act,
            "delete an act": self.delete_act,
            "edit the head": self.head,
        }

    async def save(self) -> None:
        await self.sql.execute("SET session_replication_role = replica")
        for table in TABLES:
            await self.sql.execute(f"CREATE TEMP TABLE saved_{table} AS TABLE trellis.{table}")

    async def undo(self) -> None:
        for table in TABLES:
            await self.sql.execute(f"DELETE FROM trellis.{table}")
            columns = await self.sql.fetch(
                "SELECT attname FROM pg_attribute WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped",
                f"trellis.{table}",
            )
            names = ", ".join(row["attname"] for row in columns)
            await self.sql.execute(
                f"INSERT INTO trellis.{table} ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM saved_{table}"
            )

    async def _event(self, rng: random.Random) -> tuple[int, int]:
        rows = await self.sql.fetch("SELECT id, version FROM trellis.event ORDER BY id, version")
        found = rng.choice(rows)
        return found["id"], found["version"]

    async def edit(self, rng: random.Random) -> str:
        which = await self._event(rng)
        change = rng.choice(["cause = 'x' || coalesce(cause, '')", "at = at + interval '1 us'", "epoch = epoch + 1"])
        await self.sql.execute(f"UPDATE trellis.event SET {change} WHERE id = $1 AND version = $2", *which)
        return f"{change} of {which}"

    async def delete(self, rng: random.Random) -> str:
        which = await self._event(rng)
        await self.sql.execute("DELETE FROM trellis.event WHERE id = $1 AND version = $2", *which)
        return str(which)

    async def delete_job(self, rng: random.Random) -> str:
        number, _ = await self._event(rng)
        for table in ("job", "ended", "event"):
            await self.sql.execute(f"DELETE FROM trellis.{table} WHERE id = $1", number)
        return str(number)

    async def insert(self, rng: random.Random) -> str:
        which = await self._event(rng)
        await self.sql.execute(
            "CREATE TEMP TABLE forged ON COMMIT PRESERVE ROWS AS SELECT * FROM trellis.event WHERE id = $1 AND version = $2",
            *which,
        )
        await self.sql.execute("UPDATE forged SET version = version + 1000")
        await self.sql.execute("INSERT INTO trellis.event SELECT * FROM forged")
        await self.sql.execute("DROP TABLE forged")
        return str(which)

    async def swap(self, rng: random.Random) -> str:
        rows = await self.sql.fetch("SELECT DISTINCT batch FROM trellis.event ORDER BY batch")
        one, other = (row["batch"] for row in rng.sample(rows, 2))
        for before, after in ((one, -1), (other, one), (-1, other)):
            await self.sql.execute("UPDATE trellis.event SET batch = $2 WHERE batch = $1", before, after)
        return f"{one} and {other}"

    async def payload(self, rng: random.Random) -> str:
        number, _ = await self._event(rng)
        await self.sql.execute("UPDATE trellis.job SET payload = $2 WHERE id = $1", number, b'{"forged":true}')
        return str(number)

    async def act(self, rng: random.Random) -> str:
        rows = await self.sql.fetch("SELECT no FROM trellis.act ORDER BY no")
        number = rng.choice(rows)["no"]
        await self.sql.execute("UPDATE trellis.act SET cause = 'another reason' WHERE no = $1", number)
        return str(number)

    async def delete_act(self, rng: random.Random) -> str:
        rows = await self.sql.fetch("SELECT no FROM trellis.act ORDER BY no")
        number = rng.choice(rows)["no"]
        await self.sql.execute("DELETE FROM trellis.act WHERE no = $1", number)
        return str(number)

    async def head(self, rng: random.Random) -> str:
        change = rng.choice(["number = number + 1", "number = number - 1", "sha256 = repeat('7', 64)"])
        await self.sql.execute(f"UPDATE trellis.audit_head SET {change}")
        return change


@dataclass
class Fleet:
    """An instance on PostgreSQL and S3 with a history, some of which retention removed."""

    ledger: Ledger
    objects: ObjectStore
    sql: asyncpg.Connection


@pytest.fixture
async def fleet(postgres_url: str, s3_url: str) -> AsyncGenerator[Fleet]:
    ledger, clock = await open_ledger(postgres_url), FakeClock()
    objects = await open_objects(s3_url, credentials=CREDENTIALS)
    sql = await asyncpg.connect(postgres_url)
    stand = Stand(ledger, clock)
    await work(stand, 3)
    await ledger.pause(ADMIN, "t", paused=True, cause="stocktaking")
    await publish(sealing_projector(ledger, objects, clock))
    assert (await ledger.retain(RetentionOptions(ended_s=0.0, testing=True))).jobs == 3
    await work(stand, 2, type_="late")
    await stand.run_of()
    await publish(sealing_projector(ledger, objects, clock))
    await work(stand, 2, type_="later")
    await publish(sealing_projector(ledger, objects, clock))
    yield Fleet(ledger, objects, sql)
    await sql.close()
    await objects.close()
    await ledger.close()


async def _missed(fleet: Fleet, numbers: range) -> list[str]:
    """The changes that were not found, of these numbers."""
    rows, things, missed = PostgresTampering(fleet.sql), ObjectTampering(fleet.objects), list[str]()
    await rows.save()
    kinds = {**rows.kinds(), **things.kinds()}
    for number in numbers:
        kind = list(kinds)[number % len(kinds)]
        what = await kinds[kind](random.Random(number))
        report = await audited(fleet.ledger, fleet.objects)
        if report.ok and (await verify(fleet.ledger)).ok:
            missed.append(f"{number}: {kind}: {what}")
        if kind in rows.kinds():
            await rows.undo()
        await things.undo()
    return missed


@pytest.mark.requirement("OBS-1", "D57", "D61")
async def test_an_instance_on_postgresql_and_s3_is_clean_and_changes_are_found(fleet: Fleet):
    report = await audited(fleet.ledger, fleet.objects)
    assert (report.violations, report.unsealed) == ((), 0)
    assert RETAINED in [act.event for act in await fleet.ledger.acts()]
    assert await _missed(fleet, range(FOR_DEFAULT)) == []
    assert (await audited(fleet.ledger, fleet.objects)).ok, "everything is as it was"


@pytest.mark.prove
@pytest.mark.requirement("OBS-1", "D57")
async def test_many_changes_on_postgresql_and_s3_are_found(fleet: Fleet):
    assert await _missed(fleet, range(FOR_PROOF)) == []
    assert (await audited(fleet.ledger, fleet.objects)).ok
