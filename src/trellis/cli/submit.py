"""`trellis submit`: submits one job of any kind, and prints its id or result."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Annotated, Any

import typer

from trellis.bus.requests import TopicSubmitOptions
from trellis.cli import values
from trellis.cli.applications import load_app
from trellis.cli.bus_jobs import TopicOptions
from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.cli.job_end import GatewayWatch, LedgerWatch, SubmittedJob, finish
from trellis.cli.queue_jobs import QueueJobOptions, is_queue_job, submit_queue_job
from trellis.cli.unserved import note_unserved_submit
from trellis.client import JobHandle, Trellis
from trellis.worker.requests import SubmitSettings

SECTION = "Jobs"
TypeArgument = Annotated[
    str | None, typer.Argument(metavar="TYPE", help="The job type, such as index.document; none with --topic.")
]
KeyOfRequestOption = Annotated[
    str | None, typer.Option("--key", help="Idempotency key: the same key returns the same job.")
]
AppOption = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:APP", help="Application that checks type and payload and sets options."),
]
PayloadArgument = Annotated[
    str | None, typer.Argument(metavar="PAYLOAD", help="JSON as text, @file, or - for standard input; else null.")
]
WaitOption = Annotated[
    str | None, typer.Option("--wait", metavar="TIME", help="Wait at most this long for the end, and print the result.")
]


TIMES = {
    "delay_s": "--delay",
    "deadline_s": "--deadline",
    **{name: option for name, option in values.UNIQUE_OPTIONS.items() if name.endswith("_s")},
}
"""The settings that are times, and their options."""


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """What can be said about every new job: the settings of the job, as text."""

    idempotency_key: KeyOfRequestOption = None
    job_id: Annotated[str | None, typer.Option("--id", help="The job's id; default: a new one.")] = None
    priority: Annotated[
        str | None,
        typer.Option("--priority", help="critical, interactive or batch; batch unless its handler says otherwise."),
    ] = None
    delay_s: Annotated[str | None, typer.Option("--delay", metavar="TIME", help="Start after this delay: 30s, 2h.")] = (
        None
    )
    run_at: Annotated[
        str | None, typer.Option("--run-at", metavar="TIME", help="Start at this time: ISO 8601 with zone.")
    ] = None
    deadline_s: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="Time from now until the job must have ended.")
    ] = None
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", metavar="N", help="Maximum number of executions.")
    ] = None
    concurrency_key: Annotated[
        str | None, typer.Option("--concurrency-key", help="Jobs with the same key wait for each other.")
    ] = None
    concurrency_limit: Annotated[
        int | None, typer.Option("--concurrency-limit", metavar="N", help="How many jobs of the key may run at once.")
    ] = None
    unique: Annotated[
        str | None,
        typer.Option(
            "--unique", metavar="KEY", help="Unique key of the job, or args for its payload: one of a key at a time."
        ),
    ] = None
    while_: Annotated[
        str | None, typer.Option("--while", help="How long the job holds its unique key: while waiting, or unfinished.")
    ] = None
    window_s: Annotated[
        str | None,
        typer.Option("--window", metavar="TIME", help="Hold the unique key at least so long after the submit."),
    ] = None
    on_conflict: Annotated[
        str | None,
        typer.Option(
            "--on-conflict", help="If the unique key is taken: return that job, replace the waiting one, or raise."
        ),
    ] = None
    debounce_s: Annotated[
        str | None,
        typer.Option(
            "--debounce", metavar="TIME", help="Replace the waiting job of the unique key, and start after this time."
        ),
    ] = None
    debounce_max_s: Annotated[
        str | None,
        typer.Option("--debounce-max", metavar="TIME", help="Start at most this long after the first submit."),
    ] = None
    correlation_id: Annotated[str | None, typer.Option("--correlation", help="The job's correlation id.")] = None
    parent_id: Annotated[str | None, typer.Option("--parent", metavar="ID", help="The job that caused this one.")] = (
        None
    )
    lifecycle: Annotated[str | None, typer.Option("--lifecycle", metavar="NAME", help="Default: leased-job.")] = None

    def given(self) -> dict[str, Any]:
        """The settings that are given. Raises OptionInvalid."""
        settings: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        settings |= {name: values.seconds(option, settings[name]) for name, option in TIMES.items()}
        settings["run_at"] = values.moment("--run-at", self.run_at)
        settings["lifecycle"] = values.lifecycle(self.lifecycle)
        return {name: value for name, value in settings.items() if value is not None}


def add_to(program: typer.Typer) -> None:
    command(program, "submit", section=SECTION, gateway=True)(submit)


async def submit(
    cli: Cli,
    type_: TypeArgument = None,
    payload: PayloadArgument = None,
    *,
    options: SubmitOptions,
    app: AppOption = None,
    wait: WaitOption = None,
    about: QueueJobOptions,
    on_bus: TopicOptions,
) -> int:
    """Submit one job and print its id.

    RESEARCH, BRIEF and PROPOSAL_PREPROCESS are jobs of the job queue: they need --agent, `trellis up` works on them, and an artifact comes of them.
    docs/how-to/submit-queue-jobs.md has the fields of their payloads. With --topic it is a job for the bus: docs/how-to/run-the-bus.md.
    """
    return await _submit(cli, (type_, payload), options.given(), about, on_bus, app=app, wait=wait)


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
        request = on_bus.asked(given | {"app": app})
        if here:
            return await _on_topic(cli, request, body, given, wait_s)
        beside = {"payload": body, "correlation_id": given.get("correlation_id")}
        request |= {name: value for name, value in beside.items() if value is not None}
    elif is_queue_job(type_, lifecycle):
        on_bus.refuse()
        request = about.asked(type_, body, given | {"app": app})
        if here:
            return await _for_agent(cli, request, key, wait_s)
    else:
        on_bus.refuse()
        about.refuse()
        if here:
            return await _on_ledger(cli, type_, body, given, app, wait_s)
        request = {"type": type_, "payload": body, **{name: given[name] for name in given if name != "idempotency_key"}}
    return await _through_gateway(cli, request, key, wait_s)


async def _on_ledger(
    cli: Cli, type_: str, payload: Any, given: dict[str, Any], app: str | None, wait_s: float | None
) -> int:
    async with cli.connect(app=load_app(app) if app else None) as trellis:
        handle = await trellis.submit(type_, payload, returns=Any, **SubmitSettings(**given))
        return await _finish_here(cli, trellis, handle, wait_s, type_)


async def _on_topic(
    cli: Cli, request: dict[str, Any], payload: Any, given: Mapping[str, Any], wait_s: float | None
) -> int:
    async with cli.connect() as trellis:
        handle = await trellis.submit_topic(
            request.pop("topic"),
            payload,
            returns=Any,
            idempotency_key=given.get("idempotency_key"),
            correlation_id=given.get("correlation_id"),
            **TopicSubmitOptions(**request),
        )
        return await _finish_here(cli, trellis, handle, wait_s)


async def _for_agent(cli: Cli, request: dict[str, Any], key: str | None, wait_s: float | None) -> int:
    answer = await submit_queue_job(cli, request, key)
    async with cli.connect() as trellis:
        handle = JobHandle(trellis, answer, None, Any)
        return await _finish_here(cli, trellis, handle, wait_s)


async def _through_gateway(cli: Cli, request: Mapping[str, Any], key: str | None, wait_s: float | None) -> int:
    """Submit one job, written as `POST /jobs` takes it."""
    body = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in request.items()}
    async with cli.client() as client:
        job = await client.jobs.submit_asked(body, idempotency_key=key)
        submitted = SubmittedJob(
            job_id=job.job_id, lifecycle=job.lifecycle, status=job.status, created=job.created, replaced=job.replaced
        )
        return await finish(cli, GatewayWatch(client), submitted, wait_s)


async def _finish_here(
    cli: Cli, trellis: Trellis, handle: JobHandle, wait_s: float | None, type_: str | None = None
) -> int:
    job = await handle.status()
    submitted = SubmittedJob(
        job_id=job.job_id, lifecycle=job.lifecycle, status=job.state, created=handle.created, replaced=handle.replaced
    )
    code = await finish(cli, LedgerWatch(cli, trellis), submitted, wait_s)
    if wait_s is None and handle.created and type_ is not None and cli.out.errors.is_terminal:
        await note_unserved_submit(cli, trellis.ledger, type_, job.lifecycle)
    return code
