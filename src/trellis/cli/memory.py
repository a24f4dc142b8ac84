"""`trellis memory`: agents' memory and its history, from the stores or over HTTP.

Reading needs permission: locally as the owner of the ledger or by token, over HTTP by the token's roles.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from trellis.cli import values
from trellis.cli.agents import AgentArgument
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.operations.explain import counted

WideOption = Annotated[bool, typer.Option("--wide", help="With the facts; without it the snapshot and the open loops.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    memory = group(
        program, "memory", section="Agents", help_="Memory of agents: list, read, history, diff.", lists=True
    )
    command(memory, "list", gateway=True)(list_memories)
    command(memory, "read", gateway=True)(read)
    command(memory, "history", gateway=True)(history)
    command(memory, "diff", gateway=True)(diff)


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


def _show_list(cli: Cli, memories: Sequence[dict[str, Any]]) -> None:
    columns = [
        ListingColumn[dict[str, Any]](title="AGENT", cell=lambda one: one["agent_id"]),
        ListingColumn[dict[str, Any]](title="VERSION", cell=lambda one: str(one["version"]), right=True),
        ListingColumn[dict[str, Any]](title="TOKENS", cell=lambda one: str(one["token_count"]), right=True),
        ListingColumn[dict[str, Any]](title="CHANGED", cell=lambda one: one["last_update"] or "never"),
        ListingColumn[dict[str, Any]](title="BY RUN", cell=lambda one: one["last_run_id"] or "", gives_way=True),
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
        ListingColumn[dict[str, Any]](title="VERSION", cell=lambda one: str(one["version"] or ""), right=True),
        ListingColumn[dict[str, Any]](title="AT", cell=lambda one: one["at"]),
        ListingColumn[dict[str, Any]](title="BY", cell=lambda one: one["author"]),
        ListingColumn[dict[str, Any]](title="PROPOSAL", cell=lambda one: one["proposal_id"] or ""),
        ListingColumn[dict[str, Any]](title="RUN", cell=lambda one: one["run_id"] or ""),
        ListingColumn[dict[str, Any]](title="FILES", cell=_files, gives_way=True),
    ]
    cli.out.listing(changes, columns, empty="Its memory has never been changed.")


def _files(one: dict[str, Any]) -> str:
    return ", ".join(f"{file['file']} +{file['added']} -{file['removed']}" for file in one["files"])
