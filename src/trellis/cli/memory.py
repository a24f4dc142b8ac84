"""`trellis memory`: agents' memory and its history, from the stores or over HTTP; export and import of all of it.

Reading needs permission: locally as the owner of the ledger or by token, over HTTP by the token's roles. Export and
import need an operator of this machine.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trellis.cli import values
from trellis.cli.agents import AgentArgument
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, ReasonOption, command, group
from trellis.cli.invocation import Cli, refuse_missing
from trellis.cli.output import RecordColumn, as_record, counting
from trellis.engine.admin_acts import NewAct
from trellis.engine.closing import closing
from trellis.engine.errors import SettingsInvalid
from trellis.engine.text import counted

EXPORTED = "memory.exported"
IMPORTED = "memory.imported"
SUBJECT = "memory"

WideOption = Annotated[bool, typer.Option("--wide", help="With the facts; without it the snapshot and the open loops.")]


def add_to(program: typer.Typer) -> None:
    memory = group(
        program,
        "memory",
        section="Agents",
        help_="Memory of agents: list, read, history, diff, export, import.",
        lists=True,
    )
    command(memory, "list", gateway=True)(list_memories)
    command(memory, "read", gateway=True)(read)
    command(memory, "history", gateway=True)(history)
    command(memory, "diff", gateway=True)(diff)
    command(memory, "export")(export)
    command(memory, "import")(import_)


async def list_memories(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List the agents with the version, the size and the last change of their memories."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.api() as api:
        memories = (await api.memory.list(limit=wanted)).items
    _show_list(cli, [one.model_dump(mode="json", exclude={"files", "mode"}) for one in memories])


async def read(cli: Cli, agent: AgentArgument, wide: WideOption = False) -> None:  # noqa: FBT002 - a flag
    """Print what an agent reads of its memory before it begins."""
    async with cli.api() as api:
        memory = await api.memory.read(agent, mode="wide" if wide else "basic")
    _show(cli, memory.model_dump(mode="json"))


async def history(cli: Cli, agent: AgentArgument, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List the changes of a memory, newest first, with the proposal and the run that each came from."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.api() as api:
        changes = (await api.memory.history(agent, limit=wanted)).items
    _show_history(cli, [one.model_dump(mode="json") for one in changes])


async def diff(
    cli: Cli,
    agent: AgentArgument,
    from_version: Annotated[int, typer.Argument(metavar="FROM", min=0, help="A version of the history; 0 is empty.")],
    to_version: Annotated[
        int | None, typer.Argument(metavar="[TO]", min=0, help="Another version; without one, the newest.")
    ] = None,
) -> None:
    """Print what changed in a memory from one version to another, as a unified diff."""
    async with cli.api() as api:
        changes = await api.memory.diff(agent, from_version, to_version)
    if cli.out.as_json:
        cli.out.record(changes.model_dump(mode="json"))
    elif changes.diff:
        cli.out.diff(changes.diff)
    else:
        cli.out.line(f"Nothing changed from version {changes.from_version} to {changes.to_version}.")


async def export(
    cli: Cli,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The new repository; nothing may be there yet.")],
    reason: ReasonOption = None,
) -> None:
    """Make a plain bare git repository of the memory of all agents, with the same commits.

    `git clone DIR` then shows it to a person, and TRELLIS_MEMORY may name it as a memory on a disk. The memory itself does not change.
    """
    from trellis.app.wiring import new_id
    from trellis.storage.memory.transfer import export_memory

    actor = cli.operator("memory export")
    async with cli.instance() as instance:
        identity = await asyncio.to_thread(instance.memory.identity, new_id)
        with counting(cli.out) as progress:
            report = await asyncio.to_thread(
                export_memory, instance.memory, folder, identity, lambda number: progress("commits exported", number)
            )
        facts = {"commits": report.commits, "commit": report.commit}
        act = NewAct(event=EXPORTED, subject=SUBJECT, target=folder.name, cause=reason, facts=facts)
        await instance.ledger.record_act(actor, act)
    cli.out.answer(as_record(report), f"exported {counted(report.commits, 'commit')} to {folder}", style="green")


async def import_(
    cli: Cli,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The bare repository that the instance used so far.")],
    reason: ReasonOption = None,
) -> None:
    """Bring a memory from a folder of this machine to the object store, with the same commits.

    TRELLIS_MEMORY says where it goes: `objects`, or `objects:PREFIX`. Stop every process that uses the memory first. What was stored is read back and
    checked before anybody can use it; then the old folder refuses every use. A broken-off import goes on when it is run again.
    """
    from trellis.app.fleet import storage_locations
    from trellis.app.wiring import new_id
    from trellis.ledgers import open_ledger
    from trellis.storage.memory.transfer import MemoryImport
    from trellis.storage.memory_place import SharedMemory

    actor = cli.operator("memory import")
    refuse_missing(cli.url)
    place = storage_locations(cli.settings, cli.url).memory
    if not isinstance(place, SharedMemory):
        detail = f"it is the folder {place}; set it to objects, or to objects:PREFIX, where the memory is to go"
        raise SettingsInvalid(source="TRELLIS_MEMORY", detail=detail)
    async with cli.objects() as objects:
        transfer = MemoryImport(folder, objects, place.prefix, new_id=new_id)
        with counting(cli.out) as progress:
            report = await asyncio.to_thread(transfer.run, lambda number: progress("commits imported", number))
    async with closing(await open_ledger(cli.url)) as ledger:
        facts = {"commits": report.commits, "commit": report.commit}
        act = NewAct(event=IMPORTED, subject=SUBJECT, target=str(place), cause=reason, facts=facts)
        await ledger.record_act(actor, act)
    cli.out.answer(as_record(report), f"imported {counted(report.commits, 'commit')} to {place}", style="green")
    cli.out.note(
        f"start every process with TRELLIS_MEMORY={place}; {folder} refuses to be used as a memory from now on"
    )


def _show_list(cli: Cli, memories: Sequence[dict[str, Any]]) -> None:
    columns = [
        RecordColumn(title="AGENT", cell=lambda one: one["agent_id"]),
        RecordColumn(title="VERSION", cell=lambda one: str(one["version"]), right=True),
        RecordColumn(title="TOKENS", cell=lambda one: str(one["token_count"]), right=True),
        RecordColumn(title="CHANGED", cell=lambda one: one["last_update"] or "never"),
        RecordColumn(title="BY RUN", cell=lambda one: one["last_run_id"] or "", gives_way=True),
    ]
    cli.out.listing(memories, columns, empty="No agents, so nobody remembers anything.")


def _show(cli: Cli, document: dict[str, Any]) -> None:
    if cli.out.as_json:
        cli.out.record(document)
        return
    changed = f"changed {document['last_update']} by {document['last_run_id']}" if document["last_update"] else "empty"
    size = counted(document["token_count"], "token")
    cli.out.prose(f"{document['agent_id']}, version {document['version']}, {size}, {changed}", style="dim")
    for name, text in document["files"].items():
        cli.out.line()
        cli.out.line(name, style="bold")
        cli.out.line(text.rstrip("\n") or "(nothing)")


def _show_history(cli: Cli, changes: Sequence[dict[str, Any]]) -> None:
    columns = [
        RecordColumn(title="VERSION", cell=lambda one: str(one["version"] or ""), right=True),
        RecordColumn(title="AT", cell=lambda one: one["at"]),
        RecordColumn(title="BY", cell=lambda one: one["author"]),
        RecordColumn(title="PROPOSAL", cell=lambda one: one["proposal_id"] or ""),
        RecordColumn(title="RUN", cell=lambda one: one["run_id"] or ""),
        RecordColumn(title="FILES", cell=_files, gives_way=True),
    ]
    cli.out.listing(changes, columns, empty="Its memory has never been changed.")


def _files(one: Mapping[str, Any]) -> str:
    return ", ".join(f"{file['file']} +{file['added']} -{file['removed']}" for file in one["files"])
