"""`trellis token issue`: issues a token that is limited to some roles."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from trellis.app.wiring import token_key
from trellis.auth.tokens import TTL_S_DEFAULT, issue, make_private_jwk, roles_of, ttl_fault
from trellis.cli import values
from trellis.cli.commands import ReasonOption, command, group
from trellis.cli.invocation import Cli, refuse_missing, user_name
from trellis.engine.admin_acts import TOKEN_ISSUED, NewAct
from trellis.engine.closing import closing
from trellis.engine.errors import KeyUnusable, OptionInvalid
from trellis.engine.jobs import Actor
from trellis.engine.private_files import write_private
from trellis.engine.text import duration
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role


def add_to(program: typer.Typer) -> None:
    token = group(program, "token", section="Ledger", help_="Access tokens: issue one, make a key, record an issuer.")
    command(token, "issue")(issue_token)
    command(token, "key")(make_key)
    command(token, "issuer")(home_issuer)


async def issue_token(
    cli: Cli,
    role: Annotated[list[str], typer.Option("--role", metavar="ROLE", help="A role of the token; may be repeated.")],
    sub: Annotated[
        str | None,
        typer.Option("--sub", metavar="NAME", help="The subject, whom events name; default: your user name."),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="TENANT", help="Limit the token to the jobs of this tenant."),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option("--agent", metavar="SLUG", help="Limit the token to this agent; required for agent-runtime."),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", metavar="TIME", help="How long the token is valid: 1h by default, 24h at most."),
    ] = None,
    reason: ReasonOption = None,
) -> None:
    """Print a token, alone, on standard output.

    It is signed with the private key that TRELLIS_TOKEN_SIGNING_KEY_FILE names, else with the secret of TRELLIS_TOKEN_KEY_FILE, else with the key
    that `migrate` makes beside an SQLite ledger. Programs take it from TRELLIS_TOKEN, from the file that TRELLIS_TOKEN_FILE names, or as connect(url, token=…); never from a command line, which others can see. Who issued it, for whom and why is recorded in the ledger first, whichever key signs; the token itself is not.
    """
    given_s = values.seconds("--ttl", ttl)
    ttl_s = TTL_S_DEFAULT if given_s is None else given_s
    roles = roles_of(name.strip() for several in role for name in several.split(","))
    if Role.AGENT_RUNTIME in roles and agent is None:
        expected = "a token for an agent's runtime is for one agent; name it"
        raise OptionInvalid(option="--agent", value=None, expected=expected)
    refuse_missing(cli.url)
    name = user_name() if sub is None else sub
    key, now = token_key(cli.url, cli.settings), time.time()
    if (fault := ttl_fault(key, ttl_s)) is not None:
        raise OptionInvalid(option="--ttl", value=ttl or f"{ttl_s:g}s", expected=fault)
    token = issue(key, name=name, roles=roles, ttl_s=ttl_s, now=now, tenant=tenant, agent=agent)
    chosen = [one.value for one in Role if one in roles]
    bound = {word: value for word, value in (("tenant", tenant), ("agent", agent)) if value is not None}
    await _record(cli, name, [*chosen, *map("=".join, bound.items())], ttl_s, reason)
    if cli.out.as_json:
        cli.out.record({"token": token, "sub": name, "role": chosen, "ttl_s": ttl_s, **bound})
    else:
        cli.out.line(token)
        cli.out.note(f"{name} is {' and '.join(chosen)} with it for {duration(ttl_s)}")


async def _record(cli: Cli, name: str, gives: list[str], ttl_s: float, reason: str | None) -> None:
    """Record that a token is issued before it is printed: without a record it is not issued."""
    target = f"{', '.join(gives)} for {duration(ttl_s)}"
    act = NewAct(event=TOKEN_ISSUED, subject=name, target=target, cause=reason)
    async with closing(await open_ledger(cli.url)) as ledger:  # whatever token is configured: it may have expired
        await ledger.record_act(Actor(role=Role.CONTROL_PLANE, name=cli.person), act)


def make_key(
    cli: Cli,
    kid: Annotated[str, typer.Argument(metavar="KID", help="The key's id in a key set; a date is a good one.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The file for the private key; it must not exist yet.")
    ],
    alg: Annotated[str, typer.Option("--alg", metavar="ALG", help="Ed25519 or ES256.")] = "Ed25519",
) -> None:
    """Make a key pair for tokens: the private key into a file, the public one to standard output.

    Put the public key into the set that TRELLIS_TOKEN_JWKS_FILE names ({"keys": […]}) wherever tokens are verified; name the private file by
    TRELLIS_TOKEN_SIGNING_KEY_FILE where they are issued. Keep the old key in the set until its last token has ended.
    """
    private = make_private_jwk(kid, alg)
    try:
        write_private(out, json.dumps(private) + "\n")
    except OSError as error:
        raise KeyUnusable(reason=f"{out} cannot be written: {error.strerror}") from error
    cli.out.line(json.dumps({name: value for name, value in private.items() if name != "d"}))
    cli.out.note(f"{out} holds the private key; keep it")


async def home_issuer(
    cli: Cli,
    issuer: Annotated[
        str | None, typer.Argument(metavar="ISSUER", help="The new issuer, as TRELLIS_TOKEN_ISSUER will name it.")
    ] = None,
    replaces: Annotated[
        str | None, typer.Option("--replaces", metavar="ISSUER", help="The issuer that is recorded now.")
    ] = None,
    reason: ReasonOption = None,
) -> None:
    """Show whose tokens the plain names in the ledger are from, or record that another issuer names the same people.

    The first gateway records its issuer. One that is set to another issuer does not start: it would pass the jobs of one issuer's subjects to
    the other's of the same name. Use this when that is meant, because both issuers name the same people.
    """
    if (issuer is None) != (replaces is None):
        raise OptionInvalid(option="--replaces", value=replaces, expected="give the new issuer and the one it replaces")
    actor = None if issuer is None else cli.operator("replace the issuer")
    refuse_missing(cli.url)
    async with closing(await open_ledger(cli.url)) as ledger:
        before = await ledger.home_issuer()
        if actor is not None and issuer is not None:
            if before != replaces:
                expected = f"the issuer that is recorded is {before or 'none'}"
                raise OptionInvalid(option="--replaces", value=replaces, expected=expected)
            before = await ledger.set_home_issuer(actor, issuer, replaces=replaces, cause=reason)
    cli.out.answer({"issuer": before}, before or "none is recorded; the first gateway records its own")
