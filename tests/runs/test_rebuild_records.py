"""What a rebuild makes of records: jobs told apart without a clock, nothing published taken back, and formats it does not know."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import ORCHESTRATOR, Stand
from tests.runs.test_audit_segments import SUBMITTER, Deadly, work
from tests.runs.test_projector import SLUG, Press, press
from tests.runs.test_rebuild import ADMIN, SWEEPER, claim, lose, published, pull
from tests.stopped_tasks import stopped
from trellis.documents import audit, ids
from trellis.documents.publisher import DocumentPublisher, PublishedRuns
from trellis.engine.jobs import Actor, JobId, NewJob, RequestId
from trellis.engine.records import RecordedEvent, SweepOptions
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.proposals import proposal as proposals
from trellis.proposals.proposal import ProposalContent
from trellis.runs.orchestrator import accept
from trellis.runs.projector import Projector
from trellis.runs.rebuild import rebuild_ledger, rebuild_objects
from trellis.storage.objects.canonical_json import encode

__all__ = ["press"]

OLD_SEGMENT = "audit/20260101/segments/000000000000-x.jsonl"


# --- one id, several jobs --------------------------------------------------------------------------------------------


@pytest.mark.requirement("D14")
async def test_a_job_that_ended_before_it_was_submitted_by_the_clock_stays_ended(press: Press, tmp_path: Path):
    stand = press.stand
    await stand.ledger.submit(SUBMITTER, [NewJob(job_id=JobId("pay-once"), type="pay")])
    stand.clock.advance(-2.0)
    await pull(stand, await claim(stand, "pay"), "complete")
    before = await stand.events(JobId("pay-once"))
    assert before[-1].ts < before[0].ts
    await published(press)
    await lose(stand, tmp_path)
    done = await rebuild_ledger(stand.ledger, press.store, ADMIN)
    assert (done.jobs, done.refused, done.events) == (1, 0, 4)
    assert [event.type for event in await stand.events(JobId("pay-once"))] == [event.type for event in before]
    assert await stand.state(JobId("pay-once")) == "succeeded"


@pytest.mark.requirement("D14")
async def test_a_run_whose_clock_went_back_comes_back(press: Press, tmp_path: Path):
    projector = press.projector()
    ticks = press.stand.ledger.turn

    async def earlier(*args: Any, **options: Any) -> Any:
        press.stand.clock.advance(-0.05)
        return await ticks(*args, **options)

    press.stand.ledger.turn = earlier  # type: ignore[method-assign]
    run_id, _ = await press.drive(projector)
    moments = [event.ts for event in await press.stand.events(run_id)]
    assert moments != sorted(moments)
    await projector.release()
    before = await press.folder()
    await lose(press.stand, tmp_path)
    done = await rebuild_ledger(press.stand.ledger, press.store, ADMIN)
    assert (done.jobs, done.refused) == (1, 0)
    assert await press.stand.state(run_id) == "completed"
    assert await press.folder() == before


async def shifted(stand: Stand, like: JobId, job_id: JobId, *, seconds: int) -> list[RecordedEvent]:
    """The records of a job, as if another one had been submitted so many seconds later."""
    by = timedelta(seconds=seconds)
    return [
        replace(
            one,
            submitted_at=one.submitted_at + by,
            event=replace(
                one.event,
                job_id=job_id,
                id=f"{job_id}-{one.event.version}",
                correlation_id=job_id,
                ts=one.event.ts + by,
            ),
        )
        for one in await stand.ledger.recorded(await stand.ledger.events(like))
    ]


async def put_segment(press: Press, records: Sequence[RecordedEvent]) -> None:
    await press.store.put(OLD_SEGMENT, b"".join(audit.to_line(one) + b"\n" for one in records))


async def done_with_key(stand: Stand) -> JobId:
    (job_id,) = await work(stand, 1, idempotency_key="k", fingerprint=b"1")
    return job_id


@pytest.mark.requirement("D14")
async def test_a_job_that_retention_had_removed_stays_away_when_a_later_one_has_its_key(press: Press, tmp_path: Path):
    stand, other = press.stand, JobId("other")
    first = await done_with_key(stand)
    later = await shifted(stand, first, JobId("later"), seconds=2)
    twice = [await shifted(stand, first, other, seconds=seconds) for seconds in (1, 5)]
    await put_segment(press, [*later, *twice[0], *twice[1]])
    await published(press)
    await lose(stand, tmp_path)
    done = await rebuild_ledger(stand.ledger, press.store, ADMIN)
    assert (done.jobs, done.removed, done.refused) == (1, 3, 0)
    job = await stand.ledger.job(other)
    assert job is not None
    assert job.created_at == twice[1][0].submitted_at, "of two jobs under one id the later counts"
    again = NewJob(job_id=JobId("new"), type="work", idempotency_key="k", fingerprint=b"1")
    assert (await stand.ledger.submit(SUBMITTER, [again]))[0].job_id == other


@pytest.mark.requirement("D14")
async def test_open_job_is_never_taken_for_removed(press: Press, tmp_path: Path):
    """Its id and key were used before, by jobs that a clock ahead of time says are later."""
    stand = press.stand
    first = await done_with_key(stand)
    waiting = (await shifted(stand, first, JobId("waiting"), seconds=-3))[:1]
    same_id = await shifted(stand, first, JobId("waiting"), seconds=9)
    await put_segment(press, [*waiting, *same_id])
    await published(press)
    await lose(stand, tmp_path)
    done = await rebuild_ledger(stand.ledger, press.store, ADMIN)
    assert (done.jobs, done.removed, done.refused) == (1, 2, 0)
    assert (await stand.events(JobId("waiting"))) == [waiting[0].event]


async def test_rebuild_names_two_open_jobs_with_one_id(press: Press, tmp_path: Path):
    stand = press.stand
    first = await done_with_key(stand)
    await put_segment(press, [(await shifted(stand, first, JobId("x"), seconds=seconds))[0] for seconds in (1, 2)])
    await published(press)
    await lose(stand, tmp_path)
    done = await rebuild_ledger(stand.ledger, press.store, ADMIN)
    assert [one.job_id for one in done.refusals] == ["x", "x"]
    assert "the end of neither is recorded" in done.refusals[0].reason
    assert (done.jobs, done.removed) == (0, 1)


# --- what is published stays -------------------------------------------------------------------------------------------


async def drive_until_dead(press: Press, objects: Any) -> JobId:
    """A run, as far as it comes before its projector dies at a put."""
    stand, run_id = press.stand, await press.stand.run_of()
    claimed = await stand.claim()
    assert claimed is not None
    driver = stand.driver()
    driver.published = PublishedRuns(press.store, stand.clock).reached
    projector = Projector(
        ledger=stand.ledger,
        actor=Actor(role=Role.PROJECTOR, name="mortal"),
        publisher=DocumentPublisher(objects),
        clock=stand.clock,
    )
    driving = asyncio.ensure_future(driver.drive(claimed))
    try:
        while not driving.done() or (await projector.run_once()).events:
            await projector.run_once()
            stand.clock.advance(0.01)
            await stand.ledger.job(run_id)
    except asyncio.CancelledError:
        driving.cancel()
        await stopped(driving)
    return run_id


def unchanged(before: dict[str, bytes], now: dict[str, bytes]) -> bool:
    """Whether everything that was there is there to the byte; only the status may have risen."""
    versions = [json.loads(found[key])["version"] for found in (before, now) for key in found if "status" in key]
    rest = [key for key in before if "status" not in key]
    return all(before[key] == now[key] for key in rest) and versions == sorted(versions)


async def lose_quickly(stand: Stand) -> None:
    await stand.ledger.close()
    stand.ledger = await open_ledger(":memory:", clock=stand.clock)


async def finish(press: Press, run_id: JobId) -> None:
    """Whoever goes on ends the run, from wherever it stands."""
    stand = press.stand
    if (await stand.ledger.job(run_id)) is None or await stand.state(run_id) == "completed":
        return
    if await stand.state(run_id) == "requested":
        await accept(stand.ledger, ORCHESTRATOR, run_id)
    await stand.ledger.sweep(SWEEPER, SweepOptions(elect=False))
    assert (await stand.drive()).state == "completed"
    await published(press)


@pytest.mark.requirement("D14", "D58", "RUN-3", "PIPE-8", "PIPE-11")
async def test_a_projector_and_a_ledger_that_die_together_take_nothing_back(press: Press):
    """At every put of a run: what was there stays to the byte, and the run goes on from it."""
    deaths = 0
    while True:
        mortal = Deadly(press.store, deaths + 1, after=False)
        run_id = await drive_until_dead(press, mortal)
        if mortal._left > 0:
            break
        deaths += 1
        before = await press.folder(ids.run_folder(SLUG, run_id) + "/")
        await lose_quickly(press.stand)
        press.stand.clock.advance(61.0)
        done = await rebuild_ledger(press.stand.ledger, press.store, ADMIN)
        assert done.refused == 0, done.refusals
        job = await press.stand.ledger.job(run_id)
        assert await press.version(SLUG, run_id) == (None if job is None else job.version), (
            "all that is recorded is shown"
        )
        assert unchanged(before, await press.folder(ids.run_folder(SLUG, run_id) + "/"))
        await finish(press, run_id)
        assert unchanged(before, await press.folder(ids.run_folder(SLUG, run_id) + "/"))
        assert (await verify(press.stand.ledger)).ok
        again = await rebuild_objects(press.stand.ledger, press.store, ADMIN)
        assert (again.written, again.differing) == (0, ())
        await lose_quickly(press.stand)
        for key in await press.folder():
            await press.store.delete(key)
    assert deaths >= 20, "6 statuses, the first of 3 versions, 8 records, 4 steps, an output and a manifest"


@pytest.mark.requirement("D14", "RUN-3")
@pytest.mark.parametrize("lost", [1, 2], ids=["the end", "the end and a step"])
async def test_a_run_that_shows_more_than_is_recorded_is_named_and_left(press: Press, tmp_path: Path, lost: int):
    run_id, _ = await press.drive(press.projector())
    for event in (await press.stand.events(run_id))[-lost:]:
        await press.store.delete(ids.audit_key(event.ts, event.id))
    await lose(press.stand, tmp_path)
    press.stand.clock.advance(6.0)
    before = await press.folder()
    done = await rebuild_ledger(press.stand.ledger, press.store, ADMIN)
    assert [one.job_id for one in done.refusals] == [run_id]
    assert f"status.json shows version 8 and the record ends with {8 - lost}" in done.refusals[0].reason
    assert await press.folder() == before
    await press.store.delete(ids.status_key(SLUG, run_id))
    again = await rebuild_ledger(press.stand.ledger, press.store, ADMIN)
    assert "manifest.json is there" in again.refusals[0].reason


@pytest.mark.requirement("D14", "OBS-1")
async def test_a_decision_that_is_not_recorded_is_not_forgotten(press: Press, tmp_path: Path):
    draft = ProposalContent(action="propose-note", target="notes/a.md", content={"summary": "s"})
    proposal = proposals.make_proposal("run_2026-02-14_080000_abc123", SLUG, 1, draft)
    await proposals.store_proposals(press.stand.ledger, ORCHESTRATOR, [proposal])
    owner = Actor(role=Role.OWNER, name="anna")
    note = "this is plainly wrong"
    await proposals.decide_proposal(
        press.stand.ledger, owner, proposal.id, approve=False, note=note, request_id=RequestId("r")
    )
    await published(press)
    last = (await press.stand.events(proposal.id))[-1]
    await press.store.delete(ids.audit_key(last.ts, last.id))
    await lose(press.stand, tmp_path)
    done = await rebuild_ledger(press.stand.ledger, press.store, ADMIN)
    assert [one.job_id for one in done.refusals] == [proposal.id]
    shown = json.loads((await press.folder())[ids.proposal_key(SLUG, proposal.id)])
    assert (shown["status"], shown["approval"]["decision_note"]) == ("rejected", note)


# --- formats -------------------------------------------------------------------------------------------------------------


async def make_older(press: Press, of: str) -> int:
    """Records of one job as they were before they named their format; how many."""
    count = 0
    for key, body in (await press.folder("audit/")).items():
        made = [json.loads(line) for line in body.splitlines()] if key.endswith("l") else [json.loads(body)]
        for one in made:
            if one["job_id"] == of:
                del one["format"], one["submitted_at"]
                one.get("job", {}).pop("deadline_us", None)
                count += 1
        lines = b"".join(json.dumps(one).encode() + b"\n" for one in made)
        await press.store.put(key, lines if key.endswith("l") else encode(made[0]))
    return count


@pytest.mark.requirement("D14", "OBS-1")
@pytest.mark.parametrize("kind", ["run", "job"])
async def test_a_job_with_records_of_an_older_format_is_named_and_the_others_come_back(
    press: Press, tmp_path: Path, kind: str
):
    run_id, _ = await press.drive(press.projector())
    press.stand.clock.advance(6.0)
    job_id, _ = await work(press.stand, 2)
    await published(press)
    older = {"run": run_id, "job": job_id}[kind]
    assert await make_older(press, older)
    await lose(press.stand, tmp_path)
    done = await rebuild_ledger(press.stand.ledger, press.store, ADMIN)
    assert [one.job_id for one in done.refusals] == [older]
    assert "has format none, and this program reads 1 and 2" in done.refusals[0].reason
    assert done.jobs == 2


@pytest.mark.requirement("D14", "OBS-1")
async def test_records_of_before_nodes_were_recorded_come_back_too(press: Press, tmp_path: Path):
    run_id, _ = await press.drive(press.projector())
    press.stand.clock.advance(6.0)
    await published(press)
    events = await press.stand.ledger.events(run_id)
    for key, body in (await press.folder("audit/")).items():
        made = json.loads(body)
        await press.store.put(key, encode(made | {"format": 1, "node": made["actor_name"].partition("@")[2] or None}))
    done = await rebuild_objects(press.stand.ledger, press.store, ADMIN)
    assert (done.older, done.written, done.differing) == (len(events), 0, ())
    await lose(press.stand, tmp_path)
    assert (await rebuild_ledger(press.stand.ledger, press.store, ADMIN)).jobs == 1
    back = await press.stand.ledger.events(run_id)
    assert [replace(event, node=None, data=None) for event in back] == [
        replace(event, node=None, data=None) for event in events
    ]


@pytest.mark.requirement("D14", "OBS-1")
async def test_records_of_an_older_format_are_there_for_the_ledger(press: Press):
    run_id, _ = await press.drive(press.projector())
    press.stand.clock.advance(6.0)
    (job_id,) = await work(press.stand, 1)
    await published(press)
    older = await make_older(press, run_id)
    await make_older(press, job_id)
    before = await press.folder()
    done = await rebuild_objects(press.stand.ledger, press.store, ADMIN)
    assert (done.older, done.written, done.differing) == (older, 0, ())
    assert await press.folder() == before


# --- what differs --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D14")
async def test_every_object_that_differs_is_named_and_the_rest_is_made_again(press: Press):
    projector = press.projector()
    first, _ = await press.drive(projector)
    second, _ = await press.drive(projector)
    await projector.release()
    before = await press.folder()
    step, key = ids.step_key(SLUG, first, 2), next(key for key in before if f"{second}-4" in key)
    for one in before:
        await press.store.delete(one)
    await press.store.put(step, b"another step")
    await press.store.put(key, b"{}")
    done = await rebuild_objects(press.stand.ledger, press.store, ADMIN)
    assert done.differing == (step, key)[:: 1 if step < key else -1]
    for one in (step, key):
        await press.store.delete(one)
    done = await rebuild_objects(press.stand.ledger, press.store, ADMIN)
    assert done.differing == ()
    assert await press.folder() == before, "and no alert is left"
