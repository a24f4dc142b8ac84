"""Opens the memory of an instance: a repository on this host, or the one in the object store."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from trellis.app.fleet import storage_locations
from trellis.app.settings import Settings
from trellis.app.system import new_id
from trellis.engine.closing import closing
from trellis.storage.memory.bare_repository import MemoryRecord, check_belonging, id_of_identity, recorded
from trellis.storage.memory.errors import MemoryMissing
from trellis.storage.memory.layout import TokenCounter
from trellis.storage.memory.repository import MemoryRepository, open_memory, open_shared_memory, open_shared_repository
from trellis.storage.memory.shared_repository import SharedHead, SharedStore
from trellis.storage.memory.verification import MemoryVerifyReport, verify
from trellis.storage.memory_place import SharedMemory
from trellis.storage.objects.address import s3_credentials
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore


@contextlib.asynccontextmanager
async def open_instance_memory(
    place: Path | SharedMemory | None, objects: ObjectStore, *, counter: TokenCounter, uses_memory: bool
) -> AsyncGenerator[MemoryRepository | None]:
    """Opens the memory; None if this process reads it through the gateway. If the process uses it, checks that it is the instance's; raises MemoryOfAnother.

    The first process of an instance creates it.
    """
    if place is None:
        yield None
        return
    if isinstance(place, SharedMemory):
        memory = open_shared_memory(objects, place, counter=counter)
    else:
        memory = await asyncio.to_thread(open_memory, place, counter=counter)
    try:
        if uses_memory and isinstance(place, SharedMemory):
            await _check_shared(place, objects)
        elif uses_memory:
            repository = id_of_identity(await asyncio.to_thread(memory.identity, new_id))
            await check_belonging(objects, MemoryRecord(repository=repository), memory.path)
        yield memory
    finally:
        await asyncio.to_thread(memory.close)


async def _check_shared(place: SharedMemory, objects: ObjectStore) -> None:
    store = SharedStore(objects, place.prefix)
    try:
        fetched = await asyncio.to_thread(store.fetch)
        if fetched is None:
            if await recorded(objects) is not None:
                reason = "this instance has a memory elsewhere; `trellis memory import` brings it there"
                raise MemoryMissing(path=place, reason=reason)
            await asyncio.to_thread(store.put_head, SharedHead(identity=new_id()), None)
            fetched = await asyncio.to_thread(store.fetch)  # another process may have created it first
        if fetched is None:
            raise MemoryMissing(path=place, reason=f"the object store lost {store.head_key}")
    finally:
        await asyncio.to_thread(store.close)
    await check_belonging(objects, MemoryRecord(repository=fetched.head.repository, place=str(place)), str(place))


async def verify_shared_memory(settings: Settings, ledger_url: str) -> MemoryVerifyReport | None:
    """Checks every commit and object of a memory in the object store; None if it is in a folder, or not created yet.

    It is fetched as a new host fetches it, so what a replica has cannot hide what the store lost. Raises MemoryMissing.
    """
    places = storage_locations(settings, ledger_url)
    if not isinstance(places.memory, SharedMemory):
        return None
    async with closing(await open_objects(places.objects, credentials=s3_credentials(os.environ))) as objects:
        if not await _was_created(places.memory, objects):
            return None
        with tempfile.TemporaryDirectory() as scratch:
            place = SharedMemory(prefix=places.memory.prefix, cache=Path(scratch) / "copy.git")
            memory = open_shared_memory(objects, place)
            try:
                return await asyncio.to_thread(verify, memory)
            finally:
                await asyncio.to_thread(memory.close)


async def check_shared_memory(place: SharedMemory, objects: ObjectStore) -> str:
    """Asks for the head of a memory in the object store and for every pack that it names; returns what is there.

    Raises MemoryMissing, MemoryBusy, MemoryDamaged and MemoryUnavailable. Writes nothing.
    """
    if not await _was_created(place, objects):
        return "no change yet: the first process that uses it creates it"
    shared = open_shared_repository(objects, place)
    try:
        return await asyncio.to_thread(shared.checked_packs)
    finally:
        await asyncio.to_thread(shared.close)


async def _was_created(place: SharedMemory, objects: ObjectStore) -> bool:
    """Whether an instance has used this memory before, or any other."""
    head = SharedStore(objects, place.prefix).head_key
    return await objects.head(head) is not None or await recorded(objects) is not None
