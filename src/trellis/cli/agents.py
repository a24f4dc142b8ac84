"""`trellis agents`: list, show, create, activate and pause agents."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trellis.agents.creation import NewAgent, source_name
from trellis.agents.errors import ModelSettingInvalid, SourceRefused
from trellis.agents.models import OFFLINE, check_model
from trellis.agents.run_io import ModelOptions
from trellis.agents.sources import TEXT_SUFFIXES
from trellis.auth.ownership import owner_name
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, ReasonOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, RecordColumn
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role
from trellis.runs.agent_status import recorded_creation

if TYPE_CHECKING:  # loads the whole platform, so only commands that open an instance import it
    from trellis.app.instance import Instance
    from trellis.http.agent_shapes import AgentDetail
    from trellis.http.shapes import AgentChanged

AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's slug.")]

STYLES = {"active": "green", "error": "red", "malformed": "red"}


def add_to(program: typer.Typer) -> None:
    agents = group(
        program, "agents", section="Agents", help_="The agents: make one, let it run, or stop it.", lists=True
    )
    command(agents, "list", gateway=True)(list_agents)
    command(agents, "show", gateway=True)(show)
    command(agents, "sources", gateway=True)(sources)
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
        agents = (await api.agents.list(limit=values.limit(limit, LIMIT_MAX))).items
    if cli.out.ids_alone(ids, [one.slug for one in agents if one.slug]):
        return
    columns = [
        RecordColumn(title="AGENT", cell=lambda one: one["slug"] or "?"),
        RecordColumn(title="STATUS", cell=lambda one: Text(one["status"], STYLES.get(one["status"], "dim"))),
        RecordColumn(title="ABOUT", cell=_about, gives_way=True),
    ]
    empty = "No agents. `trellis agents create NAME` makes one; `trellis up --demo` brings two."
    cli.out.listing([one.model_dump(mode="json") for one in agents], columns, empty=empty)


def _about(one: Mapping[str, Any]) -> str:
    if one["last_error"]:
        return f"{one['last_run']}: {one['last_error']}"
    warnings = [f"warning: {text}" for text in one["warnings"]]
    return "; ".join([*(one["problems"] or [one["description"] or ""]), *warnings])


async def show(cli: Cli, agent: AgentArgument) -> None:
    """Show an agent: its definition, what starts it, when its schedule is due next, and its instructions."""
    async with cli.api() as api:
        detail = await api.agents.get(agent)
    if cli.out.as_json:
        cli.out.record(detail.model_dump(mode="json"))
        return
    cli.out.facts(_facts(detail))
    for text in [*detail.problems, *(f"warning: {one}" for one in detail.warnings)]:
        cli.out.line(text, "yellow")
    if detail.instructions:
        cli.out.line()
        cli.out.line(detail.instructions.strip("\n"))


def _facts(detail: "AgentDetail") -> Iterator[tuple[str, str | Text]]:
    yield "agent", f"{detail.slug} {detail.version or ''}".strip()
    yield "status", Text(detail.status, STYLES.get(detail.status, "dim"))
    if detail.last_error:
        yield "last run", f"{detail.last_run}: {detail.last_error}"
    if detail.failed_in_a_row:
        yield "failed", f"{detail.failed_in_a_row} in a row; stopped after {detail.failed_in_a_row_max}"
    if detail.model is None:
        return
    yield "about", detail.description or ""
    yield "model", f"{detail.model}, temperature {detail.temperature}, at most {detail.max_steps} steps"
    yield "tools", ", ".join(detail.tools)
    yield "may propose", ", ".join(detail.safe_outputs)
    yield "reads", f"at most {detail.max_sources} files of {detail.folder}, memory {detail.memory_mode}"
    triggers = [*(["a person"] if detail.manual else []), *([detail.cron] if detail.cron else []), *detail.events]
    yield "started by", ", ".join(triggers) or "nothing"
    if detail.next:
        yield "next", ", ".join(f"{one:%Y-%m-%d %H:%M}Z" for one in detail.next)


async def sources(
    cli: Cli,
    agent: AgentArgument,
    ref: Annotated[str | None, typer.Option("--ref", metavar="REF", help="Print the text of this source.")] = None,
) -> None:
    """List the texts that an agent would read if it ran now, and the files that it leaves out with the reasons."""
    async with cli.api() as api:
        agent_sources = await api.agents.sources(agent)
    if ref is not None:
        texts = {one.ref: one.text for one in agent_sources.items}
        if ref not in texts:
            expected = ", ".join(texts) or "none"
            raise OptionInvalid(option="--ref", value=repr(ref[:200]), expected=f"a source that it reads: {expected}")
        cli.out.line(texts[ref].rstrip("\n"))
        return
    if cli.out.as_json:
        cli.out.record(agent_sources.model_dump(mode="json"))
        return
    columns = [
        ListingColumn[tuple[str, str]](title="SOURCE", cell=lambda one: one[0]),
        ListingColumn[tuple[str, str]](title="READ", cell=lambda one: one[1], gives_way=True),
    ]
    rows = [
        *((one.ref, f"{len(one.text)} characters") for one in agent_sources.items),
        *((one.ref, f"no: {one.detail}") for one in agent_sources.left_out),
    ]
    cli.out.listing(rows, columns, empty="It has no sources.")
    cli.out.note(f"{agent_sources.tokens} of at most {agent_sources.tokens_max} tokens")


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
        new_agent = NewAgent(
            slug=agent,
            purpose=purpose,
            model=model,
            name=title,
            questions=tuple(question or ()),
            created_by=owner_name(principal),
        )
        actor = Actor(role=Role.OWNER, name=principal.name)
        definition, keys = await recorded_creation(
            instance.objects, instance.ledger, actor, new_agent, sources, reason=reason
        )
        await instance.catalog.index()
        store = instance.objects.url.rstrip("/").removeprefix("file://")
    folder = f"{store}/{keys[-1].rpartition('/')[0]}"
    if cli.out.as_json:
        cli.out.record(
            {"slug": definition.slug, "status": definition.status.value, "folder": folder, "files": list(keys)}
        )
        return
    _print_created(cli, definition.slug, folder, keys, missing)


ENDINGS = f"{', '.join(TEXT_SUFFIXES[:-1])} or {TEXT_SUFFIXES[-1]}"


def _read_sources(files: Sequence[Path]) -> dict[str, bytes]:
    """The files by their names as sources; raises SourceRefused."""
    contents: dict[str, bytes] = {}
    for file in files:
        if str(file).startswith(("http:/", "https:/")):
            raise SourceRefused(file="A web address", reason=f"save the page as a {ENDINGS} file, and name that file")
        if file.is_dir():
            raise SourceRefused(file=file, reason=f"it is a folder; give --source for each {ENDINGS} file in it")
        try:
            body = file.read_bytes()
        except OSError as error:
            raise SourceRefused(file=file, reason=f"it cannot be read ({error.strerror})") from error
        name = source_name(str(file), body)
        if name in contents:
            raise SourceRefused(file=file, reason="another source has the same name; rename one of them")
        contents[name] = body
    return contents


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
    change = {} if was is None else {"previous": was, "changed": was != now}
    before = "" if was is None else f" (it was {was})" if was != now else " already"
    cli.out.answer({"slug": agent.slug, "status": now, **change}, f"{agent.slug} is {now}{before}")
