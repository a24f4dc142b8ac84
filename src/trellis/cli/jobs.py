"""`trellis submit`, `trellis jobs`, `trellis job …`: work, one by one."""

import json as json_
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from trellis.cli import over_http, values
from trellis.cli.applications import load_app
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command, group
from trellis.cli.events import EVENT_COLUMNS, print_events
from trellis.cli.invocation import Cli
from trellis.cli.output import Column, age, as_record, state_text
from trellis.cli.queue_jobs import (
    AgentOption,
    EntityOption,
    ForAgent,
    RunOption,
    is_queue_job,
    say_made,
    say_undriven,
    submit_queue_job,
)
from trellis.cli.reading import signal_lines, surroundings
from trellis.client import JobHandle, Trellis, cancelling
from trellis.engine.errors import JobNotFound, Refused
from trellis.engine.jobs import (
    CANCEL_GRACE_S_DEFAULT,
    CancelMode,
    JobId,
    Moved,
    NotMoved,
    Priority,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter, Place
from trellis.lifecycles import Role
from trellis.operations.explain import SERVICE_SLOW_S, duration, explain, goes_on, is_alive, served_types, waits_for
from trellis.operations.letters import letter_of
from trellis.worker.requests import SubmitSettings

SECTION = "Jobs"
PAGE_MAX = 500
PAYLOAD_CHARS_INLINE = 60
PAYLOAD_CHARS_SHOWN = 2_000
LOG_LINES_SHOWN = 20

JobArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
TypeArgument = Annotated[str, typer.Argument(metavar="TYPE", help="The job type, such as index.document.")]
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
    """Put these commands into the program."""
    command(program, "submit", section=SECTION, over_http=over_http.submit)(submit)
    command(program, "jobs", section=SECTION, over_http=over_http.list_jobs)(list_jobs)
    job = group(program, "job", section=SECTION, help_="Show, explain, cancel or requeue one job.")
    command(job, "show", over_http=over_http.show_job)(show)
    command(job, "explain")(explain_job)
    command(job, "cancel", over_http=over_http.cancel_job)(cancel)
    command(job, "requeue", over_http=over_http.requeue_job)(requeue)


# --- submit ----------------------------------------------------------------------------------------------------------


async def submit(
    cli: Cli,
    type_: TypeArgument,
    payload: PayloadArgument = None,
    *,
    key: Annotated[str | None, typer.Option("--key", help="Idempotency key: the same again is the same job.")] = None,
    id_: Annotated[str | None, typer.Option("--id", help="Choose the job's id.")] = None,
    priority: Annotated[str, typer.Option("--priority", help="critical, interactive or batch.")] = "batch",
    delay: Annotated[str | None, typer.Option("--delay", metavar="TIME", help="Not before this long: 30s, 2h.")] = None,
    run_at: Annotated[
        str | None, typer.Option("--run-at", metavar="TIME", help="Not before: ISO 8601 with zone.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="Must have ended this long after now.")
    ] = None,
    max_attempts: Annotated[int | None, typer.Option("--max-attempts", metavar="N", help="Executions at most.")] = None,
    concurrency_key: KeyOption = None,
    concurrency_limit: KeyLimitOption = None,
    correlation: Annotated[str | None, typer.Option("--correlation", help="What the job belongs to.")] = None,
    parent: Annotated[str | None, typer.Option("--parent", metavar="ID", help="The job that caused this one.")] = None,
    lifecycle: Annotated[str | None, typer.Option("--lifecycle", metavar="NAME", help="Default: leased-job.")] = None,
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:APP", help="Check type and payload against it, take its options."),
    ] = None,
    wait: WaitOption = None,
    agent: AgentOption = None,
    entity: EntityOption = None,
    run: RunOption = None,
) -> int:
    """Submit one job and print its id.

    RESEARCH, BRIEF and PROPOSAL_PREPROCESS are jobs of the job queue: they need --agent, `trellis up` works on them, and an artifact comes of them.
    docs/how-to/submit-queue-jobs.md has the fields of their payloads.
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
    wait_s, body = values.seconds("--wait", wait), values.payload(type_, payload)
    about = ForAgent(agent=agent, entity=entity, run=run)
    if is_queue_job(type_, lifecycle):
        return await _for_agent(cli, about.asked(type_, body, given | {"app": app}), key, wait_s)
    about.refuse()
    async with cli.connect(app=load_app(app) if app else None) as trellis:
        handle = await trellis.submit(type_, body, returns=Any, **SubmitSettings(**given))
        if wait_s is None:
            return await _submitted(cli, trellis, handle, type_)
        return await _waited(cli, handle, wait_s)


async def _for_agent(cli: Cli, asked: dict[str, Any], key: str | None, wait_s: float | None) -> int:
    answer = await submit_queue_job(cli, asked, key)
    async with cli.connect() as trellis:
        handle = JobHandle(trellis, answer.job_id, type_=None, created=answer.created, returns=Any)
        if wait_s is not None:
            return await _waited_for_queue(cli, trellis, handle, wait_s)
        return await _submitted(cli, trellis, handle, None)


async def _waited_for_queue(cli: Cli, trellis: Trellis, handle: JobHandle, wait_s: float) -> int:
    """Wait; say early when nobody drives queue jobs: whoever does accepts one within a moment."""
    soon_s = min(wait_s, SERVICE_SLOW_S)
    with suppress(TimeoutError):
        await trellis.wait(handle.id, soon_s)
    say_undriven(cli, (await trellis.job(handle.id)).state)
    return await _waited(cli, handle, wait_s - soon_s, of_s=wait_s)


async def _submitted(cli: Cli, trellis: Trellis, handle: JobHandle, type_: str | None) -> int:
    if cli.out.as_json:
        job = await trellis.job(handle.id)
        cli.out.record({**_short(job), "created": handle.created})
    else:
        cli.out.line(handle.id)
    if not handle.created:
        cli.out.note("this job was there already: nothing new was written")
    elif type_ is not None and cli.out.console.is_terminal:
        await _warn_if_unserved(cli, trellis.ledger, type_)
    return 0


async def _warn_if_unserved(cli: Cli, ledger: Ledger, type_: str) -> None:
    """A mistyped type would wait for ever; a job whose worker is merely down will not."""
    now = await ledger.now()
    served = {one for worker in await ledger.workers() if is_alive(worker, now) for one in served_types(worker)}
    if type_ not in served:
        hint = values.perhaps(type_, served) or ": the job waits until one does (trellis worker MODULE:APP)"
        cli.out.note(f"no living worker serves {type_}{hint}")


async def _waited(cli: Cli, handle: JobHandle, wait_s: float, *, of_s: float | None = None) -> int:
    """Wait so long for the end, and print the result; `of_s` is how long it was meant to be in all."""
    try:
        result = await handle.result(timeout_s=wait_s)
    except TimeoutError:
        told = duration(wait_s if of_s is None else of_s)
        cli.out.error(f"job {handle.id} has not ended after {told}", f"trellis job explain {handle.id}")
        return 1
    if cli.out.as_json:
        cli.out.record({"job_id": handle.id, "created": handle.created, "result": result})
    else:
        cli.out.line(json_.dumps(result, indent=2, ensure_ascii=False))
    if of_s is not None:
        say_made(cli, result)
    return 0


# --- look ------------------------------------------------------------------------------------------------------------


async def list_jobs(
    cli: Cli,
    state: Annotated[str | None, typer.Option("--state", help="Only jobs in this state.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Only this job type.")] = None,
    lifecycle: Annotated[str | None, typer.Option("--lifecycle", metavar="NAME", help="Only this lifecycle.")] = None,
    correlation: Annotated[str | None, typer.Option("--correlation", help="Only what belongs to this.")] = None,
    key: Annotated[str | None, typer.Option("--concurrency-key", help="Only jobs of this key.")] = None,
    limit: LimitOption = LIMIT_DEFAULT,
    cursor: Annotated[str | None, typer.Option("--cursor", help="Go on after an earlier page.")] = None,
) -> None:
    """List jobs, newest first."""
    chosen_state, chosen_lifecycle = values.state(state, values.lifecycle(lifecycle))
    where = JobFilter(
        lifecycle=chosen_lifecycle,
        type=type_,
        state=chosen_state,
        correlation_id=correlation,
        concurrency_key=None if key is None else _namespaced(key),
    )
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.open() as ledger:
        now = await ledger.now()
        found: list[Job] = []
        while wanted > 0:
            page = await ledger.jobs(where, limit=min(wanted, PAGE_MAX), cursor=cursor)
            wanted, cursor = wanted - len(page.jobs), page.cursor
            if cli.out.as_json:
                for job in page.jobs:
                    cli.out.record(_listed(job))
            else:
                found += page.jobs
            if cursor is None:
                break
    if not cli.out.as_json:
        cli.out.listing(found, _columns(now), empty="No job is like that.")
    if cursor is not None:
        cli.out.note(f"there are more: --cursor {cursor}")


def _namespaced(key: str) -> str:
    return key if ":" in key else f"user:{key}"


def _listed(job: Job) -> dict[str, Any]:
    """A listing has no payloads; leaving the names out says so."""
    return {name: value for name, value in as_record(job).items() if name not in {"payload", "progress"}}


def _columns(now: datetime) -> list[Column[Job]]:
    return [
        Column(title="JOB", cell=lambda job: job.job_id),
        Column(title="TYPE", cell=lambda job: job.type, gives_way=True),
        Column(title="STATE", cell=lambda job: state_text(job.lifecycle, job.state)),
        Column(title="TRY", cell=lambda job: f"{job.attempt + 1}/{job.max_attempts}", right=True),
        Column(title="AGE", cell=lambda job: age(job.created_at, now), right=True),
        Column(title="WAITS FOR", cell=lambda job: _waits_for(job, now), gives_way=True),
    ]


def _waits_for(job: Job, now: datetime) -> str:
    """What keeps a job from going on; nothing for one that is ready, runs or has ended."""
    match job.place:
        case Place.RESTING:
            left, who = None if job.due_at is None else (job.due_at - now).total_seconds(), waits_for(job)
            if left is None:
                return who or ""
            if who is not None and left > 0:
                return f"{who}, for {duration(left)}"
            return f"its time, in {duration(left)}" if left > 0 else "the sweep"
        case Place.PARKED:
            return f"key {job.concurrency_key}"
        case Place.HELD if job.cancel_requested:
            return "its holder to stop"
        case _:
            return ""


async def show(cli: Cli, id_: JobArgument) -> None:
    """Everything about one job: row, payload, result, events, last log lines."""
    async with cli.open() as ledger:
        job = await _found(ledger, id_)
        events = await ledger.events(job.job_id)
        result = await ledger.result(job.job_id)
        signals = await ledger.signals(job.job_id, limit=LOG_LINES_SHOWN)
        letter = await letter_of(ledger, job)
        now = await ledger.now()
    if cli.out.as_json:
        record = as_record(job)
        record["result"] = None if result is None else json_.loads(result)
        record["dead_letter"] = None if letter is None else as_record(letter)
        record["events"] = [as_record(event) for event in events]
        record["signals"] = [as_record(signal) for signal in signals]
        cli.out.record(record)
        return
    facts = _facts(job, now)
    if letter is not None:
        facts.append(("dead letter", f"{letter.reason_code.value} at {letter.stage.value}: {letter.last_error}"))
    for title, body in (("payload", job.payload), ("progress", job.progress), ("result", result)):
        if body is not None and body != b"null":
            facts.append((title, _pretty(body)))
    cli.out.facts(facts)
    cli.out.line()
    print_events(cli.out, events, EVENT_COLUMNS)
    if signals:
        cli.out.line()
        for signal in signals:
            for line in signal_lines(signal):
                cli.out.prose(line, style="dim")


def _facts(job: Job, now: datetime) -> list[tuple[str, str | Text]]:
    facts: list[tuple[str, str | Text]] = [
        ("job", job.job_id),
        ("type", f"{job.type} ({job.lifecycle}, {Priority(job.priority).name.lower()})"),
        ("state", Text.assemble(state_text(job.lifecycle, job.state), f", {job.place.value}")),
        (
            "attempt",
            f"{job.attempt + 1} of {job.max_attempts}" + (f", generation {job.generation}" if job.generation else ""),
        ),
        ("version", f"{job.version}, epoch {job.epoch}"),
        (
            "submitted",
            f"{job.created_at:%Y-%m-%d %H:%M:%S} UTC, {duration((now - job.created_at).total_seconds())} ago",
        ),
        ("changed", f"{job.updated_at:%Y-%m-%d %H:%M:%S} UTC, {duration((now - job.updated_at).total_seconds())} ago"),
        ("correlation", job.correlation_id if job.correlation_id != job.job_id else ""),
        ("key", job.concurrency_key or ""),
        ("parent", job.parent_id or ""),
        ("compensates", job.compensates or ""),
        ("deadline", f"{job.deadline_at:%Y-%m-%d %H:%M:%S} UTC" if job.deadline_at else ""),
        ("due", f"{job.due_at:%Y-%m-%d %H:%M:%S} UTC" if job.due_at else ""),
    ]
    if job.place is Place.HELD and job.lease_expires_at is not None:
        facts.append(("held by", f"{job.owner}, lease until {job.lease_expires_at:%H:%M:%S} UTC"))
    return [(name, value) for name, value in facts if value]


def _pretty(body: bytes) -> str:
    value = json_.loads(body)
    text = json_.dumps(value, ensure_ascii=False)
    if len(text) > PAYLOAD_CHARS_INLINE:
        text = json_.dumps(value, indent=2, ensure_ascii=False)
    if len(text) <= PAYLOAD_CHARS_SHOWN:
        return text
    return f"{text[:PAYLOAD_CHARS_SHOWN]}\n… {len(body)} bytes in all; --json shows them"


async def explain_job(cli: Cli, id_: JobArgument) -> None:
    """Say in sentences why a job is where it is and what happens next."""
    async with cli.open() as ledger:
        job = await _found(ledger, id_)
        events = tuple(await ledger.events(job.job_id))
        told = explain(job, events, await surroundings(ledger, job))
    if cli.out.as_json:
        cli.out.record({"job_id": job.job_id, **as_record(told)})
        return
    for title, sentences in (("", told.where), ("Why", told.why), ("Next", told.next)):
        if sentences and title:
            cli.out.line(f"\n{title}", style="bold")
        for sentence in sentences:
            cli.out.prose(sentence)
    cli.out.line("\nYou can", style="bold")
    for what in told.you_can:
        order, _, meaning = what.partition("\t")
        cli.out.line(f"  {order}", style="cyan")
        cli.out.line(f"      {meaning}")


# --- steer -----------------------------------------------------------------------------------------------------------


async def cancel(
    cli: Cli,
    id_: JobArgument,
    hard: Annotated[bool, typer.Option("--hard", help="End it now; its holder's work is refused.")] = False,  # noqa: FBT002
    grace: Annotated[str | None, typer.Option("--grace", metavar="TIME", help="Soft becomes hard after this.")] = None,
    cause: Annotated[str | None, typer.Option("--cause", help="Why, for the job's event.")] = None,
) -> int:
    """End a job that has not ended. A running one is asked to stop, and ended after a grace."""
    given_s = values.seconds("--grace", grace)
    grace_s = CANCEL_GRACE_S_DEFAULT if given_s is None else given_s
    async with cli.connect() as trellis:
        job = await _found(trellis.ledger, id_)
        roles = cancelling(job)
    if job.place is Place.ENDED:
        raise await _over(cli, job)
    async with cli.connect(operator=Role.SUBMITTER not in roles) as trellis:
        mode = CancelMode.HARD if hard else CancelMode.SOFT
        after = await trellis.cancel(job.job_id, mode, cause=cause, grace_s=grace_s)
    if cli.out.as_json:
        cli.out.record({**_short(after), "requested": after.cancel_requested})
    elif after.cancel_requested:
        cli.out.line(f"{job.job_id} was asked to stop; it is ended in {duration(grace_s)} if it does not")
    else:
        cli.out.line(f"{job.job_id} is {after.state}")
    return 0


def _short(job: Job) -> dict[str, Any]:
    return {"job_id": job.job_id, "lifecycle": job.lifecycle, "status": job.state}


async def _over(cli: Cli, job: Job) -> Refused:
    """There is nothing to cancel any more; say since when."""
    async with cli.open() as ledger:
        ago = duration((await ledger.now() - job.updated_at).total_seconds())
    when = f"{job.updated_at:%Y-%m-%d %H:%M:%S} UTC, {ago} ago"
    return Refused(detail=f"Job {job.job_id} has ended already: it is {job.state} since {when}.")


async def requeue(
    cli: Cli,
    id_: JobArgument,
    cause: Annotated[str | None, typer.Option("--cause", help="Why, for the job's event.")] = None,
) -> int:
    """Run a failed or dead-lettered job again, with fresh attempts."""
    async with cli.connect(operator=True) as trellis:
        (answer,) = await trellis.requeue([id_], cause=cause)
        job = None if isinstance(answer, Moved) else await trellis.ledger.job(answer.job_id)
        why = None if job is None else goes_on(job, await trellis.ledger.now())
    return report_requeued(cli, [answer], why=f"it {why}" if why else None)


def report_requeued(cli: Cli, answers: list[Moved | NotMoved], *, why: str | None = None) -> int:
    """Say which jobs run again; 1 when one does not, for the reason `why` where there is a better one than its state."""
    for answer in answers:
        moved = isinstance(answer, Moved)
        state = answer.target if isinstance(answer, Moved) else answer.state
        if cli.out.as_json:
            reason = "" if isinstance(answer, Moved) else why or answer.reason
            cli.out.record({"job_id": answer.job_id, "status": state, "requeued": moved, "reason": reason})
        elif isinstance(answer, Moved):
            cli.out.line(f"{answer.job_id} is {state} again")
        else:
            told = why or "only failed and dead-lettered jobs are requeued"
            cli.out.error(f"{answer.job_id} stays {state}: {told}")
    return 0 if all(isinstance(answer, Moved) for answer in answers) else 1


async def _found(ledger: Ledger, job_id: str) -> Job:
    job = await ledger.job(JobId(job_id))
    if job is None:
        raise JobNotFound(job_id=job_id)
    return job
