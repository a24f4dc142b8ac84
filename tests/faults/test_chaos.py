"""Everything at once, and the proof that the proofs can fail."""

import re

import pytest

from tests.faults.chaos import RARE, run_chaos
from tests.faults.conftest import SEED, Bench
from tests.faults.history import problems
from tests.ledgers.conformance.rig import OTHER_WORKER, WORKER
from trellis.engine.jobs import Advance, Claim, ClaimId, Turn, TypeClaim
from trellis.engine.verify import verify


@pytest.mark.requirement("DJ-2", "DJ-3", "DJ-7", "D2", "D6", "D31", "DJ-4", "DJ-8")
async def test_chaos_keeps_every_promise_and_reaches_every_rare_path(bench: Bench, figures):
    reached = await run_chaos(bench, clients=4, steps=200, seed=SEED)
    await bench.check()
    figures(**reached)
    assert not [path for path in RARE if not reached[path]], f"never reached: {reached}"


@pytest.mark.prove
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("round_", range(5))
@pytest.mark.requirement("DJ-2", "DJ-3", "DJ-7", "D2", "D6", "D31", "DJ-4", "DJ-8")
async def test_long_chaos_keeps_every_promise(bench: Bench, round_: int, figures):
    reached = await run_chaos(bench, clients=6, steps=500, seed=SEED + 1_000 * round_)
    await bench.check()
    figures(**reached)
    assert not [path for path in RARE if not reached[path]], f"never reached: {reached}"


# --- mutants -------------------------------------------------------------------------------------------------------------


async def two_owners(bench: Bench) -> None:
    """A first owner falls silent, a second one takes the job over, then both complete it; clients note their answers."""
    rig, told = bench.rig, bench.told
    type_ = str(rig.new_id("type"))
    await rig.submit_one(type=type_)
    leases = []
    for by in (WORKER, OTHER_WORKER):
        claim = Claim(claim_id=ClaimId(rig.new_id("claim")), types=(TypeClaim(type=type_),))
        turn = Turn(actor=by, claim=claim)
        result = await rig.ledger.turn(turn)
        told.note_turn(turn, result)
        leases.append((by, result.claimed[0].lease))
        if by is WORKER:
            await rig.lose_lease()
    for by, lease in leases:
        turn = Turn(actor=by, advances=(Advance(lease=lease, source="running", trigger="complete"),))
        told.note_turn(turn, await rig.ledger.turn(turn))


async def mutate(bench: Bench, function: str, pattern: str, replacement: str) -> str:
    """Change one function of this test's database; returns the original."""
    ((original,),) = await bench.sql(
        "select pg_get_functiondef(p.oid) from pg_proc p where p.proname = $1 and p.pronamespace = 'trellis'::regnamespace"
        " order by p.pronargs desc limit 1",  # the one with fewer arguments is for older programs
        function,
    )
    mutant, changes = re.subn(pattern, replacement, original)
    assert changes, f"the mutant of {function} changes nothing"
    await bench.sql(mutant)
    return original


async def forget_jobs(bench: Bench, *, after: int) -> None:
    """Remove the jobs that a mutant spoiled: what is left of the database is verified after the test."""
    for table in ("event", "ready", "resting", "parked", "lease", "ended", "deadline", "result", "dead_letter", "job"):
        await bench.sql(f"delete from trellis.{table} where id > $1", after)


@pytest.mark.requirement("D2", "DJ-7")
async def test_the_checker_is_content_when_completions_are_fenced(bench: Bench):
    await two_owners(bench)
    assert not await problems(bench.told, bench.rig.ledger)
    assert bench.told.refused


async def test_the_checker_fails_a_ledger_that_does_not_fence_completions(bench: Bench):
    original = await mutate(bench, "turn", r"d\.epoch = p_done_epochs\[\w+\([^()]*\)\]", "true")
    try:
        await two_owners(bench)
        found = await problems(bench.told, bench.rig.ledger)
    finally:
        await bench.sql(original)
        bench.told.completed.clear()
    assert any("acknowledged" in problem for problem in found), found


async def test_the_checker_fails_a_ledger_that_hands_a_lease_out_again_under_the_same_epoch(bench: Bench):
    """Without the rise of the epoch at a revocation and at a claim the first owner's completion passes the fence."""
    ((last,),) = await bench.sql("select coalesce(max(id), 0) from trellis.job")
    changed = {
        "_claim": await mutate(bench, "_claim", r"r\.epoch \+ 1 as epoch", "r.epoch as epoch"),
        "_reap": await mutate(bench, "_reap", r"l\.epoch \+ 1", "l.epoch"),
    }
    try:
        await two_owners(bench)
        found = await problems(bench.told, bench.rig.ledger)
    finally:
        for original in changed.values():
            await bench.sql(original)
        bench.told.claims.clear()
        await forget_jobs(bench, after=last)
    assert any("was handed out to 2 claims" in problem for problem in found), found


@pytest.mark.requirement("DJ-4")
async def test_verify_fails_a_ledger_that_forgets_an_event(bench: Bench):
    job_id = await bench.rig.submit_one(type=str(bench.rig.new_id("type")))
    await bench.rig.cancel(job_id)
    ((key,),) = await bench.sql("select id from trellis.job where job_id = $1", job_id)
    await bench.sql("delete from trellis.event where id = $1 and version = 2", key)
    report = await verify(bench.rig.ledger)
    assert any(violation.job_id == job_id for violation in report.violations)
    await bench.sql("delete from trellis.event where id = $1", key)
    await bench.sql("delete from trellis.ended where id = $1", key)
    await bench.sql("delete from trellis.job where id = $1", key)
