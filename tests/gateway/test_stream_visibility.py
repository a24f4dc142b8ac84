"""Events of runs that wait for a document which does not come, or for an object store that does not answer (D58)."""

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.gateway.stand import BEGINNING, Stand, standing
from trellis.app.wiring import new_id
from trellis.engine.jobs import JobId
from trellis.gateway.visibility import (
    AWAITED_MAX,
    HOLD_S,
    LOOK_S_MAX,
    PublishedVersions,
    RunDocument,
    Visibility,
)
from trellis.storage.objects.local import LocalObjects
from trellis.storage.objects.store import ObjectStore, StoredObject
from trellis.testing import FakeClock

ALL = f"last_event_id={BEGINNING}"
AT = datetime(2026, 2, 14, tzinfo=UTC)


@pytest.fixture
async def timed(tmp_path: Path) -> AsyncIterator[Stand]:
    async with standing(tmp_path, clock=FakeClock()) as made:
        yield made


async def move(stand: Stand, seconds: float) -> None:
    """Move the clock when the services of the hub sleep: the feed, the listeners' times and the documents."""
    assert stand.clock is not None
    async with asyncio.timeout(20):
        while stand.clock.sleeping < 3:  # noqa: ASYNC110 - they come back from the ledger's thread
            await asyncio.sleep(0)
    stand.clock.advance(seconds)


@pytest.mark.requirement("D58", "RUN-5")
async def test_a_run_whose_document_is_lost_holds_a_stream_for_a_while_and_not_for_ever(
    timed: Stand, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "trellis")
    lost = await timed.run_to_its_end(published=False)
    (job_id,) = await timed.jobs(1)
    async with timed.listen(ALL) as listener:
        await move(timed, HOLD_S / 2)
        await move(timed, 1.0)
        assert listener.heard.events == []
        await move(timed, HOLD_S)
        told = await listener.until_events(6)
    assert [data.get("runId") or data["jobId"] for data in told] == [lost] * 5 + [job_id]
    (logged,) = [text for one in caplog.records if (text := one.getMessage()).startswith("announced_unpublished")]
    assert lost in logged
    assert timed.hub.published.awaited == 0


class Hanging:
    """A store that gives nothing before the test lets it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self.asked, self.answers = store, asyncio.Event(), asyncio.Event()

    async def get(self, key: str) -> StoredObject | None:
        self.asked.set()
        await self.answers.wait()
        return await self._store.get(key)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.mark.requirement("D58", "RUN-5")
async def test_a_store_that_does_not_answer_delays_no_event_but_those_of_runs(tmp_path: Path):
    async with standing(tmp_path) as stand:
        store = Hanging(stand.objects)
        stand.hub.published.objects = store  # type: ignore[assignment] - it has all that the store has
        async with stand.listen() as everything, stand.listen("lifecycle=leased-job") as jobs_only:
            run_id = await stand.run_requested()
            await asyncio.wait_for(store.asked.wait(), 60)
            (job_id,) = await stand.jobs(1)
            assert (await jobs_only.until_events(1))[0]["jobId"] == job_id
            behind = (await stand.heard(f"{ALL}&lifecycle=leased-job")).heard.events
            assert [data["jobId"] for _, data in behind] == [job_id]
            assert everything.heard.events == []
            store.answers.set()
            told = await everything.until_events(2)
    assert [data.get("runId") or data["jobId"] for data in told] == [run_id, job_id]


# --- which documents are looked for ----------------------------------------------------------------------------------


class Counting(LocalObjects):
    """Counts how often it is read."""

    reads = 0

    async def get(self, key: str) -> StoredObject | None:
        self.reads += 1
        return await super().get(key)


def published_in(folder: Path, clock: FakeClock) -> tuple[Counting, PublishedVersions]:
    store = Counting(folder, new_name=new_id, now_ns=lambda: 0)
    published = PublishedVersions(objects=store, clock=clock)
    published.set_time(AT)
    return store, published


def document(version: int, name: str = "one", at: datetime = AT) -> RunDocument:
    return RunDocument(JobId(f"run-{name}"), f"{name}.json", version, at)


async def test_the_earliest_awaited_version_of_a_document_frees_its_events(tmp_path: Path):
    store, published = published_in(tmp_path, FakeClock())
    for version in (4, 2, 5):
        assert published.visibility(document(version)) is Visibility.NOT_YET
    await store.put("one.json", b'{"version":3}')
    assert await published.look_again()
    shown = [published.visibility(document(version)) is Visibility.SHOWN for version in (2, 3, 4)]
    assert shown == [True, True, False]


async def test_missing_document_is_polled_with_increasing_delay(tmp_path: Path):
    clock = FakeClock()
    store, published = published_in(tmp_path, clock)
    late = document(1, at=AT + timedelta(hours=1))
    published.visibility(late)
    pauses: list[float] = []
    for looks in range(1, 12):
        assert not await published.look_again()
        assert not await published.look_again()
        assert store.reads == looks
        pauses.append(round(published.look_in_s() or 0.0, 3))
        clock.advance(pauses[-1] + 1e-3)
    assert pauses[:3] == [0.05, 0.1, 0.2]
    assert max(pauses) == pauses[-1] == LOOK_S_MAX


async def test_awaited_run_documents_are_bounded_and_end_with_their_time_or_the_last_listener(tmp_path: Path):
    clock = FakeClock()
    _, published = published_in(tmp_path, clock)
    more = [document(1, name=f"run{number}") for number in range(AWAITED_MAX + 1)]
    assert {published.visibility(one) for one in more} == {Visibility.NOT_YET}
    assert published.awaited == AWAITED_MAX
    clock.advance(HOLD_S)
    assert published.visibility(more[-1]) is Visibility.SHOWN
    before = published.awaited
    assert await published.look_again()
    assert published.awaited < before
    published.forget_awaited()
    assert (published.awaited, published.look_in_s()) == (0, None)
