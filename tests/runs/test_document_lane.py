"""Documents are published before the audit records of plain jobs; nothing is lost or doubled; on both ledgers."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.runs.conftest import ORCHESTRATOR, Stand
from tests.runs.test_audit_segments import record, recorded_once, work
from tests.runs.test_projector import SLUG, Press
from tests.runs.test_rebuild import ADMIN
from trellis.documents import ids
from trellis.engine.jobs import CancelMode, JobId, RequestId
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.runs.projector import Projector, ProjectorOptions, ProjectorPosition
from trellis.runs.rebuild import rebuild_objects
from trellis.storage.objects.open import open_objects
from trellis.testing import FakeClock

BATCH = 20
JOBS = 60
"""Of plain jobs; four events each, so that many pages of them stand before whatever comes after."""
PASSES_MAX = 2
"""One that finds out that more than a page is unread, and one that publishes documents first."""


@pytest.fixture
async def press(either_url: str, tmp_path: Path) -> AsyncGenerator[Press]:
    clock = FakeClock()
    ledger = await open_ledger(either_url)
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    yield Press(Stand(ledger, clock), objects)
    report = await verify(ledger)
    assert report.ok, "\n".join(map(str, report.violations[:20]))
    await objects.close()
    await ledger.close()


def small(press: Press, name: str = "projector@test") -> Projector:
    """A projector that reads small pages."""
    made = press.projector(name)
    made.options = ProjectorOptions(batch=BATCH, lease_s=0.001 if name == "dies" else 60.0)
    return made


async def passes_until(projector: Projector, holds: Callable[[], Awaitable[bool]]) -> int:
    for number in range(1, 100):
        await projector.run_once()
        if await holds():
            return number
    pytest.fail("a hundred passes were not enough")


async def place_of(projector: Projector) -> ProjectorPosition:
    """What the ledger remembers for the next projector."""
    await projector.release()
    following = await projector.ledger.subscribe(projector.actor, "projector", lease_s=60.0)
    assert following is not None
    await projector.ledger.unsubscribe(following)
    return ProjectorPosition.read(following.position, frozenset())


@pytest.mark.requirement("D14")
async def test_the_status_of_a_run_does_not_wait_behind_the_records_of_plain_jobs(press: Press):
    await work(press.stand, JOBS)
    run_id, projector = await press.stand.run_of(), small(press)

    async def is_shown() -> bool:
        return await press.version(SLUG, run_id) == 2

    assert await passes_until(projector, is_shown) <= PASSES_MAX
    await press.stand.ledger.cancel(ORCHESTRATOR, run_id, CancelMode.HARD, RequestId("c"), grace_s=0, cause="enough")

    async def is_over() -> bool:
        return await press.version(SLUG, run_id) == 3

    assert await passes_until(projector, is_over) == 1
    assert (await record(press.store))[1] == {}, "records of plain jobs still wait"
    await press.all(projector)
    await projector.release()
    await recorded_once(press.stand, press.store)


@pytest.mark.requirement("D14", "OBS-1")
async def test_next_projector_republishes_no_document_that_was_ahead_and_records_each_event_once(
    press: Press,
):
    await work(press.stand, JOBS)
    run_id, first = await press.stand.run_of(), small(press)
    for _ in range(PASSES_MAX + 1):
        await first.run_once()
    place = await place_of(first)
    assert place.position is not None
    assert place.documents is not None
    assert place.documents > place.position
    press.objects.writes.clear()
    second = small(press, "second")
    await press.all(second)
    assert await press.version(SLUG, run_id) == 2
    await second.release()
    assert not [key for key in press.objects.writes if not key.endswith(".jsonl")]
    await recorded_once(press.stand, press.store)
    assert (await place_of(small(press, "third"))).documents is None


@pytest.mark.requirement("D14", "OBS-1")
async def test_a_projector_that_dies_while_documents_are_ahead_loses_and_doubles_nothing(press: Press):
    await work(press.stand, JOBS)
    runs = [(slug, await press.stand.run_of(slug)) for slug in ("one", "two")]
    first = small(press, "dies")
    for _ in range(PASSES_MAX + 1):
        await first.run_once()
    await first._recorder.segments.write()  # and dies before it remembers
    await work(press.stand, 5)
    press.stand.clock.advance(1.0)
    second = small(press, "second")
    await press.all(second)
    await second.release()
    assert [await press.version(*one) for one in runs] == [2, 2]
    await recorded_once(press.stand, press.store)


@pytest.mark.requirement("D14")
async def test_a_bucket_that_is_lost_while_documents_are_ahead_comes_back_whole(press: Press):
    await work(press.stand, JOBS)
    run_id, first = await press.stand.run_of(), small(press)
    for _ in range(PASSES_MAX + 1):
        await first.run_once()
    await first.release()
    for key in await press.folder():
        await press.store.delete(key)
    await rebuild_objects(press.stand.ledger, press.store, ADMIN)
    second = small(press, "second")
    await press.all(second)
    await second.release()
    found = await press.folder()
    assert json.loads(found[ids.status_key(SLUG, run_id)])["version"] == 2
    await recorded_once(press.stand, press.store)


@pytest.mark.requirement("D14")
async def test_a_job_at_the_edge_of_a_page_of_documents_is_published_once(press: Press):
    """Many runs and many jobs, mixed: pages of documents end in the middle of a transaction and of a run."""
    for number in range(15):
        await work(press.stand, 5)
        for slug in ("a", "b"):
            run: JobId = await press.stand.run_of(f"{slug}-{number}")
            request = RequestId(f"c-{run}")
            await press.stand.ledger.cancel(ORCHESTRATOR, run, CancelMode.HARD, request, grace_s=0, cause="enough")
    projector = small(press)
    await press.all(projector)
    await projector.release()
    await recorded_once(press.stand, press.store)
    statuses = [json.loads(body) for key, body in (await press.folder()).items() if key.endswith("status.json")]
    assert [status["version"] for status in statuses] == [3] * 30
