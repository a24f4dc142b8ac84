"""`trellis audit`: checks the sealed audit records, and prints the newest block so that it can be kept elsewhere."""

import re
from typing import Annotated

import typer
from rich.text import Text

from trellis.app.wiring import token_key
from trellis.auth.tokens import signed_statement
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, as_record, counting
from trellis.documents.audit_chain import INSTANCE_CHAIN, NLM_CHAIN
from trellis.documents.audit_verification import AuditedLedger, AuditReport, AuditViolation, verify_audit
from trellis.engine.errors import OptionInvalid, Refused
from trellis.engine.text import counted
from trellis.storage.objects.canonical_json import timestamp

NOTHING_SEALED = "Nothing is sealed yet: `trellis up` seals what it publishes, every ten seconds."
STATEMENT = "trellis-audit-head+jws"
"""The `typ` of a signed head."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def add_to(program: typer.Typer) -> None:
    audit = group(
        program, "audit", section="Ledger", help_="The sealed audit records: check them, print the newest block."
    )
    command(audit, "verify")(verify)
    command(audit, "head")(head)


async def verify(
    cli: Cli,
    anchor: Annotated[
        str | None,
        typer.Option("--head", metavar="HASH", help="A head that was kept elsewhere: the chain must extend it."),
    ] = None,
    unproven: Annotated[
        str | None,
        typer.Option(
            "--unproven", metavar="HASH", help="The hash of the records older than the chain, as it was printed before."
        ),
    ] = None,
    limit: LimitOption = LIMIT_DEFAULT,
) -> int:
    """Check that no audit record was changed, removed, inserted or reordered since it was sealed.

    Every record of the object store, every block of the audit chain, and every event and administrative act that is still in the ledger are compared. The first bad
    record comes first. It only reads, and may run beside a working instance. Exit 1 if anything is wrong.
    """
    wanted = values.limit(limit, LIMIT_MAX)
    for option, value, command_ in (("--head", anchor, "audit head"), ("--unproven", unproven, "audit verify")):
        if value is not None and _SHA256.fullmatch(value) is None:
            expected = f"64 hexadecimal digits, as `{command_}` prints"
            raise OptionInvalid(option=option, value=value[:70], expected=expected)
    with counting(cli.out) as progress:
        async with cli.open() as ledger, cli.objects() as objects, cli.nlm_ledger() as of_backend:
            ledgers = [
                AuditedLedger(chain=INSTANCE_CHAIN, ledger=ledger),
                AuditedLedger(chain=NLM_CHAIN, ledger=of_backend),
            ]
            report = await verify_audit(ledgers, objects, anchor=anchor, unproven=unproven, on_progress=progress)
    _print(cli, report, wanted)
    return 0 if report.ok else 1


def _print(cli: Cli, report: AuditReport, limit: int) -> None:
    shown = report.violations[:limit]
    counts = {
        "blocks": report.blocks,
        "chains": [{**as_record(one), "chain": one.chain or "instance"} for one in report.chains],
        "sealed": report.sealed,
        "unsealed": report.unsealed,
        "unproven": report.unproven,
        "unproven_sha256": report.unproven_sha256,
        "restarts": list(report.restarts),
        "violations": report.found,
    }
    if cli.out.as_json:
        for violation in shown:
            cli.out.record({name: value for name, value in as_record(violation).items() if name != "order"})
        cli.out.record(counts)
        return
    if shown:
        cli.out.listing(shown, VIOLATION_COLUMNS, empty="")
    if report.found > len(shown):
        cli.out.note(f"{counted(report.found - len(shown), 'violation')} more; --limit shows more")
    for number in report.restarts:
        cli.out.note(f"the chain began again with block {number}, after the object store was lost and rebuilt")
    if report.unproven:
        cli.out.note(
            f"{counted(report.unproven, 'record')} not judged: older than the chain, or of NLM jobs whose ledger"
            " (TRELLIS_NLM_LEDGER) cannot be opened here"
        )
    if report.unproven_sha256 is not None:
        cli.out.note(f"the older records have the hash {report.unproven_sha256}; --unproven HASH compares it")
    violations = counted(report.found, "violation") if report.found else "no violation"
    cli.out.line(
        f"{_sealed(report)}, {report.unsealed} not yet: {violations}", style="green" if report.ok else "bold red"
    )
    if not report.blocks and not report.found:
        cli.out.note(f"{NOTHING_SEALED} Until then a change of a record is not found.")


def _sealed(report: AuditReport) -> str:
    """How much is sealed. The blocks of two chains are counted apart, because each chain has its own numbers."""
    if len(report.chains) < 2:
        return f"{counted(report.blocks, 'block')}, {counted(report.sealed, 'record')} sealed"
    names = {INSTANCE_CHAIN: "the instance", NLM_CHAIN: "the NLM backend"}
    each = (
        f"{counted(one.blocks, 'block')} of {names.get(one.chain, one.chain)} with {counted(one.sealed, 'record')}"
        for one in report.chains
    )
    return f"{' and '.join(each)} sealed"


VIOLATION_COLUMNS = (
    ListingColumn[AuditViolation](title="WHERE", cell=lambda one: Text(one.place, style="red")),
    ListingColumn[AuditViolation](title="EVENT", cell=lambda one: one.event_id or ""),
    ListingColumn[AuditViolation](title="POSITION", cell=lambda one: one.position or ""),
    ListingColumn[AuditViolation](title="BLOCK", cell=lambda one: "" if one.block is None else str(one.block)),
    ListingColumn[AuditViolation](
        title="WHAT", cell=lambda one: f"{one.detail} ({one.key})" if one.key else one.detail, wraps=True
    ),
)


async def head(
    cli: Cli,
    sign: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--sign", help="Sign it with the key that signs tokens; prints a JWS.")
    ] = False,
) -> None:
    """Print the newest block of the audit chain: its number, hash, position and time.

    Keep the hash where nobody can change it who can change the ledger and the object store. `audit verify --head HASH` proves later that nothing before it was
    changed.
    """
    async with cli.open() as ledger:
        newest = await ledger.audit_head()
    if newest is None or not newest.number:
        raise Refused(detail=NOTHING_SEALED)
    facts = {"number": newest.number, "sha256": newest.sha256, "position": newest.position}
    facts["at"] = None if newest.at is None else timestamp(newest.at)
    if sign:
        statement = signed_statement(token_key(cli.url, cli.settings), STATEMENT, facts)
        cli.out.record({**facts, "jws": statement}) if cli.out.as_json else cli.out.line(statement)
    elif cli.out.as_json:
        cli.out.record(facts)
    else:
        cli.out.facts((name, str(value)) for name, value in facts.items())
