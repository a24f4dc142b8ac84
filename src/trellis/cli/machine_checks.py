"""Checks of `trellis doctor` for this machine: free space, key files, and the servers it needs."""

import asyncio
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trellis.app.settings import BUILTIN, PREFIX, Settings
from trellis.app.wiring import development_key_path
from trellis.cli.invocation import sqlite_path
from trellis.engine.disk_room import existing_above
from trellis.engine.errors import ExtraMissing, KeyUnusable, TrellisError
from trellis.engine.private_files import read_private
from trellis.engine.records import Finding
from trellis.operations.doctor import disk_finding, error_finding, ok_finding, warning_finding

if TYPE_CHECKING:  # only some checks need a provider
    from trellis.nlm.provider import NlmProvider
    from trellis.storage.objects.store import ObjectStore

KEY_FILES = ("token_key_file", "callback_key_file", "bus_key_file", "alert_key_file")
"""Settings that name a file with a secret."""
MODELS = "agents' models"
ORCHESTRATOR = "orchestrator"
AGENTS_SHOWN = 3
PROVIDER_S = 5.0
"""How long the doctor waits for the provider."""
AGENTS_S = 10.0
"""How long the doctor reads the files of agents. Each is one call of the object store."""


async def machine_findings(settings: Settings, url: str) -> list[Finding]:
    """Findings about this machine. Only what is configured is checked, and nothing is written."""
    servers = [
        *await provider_findings(settings, url),
        *await model_findings(settings),
        *await orchestrator_findings(settings),
    ]
    return [*disk_findings(settings, url), *key_findings(settings), *servers]


def disk_findings(settings: Settings, url: str) -> list[Finding]:
    """The free space of each file system that holds a ledger, objects or a memory."""
    from trellis.app.instance import storage_locations  # imports the whole platform, only for the doctor
    from trellis.storage.objects.address import read_address

    paths: list[object] = [sqlite_path(url)]
    try:
        where = storage_locations(settings, url)
        paths += [sqlite_path(settings.nlm_ledger_of(url)), read_address(where.objects), where.memory_folder]
    except TrellisError:
        pass  # errors in them are reported by other checks
    by_device: dict[int, Finding] = {}
    for path in (one for one in paths if isinstance(one, Path)):
        there = existing_above(path)
        if (device := there.stat().st_dev) not in by_device:
            usage = shutil.disk_usage(there)
            by_device[device] = disk_finding(str(there), free=usage.free, total=usage.total)
    return list(by_device.values())


def key_findings(settings: Settings) -> list[Finding]:
    """Key files that cannot be read, or that others can read or replace."""
    findings: list[Finding] = []
    for name in KEY_FILES:
        path: Path | None = getattr(settings, name)
        if path is None:
            continue
        check, variable = f"key {path.name}", f"{PREFIX}{name.upper()}"
        try:
            read_private(path)
        except KeyUnusable as error:
            remedy = f"let {variable} name a file that belongs to this user and that others cannot read (chmod 600)"
            findings.append(error_finding(check, str(error.data["reason"]), remedy))
        else:
            detail = f"{path} ({variable}) belongs to this user or to root, and others cannot read it"
            findings.append(ok_finding(check, detail))
    return findings


def development_key_cure(url: str) -> str:
    """What to do about the key beside an SQLite ledger if it is unusable, as the middle of a sentence."""
    path = development_key_path(url)
    file = shlex.quote(str(path))
    try:
        owner = path.stat().st_uid
    except OSError:
        return f"`trellis migrate --ledger {shlex.quote(url)}`"
    try:
        read_private(path)
    except KeyUnusable:
        of_us = owner == os.geteuid()
        return f"chmod 600 {file}" if of_us else f"chown {os.geteuid()} {file} && chmod 600 {file}, as root"
    return f"move {file} away and run `trellis migrate --ledger {shlex.quote(url)}`, which makes a new one"


async def provider_findings(settings: Settings, url: str) -> list[Finding]:
    """Whether the provider that this machine's settings name would answer; none for the built-in one."""
    from trellis.app.nlm import open_settings_provider
    from trellis.app.wiring import SystemClock
    from trellis.nlm.open import DEFAULT

    if settings.nlm == DEFAULT:
        return []
    remedy = f"correct {PREFIX}NLM and the settings beside it, or start its server"
    opened = partial(open_settings_provider, settings, clock=SystemClock(), ledger=url)
    return [await _server_finding(ServerToAsk("nlm provider", settings.nlm, remedy, opened))]


async def model_findings(settings: Settings) -> list[Finding]:
    """Whether the server of agents' `openai:` models answers and accepts the key; none if no server is set.

    It is asked for the list of its models, which costs no tokens.
    """
    from trellis.app.wiring import SystemClock
    from trellis.nlm.open import open_provider

    if settings.model_base_url is None:
        return []
    remedy = f"correct {PREFIX}MODEL_BASE_URL and {PREFIX}MODEL_KEY, or start the server; until then such runs fail"
    address = settings.model_base_url

    def opened() -> "NlmProvider":
        key = settings.key_for("model_base_url")
        return open_provider("openai", clock=SystemClock(), base_url=address, model="any", key=key)

    return [await _server_finding(ServerToAsk(MODELS, address.partition("?")[0], remedy, opened))]


async def unset_model_findings(settings: Settings, objects: "ObjectStore") -> list[Finding]:
    """That the models of agents could not be checked, because this shell has no settings for their server."""
    from trellis.agents.catalog import Catalog
    from trellis.agents.definition import AgentDefinition
    from trellis.agents.run_io import OPENAI

    if settings.model_base_url is not None:
        return []
    try:
        async with asyncio.timeout(AGENTS_S):
            agents = (await Catalog(objects).list()).agents
    except TimeoutError:
        return [_unread_models(f"the files of the agents were not read within {AGENTS_S:g} s")]
    except TrellisError as error:
        return [_unread_models(f"the files of the agents could not be read: {error}")]
    named = [one.slug for one in agents if isinstance(one, AgentDefinition) and one.model.partition(":")[0] == OPENAI]
    if not named:
        return []
    shown = ", ".join(named[:AGENTS_SHOWN]) + (", …" if len(named) > AGENTS_SHOWN else "")
    detail = (
        f"not checked: {PREFIX}MODEL_BASE_URL is not set here, and agents name models of a server ({shown}). The process"
        " that executes their runs needs it, which may have settings of its own"
    )
    remedy = f"set {PREFIX}MODEL_BASE_URL and {PREFIX}MODEL_KEY as `trellis up` has them, and ask again"
    return [warning_finding(MODELS, detail=detail, remedy=remedy)]


def _unread_models(problem: str) -> Finding:
    """That the models of agents were not checked, because it is not known which ones the agents name."""
    remedy = f"ask again, or set {PREFIX}MODEL_BASE_URL and {PREFIX}MODEL_KEY: their server is then asked itself"
    detail = f"models not checked: {problem}"
    return warning_finding(MODELS, detail=detail, remedy=remedy)


async def orchestrator_findings(settings: Settings) -> list[Finding]:
    """Whether the Temporal server that drives runs answers; nothing if the built-in orchestrators drive them."""
    if settings.orchestrator == BUILTIN:
        return []
    from trellis.runs.temporal.layer import check_server  # only few instances need it

    remedy = f"start it, or correct {PREFIX}ORCHESTRATOR; until then runs are accepted and wait in the ledger"
    try:
        temporal = settings.temporal
        assert temporal is not None
        await check_server(temporal)
    except ExtraMissing as error:
        detail, elsewhere = f"the Temporal server is not checked: {error}", "only processes that drive runs need it"
        return [warning_finding(ORCHESTRATOR, detail=detail, remedy=elsewhere)]
    except TrellisError as error:
        return [error_finding(ORCHESTRATOR, str(error), remedy)]
    detail = f"the Temporal server at {temporal.address}, namespace {temporal.namespace}, answers"
    return [ok_finding(ORCHESTRATOR, detail)]


@dataclass(frozen=True, slots=True)
class ServerToAsk:
    """A server whose health is asked for, and how the finding about it reads."""

    check: str
    shown: str
    remedy: str
    open: "Callable[[], NlmProvider]"


async def _server_finding(server: ServerToAsk) -> Finding:
    """Whether a server would answer, within a bounded time."""
    try:
        provider = server.open()
    except TrellisError as error:
        # The error of a provider's settings names the NLM provider; this server may be that of agents' models.
        problem = f"{server.shown}: {error.data['detail']}" if error.data.get("setting") == "openai" else str(error)
        return error_finding(server.check, problem, server.remedy)
    try:
        async with asyncio.timeout(PROVIDER_S):
            health = await provider.health()
    except TimeoutError:
        return error_finding(server.check, f"{server.shown} does not answer within {PROVIDER_S:g} s", server.remedy)
    finally:
        await provider.close()
    if not health.ok:
        return error_finding(server.check, f"{server.shown} would not answer: {health.detail}", server.remedy)
    return ok_finding(server.check, f"{server.shown} would answer")
