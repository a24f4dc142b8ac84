"""How the commands about agents open the instance they are about, and who they act for."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from trellis.app.wiring import identify, principal_for
from trellis.auth.principals import Principal
from trellis.cli.invocation import Cli, refuse_missing
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role

if TYPE_CHECKING:  # an instance brings all of the platform with it, and is loaded by those who open one
    from trellis.app.instance import Instance


@asynccontextmanager
async def open_for_command(cli: Cli) -> "AsyncGenerator[Instance]":
    """Ledger, object store and memory of this call. Reading needs no token, but one that is shown must be good."""
    from trellis.app.instance import open_instance

    refuse_missing(cli.url)
    identify(cli.url, cli.settings)
    async with open_instance(cli.settings, cli.url, name=cli.person) as instance:
        yield instance


def owner(cli: Cli, action: str) -> Actor:
    """The person at this keyboard: whoever can read the ledger's key, or has a token that says so. Raises NotAllowed."""
    return Actor(role=Role.OWNER, name=person(cli, action).name)


def person(cli: Cli, action: str) -> Principal:
    """The same, as a principal: what its token is bound to counts, too. Raises NotAllowed."""
    identity = identify(cli.url, cli.settings)
    principal = principal_for(cli.url, name=cli.person, operator=identity is None, identity=identity)
    principal.acting(Role.OWNER, Role.CONTROL_PLANE, action=action)
    return principal


def reader(cli: Cli, action: str) -> Principal:
    """Who reads what not everybody may: as the token says, else the owner of this ledger, who can read its key. Raises NotAllowed."""
    identity = identify(cli.url, cli.settings)
    if identity is not None:
        return principal_for(cli.url, name=identity.name, operator=False, identity=identity)
    principal = person(cli, action)
    return replace(principal, roles=principal.roles | {Role.OWNER})


def operator(cli: Cli, action: str) -> Actor:
    """The operator at this keyboard: whoever can read the ledger's key, or has a token that says so. Raises NotAllowed."""
    identity = identify(cli.url, cli.settings)
    principal = principal_for(cli.url, name=cli.person, operator=identity is None, identity=identity)
    return principal.acting(Role.CONTROL_PLANE, action=action)
