"""A job that ends with an artifact: both steps are in the ledger or neither is, whoever asks how often.

The job's holder names the artifact; the artifact makes its step just before the job makes its own, in the holder's name.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.ledgers.conformance.rig import ADMIN, SUBMITTER, Rig, actor
from tests.ledgers.conformance.test_restore import OWNER, everything
from trellis.engine.errors import InvalidTransition, Refused
from trellis.engine.jobs import Advance, JobId, Lease, LeaseLost, Moved, NewJob, NotMoved, StepApplied, Turn
from trellis.engine.records import JobFilter, JobPlace, JobToRestore, RetentionOptions, SweepOptions
from trellis.engine.verify import VerifyRule, verify
from trellis.lifecycles import Role, Trigger

ORCHESTRATOR = actor(Role.ORCHESTRATOR)
BACKEND = actor(Role.NLM_BACKEND)
AT_ONCE = 64
DAY_S = 24 * 3600.0


@pytest.mark.oldest_server
@pytest.mark.requirement("JQ-5", "ART-7", "D15")
async def test_a_job_completes_together_with_the_artifact_it_names(rig: Rig):
    lease = await rig.writing()
    artifact = await rig.artifact_of(lease.job_id)
    assert await rig.state(artifact) == "staged"
    assert [depth.lifecycle for depth in await rig.ledger.queues()] == ["queue-job"], "an artifact is in no queue"
    assert isinstance(await rig.complete(lease, artifact, data=b'{"n": 1}', result=b'"made"'), StepApplied)
    assert (await rig.state(lease.job_id), await rig.state(artifact)) == ("COMPLETE", "finalized")
    assert sum(depth.scheduled for depth in await rig.ledger.queues()) == 0
    assert await rig.ledger.result(lease.job_id) == b'"made"'
    final, done = await rig.last_event(artifact), await rig.last_event(lease.job_id)
    assert (final.type, final.role, final.actor) == ("artifact.finalized", Role.ORCHESTRATOR, ORCHESTRATOR.name)
    assert (final.ts, final.cause) == (done.ts, f"finalized by {lease.job_id}")
    assert (done.type, done.actor, done.data) == ("job_succeeded", ORCHESTRATOR.name, b'{"n": 1}')
    resting = await rig.job(artifact)
    assert (resting.place, resting.due_at) == (JobPlace.SCHEDULED, None), "a finalized artifact rests for good"


@pytest.mark.requirement("JQ-5")
async def test_a_consumer_of_the_feed_sees_both_or_neither(rig: Rig):
    lease = await rig.writing()
    artifact = await rig.artifact_of(lease.job_id)
    before = await rig.ledger.feed_end()
    await rig.complete(lease, artifact)
    page = await rig.ledger.feed(before, limit=10)
    assert {event.id for event in page.events} == {f"{artifact}-2", f"{lease.job_id}-6"}


async def _nothing(rig: Rig, lease: Lease) -> JobId | None:
    return None


async def _unknown(rig: Rig, lease: Lease) -> JobId | None:
    return JobId("art-nobody")


async def _of_another(rig: Rig, lease: Lease) -> JobId | None:
    return await rig.artifact_of(await rig.submit_one(lifecycle="queue-job"))


async def _discarded(rig: Rig, lease: Lease) -> JobId | None:
    artifact = await rig.artifact_of(lease.job_id)
    assert isinstance(await rig.move(artifact, "discarded", by=BACKEND), Moved)
    return artifact


async def _other_work(rig: Rig, lease: Lease) -> JobId | None:
    return await rig.submit_one(parent_id=lease.job_id)


async def _itself(rig: Rig, lease: Lease) -> JobId | None:
    return lease.job_id


@pytest.mark.oldest_server
@pytest.mark.requirement("JQ-5", "ART-7", "D15", "D55")
@pytest.mark.parametrize("named", [_nothing, _unknown, _of_another, _discarded, _other_work, _itself])
async def test_a_completion_without_a_staged_artifact_of_the_job_is_refused_and_changes_nothing(
    rig: Rig, named: Callable[[Rig, Lease], Awaitable[JobId | None]]
):
    lease = await rig.writing()
    wrong = await named(rig, lease)
    ids = [lease.job_id, *([wrong] if wrong else [])]
    before = [await rig.snapshot(job_id) for job_id in ids]
    for again in range(2):
        with pytest.raises(InvalidTransition) as refused:
            await rig.complete(lease, wrong, result=b"1")
        assert refused.value.data["job_id"] == lease.job_id
        assert (refused.value.data["source"], refused.value.data["target"]) == ("ARTIFACT_WRITE", "COMPLETE")
        assert refused.value.data["actor"] == "orchestrator"
        assert [await rig.snapshot(job_id) for job_id in ids] == before, again
    assert isinstance(await rig.complete(lease, await rig.artifact_of(lease.job_id)), StepApplied), (
        "the lease is still good"
    )


@pytest.mark.requirement("D15")
async def test_a_step_that_finalizes_nothing_names_no_artifact(rig: Rig):
    held = await rig.running()
    artifact = await rig.artifact_of(held.lease.job_id)
    with pytest.raises(InvalidTransition, match="finalizes no artifact"):
        await rig.pull(held, Trigger.COMPLETE, finalizes=artifact)
    lease = await rig.drive(await rig.submit_one(lifecycle="queue-job"), "NOTEBOOKLM_CALL")
    assert lease is not None
    with pytest.raises(InvalidTransition, match="finalizes no artifact"):
        await rig.pull(
            lease, "response_received", source="NOTEBOOKLM_CALL", by=ORCHESTRATOR, finalizes=await _unknown(rig, lease)
        )
    assert (await rig.state(held.lease.job_id), await rig.state(artifact)) == ("running", "staged")


@pytest.mark.requirement("JQ-5")
async def test_a_refused_completion_rolls_back_its_whole_turn(rig: Rig):
    good, bad = await rig.writing(), await rig.writing()
    artifact = await rig.artifact_of(good.job_id)
    steps = [
        Advance(lease, "ARTIFACT_WRITE", Trigger.COMPLETE, finalizes=name)
        for lease, name in ((good, artifact), (bad, JobId("art-nobody")))
    ]
    for order in (steps, steps[::-1]):
        with pytest.raises(InvalidTransition):
            await rig.turn(*order, by=ORCHESTRATOR)
        assert [await rig.state(one) for one in (good.job_id, bad.job_id, artifact)] == [
            "ARTIFACT_WRITE",
            "ARTIFACT_WRITE",
            "staged",
        ]


@pytest.mark.requirement("JQ-5")
async def test_many_jobs_complete_with_their_artifacts_in_one_turn(rig: Rig):
    leases = [await rig.writing() for _ in range(3)]
    artifacts = [await rig.artifact_of(lease.job_id) for lease in leases]
    steps = [
        Advance(lease, "ARTIFACT_WRITE", Trigger.COMPLETE, finalizes=artifact)
        for lease, artifact in zip(leases, artifacts, strict=True)
    ]
    assert all(isinstance(one, StepApplied) for one in (await rig.turn(*steps, by=ORCHESTRATOR)).outcomes)
    assert [await rig.state(one) for one in artifacts] == ["finalized"] * 3


@pytest.mark.requirement("JQ-5", "DJ-21")
async def test_a_completion_asked_again_after_a_lost_answer_finalizes_once(rig: Rig):
    lease = await rig.writing()
    artifact, other = await rig.artifact_of(lease.job_id), await rig.artifact_of(lease.job_id)
    first = await rig.complete(lease, artifact)
    assert isinstance(first, StepApplied)
    ids = (lease.job_id, artifact, other)
    before = [await rig.snapshot(one) for one in ids]
    assert await rig.complete(lease, artifact) == StepApplied(first.version, repeated=True)
    assert await rig.complete(lease, other) == LeaseLost(lease), "it completed with another artifact"
    assert [await rig.snapshot(one) for one in ids] == before
    assert isinstance(await rig.move(artifact, "removed", by=ADMIN), Moved)
    assert await rig.complete(lease, artifact) == StepApplied(first.version, repeated=True)


@pytest.mark.requirement("D15", "D2", "DJ-7")
async def test_a_holder_that_lost_its_lease_finalizes_nothing(rig: Rig):
    zombie = await rig.writing()
    artifact = await rig.artifact_of(zombie.job_id)
    await rig.lose_lease()
    await rig.pass_time(1)
    again = await rig.claim_one(lifecycle="queue-job", types=("work",))
    assert again.lease.job_id == zombie.job_id
    before = [await rig.snapshot(one) for one in (zombie.job_id, artifact)]
    assert await rig.complete(zombie, artifact) == LeaseLost(zombie)
    assert [await rig.snapshot(one) for one in (zombie.job_id, artifact)] == before


@pytest.mark.requirement("D15", "D55", "ART-7")
async def test_artifact_cannot_be_finalized_by_a_move(rig: Rig):
    lease = await rig.writing()
    artifact = await rig.artifact_of(lease.job_id)
    before = await rig.snapshot(artifact)
    for role in Role:
        answer = await rig.move(artifact, "finalized", by=actor(role))
        assert isinstance(answer, NotMoved), role
        assert answer.reason
    forged = Lease(key=lease.key, epoch=(await rig.job(artifact)).epoch, job_id=artifact, lifecycle="artifact")
    with pytest.raises(Refused):
        await rig.pull(forged, Trigger.FINALIZE, source="staged", by=ORCHESTRATOR)
    assert await rig.snapshot(artifact) == before


@pytest.mark.oldest_server
@pytest.mark.requirement("JQ-5", "D15")
async def test_concurrent_completions_finalize_one_artifact(rig: Rig):
    lease = await rig.writing()
    artifact = await rig.artifact_of(lease.job_id)
    step = Advance(lease, "ARTIFACT_WRITE", Trigger.COMPLETE, finalizes=artifact)
    views = [rig.ledger, await rig.open_another()]
    turn = Turn(actor=ORCHESTRATOR, advances=(step,))
    answers = await asyncio.gather(*(views[n % 2].turn(turn) for n in range(AT_ONCE)))
    outcomes = [answer.outcomes[0] for answer in answers]
    assert Counter(outcomes) == {StepApplied(6): 1, StepApplied(6, repeated=True): AT_ONCE - 1}
    assert await rig.event_types(artifact) == ["artifact.staged", "artifact.finalized"]


@pytest.mark.requirement("JQ-5", "D15")
async def test_only_the_owning_job_completes_with_an_artifact(rig: Rig):
    leases = await _all_writing(rig, AT_ONCE)
    mine = leases[AT_ONCE // 2]
    artifact = await rig.artifact_of(mine.job_id)
    answers = await asyncio.gather(*(rig.complete(lease, artifact) for lease in leases), return_exceptions=True)
    assert [lease.job_id for lease, one in zip(leases, answers, strict=True) if isinstance(one, StepApplied)] == [
        mine.job_id
    ]
    assert all(isinstance(one, StepApplied | InvalidTransition) for one in answers)
    states = [job.state for job in (await rig.ledger.jobs(JobFilter(lifecycle="queue-job"), limit=100)).jobs]
    assert sorted(states) == ["ARTIFACT_WRITE"] * (AT_ONCE - 1) + ["COMPLETE"]


async def _all_writing(rig: Rig, n: int) -> list[Lease]:
    """Many queue jobs that have come to write their artifacts, in few calls."""
    for job_id in await rig.submit(n, lifecycle="queue-job"):
        await rig.move(job_id, "QUEUED", by=ORCHESTRATOR)
    leases = [one.lease for one in await rig.claim(n, lifecycle="queue-job")]
    for source, trigger in (("CONTEXT_ASSEMBLY", "snapshot_ready"), ("NOTEBOOKLM_CALL", "response_received")):
        await rig.turn(*(Advance(lease, source, trigger) for lease in leases), by=ORCHESTRATOR)
    return leases


@pytest.mark.requirement("D15")
async def test_concurrent_discard_and_completion_have_one_winner(rig: Rig):
    for _ in range(8):
        lease = await rig.writing()
        artifact = await rig.artifact_of(lease.job_id)
        done, moved = await asyncio.gather(
            rig.complete(lease, artifact), rig.move(artifact, "discarded", by=BACKEND), return_exceptions=True
        )
        both = (await rig.state(lease.job_id), await rig.state(artifact))
        if isinstance(done, StepApplied):
            assert both == ("COMPLETE", "finalized")
            assert isinstance(moved, NotMoved)
        else:
            assert isinstance(done, InvalidTransition)
            assert isinstance(moved, Moved)
            assert both == ("ARTIFACT_WRITE", "discarded")


# --- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D15", "ART-5")
async def test_artifact_that_no_job_names_is_discarded_and_a_final_one_stays(rig: Rig):
    lease = await rig.writing()
    kept, left = await rig.artifact_of(lease.job_id), await rig.artifact_of(lease.job_id)
    await rig.complete(lease, kept)
    await rig.advance(6.9 * DAY_S)
    await rig.sweep()
    assert await rig.state(left) == "staged"
    await rig.advance(0.2 * DAY_S)
    await rig.sweep()
    assert (await rig.state(left), await rig.state(kept)) == ("discarded", "finalized")
    await rig.advance(1000 * DAY_S)
    await rig.sweep()
    assert (await rig.ledger.retain(RetentionOptions())).jobs == 2, "the job and what it did not name"
    assert await rig.state(kept) == "finalized"
    assert await rig.ledger.job(lease.job_id) is None
    assert (await rig.verify()).ok, "an artifact outlives its job"
    assert isinstance(await rig.move(kept, "removed", by=ADMIN), Moved)
    await rig.advance(1000 * DAY_S)
    assert (await rig.ledger.retain(RetentionOptions())).jobs == 1


async def _out_of_attempts(rig: Rig) -> JobId:
    """A queue job whose only attempt is over: the next sweep fails it."""
    job_id = await rig.submit_one(lifecycle="queue-job", max_attempts=1)
    lease = await rig.drive(job_id, "CONTEXT_ASSEMBLY")
    assert lease is not None
    await rig.pull(lease, Trigger.RETRY, source="CONTEXT_ASSEMBLY", by=ORCHESTRATOR)
    return job_id


@pytest.mark.requirement("D8")
async def test_the_operator_window_is_as_long_as_the_sweep_options_say(rig: Rig):
    told = SweepOptions(elect=False, windows_s={("queue-job", "FAILED"): 60.0})
    job_id = await _out_of_attempts(rig)
    await rig.ledger.sweep(actor(Role.SWEEPER), told)
    assert await rig.state(job_id) == "FAILED"
    await rig.advance(59)
    await rig.sweep()
    assert await rig.state(job_id) == "FAILED"
    await rig.advance(2)
    await rig.sweep()
    assert await rig.state(job_id) == "DEAD"


@pytest.mark.requirement("D8")
async def test_a_window_set_for_another_state_changes_nothing(rig: Rig):
    other = SweepOptions(elect=False, windows_s={("proposal", "pending"): 1.0})
    job_id = await _out_of_attempts(rig)
    await rig.ledger.sweep(actor(Role.SWEEPER), other)
    job = await rig.job(job_id)
    assert job.state == "FAILED"
    assert job.due_at is not None
    assert (job.due_at - job.updated_at).total_seconds() == 900.0


# --- what verify says --------------------------------------------------------------------------------------------------


async def _pair(rig: Rig) -> tuple[JobToRestore, JobToRestore]:
    """A job that completed and its artifact, as recorded; the ledger is lost."""
    lease = await rig.writing(job_id=JobId("mine"))
    await rig.complete(lease, await rig.artifact_of(lease.job_id, job_id=JobId("art-1")))
    job, artifact = sorted(await everything(rig.ledger), key=lambda one: one.job_id, reverse=True)
    return job, artifact


def _renamed(artifact: JobToRestore, name: str) -> JobToRestore:
    records = [
        replace(
            one, event=replace(one.event, id=f"{name}-{one.event.version}", job_id=JobId(name), correlation_id=name)
        )
        for one in artifact.records
    ]
    return replace(artifact, records=tuple(records))


@pytest.mark.requirement("JQ-5", "D14", "D15")
async def test_job_and_artifact_are_restored_in_any_order(rig: Rig):
    pair = await _pair(rig)
    for order in (pair, pair[::-1]):
        owner = await rig.lose()
        for one in order:
            assert await owner.restore(OWNER, [one]) == [True]
        assert (await rig.state(JobId("mine")), await rig.state(JobId("art-1"))) == ("COMPLETE", "finalized")
        assert (await rig.verify()).ok
    lease = await rig.writing()
    with pytest.raises(InvalidTransition):
        await rig.complete(lease, JobId("art-1"))
    assert isinstance(await rig.move(await rig.artifact_of(lease.job_id), "finalized", by=ORCHESTRATOR), NotMoved)


@pytest.mark.requirement("JQ-5", "ART-7")
@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda job, _: [job], "the job completed and none of its artifacts is finalized"),
        (
            lambda job, artifact: [artifact, replace(job, records=job.records[:-1])],
            "1 of its artifacts are finalized and the job has not completed",
        ),
        (lambda job, artifact: [job, replace(artifact, records=artifact.records[:-1])], "none of its artifacts"),
    ],
    ids=["no artifact", "no completion", "an artifact still staged"],
)
async def test_verify_finds_a_job_and_an_artifact_that_do_not_belong_together(
    rig: Rig, damage: Callable[[JobToRestore, JobToRestore], list[JobToRestore]], said: str
):
    pair = await _pair(rig)
    owner = await rig.lose()
    for one in damage(*pair):
        await owner.restore(OWNER, [one])
    report = await verify(rig.ledger)
    assert [(one.rule, one.job_id) for one in report.violations] == [(VerifyRule.ARTIFACT, "mine")]
    assert said in report.violations[0].detail
    await rig.lose()


@pytest.mark.requirement("JQ-5", "ART-7")
async def test_job_has_exactly_one_finalized_artifact_after_completion_and_none_before(rig: Rig):
    _, artifact = await _pair(rig)
    await rig.move(artifact.job_id, "removed", by=ADMIN)
    job, artifact = sorted(await everything(rig.ledger), key=lambda one: one.job_id, reverse=True)
    owner = await rig.lose()
    with pytest.raises(Refused, match="not completed"):
        await owner.restore(OWNER, [replace(job, records=job.records[:-1]), artifact])
    assert await rig.ledger.job(JobId("mine")) is None, "nothing of the call is written"
    assert await owner.restore(OWNER, [job, artifact]) == [True, True]
    with pytest.raises(Refused, match="another"):
        await owner.restore(OWNER, [_renamed(artifact, "art-2")])
    owner = await rig.lose()
    assert await owner.restore(OWNER, [artifact]) == [True]
    lease = await rig.writing(job_id=JobId("mine"))
    second = await rig.artifact_of(lease.job_id)
    with pytest.raises(InvalidTransition, match="art-1 of this job is final"):
        await rig.complete(lease, second)
    assert (await rig.state(lease.job_id), await rig.state(second)) == ("ARTIFACT_WRITE", "staged")
    await rig.lose()


async def test_verify_is_content_with_a_removed_artifact_and_with_one_whose_job_is_gone(rig: Rig):
    _, artifact = await _pair(rig)
    assert isinstance(await rig.move(artifact.job_id, "removed", by=ADMIN), Moved)
    assert (await rig.verify()).ok
    owner = await rig.lose()
    await owner.restore(OWNER, [artifact])
    assert (await rig.verify()).ok


# --- finding them ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D39")
async def test_jobs_are_listed_and_requeued_by_their_parent(rig: Rig):
    lease = await rig.writing()
    old, new = await rig.artifact_of(lease.job_id, type="BRIEF"), await rig.artifact_of(lease.job_id, type="OTHER")
    await rig.artifact_of(JobId("somebody-else"))
    await rig.move(old, "discarded", by=BACKEND)
    failed = await rig.submit_one(parent_id=lease.job_id, correlation_id="c")
    stranger = await rig.submit_one(parent_id=JobId("somebody-else"))
    for held in await rig.claim(2):
        await rig.pull(held, Trigger.FAIL)
    mine = lease.job_id
    for where, expected in (
        (JobFilter(parent_id=mine), [failed, new, old]),
        (JobFilter(parent_id=mine, lifecycle="artifact"), [new, old]),
        (JobFilter(parent_id=mine, state="staged"), [new]),
        (JobFilter(parent_id=mine, state="discarded"), [old]),
        (JobFilter(parent_id=mine, type="BRIEF"), [old]),
        (JobFilter(parent_id=mine, correlation_id="c"), [failed]),
        (JobFilter(parent_id=JobId("nobody")), []),
    ):
        first = await rig.ledger.jobs(where, limit=2)
        rest = (await rig.ledger.jobs(where, limit=2, cursor=first.cursor)).jobs if first.cursor else ()
        assert [job.job_id for job in (*first.jobs, *rest)] == expected, where
        assert all(job.parent_id == mine for job in first.jobs)
    (moved,) = await rig.ledger.requeue(ADMIN, JobFilter(parent_id=mine), rig.request(), limit=10, cause=None)
    assert isinstance(moved, Moved)
    assert (await rig.state(failed), await rig.state(stranger)) == ("queued", "failed")


@pytest.mark.requirement("D15")
async def test_repeated_staging_creates_one_artifact(rig: Rig):
    lease = await rig.writing()
    asked = NewJob(
        job_id=JobId("art-1"),
        type="BRIEF",
        lifecycle="artifact",
        parent_id=lease.job_id,
        idempotency_key=f"{lease.job_id}@{lease.epoch}",
        idempotency_scope="artifacts",
        fingerprint=b"same",
    )
    (first,) = await rig.ledger.submit(BACKEND, [asked])
    (again,) = await rig.ledger.submit(BACKEND, [replace(asked, job_id=JobId("art-2"))])
    assert (first.job_id, again.job_id) == ("art-1", "art-1")
    with pytest.raises(Refused):
        await rig.ledger.submit(SUBMITTER, [replace(asked, job_id=JobId("art-3"))])
