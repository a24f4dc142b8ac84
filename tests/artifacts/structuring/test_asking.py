"""One question, asked once, and errors that say whether another execution is worth it."""

import asyncio
from typing import Any

import pytest

from tests.artifacts.structuring.tasks import VIOLIN, says, scripted, snapshot, task
from trellis.artifacts.content import JobType, StoredInvalid
from trellis.artifacts.drafts.task import StoredAnswer, StructuringPrompt, ask_provider, build_prompt
from trellis.engine.errors import PayloadInvalid
from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.provider import (
    AnswerFlag,
    Language,
    NlmAnswer,
    NlmError,
    NlmGarbage,
    NlmQuestion,
    NlmRefused,
    NlmTimeout,
    NlmUnavailable,
    PreparedCorpus,
)
from trellis.nlm.words import stems

PROMPT = build_prompt(task(JobType.RESEARCH, {"query": "At which relative humidity must TS-02 be kept?"}))
EXCERPT = ("sources/05-provenance.md", "it must be kept at a relative humidity of 60 to 65 percent at all times")
GOOD = says("At 60 to 65 percent.", EXCERPT)


async def test_the_provider_is_asked_exactly_once() -> None:
    provider = scripted(GOOD)
    answered = await ask_provider(provider, PROMPT, deadline_s=5.0)
    assert [question.text for question in provider.asked] == ["At which relative humidity must TS-02 be kept?"]
    assert answered.citations[0].excerpt == EXCERPT[1]
    assert StoredAnswer.read(answered.to_bytes()) == answered
    assert StructuringPrompt.read(PROMPT.to_bytes()) == PROMPT


@pytest.mark.parametrize(
    "step, error, retries",
    [
        ({"raw": "<html>busy</html>"}, NlmGarbage, True),
        ({"raw": ""}, NlmGarbage, True),
        (GOOD | {"shape": "half"}, NlmGarbage, True),
        (says("  "), NlmGarbage, True),
        ({"status": 429, "retry_after_s": 7}, NlmUnavailable, True),
        ({"status": 503}, NlmUnavailable, True),
        ({"status": 401}, NlmRefused, False),
        (GOOD | {"after_s": 9}, NlmTimeout, False),
    ],
)
async def test_invalid_answer_raises_an_error_that_states_whether_to_retry(
    step: dict[str, Any], error: type[NlmError], retries: bool
) -> None:
    provider = scripted(step)
    with pytest.raises(error) as caught:
        await ask_provider(provider, PROMPT, deadline_s=5.0)
    assert caught.value.retries is retries
    assert len(provider.asked) == 1
    if isinstance(caught.value, NlmUnavailable) and "429" in str(caught.value):
        assert caught.value.retry_after_s == 7.0


async def test_the_same_answer_twice_in_one_reply_counts_once() -> None:
    once = await ask_provider(scripted(GOOD), PROMPT, deadline_s=5.0)
    twice = await ask_provider(scripted(GOOD | {"shape": "twice"}), PROMPT, deadline_s=5.0)
    assert once == twice


async def test_without_time_nothing_is_asked() -> None:
    provider = scripted(GOOD)
    with pytest.raises(NlmTimeout):
        await ask_provider(provider, PROMPT, deadline_s=0.0)
    assert not provider.asked


class _Careless(ExtractiveProvider):
    """A plug-in that verifies nothing, says nothing, or never comes back."""

    def __init__(self, answer: NlmAnswer | None) -> None:
        super().__init__()
        self._answer = answer

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        if self._answer is None:
            await asyncio.Event().wait()
            raise AssertionError
        return self._answer


async def test_a_provider_that_breaks_its_promises_is_held_to_them() -> None:
    odd = NlmAnswer(text="Yes.", flags=("odd\0flag",), model="m\0" * 500)
    answered = await ask_provider(_Careless(odd), PROMPT, deadline_s=5.0)
    assert answered.citations == ()
    assert AnswerFlag.UNGROUNDED in answered.flags
    with pytest.raises(NlmGarbage):
        await ask_provider(_Careless(NlmAnswer(text="")), PROMPT, deadline_s=5.0)
    with pytest.raises(NlmTimeout):
        await ask_provider(_Careless(None), PROMPT, deadline_s=0.01)


def test_a_question_is_framed_by_stop_words_alone() -> None:
    brief = build_prompt(task(JobType.BRIEF, {"vision_text": "Two violins.", "entity_refs": ["ts-02"]}))
    assert stems(brief.question) == stems("TS-02 Two violins.")
    draft = build_prompt(task(JobType.PROPOSAL_PREPROCESS, {"proposal_draft": {"text": "Дві скрипки."}}))
    assert draft.language is Language.UKRAINIAN
    assert stems(draft.question) == stems("Дві скрипки.")


def test_invalid_payload_is_refused_before_the_provider_is_called() -> None:
    with pytest.raises(PayloadInvalid):
        build_prompt(task(JobType.RESEARCH, {"question": "?"}))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b"\xff", b'{"text": 1}'])
def test_bytes_that_are_no_answer_are_refused(body: bytes) -> None:
    with pytest.raises(StoredInvalid):
        StoredAnswer.read(body)


def test_only_the_named_sources_are_asked() -> None:
    payload = {"query": "x", "sources": ["sources/05-provenance.md"]}
    prompt = build_prompt(task(JobType.RESEARCH, payload, snapshot(VIOLIN)))
    assert [source.ref for source in prompt.sources] == ["sources/05-provenance.md"]
