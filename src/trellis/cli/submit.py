"""`trellis submit`: submits one job of any kind, and prints its id or result."""

import json as json_
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from trellis.app.system import SystemClock
from trellis.bus.documents import report_of
from trellis.bus.requests import TopicSubmitOptions
from trellis.cli import values
from trellis.cli.applications import load_app
from trellis.cli.bus_jobs import ContextOption, LabelOption, RequestOption, TenantOption, TopicOption, TopicOptions
from trellis.cli.commands import LIMIT_MAX, command
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
from trellis.engine.clock import Clock
from trellis.engine.ledger import Ledger
from trellis.engine.text import duration
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.dead_letters import LEASED_DEAD, QUEUE_DEAD
from trellis.operations.explain import SERVICE_SLOW_S, is_alive, served_types
from trellis.worker.requests import SubmitSettings

if TYPE_CHECKING:  # HTTP is imported only when it is used
    from trellis.http.client import GatewayClient
    from trellis.http.shapes import JobWhole

SECTION = "Jobs"
RETRY_LOOK_S = 0.2
"""How often to look for a retry that is about to be created, in seconds."""

TypeArgument = Annotated[
    str | None, typer.Argument(metavar="TYPE", help="The job type, such as index.document; none with --topic.")
]
KeyOfRequestOption = Annotated[
    str | None, typer.Option("--key", help="Idempotency key: the same key returns the same job.")
]
IdOption = Annotated[str | None, typer.Option("--id", help="The job's id; default: a new one.")]
PriorityOption = Annotated[
    str | None,
    typer.Option("--priority", help="critical, interactive or batch; batch unless its handler says otherwise."),
]
DelayOption = Annotated[str | None, typer.Option("--delay", metavar="TIME", help="Start after this delay: 30s, 2h.")]
RunAtOption = Annotated[
    str | None, typer.Option("--run-at", metavar="TIME", help="Start at this time: ISO 8601 with zone.")
]
DeadlineOption = Annotated[
    str | None, typer.Option("--deadline", metavar="TIME", help="Time from now until the job must have ended.")
]
AttemptsOption = Annotated[
    int | None, typer.Option("--max-attempts", metavar="N", help="Maximum number of executions.")
]
CorrelationOption = Annotated[str | None, typer.Option("--correlation", help="The job's correlation id.")]
ParentOption = Annotated[str | None, typer.Option("--parent", metavar="ID", help="The job that caused this one.")]
LifecycleOption = Annotated[str | None, typer.Option("--lifecycle", metavar="NAME", help="Default: leased-job.")]
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
KeyOption = Annotated[str | None, typer.Option("--concurrency-key", help="Jobs with the same key wait for each other.")]
KeyLimitOption = Annotated[
    int | None, typer.Option("--concurrency-limit", metavar="N", help="How many jobs of the key may run at once.")
]
UniqueOption = Annotated[
    str | None,
    typer.Option(
        "--unique", metavar="KEY", help="Unique key of the job, or args for its payload: one of a key at a time."
    ),
]
WhileOption = Annotated[
    str | None, typer.Option("--while", help="How long the job holds its unique key: while waiting, or unfinished.")
]
WindowOption = Annotated[
    str | None, typer.Option("--window", metavar="TIME", help="Hold the unique key at least so long after the submit.")
]
ConflictOption = Annotated[
    str | None,
    typer.Option(
        "--on-conflict", help="If the unique key is taken: return that job, replace the waiting one, or raise."
    ),
]
DebounceOption = Annotated[
    str | None,
    typer.Option(
        "--debounce", metavar="TIME", help="Replace the waiting job of the unique key, and start after this time."
    ),
]
DebounceMaxOption = Annotated[
    str | None, typer.Option("--debounce-max", metavar="TIME", help="Start at most this long after the first submit.")
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
    unique: UniqueOption = None,
    while_: WhileOption = None,
    window: WindowOption = None,
    on_conflict: ConflictOption = None,
    debounce: DebounceOption = None,
    debounce_max: DebounceMaxOption = None,
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
        **_uniqueness(unique, while_, on_conflict, window, debounce, debounce_max),
        "correlation_id": correlation,
        "parent_id": parent,
        "lifecycle": values.lifecycle(lifecycle),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    on_bus = TopicOptions(topic=topic, label=label, tenant=tenant, context=context, request=request)
    about = QueueJobOptions(agent=agent, entity=entity, run=run)
    return await _submit(cli, (type_, payload), given, about, on_bus, app=app, wait=wait)


def _uniqueness(unique: str | None, while_: str | None, on_conflict: str | None, *times: str | None) -> dict[str, Any]:
    """The settings about unique jobs. `times` are those of --window, --debounce and --debounce-max."""
    names = ("window_s", "debounce_s", "debounce_max_s")
    seconds = {name: values.seconds(values.UNIQUE_OPTIONS[name], time) for name, time in zip(names, times, strict=True)}
    return {"unique": unique, "while_": while_, "on_conflict": on_conflict, **seconds}


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
        handle = JobHandle(trellis, answer.job_id, type_=None, created=answer.created, returns=Any)
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
    if wait_s is None and handle.created and type_ is not None and cli.out.console.is_terminal:
        await _warn_if_unserved(cli, trellis.ledger, type_)
    return code


async def _warn_if_unserved(cli: Cli, ledger: Ledger, type_: str) -> None:
    """Warn if no living worker serves the type: a mistyped type would wait forever."""
    now = await ledger.now()
    served = {one for worker in await ledger.workers() if is_alive(worker, now) for one in served_types(worker)}
    if type_ not in served:
        hint = values.did_you_mean(type_, served) or ": the job waits until one does (`trellis worker MODULE:APP`)"
        cli.out.note(f"no living worker serves {type_}{hint}")


# --- the end of a submitted job ----------------------------------------------------------------------------------------


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
        """The state of a job."""
        return (await self._trellis.job(job_id)).state

    async def ended(self, job_id: str, left_s: float) -> EndedJob:
        """The job once it has ended; raises TimeoutError."""
        job = await self._trellis.wait(job_id, left_s)
        if LIFECYCLES[job.lifecycle].by_name[job.state].success:
            body = await self._trellis.ledger.result(job.job_id)
            return EndedJob(state=job.state, result=None if body is None else json_.loads(body))
        failure = str(await self._trellis.why(job))
        if job.lifecycle != BUS_JOB.name:
            return EndedJob(state=job.state, failure=failure)
        from trellis.app.fleet import topics_of  # only jobs on topics need the bus
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
        """The state of a job."""
        return (await self._jobs.get(job_id)).status

    async def ended(self, job_id: str, left_s: float) -> EndedJob:
        """The job once it has ended; raises TimeoutError."""
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
    record = {"job_id": job_id, **job.facts, "result": ended.result}
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
