"""Pairs of verbs on one job, in every order two transactions can have: exactly one of two that exclude each other wins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import pytest

from tests.faults.conftest import Bench
from tests.faults.sessions import Call, Outcome, Session, bound, interleave, orders, three_connections
from tests.ledgers.conformance.rig import ADMIN, OTHER_WORKER, SUBMITTER, SWEEPER, WORKER, Rig
from trellis.engine.jobs import (
    Advance,
    CancelMode,
    Claim,
    ClaimId,
    JobId,
    Lease,
    Moved,
    NewJob,
    Renewed,
    RequestId,
    StepApplied,
    Turn,
    TypeClaim,
)
from trellis.engine.records import Event, JobPlace, RetentionOptions, SweepOptions

ACTORS = (WORKER, OTHER_WORKER, ADMIN, SWEEPER, SUBMITTER)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One job in one state."""

    job_id: JobId
    type: str
    lease: Lease | None


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A call, and whether it moved the job, by its answer or by the job's events."""

    name: str
    call: Callable[[Scene, str], Call]
    moved: Callable[[Any, Sequence[Event]], bool] | None = None
    """None: it never moves a job."""
    passes_over: bool = False
    """It takes what nobody has locked and leaves the rest: it never waits for the other session."""


def step(trigger: str, source: str = "running") -> Verb:
    def bind(scene: Scene, tag: str) -> Call:
        assert scene.lease is not None
        turn = Turn(actor=WORKER, advances=(Advance(lease=scene.lease, source=source, trigger=trigger),))
        return lambda ledger: ledger.turn(turn)

    return Verb(name=trigger, call=bind, moved=lambda answer, _: fresh(answer.outcomes[0], StepApplied))


def fresh(answer: Any, kind: type) -> bool:
    return isinstance(answer, kind) and not getattr(answer, "repeated", False)


def _claim(scene: Scene, tag: str) -> Call:
    claim = Claim(claim_id=ClaimId(f"{scene.job_id}-{tag}"), types=(TypeClaim(type=scene.type),))
    return lambda ledger: ledger.turn(Turn(actor=WORKER if tag == "a" else OTHER_WORKER, claim=claim))


def _sweep(scene: Scene, tag: str) -> Call:
    return lambda ledger: ledger.sweep(SWEEPER, SweepOptions(elect=False))


def cancel(mode: CancelMode) -> Callable[[Scene, str], Call]:
    def bind(scene: Scene, tag: str) -> Call:
        request = RequestId(f"{scene.job_id}-{tag}")
        return lambda ledger: ledger.cancel(ADMIN, scene.job_id, mode, request, grace_s=30.0, cause="asked")

    return bind


def _requeue(scene: Scene, tag: str) -> Call:
    request = RequestId(f"{scene.job_id}-{tag}")
    return lambda ledger: ledger.requeue(ADMIN, [scene.job_id], request, limit=1, cause="again")


def _renew(scene: Scene, tag: str) -> Call:
    assert scene.lease is not None
    leases = [scene.lease]
    return lambda ledger: ledger.renew(WORKER, leases)


def _checkpoint(scene: Scene, tag: str) -> Call:
    assert scene.lease is not None
    lease = scene.lease
    return lambda ledger: ledger.save_checkpoint(lease, b"1")


def _expired(_: Any, events: Sequence[Event]) -> bool:
    return any(event.type == "job_lease_expired" for event in events)


COMPLETE, RETRY, FAIL = step("complete"), step("retry"), step("fail")
START, RELEASE = step("start", "assigned"), step("release", "assigned")
CLAIM = Verb(name="claim", call=_claim, moved=lambda answer, _: bool(answer.claimed), passes_over=True)
SWEEP = Verb(name="sweep", call=_sweep, moved=_expired, passes_over=True)
HARD = Verb(name="cancel", call=cancel(CancelMode.HARD), moved=lambda answer, _: fresh(answer, Moved))
SOFT = Verb(name="soft cancel", call=cancel(CancelMode.SOFT))
REQUEUE = Verb(name="requeue", call=_requeue, moved=lambda answer, _: fresh(answer[0], Moved))
RENEW = Verb(name="renew", call=_renew)
CHECKPOINT = Verb(name="checkpoint", call=_checkpoint)
KEEP = Verb(name="keep", call=_renew, moved=lambda answer, _: isinstance(answer[0], Renewed))
"""A renewal of an overdue lease: it wins when the job stays where it is."""

CASES = {
    "running": (COMPLETE, RETRY, FAIL, HARD, SOFT, RENEW, CHECKPOINT),
    "overdue": (COMPLETE, SWEEP, HARD),
    "assigned": (START, RELEASE, HARD, RENEW),
    "queued": (CLAIM, HARD),
    "failed": (REQUEUE,),
}
PAIRS = [
    *((state, a, b) for state, verbs in CASES.items() for a, b in combinations_with_replacement(verbs, 2)),
    ("overdue", KEEP, SWEEP),
    ("failed", REQUEUE, HARD),
]
BEFORE_CANCEL = {"claim", "start", "release", "retry", "requeue", "sweep"}
"""A cancel may still end the job after these."""


def winners_allowed(a: Verb, b: Verb) -> set[int]:
    movers = {verb.name for verb in (a, b) if verb.moved is not None}
    if not movers:
        return {0}
    return {1, 2} if HARD.name in movers and movers & BEFORE_CANCEL else {1}


async def make_scene(rig: Rig, state: str, **options: Any) -> Scene:
    type_ = str(rig.new_id("type"))
    job_id, lease = await rig.submit_one(type=type_, max_deaths=0, **options), None
    if state != "queued":
        lease = (await rig.claim_one(types=(type_,), start=state != "assigned")).lease
        assert lease.job_id == job_id
    if state == "failed" and lease is not None:
        await rig.pull(lease, "fail")
    if state == "overdue":
        for _ in range(4):
            await rig.sweep()
            await rig.advance(10)
    return Scene(job_id=job_id, type=type_, lease=lease)


def overlap(order: tuple[str, ...]) -> bool:
    """Both calls are made before either commits."""
    return order[0] != order[1]


def must_wait(order: tuple[str, ...], a: Verb, b: Verb) -> bool:
    """The second comer finds the job's row locked by the first, and waits unless it passes over such rows."""
    return overlap(order) and not (b if order[0] == "a" else a).passes_over


async def play(connections: Sequence[Any], order: tuple[str, ...], first: Call, second: Call) -> Outcome:
    sessions = [Session(connection, call) for connection, call in zip(connections, (first, second), strict=False)]
    for session in sessions:
        for actor in ACTORS:  # a name that is registered inside the transaction would be one more thing to wait for
            await session.ledger.heartbeat_worker(actor, None)
    return await interleave(order, sessions[0], sessions[1], connections[2])


@pytest.mark.requirement("DJ-2", "DJ-3", "D2", "D19")
@pytest.mark.parametrize("state", CASES)
async def test_exactly_one_of_two_concurrent_moves_wins(bench: Bench, state: str, figures):
    runs = waits = deadlocks = 0
    async with three_connections(bench.direct_url, bench.admin_url) as connections:
        for a, b in ((a, b) for where, a, b in PAIRS if where == state):
            for order in orders():
                scene = await make_scene(bench.rig, state)
                outcome = await play(connections, order, a.call(scene, "a"), b.call(scene, "b"))
                events = await bench.rig.ledger.events(scene.job_id)
                answers = ((a, outcome.first), (b, outcome.second))
                won = [verb.name for verb, answer in answers if verb.moved is not None and verb.moved(answer, events)]
                won = won[:1] if a is b is SWEEP else won  # the event shows that one of them did it, not which
                where = f"{a.name}, {b.name}, {''.join(order)}"
                assert len(won) in winners_allowed(a, b), f"{where}: {won} won; {outcome}"
                assert outcome.waited == must_wait(order, a, b), f"{where}: {outcome}"
                await bench.rig.cancel(scene.job_id)
                runs, waits, deadlocks = runs + 1, waits + outcome.waited, deadlocks + outcome.deadlocks
    figures(runs=runs, waited=waits, deadlocks_resolved=deadlocks)
    assert deadlocks == 0


# --- keys ----------------------------------------------------------------------------------------------------------------


def submit(job_id: JobId, key: str) -> Call:
    job = NewJob(job_id=job_id, type="keyed", concurrency_key=key)
    return lambda ledger: ledger.submit(SUBMITTER, [job])


FREES = {
    "complete": (COMPLETE, "running"),
    "retry": (RETRY, "running"),
    "cancel": (HARD, "running"),
    "cancel_ready": (HARD, "queued"),
    "release": (RELEASE, "assigned"),
    "sweep": (SWEEP, "overdue"),
}


@pytest.mark.requirement("D49")
@pytest.mark.parametrize("name", FREES)
async def test_a_slot_given_back_while_a_job_is_parked_is_never_lost(bench: Bench, name: str):
    """The lost wake-up: a submit that finds the key full parks, while the holder that frees it sees nobody parked, or
    passes over the key because somebody else has it. The next sweep, at most a second later, promotes.
    """
    verb, state = FREES[name]
    rig = bench.rig
    async with three_connections(bench.direct_url, bench.admin_url) as connections:
        for order in orders():
            key, next_id = f"key-{rig.new_id()}", rig.new_id("next")
            scene = await make_scene(rig, state, concurrency_key=key)
            outcome = await play(connections, order, submit(next_id, key), verb.call(scene, "b"))
            # A submit waits for whoever frees the slot, and so does a completion for it; the others pass over the key.
            waits = overlap(order) and (order[0] == "b" or verb is COMPLETE)
            assert outcome.waited == waits, f"{name}, {''.join(order)}: {outcome}"
            await rig.sweep()
            places = [(await rig.job(job)).place for job in (scene.job_id, next_id)]
            assert places.count(JobPlace.READY) == 1, f"{name}, {''.join(order)}: {places}, {outcome}"
            for job in (scene.job_id, next_id):
                await rig.cancel(job)


@pytest.mark.requirement("D49")
async def test_two_submits_of_one_key_fill_one_slot(bench: Bench):
    rig = bench.rig
    async with three_connections(bench.direct_url, bench.admin_url) as connections:
        for order in orders():
            key, ids = f"key-{rig.new_id()}", [rig.new_id("one"), rig.new_id("two")]
            await play(connections, order, submit(ids[0], key), submit(ids[1], key))
            assert sorted([(await rig.job(job)).place for job in ids]) == [JobPlace.BLOCKED, JobPlace.READY]
            for job in ids:
                await rig.cancel(job)


@pytest.mark.requirement("D49")
async def test_a_parked_job_that_is_cancelled_hands_the_slot_on(bench: Bench):
    """Promotion passes over a parked row that a cancel has locked; the cancel must then promote the next one itself."""
    rig = bench.rig
    async with three_connections(bench.direct_url, bench.admin_url) as connections:
        for order in orders():
            key = f"key-{rig.new_id()}"
            scene = await make_scene(rig, "running", concurrency_key=key)
            first, second = [await rig.submit_one(concurrency_key=key) for _ in range(2)]
            parked = Scene(job_id=first, type=scene.type, lease=None)
            outcome = await play(connections, order, HARD.call(parked, "a"), COMPLETE.call(scene, "b"))
            assert await rig.state(first) == "cancelled", outcome
            assert outcome.waited == overlap(order), f"{''.join(order)}: {outcome}"
            assert (await rig.job(second)).place == JobPlace.READY, f"{''.join(order)}: {outcome}"
            await rig.cancel(second)


@pytest.mark.requirement("D49", "D61")
async def test_a_key_removed_as_unused_while_a_submit_needs_it_is_made_anew(bench: Bench):
    """Retention removes the key of a job that is gone; at the same time somebody submits under that key. Whoever comes
    first, the new job is not left parked under a key that is not there, and the limit is the one it brought.
    """
    rig, keep = bench.rig, RetentionOptions(ended_s=50.0, batch=10_000, testing=True)
    waited = 0
    async with three_connections(bench.direct_url, bench.admin_url) as connections:
        for order in orders():
            key, ids = f"key-{rig.new_id()}", [rig.new_id("one"), rig.new_id("two")]
            await rig.cancel(await rig.submit_one(concurrency_key=key, concurrency_limit=2))
            await rig.advance(100)
            both = [NewJob(job_id=job, type="keyed", concurrency_key=key) for job in ids]
            outcome = await play(
                connections,
                order,
                lambda ledger: ledger.retain(keep),
                lambda ledger, jobs=both: ledger.submit(SUBMITTER, jobs),
            )
            places = [(await rig.job(job)).place for job in ids]
            rows = await bench.sql(
                "select cap, (select count(*) from trellis.slot s where s.ckey = k.id) from trellis.concurrency_key k where name = $1",
                key,
            )
            kept = rows == [(2, 2)] and places == [JobPlace.READY, JobPlace.READY]
            made_anew = rows == [(1, 1)] and places == [JobPlace.READY, JobPlace.BLOCKED]
            assert kept or made_anew, f"{''.join(order)}: {rows}, {places}, {outcome}"
            waited += outcome.waited
            for job in ids:
                await rig.cancel(job)
    assert waited > 0, "no submit met the removal: the transactions did not overlap"


def test_a_bound_ledger_uses_no_other_connection():
    """The proofs above are about two sessions; a verb that opened a third would prove nothing."""
    ledger = bound(None)  # type: ignore[arg-type]
    lanes = {id(lane) for name, lane in vars(ledger).items() if name.endswith("_lane")}
    lanes |= {id(turner.lane) for turner in ledger._turners}  # type: ignore[attr-defined]
    assert len(lanes) == 1
