"""Waits for work on a topic, including its retries, which are separate jobs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trellis.bus.documents import report_of
from trellis.cli.invocation import Cli
from trellis.client import Trellis
from trellis.engine.clock import Clock
from trellis.http.shapes import BusJob

if TYPE_CHECKING:  # HTTP is imported only when it is used
    from trellis.http.client import GatewayClient

LOOK_S = 0.2
"""How often to check for a retry that is about to be created, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedBusJob:
    """An ended job, and its retry."""

    state: str
    error: str = ""
    retry: str | None = None
    """The last job that retries it."""
    due: bool = False
    """Whether a retry is about to be created."""


LookForEnd = Callable[[str, float], Awaitable[EndedBusJob]]
"""Waits up to a number of seconds for the end of a job; raises TimeoutError."""


async def last_retry(cli: Cli, look: LookForEnd, job_id: str, wait_s: float, clock: Clock) -> tuple[str, float]:
    """The last job of the work when it ended or the time was over, and the seconds that are left."""
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
        elif until - clock.monotonic() <= LOOK_S:
            cli.out.note(f"{how}; it is about to be done again")
            break
        else:
            await clock.sleep(LOOK_S)
    return job_id, max(0.0, until - clock.monotonic())


def look_in_ledger(cli: Cli, trellis: Trellis) -> LookForEnd:
    """Wait for jobs in the ledger."""
    from trellis.app.fleet import topics_of  # only this function needs the bus
    from trellis.bus.outcomes.job_tree import find_successor

    topics = topics_of(cli.settings)

    async def look(job_id: str, left_s: float) -> EndedBusJob:
        job = await trellis.wait(job_id, left_s)
        again = await find_successor(trellis.ledger, job, topics)
        if again is None:
            return EndedBusJob(state=job.state)
        report = report_of(job, await trellis.ledger.events(job.job_id))
        error = error_text_of(report.get("error_code"), report.get("error_message"))
        retry = None if again.last is None else again.last.job_id
        return EndedBusJob(state=job.state, error=error, retry=retry, due=again.due)

    return look


def look_at_gateway(client: "GatewayClient") -> LookForEnd:
    """Wait for jobs over a gateway."""

    async def look(job_id: str, left_s: float) -> EndedBusJob:
        job = await client.jobs.wait(job_id, left_s)
        if not isinstance(job, BusJob) or job.retry is None:
            return EndedBusJob(state=job.status)
        error = error_text_of(job.error_code, job.error_message)
        return EndedBusJob(state=job.status, error=error, retry=job.retry.job_id, due=job.retry.due)

    return look


def error_text_of(code: str | None, message: str | None) -> str:
    """Error code and message as one text."""
    return ": ".join(filter(None, (code, message)))
