"""Moves: declared steps by roles that hold no lease."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, LENGTH_S, WORKER, Rig, actor, answer_of
from trellis.engine.errors import (
    InputError,
    InvalidTransition,
    JobNotFound,
    OptionInvalid,
    OutcomeUnknown,
    TrellisError,
)
from trellis.engine.jobs import (
    Advance,
    Epoch,
    JobId,
    Lease,
    LeaseLost,
    Move,
    Moved,
    NotMoved,
    ReasonCode,
    RequestId,
    StepApplied,
    Turn,
)
from trellis.engine.records import JobFilter, JobPlace
from trellis.ledgers.postgres import moves
from trellis.ledgers.postgres.lanes import LaneOptions
from trellis.ledgers.postgres.ledger import PostgresLedger
from trellis.lifecycles import Role, Trigger

OWNER = actor(Role.OWNER)
ORCHESTRATOR = actor(Role.ORCHESTRATOR)
SCHEDULER = actor(Role.SCHEDULER)
APPLY = actor(Role.APPLY_ENGINE)


@pytest.mark.oldest_server
@pytest.mark.requirement("RUN-1", "DJ-15")
async def test_a_move_is_one_transition_with_its_event(rig: Rig):
    job_id = await rig.submit_one(lifecycle="run")
    moved = await rig.move(job_id, "queued", by=ORCHESTRATOR, cause="a slot is free", data=b'{"slot": 1}')
    assert moved == Moved(job_id=job_id, source="requested", target="queued", version=2)
    event = await rig.last_event(job_id)
    assert (event.type, event.role, event.cause, event.data) == (
        "run.queued",
        Role.ORCHESTRATOR,
        "a slot is free",
        b'{"slot": 1}',
    )
    assert (await rig.job(job_id)).place is JobPlace.READY


@pytest.mark.requirement("DJ-21")
async def test_the_same_request_again_returns_the_first_answer(rig: Rig):
    job_id = await rig.submit_one(lifecycle="run")
    request = rig.request()
    first = await rig.move(job_id, "queued", by=ORCHESTRATOR, request_id=request)
    assert isinstance(first, Moved)
    await rig.claim_one(lifecycle="run")
    before = await rig.snapshot(job_id)
    again = await rig.move(job_id, "queued", by=ORCHESTRATOR, request_id=request)
    assert again == Moved(job_id=job_id, source="requested", target="queued", version=first.version, repeated=True)
    assert await rig.snapshot(job_id) == before


@pytest.mark.requirement("DJ-21")
async def test_a_request_id_belongs_to_one_job(rig: Rig):
    first, second = await rig.submit(2, lifecycle="run")
    request = rig.request()
    assert isinstance(await rig.move(first, "queued", by=ORCHESTRATOR, request_id=request), Moved)
    moved = await rig.move(second, "queued", by=ORCHESTRATOR, request_id=request)
    assert isinstance(moved, Moved)
    assert not moved.repeated
    again = await rig.move(second, "queued", by=ORCHESTRATOR, request_id=request)
    assert again == replace(moved, repeated=True)


@pytest.mark.requirement("D37", "BUS-6")
@pytest.mark.parametrize("state", ["PENDING", "DISPATCHED", "RUNNING", "CANCELLED"])
async def test_the_same_state_twice_is_a_no_op(rig: Rig, state: str):
    job_id = await rig.submit_one(lifecycle="bus-job")
    await rig.drive(job_id, state)
    before = await rig.snapshot(job_id)
    moved = await rig.move(job_id, state, by=ADMIN)
    assert isinstance(moved, Moved)
    assert before.job is not None
    assert (moved.repeated, moved.version, moved.target) == (True, before.job.version, state)
    assert await rig.snapshot(job_id) == before


@pytest.mark.requirement("BUS-6")
async def test_an_undeclared_step_is_refused_with_the_state_it_found(rig: Rig):
    job_id = await rig.submit_one(lifecycle="bus-job")
    await rig.drive(job_id, "SUCCEEDED")
    before = await rig.snapshot(job_id)
    refused = await rig.move(job_id, "SCHEDULED", by=SCHEDULER)
    assert isinstance(refused, NotMoved)
    assert (refused.job_id, refused.state, refused.target) == (job_id, "SUCCEEDED", "SCHEDULED")
    assert refused.reason
    assert await rig.snapshot(job_id) == before


async def test_a_state_of_another_lifecycle_is_refused(rig: Rig):
    job_id = await rig.submit_one()
    for target in ("RUNNING", "no such state", ""):
        answer = await answer_of(rig.move(job_id, target, by=ADMIN))
        assert isinstance(answer, NotMoved | InvalidTransition | OptionInvalid)
    assert await rig.state(job_id) == "queued"


@pytest.mark.requirement("DJ-7")
async def test_a_step_that_only_the_holder_may_make_is_no_move(rig: Rig):
    held = await rig.running()
    for target in ("succeeded", "failed"):
        assert isinstance(await rig.move(held.lease.job_id, target, by=WORKER), NotMoved)
    assert await rig.state(held.lease.job_id) == "running"


async def test_an_unknown_job_is_not_found(rig: Rig):
    with pytest.raises(JobNotFound) as missing:
        await rig.move(JobId("nobody"), "queued", by=ORCHESTRATOR)
    assert missing.value.data["job_id"] == "nobody"


async def test_a_version_is_a_condition(rig: Rig):
    job_id = await rig.submit_one(lifecycle="proposal")
    stale = await rig.move(job_id, "approved", by=OWNER, version=7)
    assert isinstance(stale, NotMoved)
    assert await rig.state(job_id) == "pending"
    assert isinstance(await rig.move(job_id, "approved", by=OWNER, version=1), Moved)


@pytest.mark.requirement("D22")
async def test_concurrent_moves_of_one_job_have_one_winner(rig: Rig):
    another = await rig.open_another()
    for _ in range(5):
        job_id = await rig.submit_one(lifecycle="proposal")
        answers = await asyncio.gather(
            rig.move(job_id, "approved", by=OWNER, version=1),
            another.move(OWNER, Move(job_id=job_id, target="rejected", request_id=rig.request(), version=1)),
        )
        assert sorted(type(answer).__name__ for answer in answers) == ["Moved", "NotMoved"]
        assert len(await rig.ledger.events(job_id)) == 2


@pytest.mark.requirement("D22", "D2")
async def test_a_claim_by_id_grants_a_lease(rig: Rig):
    job_id = await rig.submit_one(lifecycle="proposal")
    await rig.move(job_id, "approved", by=OWNER)
    moved = await rig.move(job_id, "applying", by=APPLY, lease_s=60.0, heartbeat_s=15.0)
    assert isinstance(moved, Moved)
    assert moved.lease is not None
    job = await rig.job(job_id)
    assert (job.place, job.owner, job.epoch) == (JobPlace.LEASED, APPLY.name, moved.lease.epoch)
    assert job.lease_expires_at == await rig.ledger.now() + timedelta(seconds=LENGTH_S)
    assert isinstance(await rig.pull(moved.lease, Trigger.COMPLETE, source="applying", by=APPLY), StepApplied)


@pytest.mark.requirement("D22", "DJ-21")
async def test_a_claim_by_id_asked_again_gives_the_same_lease(rig: Rig):
    job_id = await rig.submit_one(lifecycle="proposal")
    await rig.move(job_id, "approved", by=OWNER)
    request = rig.request()
    first = await rig.move(job_id, "applying", by=APPLY, request_id=request)
    again = await rig.move(job_id, "applying", by=APPLY, request_id=request)
    assert isinstance(first, Moved)
    assert isinstance(again, Moved)
    assert (again.lease, again.version, again.repeated) == (first.lease, first.version, True)


@pytest.mark.requirement("D22")
async def test_a_failed_proposal_can_be_applied_again(rig: Rig):
    job_id = await rig.submit_one(lifecycle="proposal")
    lease = await rig.drive(job_id, "applying")
    assert lease is not None
    await rig.pull(lease, Trigger.FAIL, source="applying", by=APPLY, cause="the target changed")
    assert (await rig.job(job_id)).place is JobPlace.SCHEDULED
    again = await rig.move(job_id, "applying", by=APPLY)
    assert isinstance(again, Moved)
    assert again.lease is not None
    assert again.lease.epoch > lease.epoch
    assert (await rig.job(job_id)).attempt == 1


@pytest.mark.requirement("D2", "DJ-7")
async def test_a_move_out_of_a_held_state_revokes_the_lease(rig: Rig):
    held = await rig.running()
    moved = await rig.move(held.lease.job_id, "dead_lettered", by=ADMIN, death=DEATH)
    assert isinstance(moved, Moved)
    assert moved.lease is None
    job = await rig.job(held.lease.job_id)
    assert (job.place, job.epoch, job.owner) == (JobPlace.ENDED, held.lease.epoch + 1, None)
    assert await rig.pull(held, Trigger.COMPLETE) == LeaseLost(held.lease)


@pytest.mark.requirement("DJ-18", "DJ-12")
@pytest.mark.parametrize("state", ["queued", "assigned", "running"])
async def test_a_policy_violation_dead_letters_at_once_from_any_open_state(rig: Rig, state: str):
    job_id = await rig.submit_one()
    lease = await rig.drive(job_id, state)
    assert isinstance(await rig.move(job_id, "dead_lettered", by=ADMIN, death=DEATH), Moved)
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=5)
    assert (letter.reason_code, letter.last_error) == (ReasonCode.POLICY_VIOLATION, DEATH.last_error)
    assert (letter.last_owner is None, letter.last_lease_expires_at is None) == (lease is None, lease is None)
    assert letter.attempts == 1


@pytest.mark.requirement("DJ-12")
async def test_a_move_into_a_dead_letter_state_needs_its_reason(rig: Rig):
    job_id = await rig.submit_one()
    before = await rig.snapshot(job_id)
    answer = await answer_of(rig.move(job_id, "dead_lettered", by=ADMIN))
    assert isinstance(answer, NotMoved | TrellisError)
    assert await rig.snapshot(job_id) == before


async def test_a_move_into_a_waiting_state_may_wait(rig: Rig):
    job_id = await rig.submit_one(lifecycle="bus-job")
    await rig.move(job_id, "SCHEDULED", by=SCHEDULER, delay_s=30.0)
    assert (await rig.job(job_id)).place is JobPlace.SCHEDULED
    assert await rig.claim(lifecycle="bus-job") == []
    await rig.pass_time(30)
    assert len(await rig.claim(lifecycle="bus-job")) == 1


async def test_moves_at_the_same_time_make_one_step(rig: Rig):
    ledgers = [rig.ledger, await rig.open_another(), await rig.open_another()]
    job_id = await rig.submit_one(lifecycle="run")
    answers = await asyncio.gather(
        *(
            ledgers[i % 3].move(ORCHESTRATOR, Move(job_id=job_id, target="queued", request_id=RequestId(f"r-{i}")))
            for i in range(12)
        )
    )
    made = [answer for answer in answers if isinstance(answer, Moved) and not answer.repeated]
    assert len(made) == 1
    assert len(await rig.ledger.events(job_id)) == 2


@pytest.mark.requirement("BUS-1", "D37")
async def test_moves_that_come_together_are_each_answered_as_if_alone(rig: Rig):
    first, second, third, fourth = await rig.submit(4, lifecycle="bus-job")
    asked = (
        rig.move(third, "SCHEDULED", by=SCHEDULER, delay_s=0.0),
        rig.move(first, "SCHEDULED", by=SCHEDULER, delay_s=0.0, request_id="twice"),
        rig.move(first, "SCHEDULED", by=SCHEDULER, delay_s=0.0, request_id="twice"),
        rig.move(JobId("nobody"), "SCHEDULED", by=SCHEDULER),
        rig.move(second, "no such state", by=SCHEDULER),
        rig.move(second, "SCHEDULED", by=SCHEDULER, version=7),
        rig.move(second, "SCHEDULED", by=WORKER),
        rig.move(fourth, "SCHEDULED", by=SCHEDULER, delay_s=0.0),
        rig.move(fourth, "DISPATCHED", by=SCHEDULER, lease_s=30.0, heartbeat_s=30.0, version=2),
    )
    answers = await asyncio.gather(*map(answer_of, asked))
    told = [answer.repeated if isinstance(answer, Moved) else type(answer) for answer in answers]
    assert told[:4] == [False, False, True, JobNotFound]
    assert told[4:7] == [NotMoved] * 3, answers
    assert told[7:] == [False, False]
    assert isinstance(answers[-1], Moved)
    assert answers[-1].lease is not None
    states = {job_id: await rig.state(job_id) for job_id in (first, second, third, fourth)}
    assert states == {first: "SCHEDULED", second: "PENDING", third: "SCHEDULED", fourth: "DISPATCHED"}
    assert [len(await rig.ledger.events(job_id)) for job_id in states] == [2, 1, 2, 3]


@pytest.mark.only("postgres")
async def test_moves_that_come_together_share_a_transaction(rig: Rig):
    first, *jobs = await rig.submit(41, lifecycle="bus-job")
    await rig.move(first, "SCHEDULED", by=SCHEDULER, delay_s=0.0)  # which registers the scheduler, before anything else
    await asyncio.gather(*(rig.move(job_id, "SCHEDULED", by=SCHEDULER, delay_s=0.0) for job_id in jobs))
    assert await _batches(rig, "job_scheduled") < 20


@pytest.mark.only("postgres")
async def test_steps_of_many_holders_that_come_together_share_a_transaction(rig: Rig):
    jobs = await rig.submit(40, lifecycle="bus-job")
    held = [await rig.drive(job_id, "DISPATCHED") for job_id in jobs]
    for number in range(40):  # whoever asks for the first time is registered before anything else, one after the other
        await rig.ledger.turn(Turn(actor=actor(Role.WORKER, f"worker-{number}")))
    await asyncio.gather(*map(_begin, [rig] * 40, held, range(40)))
    assert await _batches(rig, "job_started") < 20
    assert {await rig.state(job_id) for job_id in jobs} == {"RUNNING"}


async def test_a_step_that_is_refused_takes_no_other_with_it(rig: Rig):
    jobs = await rig.submit(3, lifecycle="bus-job")
    one, stale, other = [await rig.drive(job_id, "DISPATCHED") for job_id in jobs]
    assert stale is not None
    stale = stale._replace(epoch=Epoch(stale.epoch + 1))
    answers = await asyncio.gather(*map(_begin, [rig] * 3, (one, stale, other), range(3)))
    assert [type(answer) for answer in answers] == [StepApplied, LeaseLost, StepApplied]
    undeclared = Turn(actor=WORKER, advances=(Advance(stale, "DISPATCHED", "no such trigger", data=b"{}"),))
    answers = await asyncio.gather(answer_of(rig.ledger.turn(undeclared)), _begin(rig, one, 0))
    assert isinstance(answers[0], InvalidTransition)
    assert answers[1] == StepApplied(4, repeated=True)


@pytest.mark.only("postgres")
@pytest.mark.parametrize(
    "wrong",
    [{"lease_s": float("inf")}, {"heartbeat_s": float("nan")}, {"version": 2**40}, {"request_id": "\ud800"}],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_a_move_that_cannot_be_told_takes_no_other_with_it(rig: Rig, wrong: dict[str, object]):
    first, odd, last = await rig.submit(3, lifecycle="bus-job")
    await answer_of(rig.move(JobId("nobody"), "SCHEDULED", by=SCHEDULER))  # its actor is known: the others meet
    asked = (
        rig.move(job_id, "SCHEDULED", by=SCHEDULER, delay_s=0.0, **(wrong if job_id is odd else {}))
        for job_id in (first, odd, last)
    )
    answers = await asyncio.gather(*map(answer_of, asked))
    assert [isinstance(answer, Moved) for answer in answers] == [True, False, True], answers
    assert isinstance(answers[1], TrellisError)
    assert not isinstance(answers[1], OutcomeUnknown)


@pytest.mark.only("postgres")
async def test_a_step_that_cannot_be_told_takes_no_other_with_it(rig: Rig):
    jobs = await rig.submit(2, lifecycle="bus-job")
    one, odd = [await rig.drive(job_id, "DISPATCHED") for job_id in jobs]
    assert odd is not None
    for known in (WORKER, actor(Role.WORKER, "worker-0")):
        await rig.ledger.heartbeat_worker(known, None)  # so that the two meet
    turn = Turn(actor=WORKER, advances=(Advance(odd, "DISPATCHED", Trigger.START, data=b"\xff"),))
    answers = await asyncio.gather(answer_of(rig.ledger.turn(turn)), _begin(rig, one, 0))
    assert isinstance(answers[0], InputError)
    assert isinstance(answers[1], StepApplied)


@pytest.mark.only("postgres")
async def test_an_answer_that_is_lost_for_moves_together_is_asked_for_again_by_each_under_its_own_id(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    async def lost(*_: object) -> list[object]:
        raise ConnectionResetError

    ledger = await PostgresLedger.open(rig.app_url, hints=False, options=LaneOptions(outcome_window_s=0.0))
    rig.others.append(ledger)
    monkeypatch.setattr(moves, "run_moves", lost)
    asked = [
        Move(job_id=job_id, target="SCHEDULED", request_id=RequestId(f"mine-{job_id}"))
        for job_id in await rig.submit(3, lifecycle="bus-job")
    ]
    answers = await asyncio.gather(*(answer_of(ledger.move(SCHEDULER, move)) for move in asked))
    told = [answer.data["request"] for answer in answers if isinstance(answer, OutcomeUnknown)]
    assert told == [move.request_id for move in asked]


async def _begin(rig: Rig, lease: Lease | None, number: int) -> StepApplied | LeaseLost:
    assert lease is not None
    advance = Advance(lease, "DISPATCHED", Trigger.START, data=b'{"seen_by": "a test"}')
    turn = Turn(actor=actor(Role.WORKER, f"worker-{number}"), advances=(advance,))
    (outcome,) = (await rig.ledger.turn(turn)).outcomes
    return outcome


async def _batches(rig: Rig, event_type: str) -> int:
    """How many transactions made the events of this type."""
    shell = await asyncpg.connect(rig.app_url, server_settings={"search_path": "trellis"})
    try:
        return await shell.fetchval(
            "select count(distinct b.xid) from event e join batch b on b.no = e.batch where e.type ="
            " (select t.type from event_type t where t.name = $1)",
            event_type,
        )
    finally:
        await shell.close()
