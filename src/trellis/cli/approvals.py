"""`trellis job approve` and `trellis job deny`: decide about a job that the safety kernel held."""

from typing import Annotated

import typer

from trellis.cli.commands import command
from trellis.cli.invocation import Cli

JobArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
NoteOption = Annotated[str | None, typer.Option("--note", help="Why, for the record; denying needs ten characters.")]


def add_to(job: typer.Typer) -> None:
    """Add these commands to `trellis job`."""
    command(job, "approve", gateway=True)(approve)
    command(job, "deny", gateway=True)(deny)


async def approve(cli: Cli, id_: JobArgument, note: NoteOption = None) -> None:
    """Let a job go that the safety kernel held for a person."""
    async with cli.api() as api:
        job = await api.jobs.approve(id_, note)
    _print_decision(cli, job.job_id, job.status, approve=True)


async def deny(cli: Cli, id_: JobArgument, note: NoteOption = None) -> None:
    """Refuse a job that the safety kernel held for a person, and say why."""
    async with cli.api() as api:
        job = await api.jobs.deny(id_, note or "")
    _print_decision(cli, job.job_id, job.status, approve=False)


def _print_decision(cli: Cli, job_id: str, status: str, *, approve: bool) -> None:
    line = f"{job_id} may go; the scheduler hands it out" if approve else f"{job_id} is {status}"
    cli.out.answer({"job_id": job_id, "status": status, "decided": "approve" if approve else "reject"}, line)
