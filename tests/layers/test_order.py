"""Which run goes first: one of an agent at a time, in the order they came, and no more in all than the limit."""

import pytest

from tests.layers.rig import RUNS_AT_ONCE, Rig


@pytest.mark.requirement("PIPE-3", "PIPE-2")
async def test_runs_of_one_agent_go_one_at_a_time_in_the_order_they_came(rig: Rig):
    hold, slug = rig.hold("load-context"), await rig.agent("gardener")
    runs = [await rig.trigger(slug) for _ in range(3)]
    await rig.start()
    await rig.start()
    for number, run_id in enumerate(runs, 1):
        await rig.until(lambda number=number: len(hold.begun) == number)
        await rig.settle()
        assert await rig.stands(*runs[number:]) == ["queued"] * (3 - number)
        hold.release(run_id)
        await rig.shows(run_id, "completed")
    assert hold.begun == runs


@pytest.mark.requirement("PIPE-3")
async def test_runs_that_wait_know_their_place(rig: Rig):
    hold = rig.hold("load-context")
    slug, other = await rig.agent("gardener"), await rig.agent("archivist")
    first, second, third = [await rig.trigger(slug) for _ in range(3)]
    alone = await rig.trigger(other)
    assert [(await rig.layer.run_state(run)).position for run in (first, second, third, alone)] == [0, 1, 2, 0]
    await rig.start()
    await rig.until(lambda: set(hold.begun) == {first, alone})
    assert [(await rig.layer.run_state(run)).position for run in (first, second, third, alone)] == [None, 0, 1, None]
    hold.release()
    await rig.shows(third, "completed")


@pytest.mark.requirement("PIPE-3", "D25", "RUN-7")
async def test_no_more_runs_than_the_global_limit_go_at_once_and_the_others_wait_without_an_error(rig: Rig):
    hold = rig.hold("load-context")
    runs = [await rig.trigger(await rig.agent(f"agent-{number}")) for number in range(RUNS_AT_ONCE + 2)]
    await rig.start()
    await rig.start()
    await rig.until(lambda: len(hold.begun) == RUNS_AT_ONCE)
    await rig.settle()
    assert len(hold.begun) == RUNS_AT_ONCE
    waiting = [run for run in runs if run not in hold.begun]
    assert await rig.stands(*waiting) == ["queued"] * 2
    assert [(await rig.status(run))["error"] for run in waiting] == [None, None]
    hold.release(hold.begun[0])
    await rig.until(lambda: len(hold.begun) == RUNS_AT_ONCE + 1)
    hold.release()
    for run_id in runs:
        await rig.shows(run_id, "completed")


@pytest.mark.requirement("PIPE-3")
async def test_an_agent_with_many_runs_keeps_no_other_waiting(rig: Rig):
    busy, quiet = await rig.agent("busy"), await rig.agent("quiet")
    hold = rig.hold("execute-agent")
    first, *_ = [await rig.trigger(busy) for _ in range(4)]
    late = await rig.trigger(quiet)
    await rig.start()
    await rig.until(lambda: set(hold.begun) == {first, late})
    hold.release()
    await rig.shows(late, "completed")
