"""`trellis job wait`, and `--wait` of the commands that submit: waits until a job has ended, and prints its result."""

import json as json_
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trellis.app.system import SystemClock
from trellis.cli.commands import LIMIT_MAX
from trellis.cli.invocation import Cli
from trellis.cli.queue_jobs import print_how_to_read, warn_undriven
from trellis.client import Trellis
from trellis.engine.clock import Clock
from trellis.engine.text import duration
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.dead_letters import LEASED_DEAD, QUEUE_DEAD
from trellis.operations.explain import SERVICE_SLOW_S

if TYPE_CHECKING:  # HTTP is imported only when it is used
    from trellis.http.client import GatewayClient
    from trellis.http.shapes import JobWhole

RETRY_LOOK_S = 0.2
"""How often to look for a retry that is about to be created, in seconds."""


async def wait_for_job(cli: Cli, id_: str, wait_s: float) -> int:
    """Wait until a job has ended, and print its result. Returns the exit code."""
    if cli.gateway_url is not None:
        async with cli.client() as client:
            whole = await client.jobs.get(id_)
            job = SubmittedJob(job_id=id_, lifecycle=whole.lifecycle, status=whole.status, created=False)
            return await wait_for_end(cli, GatewayWatch(client), job, wait_s)
    async with cli.connect() as trellis:
        row = await trellis.job(id_)
        job = SubmittedJob(job_id=id_, lifecycle=row.lifecycle, status=row.state, created=False)
        return await wait_for_end(cli, LedgerWatch(cli, trellis), job, wait_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmittedJob:
    """A job that was submitted, here or through a gateway."""

    job_id: str
    lifecycle: str
    status: str
    created: bool
    replaced: str | None = None
    """The waiting job with the same unique key that the submit cancelled."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the submit did, as `--json` prints it."""
        return {"created": self.created, **({} if self.replaced is None else {"replaced": self.replaced})}


DEAD_STATES = frozenset({LEASED_DEAD, QUEUE_DEAD})
"""States of jobs that have a dead letter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedJob:
    """An ended job; of a job on a topic, also its retry, which is a separate job."""

    state: str
    result: Any = None
    failure: str | None = None
    """Why the job did not succeed, as a sentence; None if it succeeded."""
    error: str = ""
    """The error that the worker of a job on a topic reported."""
    retry: str | None = None
    """The last job that retries it."""
    due: bool = False
    """Whether a retry is about to be created."""


LookForEnd = Callable[[str, float], Awaitable[EndedJob]]
"""Waits up to a number of seconds for the end of a job; raises TimeoutError."""


class JobWatch(Protocol):
    """Looks at jobs, in a ledger or through a gateway."""

    async def state(self, job_id: str) -> str:
        """The state of a job."""
        ...

    async def ended(self, job_id: str, left_s: float) -> EndedJob:
        """The job once it has ended; raises TimeoutError after so many seconds."""
        ...


class LedgerWatch:
    """Looks at jobs in the ledger."""

    def __init__(self, cli: Cli, trellis: Trellis) -> None:
        self._cli, self._trellis = cli, trellis

    async def state(self, job_id: str) -> str:
        return (await self._trellis.job(job_id)).state

    async def ended(self, job_id: str, left_s: float) -> EndedJob:
        job = await self._trellis.wait(job_id, left_s)
        if LIFECYCLES[job.lifecycle].by_name[job.state].success:
            body = await self._trellis.ledger.result(job.job_id)
            return EndedJob(state=job.state, result=None if body is None else json_.loads(body))
        failure = str(await self._trellis.why(job))
        if job.lifecycle != BUS_JOB.name:
            return EndedJob(state=job.state, failure=failure)
        from trellis.app.fleet import topics_of  # only jobs on topics need the bus
        from trellis.bus.documents import report_of
        from trellis.bus.outcomes.job_tree import find_successor

        report = report_of(job, await self._trellis.ledger.events(job.job_id))
        error = _error_text(report.get("error_code"), report.get("error_message"))
        again = await find_successor(self._trellis.ledger, job, topics_of(self._cli.settings))
        last = None if again is None or again.last is None else again.last.job_id
        due = again is not None and again.due
        return EndedJob(state=job.state, failure=failure, error=error, retry=last, due=due)


class GatewayWatch:
    """Looks at jobs through a gateway."""

    def __init__(self, client: "GatewayClient") -> None:
        self._jobs = client.jobs

    async def state(self, job_id: str) -> str:
        return (await self._jobs.get(job_id)).status

    async def ended(self, job_id: str, left_s: float) -> EndedJob:
        from trellis.http.shapes import BusJob

        job = await self._jobs.wait(job_id, left_s)
        if LIFECYCLES[job.lifecycle].by_name[job.status].success:
            return EndedJob(state=job.status, result=job.result)
        on_topic = isinstance(job, BusJob)
        error = _error_text(job.error_code, job.error_message) if on_topic else ""
        why = error if on_topic else await self._why(job)
        failure = f"job {job_id} ended as {job.status}" + (f": {why}" if why else "")
        retry = job.retry if on_topic else None
        if retry is None:
            return EndedJob(state=job.status, failure=failure, error=error)
        return EndedJob(state=job.status, failure=failure, error=error, retry=retry.job_id, due=retry.due)

    async def _why(self, job: "JobWhole") -> str | None:
        """Why a job did not succeed: from its document, else the cause of its last event."""
        from trellis.http.shapes import QueueJob

        if isinstance(job, QueueJob):
            return job.error
        events = await self._jobs.events(job.job_id, limit=LIMIT_MAX)
        return events.items[-1].cause if events.items and events.next_cursor is None else None


def _error_text(code: str | None, message: str | None) -> str:
    return ": ".join(filter(None, (code, message)))


async def finish(cli: Cli, watch: JobWatch, job: SubmittedJob, wait_s: float | None) -> int:
    """Print the job's id; or wait for its end, and print its result."""
    if wait_s is None:
        short = {"job_id": job.job_id, "lifecycle": job.lifecycle, "status": job.status, **job.facts}
        cli.out.answer(short, job.job_id)
        if not job.created:
            cli.out.note("this job was there already: nothing new was written")
        elif job.replaced is not None:
            cli.out.note(f"it replaces job {job.replaced}, which was waiting and is now cancelled")
        return 0
    return await wait_for_end(cli, watch, job, wait_s, facts=job.facts)


async def wait_for_end(
    cli: Cli, watch: JobWatch, job: SubmittedJob, wait_s: float, facts: Mapping[str, Any] | None = None
) -> int:
    """Wait for the end of a job, and print its result, beside what the submit did."""
    job_id, left_s, of_queue = job.job_id, wait_s, job.lifecycle == QUEUE_JOB.name
    if job.lifecycle == BUS_JOB.name:
        job_id, left_s = await last_retry(cli, watch.ended, job_id, wait_s, SystemClock())
    if of_queue:  # an orchestrator accepts a queue job within a moment
        soon_s = min(wait_s, SERVICE_SLOW_S)
        with suppress(TimeoutError):
            await watch.ended(job_id, soon_s)
        warn_undriven(cli, await watch.state(job_id))
        left_s -= soon_s
    try:
        ended = await watch.ended(job_id, left_s)
    except TimeoutError:
        cli.out.error(f"job {job_id} has not ended after {duration(wait_s)}", cli.command(f"job explain {job_id}"))
        return 1
    if ended.failure is not None:
        verb = "dlq show" if ended.state in DEAD_STATES else "job show"
        cli.out.error(ended.failure, cli.command(f"{verb} {job_id}"))
        return 1
    record = {"job_id": job_id, **(facts or {}), "result": ended.result}
    cli.out.answer(record, json_.dumps(ended.result, indent=2, ensure_ascii=False))
    if of_queue:
        print_how_to_read(cli, ended.result)
    return 0


async def last_retry(cli: Cli, look: LookForEnd, job_id: str, wait_s: float, clock: Clock) -> tuple[str, float]:
    """The last job of the work on a topic when it ended or the time was over, and the seconds that are left."""
    until = clock.monotonic() + wait_s
    while (left_s := until - clock.monotonic()) > 0:
        try:
            ended = await look(job_id, left_s)
        except TimeoutError:
            break
        how = f"{job_id} is {ended.state}" + (f" ({ended.error})" if ended.error else "")
        if ended.retry is not None:
            cli.out.note(f"{how}; it is done again as {ended.retry}, which is waited for")
            job_id = ended.retry
        elif not ended.due:
            break
        elif until - clock.monotonic() <= RETRY_LOOK_S:
            cli.out.note(f"{how}; it is about to be done again")
            break
        else:
            await clock.sleep(RETRY_LOOK_S)
    return job_id, max(0.0, until - clock.monotonic())
