"""`trellis dlq`: list and requeue dead letters."""

from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from trellis.api.local import LocalApi
from trellis.cli import values
from trellis.cli.commands import (
    LIMIT_DEFAULT,
    LIMIT_MAX,
    CorrelationOption,
    IdsOption,
    JobArgument,
    LimitOption,
    TypeOption,
    YesOption,
    command,
    group,
)
from trellis.cli.invocation import Cli
from trellis.cli.jobs import report_requeued, show
from trellis.cli.output import RecordColumn, age_column
from trellis.engine.errors import InputError, OptionInvalid
from trellis.engine.event_data import traceback_in
from trellis.engine.text import counted
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.dead_letters import WITH_LETTERS
from trellis.operations.explain import REASON_PHRASES

REQUEUE_CHUNK = 200
REQUEUE_MAX = 100_000
COUNTED_MAX = 100
"""Counting limit for failed queue jobs without a dead letter."""

ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="CODE", help="Only this reason code: exhausted_retries, timeout, …")
]
LifecycleOption = Annotated[
    str | None, typer.Option("--lifecycle", metavar="NAME", help="Only leased-job, or only queue-job.")
]


def add_to(program: typer.Typer) -> None:
    dlq = group(program, "dlq", section="Queues", help_="Dead letters: list, show, requeue.", lists=True)
    command(dlq, "list", gateway=True)(list_letters)
    command(dlq, "show", gateway=True)(show_letter)
    command(dlq, "requeue", gateway=True)(requeue)


async def list_letters(
    cli: Cli,
    type_: TypeOption = None,
    reason: ReasonOption = None,
    correlation: CorrelationOption = None,
    lifecycle: LifecycleOption = None,
    limit: LimitOption = LIMIT_DEFAULT,
    cursor: Annotated[
        str | None, typer.Option("--cursor", metavar="TEXT", help="Continue after an earlier page.")
    ] = None,
    ids: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List dead letters that nobody requeued, newest first: dead-lettered jobs, and DEAD jobs of the job queue.

    Jobs of the job queue that failed and are not DEAD yet wait for a person too; on a ledger they are counted beside.
    """
    where, wanted, failed = _filter(type_, reason, correlation, lifecycle), values.limit(limit, LIMIT_MAX), 0
    async with cli.api() as api:
        letters = await api.dead_letters.list(**where, limit=wanted, cursor=cursor)
        now = await cli.ledger_time(api)
        if isinstance(api, LocalApi) and not reason and lifecycle != LEASED_JOB.name:
            failed = await api.dead_letters.count_failed(type_=type_, correlation_id=correlation, limit=COUNTED_MAX)
    columns = [
        RecordColumn(title="JOB", cell=lambda letter: letter["job_id"]),
        RecordColumn(title="REASON", cell=lambda letter: Text(letter["reason_code"], style="red")),
        age_column(now, of="at"),
        RecordColumn(
            title="TYPE: ERROR", cell=lambda letter: f"{letter['type']}: {letter['last_error']}", gives_way=True
        ),
    ]
    if not cli.out.ids_alone(ids, [letter.job_id for letter in letters.items]):
        cli.out.listing([letter.model_dump() for letter in letters.items], columns, empty="No dead letters.")
    if letters.next_cursor is not None:
        cli.out.note(f"there are more: --cursor {letters.next_cursor}")
    if failed:
        name, state = QUEUE_JOB.name, "FAILED"
        many = f"{counted(failed, name)}{' or more' if failed == COUNTED_MAX else ''}"
        are = "is" if failed == 1 else "are"
        cli.out.note(f"{many} {are} {state}, without a dead letter: `trellis jobs --lifecycle {name} --status {state}`")


async def show_letter(cli: Cli, id_: JobArgument) -> None:
    """Show one dead letter and its job."""
    async with cli.api() as api:
        letter = (await api.dead_letters.get(id_)).model_dump()
        if isinstance(api, LocalApi):
            letter["traceback"] = await api.dead_letters.traceback(id_)
        else:
            events = (await api.jobs.events(id_, limit=LIMIT_MAX)).items
            letter["traceback"] = traceback_in([event.payload.get("data") for event in events])
    if cli.out.as_json:
        cli.out.record(letter)
        return
    until = letter["last_lease_expires_at"]
    cli.out.facts(
        [
            ("reason", f"{letter['reason_code']}: {REASON_PHRASES[letter['reason_code']]}"),
            ("stage", letter["stage"]),
            ("attempts", str(letter["attempts"])),
            ("last owner", letter["last_owner"] or "nobody ever held it"),
            ("lease until", f"{datetime.fromisoformat(until):%Y-%m-%d %H:%M:%S} UTC" if until else ""),
        ]
    )
    cli.out.line()
    await show(cli, id_=id_)


async def requeue(
    cli: Cli,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="These jobs.")] = None,
    *,
    type_: TypeOption = None,
    reason: ReasonOption = None,
    correlation: CorrelationOption = None,
    lifecycle: LifecycleOption = None,
    all_: Annotated[bool, typer.Option("--all", help="Every dead letter.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be requeued.")] = False,
    yes: YesOption = False,
    limit: LimitOption = 1_000,
    cause: Annotated[str | None, typer.Option("--cause", help="Why, for the jobs' events.")] = None,
) -> int:
    """Run dead-lettered jobs again: those named, or all that a filter finds."""
    where = _filter(type_, reason, correlation, lifecycle)
    wanted = values.limit(limit, REQUEUE_MAX)
    filtered = all_ or any(value is not None for value in where.values())
    if bool(ids) == filtered:
        expected = "Name jobs, or filter with --type, --reason, --correlation, --lifecycle or --all; not both."
        raise InputError(detail=expected)
    async with cli.api() as api:
        chosen = list(ids or [])
        if filtered:
            letters = (await api.dead_letters.list(**where, limit=wanted)).items
            chosen = [letter.job_id for letter in reversed(letters)]
        if not (dry_run or chosen) and isinstance(api, LocalApi):  # a gateway refuses the list
            api.dead_letters.check_requeue()
        if not (dry_run or chosen or cli.out.as_json):
            types = [] if type_ is None else [one.type for one in (await api.dead_letters.list(limit=wanted)).items]
            cli.out.line(f"No dead letter is like that: nothing was requeued.{values.other_type(type_ or '', types)}")
            return 0
        if dry_run or not chosen:
            bound = " (--limit allows no more)" if len(chosen) == wanted else ""
            line = f"{counted(len(chosen), 'job')} would be requeued{bound}"
            cli.out.answer({"would_requeue": len(chosen)}, line)
            return 0
        if filtered and not yes:
            many = counted(len(chosen), "job")
            values.confirm(f"{many} would be requeued", f"Requeue {many}?")
        answers = list[dict[str, Any]]()
        for first in range(0, len(chosen), REQUEUE_CHUNK):
            answers += (await api.dead_letters.requeue(chosen[first : first + REQUEUE_CHUNK], reason=cause)).items
    code = report_requeued(cli, answers)
    if not cli.out.as_json and len(answers) > 1:
        cli.out.line(f"{sum(answer['requeued'] for answer in answers)} of {len(answers)} requeued")
    return code


def _filter(
    type_: str | None, reason: str | None, correlation: str | None, lifecycle: str | None
) -> dict[str, str | None]:
    """The filter as both implementations of the application take it; raises OptionInvalid."""
    if lifecycle not in {None, *WITH_LETTERS}:
        raise OptionInvalid(option="--lifecycle", value=lifecycle, expected=f"one of {', '.join(WITH_LETTERS)}")
    code = values.reason(reason)
    return {
        "type_": type_,
        "reason": None if code is None else code.value,
        "correlation_id": correlation,
        "lifecycle": lifecycle,
    }
