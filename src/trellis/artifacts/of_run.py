"""Which artifacts the jobs of a run have made (PIPE-15).

A queue job may be submitted for a run of its agent, and a requeued one gets a new run (D20); its artifact says which run it was made for.
"""

from trellis.artifacts.rows import FINALIZED, ArtifactRow
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.queue_job import QUEUE_JOB

COMPLETE = next(state.name for state in QUEUE_JOB.states if state.success)
PAGE = 100
JOBS_MAX = 500
"""Completed jobs of the agent that are looked at, the newest first."""


async def artifacts_of_run(ledger: Ledger, run_id: str, agent_slug: str) -> list[str]:
    """The ids of the final artifacts that were made for this run, oldest first; at most one for each of the last JOBS_MAX jobs."""
    run = await ledger.job(JobId(run_id))
    if run is None:
        return []
    where, cursor, looked, found = _completed(agent_slug), None, 0, list[str]()
    while looked < JOBS_MAX:
        page = await ledger.jobs(where, limit=PAGE, cursor=cursor)
        ended_since = [job for job in page.jobs if job.updated_at >= run.created_at]
        found += [made for job in ended_since if (made := await _artifact_made_for(ledger, job, run_id)) is not None]
        looked, cursor = looked + len(page.jobs), page.cursor
        if cursor is None or not ended_since:
            break
    return found[::-1]


def _completed(agent_slug: str) -> JobFilter:
    return JobFilter(lifecycle=QUEUE_JOB.name, state=COMPLETE, concurrency_key=f"{QUEUE_JOB.name}:{agent_slug}")


async def _artifact_made_for(ledger: Ledger, job: Job, run_id: str) -> str | None:
    """The final artifact of a job, if it was made for this run."""
    where = JobFilter(lifecycle=ARTIFACT.name, state=FINALIZED, parent_id=job.job_id)
    for listed in (await ledger.jobs(where, limit=PAGE)).jobs:
        whole = await ledger.job(listed.job_id)
        row = None if whole is None else ArtifactRow.read(whole)
        if row is not None and row.run_id == run_id:
            return row.artifact_id
    return None
