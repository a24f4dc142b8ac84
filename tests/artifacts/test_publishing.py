"""Artifacts in the object store: published with their job's completion, and made again byte for byte, either side from the other."""

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.desk import BACKEND, CONTENTS, DAY_S, OPERATOR, Desk, advance
from tests.runs.conftest import is_of_rebuild
from trellis.artifacts.content import JobType
from trellis.artifacts.registry import StagedArtifact
from trellis.artifacts.rows import journal_entry
from trellis.engine.records import RetentionOptions
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.runs.projector import read_alerts
from trellis.runs.rebuild import rebuild_ledger, rebuild_objects
from trellis.storage.objects.store import StoredObject, put_one_by_one


async def bucket(desk: Desk) -> dict[str, bytes]:
    """Everything that is published: documents and records, not what is staged."""
    keys = [key for prefix in ("projects/", "audit/") for key in await desk.keys(prefix) if "/staged/" not in key]
    return {key: await desk.body(key) or b"" for key in keys if not is_of_rebuild(key)}


async def wipe(desk: Desk) -> None:
    for key in await desk.keys(""):
        await desk.objects.delete(key)


async def lose(desk: Desk, folder: Path) -> None:
    """The ledger's file is gone; a new one is in its place."""
    await desk.ledger.close()
    for file in await asyncio.to_thread(lambda: list(folder.glob("ledger.db*"))):
        await asyncio.to_thread(file.unlink)
    desk.ledger = await open_ledger(f"sqlite:///{folder / 'ledger.db'}", clock=desk.clock)


async def holds(desk: Desk, made: StagedArtifact) -> None:
    """It is final, readable, and published with the recorded bytes."""
    document = await desk.artifacts.read(made.artifact_id)
    assert document is not None
    assert document["content"] == CONTENTS[JobType.RESEARCH][1]
    assert made.row.is_of(await desk.body(made.row.key) or b"")


@pytest.mark.requirement("D15", "ART-6", "PIPE-11", "OBS-1")
async def test_the_projector_publishes_the_same_bytes_once_and_records_every_event(desk: Desk):
    made = await desk.finalized()
    staged = await desk.body(made.row.staged_key)
    await desk.publish()
    assert await desk.body(made.row.key) == staged
    recorded = [key.rpartition("/")[2] for key in await desk.keys("audit/")]
    assert [f"{made.artifact_id}-{number}.json" in recorded for number in (1, 2, 3)] == [True, True, False]
    before = await bucket(desk)
    assert (await rebuild_objects(desk.ledger, desk.objects, OPERATOR)).written == 0
    assert await bucket(desk) == before


@pytest.mark.requirement("D14", "D15")
async def test_a_wiped_bucket_is_rebuilt_byte_for_byte_without_what_was_removed(desk: Desk):
    removed = await desk.finalized()
    await desk.publish()
    desk.clock.advance(91 * DAY_S)
    made = [await desk.finalized(kind) for kind in JobType]
    await desk.stage(await desk.waiting())
    await desk.artifacts.cleanup(OPERATOR)
    await desk.publish()
    before = await bucket(desk)
    assert {one.row.key for one in made} < set(before)
    await wipe(desk)
    done = await rebuild_objects(desk.ledger, desk.objects, OPERATOR)
    assert (done.differing, done.written) == ((), len(before))
    assert await bucket(desk) == before
    assert await desk.body(removed.row.key) is None
    await desk.collector().run_once()
    await holds(desk, made[0])


@pytest.mark.requirement("D14", "OBS-1")
async def test_a_lost_ledger_gets_jobs_and_artifacts_back_from_the_records(desk: Desk, tmp_path: Path):
    removed = await desk.finalized()
    await desk.publish()
    desk.clock.advance(91 * DAY_S)
    made, waiting = await desk.finalized(), await desk.waiting()
    staged = await desk.stage(waiting)
    await desk.artifacts.cleanup(OPERATOR)
    await desk.publish()
    await desk.collector().run_once()
    before = await bucket(desk)
    await lose(desk, tmp_path)
    done = await rebuild_ledger(desk.ledger, desk.objects, OPERATOR)
    assert (done.refusals, done.jobs) == ((), 6)
    assert (await verify(desk.ledger)).ok
    assert await bucket(desk) == before
    await holds(desk, made)
    states = {one.artifact_id: (await desk.job(one.artifact_id)).state for one in (removed, made, staged)}
    assert list(states.values()) == ["removed", "finalized", "staged"]
    await wipe(desk)  # what the journal held of the artifact came back, too
    assert (await rebuild_objects(desk.ledger, desk.objects, OPERATOR)).differing == ()
    assert await bucket(desk) == before


class Undeleting:
    """An object store whose process dies before it deletes anything."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def delete(self, key: str) -> bool:
        raise RuntimeError(f"died before it deleted {key}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.requirement("ART-5", "D14", "OBS-1")
async def test_a_ledger_lost_with_a_removal_has_the_artifact_back_and_one_lost_after_its_record_has_it_removed(
    desk: Desk, tmp_path: Path
):
    made = await desk.finalized()
    await desk.publish()
    await desk.collector().run_once()
    desk.clock.advance(91 * DAY_S)
    assert len((await desk.artifacts.cleanup(OPERATOR)).rows) == 1
    await desk.collector().run_once()
    await lose(desk, tmp_path)
    assert (await rebuild_ledger(desk.ledger, desk.objects, OPERATOR)).refusals == ()
    await holds(desk, made)
    assert len((await desk.artifacts.cleanup(OPERATOR)).rows) == 1
    dying = Desk(ledger=desk.ledger, objects=Undeleting(desk.objects), clock=desk.clock).projector()  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=made.artifact_id):
        await dying.run_once()
    assert await desk.keys() == [made.row.key]
    await lose(desk, tmp_path)
    assert (await rebuild_ledger(desk.ledger, desk.objects, OPERATOR)).refusals == ()
    assert ((await desk.job(made.artifact_id)).state, await desk.keys()) == ("removed", [])


@pytest.mark.requirement("D14", "D15")
async def test_published_bytes_of_an_artifact_no_longer_final_are_used_or_removed(desk: Desk, tmp_path: Path):
    made = await desk.finalized()
    await desk.publish()
    job, body = await desk.job(made.row.job_id), await desk.body(made.row.key) or b""
    for key in await desk.keys("audit/"):  # as if the projector had died after it put the bytes, and the ledger with it
        if key.endswith((f"/{made.artifact_id}-2.json", f"/{job.job_id}-{job.version}.json")):
            await desk.objects.delete(key)
    await lose(desk, tmp_path)
    assert (await rebuild_ledger(desk.ledger, desk.objects, OPERATOR)).refusals == ()
    assert (await desk.job(made.artifact_id)).state == "staged"
    await desk.objects.delete(made.row.staged_key)
    assert await desk.artifacts.staged_bytes(made.artifact_id) == body
    assert await desk.artifacts.discard(BACKEND, made.artifact_id, cause="a newer attempt")
    await desk.publish()
    assert await desk.keys() == []


class Dying:
    """An object store whose process dies before its nth write."""

    def __init__(self, inner: Any, writes: int) -> None:
        self._inner, self.left = inner, writes

    async def put(self, key: str, body: bytes, **options: Any) -> Any:
        if self.left == 0:
            raise RuntimeError("died")
        self.left -= 1
        return await self._inner.put(key, body, **options)

    async def put_many(self, sequences: Any) -> Any:
        return await put_one_by_one(self.put, sequences)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.requirement("JQ-5", "D14", "D15")
async def test_wherever_the_projector_dies_the_records_bring_the_pair_back_or_neither(desk: Desk, tmp_path: Path):
    """Before each write of a projector that publishes a completed job and its artifact, the ledger is lost with it."""
    made, ends = await desk.finalized(), list[tuple[str, ...]]()
    blob = await desk.body(made.row.staged_key) or b""
    for writes in count():
        await wipe(desk)
        await desk.objects.put(made.row.staged_key, blob)
        try:
            await Desk(ledger=desk.ledger, objects=Dying(desk.objects, writes), clock=desk.clock).publish()  # type: ignore[arg-type]
            break
        except RuntimeError:
            ends.append(await ends_after_a_rebuild(desk, made, tmp_path / f"again-{writes}.db"))
        desk.clock.advance(10.0)  # the projector that died follows no more
    late = [end for end in ends if set(end) & {"COMPLETE", "finalized"}]
    assert (len(ends), late) == (10, [("COMPLETE", "finalized")] * 2)
    await holds(desk, made)


async def ends_after_a_rebuild(desk: Desk, made: StagedArtifact, file: Path) -> tuple[str, ...]:
    """How job and artifact stand in a new ledger that was made of what is published."""
    ledger = await open_ledger(f"sqlite:///{file}", clock=desk.clock)
    assert (await rebuild_ledger(ledger, desk.objects, OPERATOR)).refusals == ()
    report = await verify(ledger)
    assert report.ok, report.violations
    states = [getattr(await ledger.job(one), "state", "") for one in (made.row.job_id, made.artifact_id)]
    if "COMPLETE" in states:
        await holds(Desk(ledger=ledger, objects=desk.objects, clock=desk.clock), made)
    await ledger.close()
    return tuple(states)


@pytest.mark.requirement("D14")
async def test_an_artifact_whose_bytes_are_lost_everywhere_comes_back_neither_alone_nor_its_job(
    desk: Desk, tmp_path: Path
):
    made = await desk.finalized()
    other = await desk.finalized()
    await desk.publish()
    await desk.collector().run_once()
    body = await desk.body(made.row.key) or b""
    await desk.objects.delete(made.row.key)
    await lose(desk, tmp_path)
    done = await rebuild_ledger(desk.ledger, desk.objects, OPERATOR)
    assert {refusal.job_id for refusal in done.refusals} == {made.artifact_id, made.row.job_id}
    assert all(made.row.key in refusal.reason for refusal in done.refusals)
    assert (await verify(desk.ledger)).ok
    await holds(desk, other)
    await desk.objects.put(made.row.key, body)
    await lose(desk, tmp_path)
    assert (await rebuild_ledger(desk.ledger, desk.objects, OPERATOR)).refusals == ()
    await holds(desk, made)


@pytest.mark.requirement("D15")
async def test_an_object_in_the_way_sets_the_artifact_aside_and_a_rebuild_puts_it_right(desk: Desk):
    made = await desk.finalized()
    await desk.objects.put(made.row.key, b"{}")
    other = await desk.finalized()
    await desk.publish()
    await holds(desk, other)
    assert [alert.key async for alert in read_alerts(desk.objects)] == [made.row.key]
    assert await desk.artifacts.read(made.artifact_id) is not None
    await desk.objects.delete(made.row.key)
    assert (await rebuild_objects(desk.ledger, desk.objects, OPERATOR)).differing == ()
    await holds(desk, made)
    assert [alert async for alert in read_alerts(desk.objects)] == []


@pytest.mark.requirement("ART-5")
async def test_an_artifact_outlives_its_job_in_the_ledger(desk: Desk):
    made = await desk.finalized()
    await desk.publish(seals=True)
    desk.clock.advance(31 * DAY_S)
    await desk.ledger.retain(RetentionOptions())
    assert await desk.ledger.job(made.row.job_id) is None
    await holds(desk, made)
    assert (await rebuild_objects(desk.ledger, desk.objects, OPERATOR)).differing == ()


class Meanwhile:
    """An object store in which somebody else acts after the first look at a key."""

    def __init__(self, inner: Any, key: str, act: Any) -> None:
        self._inner, self._key, self._act = inner, key, act

    async def get(self, key: str) -> StoredObject | None:
        found = await self._inner.get(key)
        if key == self._key and self._act is not None:
            act, self._act = self._act, None
            await act()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_a_reader_finds_what_is_published_and_collected_while_it_looks(desk: Desk):
    lease = await desk.waiting()
    made = await desk.stage(lease)
    await advance(desk.ledger, lease, "NOTEBOOKLM_CALL", "response_received")
    assert await advance(desk.ledger, lease, "ARTIFACT_WRITE", "complete", finalizes=made.artifact_id)
    assert journal_entry(made.artifact_id) not in await desk.ledger.read_journal(lease.job_id)

    async def act() -> None:
        await desk.publish()
        await desk.collector().run_once()

    reader = Desk(ledger=desk.ledger, objects=Meanwhile(desk.objects, made.row.key, act), clock=desk.clock)  # type: ignore[arg-type]
    document = await reader.artifacts.read(made.artifact_id)
    assert document is not None
    assert await desk.keys() == [made.row.key]


async def test_the_collector_deletes_former_request_objects_a_page_at_a_time_and_nothing_else(desk: Desk):
    kept = await desk.finalized()
    await desk.publish()
    before = await bucket(desk)
    for number in range(5):
        await desk.objects.put(f"requests/20260214/{number}", b"{}")
    collector = desk.collector(batch=2)
    reports = [await collector.run_once() for _ in range(4)]
    assert [report.requests for report in reports] == [2, 2, 1, 0]
    assert (await desk.objects.list("requests/")).items == ()
    assert set(before) - set(await bucket(desk)) <= {kept.row.staged_key}
    await holds(desk, kept)
