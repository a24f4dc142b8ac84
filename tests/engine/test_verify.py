"""`verify` finds each kind of damage, on histories that a real ledger wrote."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.ledgers.conformance.opening import sqlite_rig
from tests.ledgers.conformance.rig import DEATH, Rig
from trellis.engine import verify as verify_module
from trellis.engine.jobs import Epoch, JobId
from trellis.engine.records import Event, JobHistory, JobPlace, KeyOverLimit, UnpairedArtifact
from trellis.engine.verify import VerifyProgress, VerifyRule, check_history, verify
from trellis.lifecycles import Role, Trigger

SOME_TIME = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with sqlite_rig(tmp_path / "ledger.db") as opened:
        yield opened


async def _history(rig: Rig, job_id: JobId) -> JobHistory:
    return next(iter([history async for history in rig.ledger.histories() if history.job.job_id == job_id]))


async def _lives(rig: Rig) -> dict[str, JobHistory]:
    """One job in each situation the rules speak about."""
    done = await rig.running()
    await rig.pull(done, Trigger.COMPLETE)
    dead = await rig.running()
    await rig.pull(dead, "reject", death=DEATH)
    revoked = await rig.running()
    await rig.cancel(revoked.lease.job_id)
    held = await rig.running(concurrency_key="k")
    parked = await rig.submit_one(concurrency_key="k")
    resting = await rig.submit_one(delay_s=100.0)
    ready = await rig.submit_one(type="other")
    run = await rig.submit_one(lifecycle="run")
    names = {
        "done": done.lease.job_id,
        "dead": dead.lease.job_id,
        "revoked": revoked.lease.job_id,
        "held": held.lease.job_id,
        "parked": parked,
        "resting": resting,
        "ready": ready,
        "run": run,
    }
    return {name: await _history(rig, job_id) for name, job_id in names.items()}


def _job(**changes: object) -> Callable[[JobHistory], JobHistory]:
    return lambda history: replace(history, job=replace(history.job, **changes))


def _event(index: int, **changes: object) -> Callable[[JobHistory], JobHistory]:
    def damage(history: JobHistory) -> JobHistory:
        events: list[Event] = list(history.events)
        events[index] = replace(events[index], **changes)
        return replace(history, events=tuple(events))

    return damage


def _letter(**changes: object) -> Callable[[JobHistory], JobHistory]:
    return lambda history: replace(
        history, dead_letters=tuple(replace(letter, **changes) for letter in history.dead_letters)
    )


DAMAGES: list[tuple[str, VerifyRule, Callable[[JobHistory], JobHistory]]] = [
    ("done", VerifyRule.HISTORY, lambda history: replace(history, events=())),
    ("done", VerifyRule.HISTORY, lambda history: replace(history, events=history.events[1:])),
    ("done", VerifyRule.HISTORY, lambda history: replace(history, events=(*history.events[:1], *history.events[2:]))),
    ("done", VerifyRule.HISTORY, lambda history: replace(history, events=(*history.events, history.events[-1]))),
    ("done", VerifyRule.HISTORY, _event(2, source="queued")),
    ("done", VerifyRule.HISTORY, _event(3, target="queued")),
    ("done", VerifyRule.HISTORY, _event(3, role=Role.OWNER)),
    ("done", VerifyRule.HISTORY, _event(3, type="job_failed")),
    ("done", VerifyRule.HISTORY, _event(3, attempt=1)),
    ("done", VerifyRule.HISTORY, _event(3, generation=1)),
    ("done", VerifyRule.ROW, lambda history: replace(history, events=history.events[:-1])),
    ("done", VerifyRule.ROW, _job(version=5)),
    ("done", VerifyRule.ROW, _job(state="failed")),
    ("done", VerifyRule.ROW, _job(attempt=1)),
    ("done", VerifyRule.ROW, _job(generation=1)),
    ("done", VerifyRule.ROW, _job(lifecycle="no-such")),
    ("done", VerifyRule.ROW, _job(state="no-such")),
    ("done", VerifyRule.ROW, _event(1, id="another-2")),
    ("done", VerifyRule.ROW, _event(1, correlation_id="another")),
    ("done", VerifyRule.ROW, _event(1, job_id=JobId("another"))),
    ("done", VerifyRule.PLACE, _job(place=JobPlace.READY)),
    ("done", VerifyRule.PLACE, _job(place=JobPlace.LEASED)),
    ("held", VerifyRule.PLACE, _job(place=JobPlace.READY)),
    ("held", VerifyRule.PLACE, _job(place=JobPlace.ENDED)),
    ("ready", VerifyRule.PLACE, _job(place=JobPlace.LEASED)),
    ("ready", VerifyRule.PLACE, _job(place=JobPlace.BLOCKED)),
    ("run", VerifyRule.PLACE, _job(place=JobPlace.READY)),
    ("resting", VerifyRule.PLACE, _job(due_at=None)),
    ("held", VerifyRule.LEASE, _job(owner=None)),
    ("held", VerifyRule.LEASE, _job(lease_expires_at=None)),
    ("ready", VerifyRule.LEASE, _job(lease_expires_at=SOME_TIME)),
    ("held", VerifyRule.EPOCH, _job(epoch=Epoch(0))),
    ("done", VerifyRule.EPOCH, _event(3, epoch=Epoch(0))),
    ("held", VerifyRule.EPOCH, _event(1, epoch=Epoch(0))),
    ("revoked", VerifyRule.EPOCH, _event(3, epoch=Epoch(1))),
    ("dead", VerifyRule.DEAD_LETTER, lambda history: replace(history, dead_letters=())),
    ("dead", VerifyRule.DEAD_LETTER, lambda history: replace(history, dead_letters=history.dead_letters * 2)),
    ("dead", VerifyRule.DEAD_LETTER, _letter(last_error=" ")),
    ("dead", VerifyRule.DEAD_LETTER, _letter(attempts=2)),
    ("dead", VerifyRule.DEAD_LETTER, _letter(correlation_id="another")),
    ("dead", VerifyRule.DEAD_LETTER, _letter(last_owner=None)),
    ("dead", VerifyRule.DEAD_LETTER, _letter(last_owner=None, last_lease_expires_at=None)),
    ("dead", VerifyRule.DEAD_LETTER, _letter(version=3)),
    ("dead", VerifyRule.DEAD_LETTER, _letter(version=99)),
]


@pytest.mark.requirement("DJ-3", "DJ-4", "DJ-12", "D1", "D2", "D6")
async def test_verify_reports_each_damage_under_its_own_rule(rig: Rig):
    lives = await _lives(rig)
    assert [check_history(history) for history in lives.values()] == [[]] * len(lives)
    for name, rule, damage in DAMAGES:
        found = check_history(damage(lives[name]))
        assert rule in {violation.rule for violation in found}, (name, rule, found)
        assert all(violation.detail and violation.job_id for violation in found)


async def test_a_dead_letter_may_not_invent_a_holder(rig: Rig):
    job_id = await rig.submit_one()
    await rig.drive(job_id, "dead_lettered")
    history = await _history(rig, job_id)
    assert check_history(history) == []
    damaged = _letter(last_owner="somebody", last_lease_expires_at=SOME_TIME)(history)
    assert [violation.rule for violation in check_history(damaged)] == [VerifyRule.DEAD_LETTER]


class Damaged:
    """A real ledger whose rows were tampered with on the way."""

    def __init__(self, rig: Rig, damage: Callable[[JobHistory], list[JobHistory]]) -> None:
        self.rig = rig
        self.damage = damage

    async def histories(self, *, batch: int = 500) -> AsyncIterator[JobHistory]:
        async for history in self.rig.ledger.histories(batch=batch):
            for damaged in self.damage(history):
                yield damaged

    async def keys_over(self) -> list[KeyOverLimit]:
        return await self.rig.ledger.keys_over()

    async def unpaired(self) -> list[UnpairedArtifact]:
        return await self.rig.ledger.unpaired()


@pytest.mark.requirement("DJ-3", "DJ-4")
async def test_a_report_counts_what_was_read_and_what_was_found(rig: Rig):
    await _lives(rig)
    report = await verify(rig.ledger)
    assert (report.ok, report.jobs, report.events, report.violations) == (True, 8, 19, ())
    broken = await verify(Damaged(rig, lambda history: [_job(version=99)(history)]))
    assert (broken.ok, broken.jobs, broken.found >= 8, len(broken.violations)) == (False, 8, True, broken.found)


class Apart(Damaged):
    """A ledger that took a second final artifact of a job, which none of ours does."""

    async def unpaired(self) -> list[UnpairedArtifact]:
        return [UnpairedArtifact(job_id=JobId("mine"), complete=True, artifacts=2)]


async def test_a_job_with_two_artifacts_is_found(rig: Rig):
    report = await verify(Apart(rig, lambda history: [history]))
    assert [(one.rule, one.job_id) for one in report.violations] == [(VerifyRule.ARTIFACT, "mine")]
    assert "the job completed with 2 finalized artifacts instead of one" in report.violations[0].detail


async def test_a_job_in_two_places_is_found(rig: Rig):
    await rig.submit(2)
    report = await verify(Damaged(rig, lambda history: [history, history]))
    assert [violation.rule for violation in report.violations] == [VerifyRule.PLACE, VerifyRule.PLACE]


async def test_no_more_violations_are_kept_than_the_bound(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify_module, "VIOLATIONS_MAX", 3)
    await rig.submit(10)
    report = await verify(Damaged(rig, lambda history: [_job(version=99)(history)]))
    assert (report.found, len(report.violations)) == (10, 3)


async def test_verify_reports_progress(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify_module, "PROGRESS_EVERY", 4)
    await rig.submit(10)
    told: list[VerifyProgress] = []
    await verify(rig.ledger, on_progress=told.append, batch=3)
    assert told == [VerifyProgress(jobs=4, events=4, found=0), VerifyProgress(jobs=8, events=8, found=0)]


@pytest.mark.requirement("D49")
async def test_a_key_held_beyond_its_limit_is_found(rig: Rig):
    await rig.submit(3, concurrency_key="k", concurrency_limit=2)
    await rig.claim(3)
    assert (await verify(rig.ledger, key_limits={"k": 2})).ok
    report = await verify(rig.ledger, key_limits={"k": 1})
    assert [violation.rule for violation in report.violations] == [VerifyRule.KEY_LIMIT]
    assert "'k'" in report.violations[0].detail
