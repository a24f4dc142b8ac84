"""What the commands about artifacts ask and say, on a ledger and through a gateway alike."""

import sys
from collections.abc import Sequence

import typer

from trellis.artifacts.content import ArtifactType
from trellis.cli.invocation import Cli
from trellis.engine.errors import InputError, OptionInvalid
from trellis.operations.explain import counted


def say_cleaned(cli: Cli, ids: Sequence[str], *, days: int, dry_run: bool, more: bool) -> None:
    """What a cleanup removed, or would remove."""
    if cli.out.as_json:
        cli.out.record({"older_than_days": days, "dry_run": dry_run, "artifacts": list(ids), "more": more})
        return
    for artifact_id in ids:
        cli.out.line(artifact_id)
    would = "would be removed" if dry_run else "removed"
    cli.out.line(f"{counted(len(ids), 'artifact')} older than {counted(days, 'day')} {would}")
    if more:
        cli.out.note("there are more: ask again, or with a higher --limit")


def confirm(count: int, *, yes: bool) -> None:
    """Ask before something is removed for good; raises InputError where nobody can answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(
            detail=f"{counted(count, 'artifact')} would be removed: say --yes to do it, --dry-run to see them."
        )
    typer.confirm(f"Remove {counted(count, 'artifact')} for good?", abort=True, err=True)


def artifact_type(text: str | None) -> ArtifactType | None:
    """A type of artifacts; raises OptionInvalid."""
    if text is None:
        return None
    try:
        return ArtifactType(text.upper())
    except ValueError:
        known = ", ".join(kind.value for kind in ArtifactType)
        raise OptionInvalid(option="--type", value=text, expected=f"one of {known}") from None


def check_days(days: int | None) -> None:
    """Nothing for a number of days that can be; raises OptionInvalid."""
    if days is not None and days < 1:
        raise OptionInvalid(option="--older-than-days", value=days, expected="1 or more")
