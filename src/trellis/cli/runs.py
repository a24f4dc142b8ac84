"""`trellis run` and `trellis runs`: start, list, show and cancel runs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trellis.api.local import LocalApi
from trellis.cli import values
from trellis.cli.agents import AgentArgument
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, command, group
from trellis.cli.events import stop_text
from trellis.cli.invocation import Cli
from trellis.cli.output import RecordColumn
from trellis.cli.run_output import (
    calls_text,
    made_by,
    print_ended,
    refusals,
    run_facts,
    show_runs,
    step_bar,
    still_at_work,
    took,
    wait_s,
)
from trellis.cli.telemetry import configure_logging, configure_tracing
from trellis.cli.values import params_of
from trellis.documents import ids
from trellis.documents.run_documents import is_archived
from trellis.lifecycles.run import RUN

if TYPE_CHECKING:  # loads pydantic's models of every document
    from trellis.http.client import GatewayClient
    from trellis.http.shapes import RunStatus

PRINTED = frozenset({"run_failed"})
"""Events of the log that the command prints as the end of the run."""
LEFT_TO = "{name} executes the runs of this ledger: its settings and keys are used, not those of this command"
STEP_FIELDS = ("step", "name", "file", "sha256", "started_at", "finished_at", "calls")

RunArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The run's id, or run_YYYY-MM-DD_xxxxxx without the time of day.")
]


def add_to(program: typer.Typer) -> None:
    command(program, "run", section="Agents", gateway=True)(run)
    runs = group(program, "runs", section="Agents", help_="Runs of agents: list, show, cancel.", lists=True)
    command(runs, "list", gateway=True)(list_runs)
    command(runs, "show", gateway=True)(show_run)
    command(runs, "cancel", gateway=True)(cancel)


async def run(
    cli: Cli,
    agent: AgentArgument,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="K=V", help="A parameter of the run; may be repeated.")
    ] = None,
    watch: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--watch", help="Execute the run in this process unless `trellis up` does; show each step.")
    ] = False,
    wait: Annotated[
        str | None, typer.Option("--wait", metavar="DURATION", help="Wait at most this long for the end of the run.")
    ] = None,
    correlation: Annotated[
        str | None, typer.Option("--correlation", metavar="ID", help="The run's correlation id; its records have it.")
    ] = None,
) -> int:
    """Start a run of an agent.

    Without an option it is left to `trellis up`. --wait waits for its end; --watch needs no `trellis up`: this process executes the
    run itself, with its own environment (model, keys), and no other run; runs of the same agent that wait already are overtaken.
    While a `trellis up` on the same ledger executes runs, --watch leaves the run to it and says so: then the environment of
    `trellis up` counts. Through a gateway it only follows the run. Both options print the proposals and exit with 1 when the run
    failed.
    """
    params, patience_s = params_of(param or []), wait_s(wait, watch=watch)
    async with cli.api() as api:
        if isinstance(api, LocalApi):
            configure_logging(cli.settings, printed=PRINTED)
            configure_tracing()
        if watch and isinstance(api, LocalApi):
            await api.runs.check_executable()
            begun = await api.runs.start(agent, params, correlation_id=correlation)
            run_id, following = begun.run_id, followed(cli, api.runs.watch(begun.run_id))
            ended = await api.runs.execute(run_id, following, lambda name: cli.out.note(LEFT_TO.format(name=name)))
            return print_ended(cli, ended, await _step_files(api, run_id))
        begun = await api.runs.start(agent, params, correlation_id=correlation)
        if watch or patience_s is not None:
            following = followed(cli, api.runs.watch(begun.run_id))
            try:
                async with asyncio.timeout(patience_s):
                    ended = await following
                return print_ended(cli, ended, await _step_files(api, begun.run_id))
            except TimeoutError:
                raise still_at_work(begun.run_id, patience_s or 0.0) from None
        is_asked = cli.out.as_json and isinstance(api, LocalApi)
        run = await api.runs.get(begun.run_id) if is_asked else begun
        cli.out.answer(run.model_dump(include={"run_id", "status", "position"}), begun.run_id)
    return 0


async def _step_files(api: "GatewayClient | LocalApi", run_id: str) -> list[dict[str, Any]]:
    return [step.model_dump(mode="json") for step in await api.runs.steps(run_id)]


async def followed(cli: Cli, states: AsyncGenerator["RunStatus"]) -> dict[str, Any]:
    """The last status.json of a run, with a progress bar over its steps while it goes on."""
    status = dict[str, Any]()
    with step_bar(cli) as show:
        async with aclosing(states):
            async for state in states:
                status = state.model_dump(mode="json")
                show(status)
    return status


async def list_runs(
    cli: Cli,
    agent: Annotated[str | None, typer.Option("--agent", metavar="SLUG", help="Only runs of this agent.")] = None,
    state: Annotated[
        str | None, typer.Option("--status", "--state", help="Only those of this status, such as running.")
    ] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Only those that have ended.")] = False,  # noqa: FBT002 - a flag
    limit: LimitOption = LIMIT_DEFAULT,
    ids_: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List runs, newest first. A run is archived when it has ended: nothing of it changes any more."""
    wanted, (status, _) = values.limit(limit, LIMIT_MAX), values.state(state, RUN.name)
    async with cli.api() as api:
        runs = (await api.runs.list(agent=agent, status=status, archived=archived, limit=wanted)).items
        now = await cli.ledger_time(api)
    if not cli.out.ids_alone(ids_, [one.run_id for one in runs]):
        show_runs(cli, [one.model_dump(mode="json") for one in runs], now)


async def show_run(cli: Cli, id_: RunArgument) -> None:
    """One run: its status, its steps with their times, what it proposed, its error, and where its folder is."""
    async with cli.api() as api:
        run = await api.runs.get(id_)
        done = await api.runs.steps(id_)
    steps = [
        {**{name: getattr(step, name, None) for name in STEP_FIELDS}, "file": ids.step_file(step.step)} for step in done
    ]
    files = [step.model_dump(mode="json") for step in done]
    outcome = made_by(files)
    proposals = [{name: one[name] for name in ("id", "action", "target")} for one in outcome["proposals"]]
    outcome = {"summary": outcome["summary"], "proposals": proposals}
    record = {
        **run.model_dump(mode="json"),
        **outcome,
        "steps": steps,
        "refused": refusals(files) or run.refused,
    }
    if cli.out.as_json:
        cli.out.record(record)
        return
    cli.out.facts(run_facts(record))
    if steps:
        cli.out.line()
        columns = [
            RecordColumn(title="STEP", cell=lambda step: step["name"]),
            RecordColumn(title="BEGAN", cell=lambda step: step["started_at"]),
            RecordColumn(title="TOOK", cell=took, right=True),
            RecordColumn(title="CALLS", cell=calls_text, wraps=True),
            RecordColumn(title="FILE", cell=lambda step: step["file"], gives_way=True),
        ]
        cli.out.listing(steps, columns, empty="")


async def cancel(
    cli: Cli,
    id_: RunArgument,
    hard: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--hard", help="End the run now; later writes of its driver are refused.")
    ] = False,
    reason: Annotated[str | None, typer.Option("--reason", help="Why, for the run's error and event.")] = None,
) -> None:
    """End a run that has not ended. A running one is asked to stop, and ended after a grace."""
    async with cli.api() as api:
        stopped = await api.runs.cancel(id_, mode="hard" if hard else "soft", reason=reason)
        ended = is_archived(stopped.status)
        line = f"is {stopped.status}" if ended else await stop_text(cli, api, stopped.run_id)
    cli.out.answer({**stopped.model_dump(), "requested": not ended}, f"{stopped.run_id} {line}")
