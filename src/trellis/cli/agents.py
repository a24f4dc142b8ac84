"""`trellis agents`: what agents there are, and which of them may run."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.text import Text

from trellis.agents.catalog import Agent
from trellis.agents.definition import AgentMalformed, AgentStatus
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, at_gateway, command, group
from trellis.cli.instances import opened, owner
from trellis.cli.invocation import Cli
from trellis.cli.output import Column
from trellis.runs.health import Failure, last_failure, set_status

AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's slug.")]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Why, for the audit record.")]

_STYLES = {AgentStatus.ACTIVE: "green", AgentStatus.ERROR: "red"}


@dataclass(frozen=True, slots=True)
class _Listed:
    """An agent, and for one in error what its last run failed of."""

    agent: Agent
    failure: Failure | None


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    agents = group(program, "agents", section="Agents", help_="The agents; let one run, or stop it.", lists=True)
    command(agents, "list", over_http=at_gateway("list_agents"))(list_agents)
    command(agents, "activate", over_http=at_gateway("activate"))(activate)
    command(agents, "pause", over_http=at_gateway("pause"))(pause)


async def list_agents(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List the agents; a malformed one says what to correct, and one in error what went wrong."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with opened(cli) as instance:
        agents = (await instance.catalog.list()).agents[:wanted]
        found = [
            _Listed(agent, await last_failure(instance.ledger, agent.slug) if _in_error(agent) and agent.slug else None)
            for agent in agents
        ]
    columns = [
        Column[_Listed](title="AGENT", cell=lambda one: one.agent.slug or "?"),
        Column[_Listed](title="STATUS", cell=_status),
        Column[_Listed](title="ABOUT", cell=_about, gives_way=True),
    ]
    if cli.out.as_json:
        for one in found:
            cli.out.record(_record(one))
    else:
        cli.out.listing(found, columns, empty="No agents. `trellis up --demo` brings two.")


def _in_error(agent: Agent) -> bool:
    return not isinstance(agent, AgentMalformed) and agent.status is AgentStatus.ERROR


def _status(one: _Listed) -> Text:
    if isinstance(one.agent, AgentMalformed):
        return Text("malformed", "red")
    return Text(one.agent.status.value, _STYLES.get(one.agent.status, "dim"))


def _about(one: _Listed) -> str:
    if isinstance(one.agent, AgentMalformed):
        return str(one.agent)
    return f"{one.failure.run_id}: {one.failure.error}" if one.failure else one.agent.description


def _record(one: _Listed) -> dict[str, Any]:
    agent = one.agent
    if isinstance(agent, AgentMalformed):
        return {"slug": agent.slug, "status": "malformed", "problems": [str(problem) for problem in agent.problems]}
    about = {"slug": agent.slug, "status": agent.status.value, "name": agent.name, "version": agent.version}
    does = {
        "description": agent.description,
        "tools": [tool.value for tool in agent.tools],
        "cron": agent.triggers.cron,
    }
    failed = {"last_run": one.failure.run_id, "last_error": one.failure.error} if one.failure else {}
    return {**about, **does, **failed}


async def activate(cli: Cli, agent: AgentArgument, reason: ReasonOption = None) -> None:
    """Let an agent run: a draft, one that was paused, or one that stopped after three failed runs."""
    await _change(cli, agent, AgentStatus.ACTIVE, reason)


async def pause(cli: Cli, agent: AgentArgument, reason: ReasonOption = None) -> None:
    """Let no further run of an agent begin; `activate` ends it."""
    await _change(cli, agent, AgentStatus.PAUSED, reason)


async def _change(cli: Cli, slug: str, status: AgentStatus, reason: str | None) -> None:
    actor = owner(cli, "change the status of an agent")
    async with opened(cli) as instance:
        changed = await set_status(
            instance.catalog,
            instance.ledger,
            actor,
            slug,
            status,
            reason=reason,
        )
    was, now = changed.previous.value, changed.agent.status.value
    if cli.out.as_json:
        cli.out.record({"slug": slug, "status": now, "previous": was, "changed": was != now})
    else:
        cli.out.line(f"{slug} is {now}" + (f" (it was {was})" if was != now else " already"))
