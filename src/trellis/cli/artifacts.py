"""`trellis artifacts`: list and show the artifacts of queue jobs, and remove old ones."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trellis.artifacts.content import ArtifactType
from trellis.artifacts.registry import CLEANUP_MAX
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, YesOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import RecordColumn, age_column
from trellis.engine.errors import OptionInvalid
from trellis.engine.text import counted
from trellis.storage.objects.canonical_json import sha256

ArtifactArgument = Annotated[str, typer.Argument(metavar="ID", help="The artifact's id, art-….")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Only this type, such as BRIEF.")]
DROPPED = frozenset({"ungrounded-dropped", "citations-dropped"})
"""Tags of an artifact that lacks a part of the provider's answer."""


def add_to(program: typer.Typer) -> None:
    commands = group(
        program,
        "artifacts",
        section="Agents",
        help_="Artifacts of queue jobs: list, show, download, discard, clean up.",
        lists=True,
    )
    command(commands, "list", gateway=True)(list_artifacts)
    command(commands, "show", gateway=True)(show_artifact)
    command(commands, "download", gateway=True)(download)
    command(commands, "discard", gateway=True)(discard)
    command(commands, "cleanup", gateway=True)(clean_up)


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
        chosen = None if kind is None else kind.value
        artifacts = (await api.artifacts.list(type_=chosen, job_id=job, limit=wanted)).items
        now = await cli.ledger_time(api)
    if cli.out.ids_alone(ids, [one.artifact_id for one in artifacts]):
        return
    columns = [
        RecordColumn(title="ARTIFACT", cell=lambda one: one["artifact_id"]),
        RecordColumn(title="TYPE", cell=lambda one: one["type"]),
        age_column(now, of="finalized_at"),
        RecordColumn(title="OF", cell=lambda one: f"{one['agent_slug']}: job {one['job_id']}", gives_way=True),
    ]
    cli.out.listing([one.model_dump(mode="json") for one in artifacts], columns, empty="No artifacts.")


async def show_artifact(cli: Cli, id_: ArtifactArgument) -> None:
    """One artifact as a page to read; --json prints the whole document."""
    async with cli.api() as api:
        artifact = await api.artifacts.get(id_)
    show_page(cli, artifact.model_dump(mode="json"))


async def download(
    cli: Cli,
    id_: ArtifactArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file, not to standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --output.")] = False,  # noqa: FBT002
) -> None:
    """The stored bytes of an artifact, unchanged; their SHA-256, on standard error, is the one in its job's result.

    With --json the SHA-256 and the size are printed instead of the bytes. A file that exists is overwritten only with --force.
    """
    async with cli.api() as api:
        body = await api.artifacts.content(id_)
    write_download(cli, id_, body, output, force=force)


async def discard(
    cli: Cli,
    id_: ArtifactArgument,
    reason: Annotated[str | None, typer.Option("--reason", help="Why, for the artifact's event.")] = None,
) -> None:
    """Discard a staged artifact that no job waits for; what is final stays, and no content is touched."""
    async with cli.api() as api:
        done = await api.artifacts.discard(id_, reason=reason)
    record = {"artifact_id": done.artifact_id, "status": "discarded"}
    cli.out.answer(record, f"{done.artifact_id} discarded")


async def clean_up(
    cli: Cli,
    *,
    older_than_days: Annotated[
        int | None, typer.Option("--older-than-days", metavar="N", help="Finalized more than N days ago.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    yes: YesOption = False,
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
            if not yes:
                many = counted(len(done.items), "artifact")
                values.confirm(f"{many} would be removed", f"Remove {many} for good?", dry_run="see them")
            done = await api.artifacts.cleanup(older_than_days=older_than_days, limit=wanted)
    ids = [one.artifact_id for one in done.items]
    print_cleanup(cli, ids, days=done.older_than_days, dry_run=dry_run, more=done.more)


def write_download(cli: Cli, artifact_id: str, body: bytes, output: Path | None, *, force: bool) -> None:
    """Write the bytes of an artifact to a file or to standard output, and report their SHA-256."""
    if output is not None:
        _write_file(output, body, force=force)
    digest = sha256(body)
    if cli.out.as_json:
        file = None if output is None else str(output)
        cli.out.record({"artifact_id": artifact_id, "sha256": digest, "size": len(body), "file": file})
        return
    if output is None:
        cli.out.raw(body)
    cli.out.note(f"sha256 {digest}, {len(body)} bytes" + (f", in {output}" if output else ""))


def _write_file(output: Path, body: bytes, *, force: bool) -> None:
    """Write a new file, or with `force` any; raises OptionInvalid. A device or a pipe holds nothing to lose."""
    try:
        with output.open("wb" if force or (output.exists() and not output.is_file()) else "xb") as file:
            file.write(body)
    except FileExistsError:
        expected = "the file exists already; name another one, or give --force to overwrite it"
        raise OptionInvalid(option="--output", value=str(output), expected=expected) from None
    except OSError as error:
        expected = f"it cannot be written ({error.strerror}); name a file in a folder that you may write"
        raise OptionInvalid(option="--output", value=str(output), expected=expected) from None


def print_cleanup(cli: Cli, ids: Sequence[str], *, days: int, dry_run: bool, more: bool) -> None:
    """Report what a cleanup removed, or would remove."""
    if cli.out.as_json:
        cli.out.record({"older_than_days": days, "dry_run": dry_run, "artifacts": list(ids), "more": more})
        return
    for artifact_id in ids:
        cli.out.line(artifact_id)
    would = "would be removed" if dry_run else "removed"
    cli.out.line(f"{counted(len(ids), 'artifact')} older than {counted(days, 'day')} {would}")
    if ids and not dry_run:
        cli.out.note("their bytes are deleted when that is recorded: `trellis up` does both")
    if more:
        cli.out.note("there are more: ask again, or with a higher --limit")


def show_page(cli: Cli, document: dict[str, Any]) -> None:
    """Print an artifact as a page, or with --json as the whole document."""
    if cli.out.as_json:
        cli.out.record(document)
        return
    content: dict[str, Any] = document["content"]
    cli.out.line(content.get("title") or "Preprocessed proposal", style="bold")
    about = f"{document['type']} of {document['agent_slug']}, {document['finalized_at']}, job {document['job_id']}"
    cli.out.prose(about, style="dim")
    for line in _PAGES[ArtifactType(document["type"])](content):
        cli.out.prose(line)
    cli.out.line()
    if DROPPED.intersection(document.get("tags", ())):
        cli.out.prose("What the provider said or quoted, and no source shows, was left out.", style="yellow")
    quoted = counted(len(document["sources"]), "quotation")
    shown = f"{quoted} of its sources: --json shows them" if document["sources"] else "It quotes no source."
    cli.out.prose(shown, style="dim")


def _research(content: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", content["summary"])
    for section in content["sections"]:
        refs = f"  ({', '.join(section['sources'])})" if section["sources"] else ""
        yield from ("", f"## {section['heading']}", f"{section['body']}{refs}")
    yield from _points("Conclusions", content["conclusions"])
    yield from _points("Open questions", content["open_questions"])


def _brief(content: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", content["body"])
    yield from _points("Entities", [f"{slug}: {name}" for slug, name in content["entity_map"].items()])
    yield from ("", counted(content["word_count"], "word"))


def _proposal(content: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", json.dumps(content["original"], ensure_ascii=False, indent=2))
    issues = [f"{issue['severity']}: {issue['field']}: {issue['message']}" for issue in content["issues"]]
    yield from _points("Issues", issues or ["none"])
    matches = [
        f"{match['text']!r} is {match['entity_id']} ({match['confidence']:.0%})" for match in content["entity_matches"]
    ]
    yield from _points("Entities it names", matches or ["none"])


def _points(title: str, points: Sequence[str]) -> Iterator[str]:
    if points:
        yield from ("", f"## {title}", *(f"- {point}" for point in points))


_PAGES = {
    ArtifactType.RESEARCH_BRIEF: _research,
    ArtifactType.BRIEF: _brief,
    ArtifactType.PREPROCESSED_PROPOSAL: _proposal,
}


def artifact_type(text: str | None) -> ArtifactType | None:
    """Parse an artifact type; raises OptionInvalid."""
    if text is None:
        return None
    try:
        return ArtifactType(text.upper())
    except ValueError:
        known = ", ".join(kind.value for kind in ArtifactType)
        raise OptionInvalid(option="--type", value=text, expected=f"one of {known}") from None


def check_days(days: int | None) -> None:
    """Validate a number of days; raises OptionInvalid."""
    if days is not None and days < 1:
        raise OptionInvalid(option="--older-than-days", value=days, expected="1 or more")
