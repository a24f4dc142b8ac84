"""`trellis proposals`: list and show proposals, and decide about them."""

from typing import Annotated

import typer

from trellis.bus.topics import HELD_ACTION
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.run_output import print_decision, show_proposal_page, show_proposals
from trellis.engine.errors import TrellisError
from trellis.lifecycles.proposal import PROPOSAL

ProposalArgument = Annotated[str, typer.Argument(metavar="ID", help="The proposal's id.")]


def add_to(program: typer.Typer) -> None:
    proposals = group(
        program, "proposals", section="Agents", help_="Proposals of agents: list, show, approve, reject.", lists=True
    )
    command(proposals, "list", gateway=True)(list_proposals)
    command(proposals, "show", gateway=True)(show_proposal)
    command(proposals, "approve", gateway=True)(approve)
    command(proposals, "reject", gateway=True)(reject)


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
    wanted, (status, _) = values.limit(limit, LIMIT_MAX), values.state(state, PROPOSAL.name)
    async with cli.api() as api:
        try:
            proposals = (await api.proposals.list(status=status, limit=wanted, conflicts=not ids)).items
        except TrellisError as error:  # without the object store, the proposals are still listed
            proposals = (await api.proposals.list(status=status, limit=wanted)).items
            cli.out.note(f"conflicts are not known: {error}")
        now = await cli.ledger_time(api)
    if not cli.out.ids_alone(ids, [one.id for one in proposals]):
        show_proposals(cli, [one.model_dump(mode="json") for one in proposals], now)


async def show_proposal(cli: Cli, id_: ProposalArgument) -> None:
    """One proposal: what it would change now as a diff, its sources with the words quoted, and what was decided.

    Characters that cannot be seen or that reorder the text are written out as escapes. --json prints the whole document.
    """
    async with cli.api() as api:
        proposal, preview = await api.proposals.get(id_), None
        try:
            preview = await api.proposals.diff(id_)
        except TrellisError as error:  # a store is missing, or the caller may not read the memory that it would change
            cli.out.note(f"no diff: {error}")
    show_proposal_page(cli, proposal.model_dump(mode="json"), preview)


async def approve(
    cli: Cli,
    id_: ProposalArgument,
    note: Annotated[str | None, typer.Option("--note", help="Why, for the record.")] = None,
) -> int:
    """Approve a proposal, which is then applied; or let a held job go."""
    async with cli.api() as api:
        decided = await api.proposals.approve(id_, note)
        if decided.action != HELD_ACTION:  # a held job goes by itself
            decided = await api.proposals.apply(id_)
    return print_decision(cli, id_, decided.status)


async def reject(
    cli: Cli,
    id_: ProposalArgument,
    note: Annotated[str | None, typer.Option("--note", help="Why; at least ten characters.")] = None,
) -> int:
    """Reject a proposal, or a held job, with the reason."""
    async with cli.api() as api:
        decided = await api.proposals.reject(id_, note or "")
    return print_decision(cli, id_, decided.status)
