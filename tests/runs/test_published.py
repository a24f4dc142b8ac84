"""Waiting for a document: heard of at once when this process published it, found by asking when another did."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.stopped_tasks import stopped
from trellis.documents import ids
from trellis.documents.publisher import WAIT_S_FIRST, WAIT_S_HEARING, WAIT_S_MAX, DocumentPublisher, PublishedRuns
from trellis.documents.run_documents import Publication
from trellis.storage.objects.canonical_json import encode
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore, StoredObject
from trellis.testing import FakeClock

SLUG, RUN_ID = "archivist-violin", "run_2026-02-14_080000_000001"
KEY = ids.status_key(SLUG, RUN_ID)
PATIENCE_S = 60.0


class Asked:
    """The store, which counts the questions; a test can have something happen while one is under way."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self.gets = 0
        self.during: Publication | None = None
        self.publisher: DocumentPublisher | None = None

    async def get(self, key: str) -> StoredObject | None:
        self.gets += 1
        found = await self.objects.get(key)
        publication, self.during = self.during, None
        if publication is not None and self.publisher is not None:
            await self.publisher.publish([publication])
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self.objects, name)


class Desk:
    """One process's publisher and reader, and another's publisher on the same store."""

    def __init__(self, objects: ObjectStore) -> None:
        self.clock = FakeClock()
        self.asked = Asked(objects)
        self.ours, self.other = DocumentPublisher(objects), DocumentPublisher(objects)
        self.asked.publisher = self.ours
        self.published = PublishedRuns(self.asked, self.clock, self.ours)  # type: ignore[arg-type]

    def waiting(self, version: int) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self.published.reached(SLUG, RUN_ID, version))  # type: ignore[return-value]

    async def asleep(self) -> None:
        """Come back when the reader waits for the clock."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.clock.sleeping:  # noqa: ASYNC110 - the clock of the tests tells nobody
                await asyncio.sleep(0)


def status(version: int) -> Publication:
    return Publication(KEY, encode({"version": version}), version)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncGenerator[Desk]:
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    yield Desk(objects)
    await objects.close()


async def test_run_published_by_this_process_is_known_without_a_store_request(desk: Desk):
    await desk.ours.publish([status(3)])
    await asyncio.wait_for(desk.published.reached(SLUG, RUN_ID, 3), PATIENCE_S)
    assert desk.asked.gets == 0


async def test_documents_that_are_there_already_are_no_conflicts(desk: Desk):
    documents = [Publication(f"runs/{number}.json", encode({"number": number}), None) for number in range(50)]
    assert await desk.ours.publish(documents) == 50
    assert await desk.other.publish(documents) == 0


async def test_run_published_by_this_process_notifies_waiters_at_once(desk: Desk):
    await desk.ours.publish([status(3)])
    waiting = desk.waiting(4)
    await desk.asleep()
    await desk.ours.publish([status(4)])
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert desk.asked.gets == 0


async def test_event_that_arrives_during_a_store_read_is_not_lost(desk: Desk):
    desk.asked.during = status(4)
    await asyncio.wait_for(desk.published.reached(SLUG, RUN_ID, 4), PATIENCE_S)


async def test_run_published_by_another_process_is_found_by_polling(desk: Desk):
    waiting = desk.waiting(1)
    await desk.asleep()
    await desk.other.publish([status(1)])
    desk.clock.advance(WAIT_S_FIRST)
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_a_run_that_another_process_took_over_is_found_by_asking(desk: Desk):
    await desk.ours.publish([status(3)])
    waiting = desk.waiting(4)
    await desk.asleep()
    await desk.other.publish([status(4)])
    desk.clock.advance(WAIT_S_HEARING)
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert desk.asked.gets == 1


async def test_an_older_version_is_not_enough(desk: Desk):
    await desk.ours.publish([status(3)])
    waiting = desk.waiting(5)
    await desk.asleep()
    await desk.ours.publish([status(4)])
    await asyncio.sleep(0)
    await desk.asleep()
    assert not waiting.done()
    waiting.cancel()
    await stopped(waiting)


async def test_cancelled_waiter_for_a_published_run_is_forgotten(desk: Desk):
    waiting = desk.waiting(1)
    await desk.asleep()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert not desk.ours._listening


@pytest.mark.requirement("D13", "RUN-3")
async def test_a_first_version_is_put_without_a_look_and_never_over_a_later_one(desk: Desk):
    await desk.other.publish([status(2)])
    assert await desk.ours.publish([status(1)]) == 0
    found = await desk.asked.objects.get(KEY)
    assert found is not None
    assert found.body == status(2).body


async def reads_until_found(desk: Desk, version: int, took_s: float) -> tuple[int, float]:
    """Another process publishes a version after `took_s`: how often the store was read, and how late that was seen."""
    gets, waited_s, waiting = desk.asked.gets, 0.0, desk.waiting(version)
    await desk.asleep()
    while not waiting.done():
        if waited_s <= took_s < waited_s + WAIT_S_FIRST:
            await desk.other.publish([status(version)])
        desk.clock.advance(WAIT_S_FIRST)
        waited_s += WAIT_S_FIRST
        async with asyncio.timeout(PATIENCE_S):
            while not (waiting.done() or desk.clock.sleeping):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
    return desk.asked.gets - gets, waited_s - took_s


async def test_slow_publications_are_polled_at_the_pace_of_the_last_ones_and_fast_ones_again_soon(desk: Desk):
    versions = iter(range(1, 100))
    slow = [await reads_until_found(desk, next(versions), 0.3) for _ in range(30)]
    assert slow[0][0] >= 5, "nothing is known about the first wait"
    assert max(reads for reads, _ in slow[-5:]) <= 4
    assert max(late_s for _, late_s in slow[-5:]) <= WAIT_S_MAX
    fast = [await reads_until_found(desk, next(versions), 0.0) for _ in range(20)]
    assert fast[-1][1] <= 2 * WAIT_S_FIRST
