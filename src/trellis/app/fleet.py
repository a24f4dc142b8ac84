"""Builds the parts of the bus from the settings: configuration, safety kernel, pointers, and the bus connection."""

import hashlib
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from trellis.app.settings import LOCAL_BUS, Settings
from trellis.app.system import SystemClock, new_id
from trellis.bus.pointers import Pointers, make_pointers
from trellis.bus.port import Bus
from trellis.bus.safety.kernel import PolicyKernel, SafetyKernel, open_kernel
from trellis.bus.safety.policy import SafetyPolicy
from trellis.bus.submitter import BacklogLimit, BusSubmitter
from trellis.bus.topics import FILE_NAME, Topics, read_topics
from trellis.bus.wire import BusOptions, open_bus
from trellis.engine.closing import closing
from trellis.engine.errors import SettingsInvalid, TrellisError
from trellis.engine.extras import Extra, extra_needed
from trellis.storage.memory_place import SharedMemory, shared_prefix
from trellis.storage.objects.address import s3_credentials
from trellis.storage.objects.open import open_objects

if TYPE_CHECKING:  # a server of the bus needs an extra
    from trellis.bus.wire.connection import NatsConnection

OBJECTS_FOLDER = "objects"
MEMORY_FOLDER = "memory.git"
MEMORY_CACHE_FOLDER = "memory-cache.git"
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where somebody listens, not where we do
"""Wildcard listen addresses, with the loopback address that reaches each on this machine."""
NO_POLICY = MappingProxyType(
    {
        "id": "no-policy",
        "decision": "deny",
        "reason": "no safety policy is configured; set TRELLIS_POLICY",
        "match": {"topics": [">"]},
    }
)
"""The policy of a fleet that has none configured. It denies every job with a reason that says what to set."""


def config_file(settings: Settings) -> Path | None:
    """Returns the file that configures topics, pools and tenants.

    It is the configured one, else `bus.toml` in the working folder if that exists.
    """
    return settings.bus_config or (Path(FILE_NAME) if Path(FILE_NAME).is_file() else None)


def topics_of(settings: Settings) -> Topics:
    """Reads the configuration of topics, pools and tenants. Raises BusConfigInvalid."""
    return read_topics(config_file(settings))


def is_embedded(settings: Settings, url: str) -> bool:
    """Whether the instance runs on one machine: an SQLite ledger, and the bus inside the process."""
    return settings.bus == LOCAL_BUS and url.startswith("sqlite:")


def is_without_policy(settings: Settings, url: str) -> bool:
    """Whether every job is denied because no safety policy is configured."""
    return settings.policy is None and not is_embedded(settings, url)


def kernel_of(settings: Settings, url: str, *, monotonic: Callable[[], float]) -> SafetyKernel:
    """Opens the safety kernel, which decides about each job before it is dispatched.

    Without a policy, an embedded instance allows all of `job.>`, and any other instance denies everything (D53).
    """
    if is_without_policy(settings, url):
        return PolicyKernel(SafetyPolicy.model_validate({"rules": [dict(NO_POLICY)]}))
    return open_kernel(settings.policy, monotonic=monotonic, ca_file=settings.gateway_ca_file)


def bus_options(settings: Settings) -> BusOptions:
    """Returns the bus options from the settings."""
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


async def connect_bus(options: BusOptions) -> Bus:
    """Opens the bus. If it is unavailable, it connects later. Raises SettingsInvalid."""
    return await open_bus(options, clock=SystemClock(), now=lambda: datetime.now(UTC), new_id=new_id)


@asynccontextmanager
async def bus_connection(settings: Settings, *, name: str) -> "AsyncGenerator[NatsConnection]":
    """Connects to the server of the bus, for a look at it. Raises BusUnavailable and SettingsInvalid."""
    with extra_needed(Extra.BUS, "A bus on NATS"):
        from trellis.bus.wire.connection import NatsConnection, NatsOptions, servers_of
    options = NatsOptions(
        servers=servers_of(settings.bus), name=name, creds_file=settings.bus_creds_file, ca_file=settings.bus_ca_file
    )
    async with closing(NatsConnection(options, clock=SystemClock(), new_id=new_id)) as connection:
        await connection.open()
        connection.up()
        yield connection


async def bus_problem(settings: Settings) -> str | None:
    """Why the server of the bus cannot be reached now; None if it can be, or if the bus is inside the process."""
    if settings.bus == LOCAL_BUS:
        return None
    try:
        async with bus_connection(settings, name="trellis-explain"):
            return None
    except TrellisError as error:
        return str(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageLocations:
    """Where an instance stores its data."""

    ledger: str
    objects: str
    memory: Path | SharedMemory | None
    """A folder of this host, or a part of the object store; None in a process that reads memory through the gateway."""

    @property
    def memory_folder(self) -> Path | None:
        """The folder of this host with the repository of memory, or with its replica; None if there is none here."""
        return self.memory.cache if isinstance(self.memory, SharedMemory) else self.memory


def storage_locations(settings: Settings, ledger: str) -> StorageLocations:
    """Returns the configured locations. Beside an SQLite ledger, defaults are in its folder. Raises SettingsInvalid."""
    folder = Path(ledger.removeprefix("sqlite:///")).absolute().parent if ledger.startswith("sqlite:///") else None
    if folder is None and (settings.objects is None or settings.memory is None):
        missing = "objects" if settings.objects is None else "memory"
        raise SettingsInvalid(
            source=missing, detail=f"set TRELLIS_{missing.upper()}: only an SQLite ledger has a folder"
        )
    objects = settings.objects or f"file://{(folder or Path()) / OBJECTS_FOLDER}"
    if settings.reads_memory_at_gateway:
        return StorageLocations(ledger=ledger, objects=objects, memory=None)
    memory = settings.memory or (folder or Path()) / MEMORY_FOLDER
    prefix = shared_prefix(str(memory))
    if prefix is None:
        return StorageLocations(ledger=ledger, objects=objects, memory=memory)
    cache = settings.memory_cache or _cache_beside(folder, f"{objects} {prefix}")
    return StorageLocations(ledger=ledger, objects=objects, memory=SharedMemory(prefix=prefix, cache=cache))


def _cache_beside(folder: Path | None, identity: str) -> Path:
    """The default folder of a replica: beside an SQLite ledger, else one of this memory alone in the user's cache."""
    if folder is not None:
        return folder / MEMORY_CACHE_FOLDER
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "trellis" / f"memory-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.git"


def local_folders(places: StorageLocations) -> tuple[Path, ...]:
    """Returns the folders of this machine that hold the instance's data."""
    files = [places.ledger.removeprefix("sqlite:///").partition("?")[0]] if is_file(places.ledger) else []
    folders = [Path(file).absolute().parent for file in files]
    folders += [Path(places.objects.removeprefix("file://"))] if places.objects.startswith("file://") else []
    folders += [] if places.memory_folder is None else [places.memory_folder.absolute()]
    return tuple(dict.fromkeys(folders))


def is_file(ledger: str) -> bool:
    """Whether the ledger is an SQLite file."""
    return ledger.startswith("sqlite:///")


def object_store_url(settings: Settings, url: str) -> str | None:
    """Returns the URL of the object store of an instance with this ledger; None if nothing is configured."""
    if settings.objects is not None or not url.startswith("sqlite:///"):
        return settings.objects
    return f"file://{Path(url.removeprefix('sqlite:///').partition('?')[0]).absolute().parent / OBJECTS_FOLDER}"


@asynccontextmanager
async def open_pointers(settings: Settings, url: str) -> AsyncGenerator[Pointers]:
    """Opens the stores behind pointers, for a process without an instance: a bus worker, or a client that submits."""
    async with open_pointers_at(object_store_url(settings, url), settings.redis_url) as pointers:
        yield pointers


@asynccontextmanager
async def open_pointers_at(place: str | None, redis_url: str | None) -> AsyncGenerator[Pointers]:
    """The same for an object store of this URL, and this Redis server; None for none."""
    objects = None if place is None else await open_objects(place, credentials=s3_credentials(os.environ))
    try:
        async with closing(make_pointers(objects, redis_url)) as pointers:
            yield pointers
    finally:
        if objects is not None:
            await objects.close()


@asynccontextmanager
async def open_bus_submitter(settings: Settings, url: str, room: BacklogLimit) -> AsyncGenerator[BusSubmitter]:
    """Opens the submitter of jobs on topics, for a process without an instance."""
    topics = topics_of(settings)
    async with open_pointers(settings, url) as pointers:
        yield BusSubmitter(topics=topics, pointers=pointers, room=room, new_id=new_id)


def gateway_address(settings: Settings) -> str:
    """Returns the gateway URL for other components: the configured one, else where this machine's gateway listens."""
    scheme = "http" if settings.tls_cert_file is None else "https"
    return (settings.gateway or f"{scheme}://{reachable_host(settings.host)}:{settings.port}").rstrip("/")


def reachable_host(host: str) -> str:
    """Returns a host that clients can connect to, in the form used in a URL."""
    name = WILDCARDS.get(host, host)
    return f"[{name}]" if ":" in name else name
