"""`trellis jobs cancel|discard|run-now|prioritize`: change many jobs that a filter names. The same for one job of `trellis job`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trellis.cli import values
from trellis.cli.commands import (
    CorrelationOption,
    JobArgument,
    KeyOption,
    LimitOption,
    ParentOption,
    StatusOption,
    TypeOption,
    YesOption,
)
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
LifecycleOption = Annotated[
    str | None, typer.Option("--lifecycle", metavar="NAME", help="Only leased-job, queue-job or bus-job.")
]
CauseOption = Annotated[str | None, typer.Option("--cause", help="Why, for the jobs' events.")]
NewPriorityArgument = Annotated[str, typer.Argument(metavar="PRIORITY", help=f"The new priority: {PRIORITIES}.")]


@dataclass(frozen=True, kw_only=True)
class ChangeOptions:
    """Which jobs to change, and how to go about it."""

    type_: TypeOption = None
    correlation: CorrelationOption = None
    key: KeyOption = None
    parent: ParentOption = None
    priority: Annotated[str | None, typer.Option("--priority", help=f"Only jobs of this priority: {PRIORITIES}.")] = (
        None
    )
    before: Annotated[
        str | None,
        typer.Option("--submitted-before", metavar="WHEN", help="Only older jobs: a moment, or an age such as 2h."),
    ] = None
    after: Annotated[
        str | None,
        typer.Option("--submitted-after", metavar="WHEN", help="Only younger jobs: a moment, or an age such as 2h."),
    ] = None
    all_: Annotated[bool, typer.Option("--all", help="Every job that can be changed so.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them and show the oldest.")] = False
    yes: YesOption = False
    limit: LimitOption = LIMIT_OF_CHANGE
    cause: CauseOption = None

    def where(self, status: str | None, lifecycle: str | None) -> dict[str, Any]:
        """The filter as both implementations of the application take it, without its times."""
        state, of = values.state(status, values.lifecycle(lifecycle))
        given = {
            "type_": self.type_,
            "status": state,
            "lifecycle": of,
            "correlation_id": self.correlation,
            "concurrency_key": self.key,
            "parent_id": self.parent,
            "priority": self.priority,
            "everything": self.all_ or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def times(self, now: datetime) -> dict[str, datetime]:
        """The times of the filter."""
        named = {"submitted_before": self.before, "submitted_after": self.after}
        return {name: _moment(name, time, now) for name, time in named.items() if time is not None}


async def cancel_many(
    cli: Cli,
    ids: IdsArgument = None,
    *,
    status: StatusOption = None,
    lifecycle: LifecycleOption = None,
    options: ChangeOptions,
    hard: Annotated[
        bool, typer.Option("--hard", help="End held jobs now; their workers' results are refused.")
    ] = False,
) -> int:
    """Cancel jobs that have not ended: those named, or all that a filter finds. Held ones are asked to stop.

    A queue-job is cancelled by an operator: say --lifecycle queue-job.
    """
    how = {"mode": "hard" if hard else "soft"}
    return await _change(cli, JobChange.CANCEL, ids, options, options.where(status, lifecycle), how)


async def discard_many(
    cli: Cli,
    ids: IdsArgument = None,
    *,
    status: StatusOption = None,
    lifecycle: LifecycleOption = None,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="CODE", help="Only dead letters of this reason code.")
    ] = None,
    options: ChangeOptions,
) -> int:
    """Discard failed and dead-lettered jobs: those named, or all that a filter finds. Their dead letters are no longer listed.

    `trellis job requeue ID` takes a discarded job back, until retention removes it.
    """
    code = values.reason(reason)
    where = options.where(status, lifecycle) | ({} if code is None else {"reason_code": code.value})
    return await _change(cli, JobChange.DISCARD, ids, options, where, {})


async def run_now_many(cli: Cli, ids: IdsArgument = None, *, options: ChangeOptions) -> int:
    """End the delay of jobs that wait for their time or their next attempt: those named, or all that a filter finds."""
    return await _change(cli, JobChange.RUN_NOW, ids, options, options.where(None, None), {})


async def prioritize_many(
    cli: Cli, new_priority: NewPriorityArgument, ids: IdsArgument = None, *, options: ChangeOptions
) -> int:
    """Give waiting jobs another priority: those named, or all that a filter finds."""
    how = {"to_priority": new_priority}
    return await _change(cli, JobChange.PRIORITIZE, ids, options, options.where(None, None), how)


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


async def _change(
    cli: Cli,
    change: JobChange,
    ids: list[str] | None,
    options: ChangeOptions,
    where: dict[str, Any],
    how: dict[str, Any],
) -> int:
    filtered = bool(where) or options.before is not None or options.after is not None
    if bool(ids) == filtered or (ids and options.dry_run):
        raise InputError(detail=f"Name jobs, or filter with {FILTERS}; not both. --dry-run counts what a filter finds.")
    if ids:
        return await _change_named(cli, change, ids, how, options.cause)
    wanted = values.limit(options.limit, LIMIT_OF_CHANGE_MAX)
    async with cli.api() as api:
        now = await cli.ledger_time(api)
        where |= options.times(now)
        preview = await api.jobs.preview(change.value, **how, **where)
        nothing = not (preview.matched or preview.more)
        if nothing and not (options.dry_run and cli.out.as_json):
            line = f"No job is like that: nothing is to be {PARTICIPLES[change]}."
            cli.out.answer({"change": change.value, **NO_TOTALS}, line)
            return 0
        if options.dry_run:
            _report_preview(cli, change, preview, now, wanted)
            return 0
        if not options.yes:
            many = _many(preview.matched, wanted, more=preview.more)
            verb = change.value.replace("_", " ").capitalize()
            values.confirm(f"{many} would be {PARTICIPLES[change]}", f"{verb} {many}, the oldest first?")
        totals = await _run(cli, api, change, where, {**how, "reason": options.cause}, wanted)
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
