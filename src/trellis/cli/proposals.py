"""`trellis proposals`: list and show proposals, and decide about them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from trellis.app.wiring import new_id
from trellis.bus import approvals
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, at_gateway, command, group
from trellis.cli.instances import open_for_command, owner
from trellis.cli.invocation import Cli
from trellis.cli.run_output import print_decision, show_proposal_page, show_proposals
from trellis.documents.errors import ProposalNotFound
from trellis.engine.errors import TrellisError
from trellis.engine.jobs import Actor, JobId, Moved, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job, JobFilter
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.proposal import PROPOSAL
from trellis.proposals import proposal
from trellis.proposals.preview import ENDED, conflict_of, conflicts_of, diff_of

HELD_MAX = 500

ProposalArgument = Annotated[str, typer.Argument(metavar="ID", help="The proposal's id.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    made = group(program, "proposals", section="Agents", help_="What agents propose; approve or reject it.", lists=True)
    command(made, "list", over_http=at_gateway("list_proposals"))(list_proposals)
    command(made, "show", over_http=at_gateway("show_proposal"))(show_proposal)
    command(made, "approve", over_http=at_gateway("approve"))(approve)
    command(made, "reject", over_http=at_gateway("reject"))(reject)


async def list_proposals(
    cli: Cli,
    state: Annotated[
        str | None, typer.Option("--status", "--state", help="Only those of this status, such as pending.")
    ] = None,
    limit: LimitOption = LIMIT_DEFAULT,
    ids: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List proposals, newest first; before them the jobs that the safety kernel held for a person.

    FLAGS says `conflict` where the target has changed since, so that it can no longer be applied, and what was found odd.
    """
    wanted = values.limit(limit, LIMIT_MAX)
    chosen, lifecycle = values.state(state, PROPOSAL.name)
    async with cli.open() as ledger:
        now = await ledger.now()
        found = await _held(ledger, wanted) if chosen in {None, "pending"} else []
        if len(found) < wanted:
            where = JobFilter(lifecycle=lifecycle, state=chosen)
            page = await ledger.jobs(where, limit=wanted - len(found))
            found += [await _document(ledger, job.job_id) for job in page.jobs]
    if cli.out.ids_alone(ids, [document["id"] for document in found]):
        return
    show_proposals(cli, await _with_conflicts(cli, found), now)


async def _with_conflicts(cli: Cli, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The proposals, each with the reason why it can no longer be applied.

    Without these reasons, and with a note, if the object store is missing.
    """
    open_ = [one for one in found if one["status"] not in ENDED and "change" in one["content"]]
    conflicts: dict[str, str] = {}
    try:
        if open_:
            async with open_for_command(cli) as instance:
                conflicts = await conflicts_of(open_, objects=instance.objects)
    except TrellisError as error:
        cli.out.note(f"conflicts are not known: {error}")
    return [{**one, "conflict": conflicts.get(one["id"])} for one in found]


async def _held(ledger: Ledger, limit: int) -> list[dict[str, Any]]:
    wanted, items, cursor = min(limit, HELD_MAX), list[tuple[Job, Sequence[Event]]](), None
    while len(items) < wanted:
        page = await approvals.list_waiting(ledger, limit=wanted - len(items), cursor=cursor)
        items += page.items
        cursor = page.cursor
        if cursor is None:
            break
    return [document for job, events in items if (document := approvals.inbox_document(job, events)) is not None]


async def _document(ledger: Ledger, id_: str) -> dict[str, Any]:
    """A proposal, or a held job in its shape; raises ProposalNotFound."""
    held = approvals.job_id_of_inbox_id(id_)
    job = await ledger.job(held or JobId(id_))
    document: dict[str, Any] | None = None
    if job is not None and held is not None and job.lifecycle == BUS_JOB.name:
        document = approvals.inbox_document(job, await ledger.events(job.job_id))
    elif job is not None and held is None and job.lifecycle == PROPOSAL.name and job.payload is not None:
        document = json.loads(proposal.document(job.payload, await ledger.events(job.job_id)))
    if document is None:
        raise ProposalNotFound(proposal=id_)
    return document


async def show_proposal(cli: Cli, id_: ProposalArgument) -> None:
    """One proposal: what it would change now as a diff, its sources with the words quoted, and what was decided.

    Characters that cannot be seen or that reorder the text are written out as escapes. --json prints the whole document.
    """
    async with cli.open() as ledger:
        document = await _document(ledger, id_)
    show_proposal_page(cli, document, *await _preview(cli, document))


async def _preview(cli: Cli, document: dict[str, Any]) -> tuple[str | None, str | None]:
    """The diff it would apply now, and why that would be refused; None, with a note, if a needed store is missing."""
    if document["status"] in ENDED or approvals.job_id_of_inbox_id(document["id"]) is not None:
        return None, None
    try:
        async with open_for_command(cli) as instance:
            now = await instance.ledger.now()
            diff = await diff_of(document, objects=instance.objects, memory=instance.memory, now=now)
            return diff, await conflict_of(document, objects=instance.objects)
    except TrellisError as error:
        cli.out.note(f"no diff: {error}")
        return None, None


async def approve(
    cli: Cli,
    id_: ProposalArgument,
    note: Annotated[str | None, typer.Option("--note", help="Why, for the record.")] = None,
) -> int:
    """Approve a proposal, which is then applied; or let a held job go."""
    return await _decide(cli, id_, approve=True, note=note)


async def reject(
    cli: Cli,
    id_: ProposalArgument,
    note: Annotated[str | None, typer.Option("--note", help="Why; at least ten characters.")] = None,
) -> int:
    """Reject a proposal, or a held job, with the reason."""
    return await _decide(cli, id_, approve=False, note=note)


async def _decide(cli: Cli, id_: str, *, approve: bool, note: str | None) -> int:
    actor = owner(cli, "decide about a proposal")
    if (held := approvals.job_id_of_inbox_id(id_)) is not None:
        return await _decide_held(cli, actor, held, approve=approve, note=note)
    async with open_for_command(cli) as instance:
        answer = await proposal.decide_proposal(
            instance.ledger, actor, JobId(id_), approve=approve, note=note, request_id=RequestId(new_id())
        )
        if isinstance(answer, Moved) and approve:
            await instance.apply_engine().run_once()
        job = await instance.ledger.job(JobId(id_))
    return print_decision(cli, id_, "" if job is None else job.state, decided=isinstance(answer, Moved))


async def _decide_held(cli: Cli, actor: Actor, job_id: JobId, *, approve: bool, note: str | None) -> int:
    async with cli.open() as ledger:
        await approvals.decide(ledger, actor, job_id, approve=approve, note=note, request_id=RequestId(new_id()))
        document = await _document(ledger, approvals.inbox_id(job_id))
    if cli.out.as_json:
        decided = {"proposal": document["id"], "status": document["status"], "decided": True}
        cli.out.record({"job_id": document["id"], "id": document["id"], **decided})
    else:
        cli.out.line(f"{document['id']} is {document['status']}")
    return 0
