"""`trellis proposals`: what agents propose, and what a person decides about it."""

import json
from typing import Annotated

import typer

from trellis.cli import over_http, values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command, group
from trellis.cli.instances import opened, owner
from trellis.cli.invocation import Cli
from trellis.cli.output import Column, age
from trellis.engine.jobs import JobId, Moved, RequestId
from trellis.engine.records import Job, JobFilter
from trellis.lifecycles.proposal import PROPOSAL
from trellis.runs import proposals
from trellis.runs.errors import ProposalNotFound
from trellis.wiring import new_id

ProposalArgument = Annotated[str, typer.Argument(metavar="ID", help="The proposal's id.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    made = group(program, "proposals", section="Agents", help_="What agents propose; approve or reject it.", lists=True)
    command(made, "list", over_http=over_http.list_proposals)(list_proposals)
    command(made, "show", over_http=over_http.show_proposal)(show_proposal)
    command(made, "approve", over_http=over_http.approve)(approve)
    command(made, "reject", over_http=over_http.reject)(reject)


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
        if cli.out.as_json:
            for job in found:
                document = json.loads(proposals.document(job.payload or b"", await ledger.events(job.job_id)))
                cli.out.record({"job_id": job.job_id, **document})
            return
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
        cli.out.record({"job_id": job.job_id, **document})
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
    actor = owner(cli, "decide about a proposal")
    async with opened(cli) as instance:
        answer = await proposals.decide(
            instance.ledger, actor, JobId(id_), approve=approve, note=note, request_id=RequestId(new_id())
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
