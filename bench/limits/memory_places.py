"""What one change and one read of memory cost, by where the memory is: `python -m bench.limits.memory_places`.

Beside the two kinds that exist, two designs that were not chosen (ADR 0035): every git object under a key of its own,
and a second host that has a change on its disk before it is acknowledged (without network and lease, so a lower bound).
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dulwich.objects import ObjectID, ShaFile

from tests.servers.seaweedfs import ACCESS_KEY, SECRET_KEY, running_seaweedfs
from trellis.storage.memory.bare_repository import BareRepository
from trellis.storage.memory.layout import Committed, ReadMode
from trellis.storage.memory.repository import MemoryRepository, open_memory, open_shared_memory
from trellis.storage.memory.shared_repository import SharedHead, SharedStore
from trellis.storage.memory.updates import Operation, Update
from trellis.storage.memory_place import SharedMemory
from trellis.storage.objects.address import S3Credentials
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import CREATE, ObjectStore, if_match

AGENTS = 8
CHANGES = 96
READS = 50
TEXT = "- the label inside was read again, and it names the workshop and not the maker"
AT = datetime(2026, 11, 15, 12, tzinfo=UTC)


class CountedStore:
    """An object store that counts requests and the bytes that are put."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner, self.url = inner, inner.url
        self.requests: Counter[str] = Counter()
        self.bytes = 0

    async def put(self, key: str, body: bytes, **options: Any) -> Any:
        self.requests["put"] += 1
        self.bytes += len(body)
        return await self.inner.put(key, body, **options)

    async def get(self, key: str) -> Any:
        self.requests["get"] += 1
        return await self.inner.get(key)

    async def delete(self, key: str) -> bool:
        self.requests["delete"] += 1
        return await self.inner.delete(key)


class ByHash(BareRepository):
    """A repository whose objects are also put into the object store, each under its own hash, then a head."""

    def __init__(self, path: Path, store: SharedStore) -> None:
        super().__init__(path, time.sleep, durable=False)
        self._store = store
        self._etag: str | None = None
        self._publishing = False

    def read_branch(self) -> ObjectID | None:
        if not self._publishing:
            self._store.run(self._store._objects.get("by-hash/head"))  # noqa: SLF001 - a sketch of another design
        return super().read_branch()

    def publish(self, objects: Sequence[ShaFile], old: ObjectID | None, new: ObjectID) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        put = self._store._objects.put  # noqa: SLF001 - as above

        async def store() -> Any:
            await asyncio.gather(
                *(put(f"by-hash/objects/{item.id.decode()}", item.as_legacy_object()) for item in objects)
            )
            return await put("by-hash/head", new, when=CREATE if self._etag is None else if_match(self._etag))

        self._etag = self._store.run(store()).etag
        self._publishing = True
        try:
            return super().publish(objects, old, new)
        finally:
            self._publishing = False


class Replicated(BareRepository):
    """A repository whose changes are on the disk of a second one before they are acknowledged."""

    def __init__(self, path: Path, other: BareRepository) -> None:
        super().__init__(path, time.sleep)
        self._other = other

    def publish(self, objects: Sequence[ShaFile], old: ObjectID | None, new: ObjectID) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        with self._other.locked():
            return self._other.publish(objects, old, new) and super().publish(objects, old, new)


def change(memory: MemoryRepository, number: int) -> None:
    agent = f"agent-{number % AGENTS}"
    outcome = memory.commit(
        agent,
        [Update(file="facts.md", operation=Operation.APPEND, content=f"{TEXT} ({number})")],
        expected_version=number // AGENTS,
        run_id="run_2026-11-15_120000_abcdef",
        proposal_id=f"prop_{number}",
        reason="The label inside was read again.",
        auto_approved=True,
        author="bench",
        at=AT,
    )
    assert isinstance(outcome, Committed), outcome


def timed(act: Callable[[int], object], number: int) -> list[float]:
    taken: list[float] = []
    for turn in range(number):
        began = time.perf_counter()
        act(turn)
        taken.append(1000 * (time.perf_counter() - began))
    return taken


def measure(name: str, memory: MemoryRepository, store: CountedStore | None, cold: MemoryRepository | None) -> None:
    changes = timed(lambda number: change(memory, number), CHANGES)
    requests, sent = (Counter[str](), 0) if store is None else (store.requests.copy(), store.bytes)
    if store is not None:
        store.requests.clear()
    reads = timed(lambda number: memory.read(f"agent-{number % AGENTS}", ReadMode.WIDE), READS)
    read_requests = 0 if store is None else store.requests.total() / READS
    first = "" if cold is None else f"{timed(lambda _: cold.read('agent-0'), 1)[0]:6.0f}"
    each = {verb: round(count / CHANGES, 2) for verb, count in sorted(requests.items())}
    sys.stdout.write(
        f"{name:34} change {statistics.median(changes):6.1f} ms (largest {max(changes):5.0f})  "
        f"read {statistics.median(reads):5.2f} ms  first read of a new host {first:>6} ms  "
        f"requests a change {each}, {sent // CHANGES:,} bytes; a read {read_requests:g}\n"
    )
    sys.stdout.flush()


@contextlib.contextmanager
def stores(folder: Path) -> Iterator[dict[str, str]]:
    with running_seaweedfs() as server:
        yield {"folder": (folder / "objects").as_uri(), "SeaweedFS": server.url("bench")}


def opened(url: str) -> CountedStore:
    credentials = S3Credentials(access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY)
    store = CountedStore(asyncio.run(open_objects(url, credentials=credentials)))
    asyncio.run(store.put("warm-up", b"1"))
    store.requests.clear()
    store.bytes = 0
    return store


def main() -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch, stores(Path(scratch)) as urls:
        folder = Path(scratch)
        measure("repository on a disk", open_memory(folder / "local.git"), None, None)
        first, second = (open_memory(folder / f"{name}.git").path for name in ("first", "second"))
        pair = Replicated(first, BareRepository(second, time.sleep))
        measure("on two disks (b), lower bound", MemoryRepository(pair, lambda text: len(text) // 3), None, None)
        for name, url in urls.items():
            store = opened(url)
            objects: Any = store
            SharedStore(objects, "memory").put_head(SharedHead(identity="bench"), None)
            here, new = (
                open_shared_memory(objects, SharedMemory(prefix="memory", cache=folder / f"{host} {name}.git"))
                for host in ("here", "new")
            )
            store.requests.clear()
            measure(f"a pack for each change, {name}", here, store, new)
            store = opened(url)
            objects = store
            by_hash = ByHash(open_memory(folder / f"hash {name}.git").path, SharedStore(objects, "memory"))
            counted = MemoryRepository(by_hash, lambda text: len(text) // 3)
            measure(f"an object for each hash, {name}", counted, store, None)


if __name__ == "__main__":
    main()
