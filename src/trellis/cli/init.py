"""`trellis init`: creates an embedded instance in one folder."""

from pathlib import Path

import typer

from trellis.app.fleet import storage_locations
from trellis.app.settings import FILE_NAME
from trellis.app.wiring import development_key_path, make_development_key
from trellis.cli.commands import command
from trellis.cli.invocation import Cli, make_folder, sqlite_path
from trellis.engine.errors import SettingsInvalid

SETTINGS_FILE = """\
# Settings of this instance. The environment wins over this file: TRELLIS_LEDGER over `ledger`, and so on.
# `trellis doctor` prints what is wrong, `trellis doctor --settings` also what is in force.

# The ledger: an SQLite file in this folder, or postgresql://user@host/database.
ledger = "sqlite:///trellis.db"

# Documents and audit records; by default the folder `objects` beside the ledger.
# objects = "s3://bucket/prefix?endpoint=https://s3.example"

# The git repository of the agents' memory; by default `memory.git` beside the ledger, or in the object store.
# memory = "objects"

# Who answers grounded questions: extractive needs no key and no network.
# nlm = "openai"
# nlm_base_url = "https://models.example/v1"
# nlm_model = "name-of-the-model"
"""


def add_to(program: typer.Typer) -> None:
    command(program, "init", section="Begin")(init)


async def init(cli: Cli) -> None:
    """Make an embedded instance in this folder, or in the folder of --data.

    It makes the ledger (an SQLite file), the key that signs tokens on this machine, the folder of objects, the repository of memory and, in this
    folder, a trellis.toml to change. What is there already stays as it is, so doing it again makes only what is missing. `trellis up` serves it.
    """
    url = cli.url
    ledger = sqlite_path(url)
    if ledger is None:
        detail = (
            "init makes an instance with SQLite; for a ledger on PostgreSQL make the database and run `trellis migrate`"
        )
        raise SettingsInvalid(source="TRELLIS_LEDGER", detail=detail)
    settings_file = None if cli.ledger is not None or cli.data is not None else Path(FILE_NAME)
    parts = [ledger, development_key_path(url), *_folders(cli), *([settings_file] if settings_file else [])]
    before = {part for part in parts if part.exists()}
    make_folder(url)
    if settings_file is not None and settings_file not in before:
        with settings_file.open("x", encoding="utf-8") as file:
            file.write(SETTINGS_FILE)
    make_development_key(url)
    await _open_once(cli)
    _print_made(cli, parts, before)


def _folders(cli: Cli) -> list[Path]:
    """The local folders of objects and memory. A memory in the object store has none: its replica is made when it is read."""
    where = storage_locations(cli.settings, cli.url)
    objects = [Path(where.objects.removeprefix("file://"))] if where.objects.startswith("file://") else []
    return [*objects, *([where.memory] if isinstance(where.memory, Path) else [])]


async def _open_once(cli: Cli) -> None:
    """Open the instance once, which creates what is missing and reports what is invalid."""
    from trellis.app.instance import open_instance

    async with open_instance(cli.settings, cli.url):
        pass


def _print_made(cli: Cli, parts: list[Path], before: set[Path]) -> None:
    created = [str(part) for part in parts if part not in before]
    kept = [str(part) for part in parts if part in before]
    if cli.out.as_json:
        cli.out.record({"made": created, "kept": kept})
        return
    for part in created:
        cli.out.line(f"made      {part}", style="green")
    for part in kept:
        cli.out.line(f"was there {part}")
    cli.out.note("next: `trellis up` serves it; `trellis up --demo` brings two agents to try")
