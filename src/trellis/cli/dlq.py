"""`trellis dlq`: list and requeue dead letters."""

import sys
from dataclasses import replace
from typing import Annotated

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.jobs import print_whole, report_requeued
from trellis.cli.output import ListingColumn, age, as_record
from trellis.engine.errors import InputError, OptionInvalid, Refused
from trellis.engine.event_data import last_traceback
from trellis.engine.jobs import Moved, NotMoved
from trellis.engine.ledger import Ledger
from trellis.engine.records import DeadLetter, JobFilter
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.dead_letters import WITH_LETTERS, dead_letters
from trellis.operations.doctor import without_cancelled
from trellis.operations.explain import REASON_PHRASES, counted

PAGE_MAX = 500
REQUEUE_CHUNK = 200
REQUEUE_MAX = 100_000
COUNTED_MAX = 100
"""Counting limit for failed queue jobs without a dead letter."""

TypeOption = Annotated[str | None, typer.Option("--type", help="Only this job type.")]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="CODE", help="Only this reason: exhausted_retries, timeout, …")
]
LifecycleOption = Annotated[
    str | None, typer.Option("--lifecycle", metavar="NAME", help="Only leased-job, or only queue-job.")
]
CorrelationOption = Annotated[str | None, typer.Option("--correlation", help="Only what belongs to this.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    dlq = group(program, "dlq", section="Queues", help_="Dead letters: list, show, requeue.", lists=True)
    command(dlq, "list")(list_letters)
    command(dlq, "show")(show_letter)
    command(dlq, "requeue")(requeue)


async def list_letters(
    cli: Cli,
    type_: TypeOption = None,
    reason: ReasonOption = None,
    correlation: CorrelationOption = None,
    lifecycle: LifecycleOption = None,
    limit: LimitOption = LIMIT_DEFAULT,
    cursor: Annotated[str | None, typer.Option("--cursor", metavar="TEXT", help="Go on after an earlier page.")] = None,
    ids: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List dead letters that nobody requeued, newest first: dead-lettered jobs, and DEAD jobs of the job queue.

    Jobs of the job queue that failed and are not DEAD yet wait for a person too, and are counted beside.
    """
    where = _filter(type_, reason, correlation, lifecycle)
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.open() as ledger:
        now = await ledger.now()
        found, more = await _letters(ledger, where, wanted, cursor)
        elsewhere = [] if reason or lifecycle == LEASED_JOB.name else await _without_letter(ledger, where)
    columns = [
        ListingColumn[DeadLetter](title="JOB", cell=lambda letter: letter.job_id),
        ListingColumn[DeadLetter](title="REASON", cell=lambda letter: Text(letter.reason_code.value, style="red")),
        ListingColumn[DeadLetter](title="AGE", cell=lambda letter: age(letter.at, now), right=True),
        ListingColumn[DeadLetter](
            title="TYPE: ERROR", cell=lambda letter: f"{letter.type}: {letter.last_error}", gives_way=True
        ),
    ]
    if not cli.out.ids_alone(ids, [letter.job_id for letter in found]):
        cli.out.listing(found, columns, empty="No dead letters.")
    if more is not None:
        cli.out.note(f"there are more: --cursor {more}")
    for name, state, count in elsewhere:
        many = f"{counted(count, name)}{' or more' if count == COUNTED_MAX else ''}"
        are = "is" if count == 1 else "are"
        cli.out.note(f"{many} {are} {state}, without a dead letter: trellis jobs --lifecycle {name} --status {state}")


async def show_letter(cli: Cli, id_: Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]) -> None:
    """One dead letter with all it says, and its job."""
    async with cli.local_api() as api:
        whole, now = await api.jobs.get(id_), await api.now()
    job, letter, events = whole.job, whole.letter, whole.events
    if letter is None:
        raise Refused(detail=f"Job {id_} is {job.state} and has no dead letter; `trellis job explain {id_}` says more.")
    if cli.out.as_json:
        cli.out.record({**as_record(letter), "traceback": last_traceback(events)})
        return
    cli.out.facts(
        [
            ("reason", f"{letter.reason_code.value}: {REASON_PHRASES[letter.reason_code.value]}"),
            ("stage", letter.stage.value),
            ("attempts", str(letter.attempts)),
            ("last owner", letter.last_owner or "nobody ever held it"),
            (
                "lease until",
                f"{letter.last_lease_expires_at:%Y-%m-%d %H:%M:%S} UTC" if letter.last_lease_expires_at else "",
            ),
        ]
    )
    cli.out.line()
    print_whole(cli, whole, now)


async def requeue(
    cli: Cli,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="These jobs.")] = None,
    *,
    type_: TypeOption = None,
    reason: ReasonOption = None,
    correlation: CorrelationOption = None,
    lifecycle: LifecycleOption = None,
    all_: Annotated[bool, typer.Option("--all", help="Every dead letter.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many it would be.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    limit: LimitOption = 1_000,
    cause: Annotated[str | None, typer.Option("--cause", help="Why, for the jobs' events.")] = None,
) -> int:
    """Run dead-lettered jobs again: those named, or all that a filter finds."""
    where = _filter(type_, reason, correlation, lifecycle)
    wanted = values.limit(limit, REQUEUE_MAX)
    filtered = all_ or where != JobFilter()
    if bool(ids) == filtered:
        expected = "Name jobs, or filter with --type, --reason, --correlation, --lifecycle or --all; not both."
        raise InputError(detail=expected)
    async with cli.connect(operator=not dry_run) as trellis:
        chosen = list(ids or [])
        if filtered:
            letters, _ = await _letters(trellis.ledger, where, wanted, None)
            chosen = [letter.job_id for letter in reversed(letters)]
        if dry_run or not chosen:
            return _counted(cli, len(chosen), wanted)
        if filtered and not yes:
            _ask(len(chosen))
        answers: list[Moved | NotMoved] = []
        for first in range(0, len(chosen), REQUEUE_CHUNK):
            answers += await trellis.requeue(chosen[first : first + REQUEUE_CHUNK], cause=cause)
    code = report_requeued(cli, answers)
    if not cli.out.as_json and len(answers) > 1:
        cli.out.line(f"{sum(isinstance(answer, Moved) for answer in answers)} of {len(answers)} requeued")
    return code


def _counted(cli: Cli, count: int, most: int) -> int:
    if cli.out.as_json:
        cli.out.record({"would_requeue": count})
    else:
        bound = " (--limit allows no more)" if count == most else ""
        cli.out.line(f"{counted(count, 'job')} would be requeued{bound}")
    return 0


def _ask(count: int) -> None:
    if not sys.stdin.isatty():
        raise InputError(
            detail=f"{counted(count, 'job')} would be requeued: say --yes to do it, --dry-run to count only."
        )
    typer.confirm(f"Requeue {counted(count, 'job')}?", abort=True, err=True)


async def _without_letter(ledger: Ledger, where: JobFilter) -> list[tuple[str, str, int]]:
    """Failed queue jobs that wait for an operator: lifecycle, state and number."""
    page = await ledger.jobs(replace(where, lifecycle=QUEUE_JOB.name, state="FAILED"), limit=COUNTED_MAX)
    waiting = len(without_cancelled(page.jobs))
    return [(QUEUE_JOB.name, "FAILED", waiting)] if waiting else []


def _filter(type_: str | None, reason: str | None, correlation: str | None, lifecycle: str | None) -> JobFilter:
    if lifecycle not in {None, *WITH_LETTERS}:
        raise OptionInvalid(option="--lifecycle", value=lifecycle, expected=f"one of {', '.join(WITH_LETTERS)}")
    return JobFilter(type=type_, reason_code=values.reason(reason), correlation_id=correlation, lifecycle=lifecycle)


async def _letters(
    ledger: Ledger, where: JobFilter, wanted: int, cursor: str | None
) -> tuple[list[DeadLetter], str | None]:
    """Up to `wanted` letters, and the cursor of the next ones."""
    found: list[DeadLetter] = []
    while True:
        page = await dead_letters(ledger, where, limit=min(PAGE_MAX, wanted - len(found)), cursor=cursor)
        found += page.letters
        cursor = page.cursor
        if cursor is None or len(found) >= wanted:
            return found, cursor
