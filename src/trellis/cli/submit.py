"""`trellis submit`: submits one job of any kind, and prints its id or result."""

import json as json_
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer

from trellis.app.wiring import SystemClock
from trellis.bus.requests import TopicSubmitOptions
from trellis.cli import values
from trellis.cli.applications import load_app
from trellis.cli.bus_jobs import ContextOption, LabelOption, RequestOption, TenantOption, TopicOption, TopicOptions
from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.cli.queue_jobs import (
    AgentOption,
    EntityOption,
    QueueJobOptions,
    RunOption,
    is_queue_job,
    print_how_to_read,
    submit_queue_job,
    warn_undriven,
)
from trellis.client import JobHandle, Trellis
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.operations.explain import SERVICE_SLOW_S, duration, is_alive, served_types
from trellis.worker.requests import SubmitSettings

SECTION = "Jobs"

TypeArgument = Annotated[
    str | None, typer.Argument(metavar="TYPE", help="The job type, such as index.document; none with --topic.")
]
KeyOfRequestOption = Annotated[
    str | None, typer.Option("--key", help="Idempotency key: the same again is the same job.")
]
IdOption = Annotated[str | None, typer.Option("--id", help="Choose the job's id.")]
PriorityOption = Annotated[
    str | None,
    typer.Option("--priority", help="critical, interactive or batch; batch unless its handler says otherwise."),
]
DelayOption = Annotated[str | None, typer.Option("--delay", metavar="TIME", help="Not before this long: 30s, 2h.")]
RunAtOption = Annotated[str | None, typer.Option("--run-at", metavar="TIME", help="Not before: ISO 8601 with zone.")]
DeadlineOption = Annotated[
    str | None, typer.Option("--deadline", metavar="TIME", help="Must have ended this long after now.")
]
AttemptsOption = Annotated[int | None, typer.Option("--max-attempts", metavar="N", help="Executions at most.")]
CorrelationOption = Annotated[str | None, typer.Option("--correlation", help="What the job belongs to.")]
ParentOption = Annotated[str | None, typer.Option("--parent", metavar="ID", help="The job that caused this one.")]
LifecycleOption = Annotated[str | None, typer.Option("--lifecycle", metavar="NAME", help="Default: leased-job.")]
AppOption = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:APP", help="Check type and payload against it, take its options."),
]
PayloadArgument = Annotated[
    str | None, typer.Argument(metavar="PAYLOAD", help="JSON as text, @file, or - for standard input; else null.")
]
WaitOption = Annotated[
    str | None, typer.Option("--wait", metavar="TIME", help="Wait so long for the end and print the result.")
]
KeyOption = Annotated[str | None, typer.Option("--concurrency-key", help="Jobs with the same key take turns.")]
KeyLimitOption = Annotated[
    int | None, typer.Option("--concurrency-limit", metavar="N", help="How many of the key may run at once.")
]


def add_to(program: typer.Typer) -> None:
    """Put this command into the program."""
    command(program, "submit", section=SECTION, gateway=True)(submit)


async def submit(
    cli: Cli,
    type_: TypeArgument = None,
    payload: PayloadArgument = None,
    *,
    key: KeyOfRequestOption = None,
    id_: IdOption = None,
    priority: PriorityOption = None,
    delay: DelayOption = None,
    run_at: RunAtOption = None,
    deadline: DeadlineOption = None,
    max_attempts: AttemptsOption = None,
    concurrency_key: KeyOption = None,
    concurrency_limit: KeyLimitOption = None,
    correlation: CorrelationOption = None,
    parent: ParentOption = None,
    lifecycle: LifecycleOption = None,
    app: AppOption = None,
    wait: WaitOption = None,
    agent: AgentOption = None,
    entity: EntityOption = None,
    run: RunOption = None,
    topic: TopicOption = None,
    label: LabelOption = None,
    tenant: TenantOption = None,
    context: ContextOption = None,
    request: RequestOption = None,
) -> int:
    """Submit one job and print its id.

    RESEARCH, BRIEF and PROPOSAL_PREPROCESS are jobs of the job queue: they need --agent, `trellis up` works on them, and an artifact comes of them.
    docs/how-to/submit-queue-jobs.md has the fields of their payloads. With --topic it is a job for the bus: docs/how-to/run-the-bus.md.
    """
    settings: dict[str, Any] = {
        "idempotency_key": key,
        "job_id": id_,
        "priority": priority,
        "delay_s": values.seconds("--delay", delay),
        "run_at": values.moment("--run-at", run_at),
        "deadline_s": values.seconds("--deadline", deadline),
        "max_attempts": max_attempts,
        "concurrency_key": concurrency_key,
        "concurrency_limit": concurrency_limit,
        "correlation_id": correlation,
        "parent_id": parent,
        "lifecycle": values.lifecycle(lifecycle),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    on_bus = TopicOptions(topic=topic, label=label, tenant=tenant, context=context, request=request)
    about = QueueJobOptions(agent=agent, entity=entity, run=run)
    return await _submit(cli, (type_, payload), given, about, on_bus, app=app, wait=wait)


async def _submit(
    cli: Cli,
    words: tuple[str | None, str | None],
    given: dict[str, Any],
    about: QueueJobOptions,
    on_bus: TopicOptions,
    *,
    app: str | None,
    wait: str | None,
) -> int:
    """Submit a job of the kind that the arguments and options determine."""
    lifecycle, key = given.get("lifecycle"), given.get("idempotency_key")
    on_bus, type_, text = on_bus.named(*words, lifecycle)
    if on_bus.topic is None:
        cli.refuse_at_gateway(id=given.get("job_id"), lifecycle=lifecycle, app=app)
    wait_s, body = values.seconds("--wait", wait), values.payload(type_, text)
    here = cli.gateway_url is None
    if on_bus.topic is not None:
        about.refuse()
        asked = on_bus.asked(given | {"app": app})
        if here:
            return await _on_topic(cli, asked, body, given, wait_s)
        beside = {"payload": body, "correlation_id": given.get("correlation_id")}
        asked |= {name: value for name, value in beside.items() if value is not None}
    elif is_queue_job(type_, lifecycle):
        on_bus.refuse()
        asked = about.asked(type_, body, given | {"app": app})
        if here:
            return await _for_agent(cli, asked, key, wait_s)
    else:
        on_bus.refuse()
        about.refuse()
        if here:
            return await _on_ledger(cli, type_, body, given, app, wait_s)
        asked = {"type": type_, "payload": body, **{name: given[name] for name in given if name != "idempotency_key"}}
    from trellis.cli.over_http import submit_there  # loads the documents of a gateway

    return await submit_there(cli, asked, key, wait_s)


async def _on_ledger(
    cli: Cli, type_: str, payload: Any, given: dict[str, Any], app: str | None, wait_s: float | None
) -> int:
    async with cli.connect(app=load_app(app) if app else None) as trellis:
        handle = await trellis.submit(type_, payload, returns=Any, **SubmitSettings(**given))
        if wait_s is None:
            return await _submitted(cli, trellis, handle, type_)
        return await _waited(cli, handle, wait_s)


async def _on_topic(
    cli: Cli, asked: dict[str, Any], payload: Any, given: Mapping[str, Any], wait_s: float | None
) -> int:
    async with cli.connect() as trellis:
        handle = await trellis.submit_topic(
            asked.pop("topic"),
            payload,
            returns=Any,
            idempotency_key=given.get("idempotency_key"),
            correlation_id=given.get("correlation_id"),
            **TopicSubmitOptions(**asked),
        )
        if wait_s is None:
            return await _submitted(cli, trellis, handle, None)
        return await _waited_for_work(cli, trellis, handle, wait_s)


async def _waited_for_work(cli: Cli, trellis: Trellis, handle: JobHandle, wait_s: float) -> int:
    """Wait for the work including its retries, which are separate jobs. The outcome is that of the last one."""
    from trellis.cli.bus_wait import last_retry, look_in_ledger  # imports the gateway's documents

    last, left_s = await last_retry(cli, look_in_ledger(cli, trellis), handle.id, wait_s, SystemClock())
    if last != handle.id:
        handle = JobHandle(trellis, JobId(last), type_=handle.type, created=handle.created, returns=Any)
    return await _waited(cli, handle, left_s, of_s=wait_s)


async def _for_agent(cli: Cli, asked: dict[str, Any], key: str | None, wait_s: float | None) -> int:
    answer = await submit_queue_job(cli, asked, key)
    async with cli.connect() as trellis:
        handle = JobHandle(trellis, answer.job_id, type_=None, created=answer.created, returns=Any)
        if wait_s is not None:
            return await _waited_for_queue(cli, trellis, handle, wait_s)
        return await _submitted(cli, trellis, handle, None)


async def _waited_for_queue(cli: Cli, trellis: Trellis, handle: JobHandle, wait_s: float) -> int:
    """Wait for a queue job. Warns early if no orchestrator accepts it, which normally takes a moment."""
    soon_s = min(wait_s, SERVICE_SLOW_S)
    with suppress(TimeoutError):
        await trellis.wait(handle.id, soon_s)
    warn_undriven(cli, (await trellis.job(handle.id)).state)
    return await _waited(cli, handle, wait_s - soon_s, of_s=wait_s, done=print_how_to_read)


async def _submitted(cli: Cli, trellis: Trellis, handle: JobHandle, type_: str | None) -> int:
    if cli.out.as_json:
        job = await trellis.job(handle.id)
        short = {"job_id": job.job_id, "lifecycle": job.lifecycle, "status": job.state}
        cli.out.record({**short, "created": handle.created})
    else:
        cli.out.line(handle.id)
    if not handle.created:
        cli.out.note("this job was there already: nothing new was written")
    elif type_ is not None and cli.out.console.is_terminal:
        await _warn_if_unserved(cli, trellis.ledger, type_)
    return 0


async def _warn_if_unserved(cli: Cli, ledger: Ledger, type_: str) -> None:
    """Warn if no living worker serves the type: a mistyped type would wait forever."""
    now = await ledger.now()
    served = {one for worker in await ledger.workers() if is_alive(worker, now) for one in served_types(worker)}
    if type_ not in served:
        hint = values.did_you_mean(type_, served) or ": the job waits until one does (trellis worker MODULE:APP)"
        cli.out.note(f"no living worker serves {type_}{hint}")


async def _waited(
    cli: Cli,
    handle: JobHandle,
    wait_s: float,
    *,
    of_s: float | None = None,
    done: Callable[[Cli, Any], None] | None = None,
) -> int:
    """Wait `wait_s` for the end, print the result, and call `done`. `of_s` is the total wait to report."""
    try:
        result = await handle.result(timeout_s=wait_s)
    except TimeoutError:
        told = duration(wait_s if of_s is None else of_s)
        cli.out.error(f"job {handle.id} has not ended after {told}", f"trellis job explain {handle.id}")
        return 1
    record = {"job_id": handle.id, "created": handle.created, "result": result}
    cli.out.answer(record, json_.dumps(result, indent=2, ensure_ascii=False))
    if done is not None:
        done(cli, result)
    return 0
