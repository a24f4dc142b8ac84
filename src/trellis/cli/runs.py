"""`trellis agents`, `run`, `runs` and `proposals`: what agents there are, what they do, and what a person decides."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from trellis.agents.definition import AgentDefinition, AgentMalformed
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command, group
from trellis.cli.invocation import Cli, refuse_missing
from trellis.cli.logs import configure_logging
from trellis.cli.output import Column, age
from trellis.engine.jobs import Actor, JobId, Moved, RequestId
from trellis.engine.records import Job, JobFilter
from trellis.instance import Instance, open_instance, params_of
from trellis.lifecycles import Role
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.run import RUN
from trellis.runs import ids, proposals
from trellis.runs.errors import ProposalNotFound
from trellis.runs.layer import TriggerKind
from trellis.wiring import identify, new_id, principal_for

ENDED = frozenset({"completed", "failed"})
WATCH_S = 0.1

AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's slug.")]
ProposalArgument = Annotated[str, typer.Argument(metavar="ID", help="The proposal's id.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "agents", section="Agents")(agents)
    command(program, "run", section="Agents")(run)
    command(program, "runs", section="Agents")(runs)
    made = group(program, "proposals", section="Agents", help_="What agents propose; approve or reject it.", lists=True)
    command(made, "list")(list_proposals)
    command(made, "show")(show_proposal)
    command(made, "approve")(approve)
    command(made, "reject")(reject)


@asynccontextmanager
async def _instance(cli: Cli) -> AsyncGenerator[Instance]:
    refuse_missing(cli.url)
    identify(cli.url, cli.settings)
    async with open_instance(cli.settings, cli.url, name=cli.person) as instance:
        yield instance


def _owner(cli: Cli, action: str) -> Actor:
    """The person at this keyboard: whoever can read the ledger's key, or has a token that says so."""
    identity = identify(cli.url, cli.settings)
    principal = principal_for(cli.url, name=cli.person, operator=identity is None, identity=identity)
    principal.acting(Role.OWNER, Role.CONTROL_PLANE, action=action)
    return Actor(role=Role.OWNER, name=principal.name)


async def agents(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List the agents; a malformed one says what to correct."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with _instance(cli) as instance:
        found = (await instance.catalog.list()).agents
    columns = [
        Column[AgentDefinition | AgentMalformed](title="AGENT", cell=lambda agent: agent.slug or "?"),
        Column[AgentDefinition | AgentMalformed](title="STATUS", cell=_agent_status),
        Column[AgentDefinition | AgentMalformed](
            title="ABOUT",
            cell=lambda agent: agent.description if isinstance(agent, AgentDefinition) else str(agent),
            gives_way=True,
        ),
    ]
    if cli.out.as_json:
        for agent in found[:wanted]:
            cli.out.record(_agent_record(agent))
    else:
        cli.out.listing(found[:wanted], columns, empty="No agents. `trellis up --demo` brings two.")


def _agent_status(agent: AgentDefinition | AgentMalformed) -> Text:
    known = isinstance(agent, AgentDefinition)
    return Text(agent.status.value, "green" if agent.may_run else "dim") if known else Text("malformed", "red")


def _agent_record(agent: AgentDefinition | AgentMalformed) -> dict[str, Any]:
    if isinstance(agent, AgentMalformed):
        return {"slug": agent.slug, "status": "malformed", "problems": [str(one) for one in agent.problems]}
    about = {"slug": agent.slug, "status": agent.status.value, "name": agent.name, "version": agent.version}
    return {**about, "description": agent.description, "tools": [tool.value for tool in agent.tools]}


async def run(
    cli: Cli,
    agent: AgentArgument,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="K=V", help="A parameter of the run; again for another.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Work on it here, and show each step until it ends.")] = False,  # noqa: FBT002 - a flag
) -> int:
    """Begin a run of an agent.

    `trellis up` works on runs. With --watch this process does so too, until the run has ended; exit code 1 when it failed.
    """
    configure_logging(cli.settings)
    params = params_of(param or [])
    _owner(cli, "begin a run")
    async with _instance(cli) as instance:
        run_id = await instance.layer.trigger(agent, params, kind=TriggerKind.MANUAL)
        if not watch:
            standing = await instance.layer.standing(run_id)
            if cli.out.as_json:
                cli.out.record({"run_id": run_id, "status": standing.status, "position": standing.position})
            else:
                cli.out.line(run_id)
            return 0
        return await _watch(cli, instance, agent, run_id)


async def watched(cli: Cli, instance: Instance, slug: str, run_id: JobId) -> dict[str, Any]:
    """Work on runs in this process until this one has ended; its last status.json."""
    stop = asyncio.Event()
    serving = asyncio.ensure_future(instance.serve(stop))
    try:
        return await _until_ended(cli, instance, slug, run_id, serving)
    finally:
        stop.set()
        await serving


async def _watch(cli: Cli, instance: Instance, slug: str, run_id: JobId) -> int:
    status = await watched(cli, instance, slug, run_id)
    if cli.out.as_json:
        cli.out.record(status)
    else:
        cli.out.line(f"{run_id} {status['status']}" + (f": {status['error']}" if status["error"] else ""))
        for proposal in status["proposals_created"]:
            cli.out.line(f"  {proposal}")
    return 0 if status["status"] == "completed" else 1


async def _until_ended(
    cli: Cli, instance: Instance, slug: str, run_id: JobId, serving: "asyncio.Future[None]"
) -> dict[str, Any]:
    """The last status.json, with a bar that moves with each published step."""
    published, status = instance.published, dict[str, Any]()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, console=cli.out.errors, disable=not cli.out.errors.is_terminal) as bars:
        bar = bars.add_task("queued", total=len(ids.STEPS))
        while status.get("status") not in ENDED:
            if serving.done():
                serving.result()
            await asyncio.sleep(WATCH_S)
            status = await published.status(slug, run_id) or {}
            about = status.get("current_step") or status.get("status") or "requested"
            bars.update(bar, completed=status.get("steps_completed", 0), description=about)
    return status


async def runs(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List runs, newest first."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.open() as ledger:
        now = await ledger.now()
        found = (await ledger.jobs(JobFilter(lifecycle=RUN.name), limit=wanted)).jobs
    columns = [
        Column[Job](title="RUN", cell=lambda job: job.job_id),
        Column[Job](title="AGENT", cell=lambda job: (job.concurrency_key or "").removeprefix("run:")),
        Column[Job](title="STATUS", cell=lambda job: job.state),
        Column[Job](title="AGE", cell=lambda job: age(job.created_at, now), right=True),
    ]
    cli.out.listing(found, columns, empty="No runs.")


async def list_proposals(
    cli: Cli,
    state: Annotated[str | None, typer.Option("--state", help="Only those in this state, such as pending.")] = None,
    limit: LimitOption = LIMIT_DEFAULT,
) -> None:
    """List proposals, newest first."""
    wanted = values.limit(limit, LIMIT_MAX)
    chosen, lifecycle = values.state(state, PROPOSAL.name)
    where = JobFilter(lifecycle=lifecycle, state=chosen)
    async with cli.open() as ledger:
        now = await ledger.now()
        page = await ledger.jobs(where, limit=wanted)
        full = [await ledger.job(job.job_id) for job in page.jobs]
    found = [job for job in full if job is not None]
    columns = [
        Column[Job](title="PROPOSAL", cell=lambda job: job.job_id),
        Column[Job](title="STATUS", cell=lambda job: job.state),
        Column[Job](title="AGE", cell=lambda job: age(job.created_at, now), right=True),
        Column[Job](title="WHAT", cell=_what, gives_way=True),
    ]
    cli.out.listing(found, columns, empty="No proposals.")


def _what(job: Job) -> str:
    body = json.loads(job.payload or b"{}")
    return (
        f"{body.get('agent_slug')}: {body.get('action')} {body.get('target')}: {body.get('content', {}).get('summary')}"
    )


async def show_proposal(cli: Cli, id_: ProposalArgument) -> None:
    """One proposal with its text, its citations and what became of it."""
    async with cli.open() as ledger:
        job = await ledger.job(JobId(id_))
        if job is None or job.payload is None or job.lifecycle != PROPOSAL.name:
            raise ProposalNotFound(proposal=id_)
        document = json.loads(proposals.document(job.payload, await ledger.events(JobId(id_))))
    if cli.out.as_json:
        cli.out.record(document)
    else:
        cli.out.line(json.dumps(document, ensure_ascii=False, indent=2))


async def approve(
    cli: Cli,
    id_: ProposalArgument,
    note: Annotated[str | None, typer.Option("--note", help="Why, for the record.")] = None,
) -> int:
    """Approve a proposal; it is then applied."""
    return await _decide(cli, id_, approve=True, note=note)


async def reject(
    cli: Cli,
    id_: ProposalArgument,
    note: Annotated[str | None, typer.Option("--note", help="Why; at least ten characters.")] = None,
) -> int:
    """Reject a proposal, with the reason."""
    return await _decide(cli, id_, approve=False, note=note)


async def _decide(cli: Cli, id_: str, *, approve: bool, note: str | None) -> int:
    owner = _owner(cli, "decide about a proposal")
    async with _instance(cli) as instance:
        answer = await proposals.decide(
            instance.ledger, owner, JobId(id_), approve=approve, note=note, request_id=RequestId(new_id())
        )
        if isinstance(answer, Moved) and approve:
            await instance.apply_engine().run_once()
        job = await instance.ledger.job(JobId(id_))
    state = "" if job is None else job.state
    if cli.out.as_json:
        cli.out.record({"proposal": id_, "status": state, "decided": isinstance(answer, Moved)})
    else:
        cli.out.line(f"{id_} is {state}")
    return 0 if isinstance(answer, Moved) else 1
