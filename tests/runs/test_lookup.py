"""Which run is meant by what a person typed."""

import pytest

from tests.runs.conftest import GATEWAY, Stand
from trellis.documents import lookup
from trellis.documents.errors import RunIdAmbiguous, RunIdInvalid, RunNotFound
from trellis.documents.lookup import find_run
from trellis.documents.run_documents import RunRequest
from trellis.engine.jobs import JobId, NewJob
from trellis.runs.orchestrator import TYPE

LONG = "run_2026-01-01_080000_abc123"


async def submitted(stand: Stand, *names: str, lifecycle: str = "run", type_: str = TYPE) -> None:
    payload = RunRequest("gardener", "manual", {}).to_bytes()
    jobs = [NewJob(job_id=JobId(name), type=type_, lifecycle=lifecycle, payload=payload) for name in names]
    await stand.ledger.submit(GATEWAY, jobs)


@pytest.mark.requirement("D12")
async def test_a_run_is_found_by_its_long_and_by_its_short_form(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    await submitted(stand, LONG, "run_2026-01-01_abcdef", *(f"run_2026-01-01_090000_{n:06}" for n in range(20)))
    monkeypatch.setattr(lookup, "PAGE", 7)
    assert await find_run(stand.ledger, LONG) == LONG
    assert await find_run(stand.ledger, "run_2026-01-01_abc123") == LONG
    assert await find_run(stand.ledger, "run_2026-01-01_abcdef") == "run_2026-01-01_abcdef"


@pytest.mark.requirement("D12")
async def test_a_short_form_that_fits_two_runs_names_both(stand: Stand):
    other = "run_2026-01-01_090000_abc123"
    await submitted(stand, LONG, other)
    with pytest.raises(RunIdAmbiguous, match=f"may be {other} or {LONG}; give the long form"):
        await find_run(stand.ledger, "run_2026-01-01_abc123")


async def test_job_that_is_no_run_is_not_found_as_a_run(stand: Stand):
    await submitted(stand, LONG)
    for text in ("run_2026-01-01_090000_abc123", "run_2026-01-02_abc123", "run_2026-01-01_abc124"):
        with pytest.raises(RunNotFound):
            await find_run(stand.ledger, text)
    for text in ("", "abc123", "run_2026-13-01_abc123", f"{LONG}/../x"):
        with pytest.raises(RunIdInvalid):
            await find_run(stand.ledger, text)


async def test_runs_of_days_before_are_not_looked_through(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    await submitted(stand, "run_2026-01-01_080000_abc123")
    stand.clock.advance(2 * 86_400.0)
    await submitted(stand, *(f"run_2026-01-03_080000_{n:06}" for n in range(4)))
    monkeypatch.setattr(lookup, "PAGE", 2)
    asked: list[str | None] = []
    usual = stand.ledger.jobs

    async def jobs(where, *, limit, cursor=None):
        asked.append(cursor)
        return await usual(where, limit=limit, cursor=cursor)

    monkeypatch.setattr(stand.ledger, "jobs", jobs)
    with pytest.raises(RunNotFound):
        await find_run(stand.ledger, "run_2026-01-03_abc123")
    assert len(asked) == 3
