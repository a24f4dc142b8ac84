"""Commands that go through a gateway. Each takes the parameters of the ledger command of the same name.

An option that a gateway does not support is refused by name, never ignored.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic

from trellis.app.wiring import SystemClock
from trellis.cli import values
from trellis.cli.bus_jobs import TopicOptions, print_context_hint
from trellis.cli.bus_wait import error_text_of, last_retry, look_at_gateway
from trellis.cli.commands import LIMIT_MAX
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, state_text
from trellis.cli.queue_jobs import QueueJobOptions, is_queue_job, print_how_to_read, warn_undriven
from trellis.engine.errors import OptionInvalid
from trellis.http.shapes import (
    BusJob,
    EventShape,
    JobDocument,
    JobShape,
    JobSubmitted,
    ProposalShape,
)
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.explain import SERVICE_SLOW_S, duration

if TYPE_CHECKING:  # HTTP is imported only when it is used
    from trellis.http.client import GatewayClient

NOT_HERE = "it is not for a gateway; give --ledger, or leave it out"

ShapeT = TypeVar("ShapeT", bound=pydantic.BaseModel)


def _listing(cli: Cli, items: Sequence[ShapeT], columns: Sequence[ListingColumn[ShapeT]], *, empty: str) -> None:
    if not cli.out.as_json:
        cli.out.listing(items, columns, empty=empty)
        return
    for item in items:
        cli.out.record(_record(item))


def _record(item: pydantic.BaseModel) -> dict[str, Any]:
    """A gateway's document in the form that commands print for a ledger: attempts count from 1 (D38)."""
    made = item.model_dump(mode="json")
    for where in (made, made.get("payload") if isinstance(item, EventShape) else None):
        if where is not None and isinstance(where.get("attempt"), int):
            where["attempt"] += 1
    if isinstance(item, JobDocument) and item.lifecycle == QUEUE_JOB.name:
        made["max_attempts"] += 1  # the document of a queue job counts retries, commands count executions
    return {"job_id": made["id"], **made} if isinstance(item, ProposalShape) else made


def _print_record(cli: Cli, record: dict[str, Any], line: str) -> None:
    if cli.out.as_json:
        cli.out.record(record)
    else:
        cli.out.line(line)


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise OptionInvalid(option=f"--{name.replace('_', '-')}", value=value, expected=NOT_HERE)


# --- jobs ------------------------------------------------------------------------------------------------------------


async def submit(  # noqa: PLR0917 - as its namesake
    cli: Cli,
    type_: str | None,
    payload: str | None,
    key: str | None,
    id_: str | None,
    priority: str | None,
    delay: str | None,
    run_at: str | None,
    deadline: str | None,
    max_attempts: int | None,
    concurrency_key: str | None,
    concurrency_limit: int | None,
    correlation: str | None,
    parent: str | None,
    lifecycle: str | None,
    app: str | None,
    wait: str | None,
    agent: str | None,
    entity: list[str] | None,
    run: str | None,
    topic: str | None,
    label: list[str] | None,
    tenant: str | None,
    context: str | None,
    request: str | None,
) -> int:
    """Submit one job and print its id."""
    on_bus = TopicOptions(topic=topic, label=label, tenant=tenant, context=context, request=request)
    on_bus, type_, payload = on_bus.named(type_, payload, lifecycle)
    _refuse(id=None if on_bus.topic else id_, lifecycle=None if on_bus.topic else lifecycle, app=app)
    wishes: dict[str, Any] = {
        "priority": priority,
        "delay_s": values.seconds("--delay", delay),
        "run_at": values.moment("--run-at", run_at),
        "deadline_s": values.seconds("--deadline", deadline),
        "max_attempts": max_attempts,
        "concurrency_key": concurrency_key,
        "concurrency_limit": concurrency_limit,
        "correlation_id": correlation,
        "parent_id": parent,
    }
    given = {name: value for name, value in wishes.items() if value is not None}
    wait_s, body = values.seconds("--wait", wait), values.payload(type_, payload)
    about = QueueJobOptions(agent=agent, entity=entity, run=run)
    async with cli.client() as client:
        if on_bus.topic is not None:
            about.refuse()
            asked = _on_topic(on_bus, given | {"job_id": id_, "app": app}, body)
            job = await client.jobs.submit_asked(asked, idempotency_key=key)
        elif is_queue_job(type_, lifecycle):
            on_bus.refuse()
            job = await client.jobs.submit_asked(about.asked(type_, body, given), idempotency_key=key)
        else:
            about.refuse()
            on_bus.refuse()
            job = await client.jobs.submit(type_, body, idempotency_key=key, **given)
        return await _after_submit(cli, client, job, wait_s)


def _on_topic(on_bus: TopicOptions, given: Mapping[str, Any], payload: Any) -> dict[str, Any]:
    """The request body for the gateway."""
    beside = {"payload": payload, "correlation_id": given.get("correlation_id")}
    return on_bus.asked(given) | {name: value for name, value in beside.items() if value is not None}


async def _after_submit(cli: Cli, client: "GatewayClient", job: JobSubmitted, wait_s: float | None) -> int:
    """Print the job's id; or wait for its end, and print its result."""
    if wait_s is None:
        _print_record(cli, {**_short(job), "created": job.created}, job.job_id)
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
    _print_record(
        cli,
        {"job_id": job_id, "created": job.created, "result": ended.result},
        json.dumps(ended.result, indent=2, ensure_ascii=False),
    )
    if of_queue:
        print_how_to_read(cli, ended.result)
    return 0


async def list_jobs(  # noqa: PLR0917 - as its namesake
    cli: Cli,
    state: str | None,
    type_: str | None,
    lifecycle: str | None,
    correlation: str | None,
    key: str | None,
    limit: int,
    cursor: str | None,
    ids: bool,  # noqa: FBT001 - as its namesake
) -> None:
    """List jobs, newest first."""
    _refuse(concurrency_key=key)
    status, chosen = values.state(state, values.lifecycle(lifecycle))
    async with cli.client() as client:
        page = await client.jobs.list(
            lifecycle=chosen,
            type_=type_,
            status=status,
            correlation_id=correlation,
            limit=values.limit(limit, LIMIT_MAX),
            cursor=cursor,
        )
    columns = [
        ListingColumn[JobDocument](title="JOB", cell=lambda job: job.job_id),
        ListingColumn[JobDocument](title="TYPE", cell=lambda job: job.type, gives_way=True),
        ListingColumn[JobDocument](title="STATUS", cell=lambda job: state_text(job.lifecycle, job.status)),
        ListingColumn[JobDocument](title="TRY", cell=_try, right=True),
        ListingColumn[JobDocument](title="SUBMITTED", cell=lambda job: job.created_at),
    ]
    if not cli.out.ids_alone(ids, [job.job_id for job in page.items]):
        _listing(cli, page.items, columns, empty="No job is like that.")
    if page.next_cursor is not None:
        cli.out.note(f"there are more: --cursor {page.next_cursor}")


def _try(job: JobDocument) -> str:
    told = _record(job)
    return f"{told['attempt']}/{told['max_attempts']}"


async def show_job(cli: Cli, id_: str) -> None:
    """Everything about one job: row, payload, result, events."""
    async with cli.client() as client:
        job = await client.jobs.get(id_)
        events = (await client.jobs.events(id_, limit=LIMIT_MAX)).items
    record = {**_record(job), "events": [_record(event) for event in events]}
    if cli.out.as_json:
        cli.out.record(record)
        return
    known = {name: value for name, value in record.items() if name != "events" and value is not None}
    cli.out.facts([(name, _plain(value)) for name, value in known.items()])
    cli.out.line()
    columns = [
        ListingColumn[EventShape](title="TIME", cell=lambda event: event.ts),
        ListingColumn[EventShape](title="EVENT", cell=lambda event: event.type),
        ListingColumn[EventShape](title="TO", cell=lambda event: str(event.payload.get("to"))),
        ListingColumn[EventShape](title="BY", cell=lambda event: event.actor),
        ListingColumn[EventShape](title="CAUSE", cell=lambda event: event.cause or "", gives_way=True),
    ]
    cli.out.listing(events, columns, empty="")
    print_context_hint(cli, record)


async def job_result(cli: Cli, id_: str) -> None:
    """The result of a job."""
    async with cli.client() as client:
        body = await client.jobs.result(id_)
    cli.out.content(id_, "result", body)


async def job_context(cli: Cli, id_: str) -> None:
    """What the worker of a job on a topic is given."""
    async with cli.client() as client:
        body = await client.jobs.context(id_)
    cli.out.content(id_, "context", body)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def cancel_job(
    cli: Cli,
    id_: str,
    hard: bool,  # noqa: FBT001 - as its namesake
    grace: str | None,
    cause: str | None,
) -> None:
    """End a job that has not ended."""
    _refuse(grace=grace)
    async with cli.client() as client:
        job = await client.jobs.cancel(id_, mode="hard" if hard else "soft", reason=cause)
    over = LIFECYCLES[job.lifecycle].is_settled(job.status)
    text = f"is {job.status}" if over else "was asked to stop; it is ended after a grace if it does not"
    _print_record(cli, {**_short(job), "requested": not over}, f"{job.job_id} {text}")


async def dead_letter_job(cli: Cli, id_: str, cause: str, reason: str) -> None:
    """End a job that has not ended with a dead letter."""
    async with cli.client() as client:
        job = await client.jobs.dead_letter(id_, reason=cause, reason_code=reason)
    _print_record(cli, _short(job), f"{job.job_id} is {job.status}")


async def requeue_job(cli: Cli, id_: str, cause: str | None) -> None:
    """Run a failed or dead-lettered job again."""
    async with cli.client() as client:
        job = await client.jobs.requeue(id_, reason=cause)
    record = {"job_id": job.job_id, "status": job.status, "requeued": True, "reason": ""}
    _print_record(cli, record, f"{job.job_id} is {job.status} again")


def _short(job: JobShape) -> dict[str, Any]:
    return {"job_id": job.job_id, "lifecycle": job.lifecycle, "status": job.status}
