"""Schedules and the three-failures rule on PostgreSQL, whose clock nobody sets."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.agents.files import agent_file
from tests.runs.conftest import Stand
from tests.runs.test_health import FAILED, SLUG, Ward
from tests.runs.test_schedules import Clockwork
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.runs.schedules import ScheduleOptions
from trellis.runs.timetable import Timetable
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock


@pytest.fixture
async def stand(new_postgres_database: Callable[..., str], postgres_template: str) -> AsyncGenerator[Stand]:
    ledger = await open_ledger(new_postgres_database(template=postgres_template))
    yield Stand(ledger, FakeClock())
    report = await verify(ledger)
    assert report.ok, "\n".join(map(str, report.violations[:20]))
    await ledger.close()


@pytest.fixture
async def objects(tmp_path: Path) -> AsyncGenerator[ObjectStore]:
    opened = await open_objects(f"file://{tmp_path / 'objects'}")
    yield opened
    await opened.close()


@pytest.mark.requirement("D24", "OBS-1")
async def test_three_failed_runs_in_a_row_stop_the_agent(stand: Stand, objects: ObjectStore, tmp_path: Path):
    ward = Ward(stand, objects, tmp_path / "objects")
    await ward.write(agent_file(updated_at="2025-12-01T00:00:00Z"))
    await ward.ran(FAILED, FAILED)
    assert await ward.judged() == ()
    *_, last = await ward.ran(FAILED)
    assert await ward.judged() == (SLUG,)
    assert await ward.status() == "error"
    assert [record["job_id"] for record in await ward.records()] == [last]


@pytest.mark.requirement("RUN-9")
async def test_processes_that_fire_in_the_same_moment_begin_one_run(stand: Stand, objects: ObjectStore):
    clockwork = Clockwork(stand, objects)
    await clockwork.agent("yearly")
    # One instant a year, made up for however late: no other falls due while the test runs.
    await Timetable(objects=objects).register("yearly", "0 0 1 1 *", at=datetime(2000, 1, 1, tzinfo=UTC))
    processes = [clockwork.schedules() for _ in range(6)]
    for process in processes:
        process.options = ScheduleOptions(grace_s=1e9)
    reports = await asyncio.gather(*(process.run_once() for process in processes))
    assert len({run for report in reports for run in report.runs}) == 1
    assert len(await clockwork.runs()) == 1
    assert not any(report.runs for report in await asyncio.gather(*(process.run_once() for process in processes)))
