"""One invocation of the command line: its ledger, its caller, and its output."""

import getpass
import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trellis.app.system import process_name
from trellis.auth.matrices import permit
from trellis.auth.principals import LOCAL_ROLES, Principal
from trellis.cli.output import Output
from trellis.cli.places import CommandPlace, program_name
from trellis.engine.admin_acts import this_node
from trellis.engine.closing import closing
from trellis.engine.errors import (
    LedgerMissing,
    LedgerReadOnly,
    LedgerUrlInvalid,
    OptionInvalid,
    Refused,
    SettingsInvalid,
)
from trellis.engine.jobs import Actor, JobId
from trellis.engine.logs import log_of
from trellis.engine.private_files import PRIVATE_FOLDER
from trellis.lifecycles import Role
from trellis.lifecycles.nlm_job import NLM_JOB

if TYPE_CHECKING:  # the engine, HTTP and the application are imported when they are used: a help needs none of them
    from typing_extensions import TypeIs

    from trellis.api.local import LocalApi
    from trellis.app.instance import Instance
    from trellis.app.settings import Settings
    from trellis.auth.tokens import Identity
    from trellis.client import Trellis
    from trellis.engine.ledger import Ledger
    from trellis.http.client import GatewayClient
    from trellis.storage.objects.store import ObjectStore
    from trellis.worker.app import App

LEDGER_FILE = "trellis.db"
"""File name of the ledger in a `--data` folder."""

_AT_GATEWAY = {"id": "give --key, which lets you repeat the submit safely, or --topic, where an id is yours to choose"}
"""What to do at a gateway instead of giving an option that only a ledger takes."""

OWNER_ROLES = LOCAL_ROLES | {Role.OWNER, Role.CONTROL_PLANE}
"""Roles of the local owner, who needs no token."""


@dataclass(frozen=True, kw_only=True)
class Cli:
    """The context that every command gets."""

    ledger: str | None
    data: Path | None
    gateway: str | None = None
    out: Output
    warns: bool = True
    """Whether unknown variables are reported when the settings are read; the doctor lists them as findings."""

    @cached_property
    def settings(self) -> "Settings":
        """The effective settings; raises SettingsInvalid."""
        from trellis.app.settings import read_settings

        warnings: list[str] = []
        settings = read_settings(os.environ, Path.cwd(), warn=warnings.append)
        for text in warnings if self.warns else ():
            self._warn(settings, text)
        return settings

    def _warn(self, settings: "Settings", text: str) -> None:
        """Print a warning on standard error, or log it if the log format is JSON."""
        from trellis.cli.telemetry import configure_logging

        if settings.log_format == "json":
            configure_logging(settings)
            log_of("trellis.app.settings").warning("unknown_variable", problem=text)
        else:
            self.out.note(f"warning: {text}")

    @property
    def url(self) -> str:
        """The ledger URL: from `--ledger`, else under `--data`, else from the settings."""
        if self.ledger is not None:
            return self.ledger
        return ledger_url(self.data) if self.data is not None else self.settings.ledger

    def source_of(self, setting: str) -> str:
        """Where the value of this setting comes from: an option of this command, `trellis.toml`, or the environment."""
        data = None if self.data is None else "--data"
        option = {"ledger": data if self.ledger is None else "--ledger", "gateway": self.gateway and "--gateway"}
        if (named := option.get(setting)) is not None:
            return named
        try:
            return self.settings.source_of(setting)
        except SettingsInvalid:
            from trellis.app.settings import PREFIX

            return f"{PREFIX}{setting.upper()}"

    @cached_property
    def _place(self) -> CommandPlace:
        """The options for the place of this command, without a password."""
        from trellis.cli.problems import without_password  # loaded for an answer that names a command

        ledger = None if self.ledger is None else without_password(self.ledger, self.ledger)
        return CommandPlace(ledger=ledger, data=self.data, gateway=self.gateway)

    def command(self, words: str) -> str:
        """A command of this program as it can be typed here, for the ledger or gateway that this command was given."""
        return f"{program_name()} {self._place.add_to(words)}"

    def typed(self, text: str) -> str:
        """A text in which each command in backticks is for the ledger or gateway that this command was given."""
        return self._place.add_in(text)

    @property
    def _is_named(self) -> bool:
        """Whether an option names the ledger."""
        return self.ledger is not None or self.data is not None

    def _check_place(self) -> None:
        """Refuse a ledger that does not exist, and say so if a file answers although a gateway is configured."""
        unused = None if self._is_named else self.settings.gateway
        refuse_missing(self.url, unused_gateway=unused)
        path = sqlite_path(self.url)
        if unused is not None and path is not None:
            self.out.note(f"from the local ledger {path}: this command does not go through the gateway {unused}")

    @property
    def gateway_url(self) -> str | None:
        """The gateway URL: from `--gateway`, else from the settings unless a ledger is named.

        Raises OptionInvalid, SettingsInvalid.
        """
        named = self._is_named
        if self.gateway is not None and named:
            raise OptionInvalid(option="--gateway", value=self.gateway, expected="give it or a ledger, not both")
        if self.gateway is not None or named:
            return self.gateway
        self.settings.check_gateway()
        return self.settings.gateway

    def client(self) -> "AbstractAsyncContextManager[GatewayClient]":
        """A client of that gateway with the token of the settings."""
        from trellis.app.wiring import connect
        from trellis.http.calls import CallOptions

        options = CallOptions(needs_listener=True, on_retry=self.out.note)
        return connect(gateway=self.gateway_url or "", options=options)

    def refuse_at_gateway(self, **options: Any) -> None:
        """Raise OptionInvalid for an option that only a ledger supports, if the command goes through a gateway."""
        for name, value in options.items():
            if value is not None and self.gateway_url is not None:
                expected = f"it is not for a gateway; {_AT_GATEWAY.get(name, 'give --ledger, or leave it out')}"
                raise OptionInvalid(option=f"--{name.replace('_', '-')}", value=value, expected=expected)

    @asynccontextmanager
    async def api(
        self, *, lifecycle: str | None = None, job_id: str | None = None
    ) -> "AsyncGenerator[GatewayClient | LocalApi]":
        """The application: through the gateway if there is one, otherwise in this process."""
        if self.gateway_url is not None:
            async with self.client() as client:
                yield client
            return
        async with self.local_api(lifecycle=lifecycle, job_id=job_id) as api:
            yield api

    @asynccontextmanager
    async def local_api(self, *, lifecycle: str | None = None, job_id: str | None = None) -> "AsyncGenerator[LocalApi]":
        """The application in this process, on the ledger that has this job, or jobs of this lifecycle."""
        from trellis.api.local import open_local_api

        async with self.open_having(lifecycle=lifecycle, job_id=job_id) as ledger:
            identity = self._identity()
            reader = Principal(name=self.person, roles=OWNER_ROLES) if identity is None else identity.principal()
            async with open_local_api(
                self.settings,
                self.url,
                ledger=ledger,
                reader=reader,
                permit=self._permit,
                acting=self._acting,
                name=self.process,
            ) as api:
                yield api

    async def ledger_time(self, api: "GatewayClient | LocalApi") -> datetime:
        """The time of the ledger; through a gateway, when it sent its last response, to the second.

        A gateway, or a proxy before it, that does not say when leaves this machine's clock.
        """
        return await api.now() if is_local(api) else api.responded_at or datetime.now(UTC)

    def _identity(self) -> "Identity | None":
        """What the token of the settings says; None without one. Raises TokenRefused."""
        from trellis.app.wiring import identify

        return identify(self.url, self.settings)

    def _permit(self, rule: str) -> Actor:
        """The caller as an actor, if this rule allows it; raises NotAllowed."""
        return permit(self._principal, rule)

    def _acting(self, *, operator: bool) -> Principal:
        from trellis.app.wiring import principal_for

        identity = self._identity()
        return principal_for(self.url, name=self.person, operator=operator and identity is None, identity=identity)

    @cached_property
    def _principal(self) -> Principal:
        """The caller: from the token, otherwise the local owner, who can read the ledger's key. Raises NotAllowed."""
        principal = self._acting(operator=True)
        return principal if principal.by_token else replace(principal, roles=OWNER_ROLES)

    @property
    def person(self) -> str:
        """The name under which the ledger records what a person does here: `anna@laptop`, the same in every command."""
        return f"{user_name()}@{this_node()}"

    @property
    def process(self) -> str:
        """The name of this process, for what it executes itself: `anna@laptop:4711`."""
        return process_name(user_name())

    def require(self, *roles: Role, action: str) -> None:
        """Refuse early what a token does not allow; without a token the ledger decides."""
        identity = self._identity()
        if identity is not None:
            from trellis.app.wiring import principal_for

            principal_for(self.url, name=identity.name, operator=False, identity=identity).acting(*roles, action=action)

    @asynccontextmanager
    async def open(self) -> "AsyncGenerator[Ledger]":
        """The ledger, for reading.

        Reading needs no token. A token that is given must be valid, and allows the same reads as over HTTP.
        """
        from trellis.app.wiring import check_home_issuer
        from trellis.ledgers import open_ledger

        self._check_place()
        identity = self._identity()
        async with closing(await open_ledger(self.url)) as ledger:
            if identity is not None:
                await check_home_issuer(ledger, self.settings)
            yield ledger if identity is None else readable(ledger, identity.principal())

    @asynccontextmanager
    async def open_having(self, *, lifecycle: str | None = None, job_id: str | None = None) -> "AsyncGenerator[Ledger]":
        """The ledger that has this job, or jobs of this lifecycle. NLM jobs are in the backend's own ledger (D42)."""
        async with self.open() as ledger:
            elsewhere = self.settings.nlm_ledger_of(self.url)
            there = sqlite_path(elsewhere)
            known = elsewhere != self.url and (there is None or there.exists())
            by_id = job_id is not None and "@" in job_id and await ledger.job(JobId(job_id)) is None
            if not known or not (lifecycle == NLM_JOB.name or by_id):
                yield ledger
                return
            from trellis.ledgers import open_ledger

            identity = self._identity()
            async with closing(await open_ledger(elsewhere)) as of_backend:
                yield of_backend if identity is None else readable(of_backend, identity.principal())

    @asynccontextmanager
    async def connect(self, *, operator: bool = False, app: "App | None" = None) -> "AsyncGenerator[Trellis]":
        """The ledger, for changes in the caller's name."""
        from trellis.app.wiring import connect

        self._check_place()
        async with connect(self.url, app=app, name=self.person, operator=operator) as trellis:
            yield trellis

    @asynccontextmanager
    async def instance(self) -> "AsyncGenerator[Instance]":
        """The whole instance in this process. Reading needs no token, but a token that is given must be valid."""
        from trellis.app.instance import open_instance

        refuse_missing(self.url)
        self._identity()
        async with open_instance(self.settings, self.url, name=self.process) as instance:
            yield instance

    @asynccontextmanager
    async def objects(self) -> "AsyncGenerator[ObjectStore]":
        """The object store of the instance alone, without its memory."""
        from trellis.app.fleet import storage_locations
        from trellis.storage.objects.address import s3_credentials
        from trellis.storage.objects.open import open_objects

        settings = self.settings
        if settings.memory is None:
            settings = settings.model_copy(update={"memory": Path()})  # memory is not opened
        place = storage_locations(settings, self.url).objects
        async with closing(await open_objects(place, credentials=s3_credentials(os.environ))) as objects:
            await objects.probe()
            yield objects

    @asynccontextmanager
    async def nlm_ledger(self) -> "AsyncGenerator[Ledger | None]":
        """The NLM backend's own ledger; None if it is not on this machine."""
        from trellis.ledgers import open_ledger

        url = self.settings.nlm_ledger_of(self.url)
        path = sqlite_path(url)
        if path is not None and not path.exists():
            yield None
            return
        async with closing(await open_ledger(url)) as ledger:
            yield ledger

    def owner(self, action: str) -> Principal:
        """The local owner as a principal, with the restrictions of the token. Raises NotAllowed."""
        principal = self._acting(operator=True)
        principal.acting(Role.OWNER, Role.CONTROL_PLANE, action=action)
        return principal

    def operator(self, action: str) -> Actor:
        """The local operator, proven by read access to the ledger's key or by a token. Raises NotAllowed."""
        return self._acting(operator=True).acting(Role.CONTROL_PLANE, action=action)


def is_local(api: "GatewayClient | LocalApi") -> "TypeIs[LocalApi]":
    """Whether this is the application in this process, and not a gateway."""
    from trellis.api.local import LocalApi

    return isinstance(api, LocalApi)


def readable(ledger: "Ledger", principal: Principal) -> "Ledger":
    """The ledger as this principal may read it: all jobs, or only its own."""
    from trellis.auth.own_reads import OwnReads
    from trellis.auth.ownership import sees_all

    return ledger if sees_all(principal, "jobs.read") else cast("Ledger", OwnReads(ledger=ledger, principal=principal))


def user_name() -> str:
    """The name of the user on this machine."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "cli"


def ledger_url(folder: Path) -> str:
    """The URL of the embedded ledger in a data folder."""
    return f"sqlite:///{folder / LEDGER_FILE}"


def sqlite_path(url: str) -> Path | None:
    """The file of an SQLite ledger; None for any other. Raises LedgerUrlInvalid for a ledger in memory."""
    if not url.startswith(("sqlite:", ":memory:")):
        return None
    from trellis.ledgers.sqlite.connection import parse_url

    path = parse_url(url).path
    if path is None:
        raise LedgerUrlInvalid(url=url, reason="a ledger in memory ends with the command that opens it")
    return path


def refuse_missing(url: str, *, unused_gateway: str | None = None) -> None:
    """Raise if an SQLite ledger does not exist, so that a mistyped path does not create an empty one.

    `unused_gateway` is the configured gateway of a command that does not use it.
    """
    path = sqlite_path(url)
    if path is None or path.exists():
        return
    if unused_gateway is not None:
        raise Refused(
            detail=f"This command works on a ledger and does not go through the gateway {unused_gateway}, and there is no"
            f" ledger at {path}; run it where the ledger is, or name it with --ledger or --data."
        )
    raise LedgerMissing(path=path, url=url)


def make_folder(url: str) -> Path | None:
    """Create the folder of an SQLite file if it is missing; returns it if it was created."""
    path = sqlite_path(url)
    if path is None or path.parent.is_dir():
        return None
    try:
        path.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerReadOnly(reason=f"the folder {path.parent} cannot be made ({error.strerror})") from error
    return path.parent
