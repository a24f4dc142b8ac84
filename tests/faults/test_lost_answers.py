"""A lost answer is no lost effect and no second effect: for every verb, at every way to lose it.

The proxy aims at the exchange that carries the verb. The ledger asks again by itself under the same ids; when its
window is over it says so, and the caller's own repetition tells. Each exchange is lost before the server saw it, in the
middle of the request, while the server worked, and after its commit at a random byte of the answer; and the first
request may still arrive after the second.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from tests.faults.conftest import PATIENT, Bench
from tests.faults.proxy import HARMLESS, Kind
from tests.faults.verbs import GROUPS, SUBMITS, VERBS, Verb
from trellis.engine.errors import OutcomeUnknown
from trellis.engine.jobs import Advance, Claimed, Submitted
from trellis.engine.ledger import Ledger
from trellis.ledgers.postgres.lanes import LaneOptions
from trellis.lifecycles import Trigger

IMPATIENT = LaneOptions(call_timeout_s=1.0, outcome_window_s=0.05, connect_timeout_s=5.0)
CALM = LaneOptions()
"""A slow answer is waited for. A call that gave up on it would be sent again, and then answers as one call that created the job."""
ALWAYS = (Kind.ANSWER_LOST, Kind.REQUEST_LATE)
BY_TURNS = (Kind.REQUEST_LOST, Kind.REQUEST_CUT, Kind.ANSWER_RACED, Kind.ANSWER_SILENT)
ROUNDS_PROVE = 5
FOREVER = 1_000_000

by_group = pytest.mark.parametrize("group", GROUPS)


@by_group
@pytest.mark.requirement("DJ-21")
async def test_every_lost_exchange_has_one_effect_and_its_caller_learns_it(bench: Bench, group: str, figures):
    for verb in GROUPS[group]:
        for kind in (*ALWAYS, BY_TURNS[VERBS.index(verb) % len(BY_TURNS)]):
            await lose(bench, verb, kind)
    faults = bench.proxy.counts.faults
    figures(lost=faults.total(), after_the_commit=faults[Kind.ANSWER_LOST] + faults[Kind.ANSWER_SILENT])
    assert set(faults) == set(Kind)


@by_group
@pytest.mark.requirement("DJ-21")
async def test_a_repeated_call_after_an_unknown_outcome_returns_what_happened(bench: Bench, group: str):
    hasty, calm = await bench.open_shaky(IMPATIENT), await bench.open_shaky(CALM)
    for number, verb in enumerate(GROUPS[group]):
        kind = (Kind.ANSWER_LOST, Kind.ANSWER_LOST, Kind.REQUEST_LOST)[number % 3]
        case = await lose_for_good(bench, hasty, verb, kind)
        answer = await verb.act(calm, case)
        assert await verb.effects(bench.rig, case) == 1, f"{verb.name}: a second effect after {kind.name}"
        accepts = verb.accepts if kind in HARMLESS else verb.accepts_again or verb.accepts
        assert accepts(answer), f"{verb.name} after {kind.name}: {answer}"
        note(bench, case, answer)


@pytest.mark.requirement("DJ-21")
async def test_a_repeated_submit_that_loses_its_own_answer_says_that_it_created_the_jobs_and_creates_none(bench: Bench):
    """The ledger sends it once more. The job has the id of this call, so it counts as its own, whichever of its sendings made it."""
    hasty = await bench.open_shaky(IMPATIENT)
    for verb in SUBMITS:
        case = await lose_for_good(bench, hasty, verb, Kind.ANSWER_LOST)
        aim = bench.proxy.aim(Kind.ANSWER_LOST, verb.sql)
        answer = await verb.act(bench.shaky, case)
        bench.proxy.heal()
        assert aim.hits == 1, f"{verb.name}: the fault did not happen"
        assert await verb.effects(bench.rig, case) == 1, f"{verb.name}: a second effect"
        assert verb.accepts(answer), f"{verb.name}: {answer}"
        note(bench, case, answer)


@pytest.mark.requirement("DJ-21")
async def test_a_commit_that_never_arrives_is_unknown_until_the_server_gives_up_on_it(bench: Bench):
    """The client is gone, its transaction is open on the server: a repeat has to wait for it, and never doubles it."""
    verb = next(verb for verb in SUBMITS if not verb.one_statement)
    hasty = await bench.open_shaky(IMPATIENT)
    case = await verb.arrange(bench.rig)
    bench.proxy.aim(Kind.REQUEST_LATE, verb.sql)
    with pytest.raises(OutcomeUnknown):
        await verb.act(hasty, case)
    bench.proxy.heal()
    assert await verb.effects(bench.rig, case) == 0
    ended = await bench.sql(
        "select pg_terminate_backend(pid) from pg_stat_activity where state = 'idle in transaction' and datname = current_database()"
    )
    assert ended == [(True,)]
    assert verb.accepts(await verb.act(bench.shaky, case))
    bench.proxy.late.clear()
    assert await verb.effects(bench.rig, case) == 1


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.requirement("DJ-21")
async def test_a_thousand_lost_answers_have_one_effect_each(bench: Bench, figures):
    lost = Counter(await lose_all(bench, product(VERBS, Kind, range(ROUNDS_PROVE))))
    figures(**{kind.name.lower(): times for kind, times in lost.items()})
    assert sum(lost.values()) >= 1_000
    assert min(lost.values()) >= 150


async def lose_all(bench: Bench, plan: Iterable[tuple[Verb, Kind, int]]) -> list[Kind]:
    return [kind for verb, kind, _ in plan if await lose(bench, verb, kind)]


async def lose(bench: Bench, verb: Verb, kind: Kind) -> bool:
    """One fault in the way of one call; the call must come back as if nothing had been."""
    if kind is Kind.REQUEST_LATE and not verb.one_statement:
        return False
    where = f"{verb.name}, {kind.name}"
    case = await verb.arrange(bench.rig)
    assert await verb.effects(bench.rig, case) == 0, where
    aim = bench.proxy.aim(kind, verb.sql)
    answer = await verb.act(bench.shaky, case)
    bench.proxy.heal()
    assert aim.hits == 1, f"{where}: the fault did not happen"
    assert verb.accepts(answer), f"{where}: {answer}"
    note(bench, case, answer)
    assert await verb.effects(bench.rig, case) == 1, where
    if kind is Kind.REQUEST_LATE:
        assert await bench.proxy.deliver_late() == 1
        assert await verb.effects(bench.rig, case) == 1, f"{where}: a second effect when the first request arrived"
    return True


def note(bench: Bench, case: Any, answer: Any) -> None:
    """Keep what the caller was told, for the check of the whole ledger at the end."""
    answers = answer if isinstance(answer, list) else [answer]
    bench.told.note_submit([one for one in answers if isinstance(one, Submitted)])
    claimed = [one for one in answers if isinstance(one, Claimed)]
    if claimed:
        bench.told.note_claim(case[1].claim_id, claimed)
    if isinstance(case, Advance) and case.trigger == Trigger.COMPLETE and not isinstance(answer, list):
        bench.told.note_completion(case.lease, answer)


async def lose_for_good(bench: Bench, hasty: Ledger, verb: Verb, kind: Kind) -> Any:
    """Every exchange is lost until the window is over; then the network is back. Returns the case, to ask for it again."""
    case = await verb.arrange(bench.rig)
    bench.proxy.aim(kind, verb.sql, times=FOREVER)
    with pytest.raises(OutcomeUnknown):
        await verb.act(hasty, case)
    bench.proxy.heal()
    assert await verb.effects(bench.rig, case) == (0 if kind in HARMLESS else 1)
    return case


def test_the_proofs_wait_longer_for_an_outcome_than_for_an_answer():
    """Otherwise a slow machine would turn a lost answer into an unknown outcome and the proof would prove less."""
    assert PATIENT.outcome_window_s > 5 * PATIENT.call_timeout_s
