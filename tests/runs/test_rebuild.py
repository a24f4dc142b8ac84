"""Either side comes back from the other: lost documents byte for byte, a lost ledger so that it verifies and goes on."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Stand, is_of_rebuild
from tests.runs.test_audit_segments import SUBMITTER, WORKER, record, recorded_once, work
from tests.runs.test_end_to_end import VIOLIN, Garden, garden
from tests.runs.test_projector import SLUG, Press, press
from tests.stopped_tasks import stopped
from trellis.documents import audit, audit_log, ids
from trellis.documents.errors import LedgerHasOthers, RebuildError, RecordInUse, RecordInvalid
from trellis.engine.admin_acts import this_node
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import (
    Actor,
    Advance,
    Claim,
    Claimed,
    ClaimId,
    DeadLetterReason,
    JobId,
    LeaseLost,
    Move,
    NewJob,
    ReasonCode,
    RequestId,
    Stage,
    StepApplied,
    Turn,
    TypeClaim,
)
from trellis.engine.records import JobPlace, SweepOptions
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.proposals import proposal as proposals
from trellis.proposals.proposal import ProposalContent
from trellis.runs import rebuild
from trellis.runs.rebuild import rebuild_ledger, rebuild_objects
from trellis.storage.objects.store import ObjectStore

__all__ = ["garden", "press"]

ADMIN = Actor(role=Role.CONTROL_PLANE, name="admin@test")
SWEEPER = Actor(role=Role.SWEEPER, name="sweeper@test")
DEATH = DeadLetterReason(reason_code=ReasonCode.PARSE_ERROR, stage=Stage.INPUT, last_error="cannot be read")
PUBLISHED = ("audit/", "agents/architect-guardian/runs/", f"agents/{VIOLIN}/runs/", f"agents/{VIOLIN}/proposals/")


async def lose(stand: Stand, folder: Path) -> None:
    """The ledger's file is gone; a new one is in its place."""
    await stand.ledger.close()
    await asyncio.to_thread(_remove, folder)
    stand.ledger = await open_ledger(f"sqlite:///{folder / 'ledger.db'}", clock=stand.clock)


def _remove(folder: Path) -> None:
    for file in folder.glob("ledger.db*"):
        file.unlink()


async def bucket(objects: ObjectStore, prefixes: tuple[str, ...] = PUBLISHED) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for prefix in prefixes:
        for info in [info for info in (await objects.list(prefix)).items if not is_of_rebuild(info.key)]:
            one = await objects.get(info.key)
            assert one is not None
            found[info.key] = one.body
    return found


def without_cuts(objects: dict[str, bytes]) -> dict[str, bytes]:
    """Segments as one heap of lines for each day; everything else as it is. A rebuild may cut segments anew (D69)."""
    made = {key: body for key, body in objects.items() if not key.endswith(audit_log.SUFFIX)}
    for key in objects.keys() - made.keys():
        day = key.rpartition("/")[0]
        made[day] = b"\n".join(sorted([*filter(None, made.get(day, b"").split(b"\n")), *objects[key].splitlines()]))
    return made


async def claim(stand: Stand, type_: str = "work") -> Claimed:
    asked = Claim(claim_id=ClaimId(f"claim-{next(stand._numbers)}"), types=(TypeClaim(type=type_),))
    (held,) = (await stand.ledger.turn(Turn(actor=WORKER, claim=asked))).claimed
    return held


async def pull(stand: Stand, held: Claimed, trigger: str, source: str = "running", **options: Any) -> object:
    step = Advance(held.lease, source, trigger, **options)
    by = ORCHESTRATOR if held.lease.lifecycle == "run" else WORKER
    return (await stand.ledger.turn(Turn(actor=by, advances=(step,)))).outcomes[0]


async def a_bit_of_everything(stand: Stand) -> Claimed:
    """Jobs in every place, with all that a job can have; the one that is held."""
    await work(stand, 2)
    new = {
        "dead": {"concurrency_key": "k"},
        "retried": {"concurrency_key": "k"},
        "waits": {"concurrency_key": "k"},
        "late": {"delay_s": 3_600.0},
        "held": {"idempotency_key": "once", "fingerprint": b"f"},
    }
    for name, options in new.items():
        await stand.ledger.submit(SUBMITTER, [NewJob(job_id=JobId(name), type=name, **options)])
    await pull(stand, await claim(stand, "dead"), "reject", death=DEATH)
    await pull(stand, await claim(stand, "retried"), "retry", delay_s=600.0, data=b'{"why": "later"}')
    await stand.ledger.submit(GATEWAY, [NewJob(job_id=JobId("q"), type="inbox", lifecycle="queue-job")])
    await stand.ledger.move(ORCHESTRATOR, Move(job_id=JobId("q"), target="QUEUED", request_id=RequestId("q")))
    return await claim(stand, "held")


@pytest.mark.requirement("D14", "D35", "OBS-1", "PIPE-8", "PIPE-11", "PIPE-12")
async def test_real_runs_proposals_and_jobs_come_back_and_go_on(garden: Garden, tmp_path: Path):
    stand, objects = garden.stand, garden.objects
    finished, _ = await garden.run(VIOLIN)
    proposed = (await garden.document(ids.output_key(VIOLIN, finished)))["proposals"]
    chosen = next(one for one in proposed if one["action"] != proposals.MEMORY_UPDATE)
    owner = Actor(role=Role.OWNER, name="anna")
    await proposals.decide_proposal(
        stand.ledger, owner, chosen["id"], approve=True, note=None, request_id=RequestId("yes")
    )
    await garden.engine.run_once()
    held = await a_bit_of_everything(stand)
    running = await stand.run_of("architect-guardian")
    zombie = await stand.claim()
    assert zombie is not None
    driving = asyncio.ensure_future(garden.driver().drive(zombie))
    async with asyncio.timeout(60):
        while (job := await stand.ledger.job(running)) is None or job.version < 4:
            await garden.projector.run_once()
            stand.clock.advance(0.001)
    driving.cancel()
    await stopped(driving)
    while (await garden.projector.run_once()).events:
        pass
    await garden.projector.release()
    before = await bucket(objects)

    await lose(stand, tmp_path)
    done = await rebuild_ledger(stand.ledger, objects, ADMIN)
    assert (done.refused, done.there) == (0, 0)
    assert done.records == done.events
    report = await verify(stand.ledger)
    assert report.ok, report.violations
    assert (report.jobs, report.events) == (done.jobs, done.events)
    assert await bucket(objects) == before

    assert await pull(stand, held, "complete") == LeaseLost(held.lease)
    assert await pull(stand, zombie, "complete") == LeaseLost(zombie.lease)
    await stand.ledger.sweep(SWEEPER, SweepOptions(elect=False))
    again = await claim(stand, "held")
    assert again.attempt == 1
    assert isinstance(await pull(stand, again, "complete"), StepApplied)
    await _finish(Garden(stand, objects, garden.memory), running)

    wiped = await bucket(objects)
    for key in wiped:
        await objects.delete(key)
    await rebuild_objects(stand.ledger, objects, ADMIN)
    assert without_cuts(await bucket(objects)) == without_cuts(wiped)
    assert before.items() - wiped.items() == {
        (key, body) for key, body in before.items() if key == ids.status_key("architect-guardian", running)
    }


async def _finish(garden: Garden, run_id: JobId) -> None:
    """Another orchestrator ends the run; its first step is not done again."""
    claimed = await garden.stand.claim()
    assert claimed is not None
    assert claimed.lease.job_id == run_id
    steps = dict(garden.work.steps())

    async def never(context: Any, /) -> Any:
        raise AssertionError("a counted step was done again")

    driver = garden.driver()
    driver.steps = steps | {"load-context": never}
    driving = asyncio.ensure_future(driver.drive(claimed))
    async with asyncio.timeout(60):
        while not driving.done():
            await garden.projector.run_once()
            garden.stand.clock.advance(0.001)
            await garden.stand.ledger.job(run_id)
    assert driving.result().state == "completed"
    while (await garden.projector.run_once()).events:
        pass
    await garden.projector.release()


async def published(press: Press) -> None:
    """Everything there is, by a projector that then goes."""
    projector = press.projector("before")
    await press.all(projector)
    await projector.release()


async def wiped(press: Press, *, every: int = 1) -> dict[str, bytes]:
    """What was published, after every nth object of it was deleted."""
    before = await press.folder()
    for number, key in enumerate(before):
        if number % every == 0:
            assert await press.store.delete(key)
    return before


@pytest.mark.requirement("PIPE-8", "OBS-1")
async def test_a_rebuild_is_recorded_with_who_did_it_when_and_what_was_made(press: Press):
    run_id = await one_run(press)
    key = ids.manifest_key(SLUG, run_id)
    assert await press.store.delete(key)
    await rebuild_objects(press.stand.ledger, press.store, ADMIN, cause="the bucket was lost")
    again = await rebuild_objects(press.stand.ledger, press.store, ADMIN)
    first, second = await rebuild_records(press)
    now = audit.timestamp(await press.stand.ledger.now())
    told = {
        "event": "objects.rebuilt",
        "actor": "control-plane",
        "actor_name": "admin@test",
        "node": this_node(),
        "cause": "the bucket was lost",
        "subject": "objects",
        "ts": now,
    }
    assert {name: first[name] for name in told} == told
    assert (first["objects_written"], first["written"], first["error"]) == ([key], 1, None)
    assert (second["objects_written"], second["events"]) == ([], again.events)
    assert (await rebuild_objects(press.stand.ledger, press.store, ADMIN)).events == again.events


@pytest.mark.requirement("OBS-1")
async def test_a_rebuild_that_fails_is_recorded_with_its_error(press: Press):
    await one_run(press)
    with pytest.raises(NotAllowed):
        await rebuild_ledger(press.stand.ledger, press.store, SUBMITTER)
    await press.stand.ledger.submit(SUBMITTER, [NewJob(job_id=JobId("unrecorded"), type="work")])
    with pytest.raises(LedgerHasOthers):
        await rebuild_ledger(press.stand.ledger, press.store, ADMIN)
    (record,) = await rebuild_records(press)
    assert (record["event"], record["actor"]) == ("ledger.rebuilt", "control-plane")
    assert record["error"].startswith("LedgerHasOthers: ")


async def one_run(press: Press) -> JobId:
    """A run that ended and is published."""
    projector = press.projector()
    run_id, _ = await press.drive(projector)
    await press.all(projector)
    await projector.release()
    return run_id


async def rebuild_records(press: Press) -> list[dict[str, Any]]:
    """The audit records of rebuilds, in the order of their acts."""
    acts = [act for act in await press.stand.ledger.acts() if act.event.endswith(".rebuilt")]
    keys = [ids.audit_key(act.at, act.id) for act in acts]
    return [json.loads(found.body) for key in keys if (found := await press.store.get(key)) is not None]


@pytest.mark.requirement("D14", "PIPE-8", "D35", "D69")
@pytest.mark.parametrize("every", [1, 3], ids=["all", "some"])
async def test_deleted_documents_are_rebuilt_byte_for_byte(press: Press, every: int):
    projector = press.projector()
    for _ in range(2):
        await press.drive(projector)
    draft = ProposalContent(action="propose-edit", target="sources/a.md", content={})
    proposal = proposals.make_proposal("run_2026-02-14_080000_000001", SLUG, 1, draft)
    await proposals.store_proposals(press.stand.ledger, ORCHESTRATOR, [proposal])
    await press.all(projector)
    for _ in range(3):
        await work(press.stand, 2)
        await press.all(projector)
        press.stand.clock.advance(11.0)
    await projector.run_once()
    await projector.release()
    before = await wiped(press, every=every)
    seen: list[tuple[str, int]] = []
    done = await rebuild_objects(press.stand.ledger, press.store, ADMIN, on_progress=lambda *far: seen.append(far))
    assert without_cuts(await press.folder()) == without_cuts(before)
    assert (done.jobs, done.events) == (9, 41)
    assert seen[-1] == ("events published", 41)
    again = await rebuild_objects(press.stand.ledger, press.store, ADMIN)
    assert again.written == 0


@pytest.mark.requirement("D14", "D35")
async def test_rebuild_leaves_unprojected_records_to_the_projector(press: Press):
    await work(press.stand, 1)
    await published(press)
    await wiped(press)
    await work(press.stand, 1)
    projector = press.projector("after")
    await press.all(projector)
    press.stand.clock.advance(projector.options.lease_s + 1)
    await rebuild_objects(press.stand.ledger, press.store, ADMIN)
    await press.all(projector)
    await published(press)
    await recorded_once(press.stand, press.store)


async def test_rebuild_is_refused_beside_a_projector(press: Press):
    await press.stand.run_of()
    await press.all(press.projector())
    for rebuilding in (rebuild_objects, rebuild_ledger):
        with pytest.raises(RecordInUse, match="trellis up"):
            await rebuilding(press.stand.ledger, press.store, ADMIN)


@pytest.mark.requirement("AUTH-7")
async def test_only_an_operator_rebuilds(press: Press, tmp_path: Path):
    await work(press.stand, 1)
    await published(press)
    await lose(press.stand, tmp_path)
    projecting = Actor(role=Role.PROJECTOR, name="p")
    with pytest.raises(NotAllowed, match="put lost jobs back"):
        await rebuild_ledger(press.stand.ledger, press.store, projecting)
    assert (await rebuild_ledger(press.stand.ledger, press.store, ADMIN)).jobs == 1
    for key in await bucket(press.store):
        await press.store.delete(key)
    with pytest.raises(NotAllowed, match="record an administrative act"):
        await rebuild_objects(press.stand.ledger, press.store, projecting)
    assert await bucket(press.store) == {}, "whoever may not record a rebuild makes none"


@pytest.fixture
async def lost(press: Press, tmp_path: Path) -> Press:
    """A run, some jobs, and no ledger any more."""
    await press.drive(press.projector())
    press.stand.clock.advance(6.0)
    await a_bit_of_everything(press.stand)
    await published(press)
    await lose(press.stand, tmp_path)
    return press


class Mortal:
    """A ledger that is lost sight of at the nth call of a verb, before it happens or after."""

    def __init__(self, ledger: Any, at: int, *, after: bool) -> None:
        self._ledger = ledger
        self._left = at
        self._after = after

    def __getattr__(self, name: str) -> Any:
        verb: Callable[..., Any] = getattr(self._ledger, name)
        return self._deadly(verb) if name in {"restore", "ack"} else verb

    def _deadly(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise asyncio.CancelledError
            answer = await verb(*args, **options)
            if self._left == 0:
                raise asyncio.CancelledError
            return answer

        return call


@pytest.mark.requirement("D14")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_an_interrupted_rebuild_goes_on_and_records_nothing_twice(
    lost: Press, monkeypatch: pytest.MonkeyPatch, after: bool
):
    monkeypatch.setattr(rebuild, "BATCH_JOBS", 2)
    stand, before = lost.stand, await lost.folder()
    deaths = 0
    while True:
        try:
            done = await rebuild_ledger(Mortal(stand.ledger, deaths + 1, after=after), lost.store, ADMIN)  # type: ignore[arg-type]
            break
        except asyncio.CancelledError:
            deaths += 1
        impatient = lost.projector("impatient")
        if (await verify(stand.ledger)).jobs and not (await impatient.run_once()).following:
            with pytest.raises(RebuildError, match="--from objects"):
                await rebuild_objects(stand.ledger, lost.store, ADMIN)
        await impatient.release()
    assert deaths > 6
    assert done.refused == 0
    assert await lost.folder() == before
    await work(stand, 1)
    await published(lost)
    await recorded_once(stand, lost.store)


@pytest.mark.requirement("D14")
async def test_events_during_a_rebuild_are_published_once(lost: Press):
    stand = lost.stand

    class Busy:
        """Somebody submits and works as soon as there is a ledger again."""

        def __getattr__(self, name: str) -> Any:
            return getattr(stand.ledger, name)

        async def restore(self, actor: Actor, jobs: Any) -> list[bool]:
            answers = await stand.ledger.restore(actor, jobs)
            await work(stand, 2)
            await stand.run_of("architect-guardian")
            return answers

    await rebuild_ledger(Busy(), lost.store, ADMIN)  # type: ignore[arg-type]
    await recorded_once(stand, lost.store)
    await published(lost)
    await recorded_once(stand, lost.store)


@pytest.mark.requirement("D14", "OBS-1")
async def test_a_job_with_a_gap_in_its_record_is_named_and_the_others_come_back(lost: Press):
    alone, _ = await record(lost.store)
    run_id = next(event_id.rpartition("-")[0] for event_id in alone if event_id.startswith("run_"))
    day = next(iter(await lost.folder("audit/"))).rpartition("/")[0]
    await lost.store.delete(f"{day}/{run_id}-3.json")
    await lost.store.delete(f"{day}/q-1.json")
    done = await rebuild_ledger(lost.stand.ledger, lost.store, ADMIN)
    assert {one.job_id: one.reason for one in done.refusals} == {
        "q": "the record of its first event is missing",
        run_id: "version 4: version 4 follows 2",
    }
    assert (done.refused, done.jobs) == (2, 7)
    assert (await verify(lost.stand.ledger)).ok


@pytest.mark.requirement("D14")
@pytest.mark.parametrize(
    "file,how",
    [
        ("steps/02-execute-agent.json", "missing"),
        ("steps/02-execute-agent.json", "changed"),
        ("output/proposal.json", "missing"),
    ],
)
async def test_run_with_changed_files_is_not_rebuilt(lost: Press, file: str, how: str):
    key = next(key for key in await lost.folder() if key.endswith(file))
    await (lost.store.delete(key) if how == "missing" else lost.store.put(key, b"{}"))
    done = await rebuild_ledger(lost.stand.ledger, lost.store, ADMIN)
    assert [one.reason.startswith(key) for one in done.refusals] == [True]


@pytest.mark.requirement("D14")
async def test_a_ledger_with_other_jobs_is_refused_and_the_same_one_is_not(lost: Press, tmp_path: Path):
    ledger = lost.stand.ledger
    done = await rebuild_ledger(ledger, lost.store, ADMIN)
    again = await rebuild_ledger(ledger, lost.store, ADMIN)
    assert (again.jobs, again.there) == (0, done.jobs)
    held = JobId("held")
    await ledger.move(ADMIN, Move(job_id=held, target="dead_lettered", request_id=RequestId("x"), death=DEATH))
    with pytest.raises(LedgerHasOthers, match="another history"):
        await rebuild_ledger(ledger, lost.store, ADMIN)
    await lose(lost.stand, tmp_path)
    await work(lost.stand, 1)
    with pytest.raises(LedgerHasOthers, match="not in the record"):
        await rebuild_ledger(lost.stand.ledger, lost.store, ADMIN)
    assert (await verify(lost.stand.ledger)).jobs == 1


async def test_records_that_contradict_each_other_are_not_believed(press: Press, tmp_path: Path):
    await work(press.stand, 1)
    await published(press)
    (key,) = await press.folder("audit/")
    found = await press.store.get(key)
    assert found is not None
    last = found.body.splitlines()[-1]
    await press.store.put(key.replace(".jsonl", "x.jsonl"), last.replace(b"worker@host", b"other@host") + b"\n")
    await lose(press.stand, tmp_path)
    done = await rebuild_ledger(press.stand.ledger, press.store, ADMIN)
    assert [one.reason for one in done.refusals] == ["two records of version 4 contradict each other"]


@pytest.mark.parametrize(
    "name,body",
    [
        ("somebody-1.json", b"{"),
        ("somebody-1.json", b"[]"),
        ("segments/x.jsonl", b"{"),
        ("segments/x.jsonl", b""),
        ("x-1.json", b'{"version": 1, "lifecycle": "run"}'),
        ("x-1.json", b'{"version": 1, "lifecycle": "run", "format": 1, "job_id": "x"}'),
    ],
)
async def test_a_record_that_cannot_be_read_stops_the_rebuild_before_anything_is_changed(
    lost: Press, name: str, body: bytes
):
    await lost.store.put(f"audit/20260101/{name}", body)
    with pytest.raises(RecordInvalid):
        await rebuild_ledger(lost.stand.ledger, lost.store, ADMIN)
    assert (await verify(lost.stand.ledger)).jobs == 0


async def test_records_of_other_acts_are_passed_over(lost: Press):
    await lost.store.put("audit/20260101/change-agent.json", b'{"event": "agent.status.changed", "job_id": null}')
    assert (await rebuild_ledger(lost.stand.ledger, lost.store, ADMIN)).refused == 0


async def test_job_refused_by_the_database_does_not_stop_the_rebuild_of_others(lost: Press):
    (key,) = (key for key in await lost.folder("audit/") if key.endswith(audit_log.SUFFIX))
    found = await lost.store.get(key)
    assert found is not None
    assert found.body.count(b'"attempts":1,') == 1
    await lost.store.put(key, found.body.replace(b'"attempts":1,', b'"attempts":0,'))
    done = await rebuild_ledger(lost.stand.ledger, lost.store, ADMIN)
    assert [one.job_id for one in done.refusals] == ["dead"]
    assert (done.jobs, done.refused) == (8, 1)


async def test_rebuilt_jobs_are_in_their_former_places(lost: Press):
    await rebuild_ledger(lost.stand.ledger, lost.store, ADMIN)
    places = {}
    for name in ("dead", "retried", "waits", "late", "held", "q"):
        job = await lost.stand.ledger.job(JobId(name))
        assert job is not None
        places[name] = job.place
    assert places == {
        "dead": JobPlace.ENDED,
        "retried": JobPlace.SCHEDULED,
        "waits": JobPlace.BLOCKED,
        "late": JobPlace.SCHEDULED,
        "held": JobPlace.LEASED,
        "q": JobPlace.READY,
    }
