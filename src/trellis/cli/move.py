"""`trellis move`: takes an embedded instance to PostgreSQL and S3."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trellis.app.settings import Settings
from trellis.app.wiring import development_key_path
from trellis.cli.backup import instance_places
from trellis.cli.commands import ReasonOption, command
from trellis.cli.invocation import Cli, refuse_missing
from trellis.cli.output import as_record, counting
from trellis.engine.errors import OptionInvalid
from trellis.engine.extras import Extra, extra_needed, program_version
from trellis.engine.private_files import read_private, write_private
from trellis.storage.objects.address import s3_credentials

if TYPE_CHECKING:
    from trellis.operations.move import MoveReport

SECTION = "Ledger"
OF_TOKENS = "TRELLIS_TOKEN_KEY_FILE"
GUIDE = "docs/how-to/move-to-a-fleet.md"


def add_to(program: typer.Typer) -> None:
    command(program, "move", section=SECTION)(move)


async def move(
    cli: Cli,
    to_ledger: Annotated[
        str,
        typer.Option("--to-ledger", metavar="URL", help="An empty PostgreSQL database: postgresql://user@host/name."),
    ],
    to_objects: Annotated[
        str,
        typer.Option("--to-objects", metavar="URL", help="An empty prefix of a bucket: s3://bucket/prefix?endpoint=…"),
    ],
    *,
    to_memory: Annotated[
        Path | None, typer.Option("--to-memory", metavar="DIR", help="A new folder for the memory of agents.")
    ] = None,
    to_nlm_ledger: Annotated[
        str | None,
        typer.Option("--to-nlm-ledger", metavar="URL", help="A second empty database, for the NLM backend's ledger."),
    ] = None,
    to_keys: Annotated[
        Path | None,
        typer.Option("--to-keys", metavar="FILE", help="A new file for the key that signs this instance's tokens."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check both sides; change nothing.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Remove what was copied and open this instance again.")] = False,
    reason: ReasonOption = None,
) -> None:
    """Move an embedded instance to PostgreSQL and S3, with nothing lost.

    Stop `trellis up` and all workers first. The instance is closed, copied, compared byte by byte, and opened there. After a crash the same command goes on. Until the
    new instance is open, --undo opens this one again. This one stays as it was, closed. See docs/how-to/move-to-a-fleet.md.
    """
    if dry_run and undo:
        raise OptionInvalid(option="--dry-run", value=True, expected="no --undo beside it")
    key = development_key_path(cli.url)
    if to_keys is not None and to_keys.exists() and read_private(to_keys) != read_private(key):
        raise OptionInvalid(option="--to-keys", value=str(to_keys), expected="a file that does not exist")
    refuse_missing(cli.url, unused_gateway=None if cli.ledger or cli.data else cli.settings.gateway)
    places, actor = instance_places(cli, guide=GUIDE), cli.operator("move")
    with extra_needed(Extra.POSTGRES, "A ledger on PostgreSQL"), extra_needed(Extra.S3, "An object store on S3"):
        from trellis.operations.move import InstanceMove, MoveTargets
    targets = MoveTargets(ledger=to_ledger, objects=to_objects, memory=to_memory, nlm_ledger=to_nlm_ledger)
    with counting(cli.out) as progress:
        moving = InstanceMove(
            places=places,
            targets=targets,
            actor=actor,
            version=program_version(),
            credentials=s3_credentials(os.environ),
            reason=reason,
            on_progress=progress,
        )
        report = await (moving.check() if dry_run else moving.undo() if undo else moving.run())
    if to_keys is not None and report.state == "moved" and not to_keys.exists():
        write_private(to_keys, read_private(key).decode("ascii"))
    settings = moving.settings(to_keys or key) if report.state == "moved" else {}
    settings = _with_configured_keys(cli.settings, settings)
    if settings and places.memory is None:  # it moved with the objects, under the same prefix
        settings["TRELLIS_MEMORY"] = str(cli.settings.memory)
    _print(cli, report, settings)


def _with_configured_keys(configured: Settings, settings: dict[str, str]) -> dict[str, str]:
    """The settings of the moved instance with the keys that this one was told to use, which stay in force there."""
    if not settings:
        return {}
    files = {
        f"TRELLIS_{name.upper()}": str(path.absolute())
        for name in ("token_key_file", "token_jwks_file", "token_signing_key_file", "callback_key_file")
        if (path := getattr(configured, name)) is not None
    }
    verified_otherwise = configured.token_jwks_file is not None
    return {name: value for name, value in settings.items() if name != OF_TOKENS or not verified_otherwise} | files


def _print(cli: Cli, report: "MoveReport", settings: Mapping[str, str]) -> None:
    if cli.out.as_json:
        cli.out.record({**as_record(report), "settings": dict(settings)})
    elif report.state == "possible":
        cli.out.line("the move is possible; nothing was changed", style="green")
    elif report.state == "undone":
        cli.out.line("undone: this instance is open again", style="green")
    else:
        if report.rows:
            jobs, events = report.rows["jobs"], report.rows["events"]
            cli.out.line(f"moved {jobs:,} jobs, {events:,} events, {report.objects:,} objects ({report.bytes:,} bytes)")
            took = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items())
            cli.out.note(f"every row, object and file was compared; {took}")
        cli.out.line("the instance is open there; set for every process of it:", style="green")
        cli.out.facts(list(settings.items()))
        cli.out.note(f"add the password and the parameters of your address; {GUIDE} says what else a fleet needs")
