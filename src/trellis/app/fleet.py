"""The bus as the settings mean it: its configuration, its kernel, its pointers, and the connection itself."""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from pydantic import SecretStr

from trellis.app.settings import LOCAL_BUS, Settings
from trellis.bus.backlog import BacklogLimit
from trellis.bus.pointers import Pointers, make_pointers
from trellis.bus.port import Bus
from trellis.bus.safety.kernel import PolicyKernel, SafetyKernel
from trellis.bus.safety.policy import SafetyPolicy
from trellis.bus.safety.remote_kernel import open_kernel
from trellis.bus.submitter import BusSubmitter
from trellis.bus.topics import FILE_NAME, Topics, read_topics
from trellis.bus.wire.open import BusOptions, open_bus
from trellis.engine.clock import Clock
from trellis.engine.errors import SettingsInvalid
from trellis.nlm.open import DEFAULT as DEFAULT_NLM
from trellis.storage.objects.address import s3_credentials
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore

OBJECTS_FOLDER = "objects"
MEMORY_FOLDER = "memory.git"
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where somebody listens, not where we do
"""Where one listens on every address, and where one finds that on this machine."""
NO_POLICY = MappingProxyType(
    {
        "id": "no-policy",
        "decision": "deny",
        "reason": "no safety policy is configured; set TRELLIS_POLICY",
        "match": {"topics": [">"]},
    }
)
"""What stands for the policy that a fleet has not: it says what to set to everybody who is denied by it."""


def config_file(settings: Settings) -> Path | None:
    """Where topics, pools and tenants are configured: as set, else in the working folder if there is such a file."""
    return settings.bus_config or (Path(FILE_NAME) if Path(FILE_NAME).is_file() else None)


def topics_of(settings: Settings) -> Topics:
    """How topics, pools and tenants are configured; raises BusConfigInvalid."""
    return read_topics(config_file(settings))


def is_embedded(settings: Settings, url: str) -> bool:
    """Whether everything is one machine's own: its ledger a file, its bus inside the process."""
    return settings.bus == LOCAL_BUS and url.startswith("sqlite:")


def is_without_policy(settings: Settings, url: str) -> bool:
    """Whether every job is denied because nobody has said what may go."""
    return settings.policy is None and not is_embedded(settings, url)


def kernel_of(settings: Settings, url: str, *, monotonic: Callable[[], float]) -> SafetyKernel:
    """What judges jobs before they are handed out; without a policy all of `job.>` may go in an embedded instance, and nothing elsewhere (D53)."""
    if is_without_policy(settings, url):
        return PolicyKernel(SafetyPolicy.model_validate({"rules": [dict(NO_POLICY)]}))
    return open_kernel(settings.policy, monotonic=monotonic, ca_file=settings.gateway_ca_file)


def bus_options(settings: Settings) -> BusOptions:
    """The part that the bus gets."""
    return BusOptions(
        url=settings.bus,
        sender_id=settings.bus_sender,
        key_file=settings.bus_key_file,
        keys_dir=settings.bus_keys_dir,
        require_signatures=settings.bus_require_signatures,
        signature_window_s=settings.bus_signature_window_s,
        creds_file=settings.bus_creds_file,
        ca_file=settings.bus_ca_file,
    )


@asynccontextmanager
async def open_settings_bus(
    settings: Settings, *, clock: Clock, now: Callable[[], datetime], new_id: Callable[[], str]
) -> AsyncGenerator[Bus]:
    """The bus; one that does not answer yet connects when it can. Raises SettingsInvalid."""
    bus = await open_bus(bus_options(settings), clock=clock, now=now, new_id=new_id)
    try:
        yield bus
    finally:
        await bus.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageLocations:
    """Where an instance keeps what it has."""

    ledger: str
    objects: str
    memory: Path


def storage_locations(settings: Settings, ledger: str) -> StorageLocations:
    """The settings' places; beside an SQLite file what is not set lies in its folder. Raises SettingsInvalid."""
    folder = Path(ledger.removeprefix("sqlite:///")).absolute().parent if ledger.startswith("sqlite:///") else None
    if folder is None and (settings.objects is None or settings.memory is None):
        missing = "objects" if settings.objects is None else "memory"
        raise SettingsInvalid(
            source=missing, detail=f"set TRELLIS_{missing.upper()}: only an SQLite ledger has a folder"
        )
    objects = settings.objects or f"file://{(folder or Path()) / OBJECTS_FOLDER}"
    return StorageLocations(
        ledger=ledger, objects=objects, memory=settings.memory or (folder or Path()) / MEMORY_FOLDER
    )


def object_store_url(settings: Settings, url: str) -> str | None:
    """Where the object store of an instance with this ledger is; None when nothing says it."""
    if settings.objects is not None or not url.startswith("sqlite:///"):
        return settings.objects
    return f"file://{Path(url.removeprefix('sqlite:///').partition('?')[0]).absolute().parent / OBJECTS_FOLDER}"


@asynccontextmanager
async def open_pointers(settings: Settings, url: str) -> AsyncGenerator[Pointers]:
    """What can be behind pointers, for a process that has no instance: a worker on the bus, or somebody who submits."""
    place = object_store_url(settings, url)
    objects: ObjectStore | None = None
    if place is not None:
        objects = await open_objects(place, credentials=s3_credentials(os.environ))
    try:
        pointers = make_pointers(objects, settings.redis_url)
        try:
            yield pointers
        finally:
            await pointers.close()
    finally:
        if objects is not None:
            await objects.close()


@asynccontextmanager
async def open_bus_submitter(
    settings: Settings, url: str, room: BacklogLimit, *, new_id: Callable[[], str]
) -> AsyncGenerator[BusSubmitter]:
    """How jobs on topics are asked for, for a process that has no instance."""
    topics = topics_of(settings)
    async with open_pointers(settings, url) as pointers:
        yield BusSubmitter(topics=topics, pointers=pointers, room=room, new_id=new_id)


def nlm_key(settings: Settings) -> SecretStr | None:
    """The key for the NLM provider's server; none for a provider that asks nobody. Raises SettingsInvalid where it may not go there."""
    return None if settings.nlm == DEFAULT_NLM else settings.key_for("nlm_base_url")


def gateway_address(settings: Settings) -> str:
    """The gateway as other parts reach it: as configured, else where this machine's gateway listens."""
    scheme = "http" if settings.tls_cert_file is None else "https"
    return (settings.gateway or f"{scheme}://{reachable_host(settings.host)}:{settings.port}").rstrip("/")


def reachable_host(host: str) -> str:
    """A host that can be asked, as it stands in a URL."""
    name = WILDCARDS.get(host, host)
    return f"[{name}]" if ":" in name else name
