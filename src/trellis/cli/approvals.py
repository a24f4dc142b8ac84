"""`trellis job approve` and `trellis job deny`: decide about a job that the safety kernel held."""

from typing import Annotated

import typer

from trellis.app.wiring import new_id
from trellis.cli.commands import command
from trellis.cli.instances import owner
from trellis.cli.invocation import Cli, refuse_missing
from trellis.engine.jobs import JobId, RequestId
from trellis.ledgers import open_ledger

JobArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
NoteOption = Annotated[str | None, typer.Option("--note", help="Why, for the record; denying needs ten characters.")]


def add_to(job: typer.Typer) -> None:
    """Add these commands to `trellis job`."""
    command(job, "approve", over_http=approve_over_http)(approve)
    command(job, "deny", over_http=deny_over_http)(deny)


async def approve(cli: Cli, id_: JobArgument, note: NoteOption = None) -> None:
    """Let a job go that the safety kernel held for a person."""
    await _decide(cli, id_, approve=True, note=note)


async def deny(cli: Cli, id_: JobArgument, note: NoteOption = None) -> None:
    """Refuse a job that the safety kernel held for a person, and say why."""
    await _decide(cli, id_, approve=False, note=note)


async def _decide(cli: Cli, id_: str, *, approve: bool, note: str | None) -> None:
    from trellis.bus import approvals  # slow to import, and not needed by the other commands about jobs

    refuse_missing(cli.url)
    actor = owner(cli, "decide about a held job")
    ledger = await open_ledger(cli.url)
    try:
        job_id = JobId(id_)
        if await ledger.job(job_id) is None:  # perhaps an inbox id; a job may have such an id itself
            job_id = approvals.job_id_of_inbox_id(id_) or job_id
        answer = await approvals.decide(
            ledger, actor, job_id, approve=approve, note=note, request_id=RequestId(new_id())
        )
    finally:
        await ledger.close()
    _print_decision(cli, job_id, answer.target, approve=approve)


async def approve_over_http(cli: Cli, id_: str, note: str | None) -> None:
    """Approve a held job over HTTP."""
    async with cli.client() as client:
        job = await client.jobs.approve(id_, note)
    _print_decision(cli, job.job_id, job.status, approve=True)


async def deny_over_http(cli: Cli, id_: str, note: str | None) -> None:
    """Deny a held job over HTTP."""
    async with cli.client() as client:
        job = await client.jobs.deny(id_, note or "")
    _print_decision(cli, job.job_id, job.status, approve=False)


def _print_decision(cli: Cli, job_id: str, status: str, *, approve: bool) -> None:
    line = f"{job_id} may go; the scheduler hands it out" if approve else f"{job_id} is {status}"
    cli.out.answer({"job_id": job_id, "status": status, "decided": "approve" if approve else "reject"}, line)
