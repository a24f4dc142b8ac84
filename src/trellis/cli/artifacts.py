"""`trellis artifacts`: list and show the artifacts of queue jobs, and remove old ones."""

from typing import TYPE_CHECKING, Annotated

import typer

from trellis.artifacts.content import ArtifactType
from trellis.artifacts.keys import ArtifactNotFound
from trellis.artifacts.registry import CLEANUP_MAX
from trellis.artifacts.rows import ArtifactRow
from trellis.cli import values
from trellis.cli.artifact_output import artifact_type, check_days, confirm, print_cleanup, print_discarded, show_page
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, at_gateway, command, group
from trellis.cli.instances import open_for_command, operator
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, age

if TYPE_CHECKING:  # loads the whole platform, so only commands that open an instance import it
    from trellis.app.instance import Instance

PAGE = 200

TypeOption = Annotated[str | None, typer.Option("--type", help="Only this type, such as BRIEF.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    made = group(
        program, "artifacts", section="Agents", help_="What queue jobs left behind; clean up what is old.", lists=True
    )
    command(made, "list", over_http=at_gateway("list_artifacts"))(list_artifacts)
    command(made, "show", over_http=at_gateway("show_artifact"))(show_artifact)
    command(made, "discard", over_http=at_gateway("discard_artifact"))(discard)
    command(made, "cleanup", over_http=at_gateway("clean_up_artifacts"))(clean_up)


async def list_artifacts(
    cli: Cli,
    type_: TypeOption = None,
    job: Annotated[str | None, typer.Option("--job", metavar="ID", help="Only that of this job.")] = None,
    limit: LimitOption = LIMIT_DEFAULT,
    ids: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List finalized artifacts, newest first; those of jobs that are not complete are not shown."""
    wanted, kind = values.limit(limit, LIMIT_MAX), artifact_type(type_)
    async with open_for_command(cli) as instance:
        now = await instance.ledger.now()
        found = await _rows(instance, wanted, kind, job)
        records = [instance.artifacts.fields(row) for row in found]
    if cli.out.ids_alone(ids, [row.artifact_id for row in found]):
        return
    if cli.out.as_json:
        for record in records:
            cli.out.record(record)
        return
    columns = [
        ListingColumn[ArtifactRow](title="ARTIFACT", cell=lambda row: row.artifact_id),
        ListingColumn[ArtifactRow](title="TYPE", cell=lambda row: row.type.value),
        ListingColumn[ArtifactRow](title="AGE", cell=lambda row: age(row.changed_at, now), right=True),
        ListingColumn[ArtifactRow](title="OF", cell=lambda row: f"{row.agent_slug}: job {row.job_id}", gives_way=True),
    ]
    cli.out.listing(found, columns, empty="No artifacts.")


async def _rows(instance: "Instance", wanted: int, kind: ArtifactType | None, job: str | None) -> list[ArtifactRow]:
    found, cursor = list[ArtifactRow](), None
    while True:
        page = await instance.artifacts.page(
            limit=min(PAGE, wanted - len(found)), cursor=cursor, type_=kind, job_id=job
        )
        found += page.rows
        cursor = page.cursor
        if cursor is None or len(found) >= wanted:
            return found


async def show_artifact(
    cli: Cli, id_: Annotated[str, typer.Argument(metavar="ID", help="The artifact's id, art-….")]
) -> None:
    """One artifact as a page to read; --json prints the whole document."""
    async with open_for_command(cli) as instance:
        document = await instance.artifacts.read(id_)
    if document is None:
        raise ArtifactNotFound(artifact=id_)
    show_page(cli, document)


async def discard(
    cli: Cli,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The artifact's id, art-….")],
    reason: Annotated[str | None, typer.Option("--reason", help="Why, for the artifact's event.")] = None,
) -> None:
    """Discard a staged artifact that no job waits for; what is final stays, and no content is touched."""
    actor = operator(cli, "discard an artifact")
    async with open_for_command(cli) as instance:
        row = await instance.artifacts.give_up(actor, id_, cause=reason or f"discarded by {actor.name}")
    print_discarded(cli, row.artifact_id)


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
    actor = operator(cli, "clean up old artifacts")
    async with open_for_command(cli) as instance:
        artifacts = instance.artifacts
        done = await artifacts.cleanup(actor, older_than_days=older_than_days, limit=wanted, dry_run=True)
        if done.rows and not dry_run:
            confirm(len(done.rows), yes=yes)
            done = await artifacts.cleanup(actor, older_than_days=older_than_days, limit=wanted)
    print_cleanup(
        cli, [row.artifact_id for row in done.rows], days=done.older_than_days, dry_run=dry_run, more=done.more
    )
