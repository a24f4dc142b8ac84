"""`trellis memory`: agents' memory and its history, from the stores or over HTTP.

Reading needs permission: locally as the owner of the ledger or by token, over HTTP by the token's roles.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trellis.cli import values
from trellis.cli.agents import AgentArgument
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command, group
from trellis.cli.instances import open_for_command, reader
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.operations.explain import counted
from trellis.runs.memory_access import MemoryAccess
from trellis.storage.memory.layout import ReadMode

if TYPE_CHECKING:  # loads the whole platform, so only commands that open an instance import it
    from trellis.app.instance import Instance

ACTION = "read an agent's memory"
PAGE = 50

WideOption = Annotated[bool, typer.Option("--wide", help="With the facts; without it the snapshot and the open loops.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    made = group(program, "memory", section="Agents", help_="What agents remember: list, read, history.", lists=True)
    command(made, "list", over_http=list_over_http)(list_memories)
    command(made, "read", over_http=read_over_http)(read)
    command(made, "history", over_http=history_over_http)(history)


async def list_memories(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List the agents with the version, the size and the last change of their memories."""
    wanted, principal = values.limit(limit, LIMIT_MAX), reader(cli, ACTION)
    async with open_for_command(cli) as instance:
        _show_list(cli, (await _access(instance).summaries(principal))[:wanted])


async def read(cli: Cli, agent: AgentArgument, wide: WideOption = False) -> None:  # noqa: FBT002 - a flag
    """Print what an agent reads of its memory before it begins."""
    principal = reader(cli, ACTION)
    async with open_for_command(cli) as instance:
        _show(cli, await _access(instance).read(principal, agent, _mode(wide=wide)))


async def history(cli: Cli, agent: AgentArgument, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List the changes of a memory, newest first, with the proposal and the run that each came from."""
    wanted, principal = values.limit(limit, LIMIT_MAX), reader(cli, ACTION)
    found, cursor = list[dict[str, Any]](), None
    async with open_for_command(cli) as instance:
        while len(found) < wanted:
            size = min(PAGE, wanted - len(found))
            items, cursor = await _access(instance).history(principal, agent, limit=size, before=cursor)
            found += items
            if cursor is None:
                break
    _show_history(cli, found)


# --- over HTTP -------------------------------------------------------------------------------------------------------


async def list_over_http(cli: Cli, limit: int) -> None:
    """`list_memories` over HTTP."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.client() as client:
        agents = (await client.agents.list(limit=wanted)).items
        slugs = [agent.slug for agent in agents if agent.slug is not None and agent.status != "malformed"]
        views = [(await client.memory.read(slug, mode="wide")).model_dump(mode="json") for slug in slugs]
    _show_list(cli, [{name: value for name, value in one.items() if name not in {"files", "mode"}} for one in views])


async def read_over_http(cli: Cli, agent: str, wide: bool) -> None:  # noqa: FBT001 - as its namesake
    """`read` over HTTP."""
    async with cli.client() as client:
        _show(cli, (await client.memory.read(agent, mode="wide" if wide else "basic")).model_dump(mode="json"))


async def history_over_http(cli: Cli, agent: str, limit: int) -> None:
    """`history` over HTTP."""
    async with cli.client() as client:
        found = (await client.memory.history(agent, limit=values.limit(limit, LIMIT_MAX))).items
    _show_history(cli, [one.model_dump(mode="json") for one in found])


# --- output ----------------------------------------------------------------------------------------------------------


def _access(instance: "Instance") -> MemoryAccess:
    return MemoryAccess(ledger=instance.ledger, catalog=instance.catalog, memory=instance.memory)


def _mode(*, wide: bool) -> ReadMode:
    return ReadMode.WIDE if wide else ReadMode.BASIC


def _show_list(cli: Cli, found: Sequence[dict[str, Any]]) -> None:
    columns = [
        ListingColumn[dict[str, Any]](title="AGENT", cell=lambda one: one["agent_id"]),
        ListingColumn[dict[str, Any]](title="VERSION", cell=lambda one: str(one["version"]), right=True),
        ListingColumn[dict[str, Any]](title="TOKENS", cell=lambda one: str(one["token_count"]), right=True),
        ListingColumn[dict[str, Any]](title="CHANGED", cell=lambda one: one["last_update"] or "never"),
        ListingColumn[dict[str, Any]](title="BY RUN", cell=lambda one: one["last_run_id"] or "", gives_way=True),
    ]
    _records_or_table(cli, found, columns, "No agents, so nobody remembers anything.")


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


def _show_history(cli: Cli, found: Sequence[dict[str, Any]]) -> None:
    columns = [
        ListingColumn[dict[str, Any]](title="VERSION", cell=lambda one: str(one["version"] or ""), right=True),
        ListingColumn[dict[str, Any]](title="AT", cell=lambda one: one["at"]),
        ListingColumn[dict[str, Any]](title="BY", cell=lambda one: one["author"]),
        ListingColumn[dict[str, Any]](title="PROPOSAL", cell=lambda one: one["proposal_id"] or ""),
        ListingColumn[dict[str, Any]](title="RUN", cell=lambda one: one["run_id"] or ""),
        ListingColumn[dict[str, Any]](title="FILES", cell=_files, gives_way=True),
    ]
    _records_or_table(cli, found, columns, "Its memory has never been changed.")


def _files(one: dict[str, Any]) -> str:
    return ", ".join(f"{file['file']} +{file['added']} -{file['removed']}" for file in one["files"])


def _records_or_table(
    cli: Cli, found: Sequence[dict[str, Any]], columns: Sequence[ListingColumn[dict[str, Any]]], empty: str
) -> None:
    if not cli.out.as_json:
        cli.out.listing(found, columns, empty=empty)
        return
    for one in found:
        cli.out.record(one)
