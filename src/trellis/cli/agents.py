"""`trellis agents`: list, create, activate and pause agents."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trellis.agents.creation import NewAgent, source_name
from trellis.agents.errors import ModelSettingInvalid, SourceRefused
from trellis.agents.models import OFFLINE, check_model
from trellis.agents.run_io import ModelOptions
from trellis.auth.ownership import owner_name
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, ReasonOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role
from trellis.runs.agent_status import recorded_creation

if TYPE_CHECKING:  # loads the whole platform, so only commands that open an instance import it
    from trellis.app.instance import Instance
    from trellis.http.shapes import AgentChanged

AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's slug.")]

STYLES = {"active": "green", "error": "red", "malformed": "red"}


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    agents = group(
        program, "agents", section="Agents", help_="The agents: make one, let it run, or stop it.", lists=True
    )
    command(agents, "list", gateway=True)(list_agents)
    command(agents, "create")(create)
    command(agents, "activate", gateway=True)(activate)
    command(agents, "pause", gateway=True)(pause)
    command(agents, "resume", gateway=True)(resume)


async def list_agents(
    cli: Cli,
    limit: LimitOption = LIMIT_DEFAULT,
    ids: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List the agents; a malformed one says what to correct, and one in error what went wrong."""
    async with cli.api() as api:
        found = (await api.agents.list(limit=values.limit(limit, LIMIT_MAX))).items
    if cli.out.ids_alone(ids, [one.slug for one in found if one.slug]):
        return
    columns = [
        ListingColumn[Mapping[str, Any]](title="AGENT", cell=lambda one: one["slug"] or "?"),
        ListingColumn[Mapping[str, Any]](
            title="STATUS", cell=lambda one: Text(one["status"], STYLES.get(one["status"], "dim"))
        ),
        ListingColumn[Mapping[str, Any]](title="ABOUT", cell=_about, gives_way=True),
    ]
    empty = "No agents. `trellis agents create NAME` makes one; `trellis up --demo` brings two."
    cli.out.listing([one.model_dump(mode="json") for one in found], columns, empty=empty)


def _about(one: Mapping[str, Any]) -> str:
    if one["last_error"]:
        return f"{one['last_run']}: {one['last_error']}"
    warnings = [f"warning: {text}" for text in one["warnings"]]
    return "; ".join([*(one["problems"] or [one["description"] or ""]), *warnings])


async def create(
    cli: Cli,
    agent: Annotated[str, typer.Argument(metavar="NAME", help="Its slug: lower-case letters, digits and hyphens.")],
    purpose: Annotated[
        str, typer.Option("--purpose", metavar="TEXT", help="The agent's purpose, in a sentence or two.")
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="offline (no key, no network), or openai:<model>.")
    ] = OFFLINE,
    source: Annotated[
        list[Path] | None,
        typer.Option("--source", metavar="FILE", help="A text file that the agent reads; may be repeated."),
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option("--question", metavar="TEXT", help="A question for the agent's sources; may be repeated."),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="The agent's display name.")] = None,
    reason: ReasonOption = None,
) -> None:
    """Make an agent: a folder with its definition (`_agent.md`) and copies of its sources.

    It is active at once and runs when somebody begins a run. Nothing that is there is overwritten.
    """
    principal = cli.owner("create an agent")
    sources = _read_sources(source or [])
    async with cli.instance() as instance:
        missing = _missing_settings(instance, model)
        asked = NewAgent(
            slug=agent,
            purpose=purpose,
            model=model,
            name=title,
            questions=tuple(question or ()),
            created_by=owner_name(principal),
        )
        actor = Actor(role=Role.OWNER, name=principal.name)
        made, keys = await recorded_creation(instance.objects, instance.ledger, actor, asked, sources, reason=reason)
        await instance.catalog.index()
        store = instance.objects.url.rstrip("/").removeprefix("file://")
    folder = f"{store}/{keys[-1].rpartition('/')[0]}"
    if cli.out.as_json:
        cli.out.record({"slug": made.slug, "status": made.status.value, "folder": folder, "files": list(keys)})
        return
    _print_created(cli, made.slug, folder, keys, missing)


def _read_sources(files: Sequence[Path]) -> dict[str, bytes]:
    """The files by their names as sources; raises SourceRefused."""
    found: dict[str, bytes] = {}
    for file in files:
        try:
            body = file.read_bytes()
        except OSError as error:
            raise SourceRefused(file=file, reason=f"it cannot be read ({error.strerror})") from error
        name = source_name(str(file), body)
        if name in found:
            raise SourceRefused(file=file, reason="another source has the same name; rename one of them")
        found[name] = body
    return found


def _missing_settings(instance: "Instance", model: str) -> str | None:
    """The settings that this model still needs; raises ModelUnknown for an unknown model."""
    key = instance.settings.model_key
    options = ModelOptions(
        base_url=instance.settings.model_base_url, key=None if key is None else key.get_secret_value()
    )
    try:
        check_model(model, options)
    except ModelSettingInvalid as error:
        return str(error)
    return None


def _print_created(cli: Cli, slug: str, folder: str, keys: Sequence[str], missing: str | None) -> None:
    cli.out.line(f"made {folder}")
    for key in keys:
        cli.out.line(f"  {key.split('/', 2)[2]}")
    if missing is not None:
        cli.out.note(f"before it runs: {missing}")
    if len(keys) == 1:
        cli.out.line(f"put texts (.md, .txt, .json) that it may read and quote into {folder}/sources/")
    cli.out.line("Its purpose, questions and limits stand in _agent.md; edit them there. Then:")
    cli.out.line(f"  {cli.command(f'run {slug} --watch')}")
    cli.out.line(f"  {cli.command('proposals --status pending')}")


async def activate(cli: Cli, agent: AgentArgument, reason: ReasonOption = None) -> None:
    """Let an agent run: a draft, one that was paused, or one that stopped after three failed runs."""
    async with cli.api() as api:
        _print_changed(cli, await api.agents.activate(agent, reason=reason))


async def pause(cli: Cli, agent: AgentArgument, reason: ReasonOption = None) -> None:
    """Pause an agent: no run of it begins and no job of it is executed until `resume`."""
    async with cli.api() as api:
        _print_changed(cli, await api.agents.pause(agent, reason=reason))


async def resume(cli: Cli, agent: AgentArgument, reason: ReasonOption = None) -> None:
    """Let a paused agent run again; the same as `activate`."""
    await activate(cli, agent, reason)


def _print_changed(cli: Cli, agent: "AgentChanged") -> None:
    was, now = agent.previous, agent.status
    if cli.out.as_json:
        before = {} if was is None else {"previous": was, "changed": was != now}
        cli.out.record({"slug": agent.slug, "status": now, **before})
    else:
        before = "" if was is None else f" (it was {was})" if was != now else " already"
        cli.out.line(f"{agent.slug} is {now}{before}")
