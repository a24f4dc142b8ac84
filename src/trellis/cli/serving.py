"""The part of `trellis up` that has a gateway: its address is taken first, then everything begins, and all of it ends together."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from trellis.cli.invocation import Cli, sqlite_path
from trellis.cli.up import GATEWAY, say_ready, say_services
from trellis.engine.errors import KeyUnusable
from trellis.gateway import create_app
from trellis.identity import TrustedKey
from trellis.instance import open_instance, role_of
from trellis.web.server import Listening, ServerOptions, listen, serve_gateway
from trellis.wiring import callback_secrets, is_key_configured, new_id, process_name, trusted_keys

LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})


async def serve_all(
    cli: Cli, roles: frozenset[str] | None, stop: asyncio.Event, *, host: str | None, port: int | None, demo: bool
) -> None:
    """Serve these roles, or all, until `stop` is set."""
    options = ServerOptions(
        host=cli.settings.host if host is None else host,
        port=cli.settings.port if port is None else port,
        tls_cert_file=cli.settings.tls_cert_file,
        tls_key_file=cli.settings.tls_key_file,
    )
    listening, keys = _listening(cli, roles, options)
    try:
        async with open_instance(cli.settings, cli.url, name=process_name("up")) as instance:
            if demo:
                await instance.plant()
            cli.out.line(f"objects   {instance.objects.url}")
            cli.out.line(f"memory    {instance.places.memory}")
            names = [service.name for service in instance.services()]
            say_services(cli, [name for name in names if roles is None or role_of(name) in roles])
            if listening is None:
                _say_no_gateway(cli, roles)
                await instance.serve(stop, roles)
                return
            secrets = callback_secrets(cli.url, cli.settings)
            app = create_app(instance, keys, monotonic=time.monotonic, new_id=new_id, callback_secrets=secrets)
            gateway = serve_gateway(
                app,
                listening,
                options,
                stop,
                end_streams=app.state.streams.hub.close,
                ready=lambda: _say_gateway(cli, listening),
            )
            await _together(stop, gateway, instance.serve(stop, roles))
    finally:
        if listening is not None:
            listening.close()


def _listening(
    cli: Cli, roles: frozenset[str] | None, options: ServerOptions
) -> tuple[Listening | None, Sequence[TrustedKey]]:
    """The gateway's address, taken before anything else begins, and the keys it trusts."""
    if roles is not None and GATEWAY not in roles:
        return None, ()
    try:
        keys = trusted_keys(cli.url, cli.settings)
    except KeyUnusable:
        if roles is not None or is_key_configured(cli.settings) or options.host not in LOCAL:
            raise
        # Nobody could show who they are, and nobody asked for a gateway: the services run without one.
        return None, ()
    return listen(options, key_configured=is_key_configured(cli.settings)), keys


async def _together(stop: asyncio.Event, *parts: Coroutine[Any, Any, None]) -> None:
    """Until all have ended; when one fails, the others stop in good order and its error is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    stop.set()
    for task in tasks:
        await task


def _say_gateway(cli: Cli, listening: Listening) -> None:
    """Where it is, and how to be let in."""
    cli.out.line(f"gateway   {listening.url}")
    if not listening.is_local and listening.tls is None:
        cli.out.note("tokens travel unencrypted: set TRELLIS_TLS_CERT_FILE, or keep it behind a proxy that has TLS")
    settings = cli.settings
    if settings.token_jwks_file is not None and settings.token_signing_key_file is None:
        cli.out.line(f"tokens    of {settings.token_issuer}")
    else:
        place = f" --ledger {cli.url}" if sqlite_path(cli.url) is not None else ""
        cli.out.line(f"tokens    trellis token issue --role owner{place}")
    say_ready(cli)


def _say_no_gateway(cli: Cli, roles: frozenset[str] | None) -> None:
    if roles is None:
        cli.out.line("gateway   none: set TRELLIS_TOKEN_JWKS_FILE or TRELLIS_TOKEN_KEY_FILE")
    say_ready(cli)
