"""Wires the parts together, and gives them the real time, ids and randomness of `system`. No other module does."""

import os
import random
import re
import secrets
import ssl
import stat
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, overload

from trellis.app.settings import Settings, read_settings
from trellis.app.system import SystemClock, elapsed_s, new_id, new_job_id, process_name
from trellis.auth.principals import LOCAL_ROLES, Principal
from trellis.auth.tokens import Identity, TrustedKey, issue, key_set, private_key, symmetric_key, verify
from trellis.client import Trellis
from trellis.engine.closing import closing
from trellis.engine.errors import KeyUnusable, NotAllowed, OptionInvalid, SettingsInvalid, TokenRefused
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.private_files import check_owner, read_private, write_private
from trellis.http.address import is_gateway_url, is_readable_on_the_way
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.options import WorkerOptions

if TYPE_CHECKING:  # HTTP and the bus are imported on use: importing HTTP takes as long as everything else
    from trellis.bus.submitter import BacklogLimit, BusSubmitter
    from trellis.http.calls import CallOptions
    from trellis.http.client import GatewayClient
    from trellis.http.sync import SyncGatewayClient
    from trellis.worker.worker import Worker

KEY_SUFFIX = ".key"
KEY_BYTES = 32
"""The key length that HS256 needs, in bytes. Written in hexadecimal."""
ISSUER = "trellis"
"""The issuer of tokens signed with a local key file."""
KEY_LINES_MAX = 4
KEY_SET_LOOK_S = 1.0
"""Minimum interval between two checks of a key set's file for changes."""
COMPONENT_TOKEN_S = 600.0
"""Lifetime of a token that a component issues for itself. It is renewed after half of that."""

_HEX = re.compile(f"(?:[0-9a-fA-F]{{2}}){{{KEY_BYTES},}}")
_log = log_of("trellis.identity")


@overload
def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    app: App | None = None,
    name: str | None = None,
    operator: bool = False,
) -> AbstractAsyncContextManager[Trellis]: ...


@overload
def connect(
    *, gateway: str, token: str | None = None, ca_file: Path | None = None, options: "CallOptions | None" = None
) -> "AbstractAsyncContextManager[GatewayClient]": ...


def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    app: App | None = None,
    name: str | None = None,
    operator: bool = False,
    gateway: str | None = None,
    ca_file: Path | None = None,
    options: "CallOptions | None" = None,
) -> "AbstractAsyncContextManager[Trellis] | AbstractAsyncContextManager[GatewayClient]":
    """Connect to a ledger, by default the configured one, or to a `gateway` (http://…) with its whole API.

    With a `token` (or `TRELLIS_TOKEN`, `TRELLIS_TOKEN_FILE` of the settings) the caller has exactly the roles and the
    name in the token, until it expires. Raises TokenRefused. Without a token, the caller is worker and submitter on a
    local SQLite file, and `operator=True` adds the control plane if the file's development key is readable. On
    PostgreSQL the database role decides: the ledger refuses what that role may not do, and a token can only restrict it
    further. A gateway receives the token with every request; `ca_file` is the CA that signed its certificate, and
    `options` says how long to retry.
    """
    if gateway is None and not is_gateway_url(url):
        return _connect_ledger(url, token=token, app=app, name=name, operator=operator)
    if (gateway and url) or app is not None or name is not None or operator:
        expected = "with a gateway there is no ledger, app, name or operator: its token says who calls"
        raise OptionInvalid(option="gateway", value=gateway or url, expected=expected)
    return _connect_gateway(gateway or url or "", token=token, ca_file=ca_file, options=options)


def connect_sync(
    gateway: str, *, token: str | None = None, ca_file: Path | None = None, options: "CallOptions | None" = None
) -> "AbstractContextManager[SyncGatewayClient]":
    """Connect to a gateway from a script without `async`. The client has the same methods, and each one blocks."""
    from trellis.http.sync import blocking

    return blocking(_connect_gateway(gateway, token=token, ca_file=ca_file, options=options))


@asynccontextmanager
async def _connect_ledger(
    url: str | None, *, token: str | None, app: App | None, name: str | None, operator: bool
) -> AsyncGenerator[Trellis]:
    settings = read_settings(os.environ, Path.cwd())
    address = url or settings.ledger
    identity = identify(address, settings, token)
    principal = principal_for(address, name=name or process_name("client"), operator=operator, identity=identity)
    async with closing(await open_ledger(address)) as ledger:

        @cache
        def room() -> "BacklogLimit":
            from trellis.bus.submitter import BacklogLimit  # only this path needs the bus

            return BacklogLimit(ledger=ledger, clock=SystemClock())

        def submitter() -> "AbstractAsyncContextManager[BusSubmitter]":
            from trellis.app.fleet import open_bus_submitter

            return open_bus_submitter(settings, address, room())

        if identity is not None:
            await check_home_issuer(ledger, settings)
        yield Trellis(
            ledger,
            principal,
            clock=SystemClock(),
            new_id=new_id,
            new_job_id=new_job_id,
            app=app,
            asking=submitter,
            cancel_grace_s=settings.cancel_grace_s,
        )


def _connect_gateway(
    url: str, *, token: str | None, ca_file: Path | None, options: "CallOptions | None"
) -> "AbstractAsyncContextManager[GatewayClient]":
    from trellis.http.calls import CallOptions
    from trellis.http.client import open_client

    settings = read_settings(os.environ, Path.cwd())
    if ca_file is None:
        settings.check_gateway_authority()
    chosen = options or CallOptions()
    return open_client(
        url,
        token=settings.shown_token if token is None else lambda: token,
        clock=SystemClock(),
        rng=random.Random(),  # noqa: S311 - spreads retries, nothing secret
        new_id=new_id,
        ca_file=ca_file or settings.gateway_ca_file,
        options=replace(chosen, plain_http=chosen.plain_http or settings.gateway_plain_http),
    )


def make_worker(app: App, ledger: Ledger, options: WorkerOptions) -> "Worker":
    """Builds a worker on this process's clock."""
    from trellis.worker.worker import Worker  # loaded by a process that works

    return Worker(app, ledger, options, clock=SystemClock(), rng=random.Random(), new_id=new_id)  # noqa: S311 - jitter


async def open_when_available(url: str, *, part: str | None = None) -> Ledger | None:
    """Opens the ledger of a process that serves, waiting while it does not answer. Raises MovedAway.

    Returns None if SIGTERM or SIGINT came first.
    """
    from trellis.ledgers.moving.source import refuse_closed
    from trellis.worker.worker import open_until_signalled

    refuse_closed(url)
    rng = random.Random()  # noqa: S311 - jitter
    return await open_until_signalled(lambda: open_ledger(url, part=part), SystemClock(), rng)


async def run_worker(app: App, ledger: Ledger, options: WorkerOptions | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT, then drain it. Return the exit code of the process (see `ExitCode`).

    The ledger is that of a connection: `async with trellis.connect(url, app=app) as client: await run_worker(app,
    client.ledger)`.
    """
    from trellis.worker.worker import run_until_signalled

    worker = make_worker(app, ledger, options or WorkerOptions(name=process_name("worker")))
    return int(await run_until_signalled(worker))


# --- authority without HTTP ----------------------------------------------------------------------------------------


def identify(url: str, settings: Settings, token: str | None = None) -> Identity | None:
    """Verifies the given token, or the one of the settings. Returns None without one. Raises TokenRefused."""
    shown = settings.shown_token() if token is None else token
    if shown is None:
        return None
    return verify(shown, _local_keys(url, settings), now=time.time(), home=home_issuer_of(settings))


def home_issuer_of(settings: Settings) -> str:
    """Returns the instance's own issuer. The ledger records its subjects without the issuer."""
    return (settings.token_issuer if settings.token_jwks_file is not None else None) or ISSUER


async def check_home_issuer(ledger: Ledger, settings: Settings, *, by: Actor | None = None) -> None:
    """Raises SettingsInvalid if the ledger's plain names belong to another issuer.

    Otherwise the new issuer would take over those names, and the jobs they own. With `by`, records our issuer if the
    ledger has none.
    """
    home = home_issuer_of(settings)
    known = await ledger.home_issuer()
    if known is None and by is not None:  # read first: a limited database login may read the issuer, but not record it
        known = await ledger.set_home_issuer(by, home)
    if known not in {None, home}:
        detail = (
            f"{home} would take over the names, and so the jobs, of {known}, whose tokens this ledger was used with. Set the "
            f"issuer back; if both name the same people, run: trellis token issuer {home} --replaces {known}"
        )
        raise SettingsInvalid(source=settings.source_of("token_issuer"), detail=detail)


def principal_for(url: str, *, name: str, operator: bool, identity: Identity | None = None) -> Principal:
    """Returns the principal of this process: what its token says, else what the kind of ledger grants."""
    local = url.startswith("sqlite:")
    if identity is not None:
        limit = "" if local else ", and the database role decides about the rest"
        return identity.principal(until=elapsed_s() + identity.expires_at - time.time(), limit=limit)
    if not local:
        return Principal(name=name, roles=frozenset(Role), because="the database role decides")
    if not operator:
        more = f"connect(…, operator=True) adds {Role.CONTROL_PLANE.value} after `trellis migrate`"
        because = f"a local file gives {_role_names(LOCAL_ROLES)}, and {more}"
        return Principal(name=name, roles=LOCAL_ROLES, because=because)
    try:
        read_key(development_key_path(url))
    except KeyUnusable as error:
        reason = str(error.data["reason"])
        raise NotAllowed(role=Role.CONTROL_PLANE.value, action="be taken on this ledger", reason=reason) from error
    return Principal(name=name, roles=LOCAL_ROLES | {Role.CONTROL_PLANE})


def is_key_configured(settings: Settings) -> bool:
    """Whether the operator configured a key. The development key does not count."""
    return settings.token_jwks_file is not None or settings.token_key_file is not None


def trusted_keys(url: str, settings: Settings) -> Sequence[TrustedKey]:
    """Returns the keys that verify tokens at a gateway: the configured ones, else an SQLite ledger's development key.

    Raises KeyUnusable if there is no key: then no token can be trusted.
    """
    if settings.token_jwks_file is not None:
        return KeySetFile(settings.token_jwks_file, issuer=settings.token_issuer or "", monotonic=time.monotonic)
    if settings.token_key_file is not None:
        return [symmetric_key(read_key(settings.token_key_file), issuer=ISSUER)]
    if url.startswith("sqlite:"):
        return [development_key(url)]
    reason = (
        "none is configured; set TRELLIS_TOKEN_JWKS_FILE with TRELLIS_TOKEN_ISSUER, or TRELLIS_TOKEN_KEY_FILE. "
        "Commands go without a token: on PostgreSQL the database role decides"
    )
    raise KeyUnusable(reason=reason)


def token_key(url: str, settings: Settings) -> TrustedKey:
    """Returns the key that `token issue` signs with. Raises KeyUnusable."""
    if settings.token_signing_key_file is not None:
        body = read_private(settings.token_signing_key_file)
        return private_key(body, issuer=settings.token_issuer or "")
    if settings.token_jwks_file is not None:
        reason = f"tokens come from {settings.token_issuer}; TRELLIS_TOKEN_SIGNING_KEY_FILE names its private JWK"
        raise KeyUnusable(reason=reason)
    return next(iter(trusted_keys(url, settings)))


class ComponentToken:
    """Tokens that one component shows another: the configured one, else short-lived ones issued on demand.

    An issued token can be limited to one job or to one agent.
    """

    def __init__(self, settings: Settings, key: TrustedKey | None, role: Role, *, now: Callable[[], float]) -> None:
        self._settings, self._key, self._role, self._now = settings, key, role, now
        self._name = process_name(role.value)
        self._made: tuple[float, str] | None = None

    def __call__(self, job_id: str | None = None, *, agent: str | None = None) -> str:
        """Returns a token. If it is issued here, it is valid for some minutes at least."""
        if self._key is None:
            return (
                self._settings.shown_token() or ""
            )  # callers that need a limited token have a key: see `limited_token`
        now = self._now()
        if job_id is not None or agent is not None:
            return self._issue(self._key, now, job_id=job_id, agent=agent)
        if self._made is None or not 0 <= now - self._made[0] < COMPONENT_TOKEN_S / 2:
            self._made = (now, self._issue(self._key, now))
        return self._made[1]

    def _issue(self, key: TrustedKey, now: float, *, job_id: str | None = None, agent: str | None = None) -> str:
        limits = {"job_id": job_id, "agent": agent}
        return issue(key, name=self._name, roles=[self._role], ttl_s=COMPONENT_TOKEN_S, now=now, **limits)


def component_token(url: str, settings: Settings, role: Role, *, to: str = "nlm_backend") -> ComponentToken:
    """Returns the token source of a component in this role. `to` is the setting with the address it is sent to.

    That is the configured token if it grants the role and may be sent there, else tokens issued here. Raises
    KeyUnusable.
    """
    may_go = all(map(settings.token_may_go_to, (to, "gateway_ca_file")))
    shown = settings.shown_token() if may_go else None
    if shown is not None:
        with suppress(TokenRefused):  # the token is for something other than this gateway
            if role in verify(shown, trusted_keys(url, settings), now=time.time()).roles:
                return ComponentToken(settings, None, role, now=time.time)
    return ComponentToken(settings, token_key(url, settings), role, now=time.time)


def limited_token(url: str, settings: Settings, role: Role, *, each: str = "job") -> ComponentToken:
    """Returns a source of tokens that are each signed for one job or one agent, as `each` says. Raises KeyUnusable.

    A configured token is not limited like that and is never used here.
    """
    try:
        return ComponentToken(settings, token_key(url, settings), role, now=time.time)
    except KeyUnusable as error:
        reason = f"{role.value} needs a key that signs a token for each {each}: {error.data['reason']}"
        raise KeyUnusable(reason=reason) from error


def lazy_token(url: str, settings: Settings, role: Role, *, to: str = "nlm_backend") -> Callable[[], str]:
    """Returns a function that gives this process's token in a role.

    The token is created on first use: without a signing key a job fails, not the process. The function raises
    KeyUnusable.
    """

    @cache
    def source() -> ComponentToken:
        return component_token(url, settings, role, to=to)

    def token() -> str:
        return source()()

    return token


def check_destination(settings: Settings, setting: str, url: str) -> None:
    """Raises SettingsInvalid if tokens that this process signs may not go to `url`, which this setting names.

    They go unencrypted to no other machine, and to no address from a file beside which the key is not.
    """
    for named in (setting, "gateway_ca_file"):
        settings.check_signed_tokens(named)
    if is_readable_on_the_way(url) and not settings.gateway_plain_http:
        detail = f"tokens would go unencrypted to {url}: use https://; in a network of your own set TRELLIS_GATEWAY_PLAIN_HTTP=1"
        raise SettingsInvalid(source=settings.source_of(setting), detail=detail)


def outgoing_tls(settings: Settings) -> ssl.SSLContext | None:
    """Returns a TLS context that also trusts the configured CA of gateways and NLM backends.

    Returns None if only the system's CAs are needed. Raises SettingsInvalid.
    """
    if settings.gateway_ca_file is None:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(settings.gateway_ca_file)
    except (OSError, ssl.SSLError) as error:
        detail = f"{settings.gateway_ca_file} cannot be used: {error.strerror or error}"
        raise SettingsInvalid(source=settings.source_of("gateway_ca_file"), detail=detail) from error
    return context


def development_key(url: str) -> TrustedKey:
    """Reads the development key beside an SQLite ledger. Raises KeyUnusable."""
    return symmetric_key(read_key(development_key_path(url)), issuer=ISSUER)


def _local_keys(url: str, settings: Settings) -> Sequence[TrustedKey]:
    """Returns the keys that verify tokens of a program on this machine.

    On SQLite the configured key is ignored: a caller who can choose the verifying key could sign any token.
    """
    return [development_key(url)] if url.startswith("sqlite:") else trusted_keys(url, settings)


class KeySetFile(Sequence[TrustedKey]):
    """The public keys in a file, kept current: added and removed keys take effect within a second.

    While the file is unreadable or incomplete, the last good keys stay in force and an error is logged.
    """

    def __init__(self, path: Path, *, issuer: str, monotonic: Callable[[], float]) -> None:
        self._path, self._issuer, self._monotonic = path, issuer, monotonic
        self._seen: object = None
        self._looked = monotonic()
        self._keys = self._read()

    def __len__(self) -> int:
        return len(self._now())

    def __iter__(self) -> Iterator[TrustedKey]:
        return iter(self._now())

    @overload
    def __getitem__(self, index: int) -> TrustedKey: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TrustedKey]: ...
    def __getitem__(self, index: int | slice) -> TrustedKey | Sequence[TrustedKey]:
        return self._now()[index]

    def _now(self) -> tuple[TrustedKey, ...]:
        if self._monotonic() - self._looked >= KEY_SET_LOOK_S:
            self._looked = self._monotonic()
            try:
                if self._state() != self._seen:
                    self._keys = self._read()
                    _log.info("key_set_read", file=str(self._path), keys=[key.key_id for key in self._keys])
            except KeyUnusable as error:
                _log.error("key_set_unusable", error=str(error), keys=[key.key_id for key in self._keys])
        return self._keys

    def _read(self) -> tuple[TrustedKey, ...]:
        seen = self._state()
        try:
            body = self._path.read_bytes()
        except OSError as error:
            raise KeyUnusable(reason=f"the key set {self._path} cannot be read: {error.strerror}") from error
        try:
            keys = key_set(body, issuer=self._issuer)
        except KeyUnusable as error:
            raise KeyUnusable(reason=f"{self._path}: {error.data['reason']}") from None
        self._seen = seen
        return keys

    def _state(self) -> object:
        try:
            file_status = self._path.stat()
        except OSError as error:
            raise KeyUnusable(reason=f"the key set {self._path} cannot be read: {error.strerror}") from error
        check_owner(self._path, file_status)
        if stat.S_IMODE(file_status.st_mode) & 0o022:
            raise KeyUnusable(reason=f"others can write {self._path}; run: chmod go-w {self._path}")
        return file_status.st_mtime_ns, file_status.st_size, file_status.st_ino


def _role_names(roles: frozenset[Role]) -> str:
    return " and ".join(sorted(role.value for role in roles))


def development_key_path(url: str) -> Path:
    """Returns the path of the development key: next to the SQLite file."""
    path = url.removeprefix("sqlite:///").partition("?")[0]
    return Path(path + KEY_SUFFIX)


def make_development_key(url: str) -> Path:
    """Creates the development key if there is none, readable only by its owner."""
    path = development_key_path(url)
    with suppress(FileExistsError):
        write_private(path, secrets.token_hex(KEY_BYTES) + "\n")
    return path


def callback_secrets(url: str, settings: Settings) -> tuple[bytes, ...]:
    """Returns the secrets that sign callbacks, the current one first; empty if none is configured. Raises KeyUnusable.

    A key file may have several lines. The first one signs and all of them verify, so that a secret can be rotated.
    """
    if settings.callback_key_file is not None:
        return read_keys(settings.callback_key_file)
    return (read_key(development_key_path(url)),) if url.startswith("sqlite:") else ()


def read_key(path: Path) -> bytes:
    """Reads the only key in a private file. Raises KeyUnusable, also if other users can read the file."""
    keys = read_keys(path)
    if len(keys) != 1:
        raise KeyUnusable(reason=f"{path} holds {len(keys)} keys; it must be one")
    return keys[0]


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Reads the keys in a private file, one per line. Raises KeyUnusable."""
    try:
        lines = read_private(path).decode("ascii").split()
    except UnicodeDecodeError as error:
        raise KeyUnusable(reason=f"{path} holds no key") from error
    if not 1 <= len(lines) <= KEY_LINES_MAX or not all(_HEX.fullmatch(line) for line in lines):
        raise KeyUnusable(reason=f"{path} holds no key: it must be {2 * KEY_BYTES} hexadecimal digits or more")
    return tuple(bytes.fromhex(line) for line in lines)
