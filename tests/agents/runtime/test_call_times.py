"""How long each model request and tool call of a run took, also after a crash (OBS-3)."""

import pytest

from tests.agents.runtime.stage import FINISH, Stage, propose
from trellis.engine.call_times import CallTimes
from trellis.nlm.provider import NlmAnswer, NlmQuestion, NlmUnavailable

pytestmark = pytest.mark.requirement("OBS-3")

TURNS = (
    [("notebooklm-query", {"question": "How often is the north bed watered in summer?"})],
    [("read-memory", {}), propose(target="sources/nobody.md")],
    [FINISH],
)
CALLS = [
    ("scripted:play", "model", 0, "ok"),
    ("notebooklm-query", "nlm", 2_500, "ok"),
    ("scripted:play", "model", 0, "ok"),
    ("read-memory", "memory", 0, "ok"),
    ("create-proposal", "tool", 0, "refused"),
    ("scripted:play", "model", 0, "ok"),
]


class SlowStage(Stage):
    """A stage whose NLM takes two and a half seconds for an answer."""

    async def ask(self, question: NlmQuestion, deadline_s: float) -> NlmAnswer:
        answer = await super().ask(question, deadline_s)
        self.clock.advance(2.5)
        return answer

    def listed(self) -> list[tuple[str, str, int, str]]:
        return [(one.name, one.kind.value, one.duration_ms, one.outcome.value) for one in self.times.calls]


async def test_every_call_is_listed_with_the_time_of_its_first_execution():
    stage = SlowStage()
    await stage.play(*TURNS)
    assert stage.listed() == CALLS
    await stage.play(*TURNS)
    assert stage.listed() == CALLS, "a retry in the same process lists nothing twice"
    stage.times = CallTimes(clock=stage.clock)
    await stage.play(*TURNS)
    assert (stage.listed(), len(stage.asked)) == (CALLS, 1), "another process has the times from the journal"


async def test_a_call_that_fails_is_listed_as_failed():
    class Broken(SlowStage):
        async def ask(self, question: NlmQuestion, deadline_s: float) -> NlmAnswer:
            self.clock.advance(1.0)
            raise NlmUnavailable(provider="test", reason="away")

    stage = Broken()
    with pytest.raises(NlmUnavailable):
        await stage.play(*TURNS)
    assert stage.listed() == [CALLS[0], ("notebooklm-query", "nlm", 1_000, "failed")]
