"""Opens the instance for commands about agents, and determines who they act for."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trellis.app.wiring import identify, principal_for
from trellis.auth.principals import Principal
from trellis.cli.invocation import Cli, refuse_missing
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role

if TYPE_CHECKING:  # loads the whole platform, so only commands that open an instance import it
    from trellis.app.instance import Instance


@asynccontextmanager
async def open_for_command(cli: Cli) -> "AsyncGenerator[Instance]":
    """The instance of this call. Reading needs no token, but a token that is given must be valid."""
    from trellis.app.instance import open_instance

    refuse_missing(cli.url)
    identify(cli.url, cli.settings)
    async with open_instance(cli.settings, cli.url, name=cli.person) as instance:
        yield instance


def person(cli: Cli, action: str) -> Principal:
    """The local owner as a principal, with the restrictions of the token. Raises NotAllowed."""
    identity = identify(cli.url, cli.settings)
    principal = principal_for(cli.url, name=cli.person, operator=identity is None, identity=identity)
    principal.acting(Role.OWNER, Role.CONTROL_PLANE, action=action)
    return principal


def operator(cli: Cli, action: str) -> Actor:
    """The local operator, proven by read access to the ledger's key or by a token. Raises NotAllowed."""
    identity = identify(cli.url, cli.settings)
    principal = principal_for(cli.url, name=cli.person, operator=identity is None, identity=identity)
    return principal.acting(Role.CONTROL_PLANE, action=action)
