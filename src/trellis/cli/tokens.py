"""`trellis token issue`: a token for a program that should act in some roles and no others."""

import getpass
import time
from typing import Annotated

import typer

from trellis.cli import values
from trellis.cli.commands import command, group
from trellis.cli.invocation import Cli, refuse_missing
from trellis.identity import TTL_S_DEFAULT, issue, roles_of
from trellis.lifecycles import Role
from trellis.operations.explain import duration
from trellis.wiring import token_key


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    token = group(program, "token", section="Ledger", help_="Tokens that say who a program is and what it may do.")
    command(token, "issue")(issue_token)


def issue_token(
    cli: Cli,
    role: Annotated[
        list[str], typer.Option("--role", metavar="ROLE", help="What its bearer may act as; again for another.")
    ],
    sub: Annotated[
        str | None, typer.Option("--sub", metavar="NAME", help="Whom events will name; by default the user's name.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option("--ttl", metavar="TIME", help="How long it is good for: 1h by default, 24h at most.")
    ] = None,
) -> None:
    """Print a token, alone, on standard output.

    It is signed with the ledger's key: the file beside an SQLite ledger that `migrate` makes, or TRELLIS_TOKEN_KEY_FILE. Programs take it from
    TRELLIS_TOKEN, from the file that TRELLIS_TOKEN_FILE names, or as connect(url, token=…); never from a command line, which others can see.
    """
    given_s = values.seconds("--ttl", ttl)
    ttl_s = TTL_S_DEFAULT if given_s is None else given_s
    roles = roles_of(name.strip() for several in role for name in several.split(","))
    if cli.settings.token_key_file is None:
        refuse_missing(cli.url)
    name = _user() if sub is None else sub
    token = issue(token_key(cli.url, cli.settings), name=name, roles=roles, ttl_s=ttl_s, now=time.time())
    chosen = [one.value for one in Role if one in roles]
    if cli.out.as_json:
        cli.out.record({"token": token, "sub": name, "role": chosen, "ttl_s": ttl_s})
    else:
        cli.out.line(token)
        cli.out.note(f"{name} is {' and '.join(chosen)} with it for {duration(ttl_s)}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "cli"
