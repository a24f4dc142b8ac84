"""Commands that go through a gateway. Each takes the parameters of the ledger command of the same name.

An option that a gateway does not support is refused by name, never ignored.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from trellis.app.wiring import SystemClock
from trellis.cli.bus_wait import error_text_of, last_retry, look_at_gateway
from trellis.cli.commands import LIMIT_MAX
from trellis.cli.invocation import Cli
from trellis.cli.queue_jobs import print_how_to_read, warn_undriven
from trellis.http.shapes import (
    BusJob,
    JobShape,
    JobSubmitted,
    JobWhole,
    QueueJob,
)
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.explain import SERVICE_SLOW_S, duration

if TYPE_CHECKING:  # HTTP is imported only when it is used
    from trellis.http.client import GatewayClient


# --- jobs ------------------------------------------------------------------------------------------------------------


async def submit_there(cli: Cli, asked: Mapping[str, Any], key: str | None, wait_s: float | None) -> int:
    """Submit one job, written as `POST /jobs` takes it, and print its id or its result."""
    body = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in asked.items()}
    async with cli.client() as client:
        job = await client.jobs.submit_asked(body, idempotency_key=key)
        return await _after_submit(cli, client, job, wait_s)


async def _after_submit(cli: Cli, client: "GatewayClient", job: JobSubmitted, wait_s: float | None) -> int:
    """Print the job's id; or wait for its end, and print its result."""
    if wait_s is None:
        cli.out.answer({**_short(job), "created": job.created}, job.job_id)
        if not job.created:
            cli.out.note("this job was there already: nothing new was written")
        return 0
    job_id, left_s = job.job_id, wait_s
    if job.lifecycle == BUS_JOB.name:
        job_id, left_s = await last_retry(cli, look_at_gateway(client), job_id, wait_s, SystemClock())
    of_queue = job.lifecycle == QUEUE_JOB.name
    soon_s = min(wait_s, SERVICE_SLOW_S) if of_queue else 0.0
    if of_queue:
        with suppress(TimeoutError):
            await client.jobs.wait(job.job_id, soon_s)
        warn_undriven(cli, (await client.jobs.get(job.job_id)).status)
    try:
        ended = await client.jobs.wait(job_id, left_s - soon_s)
    except TimeoutError:
        cli.out.error(f"job {job_id} has not ended after {duration(wait_s)}", f"trellis job show {job_id}")
        return 1
    if not LIFECYCLES[ended.lifecycle].by_name[ended.status].success:
        why = await _why(client, ended)
        told = f"job {job_id} ended as {ended.status}" + (f": {why}" if why else "")
        cli.out.error(told, f"trellis job show {job_id}")
        return 1
    cli.out.answer(
        {"job_id": job_id, "created": job.created, "result": ended.result},
        json.dumps(ended.result, indent=2, ensure_ascii=False),
    )
    if of_queue:
        print_how_to_read(cli, ended.result)
    return 0


async def _why(client: "GatewayClient", ended: JobWhole) -> str | None:
    """Why a job did not succeed: from its document, else the cause of its last event."""
    if isinstance(ended, BusJob):
        return error_text_of(ended.error_code, ended.error_message)
    if isinstance(ended, QueueJob):
        return ended.error
    events = await client.jobs.events(ended.job_id, limit=LIMIT_MAX)
    return events.items[-1].cause if events.items and events.next_cursor is None else None


async def cancel_job(
    cli: Cli,
    id_: str,
    hard: bool,  # noqa: FBT001 - as its namesake
    grace: str | None,
    cause: str | None,
) -> None:
    """End a job that has not ended."""
    cli.refuse_at_gateway(grace=grace)
    async with cli.client() as client:
        job = await client.jobs.cancel(id_, mode="hard" if hard else "soft", reason=cause)
    over = LIFECYCLES[job.lifecycle].is_settled(job.status)
    text = f"is {job.status}" if over else "was asked to stop; it is ended after a grace if it does not"
    cli.out.answer({**_short(job), "requested": not over}, f"{job.job_id} {text}")


async def dead_letter_job(cli: Cli, id_: str, cause: str, reason: str) -> None:
    """End a job that has not ended with a dead letter."""
    async with cli.client() as client:
        job = await client.jobs.dead_letter(id_, reason=cause, reason_code=reason)
    cli.out.answer(_short(job), f"{job.job_id} is {job.status}")


async def requeue_job(cli: Cli, id_: str, cause: str | None) -> None:
    """Run a failed or dead-lettered job again."""
    async with cli.client() as client:
        job = await client.jobs.requeue(id_, reason=cause)
    record = {"job_id": job.job_id, "status": job.status, "requeued": True, "reason": ""}
    cli.out.answer(record, f"{job.job_id} is {job.status} again")


def _short(job: JobShape) -> dict[str, Any]:
    return {"job_id": job.job_id, "lifecycle": job.lifecycle, "status": job.status}
