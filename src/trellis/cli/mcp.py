"""`trellis mcp`: runs, proposals and jobs as tools of another program's model, on standard input and output."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import typer

from trellis.app.wiring import check_home_issuer, new_id, token_key, trusted_keys
from trellis.auth.tokens import issue
from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.cli.problems import message_for_person, remedy_for
from trellis.engine.errors import TrellisError
from trellis.lifecycles import Role
from trellis.mcp_server.protocol import McpServer
from trellis.mcp_server.stdio import serve_stdio

OWN_ROLES = (Role.OWNER, Role.CONTROL_PLANE)
"""What the person who can read the ledger's key is in every command."""
OWN_TOKEN_S = 3600.0


def add_to(program: typer.Typer) -> None:
    command(program, "mcp", section="Agents", gateway=True, json=False)(mcp)


async def mcp(cli: Cli) -> None:
    """Serve runs, proposals and jobs as tools for an MCP client, on standard input and output.

    The client starts this command itself. It works on a local instance, or through a gateway with --gateway, under the authority of TRELLIS_TOKEN. Without a token it
    acts as you on a local instance, but decides about no proposal: that needs a token whose role may decide. Every gateway serves the same tools over HTTP at /mcp,
    to whoever shows a token there. docs/how-to/use-from-mcp.md says how clients are set up.
    """
    async with _server(cli) as server:
        await serve_stdio(server)


@asynccontextmanager
async def _server(cli: Cli) -> AsyncGenerator[McpServer]:
    """The server, on the gateway of this command or on a local instance."""

    def explain(error: TrellisError) -> str:
        remedy = remedy_for(error)
        return message_for_person(error) + (f" → {cli.typed(remedy)}" if remedy else "")

    has_token = cli.settings.shown_token() is not None
    if cli.gateway_url is not None:
        async with cli.client() as client:
            yield McpServer(client=client, decides=has_token, explain=explain)
        return
    # The web framework is slow to import, and only a local instance needs it.
    from trellis.gateway import create_app
    from trellis.gateway.in_process import open_in_process

    async with cli.instance() as instance:
        await check_home_issuer(instance.ledger, cli.settings)
        keys = trusted_keys(cli.url, cli.settings)
        app = create_app(instance, keys, monotonic=time.monotonic, new_id=new_id)
        token = cli.settings.shown_token if has_token else _own_token(cli)
        async with open_in_process(app, token) as client:
            yield McpServer(client=client, decides=has_token, explain=explain)


def _own_token(cli: Cli) -> Callable[[], str]:
    """Tokens of the person who started this command. They never leave the process. Raises KeyUnusable."""
    key, name = token_key(cli.url, cli.settings), cli.person

    def token() -> str:
        return issue(key, name=name, roles=OWN_ROLES, ttl_s=OWN_TOKEN_S, now=time.time())

    return token
