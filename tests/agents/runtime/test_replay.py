"""A run that dies anywhere goes on with what was paid for, and ends with the same bytes."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.runtime.print_run import digests
from tests.agents.runtime.stage import FINISH, Crash, Journal, Stage, agent, propose, script
from trellis.agents.errors import JournalDiffers
from trellis.agents.run_io import AgentOutput
from trellis.nlm.provider import NlmUnavailable

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = "Look after the beds.\n\n# Questions\n\n- How often is the north bed watered in summer?\n"
TURNS = (
    [("read-context", {}), ("read-memory", {"mode": "wide"})],
    [("notebooklm-query", {"question": "How often is the north bed watered in summer?"}), ("unheard-of", {"a": 1})],
    [propose(), propose(action="logic-update"), ("read-memory-deep", {"what": "decisions"})],
    [FINISH],
)


def offline_agent():
    return agent(body=QUESTIONS)


def scripted_agent():
    return agent(model="scripted:play")


def new_stage() -> Stage:
    return Stage(scripts={"play": script(*TURNS)})


@pytest.mark.requirement("PIPE-11")
@pytest.mark.parametrize("make_agent", [offline_agent, scripted_agent])
async def test_a_crash_after_any_journal_entry_pays_for_nothing_twice(make_agent):
    whole = new_stage()
    expected = (await whole.run(make_agent())).to_bytes()
    points = len(whole.journal.entries)
    assert points >= 9
    for point in range(1, points + 1):
        stage = new_stage()
        stage.journal.crash_after = point
        with pytest.raises(Crash):
            await stage.run(make_agent())
        assert len(stage.journal.entries) == point
        assert (await stage.run(make_agent())).to_bytes() == expected
        assert set(stage.journal.made.values()) == {1}, "something was asked twice"
        assert stage.asked == whole.asked
        assert stage.deep_reads == whole.deep_reads
        assert stage.journal.entries == whole.journal.entries


@pytest.mark.parametrize("make_agent", [offline_agent, scripted_agent])
async def test_a_crash_at_every_entry_of_one_run_still_ends_it(make_agent):
    whole, stage = new_stage(), new_stage()
    expected = await whole.run(make_agent())
    for _ in whole.journal.entries:
        stage.journal.crash_after = sum(stage.journal.made.values()) + 1
        with pytest.raises(Crash):
            await stage.run(make_agent())
    assert await stage.run(make_agent()) == expected
    assert set(stage.journal.made.values()) == {1}


@pytest.mark.parametrize("make_agent", [offline_agent, scripted_agent])
async def test_identical_runs_journal_the_same_bytes(make_agent):
    first, second = new_stage(), new_stage()
    assert await first.run(make_agent()) == await second.run(make_agent())
    assert first.journal.entries == second.journal.entries


async def test_a_replay_of_another_request_is_refused_and_asks_nothing():
    stage = new_stage()
    await stage.run(offline_agent())
    asked = list(stage.asked)
    stage.sources = {**stage.sources, "sources/new.md": "# New\n\nSomething else.\n"}
    with pytest.raises(JournalDiffers) as caught:
        await stage.run(offline_agent())
    assert caught.value.data == {"entry": "model/01"}
    assert not caught.value.retries
    assert stage.asked == asked


async def test_a_tool_call_is_not_answered_with_another_ones_entry():
    stage = new_stage()
    await stage.run(scripted_agent())
    entries = stage.journal.entries
    entries["tool/02-1"] = entries["tool/01-1"]
    with pytest.raises(JournalDiffers, match="tool/02-1"):
        await stage.run(scripted_agent())


async def test_first_journal_entry_of_a_name_wins_over_a_later_process():
    """The first bytes under a name win, also over what this process has just been told."""
    stage = Stage(scripts={"play": script("mine")})
    other = Stage(scripts={"play": script("theirs")})
    await other.run(scripted_agent())
    theirs = other.journal.entries["model/01"]

    class Slow(Journal):
        async def once(self, name, make, /):
            await make()
            return theirs

    stage.journal = Slow()
    assert (await stage.run(scripted_agent())).summary == "theirs"


async def test_ids_of_tool_calls_are_numbered_whatever_the_provider_calls_them():
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart

    def same_id(messages, _info):
        if len(messages) > 4:
            return ModelResponse(parts=[TextPart("Done.")])
        return ModelResponse(parts=[ToolCallPart("read-memory", {"mode": "basic"}, tool_call_id="../../call")] * 2)

    stage = Stage(scripts={"play": same_id})
    output = await stage.run(scripted_agent())
    tools = [name for name in stage.journal.entries if name.startswith("tool/")]
    assert tools == ["tool/01-1", "tool/01-2", "tool/02-1", "tool/02-2"]
    assert len(output.tool_calls) == 4


@pytest.mark.requirement("PIPE-11")
async def test_failed_grounded_answer_raises_and_the_next_attempt_resumes_there():
    stage = new_stage()
    works = stage.ask

    async def down(question, deadline_s):
        raise NlmUnavailable(provider="extractive", reason="it is down")

    stage.ask = down
    with pytest.raises(NlmUnavailable):
        await stage.run(scripted_agent())
    assert "tool/02-1" not in stage.journal.entries
    stage.ask = works
    assert (await stage.run(scripted_agent())).summary == "Done."
    assert {count for name, count in stage.journal.made.items() if name != "tool/02-1"} == {1}


async def test_a_cancelled_run_ends_at_once_and_can_be_taken_up():
    stage, begun = new_stage(), asyncio.Event()
    works = stage.ask

    async def hangs(question, deadline_s):
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    stage.ask = hangs
    task = asyncio.create_task(stage.run(scripted_agent()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stage.ask = works
    assert (await stage.run(scripted_agent())).summary == "Done."


@pytest.mark.parametrize("make_agent", [offline_agent, scripted_agent])
async def test_an_output_survives_its_json(make_agent):
    output = await new_stage().run(make_agent())
    assert output.proposals
    assert AgentOutput.from_dict(json.loads(output.to_bytes())) == output
    assert AgentOutput.from_dict(output.to_dict()).to_bytes() == output.to_bytes()


def test_replay_in_another_process_makes_the_same_model_requests():
    """A crash is taken up elsewhere: nothing that is hashed may depend on the process."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    program = [sys.executable, "-m", "tests.agents.runtime.print_run"]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    there = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert "model/04" in there
    assert there == asyncio.run(digests())
