"""How the commands about agents open the instance they are about, and who they act for."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from trellis.cli.invocation import Cli, refuse_missing
from trellis.engine.jobs import Actor
from trellis.instance import Instance, open_instance
from trellis.lifecycles import Role
from trellis.wiring import identify, principal_for


@asynccontextmanager
async def opened(cli: Cli) -> AsyncGenerator[Instance]:
    """Ledger, object store and memory of this call. Reading needs no token, but one that is shown must be good."""
    refuse_missing(cli.url)
    identify(cli.url, cli.settings)
    async with open_instance(cli.settings, cli.url, name=cli.person) as instance:
        yield instance


def owner(cli: Cli, action: str) -> Actor:
    """The person at this keyboard: whoever can read the ledger's key, or has a token that says so. Raises NotAllowed."""
    identity = identify(cli.url, cli.settings)
    principal = principal_for(cli.url, name=cli.person, operator=identity is None, identity=identity)
    principal.acting(Role.OWNER, Role.CONTROL_PLANE, action=action)
    return Actor(role=Role.OWNER, name=principal.name)
