"""Commands that go through a gateway. Each takes the parameters of the ledger command of the same name.

An option that a gateway does not support is refused by name, never ignored.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from trellis.app.wiring import SystemClock
from trellis.cli import values
from trellis.cli.bus_wait import error_text_of, last_retry, look_at_gateway
from trellis.cli.commands import LIMIT_MAX
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, as_record
from trellis.cli.queue_jobs import print_how_to_read, warn_undriven
from trellis.cli.run_output import (
    print_ended,
    refusals,
    run_facts,
    show_runs,
    step_bar,
    still_at_work,
    took,
    wait_s,
)
from trellis.cli.values import params_of
from trellis.http.shapes import (
    AgentShape,
    BusJob,
    JobShape,
    JobSubmitted,
)
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN
from trellis.operations.explain import SERVICE_SLOW_S, duration

if TYPE_CHECKING:  # HTTP is imported only when it is used
    from trellis.http.client import GatewayClient


# --- agents and runs -------------------------------------------------------------------------------------------------


async def list_agents(cli: Cli, limit: int, ids: bool) -> None:  # noqa: FBT001 - as its namesake
    """List the agents."""
    async with cli.client() as client:
        found = (await client.agents.list(limit=values.limit(limit, LIMIT_MAX))).items
    if cli.out.ids_alone(ids, [one.slug for one in found if one.slug]):
        return
    columns = [
        ListingColumn[AgentShape](title="AGENT", cell=lambda one: one.slug or "?"),
        ListingColumn[AgentShape](title="STATUS", cell=lambda one: one.status),
        ListingColumn[AgentShape](
            title="ABOUT", cell=lambda one: one.description or "; ".join(one.problems), gives_way=True
        ),
    ]
    cli.out.listing(found, columns, empty="No agents.")


async def activate(cli: Cli, agent: str, reason: str | None) -> None:
    """Let an agent run."""
    async with cli.client() as client:
        changed = await client.agents.activate(agent, reason=reason)
    cli.out.answer({"slug": agent, "status": changed.status}, f"{agent} is {changed.status}")


async def pause(cli: Cli, agent: str, reason: str | None) -> None:
    """Let no further run of it begin."""
    async with cli.client() as client:
        changed = await client.agents.pause(agent, reason=reason)
    cli.out.answer({"slug": agent, "status": changed.status}, f"{agent} is {changed.status}")


async def run(
    cli: Cli,
    agent: str,
    param: list[str] | None,
    watch: bool,  # noqa: FBT001 - as its namesake
    wait: str | None,
    correlation: str | None,
) -> int:
    """Begin a run; the instance behind the gateway works on it."""
    params, patience_s = params_of(param or []), wait_s(wait, watch=watch)
    async with cli.client() as client:
        begun = await client.runs.start(agent, params, correlation_id=correlation)
        if patience_s is not None:
            try:
                ended = await client.runs.wait(begun.run_id, timeout_s=patience_s)
            except TimeoutError:
                raise still_at_work(begun.run_id, patience_s) from None
            return print_ended(cli, ended.model_dump(mode="json"))
        if not watch:
            cli.out.answer({"run_id": begun.run_id, "status": begun.status}, begun.run_id)
            return 0
        status: dict[str, Any] = {}
        with step_bar(cli) as show:
            async for state in client.runs.watch(begun.run_id):
                status = state.model_dump(mode="json")
                show(status)
    return print_ended(cli, status)


async def list_runs(
    cli: Cli,
    agent: str | None,
    state: str | None,
    archived: bool,  # noqa: FBT001 - as the command has it
    limit: int,
    ids_: bool,  # noqa: FBT001 - as the command has it
) -> None:
    """List runs, newest first."""
    wanted, (status, _) = values.limit(limit, LIMIT_MAX), values.state(state, RUN.name)
    async with cli.client() as client:
        found = (await client.runs.list(agent=agent, status=status, archived=archived, limit=wanted)).items
    if not cli.out.ids_alone(ids_, [one.run_id for one in found]):
        show_runs(cli, [as_record(one) for one in found], None)


async def show_run(cli: Cli, id_: str) -> None:
    """One run: its status, its steps with their times, what it proposed."""
    async with cli.client() as client:
        status = await client.runs.get(id_)
        done = await client.runs.steps(id_)
    steps = [{name: getattr(step, name) for name in ("step", "name", "started_at", "finished_at")} for step in done]
    refused = refusals([step.model_dump(mode="json") for step in done])
    record = {**status.model_dump(mode="json"), "steps": steps, "refused": refused}
    if cli.out.as_json:
        cli.out.record(record)
        return
    cli.out.facts(run_facts(record))
    if steps:
        cli.out.line()
        columns = [
            ListingColumn[dict[str, Any]](title="STEP", cell=lambda step: step["name"]),
            ListingColumn[dict[str, Any]](title="BEGAN", cell=lambda step: step["started_at"]),
            ListingColumn[dict[str, Any]](title="TOOK", cell=took, right=True),
        ]
        cli.out.listing(steps, columns, empty="")


async def cancel_run(cli: Cli, id_: str, hard: bool, reason: str | None) -> None:  # noqa: FBT001 - as its namesake
    """End a run that has not ended."""
    async with cli.client() as client:
        stopped = await client.runs.cancel(id_, mode="hard" if hard else "soft", reason=reason)
    record = {**stopped.model_dump(), "requested": not _has_ended(RUN.name, stopped.status)}
    cli.out.answer(record, _after_cancel(stopped.run_id, RUN.name, stopped.status))


def _after_cancel(id_: str, lifecycle: str, status: str) -> str:
    over = _has_ended(lifecycle, status)
    return f"{id_} is {status}" if over else f"{id_} was asked to stop; it is ended after a grace if it does not"


def _has_ended(lifecycle: str, status: str) -> bool:
    return LIFECYCLES[lifecycle].is_settled(status)


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
        why = (
            error_text_of(ended.error_code, ended.error_message)
            if isinstance(ended, BusJob)
            else getattr(ended, "error", "")
        )
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
    record = {**_short(job), "requested": not _has_ended(job.lifecycle, job.status)}
    cli.out.answer(record, _after_cancel(job.job_id, job.lifecycle, job.status))


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
