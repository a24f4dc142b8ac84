"""`trellis retention`: what is kept of ended jobs, and removing now what the settings let go."""

from dataclasses import replace
from typing import Annotated

import typer

from trellis.cli.commands import ReasonOption, command, group
from trellis.cli.invocation import Cli, refuse_missing
from trellis.cli.output import ListingColumn
from trellis.engine.closing import closing
from trellis.engine.records import JobFilter, PlannedRemoval, RetentionReport
from trellis.engine.text import counted, duration
from trellis.ledgers import open_ledger
from trellis.lifecycles.artifact import ARTIFACT

PASSES_MAX = 1_000_000
COUNTED_MAX = 1_000
"""Finalized artifacts that are counted at most."""
FINALIZED = "finalized"


def add_to(program: typer.Typer) -> None:
    retention = group(
        program, "retention", section="Ledger", help_="What is kept of ended jobs: see what would go, let it go now."
    )
    command(retention, "plan")(plan)
    command(retention, "apply")(apply)


async def plan(cli: Cli) -> None:
    """Show what retention would remove now: ended jobs by lifecycle and state, the oldest, and what holds them back.

    TRELLIS_RETENTION_DAYS and TRELLIS_RETENTION_STATES decide. Dead letters and DEAD jobs stay until a setting names their state. What leaves the ledger stays in
    the object store: documents of runs, and audit records. Finalized artifacts are no ended jobs: they stay until `trellis artifacts cleanup`.
    """
    async with cli.open() as ledger:
        rows = await ledger.plan_retention(cli.settings.retention)
        where = JobFilter(lifecycle=ARTIFACT.name, state=FINALIZED)
        artifacts = len((await ledger.jobs(where, limit=COUNTED_MAX)).jobs)
    cli.out.listing(rows, COLUMNS, empty="No job has ended yet.")
    if artifacts:
        many = f"{counted(artifacts, 'finalized artifact')}{' or more' if artifacts == COUNTED_MAX else ''}"
        cli.out.note(
            f"{many} stay for ever: an artifact is a result, and retention removes no result of a queue job;"
            " `trellis artifacts cleanup` does"
        )


def _held(row: PlannedRemoval) -> str:
    held = {
        f"{row.dead_letters} by their dead letter": row.dead_letters,
        f"{row.keys} by an idempotency key or a given id, which must answer for 24 hours": row.keys,
        f"{row.unsealed} not sealed yet": row.unsealed,
        f"{row.unread} unread by a follower": row.unread,
    }
    return ", ".join(text for text, count in held.items() if count)


COLUMNS = (
    ListingColumn[PlannedRemoval](title="LIFECYCLE", cell=lambda row: row.lifecycle),
    ListingColumn[PlannedRemoval](title="STATUS", cell=lambda row: row.state),
    ListingColumn[PlannedRemoval](
        title="KEPT", cell=lambda row: "for ever" if row.keep_s is None else duration(row.keep_s), right=True
    ),
    ListingColumn[PlannedRemoval](title="JOBS", cell=lambda row: str(row.ended), right=True),
    ListingColumn[PlannedRemoval](
        title="OLDEST", cell=lambda row: "" if row.oldest is None else f"{row.oldest:%Y-%m-%d %H:%M}"
    ),
    ListingColumn[PlannedRemoval](title="WOULD GO", cell=lambda row: str(row.removable), right=True),
    ListingColumn[PlannedRemoval](title="HELD BACK", cell=_held, wraps=True),
)


async def apply(
    cli: Cli,
    reason: ReasonOption = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Jobs per transaction.")] = 500,
) -> None:
    """Remove now what the settings let go, also what an earlier pass kept for another day.

    `trellis up` and every worker do this all the time. Each transaction leaves an audit record: who removed which jobs, how many of each lifecycle and state, and up
    to which time.
    """
    actor = cli.operator("remove finished work")
    refuse_missing(cli.url)
    options = replace(cli.settings.retention, batch=batch, cause=reason or "trellis retention apply")
    removed = RetentionReport()
    async with closing(await open_ledger(cli.url)) as ledger:
        for number in range(PASSES_MAX):
            report = await ledger.retain(replace(options, from_the_start=not number), by=actor)
            removed = replace(
                removed,
                jobs=removed.jobs + report.jobs,
                events=removed.events + report.events,
                acts=removed.acts + report.acts,
                unread=removed.unread + report.unread,
            )
            if not report.more:
                break
    if cli.out.as_json:
        cli.out.record({"jobs": removed.jobs, "events": removed.events, "acts": removed.acts, "unread": removed.unread})
    else:
        cli.out.line(f"{counted(removed.jobs, 'job')} removed with {counted(removed.events, 'event')}")
        cli.out.note("`trellis retention plan` shows what is kept, and why")
