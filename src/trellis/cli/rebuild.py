"""`trellis rebuild`: restores documents from the ledger, or the ledger from the audit records."""

from dataclasses import asdict
from typing import Annotated

import typer

from trellis.app.wiring import make_development_key
from trellis.cli.commands import ReasonOption, command
from trellis.cli.invocation import Cli, make_folder, refuse_missing, sqlite_path
from trellis.cli.output import ListingColumn, counting
from trellis.documents import ids
from trellis.documents.audit_chain import NLM_CHAIN
from trellis.documents.errors import RebuildError
from trellis.engine.closing import closing
from trellis.engine.errors import OptionInvalid, TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.text import counted
from trellis.ledgers import open_ledger
from trellis.runs.rebuild import (
    LedgerRebuildReport,
    ObjectsRebuildReport,
    Progress,
    RestoreRefusal,
    rebuild_ledger,
    rebuild_objects,
)
from trellis.storage.objects.store import ObjectStore

SIDES = ("ledger", "objects")
REFUSALS_SHOWN = 20


def add_to(program: typer.Typer) -> None:
    command(program, "rebuild", section="Ledger")(rebuild)


async def rebuild(
    cli: Cli,
    side: Annotated[
        str, typer.Option("--from", metavar="SIDE", help="The side that is intact: `ledger` or `objects`.")
    ],
    reason: ReasonOption = None,
) -> int:
    """Rebuild a lost ledger or object store from the other one.

    --from ledger publishes what the object store lacks: documents and audit records, byte for byte, also those of the NLM backend's own ledger if it is on this machine. --from objects puts every job back that the
    audit records know, into a ledger that was lost; a missing SQLite file is made. Stop `trellis up` first. A rebuild that was interrupted goes on when
    it is begun again. Exit code 1 when a job could not be put back, or an object is not what the ledger recorded. On PostgreSQL --from objects needs a member of trellis_owner, as `migrate` does.
    """
    if side not in SIDES:
        raise OptionInvalid(option="--from", value=side, expected=f"one of {', '.join(SIDES)}")
    async with cli.objects() as objects:
        make = _from_ledger if side == "ledger" else _from_objects
        return await make(cli, objects, reason)


async def _from_ledger(cli: Cli, objects: ObjectStore, reason: str | None) -> int:
    refuse_missing(cli.url)
    actor, alone = cli.operator("rebuild"), frozenset(cli.settings.audit_objects)
    async with closing(await open_ledger(cli.url)) as ledger:
        with counting(cli.out) as progress:
            done = await rebuild_objects(ledger, objects, actor, alone=alone, cause=reason, on_progress=progress)
        if not cli.out.as_json:
            _print_published(cli, done)
        of_backend, problem = None, None
        try:
            with counting(cli.out) as progress:
                of_backend = await _from_nlm_ledger(cli, objects, actor, reason, progress)
        except TrellisError as error:  # what was rebuilt before is told first
            problem = error
    if cli.out.as_json:
        cli.out.record({**asdict(done), "nlm_backend": None if of_backend is None else asdict(of_backend)})
    elif of_backend is not None:
        _print_published(cli, of_backend, "NLM backend: ")
    if problem is not None:
        raise RebuildError(
            detail=f"The ledger of the NLM backend could not be read, and its records are missing: {problem}"
        )
    return 1 if done.differing or (of_backend is not None and of_backend.differing) else 0


def _print_published(cli: Cli, done: ObjectsRebuildReport, whose: str = "") -> None:
    counts = f"{counted(done.jobs, 'job')}, {counted(done.events, 'event')}: {counted(done.written, 'object')} written"
    cli.out.line(whose + counts)
    _print_differing(cli, done)


async def _from_nlm_ledger(
    cli: Cli, objects: ObjectStore, actor: Actor, reason: str | None, progress: Progress
) -> ObjectsRebuildReport | None:
    """Publish the records of the NLM backend's jobs, which are in a ledger of its own; None if that is not here."""
    if cli.settings.nlm_ledger_of(cli.url) == cli.url:
        return None
    async with cli.nlm_ledger() as ledger:
        if ledger is None:
            return None
        return await rebuild_objects(ledger, objects, actor, chain=NLM_CHAIN, cause=reason, on_progress=progress)


def _print_differing(cli: Cli, done: ObjectsRebuildReport) -> None:
    if done.older:
        cli.out.line(f"{counted(done.older, 'audit record')} of an older format left as they are")
    if done.differing:
        cli.out.line(f"{counted(len(done.differing), 'object')} not as the ledger recorded", style="bold red")
        for key in done.differing[:REFUSALS_SHOWN]:
            cli.out.line(f"  {key}")
        cli.out.note(
            "--json lists all of them; look at each, take it away or bring it back from a copy, and run it again"
        )


async def _from_objects(cli: Cli, objects: ObjectStore, reason: str | None) -> int:
    if not (await objects.list(f"{ids.AUDIT_FOLDER}/", limit=1)).items:
        raise RebuildError(detail=f"There is no audit record in {objects.url}; set TRELLIS_OBJECTS to where they are.")
    from trellis.bus.outcomes.publisher import SUBSCRIBER_NAME as TELLS_CLIENTS  # only this direction needs it

    _make_missing(cli)
    actor, alone = cli.operator("rebuild"), frozenset(cli.settings.audit_objects)
    async with closing(await open_ledger(cli.url)) as ledger:
        with counting(cli.out) as progress:
            done = await rebuild_ledger(
                ledger, objects, actor, alone=alone, tellers=(TELLS_CLIENTS,), cause=reason, on_progress=progress
            )
    _print_report(cli, done)
    return 1 if done.refused else 0


def _make_missing(cli: Cli) -> None:
    """Create the folder and key of a missing SQLite ledger: the user who creates the file is its operator."""
    file = sqlite_path(cli.url)
    if file is not None and not file.exists():
        make_folder(cli.url)
        make_development_key(cli.url)


def _print_report(cli: Cli, done: LedgerRebuildReport) -> None:
    if cli.out.as_json:
        cli.out.record(asdict(done))
        return
    cli.out.line(f"{counted(done.records, 'record')} read")
    cli.out.line(f"{counted(done.jobs, 'job')} with {counted(done.events, 'event')} put back", style="green")
    others = {
        "there already": done.there,
        "left out: retention had removed them": done.removed,
    }
    for what, count in others.items():
        if count:
            cli.out.line(f"{count} {what}")
    if done.refused:
        cli.out.line(f"{counted(done.refused, 'job')} not put back", style="bold red")
        cli.out.listing(done.refusals[:REFUSALS_SHOWN], REFUSAL_COLUMNS, empty="")
        cli.out.note("--json lists more of them; bring their records back and run it again")
    cli.out.note("`trellis verify` checks what is there now; held jobs are taken up by the next sweep")


REFUSAL_COLUMNS = (
    ListingColumn[RestoreRefusal](title="JOB", cell=lambda refusal: refusal.job_id),
    ListingColumn[RestoreRefusal](title="WHY", cell=lambda refusal: refusal.reason, wraps=True),
)
