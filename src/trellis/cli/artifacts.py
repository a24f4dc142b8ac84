"""`trellis artifacts`: list and show the artifacts of queue jobs, and remove old ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trellis.artifacts.registry import CLEANUP_MAX
from trellis.cli import values
from trellis.cli.artifact_output import (
    artifact_type,
    check_days,
    confirm,
    print_cleanup,
    print_discarded,
    show_page,
    write_download,
)
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, age_column

TypeOption = Annotated[str | None, typer.Option("--type", help="Only this type, such as BRIEF.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    made = group(
        program, "artifacts", section="Agents", help_="What queue jobs left behind; clean up what is old.", lists=True
    )
    command(made, "list", gateway=True)(list_artifacts)
    command(made, "show", gateway=True)(show_artifact)
    command(made, "download", gateway=True)(download)
    command(made, "discard", gateway=True)(discard)
    command(made, "cleanup", gateway=True)(clean_up)


async def list_artifacts(
    cli: Cli,
    type_: TypeOption = None,
    job: Annotated[str | None, typer.Option("--job", metavar="ID", help="Only that of this job.")] = None,
    limit: LimitOption = LIMIT_DEFAULT,
    ids: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List finalized artifacts, newest first; those of jobs that are not complete are not shown."""
    wanted, kind = values.limit(limit, LIMIT_MAX), artifact_type(type_)
    async with cli.api() as api:
        now = await cli.ledger_time(api)
        chosen = None if kind is None else kind.value
        found = (await api.artifacts.list(type_=chosen, job_id=job, limit=wanted)).items
    if cli.out.ids_alone(ids, [one.artifact_id for one in found]):
        return
    columns = [
        ListingColumn[Mapping[str, Any]](title="ARTIFACT", cell=lambda one: one["artifact_id"]),
        ListingColumn[Mapping[str, Any]](title="TYPE", cell=lambda one: one["type"]),
        age_column("FINALIZED", now, of="finalized_at"),
        ListingColumn[Mapping[str, Any]](
            title="OF", cell=lambda one: f"{one['agent_slug']}: job {one['job_id']}", gives_way=True
        ),
    ]
    cli.out.listing([one.model_dump(mode="json") for one in found], columns, empty="No artifacts.")


async def show_artifact(
    cli: Cli, id_: Annotated[str, typer.Argument(metavar="ID", help="The artifact's id, art-….")]
) -> None:
    """One artifact as a page to read; --json prints the whole document."""
    async with cli.api() as api:
        found = await api.artifacts.get(id_)
    show_page(cli, found.model_dump(mode="json"))


async def download(
    cli: Cli,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The artifact's id, art-….")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file, not to standard output.")
    ] = None,
) -> None:
    """The stored bytes of an artifact, unchanged; their SHA-256, on standard error, is the one in its job's result.

    With --json the SHA-256 and the size are printed instead of the bytes.
    """
    async with cli.api() as api:
        body = await api.artifacts.content(id_)
    write_download(cli, id_, body, output)


async def discard(
    cli: Cli,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The artifact's id, art-….")],
    reason: Annotated[str | None, typer.Option("--reason", help="Why, for the artifact's event.")] = None,
) -> None:
    """Discard a staged artifact that no job waits for; what is final stays, and no content is touched."""
    async with cli.api() as api:
        done = await api.artifacts.discard(id_, reason=reason)
    print_discarded(cli, done.artifact_id)


async def clean_up(
    cli: Cli,
    *,
    older_than_days: Annotated[
        int | None, typer.Option("--older-than-days", metavar="N", help="Finalized more than N days ago.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which they are.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    limit: LimitOption = CLEANUP_MAX,
) -> None:
    """Remove old artifacts for good, the oldest first; each is one audited event.

    Without --older-than-days the setting `artifact_days` says how old (90 days). Younger ones are never removed. Nobody can read
    them from then on; their bytes are deleted when that is recorded, which a running `trellis up` does at once.
    """
    wanted = values.limit(limit, CLEANUP_MAX)
    check_days(older_than_days)
    async with cli.api() as api:
        done = await api.artifacts.cleanup(older_than_days=older_than_days, dry_run=True, limit=wanted)
        if done.items and not dry_run:
            confirm(len(done.items), yes=yes)
            done = await api.artifacts.cleanup(older_than_days=older_than_days, limit=wanted)
    ids = [one.artifact_id for one in done.items]
    print_cleanup(cli, ids, days=done.older_than_days, dry_run=dry_run, more=done.more)
