"""`trellis authority`: which role may do what, by the table that decides every call."""

from typing import Annotated

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.engine.errors import OptionInvalid
from trellis.http.operation_shapes import RuleShape

STYLES = {"yes": "green", "own": "yellow", "no": "dim"}


def add_to(program: typer.Typer) -> None:
    command(program, "authority", section="Reference", gateway=True)(authority)


async def authority(
    cli: Cli,
    rule: Annotated[
        str | None, typer.Argument(metavar="RULE", help="Only this rule, such as jobs.requeue; a refusal names it.")
    ] = None,
    role: Annotated[str | None, typer.Option("--role", metavar="ROLE", help="Show what this role may do.")] = None,
) -> None:
    """Show which role may do what.

    `own` means: only jobs that the role was given or submitted itself. A refused call names its rule; give that rule and
    your role, and you see who may.
    """
    async with cli.api() as api:
        rules = (await api.system.authority()).items
    chosen = rules if rule is None else [one for one in rules if one.name == rule]
    if not chosen:
        raise _unknown("RULE", rule, [one.name for one in rules])
    if role is not None and role not in chosen[0].grants:
        raise _unknown("--role", role, list(chosen[0].grants))
    cli.out.listing(chosen, [*COLUMNS[:2], *_of_role(role), *COLUMNS[2:]], empty="There is no rule.")


def _unknown(option: str, value: str | None, known: list[str]) -> OptionInvalid:
    expected = f"choose one of {', '.join(known)}{values.did_you_mean(str(value), known)}"
    return OptionInvalid(option=option, value=value, expected=expected)


def _of_role(role: str | None) -> list[ListingColumn[RuleShape]]:
    if role is None:
        return []
    return [ListingColumn[RuleShape](title=role.upper(), cell=lambda one: _styled(one.grants[role]))]


def _styled(grant: str) -> Text:
    return Text(grant, STYLES.get(grant, ""))


def _holders(one: RuleShape) -> str:
    held = [role if grant == "yes" else f"{role} ({grant})" for role, grant in one.grants.items() if grant != "no"]
    return ", ".join(held) or "nobody"


COLUMNS = (
    ListingColumn[RuleShape](title="RULE", cell=lambda one: one.name),
    ListingColumn[RuleShape](title="ACTION", cell=lambda one: one.action),
    ListingColumn[RuleShape](title="WHO MAY", cell=_holders, wraps=True),
    ListingColumn[RuleShape](title="SOURCE", cell=lambda one: one.source),
)
