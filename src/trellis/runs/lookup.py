"""Finding a run by what a person typed: its id, or the short form without the time of day (D12)."""

from datetime import UTC, datetime, timedelta

from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.lifecycles.run import RUN
from trellis.runs import ids
from trellis.runs.errors import RunIdAmbiguous, RunIdInvalid, RunNotFound

PAGE = 500
PAGES_MAX = 100
"""How many runs are looked through for a short form; beyond that the long one is needed."""
AROUND_MIDNIGHT = timedelta(minutes=5)
"""An id is made a moment before its run is stored."""


async def find_run(ledger: Ledger, text: str) -> JobId:
    """The id of the run that is meant; raises RunIdInvalid, RunNotFound, RunIdAmbiguous."""
    day = _day(text)
    job = await ledger.job(JobId(text))
    if job is not None and job.lifecycle == RUN.name:
        return job.job_id
    found = await _of_day(ledger, text, day - AROUND_MIDNIGHT) if ids.short_form(text) == text else []
    if not found:
        raise RunNotFound(run_id=text)
    if len(found) > 1:
        raise RunIdAmbiguous(run_id=text, found=" or ".join(found))
    return found[0]


async def _of_day(ledger: Ledger, short: str, begins: datetime) -> list[JobId]:
    """The runs with this short form, looked for from the newest run back to the first of that day."""
    found: list[JobId] = []
    cursor: str | None = None
    for _ in range(PAGES_MAX):
        page = await ledger.jobs(JobFilter(lifecycle=RUN.name), limit=PAGE, cursor=cursor)
        found += [job.job_id for job in page.jobs if ids.short_form(job.job_id) == short]
        cursor = page.cursor
        if cursor is None or page.jobs[-1].created_at < begins:
            break
    return found


def _day(text: str) -> datetime:
    try:
        return datetime.fromisoformat(ids.run_date(text)).replace(tzinfo=UTC)
    except ValueError:  # the form of a day, but none of the calendar
        raise RunIdInvalid(run_id=text) from None
