"""The part of `trellis up` with a gateway. Its address is bound first, then all parts start, and they end together."""

import asyncio
import shlex
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from trellis.app.instance import Instance, is_of_queue, open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import (
    callback_secrets,
    check_home_issuer,
    is_key_configured,
    new_id,
    process_name,
    trusted_keys,
)
from trellis.auth.tokens import TrustedKey
from trellis.cli.applications import load_app
from trellis.cli.invocation import Cli, sqlite_path, user_name
from trellis.cli.up_bus import (
    BusProcess,
    bus_probe,
    bus_roles,
    check_app,
    serve_safety_kernel,
    serve_services,
    wants_kernel,
)
from trellis.cli.up_nlm import LOCAL, NlmEndpoint, bind_nlm_endpoint, open_embedded, why_no_queue, with_own_addresses
from trellis.cli.up_process import (
    GATEWAY,
    ORCHESTRATOR,
    UP,
    UpOptions,
    print_others,
    print_ready,
    print_services,
    process_part_name,
    run_together,
    uses_memory,
)
from trellis.cli.wait import announce_gateway
from trellis.engine.errors import KeyUnusable
from trellis.engine.jobs import Actor
from trellis.gateway import create_app
from trellis.gateway.console import is_built as is_console_built
from trellis.gateway.sign_in import SignInCodes
from trellis.http_server.health import ProcessHealth
from trellis.http_server.server import BoundSockets, ServerOptions, listen, serve_gateway
from trellis.lifecycles import Role
from trellis.nlm_backend import BackendProcess
from trellis.operations.metrics import ledger_gauges
from trellis.worker.app import App


async def serve_all(
    cli: Cli, roles: frozenset[str] | None, stop: asyncio.Event, choices: UpOptions, health: ProcessHealth
) -> None:
    """Serve these roles, or all, until `stop` is set."""
    loaded = _loaded(cli, roles, choices.app)
    options = ServerOptions(
        host=cli.settings.host if choices.host is None else choices.host,
        port=cli.settings.port if choices.port is None else choices.port,
        tls_cert_file=cli.settings.tls_cert_file,
        tls_key_file=cli.settings.tls_key_file,
    )
    listening, keys, why_none = _listening(cli, roles, options)
    nlm: NlmEndpoint | None = None
    try:
        nlm = bind_nlm_endpoint(cli, roles, keys)
        settings = with_own_addresses(cli.settings, listening, nlm)
        async with AsyncExitStack() as stack:
            name = process_name(UP)
            instance = await stack.enter_async_context(
                open_instance(
                    settings, cli.url, name=name, part=process_part_name(roles), uses_memory=uses_memory(roles)
                )
            )
            if listening is not None:
                await check_home_issuer(instance.ledger, cli.settings, by=Actor(role=Role.GATEWAY, name=name))
            await print_others(cli, instance.ledger)
            if choices.demo:
                await instance.plant()
            cli.out.line(f"objects   {instance.objects.url}")
            cli.out.line(f"memory    {instance.places.memory or f'through {instance.gateway_url}'}")
            backend = await open_embedded(cli, settings, nlm, stack, asked_for=roles is not None)
            queue_jobs = _drives_queue_jobs(cli, roles, settings, backend)
            services = instance.services_of(roles)
            print_services(cli, [one.name for one in services if queue_jobs or not is_of_queue(one)])
            part = _bus(instance, roles, loaded)
            on_bus = None if part is None else await stack.enter_async_context(part.opened(cli))
            parts = [instance.serve(stop, roles, queue_jobs=queue_jobs)]
            health.needs(**instance.probes())
            health.measures(partial(ledger_gauges, instance.ledger))
            if nlm is not None and backend is not None:
                parts.append(nlm.serve(backend, stop))
            if on_bus is not None:
                health.needs(bus=bus_probe(on_bus))
                parts.append(serve_services(on_bus, stop))
            if wants_kernel(roles):
                parts.append(serve_safety_kernel(cli, stop, alone=False))
            if listening is None:
                _print_no_gateway(cli, why_none)
            else:
                parts.append(_gateway(cli, instance, listening, options, keys, stop))
            await run_together(stop, *parts)
    finally:
        for place in (listening, None if nlm is None else nlm.listening):
            if place is not None:
                place.close()


def _loaded(cli: Cli, roles: frozenset[str] | None, app: str | None) -> App | None:
    """The application whose topics are served here, loaded before anything starts; raises OptionInvalid."""
    if app is None:
        return None
    check_app(cli.settings, roles)
    return load_app(app)


def _bus(instance: Instance, roles: frozenset[str] | None, app: App | None) -> BusProcess | None:
    """The bus part of this process; None without bus roles."""
    on_bus = bus_roles(roles)
    if not on_bus:
        return None
    return BusProcess(
        settings=instance.settings,
        ledger=instance.ledger,
        topics=instance.topics,
        kernel=instance.kernel,
        roles=on_bus,
        app=app,
        pointers=instance.pointers,
        schedulers=instance.schedulers,
    )


def _drives_queue_jobs(
    cli: Cli, roles: frozenset[str] | None, settings: Settings, backend: BackendProcess | None
) -> bool:
    """Whether this process drives queue jobs. If it should but cannot, prints the reason."""
    if roles is not None and ORCHESTRATOR not in roles:
        return False
    reason = why_no_queue(cli, settings, backend)
    if reason is not None:
        cli.out.line(f"queue     none, jobs stay PENDING: {reason}")
    return reason is None


async def _gateway(
    cli: Cli,
    instance: Instance,
    listening: BoundSockets,
    options: ServerOptions,
    keys: Sequence[TrustedKey],
    stop: asyncio.Event,
) -> None:
    secrets = callback_secrets(cli.url, cli.settings)
    codes = _sign_in_codes(cli, listening, keys)
    app = create_app(
        instance, keys, monotonic=time.monotonic, new_id=new_id, callback_secrets=secrets, sign_in_codes=codes
    )
    with announce_gateway(cli, listening.url, app.state.instance_name):
        await serve_gateway(
            app,
            listening,
            options,
            stop,
            end_streams=app.state.streams.hub.close,
            ready=lambda: _print_gateway(cli, listening, codes),
        )


def _sign_in_codes(cli: Cli, listening: BoundSockets, keys: Sequence[TrustedKey]) -> SignInCodes | None:
    """Codes for sign-in links; None with a configured key, or where others can reach the gateway."""
    if is_key_configured(cli.settings) or not listening.is_local:
        return None
    return SignInCodes(key=keys[0], name=user_name(), now=time.time)


def _listening(
    cli: Cli, roles: frozenset[str] | None, options: ServerOptions
) -> tuple[BoundSockets | None, Sequence[TrustedKey], str | None]:
    """The gateway's sockets, bound before anything else starts, and the trusted keys.

    Last, why there is no gateway although none of the roles was chosen by name; else None.
    """
    if roles is not None and GATEWAY not in roles:
        return None, (), None
    try:
        keys = trusted_keys(cli.url, cli.settings)
    except KeyUnusable as error:
        if roles is not None or is_key_configured(cli.settings) or options.host not in LOCAL:
            raise
        # No caller could authenticate, and no gateway was requested by name: run the services without one.
        return None, (), _why_no_gateway(cli, error)
    return listen(options, key_configured=is_key_configured(cli.settings)), keys, None


def _why_no_gateway(cli: Cli, error: KeyUnusable) -> str:
    """What is wrong with the key beside an SQLite ledger, and the cure; on any other ledger, what to set."""
    if sqlite_path(cli.url) is None:
        return "set TRELLIS_TOKEN_JWKS_FILE or TRELLIS_TOKEN_KEY_FILE"
    from trellis.cli.machine_checks import development_key_cure  # only an unusable key needs it

    reason, cure = str(error.data["reason"]), development_key_cure(cli.url)
    return reason if cure in reason else f"{reason}; to mend it: {cli.typed(cure)}"


def _print_gateway(cli: Cli, listening: BoundSockets, codes: SignInCodes | None) -> None:
    """Print the gateway's address, a link that signs in to its console, and how to get a token."""
    cli.out.line(f"gateway   {listening.url}")
    cli.out.line(f"console   {listening.url}/{'' if codes is None else f'#code={codes.new_code()}'}")
    if not is_console_built():
        cli.out.note("the console is not built; its address says what is missing")
    cli.out.line(f"docs      {listening.url}/docs")
    if not listening.is_local and listening.tls is None:
        cli.out.note("tokens travel unencrypted: set TRELLIS_TLS_CERT_FILE, or keep it behind a proxy that has TLS")
    settings = cli.settings
    if settings.token_jwks_file is not None and settings.token_signing_key_file is None:
        cli.out.line(f"tokens    of {settings.token_issuer}")
    else:
        place = f" --ledger {shlex.quote(cli.url)}" if sqlite_path(cli.url) is not None else ""
        cli.out.line(f"tokens    {cli.command(f'token issue --role owner{place}')}")
    print_ready(cli)


def _print_no_gateway(cli: Cli, reason: str | None) -> None:
    if reason is not None:
        cli.out.line(f"gateway   none: {reason}")
    print_ready(cli)
