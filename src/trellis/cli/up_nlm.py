"""The NLM backend of `trellis up`: embedded in the process of the gateway, or alone.

An embedded backend serves this process only: it may use another free port, and is left out with a message if a required
key is missing. A backend requested by role starts exactly as configured, or fails. Queue jobs that could not succeed
from this process stay untouched: no attempt is started that can only fail.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address

from trellis.app.settings import Settings
from trellis.app.wiring import component_token, is_key_configured, make_development_key, process_name, trusted_keys
from trellis.auth.tokens import TrustedKey
from trellis.cli.invocation import Cli, sqlite_path
from trellis.cli.problems import without_password
from trellis.cli.up_process import NLM, print_ready, run_together
from trellis.engine.errors import KeyUnusable
from trellis.http_server.health import ProcessHealth
from trellis.http_server.server import BoundSockets, ListenRefused, ServerOptions, listen, serve_gateway
from trellis.lifecycles import Role
from trellis.net.targets import read_target
from trellis.nlm_backend import BackendProcess, open_backend
from trellis.operations.metrics import ledger_gauges

LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
NO_ADDRESS = "set TRELLIS_GATEWAY to the address that the gateway's certificate names"
NO_GATEWAY = "set TRELLIS_GATEWAY to the address where the NLM backend finds the gateway"
NO_BACKEND = "there is no NLM backend here; set TRELLIS_NLM_BACKEND, or what the line above names"


@dataclass(frozen=True, kw_only=True)
class NlmEndpoint:
    """The sockets of the backend, and the keys it trusts."""

    options: ServerOptions
    listening: BoundSockets
    keys: Sequence[TrustedKey]
    instead_of: int | None = None
    """The usual port, if it was in use and another was taken."""

    @property
    def described(self) -> str:
        """Its address, and why it is not the usual one."""
        why = f" (port {self.instead_of} is in use; TRELLIS_NLM_PORT chooses one)" if self.instead_of else ""
        return f"{self.listening.url}{why}"

    async def serve(self, backend: BackendProcess, stop: asyncio.Event, *, alone: Cli | None = None) -> None:
        """Serve requests and run the backend's jobs until `stop` is set."""
        app = backend.app(self.keys)
        ready = None if alone is None else lambda: print_ready(alone)
        answering = serve_gateway(app, self.listening, self.options, stop, ready=ready)
        await run_together(stop, answering, backend.serve(stop))


async def serve_nlm_alone(cli: Cli, stop: asyncio.Event, health: ProcessHealth) -> None:
    """Run only the backend. The main ledger is not opened; at most the key beside it is used."""
    settings = cli.settings
    if sqlite_path(cli.url) is not None and not (is_key_configured(settings) and settings.callback_key_file):
        make_development_key(cli.url)
    place = _place(settings, trusted_keys(cli.url, settings))
    try:
        async with open_backend(settings, cli.url, name=process_name(NLM)) as backend:
            health.needs(ledger=backend.ledger.ping)
            health.measures(partial(ledger_gauges, backend.ledger))
            url = settings.nlm_ledger_of(cli.url)
            cli.out.line(f"ledger    {without_password(url, url)}")
            cli.out.line(f"nlm       {place.listening.url}")
            _note_own_ledger(cli)
            if not place.listening.is_local and place.listening.tls is None:
                cli.out.note(
                    "tokens travel unencrypted: set TRELLIS_TLS_CERT_FILE, or keep it behind a proxy that has TLS"
                )
            await place.serve(backend, stop, alone=cli)
    finally:
        place.listening.close()


def bind_nlm_endpoint(cli: Cli, roles: frozenset[str] | None, keys: Sequence[TrustedKey]) -> NlmEndpoint | None:
    """The endpoint of a backend in this process, bound before anything starts; None if there is none."""
    if roles is not None:
        return _place(cli.settings, keys or trusted_keys(cli.url, cli.settings)) if NLM in roles else None
    if not keys or cli.settings.nlm_backend is not None:
        return None
    try:
        return _place(cli.settings, keys)
    except ListenRefused:
        if "nlm_port" in cli.settings.model_fields_set:
            raise
        free = _place(cli.settings.model_copy(update={"nlm_port": 0}), keys)
        return replace(free, instead_of=cli.settings.nlm_port)


def with_own_addresses(settings: Settings, gateway: BoundSockets | None, nlm: NlmEndpoint | None) -> Settings:
    """The settings with this process's own addresses where none are set, so that its parts find each other.

    A gateway with a certificate is reached by the name in the certificate, which only the settings can tell.
    """
    return settings.with_own_addresses(
        gateway=None if gateway is None or gateway.tls is not None else _own_address(gateway),
        nlm_backend=None if nlm is None else _own_address(nlm.listening),
    )


async def open_embedded(
    cli: Cli, settings: Settings, place: NlmEndpoint | None, stack: AsyncExitStack, *, asked_for: bool
) -> BackendProcess | None:
    """The backend of this process, closed with the stack; None, with a printed reason, if a key for it is missing."""
    if place is None:
        return None
    if settings.gateway is None and not asked_for:
        return _warn_left_out(cli, place, NO_ADDRESS)
    try:
        backend = await stack.enter_async_context(open_backend(settings, cli.url, name=process_name(NLM)))
    except KeyUnusable as error:
        if asked_for:
            raise
        return _warn_left_out(cli, place, str(error.data["reason"]))
    cli.out.line(f"nlm       {place.described}")
    _note_own_ledger(cli)
    return backend


def why_no_queue(cli: Cli, settings: Settings, backend: BackendProcess | None) -> str | None:
    """Why queue jobs cannot succeed from this process, and what to set; None if they can.

    `settings` are those of `with_own_addresses`.
    """
    if settings.gateway is None:
        return NO_ADDRESS if settings.tls_cert_file is not None else NO_GATEWAY
    if backend is None:
        elsewhere = cli.settings.nlm_backend
        if elsewhere is None:
            return NO_BACKEND
        if cli.settings.gateway is None and read_target(elsewhere).host not in LOCAL:
            return NO_GATEWAY
    try:
        component_token(cli.url, settings, Role.ORCHESTRATOR)
    except KeyUnusable as error:
        return f"the NLM backend would not know us: {error.data['reason']}; or set TRELLIS_TOKEN with role orchestrator"
    return None


def _warn_left_out(cli: Cli, place: NlmEndpoint, reason: str) -> None:
    place.listening.close()  # so that clients are refused at once
    cli.out.line(f"nlm       none: {reason}")


def _note_own_ledger(cli: Cli) -> None:
    """Warn about a ledger in local files: it is enough for one backend, but not for several behind one address."""
    if sqlite_path(cli.url) is None and cli.settings.nlm_ledger is None:
        place = cli.settings.nlm_ledger_of(cli.url).removeprefix("sqlite:///")
        cli.out.note(
            f"this NLM backend keeps its jobs in {place} in the working folder: set TRELLIS_NLM_LEDGER where several share one address"
        )


def _place(settings: Settings, keys: Sequence[TrustedKey]) -> NlmEndpoint:
    options = ServerOptions(
        host=settings.nlm_host,
        port=settings.nlm_port,
        service="NLM backend",
        host_setting="TRELLIS_NLM_HOST",
        port_setting="TRELLIS_NLM_PORT",
    )
    if settings.nlm_host not in LOCAL:  # a certificate is for a name that others use
        options = replace(options, tls_cert_file=settings.tls_cert_file, tls_key_file=settings.tls_key_file)
    return NlmEndpoint(
        options=options, listening=listen(options, key_configured=is_key_configured(settings)), keys=keys
    )


def _own_address(listening: BoundSockets) -> str:
    """The address by which this process reaches itself; 127.0.0.1 if it listens on all addresses."""
    scheme, _, rest = listening.url.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        anywhere = ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        anywhere = False
    return f"{scheme}://127.0.0.1:{port}" if anywhere else listening.url
