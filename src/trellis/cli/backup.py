"""`trellis backup` and `trellis restore`: an embedded instance in one file."""

from pathlib import Path
from typing import Annotated

import typer

from trellis.app.fleet import storage_locations
from trellis.app.wiring import development_key_path, make_development_key
from trellis.cli.commands import ReasonOption, command
from trellis.cli.invocation import Cli, refuse_missing, sqlite_path
from trellis.cli.output import as_record, counting
from trellis.engine.errors import KeyUnusable, SettingsInvalid
from trellis.engine.extras import program_version
from trellis.engine.jobs import Actor
from trellis.engine.private_files import read_private, write_private
from trellis.lifecycles import Role
from trellis.operations.backup import InstancePlaces, check_backup, restore_backup, take_backup

SECTION = "Ledger"
KEYS = (
    *("token_key_file", "token_signing_key_file", "callback_key_file", "alert_key_file"),
    *("bus_key_file", "bus_creds_file", "tls_key_file", "temporal_key_file", "token_file"),
)
"""Settings that name files with secrets, which no backup holds."""
GUIDE = "docs/how-to/back-up.md"

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The backup, a tar file.")]
KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="The key that signs this instance's tokens, in a file of its own."),
]


def add_to(program: typer.Typer) -> None:
    command(program, "backup", section=SECTION)(backup)
    command(program, "restore", section=SECTION)(restore)


async def backup(cli: Cli, file: FileArgument, keys: KeysOption = None, reason: ReasonOption = None) -> None:
    """Save an embedded instance into one file while it runs.

    The file holds the ledgers, the objects and the memory as they were at one instant. Writers wait for a moment. Keys are not in it: --keys saves the
    instance's key into a second file, which belongs somewhere else. For PostgreSQL and S3 see docs/how-to/back-up.md.
    """
    refuse_missing(cli.url, unused_gateway=None if cli.ledger or cli.data else cli.settings.gateway)
    places, actor = instance_places(cli), cli.operator("backup")
    with counting(cli.out) as progress:
        report = await take_backup(places, file, actor, version=program_version(), reason=reason, on_progress=progress)
    key = development_key_path(cli.url)
    if keys is not None:
        write_private(keys, read_private(key).decode("ascii"))
    if cli.out.as_json:
        cli.out.record({**as_record(report), "keys": str(keys) if keys else None})
        return
    cli.out.line(f"saved {report.files:,} files, {report.bytes:,} bytes, as of {report.taken_at:%Y-%m-%d %H:%M:%S} UTC")
    cli.out.line(f"digest {report.digest}")
    cli.out.note(f"writers waited {report.held_ms:.0f} ms; `trellis restore {file} --check` reads the file again")
    if keys is None:
        cli.out.note(f"keys are not in it: --keys saves {key}")
    others = [str(path) for name in KEYS if (path := getattr(cli.settings, name)) is not None and path.exists()]
    if others:
        cli.out.note(f"save these yourself: {', '.join(others)}")


async def restore(
    cli: Cli,
    file: FileArgument,
    keys: KeysOption = None,
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="HEX", help="Refuse a backup with another digest than this.")
    ] = None,
    check: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--check", help="Read the whole backup and check it and its ledgers; restore nothing.")
    ] = False,
    accept_violations: Annotated[  # noqa: FBT002 - a flag
        bool,
        typer.Option(
            "--accept-violations", help="Restore also a ledger that `trellis verify` found wrong when it was saved."
        ),
    ] = False,
    reason: ReasonOption = None,
) -> None:
    """Make the instance of a backup again, in this folder or in the folder of --data.

    Nothing may be there yet. Every byte of the backup is checked, then the ledger, and only then the instance appears. Stop the old instance for good
    before the new one starts: otherwise both run the same jobs.
    """
    if check:
        with counting(cli.out) as progress:
            report = await check_backup(file, digest=digest, on_progress=progress)
    else:
        places = instance_places(cli)
        secret = None if keys is None else read_private(keys).decode("ascii")
        actor = Actor(role=Role.CONTROL_PLANE, name=cli.person)
        with counting(cli.out) as progress:
            report = await restore_backup(
                places,
                file,
                actor,
                digest=digest,
                reason=reason,
                accept_violations=accept_violations,
                on_progress=progress,
            )
        _put_key(cli, secret)
    if cli.out.as_json:
        cli.out.record(as_record(report))
        return
    cli.out.line(f"{report.files:,} files, {report.bytes:,} bytes, as of {report.taken_at:%Y-%m-%d %H:%M:%S} UTC")
    cli.out.line(f"digest {report.digest}")
    if report.jobs is None:
        cli.out.line("the backup is whole", style="green")
        return
    violations = f"{report.violations} violations, as when it was saved" if report.violations else "no violation"
    cli.out.line(f"restored: {report.jobs:,} jobs, {report.events or 0:,} events, {violations}", style="green")
    if report.moved_to is not None:
        cli.out.note(
            f"it is closed, as it was when it was saved: the instance moved, or was moving, to {report.moved_to}"
        )
    if keys is None:
        cli.out.note("its key was not restored and a new one was made: tokens issued before are not valid here")


def _put_key(cli: Cli, secret: str | None) -> None:
    if secret is not None:
        key = development_key_path(cli.url)
        try:
            write_private(key, secret)
        except FileExistsError as error:
            raise KeyUnusable(
                reason=f"{key} exists already and was kept; move it away and copy the key there"
            ) from error
    make_development_key(cli.url)


def instance_places(cli: Cli, *, guide: str = GUIDE) -> InstancePlaces:
    """The parts of an embedded instance. Raises SettingsInvalid where a part is not on this machine."""
    about = f"{guide} says more"
    ledger = sqlite_path(cli.url)
    if ledger is None:
        raise SettingsInvalid(source="TRELLIS_LEDGER", detail=f"it is on PostgreSQL, not on this machine; {about}")
    nlm_ledger = sqlite_path(cli.settings.nlm_ledger_of(cli.url))
    if nlm_ledger is None:
        raise SettingsInvalid(source="TRELLIS_NLM_LEDGER", detail=f"it is on PostgreSQL, not on this machine; {about}")
    where = storage_locations(cli.settings, cli.url)
    if not where.objects.startswith("file://"):
        raise SettingsInvalid(source="TRELLIS_OBJECTS", detail=f"they are not in a folder of this machine; {about}")
    if where.memory is None:
        detail = f"memory is at the gateway: use the host that has its repository; {about}"
        raise SettingsInvalid(source="TRELLIS_MEMORY", detail=detail)
    return InstancePlaces(
        ledger=ledger.absolute(),
        nlm_ledger=nlm_ledger.absolute(),
        objects=Path(where.objects.removeprefix("file://")).absolute(),
        memory=where.memory.absolute() if isinstance(where.memory, Path) else None,
    )
