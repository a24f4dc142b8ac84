"""Whatever a model does, a run ends: steps, tokens, tool calls, proposals and time are bounded."""

import asyncio

import pytest

from tests.agents.runtime.stage import FINISH, Stage, agent, propose, script
from trellis.agents.errors import ModelGarbage, OutOfTime, StepsExceeded, TokensExceeded, ToolCallsExceeded
from trellis.agents.refusals import RefusalCode
from trellis.agents.run_io import RunLimits


@pytest.mark.requirement("PIPE-14")
@pytest.mark.parametrize("steps, advice", [(1, "raise max_steps"), (20, "20 is the most that a file can allow")])
async def test_an_agent_stops_at_max_steps(steps, advice):
    stage = Stage()
    with pytest.raises(StepsExceeded) as caught:
        await stage.play([("read-context", {})], max_steps=str(steps))
    assert (caught.value.data["limit"], advice in str(caught.value)) == (steps, True)
    assert [name for name in stage.journal.entries if name.startswith("model/")] == [
        f"model/{number:02}" for number in range(1, steps + 1)
    ]


async def test_an_agent_that_stops_says_what_was_refused_and_which_drafts_are_lost():
    with pytest.raises(StepsExceeded) as caught:
        await Stage().play([propose()], [("read-context", {"refs": ["no.md"]})], max_steps="3")
    assert "the last refused call was read-context: no source 'no.md'" in str(caught.value)
    assert "what it drafted before is not proposed: propose-comment sources/beds.md." in str(caught.value)
    with pytest.raises(StepsExceeded, match=r"its call of finish was invalid: summary: Field required"):
        await Stage().play([("finish", {"sumary": "Done."})], max_steps="2")


async def test_the_last_step_may_finish():
    output = await Stage().play([("read-context", {})], [FINISH], max_steps="2")
    assert output.summary == "Done."


async def test_a_request_that_would_break_the_token_limit_is_not_made():
    stage = Stage(limits=RunLimits(tokens_max=50))
    with pytest.raises(TokensExceeded):
        await stage.play([FINISH])
    assert not stage.journal.entries


async def test_tokens_are_counted_over_the_whole_run():
    stage = Stage(limits=RunLimits(tokens_max=6_000))
    with pytest.raises(TokensExceeded) as caught:
        await stage.play([("read-context", {})], max_steps="20")
    assert caught.value.data["limit"] == 6_000
    assert 1 < len([name for name in stage.journal.entries if name.startswith("model/")]) < 20


async def test_a_model_that_calls_tools_without_end_is_stopped():
    stage = Stage(limits=RunLimits(tool_calls_max=10))
    with pytest.raises(ToolCallsExceeded):
        await stage.play([("read-memory", {})] * 6)
    assert len([name for name in stage.journal.entries if name.startswith("tool/")]) == 6


async def test_the_eleventh_proposal_is_refused_and_the_ten_stay():
    output = await Stage().play([propose(text=f"Number {n}.") for n in range(12)], [FINISH])
    assert len(output.proposals) == 10
    assert [one.code for one in output.refused] == [RefusalCode.TOO_MANY] * 2
    assert [call.ok for call in output.tool_calls] == [True] * 10 + [False] * 2


async def test_a_run_without_time_asks_nothing():
    stage = Stage(left_s=lambda: 0.0)
    with pytest.raises(OutOfTime) as caught:
        await stage.play([FINISH])
    assert caught.value.retries
    assert caught.value.code == "AGENT_TIMEOUT"
    assert not stage.journal.entries


async def test_a_silent_model_is_cut_by_the_time_that_is_left():
    async def silent(_messages, _info):
        await asyncio.Event().wait()

    stage = Stage(scripts={"silent": silent}, left_s=lambda: 0.05)
    with pytest.raises(OutOfTime):
        await stage.run(agent(model="scripted:silent"))
    assert not stage.journal.entries


async def test_an_answer_too_large_for_the_journal_is_not_kept():
    stage = Stage()
    with pytest.raises(ModelGarbage, match="bytes"):
        await stage.play("x" * (1 << 20))
    assert not stage.journal.entries


async def test_a_model_that_says_nothing_runs_out_of_steps():
    with pytest.raises(StepsExceeded):
        await Stage(scripts={"mute": script([])}).run(agent(model="scripted:mute"))


async def test_usage_is_the_sum_of_all_requests_also_for_a_model_that_does_not_count():
    from pydantic_ai.messages import ModelResponse, TextPart
    from pydantic_ai.usage import RequestUsage

    def counted(_messages, _info):
        return ModelResponse(parts=[TextPart("Done.")], usage=RequestUsage(input_tokens=11, output_tokens=7))

    output = await Stage(scripts={"counted": counted}).run(agent(model="scripted:counted"))
    assert (output.usage.input, output.usage.output) == (11, 7)
    assert (await Stage().run(agent())).usage.input > 100
