"""Every state with every state and every role, through the engine: exactly what the lifecycle declares passes."""

import asyncio
from collections.abc import Iterable, Iterator
from itertools import product

import pytest

from tests.ledgers.conformance.rig import DEATH, Rig, actor, is_anybodys, unfenced
from trellis.engine.errors import Refused
from trellis.engine.jobs import Advance, JobId, JobKey, Lease, LeaseLost, Moved, NotMoved, Turn
from trellis.engine.records import JobFilter
from trellis.lifecycles import LIFECYCLES, Lifecycle, Role, State, Transition, Trigger

AT_ONCE = 64


@pytest.mark.parametrize("lifecycle", LIFECYCLES.values(), ids=lambda lifecycle: lifecycle.name)
@pytest.mark.requirement("JQ-2", "NLM-2", "RUN-1", "DJ-1", "BUS-1", "D22", "D39")
async def test_a_declared_step_passes_for_each_of_its_roles(rig: Rig, lifecycle: Lifecycle):
    for transition, role in _declared(lifecycle):
        delay_s = 60.0 if transition.trigger == Trigger.RUN_NOW else 0.0
        job_id = await rig.submit_one(lifecycle=lifecycle.name, delay_s=delay_s)
        lease = await rig.drive(job_id, str(transition.source))
        before = len(await rig.ledger.events(job_id))
        await rig.step(job_id, transition, lease, by=role)
        events = await rig.ledger.events(job_id)
        assert len(events) == before + 1
        assert (events[-1].source, events[-1].target) == (transition.source, transition.target)
        assert (events[-1].type, events[-1].role) == (transition.event, role)
        assert await rig.state(job_id) == transition.target


@pytest.mark.parametrize("lifecycle", LIFECYCLES.values(), ids=lambda lifecycle: lifecycle.name)
@pytest.mark.requirement(
    "JQ-2", "JQ-3", "JQ-4", "JQ-6", "NLM-2", "RUN-1", "RUN-2", "DJ-1", "DJ-3", "BUS-1", "BUS-6", "D55", "D54"
)
async def test_every_other_move_is_refused_and_changes_nothing(rig: Rig, lifecycle: Lifecycle):
    for state in lifecycle.states:
        job_id = await rig.submit_one(lifecycle=lifecycle.name)
        await rig.drive(job_id, state.name)
        before = await rig.snapshot(job_id)
        asked = [
            (target.name, role)
            for target, role in product(lifecycle.states, Role)
            if target is not state and unfenced(lifecycle.name, state.name, target.name, role) is None
        ]
        for (target, role), answer in zip(asked, await _moves(rig, job_id, asked), strict=True):
            assert isinstance(answer, NotMoved), (state.name, target, role)
            assert (answer.job_id, answer.state, answer.target) == (job_id, state.name, target)
            assert answer.reason
        assert await rig.snapshot(job_id) == before


@pytest.mark.parametrize("lifecycle", LIFECYCLES.values(), ids=lambda lifecycle: lifecycle.name)
@pytest.mark.requirement("D37", "BUS-6")
async def test_the_same_state_again_changes_nothing(rig: Rig, lifecycle: Lifecycle):
    for state in lifecycle.states:
        job_id = await rig.submit_one(lifecycle=lifecycle.name)
        await rig.drive(job_id, state.name)
        before = await rig.snapshot(job_id)
        name = state.name
        asked = [(name, role) for role in Role if unfenced(lifecycle.name, name, name, role) is None]
        declared = any(t.source == t.target == state.name for t in lifecycle.transitions)
        for answer in await _moves(rig, job_id, asked):
            assert isinstance(answer, NotMoved) or answer.repeated
            assert declared or isinstance(answer, Moved)
        assert await rig.snapshot(job_id) == before


@pytest.mark.parametrize("lifecycle", LIFECYCLES.values(), ids=lambda lifecycle: lifecycle.name)
@pytest.mark.requirement("JQ-2", "JQ-6", "NLM-2", "RUN-1", "DJ-1", "DJ-3", "DJ-7", "BUS-1", "BUS-6", "D55")
async def test_every_other_step_of_a_holder_is_refused_and_changes_nothing(rig: Rig, lifecycle: Lifecycle):
    """With a lease that is good, or for states nobody holds with the job's own epoch."""
    for state in lifecycle.states:
        job_id = await rig.submit_one(lifecycle=lifecycle.name)
        lease = await rig.drive(job_id, state.name) or await _forged(rig, job_id)
        before = await rig.snapshot(job_id)
        asked = list(_undeclared_steps(lifecycle, state))
        answers = await _in_groups(rig, (_pulled(rig, lease, state.name, *one) for one in asked))
        for (trigger, role), answer in zip(asked, answers, strict=True):
            assert isinstance(answer, Refused | LeaseLost), (state.name, trigger, role, answer)
            if isinstance(answer, Refused):
                assert job_id in str(answer)
                assert state.name in str(answer)
                assert role.value in str(answer)
        assert await rig.snapshot(job_id) == before


def _declared(lifecycle: Lifecycle) -> Iterator[tuple[Transition, Role]]:
    for transition in filter(is_anybodys, lifecycle.transitions):
        for role in sorted(transition.actors) if transition.source else ():
            yield transition, role


def _undeclared_steps(lifecycle: Lifecycle, state: State) -> Iterator[tuple[str, Role]]:
    for trigger, role in product(sorted({t.trigger for t in lifecycle.transitions}), Role):
        transition = lifecycle.pull(state.name, trigger)
        if transition is None or role not in transition.actors:
            yield trigger, role


async def _moves(rig: Rig, job_id: JobId, asked: Iterable[tuple[str, Role]]) -> list[Moved | NotMoved]:
    moves = (rig.move(job_id, target, by=actor(role), death=DEATH) for target, role in asked)
    answers = await _in_groups(rig, moves)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


async def _pulled(rig: Rig, lease: Lease, source: str, trigger: str, role: Role):
    step = Advance(lease=lease, source=source, trigger=trigger, death=DEATH)
    return (await rig.ledger.turn(Turn(actor=actor(role), advances=(step,)))).outcomes[0]


async def _in_groups(rig: Rig, calls) -> list:
    """Many at once, so that the ledger may gather them, and yet not all of them."""
    answers: list = []
    group: list = []
    for call in calls:
        group.append(call)
        if len(group) == AT_ONCE:
            answers += await asyncio.gather(*group, return_exceptions=True)
            group = []
    return [*answers, *await asyncio.gather(*group, return_exceptions=True)]


async def _forged(rig: Rig, job_id: JobId) -> Lease:
    """The lease somebody would forge who knows everything about the job; keys count from 1 in a fresh ledger."""
    job = await rig.job(job_id)
    newer_first = [one.job_id for one in (await rig.ledger.jobs(JobFilter(), limit=500)).jobs]
    number = len(newer_first) - newer_first.index(job_id)
    return Lease(key=JobKey(number), epoch=job.epoch, job_id=job_id, lifecycle=job.lifecycle)
