"""`trellis jobs` and `trellis job …`: list, show, explain, cancel and requeue jobs."""

import json as json_
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trellis.app.wiring import new_id
from trellis.auth.matrices import permit
from trellis.bus.documents import context_pointer, hold_of, result_pointer
from trellis.cli import approvals, values
from trellis.cli.bus_jobs import bus_job_facts, with_retry
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, at_gateway, command, group
from trellis.cli.events import EVENT_COLUMNS, print_events
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, age, as_record, event_record, state_text
from trellis.cli.reads import signal_lines, surroundings
from trellis.client import Trellis, cancelling_roles_of
from trellis.engine.dead_letters import OPERATOR_REASON_CODES
from trellis.engine.errors import JobNotFound, Refused, TrellisError
from trellis.engine.event_data import ArtifactPointer, artifacts_of, last_traceback
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    JobId,
    Moved,
    Priority,
    ReasonCode,
    RequestId,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job, JobFilter, JobPlace
from trellis.lifecycles import LIFECYCLES, Role, Trigger
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN
from trellis.operations.dead_letters import letter_of, requeue_answer
from trellis.operations.explain import HOLD_PHRASES, JobExplanation, duration, explain, timer_phrase, waits_for

if TYPE_CHECKING:  # the bus is imported only when it is used
    from trellis.bus.outcomes.requeue import Successor

SECTION = "Jobs"
PAGE_MAX = 500
PAYLOAD_CHARS_INLINE = 60
PAYLOAD_CHARS_SHOWN = 2_000
LOG_LINES_SHOWN = 20
HOLDS_READ_MAX = 50

JobArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "jobs", section=SECTION, over_http=at_gateway("list_jobs"))(list_jobs)
    job = group(
        program, "job", section=SECTION, help_="Show, explain, cancel, dead-letter, requeue, approve or deny one job."
    )
    command(job, "show", over_http=at_gateway("show_job"))(show)
    command(job, "result", over_http=at_gateway("job_result"))(result)
    command(job, "context", over_http=at_gateway("job_context"))(context)
    command(job, "explain")(explain_job)
    command(job, "cancel", over_http=at_gateway("cancel_job"))(cancel)
    command(job, "dead-letter", over_http=at_gateway("dead_letter_job"))(dead_letter)
    command(job, "requeue", over_http=at_gateway("requeue_job"))(requeue)
    approvals.add_to(job)


# --- reads -----------------------------------------------------------------------------------------------------------


async def list_jobs(  # noqa: PLR0917 - the options of one command
    cli: Cli,
    state: Annotated[str | None, typer.Option("--status", "--state", help="Only jobs of this status.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Only this job type.")] = None,
    lifecycle: Annotated[str | None, typer.Option("--lifecycle", metavar="NAME", help="Only this lifecycle.")] = None,
    correlation: Annotated[str | None, typer.Option("--correlation", help="Only what belongs to this.")] = None,
    key: Annotated[str | None, typer.Option("--concurrency-key", help="Only jobs of this key.")] = None,
    limit: LimitOption = LIMIT_DEFAULT,
    cursor: Annotated[str | None, typer.Option("--cursor", help="Go on after an earlier page.")] = None,
    ids: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List jobs, newest first. --lifecycle nlm-job lists those of the NLM backend, which has a ledger of its own."""
    chosen_state, chosen_lifecycle = values.state(state, values.lifecycle(lifecycle))
    where = JobFilter(
        lifecycle=chosen_lifecycle,
        type=type_,
        state=chosen_state,
        correlation_id=correlation,
        concurrency_key=None if key is None else _namespaced(key),
    )
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.open_having(lifecycle=chosen_lifecycle) as ledger:
        now = await ledger.now()
        found: list[Job] = []
        while wanted > 0:
            page = await ledger.jobs(where, limit=min(wanted, PAGE_MAX), cursor=cursor)
            wanted, cursor = wanted - len(page.jobs), page.cursor
            if cli.out.ids_alone(ids, [job.job_id for job in page.jobs]):
                pass
            elif cli.out.as_json:
                for job in page.jobs:
                    cli.out.record(_listed(job))
            else:
                found += page.jobs
            if cursor is None:
                break
        holds = await _holds(ledger, found)
    if not ids and not cli.out.as_json:
        cli.out.listing(found, _columns(now, holds), empty="No job is like that.")
    if cursor is not None:
        cli.out.note(f"there are more: --cursor {cursor}")


def _namespaced(key: str) -> str:
    return key if ":" in key else f"user:{key}"


def _listed(job: Job) -> dict[str, Any]:
    """A job without payload and progress, which listings do not read."""
    return {name: value for name, value in as_record(job).items() if name not in {"payload", "progress"}}


async def _holds(ledger: Ledger, jobs: list[Job]) -> dict[JobId, str]:
    """What jobs on topics wait for. Only their events tell it, so only the first jobs of a long list are looked up."""
    found: dict[JobId, str] = {}
    waiting = [
        job for job in jobs if job.lifecycle == BUS_JOB.name and job.place in {JobPlace.SCHEDULED, JobPlace.READY}
    ]
    for job in waiting[:HOLDS_READ_MAX]:
        hold = hold_of(job, await ledger.events(job.job_id))
        if hold is not None:
            found[job.job_id] = HOLD_PHRASES.get(hold.kind, hold.kind)
    return found


def _columns(now: datetime, holds: Mapping[JobId, str]) -> list[ListingColumn[Job]]:
    return [
        ListingColumn(title="JOB", cell=lambda job: job.job_id),
        ListingColumn(title="TYPE", cell=lambda job: job.type, gives_way=True),
        ListingColumn(title="STATUS", cell=lambda job: state_text(job.lifecycle, job.state)),
        ListingColumn(title="TRY", cell=lambda job: f"{job.attempts_spent + 1}/{job.attempts_allowed}", right=True),
        ListingColumn(title="AGE", cell=lambda job: age(job.created_at, now), right=True),
        ListingColumn(
            title="WAITS FOR", cell=lambda job: holds.get(job.job_id) or _waits_for(job, now), gives_way=True
        ),
    ]


def _waits_for(job: Job, now: datetime) -> str:
    """What a job waits for; empty if it is ready, running or ended."""
    match job.place:
        case JobPlace.SCHEDULED:
            left, who = None if job.due_at is None else (job.due_at - now).total_seconds(), waits_for(job)
            if left is None:
                return who or ""
            if who is not None and left > 0:
                return f"{who}, for {duration(left)}"
            return f"its time, in {duration(left)}" if left > 0 else "the sweep"
        case JobPlace.BLOCKED:
            return f"key {job.concurrency_key}"
        case JobPlace.LEASED if job.cancel_requested:
            return "its holder to stop"
        case _:
            return ""


async def show(cli: Cli, id_: JobArgument) -> None:
    """Everything about one job: row, payload, result, events, last log lines."""
    async with cli.open_having(job_id=id_) as ledger:
        job = await _get_job(ledger, id_)
        events = await ledger.events(job.job_id)
        result = await ledger.result(job.job_id)
        signals = await ledger.signals(job.job_id, limit=LOG_LINES_SHOWN)
        letter = await letter_of(ledger, job)
        now = await ledger.now()
    if cli.out.as_json:
        record = as_record(job)
        record["result"] = None if result is None else json_.loads(result)
        record["dead_letter"] = None if letter is None else as_record(letter)
        record["artifacts"] = [as_record(one) for one in artifacts_of(events)]
        record["events"] = [event_record(event, job.trace) for event in events]
        record["signals"] = [as_record(signal) for signal in signals]
        cli.out.record(record)
        return
    facts = _facts(job, now)
    if job.lifecycle == BUS_JOB.name:
        facts += bus_job_facts(job, events, signals)
    if letter is not None:
        facts.append(("dead letter", f"{letter.reason_code.value} at {letter.stage.value}: {letter.last_error}"))
    facts += [("artifact", _artifact(one)) for one in artifacts_of(events)]
    for title, body in (("payload", job.payload), ("progress", job.progress), ("result", result)):
        if body is not None and body != b"null":
            facts.append((title, _pretty(body)))
    cli.out.facts(facts)
    cli.out.line()
    print_events(cli.out, events, EVENT_COLUMNS)
    _print_failure(cli, events)
    if signals:
        cli.out.line()
        for signal in signals:
            for line in signal_lines(signal):
                cli.out.prose(line, style="dim")


def _print_failure(cli: Cli, events: Sequence[Event]) -> None:
    """Print the traceback of the last failure, as the attempt recorded it."""
    if (failure := last_traceback(events)) is not None:
        cli.out.line("\nLast failure", style="bold")
        for line in failure.rstrip().splitlines():
            cli.out.prose(line, style="dim")


def _facts(job: Job, now: datetime) -> list[tuple[str, str | Text]]:
    facts: list[tuple[str, str | Text]] = [
        ("job", job.job_id),
        ("type", f"{job.type} ({job.lifecycle}, {Priority(job.priority).name.lower()})"),
        ("status", Text.assemble(state_text(job.lifecycle, job.state), f", {job.place.value}")),
        (
            "attempt",
            f"{job.attempts_spent + 1} of {job.attempts_allowed}"
            + (f", generation {job.generation}" if job.generation else ""),
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
    if job.cancel_requested or job.cancel_asked_by is not None:
        facts.append(("asked to stop", _asked_to_stop(job)))
    if job.place is JobPlace.LEASED and job.lease_expires_at is not None:
        facts.append(("held by", f"{job.owner}, lease until {job.lease_expires_at:%H:%M:%S} UTC"))
    return [(name, value) for name, value in facts if value]


def _asked_to_stop(job: Job) -> str:
    at = f", {job.cancel_asked_at:%Y-%m-%d %H:%M:%S} UTC" if job.cancel_asked_at else ""
    why = f": {job.cancel_cause}" if job.cancel_cause else ""
    late = "" if job.cancel_requested else " (it ended before it noticed)"
    return f"by {job.cancel_asked_by or 'somebody'}{at}{why}{late}"


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


async def result(cli: Cli, id_: JobArgument) -> None:
    """Print the result of a job; of a job on a topic the bytes that its worker left at the result pointer."""
    async with cli.open() as ledger:
        job = await _get_job(ledger, id_)
        pointer = result_pointer(await ledger.events(job.job_id)) if job.lifecycle == BUS_JOB.name else None
        body = await ledger.result(job.job_id)
    if pointer is not None:
        from trellis.app.fleet import open_pointers  # only these functions need the bus
        from trellis.bus.pointers import PointerPart

        async with open_pointers(cli.settings, cli.url) as pointers:
            body = await pointers.read(pointer, part=PointerPart.RESULT)
    if body is None:
        raise Refused(detail=f"Job {job.job_id} is {job.state} and has no result.")
    cli.out.content(job.job_id, "result", body)


async def context(cli: Cli, id_: JobArgument) -> None:
    """Print what the worker of a job on a topic is given: what is at its pointer."""
    async with cli.open() as ledger:
        job = await _get_job(ledger, id_)
        events = await ledger.events(job.job_id)
    pointer = context_pointer(job, events) if job.lifecycle == BUS_JOB.name else None
    if pointer is None:
        where = (
            "has none" if job.lifecycle == BUS_JOB.name else f"is a {job.lifecycle}; `trellis job show` has its payload"
        )
        raise Refused(detail=f"Only a job on a topic has a context: {job.job_id} {where}.")
    from trellis.app.fleet import open_pointers  # only these functions need the bus
    from trellis.bus.pointers import PointerPart

    async with open_pointers(cli.settings, cli.url) as pointers:
        body = await pointers.read(pointer, part=PointerPart.CONTEXT)
    cli.out.content(job.job_id, "context", body)


async def explain_job(cli: Cli, id_: JobArgument) -> None:
    """Say in sentences why a job is where it is and what happens next."""
    async with cli.open() as ledger:
        job = await _get_job(ledger, id_)
        events = tuple(await ledger.events(job.job_id))
        told = explain(job, events, await surroundings(ledger, job))
        again = await _done_again(cli, ledger, job)
        if again is not None:
            told = with_retry(told, again)
        if job.lifecycle == RUN.name:
            from trellis.operations.run_waits import with_wait  # only runs need this
            from trellis.runs.waits import open_wait

            if (wait := await open_wait(ledger, job)) is not None:
                told = with_wait(told, wait, await ledger.followers(), await ledger.now())
    told = await _with_agent(cli, job, told)
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


async def _with_agent(cli: Cli, job: Job, told: JobExplanation) -> JobExplanation:
    """The explanation, extended if the job's agent is stopped; unchanged for jobs without an agent."""
    slug = _agent_of(job)
    if slug is None:
        return told
    from trellis.cli.instances import open_for_command  # only jobs of agents need this
    from trellis.operations.stopped_agents import stopped_agent, with_stopped_agent

    try:
        async with open_for_command(cli) as instance:
            stopped = await stopped_agent(instance.catalog, instance.ledger, slug)
    except TrellisError as error:
        cli.out.note(f"whether agent {slug} may run is not known: {error}")
        return told
    return told if stopped is None else with_stopped_agent(told, stopped)


def _agent_of(job: Job) -> str | None:
    """The agent of a run or queue job that has not ended or may be requeued."""
    if job.lifecycle not in {RUN.name, QUEUE_JOB.name} or (job.place is JobPlace.ENDED and not _may_be_requeued(job)):
        return None
    payload: dict[str, Any] = json_.loads(job.payload or b"{}")
    return payload.get("agent_slug")


def _may_be_requeued(job: Job) -> bool:
    return LIFECYCLES[job.lifecycle].pull(job.state, Trigger.REQUEUE) is not None


# --- changes ---------------------------------------------------------------------------------------------------------


async def cancel(
    cli: Cli,
    id_: JobArgument,
    hard: Annotated[bool, typer.Option("--hard", help="End it now; its holder's work is refused.")] = False,  # noqa: FBT002
    grace: Annotated[str | None, typer.Option("--grace", metavar="TIME", help="Soft becomes hard after this.")] = None,
    cause: Annotated[str | None, typer.Option("--cause", help="Why, for the job's event.")] = None,
) -> int:
    """End a job that has not ended. A running one is asked to stop, and ended after a grace."""
    given_s = values.seconds("--grace", grace)
    grace_s = cli.settings.cancel_grace_s if given_s is None else given_s
    async with cli.connect() as trellis:
        job = await _get_job(trellis.ledger, id_)
        roles = cancelling_roles_of(job)
    if job.place is JobPlace.ENDED:
        raise await _print_already_ended(cli, job)
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


async def dead_letter(
    cli: Cli,
    id_: JobArgument,
    cause: Annotated[str, typer.Option("--cause", help="Why, for the dead letter.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="CODE", help=f"One of {', '.join(OPERATOR_REASON_CODES)}.")
    ] = ReasonCode.POLICY_VIOLATION.value,
) -> int:
    """End a job that has not ended with a dead letter, without a retry; its holder's work is refused."""
    async with cli.connect(operator=True) as trellis:
        after = await trellis.dead_letter(id_, reason=cause, reason_code=reason)
    if cli.out.as_json:
        cli.out.record(_short(after))
    else:
        cli.out.line(f"{after.job_id} is {after.state}")
    return 0


def _short(job: Job) -> dict[str, Any]:
    return {"job_id": job.job_id, "lifecycle": job.lifecycle, "status": job.state}


async def _print_already_ended(cli: Cli, job: Job) -> Refused:
    """The error for cancelling an ended job; it tells since when it has ended."""
    async with cli.open() as ledger:
        ago = duration((await ledger.now() - job.updated_at).total_seconds())
        again = await _done_again(cli, ledger, job)
    when = f"{job.updated_at:%Y-%m-%d %H:%M:%S} UTC, {ago} ago" + (f"; {again.words}" if again else "")
    return Refused(detail=f"Job {job.job_id} has ended already: it is {job.state} since {when}.")


async def _done_again(cli: Cli, ledger: Ledger, job: Job) -> "Successor | None":
    """The job that retries a failed job on a topic; None for other jobs."""
    if job.lifecycle != BUS_JOB.name or job.place is not JobPlace.ENDED:
        return None
    from trellis.app.fleet import topics_of  # only these functions need the bus
    from trellis.bus.outcomes.requeue import find_successor

    return await find_successor(ledger, job, topics_of(cli.settings))


async def requeue(
    cli: Cli,
    id_: JobArgument,
    cause: Annotated[str | None, typer.Option("--cause", help="Why, for the job's event.")] = None,
) -> int:
    """Run a failed or dead-lettered job again, with fresh attempts; a job on a topic as a new, linked one."""
    async with cli.connect(operator=True) as trellis:
        found = await trellis.ledger.job(JobId(id_))
        if found is not None and found.lifecycle == BUS_JOB.name:
            return await _requeue(cli, trellis, found, cause)
        (answer,) = await trellis.requeue([id_], cause=cause)
        job = None if isinstance(answer, Moved) else await trellis.ledger.job(answer.job_id)
        why = None if job is None else timer_phrase(job, await trellis.ledger.now())
    return report_requeued(cli, [requeue_answer(answer)], why=f"it {why}" if why else None)


async def _requeue(cli: Cli, trellis: Trellis, job: Job, cause: str | None) -> int:
    from trellis.app.fleet import topics_of  # only these functions need the bus
    from trellis.bus.outcomes.requeue import requeue_as_new_job

    actor = permit(trellis.principal, "jobs.requeue")
    gate = Actor(role=Role.GATEWAY, name=actor.name)
    made = await requeue_as_new_job(
        trellis.ledger, gate, job, topics_of(cli.settings), RequestId(new_id()), cause=cause
    )
    if cli.out.as_json:
        cli.out.record({"job_id": made.job_id, "status": BUS_JOB.initial.name, "requeued": True, "reason": ""})
    else:
        cli.out.line(f"{job.job_id} is run again as {made.job_id}")
    return 0


def report_requeued(cli: Cli, answers: Sequence[Mapping[str, Any]], *, why: str | None = None) -> int:
    """Print which jobs were requeued; returns 1 if one was not. `why` replaces the default reason."""
    for answer in answers:
        job_id, state, moved = answer["job_id"], answer["status"], answer["requeued"]
        if cli.out.as_json:
            reason = "" if moved else why or answer["reason"]
            cli.out.record({"job_id": job_id, "status": state, "requeued": moved, "reason": reason})
        elif moved:
            cli.out.line(f"{job_id} is {state} again")
        else:
            told = why or "only failed and dead-lettered jobs are requeued"
            cli.out.error(f"{job_id} stays {state}: {told}")
    return 0 if all(answer["requeued"] for answer in answers) else 1


async def _get_job(ledger: Ledger, job_id: str) -> Job:
    job = await ledger.job(JobId(job_id))
    if job is None:
        raise JobNotFound(job_id=job_id)
    return job
