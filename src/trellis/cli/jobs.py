"""`trellis jobs` and `trellis job …`: list, show, explain, cancel and requeue jobs. `job_changes.py` has the changes of many."""

import json as json_
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text

from trellis.cli import job_changes, values
from trellis.cli.bus_jobs import bus_job_facts, print_context_hint
from trellis.cli.commands import (
    LIMIT_DEFAULT,
    LIMIT_MAX,
    CorrelationOption,
    IdsOption,
    JobArgument,
    KeyOption,
    LimitOption,
    ParentOption,
    StatusOption,
    TypeOption,
    command,
    group,
)
from trellis.cli.events import EVENT_COLUMNS, asked_to_stop, event_row, print_events, stop_text
from trellis.cli.invocation import Cli, is_local
from trellis.cli.output import RecordColumn, age_column, as_record, event_record, state_text
from trellis.cli.places import PROGRAM
from trellis.cli.unserved import note_unserved_jobs
from trellis.engine.attempts import attempts_made, has_attempts
from trellis.engine.dead_letters import OPERATOR_REASON_CODES
from trellis.engine.errors import InvalidTransition, OptionInvalid, PayloadInvalid
from trellis.engine.event_data import ArtifactPointer, artifacts_of, last_traceback
from trellis.engine.jobs import Epoch, JobId, Priority, ReasonCode, Stage
from trellis.engine.records import DeadLetter, Event, Job, JobPlace, Signal
from trellis.engine.text import duration
from trellis.lifecycles import LIFECYCLES, Phase
from trellis.lifecycles.bus_job import BUS_JOB

if TYPE_CHECKING:  # the application, the bus and HTTP are imported only when they are used
    from trellis.api.jobs import LocalJobs, WholeJob
    from trellis.api.local import LocalApi
    from trellis.http.client import GatewayClient
    from trellis.http.jobs import Jobs
    from trellis.http.operation_shapes import JobListed
    from trellis.http.shapes import JobShape, JobWhole, SignalShape

SECTION = "Jobs"
PAGE_MAX = 500
KINDS = {"job_heartbeat": "progress", "job_lease_renewed": "renewed"}
"""Short names of signals that are not log lines."""
PAYLOAD_CHARS_INLINE = 60
PAYLOAD_CHARS_SHOWN = 2_000

WAIT = "60s"
NoteOption = Annotated[str | None, typer.Option("--note", help="Why, for the record; denying needs ten characters.")]


def add_to(program: typer.Typer) -> None:
    jobs = group(
        program,
        "jobs",
        section=SECTION,
        help_="Jobs: list them; cancel, discard, run now or prioritize many.",
        lists=True,
    )
    command(jobs, "list", gateway=True)(list_jobs)
    command(jobs, "cancel", gateway=True)(job_changes.cancel_many)
    command(jobs, "discard", gateway=True)(job_changes.discard_many)
    command(jobs, "run-now", gateway=True)(job_changes.run_now_many)
    command(jobs, "prioritize", gateway=True)(job_changes.prioritize_many)
    job = group(
        program,
        "job",
        section=SECTION,
        help_="Show, explain, wait for, change, requeue or decide about one job.",
    )
    command(job, "show", gateway=True)(show)
    command(job, "wait", gateway=True)(wait)
    command(job, "result", gateway=True)(result)
    command(job, "context", gateway=True)(context)
    command(job, "explain", gateway=True)(explain_job)
    command(job, "cancel", gateway=True)(cancel)
    command(job, "discard", gateway=True)(job_changes.discard)
    command(job, "run-now", gateway=True)(job_changes.run_now)
    command(job, "prioritize", gateway=True)(job_changes.prioritize)
    command(job, "signal", gateway=True)(signal)
    command(job, "dead-letter", gateway=True)(dead_letter)
    command(job, "requeue", gateway=True)(requeue)
    command(job, "approve", gateway=True)(approve)
    command(job, "deny", gateway=True)(deny)


# --- reads -----------------------------------------------------------------------------------------------------------


async def list_jobs(  # noqa: PLR0917 - the options of one command
    cli: Cli,
    state: StatusOption = None,
    type_: TypeOption = None,
    lifecycle: Annotated[str | None, typer.Option("--lifecycle", metavar="NAME", help="Only this lifecycle.")] = None,
    correlation: CorrelationOption = None,
    parent: ParentOption = None,
    key: KeyOption = None,
    limit: LimitOption = LIMIT_DEFAULT,
    cursor: Annotated[str | None, typer.Option("--cursor", help="Continue after an earlier page.")] = None,
    ids: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List jobs, newest first. --lifecycle nlm-job lists those of the NLM backend, which has a ledger of its own.

    Runs, proposals, artifacts and inbox entries have listings of their own (`trellis runs`, `trellis proposals`, `trellis artifacts`). With
    --lifecycle or --concurrency-key they are listed here too, but not through a gateway.
    """
    from trellis.api.jobs import WORK
    from trellis.worker.requests import KEY_NAMESPACE

    chosen_state, chosen_lifecycle = values.state(state, values.lifecycle(lifecycle))
    cli.refuse_at_gateway(**({} if chosen_lifecycle in {None, *WORK} else {"lifecycle": lifecycle, "status": state}))
    where: dict[str, Any] = {"lifecycle": chosen_lifecycle, "type_": type_, "status": chosen_state, "parent_id": parent}
    if key is not None:
        cli.refuse_at_gateway(concurrency_key=key)
        where["concurrency_key"] = key if ":" in key else f"{KEY_NAMESPACE}{key}"
    wanted = values.limit(limit, LIMIT_MAX)
    waits: dict[str, str | None] = {}
    async with cli.api(lifecycle=chosen_lifecycle) as api:
        jobs, source = list[dict[str, Any]](), _rows_of(api, everything=bool(chosen_lifecycle or key))
        while wanted > 0:
            page_limit = min(wanted, PAGE_MAX)
            page = await source.list(**where, correlation_id=correlation, limit=page_limit, cursor=cursor)
            wanted, cursor = wanted - len(page.items), page.next_cursor
            if cli.out.ids_alone(ids, [job.job_id for job in page.items]):
                pass
            elif cli.out.as_json:
                waits = await _waits(api, page.items)
                for job in await _listed(api, page.items):
                    cli.out.record({**job, "waits_for": waits.get(job["job_id"])})
            else:
                jobs += await _listed(api, page.items)
                waits |= await _waits(api, page.items)
            if cursor is None:
                break
        now = await cli.ledger_time(api)
        hint = ""
        if type_ is not None and not (jobs or ids or cli.out.as_json):
            hint = values.other_type(type_, [job.type for job in (await api.jobs.list(limit=PAGE_MAX)).items])
        if not ids and not cli.out.as_json:
            cli.out.listing(jobs, _columns(now, waits), empty=f"No job is like that.{hint}")
            await note_unserved_jobs(cli, api, jobs)
    if cursor is not None:
        cli.out.note(f"there are more: --cursor {cursor}")


def _rows_of(api: "GatewayClient | LocalApi", *, everything: bool) -> "LocalJobs | Jobs":
    """What is listed: jobs, as through a gateway. Also runs and so on, if the ledger is asked for a lifecycle or a key."""
    from trellis.api.jobs import WORK

    return api.jobs.only(WORK) if is_local(api) and not everything else api.jobs


async def _waits(api: "GatewayClient | LocalApi", jobs: "Sequence[Job | JobListed]") -> dict[str, str | None]:
    """What these jobs wait for, by id."""
    waits: dict[str, str | None] = {job.job_id: job.waits_for for job in jobs if not isinstance(job, Job)}
    if is_local(api):
        waits |= await api.jobs.waits([job for job in jobs if isinstance(job, Job)])
    return waits


async def _listed(api: "GatewayClient | LocalApi", jobs: "Sequence[Job | JobListed]") -> list[dict[str, Any]]:
    """Jobs without payload and progress, which listings do not read, and with the number of attempts that were made."""
    attempts: dict[JobId, int] = {}
    if is_local(api):
        attempts = await api.jobs.attempts_made([job for job in jobs if isinstance(job, Job)])
    records = [{**as_record(job), **_if_known(attempts.get(JobId(job.job_id)))} for job in jobs]
    return [{name: value for name, value in one.items() if name not in {"payload", "progress"}} for one in records]


def _if_known(attempts: int | None) -> dict[str, int]:
    return {} if attempts is None else {"attempts_made": attempts}


def _columns(now: datetime, waits: Mapping[str, str | None]) -> list[RecordColumn]:
    return [
        RecordColumn(title="JOB", cell=lambda job: job["job_id"]),
        RecordColumn(title="TYPE", cell=lambda job: job["type"], gives_way=True),
        RecordColumn(title="STATUS", cell=lambda job: state_text(job["lifecycle"], job["status"])),
        RecordColumn(title="TRY", cell=_tries, right=True),
        age_column(now),
        RecordColumn(title="WAITS FOR", cell=lambda job: waits.get(job["job_id"]) or "", gives_way=True),
    ]


def _tries(job: Mapping[str, Any]) -> str:
    """The number of attempts that were made, the present one included, and of those allowed.

    The NLM backend and an older gateway do not count them: then it is the number of the present one, or 0 of a job that
    ended before anybody claimed it. Without an epoch the events are counted, of which a submit and a cancel are two.
    A job whose lifecycle has no further attempts shows nothing.
    """
    if not has_attempts(job["lifecycle"]):
        return ""
    attempts = job.get("attempts_made")
    if attempts is None:
        has_ended = LIFECYCLES[job["lifecycle"]].by_name[job["status"]].phase is Phase.ENDED
        epoch = job.get("epoch")
        never_began = has_ended and (job["version"] - 2 if epoch is None else epoch) <= 0
        attempts = 0 if never_began else job["attempt"]
    return f"{attempts}/{job['max_attempts']}"


async def show(cli: Cli, id_: JobArgument) -> None:
    """Show one job: row, payload, result, events, last log lines."""
    async with cli.api(job_id=id_) as api:
        if is_local(api):
            print_whole(cli, await api.jobs.get(id_), await api.now())
            return
        job, events = await api.jobs.get(id_), (await api.jobs.events(id_, limit=LIMIT_MAX)).items
        signals, letter, now = (
            await gateway_signals(api, id_),
            await _gateway_letter(api, job),
            await cli.ledger_time(api),
        )
    record = as_record(job)
    if cli.out.as_json:
        history = {"events": [as_record(event) for event in events], "signals": [as_record(one) for one in signals]}
        cli.out.record({**record, **history})
        return
    from trellis.api.jobs import WholeJob

    rows = [event_row(event, job.lifecycle) for event in events]
    whole = WholeJob(
        job=read_job(job, rows),
        result=None if job.result is None else json_.dumps(job.result).encode(),
        events=rows,
        signals=[read_signal(id_, one) for one in signals],
        letter=letter,
    )
    print_whole(cli, whole, now, document_facts(job))
    print_context_hint(cli, record)


def print_whole(
    cli: Cli, whole: "WholeJob", now: datetime, of_document: Sequence[tuple[str, str | Text]] | None = None
) -> None:
    """Print a job with everything that the ledger, or the document of a gateway, has about it.

    `of_document` are the facts that only the document of a gateway has; None for a job of the ledger.
    """
    job, events, result, letter = whole.job, whole.events, whole.result, whole.letter
    if cli.out.as_json:
        record = {**as_record(job), "attempts_made": attempts_made(job, events)}
        record["result"] = None if result is None else json_.loads(result)
        record["dead_letter"] = None if letter is None else as_record(letter)
        record["artifacts"] = [as_record(one) for one in artifacts_of(events)]
        record["traceback"] = last_traceback(events)
        record["events"] = [event_record(event, job.trace) for event in events]
        record["signals"] = [as_record(signal) for signal in whole.signals]
        cli.out.record(record)
        return
    facts = _facts(job, attempts_made(job, events), now)
    if of_document is not None:
        facts += of_document
    elif job.lifecycle == BUS_JOB.name:
        facts += bus_job_facts(cli, job, events, whole.signals)
    if letter is not None:
        facts.append(("dead letter", f"{letter.reason_code.value} at {letter.stage.value}: {letter.last_error}"))
    facts += [("artifact", _artifact(one)) for one in artifacts_of(events)]
    for title, body in (("payload", job.payload), ("progress", job.progress), ("result", result)):
        if body is not None and body != b"null":
            facts.append((title, _pretty(body)))
    cli.out.facts(facts)
    cli.out.line()
    print_events(cli.out, events, EVENT_COLUMNS)
    _print_failure(cli, last_traceback(events))
    _print_signals(cli, whole.signals)


def _print_signals(cli: Cli, signals: Sequence[Signal]) -> None:
    """Print the last log lines and signs of progress."""
    if signals:
        cli.out.line()
    for line in (line for signal in signals for line in signal_lines(signal)):
        cli.out.prose(line, style="dim")


async def gateway_signals(client: "GatewayClient", job_id: str) -> "Sequence[SignalShape]":
    """The log lines of a job through a gateway; none of a job of the NLM backend, or from an older gateway."""
    from trellis.http.errors import NotFound  # HTTP is imported only when it is used

    try:
        return await client.jobs.signals(job_id)
    except NotFound:
        return []


def read_signal(job_id: str, signal: "SignalShape") -> Signal:
    """A log line of a gateway's document, as the ledger has it."""
    data, at = json_.dumps(signal.data).encode(), datetime.fromisoformat(signal.ts)
    return Signal(job_id=JobId(job_id), type=signal.type, ts=at, data=None if signal.data is None else data)


async def _gateway_letter(client: "GatewayClient", job: "JobWhole") -> DeadLetter | None:
    """The dead letter of a job through a gateway; None if it has none, or the caller may not read it."""
    from trellis.http.errors import GatewayRefused  # HTTP is imported only when it is used
    from trellis.operations.dead_letters import LEASED_DEAD, QUEUE_DEAD

    if job.status not in {LEASED_DEAD, QUEUE_DEAD}:
        return None
    try:
        letter = await client.dead_letters.get(job.job_id)
    except GatewayRefused:
        return None
    return DeadLetter(
        job_id=JobId(letter.job_id),
        type=letter.type,
        state=letter.status,
        reason_code=ReasonCode(letter.reason_code),
        stage=Stage(letter.stage),
        last_error=letter.last_error,
        attempts=letter.attempts,
        last_owner=letter.last_owner,
        last_lease_expires_at=_moment(letter.last_lease_expires_at),
        correlation_id=letter.correlation_id,
        at=datetime.fromisoformat(letter.at),
        version=letter.version,
        lifecycle=letter.lifecycle,
    )


def document_facts(job: "JobWhole") -> list[tuple[str, str | Text]]:
    """What the documents of queue jobs and of jobs on topics have beside the fields of every job."""
    from trellis.http.shapes import JobWhole  # loaded where there is a document

    beside = {name: value for name, value in job.model_dump(mode="json").items() if name not in JobWhole.model_fields}
    known = [(name, value) for name, value in beside.items() if value not in (None, "", [], {})]
    return [(name, one if isinstance(one, str) else json_.dumps(one, ensure_ascii=False)) for name, one in known]


def read_job(whole: "JobWhole", events: Sequence[Event]) -> Job:
    """A job of a gateway's document, as the ledger has it. An older gateway tells neither place nor epoch."""
    record, phase = as_record(whole), LIFECYCLES[whole.lifecycle].by_name[whole.status].phase
    place = {Phase.ENDED: JobPlace.ENDED, Phase.HELD: JobPlace.LEASED}.get(phase, JobPlace.READY)
    return Job(
        job_id=JobId(whole.job_id),
        lifecycle=whole.lifecycle,
        type=whole.type,
        state=whole.status,
        place=place if whole.place is None else JobPlace(whole.place),
        priority=Priority[whole.priority.upper()],
        generation=whole.generation,
        attempt=whole.attempt,
        max_attempts=record["max_attempts"],
        version=whole.version,
        epoch=Epoch(whole.epoch if whole.epoch is not None else max((event.epoch for event in events), default=0)),
        deaths=0,
        created_at=datetime.fromisoformat(whole.created_at),
        updated_at=datetime.fromisoformat(whole.updated_at),
        due_at=_moment(whole.due_at),
        deadline_at=_moment(whole.deadline_at),
        owner=whole.owner,
        lease_expires_at=_moment(whole.lease_expires_at),
        cancel_requested=whole.cancel_requested,
        cancel_asked_by=whole.cancel_asked_by,
        cancel_asked_at=_moment(whole.cancel_asked_at),
        cancel_cause=whole.cancel_cause,
        cancel_due_at=_moment(whole.cancel_due_at),
        concurrency_key=whole.concurrency_key,
        correlation_id=whole.correlation_id,
        parent_id=None if whole.parent_id is None else JobId(whole.parent_id),
        compensates=None if whole.compensates is None else JobId(whole.compensates),
        payload=None if whole.payload is None else json_.dumps(whole.payload).encode(),
        progress=None if whole.progress is None else json_.dumps(whole.progress).encode(),
    )


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def signal_lines(signal: Signal) -> Iterator[str]:
    """A log line or progress signal in readable form; a traceback on separate lines."""
    data: Any = json_.loads(signal.data) if signal.data else None
    if not isinstance(data, dict) or "event" not in data:
        detail = "" if data is None else f" {json_.dumps(data, ensure_ascii=False)}"
        yield f"{signal.ts:%H:%M:%S} {KINDS.get(signal.type, signal.type):<8}{detail}".rstrip()
        return
    line = cast("dict[str, Any]", data)
    fields: dict[str, Any] = {**line.get("fields", {}), **({"dropped": line["dropped"]} if "dropped" in line else {})}
    traceback = str(fields.pop("traceback", ""))
    detail = "".join(f" {name}={_value(value)}" for name, value in fields.items())
    yield f"{signal.ts:%H:%M:%S} {line.get('level', ''):<8} {line['event']}{detail}"
    yield from (f"    {one}" for one in traceback.splitlines())


def _value(value: Any) -> str:
    plain = isinstance(value, str) and value != "" and not any(c.isspace() or c in '="' for c in value)
    return value if plain else json_.dumps(value, ensure_ascii=False)


def _print_failure(cli: Cli, failure: str | None) -> None:
    """Print the traceback of the last failure, as the attempt recorded it."""
    if failure is not None:
        cli.out.line("\nLast failure", style="bold")
        for line in failure.rstrip().splitlines():
            cli.out.prose(line, style="dim")


def _facts(job: Job, attempts: int, now: datetime) -> list[tuple[str, str | Text]]:
    from trellis.worker.requests import KEY_NAMESPACE

    attempt = f"{attempts} of {job.attempts_allowed}" if has_attempts(job.lifecycle) else ""
    facts: list[tuple[str, str | Text]] = [
        ("job", job.job_id),
        ("type", f"{job.type} ({job.lifecycle}, {Priority(job.priority).name.lower()})"),
        ("status", Text.assemble(state_text(job.lifecycle, job.state), f", {job.place.value}")),
        ("attempt", f"{attempt}, generation {job.generation}" if attempt and job.generation else attempt),
        ("version", f"{job.version}, epoch {job.epoch}"),
        (
            "submitted",
            f"{job.created_at:%Y-%m-%d %H:%M:%S} UTC, {duration((now - job.created_at).total_seconds())} ago",
        ),
        ("changed", f"{job.updated_at:%Y-%m-%d %H:%M:%S} UTC, {duration((now - job.updated_at).total_seconds())} ago"),
        ("correlation", job.correlation_id if job.correlation_id != job.job_id else ""),
        ("key", (job.concurrency_key or "").removeprefix(KEY_NAMESPACE)),
        ("parent", job.parent_id or ""),
        ("compensates", job.compensates or ""),
        ("deadline", f"{job.deadline_at:%Y-%m-%d %H:%M:%S} UTC" if job.deadline_at else ""),
        ("due", f"{job.due_at:%Y-%m-%d %H:%M:%S} UTC" if job.due_at else ""),
    ]
    if job.cancel_requested or job.cancel_asked_by is not None:
        late = "" if job.cancel_requested else " (it ended before it noticed)"
        facts.append(("asked to stop", f"{asked_to_stop(job)}{late}"))
    if job.place is JobPlace.LEASED and job.lease_expires_at is not None:
        facts.append(("held by", f"{job.owner}, lease until {job.lease_expires_at:%H:%M:%S} UTC"))
    return [(name, value) for name, value in facts if value]


def _artifact(one: ArtifactPointer) -> str:
    size = None if one.size is None else f"{one.size} bytes"
    beside = ", ".join(part for part in (size, one.sha256 and f"sha256 {one.sha256}") if part)
    return (f"{one.name}: " if one.name else "") + one.pointer + (f" ({beside})" if beside else "")


def _pretty(body: bytes) -> str:
    value = json_.loads(body)
    text = json_.dumps(value, ensure_ascii=False)
    if len(text) > PAYLOAD_CHARS_INLINE:
        text = json_.dumps(value, indent=2, ensure_ascii=False)
    if len(text) <= PAYLOAD_CHARS_SHOWN:
        return text
    return f"{text[:PAYLOAD_CHARS_SHOWN]}\n… {len(body)} bytes in all; --json shows them"


async def wait(
    cli: Cli,
    id_: JobArgument,
    patience: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="The longest wait; after it, exit code 1.")
    ] = WAIT,
) -> int:
    """Wait until a job has ended, and print its result.

    Exit code 1 if it ended without success, or has not ended by then.
    """
    from trellis.cli.job_end import wait_for_job  # it loads the client

    return await wait_for_job(cli, id_, values.seconds("--for", patience) or 0.0)


async def result(cli: Cli, id_: JobArgument) -> None:
    """Print the result of a job; of a job on a topic the bytes that its worker left at the result pointer."""
    async with cli.api() as api:
        cli.out.content(id_, "result", await api.jobs.result(id_))


async def context(cli: Cli, id_: JobArgument) -> None:
    """Print the payload that the worker of a job on a topic gets."""
    async with cli.api() as api:
        cli.out.content(id_, "context", await api.jobs.context(id_))


async def explain_job(cli: Cli, id_: JobArgument) -> None:
    """Explain in sentences why a job has its status and what happens next."""
    async with cli.api() as api:
        explained = await api.jobs.explain(id_)
    if cli.out.as_json:
        cli.out.record(explained.model_dump())
        return
    for title, sentences in (("", explained.where), ("Why", explained.why), ("Next", explained.next)):
        if sentences and title:
            cli.out.line(f"\n{title}", style="bold")
        for sentence in sentences:
            cli.out.prose(cli.typed(sentence))
    _print_failure(cli, explained.traceback)
    cli.out.line("\nYou can", style="bold")
    for what in explained.you_can:
        order, _, meaning = what.partition("\t")
        cli.out.line(f"  {cli.command(order.removeprefix(f'{PROGRAM} '))}", style="cyan")
        cli.out.line(f"      {meaning}")


# --- changes ---------------------------------------------------------------------------------------------------------


async def cancel(
    cli: Cli,
    id_: JobArgument,
    hard: Annotated[bool, typer.Option("--hard", help="End the job now; its worker's result is refused.")] = False,  # noqa: FBT002
    grace: Annotated[
        str | None, typer.Option("--grace", metavar="TIME", help="Time until a soft cancel becomes a hard one.")
    ] = None,
    cause: Annotated[str | None, typer.Option("--cause", help="Why, for the job's event.")] = None,
) -> None:
    """End a job that has not ended. A running one is asked to stop, and ended after a grace."""
    cli.refuse_at_gateway(grace=grace)
    given_s = values.seconds("--grace", grace)
    of_ledger: dict[str, Any] = {} if given_s is None else {"grace_s": given_s}
    async with cli.api() as api:
        job = await api.jobs.cancel(id_, mode="hard" if hard else "soft", reason=cause, **of_ledger)
        ended = LIFECYCLES[job.lifecycle].is_settled(job.status)
        line = f"is {job.status}" if ended else await stop_text(cli, api, id_)
    cli.out.answer({**_short(job), "requested": not ended}, f"{job.job_id} {line}")


async def signal(
    cli: Cli,
    id_: JobArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that the job's handler waits for.")],
    payload: Annotated[str, typer.Option("--payload", metavar="JSON", help="What the handler gets.")] = "null",
) -> None:
    """Send a signal to a job that has not ended: `ctx.wait_signal` of its handler returns the payload."""
    try:
        value = values.payload(name, payload)
    except PayloadInvalid as error:
        expected = (
            f"JSON as text, @file or - (standard input), such as --payload '{{\"n\": 1}}': {error.data['detail']}"
        )
        raise OptionInvalid(option="--payload", value=payload[:40], expected=expected) from error
    async with cli.api() as api:
        sent = await api.jobs.signal(id_, name, value)
    other = "" if sent.waits_for is None else f"; it goes on waiting for the signal {sent.waits_for!r}"
    cli.out.answer(sent.model_dump(), f"signal {name} is sent to {sent.job_id}, which was {sent.status}{other}")


async def dead_letter(
    cli: Cli,
    id_: JobArgument,
    cause: Annotated[str, typer.Option("--cause", help="Why, for the dead letter.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="CODE", help=f"One of {', '.join(OPERATOR_REASON_CODES)}.")
    ] = ReasonCode.POLICY_VIOLATION.value,
) -> None:
    """End a job that has not ended with a dead letter, without a retry; its holder's work is refused."""
    async with cli.api() as api:
        job = await api.jobs.dead_letter(id_, reason=cause, reason_code=reason)
    cli.out.answer(_short(job), f"{job.job_id} is {job.status}")


def _short(job: "JobShape") -> dict[str, Any]:
    return {"job_id": job.job_id, "lifecycle": job.lifecycle, "status": job.status}


async def requeue(
    cli: Cli,
    id_: JobArgument,
    cause: Annotated[str | None, typer.Option("--cause", help="Why, for the job's event.")] = None,
) -> int:
    """Run a failed or dead-lettered job again, with fresh attempts; a job on a topic as a new, linked one."""
    try:
        async with cli.api() as api:
            job = await api.jobs.requeue(id_, reason=cause)
    except InvalidTransition as error:
        if not cli.out.as_json:
            raise
        known = error.data.get("source") or cast("dict[str, Any]", error.data["problem"]).get("status_now")
        cli.out.record({"job_id": id_, "status": known, "requeued": False, "reason": str(error)})
        return 1
    line = f"{id_} is {job.status} again" if job.job_id == id_ else f"{id_} is run again as {job.job_id}"
    cli.out.answer({"job_id": job.job_id, "status": job.status, "requeued": True, "reason": ""}, line)
    return 0


async def approve(cli: Cli, id_: JobArgument, note: NoteOption = None) -> None:
    """Let a job go that the safety kernel held for a person."""
    async with cli.api() as api:
        job = await api.jobs.approve(id_, note)
    record = {"job_id": job.job_id, "status": job.status, "decided": "approve"}
    cli.out.answer(record, f"{job.job_id} may go; the scheduler hands it out")


async def deny(cli: Cli, id_: JobArgument, note: NoteOption = None) -> None:
    """Refuse a job that the safety kernel held for a person, and say why."""
    async with cli.api() as api:
        job = await api.jobs.deny(id_, note or "")
    record = {"job_id": job.job_id, "status": job.status, "decided": "reject"}
    cli.out.answer(record, f"{job.job_id} is {job.status}")


def report_requeued(cli: Cli, answers: Sequence[Mapping[str, Any]]) -> int:
    """Print which jobs were requeued; returns 1 if one was not."""
    for answer in answers:
        job_id, state, moved = answer["job_id"], answer["status"], answer["requeued"]
        if cli.out.as_json:
            reason = "" if moved else answer["reason"]
            cli.out.record({"job_id": job_id, "status": state, "requeued": moved, "reason": reason})
        elif moved:
            cli.out.line(f"{job_id} is {state} again")
        else:
            cli.out.error(f"{job_id} stays {state}: only failed and dead-lettered jobs are requeued")
    return 0 if all(answer["requeued"] for answer in answers) else 1
