"""`trellis jobs cancel|discard|run-now|prioritize`: change many jobs that a filter names. The same for one job of `trellis job`."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trellis.cli import values
from trellis.cli.commands import LimitOption
from trellis.cli.invocation import Cli
from trellis.cli.output import RecordColumn, age_column, counting
from trellis.engine.errors import InputError, OptionInvalid
from trellis.engine.job_changes import CHANGED_MAX, PARTICIPLES, JobChange
from trellis.engine.text import counted

if TYPE_CHECKING:  # HTTP is imported only when it is used
    from trellis.api.local import LocalApi
    from trellis.http.client import GatewayClient
    from trellis.http.operation_shapes import JobsChanged, JobsPreview

LIMIT_OF_CHANGE = 10_000
LIMIT_OF_CHANGE_MAX = 1_000_000
SKIPPED_SHOWN_MAX = 10
NO_TOTALS: Mapping[str, Any] = MappingProxyType({"changed": 0, "requested": 0, "skipped": 0, "next_cursor": None})
"""The counts of a change before its first batch."""
FILTERS = (
    "--type, --status, --lifecycle, --correlation, --concurrency-key, --parent, --reason, --priority, "
    "--submitted-before, --submitted-after or --all"
)
PRIORITIES = "critical, interactive or batch"

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="These jobs, instead of a filter.")]
JobArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Only this job type.")]
StatusOption = Annotated[str | None, typer.Option("--status", "--state", help="Only jobs of this status.")]
LifecycleOption = Annotated[
    str | None, typer.Option("--lifecycle", metavar="NAME", help="Only leased-job, queue-job or bus-job.")
]
CorrelationOption = Annotated[str | None, typer.Option("--correlation", help="Only those with this correlation id.")]
KeyOption = Annotated[str | None, typer.Option("--concurrency-key", help="Only jobs of this key.")]
ParentOption = Annotated[str | None, typer.Option("--parent", metavar="ID", help="Only jobs that this one caused.")]
ReasonCodeOption = Annotated[
    str | None, typer.Option("--reason", metavar="CODE", help="Only dead letters of this reason code.")
]
PriorityOption = Annotated[str | None, typer.Option("--priority", help=f"Only jobs of this priority: {PRIORITIES}.")]
BeforeOption = Annotated[
    str | None,
    typer.Option("--submitted-before", metavar="WHEN", help="Only older jobs: a moment, or an age such as 2h."),
]
AfterOption = Annotated[
    str | None,
    typer.Option("--submitted-after", metavar="WHEN", help="Only younger jobs: a moment, or an age such as 2h."),
]
AllOption = Annotated[bool, typer.Option("--all", help="Every job that can be changed so.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count them and show the oldest.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
CauseOption = Annotated[str | None, typer.Option("--cause", help="Why, for the jobs' events.")]
HardOption = Annotated[bool, typer.Option("--hard", help="End held jobs now; their workers' results are refused.")]
NewPriorityArgument = Annotated[str, typer.Argument(metavar="PRIORITY", help=f"The new priority: {PRIORITIES}.")]


async def cancel_many(
    cli: Cli,
    ids: IdsArgument = None,
    *,
    type_: TypeOption = None,
    status: StatusOption = None,
    lifecycle: LifecycleOption = None,
    correlation: CorrelationOption = None,
    key: KeyOption = None,
    parent: ParentOption = None,
    priority: PriorityOption = None,
    before: BeforeOption = None,
    after: AfterOption = None,
    all_: AllOption = False,
    hard: HardOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    limit: LimitOption = LIMIT_OF_CHANGE,
    cause: CauseOption = None,
) -> int:
    """Cancel jobs that have not ended: those named, or all that a filter finds. Held ones are asked to stop.

    A queue-job is cancelled by an operator: say --lifecycle queue-job.
    """
    where = _where(type_, status, lifecycle, correlation, key, parent, priority, all_=all_)
    how = {"mode": "hard" if hard else "soft"}
    return await _change(cli, JobChange.CANCEL, ids, where, (before, after), how, dry_run, yes, limit, cause)


async def discard_many(
    cli: Cli,
    ids: IdsArgument = None,
    *,
    type_: TypeOption = None,
    status: StatusOption = None,
    lifecycle: LifecycleOption = None,
    correlation: CorrelationOption = None,
    key: KeyOption = None,
    parent: ParentOption = None,
    reason: ReasonCodeOption = None,
    priority: PriorityOption = None,
    before: BeforeOption = None,
    after: AfterOption = None,
    all_: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    limit: LimitOption = LIMIT_OF_CHANGE,
    cause: CauseOption = None,
) -> int:
    """Discard failed and dead-lettered jobs: those named, or all that a filter finds. Their dead letters are no longer listed.

    `trellis job requeue ID` takes a discarded job back, until retention removes it.
    """
    code = values.reason(reason)
    where = _where(type_, status, lifecycle, correlation, key, parent, priority, all_=all_)
    where |= {} if code is None else {"reason_code": code.value}
    return await _change(cli, JobChange.DISCARD, ids, where, (before, after), {}, dry_run, yes, limit, cause)


async def run_now_many(
    cli: Cli,
    ids: IdsArgument = None,
    *,
    type_: TypeOption = None,
    correlation: CorrelationOption = None,
    key: KeyOption = None,
    parent: ParentOption = None,
    priority: PriorityOption = None,
    before: BeforeOption = None,
    after: AfterOption = None,
    all_: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    limit: LimitOption = LIMIT_OF_CHANGE,
    cause: CauseOption = None,
) -> int:
    """End the delay of jobs that wait for their time or their next attempt: those named, or all that a filter finds."""
    where = _where(type_, None, None, correlation, key, parent, priority, all_=all_)
    return await _change(cli, JobChange.RUN_NOW, ids, where, (before, after), {}, dry_run, yes, limit, cause)


async def prioritize_many(
    cli: Cli,
    new_priority: NewPriorityArgument,
    ids: IdsArgument = None,
    *,
    type_: TypeOption = None,
    correlation: CorrelationOption = None,
    key: KeyOption = None,
    parent: ParentOption = None,
    priority: PriorityOption = None,
    before: BeforeOption = None,
    after: AfterOption = None,
    all_: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    limit: LimitOption = LIMIT_OF_CHANGE,
    cause: CauseOption = None,
) -> int:
    """Give waiting jobs another priority: those named, or all that a filter finds."""
    where = _where(type_, None, None, correlation, key, parent, priority, all_=all_)
    how = {"to_priority": new_priority}
    return await _change(cli, JobChange.PRIORITIZE, ids, where, (before, after), how, dry_run, yes, limit, cause)


# --- one job ---------------------------------------------------------------------------------------------------------


async def discard(cli: Cli, id_: JobArgument, cause: CauseOption = None) -> int:
    """Discard a failed or dead-lettered job: its dead letter is no longer listed."""
    return await _change_named(cli, JobChange.DISCARD, [id_], {}, cause)


async def run_now(cli: Cli, id_: JobArgument, cause: CauseOption = None) -> int:
    """End the delay of a job that waits for its time or its next attempt."""
    return await _change_named(cli, JobChange.RUN_NOW, [id_], {}, cause)


async def prioritize(cli: Cli, id_: JobArgument, new_priority: NewPriorityArgument, cause: CauseOption = None) -> int:
    """Give a waiting job another priority."""
    return await _change_named(cli, JobChange.PRIORITIZE, [id_], {"to_priority": new_priority}, cause)


async def _change_named(cli: Cli, change: JobChange, ids: list[str], how: dict[str, Any], cause: str | None) -> int:
    skipped = 0
    async with cli.api() as api:
        for first in range(0, len(ids), CHANGED_MAX):
            chosen = ids[first : first + CHANGED_MAX]
            done = await api.jobs.change(change.value, job_ids=chosen, reason=cause, **how)
            skipped += done.skipped
            _report_jobs(cli, change, done)
    return 1 if skipped else 0


def _report_jobs(cli: Cli, change: JobChange, done: "JobsChanged") -> None:
    for job in done.items:
        if cli.out.as_json:
            cli.out.record(job.model_dump())
        elif job.outcome == "skipped":
            cli.out.error(f"{job.job_id} stays as it is{f', {job.status}' if job.status else ''}: {job.reason}")
        elif job.outcome == "requested":
            cli.out.line(f"{job.job_id} is {job.status}; its holder was asked to stop")
        elif PARTICIPLES[change] == job.status.lower():
            cli.out.line(f"{job.job_id} is {job.status}")
        else:
            cli.out.line(f"{job.job_id} was {PARTICIPLES[change]}; it is {job.status}")


# --- many jobs -------------------------------------------------------------------------------------------------------


def _where(
    type_: str | None,
    status: str | None,
    lifecycle: str | None,
    correlation: str | None,
    key: str | None,
    parent: str | None,
    priority: str | None,
    *,
    all_: bool,
) -> dict[str, Any]:
    """The filter as both implementations of the application take it, without its times."""
    state, of = values.state(status, values.lifecycle(lifecycle))
    given = {
        "type_": type_,
        "status": state,
        "lifecycle": of,
        "correlation_id": correlation,
        "concurrency_key": key,
        "parent_id": parent,
        "priority": priority,
    }
    return {name: value for name, value in given.items() if value is not None} | ({"everything": True} if all_ else {})


async def _change(  # noqa: PLR0917 - what the four commands have in common
    cli: Cli,
    change: JobChange,
    ids: list[str] | None,
    where: dict[str, Any],
    times: tuple[str | None, str | None],
    how: dict[str, Any],
    dry_run: bool,  # noqa: FBT001 - a flag as it was given
    yes: bool,  # noqa: FBT001 - a flag as it was given
    limit: int,
    cause: str | None,
) -> int:
    filtered = bool(where) or any(time is not None for time in times)
    if bool(ids) == filtered or (ids and dry_run):
        raise InputError(detail=f"Name jobs, or filter with {FILTERS}; not both. --dry-run counts what a filter finds.")
    if ids:
        return await _change_named(cli, change, ids, how, cause)
    wanted = values.limit(limit, LIMIT_OF_CHANGE_MAX)
    async with cli.api() as api:
        now = await cli.ledger_time(api)
        named = zip(("submitted_before", "submitted_after"), times, strict=True)
        where |= {name: _moment(name, time, now) for name, time in named if time is not None}
        preview = await api.jobs.preview(change.value, **how, **where)
        nothing = not (preview.matched or preview.more)
        if nothing and not (dry_run and cli.out.as_json):
            line = f"No job is like that: nothing is to be {PARTICIPLES[change]}."
            cli.out.answer({"change": change.value, **NO_TOTALS}, line)
            return 0
        if dry_run:
            _report_preview(cli, change, preview, now, wanted)
            return 0
        if not yes:
            many = _many(preview.matched, wanted, more=preview.more)
            verb = change.value.replace("_", " ").capitalize()
            values.confirm(f"{many} would be {PARTICIPLES[change]}", f"{verb} {many}, the oldest first?")
        totals = await _run(cli, api, change, where, {**how, "reason": cause}, wanted)
    _report_totals(cli, change, totals, wanted)
    return 0


async def _run(
    cli: Cli,
    api: "GatewayClient | LocalApi",
    change: JobChange,
    where: dict[str, Any],
    how: dict[str, Any],
    limit: int,
) -> dict[str, Any]:
    """Change batch after batch. What was changed before an interruption stays changed."""
    from asyncio import CancelledError

    totals = dict(NO_TOTALS)
    shown = 0
    with counting(cli.out) as progress:
        try:
            while (taken := totals["changed"] + totals["requested"] + totals["skipped"]) < limit:
                size, cursor = min(CHANGED_MAX, limit - taken), totals["next_cursor"]
                done = await api.jobs.change(change.value, limit=size, cursor=cursor, **how, **where)
                for count in ("changed", "requested", "skipped"):
                    totals[count] += getattr(done, count)
                totals["next_cursor"] = done.next_cursor
                progress(f"jobs {PARTICIPLES[change]}", totals["changed"] + totals["requested"])
                for job in done.items:
                    if job.outcome == "skipped" and shown < SKIPPED_SHOWN_MAX:
                        shown += 1
                        cli.out.note(f"{job.job_id} was skipped: {job.reason}")
                if done.next_cursor is None:
                    break
        except CancelledError:
            cli.out.note(f"stopped after {counted(totals['changed'], 'job')}; the same command goes on with the rest")
            raise
    return totals


def _moment(name: str, text: str, now: datetime) -> datetime:
    """A moment that was given as such, or as an age."""
    option = f"--{name.replace('_', '-')}"
    try:
        ago = values.seconds(option, text)
    except OptionInvalid:
        ago = None
    if ago is not None:
        return now - timedelta(seconds=ago)
    moment = values.moment(option, text)
    assert moment is not None, "a text was given"
    return moment


def _many(matched: int, limit: int, *, more: bool) -> str:
    every = f"{'more than ' if more else ''}{counted(matched, 'job')}"
    return f"{limit} of {every}" if matched + more > limit else every


def _report_preview(cli: Cli, change: JobChange, preview: "JobsPreview", now: datetime, limit: int) -> None:
    if cli.out.as_json:
        cli.out.record(preview.model_dump())
        return
    many = _many(preview.matched, limit, more=preview.more)
    cli.out.line(f"{many} would be {PARTICIPLES[change]}; the oldest:")
    columns = [
        RecordColumn(title="JOB", cell=lambda job: job["job_id"]),
        RecordColumn(title="STATUS", cell=lambda job: job["status"]),
        RecordColumn(title="PRIORITY", cell=lambda job: job["priority"]),
        age_column(now),
        RecordColumn(title="TYPE", cell=lambda job: job["type"], gives_way=True),
    ]
    cli.out.listing([job.model_dump() for job in preview.examples[:limit]], columns, empty="")


def _report_totals(cli: Cli, change: JobChange, totals: dict[str, Any], limit: int) -> None:
    if cli.out.as_json:
        cli.out.record({"change": change.value, **totals})
        return
    stopping = f", {totals['requested']} asked to stop" if totals["requested"] else ""
    skipped = f", {totals['skipped']} skipped" if totals["skipped"] else ""
    cli.out.line(f"{counted(totals['changed'], 'job')} {PARTICIPLES[change]}{stopping}{skipped}")
    if totals["next_cursor"] is not None:
        cli.out.note(f"--limit {limit} ended it; repeat the command for the rest")
