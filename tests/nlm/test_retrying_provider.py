"""How an agent's question is tried again, cut off, and kept from running beside another one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.nlm.conftest import LASTS, LEASES
from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.provider import (
    Citation,
    NlmAnswer,
    NlmError,
    NlmGarbage,
    NlmInputInvalid,
    NlmQuestion,
    NlmRefused,
    NlmTimeout,
    NlmUnavailable,
    PreparedCorpus,
)
from trellis.nlm.retrying_provider import RetryingProvider, wait_s
from trellis.nlm.scripted import ProviderScript, ScriptedProvider
from trellis.testing import FakeClock

GOOD = {"answer": {"answer": "Thirty seconds.", "citations": [{"ref": LEASES, "excerpt": LASTS}]}}
BUSY = {"status": 503}


class SkippingClock(FakeClock):
    """Sleeping moves this clock, so that a pause takes no time and is remembered."""

    def __init__(self) -> None:
        super().__init__(start_s=0.0)
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        # The deadline's own sleep is the long one: it stays asleep until the pauses have moved the clock past it.
        if seconds >= 40:
            await super().sleep(seconds)
        elif seconds > 0:
            self.pauses.append(seconds)
            self.advance(seconds)


def scripted(clock: FakeClock, *steps: dict[str, Any]) -> ScriptedProvider:
    return ScriptedProvider(ProviderScript.model_validate({"steps": steps}), clock=clock)


async def until_asleep(clock: FakeClock, sleepers: int) -> None:
    for _ in range(1_000):
        if clock.sleeping >= sleepers:
            return
        await asyncio.sleep(0)
    raise AssertionError("nobody fell asleep")


# -- trying again --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D7", "NLM-7")
async def test_an_unavailable_provider_is_asked_again_after_1_2_and_4_seconds(question):
    clock = SkippingClock()
    provider = scripted(clock, BUSY, {"raw": "garbage"}, GOOD | {"shape": "half"}, GOOD)
    answer = await RetryingProvider(provider, clock=clock).ask(question, agent="gardener", deadline_s=45)
    assert answer.citations[0].excerpt == LASTS
    assert clock.pauses == [1.0, 2.0, 4.0]


@pytest.mark.requirement("D7")
async def test_after_three_pauses_the_last_error_is_raised(question):
    clock = SkippingClock()
    provider = scripted(clock, {"status": 429}, BUSY)
    with pytest.raises(NlmUnavailable, match="HTTP 503") as caught:
        await RetryingProvider(provider, clock=clock).ask(question, agent="gardener", deadline_s=45)
    assert clock.pauses == [1.0, 2.0, 4.0]
    assert len(provider.asked) == 4
    assert caught.value.code == "NLM_UNAVAILABLE"


async def test_a_refusal_is_not_tried_again(question):
    clock = SkippingClock()
    provider = scripted(clock, {"status": 401}, GOOD)
    with pytest.raises(NlmRefused):
        await RetryingProvider(provider, clock=clock).ask(question, agent="gardener", deadline_s=45)
    assert clock.pauses == []


async def test_a_provider_that_asks_for_a_longer_pause_gets_it(question):
    clock = SkippingClock()
    provider = scripted(clock, {"status": 429, "retry_after_s": 9}, GOOD)
    await RetryingProvider(provider, clock=clock).ask(question, agent="gardener", deadline_s=45)
    assert clock.pauses == [9.0]


async def test_a_pause_that_ends_too_late_is_not_begun(question):
    clock = SkippingClock()
    provider = scripted(clock, {"status": 429, "retry_after_s": 60}, GOOD)
    with pytest.raises(NlmUnavailable, match="HTTP 429"):
        await RetryingProvider(provider, clock=clock).ask(question, agent="gardener", deadline_s=45)
    assert len(provider.asked) == 1


def test_the_decision_to_wait_is_a_table():
    busy = NlmUnavailable(provider="p", reason="r")
    later = NlmUnavailable(provider="p", reason="r", retry_after_s=3.0)
    assert wait_s(busy, 2.0, 10.0) == 2.0
    assert wait_s(later, 2.0, 10.0) == 3.0
    assert wait_s(NlmGarbage(provider="p", reason="r"), 1.0, 10.0) == 1.0
    for error, delay_s, left_s in (
        (busy, 2.0, 2.0),
        (NlmTimeout(provider="p", reason="r"), 1.0, 10.0),
        (NlmRefused(provider="p", reason="r"), 1.0, 10.0),
    ):
        assert wait_s(error, delay_s, left_s) is None


# -- the deadline --------------------------------------------------------------------------------------------------


class Deaf(ExtractiveProvider):
    """Breaks its promise: it never answers and never stops by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.stopped = asyncio.Event(), asyncio.Event()

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()
        raise AssertionError("nobody sets the event")


@pytest.mark.requirement("D7")
async def test_the_deadline_ends_a_provider_that_does_not_keep_it(question):
    clock, provider = FakeClock(), Deaf()
    asking = asyncio.ensure_future(
        RetryingProvider(provider, clock=clock).ask(question, agent="gardener", deadline_s=45)
    )
    await provider.started.wait()
    clock.advance(45)
    with pytest.raises(NlmTimeout, match="45 s were not enough"):
        await asking
    assert provider.stopped.is_set()


@pytest.mark.requirement("D7")
async def test_the_deadline_ends_a_pause_and_the_error_says_what_was_met(question):
    clock = FakeClock()
    provider = scripted(clock, BUSY, {"after_s": 60} | GOOD)
    asking = asyncio.ensure_future(
        RetryingProvider(provider, clock=clock).ask(question, agent="gardener", deadline_s=45)
    )
    await until_asleep(clock, 2)
    clock.advance(1)
    await until_asleep(clock, 2)
    clock.advance(44)
    with pytest.raises(NlmTimeout) as caught:
        await asking
    assert "were not enough" in str(caught.value)


async def test_a_slow_answer_that_comes_in_time_is_taken(question):
    clock = SkippingClock()
    provider = scripted(clock, {"after_s": 30} | GOOD)
    assert (await RetryingProvider(provider, clock=clock).ask(question, agent="gardener", deadline_s=45)).confident


@pytest.mark.parametrize("deadline_s", [0, -1, 3601, float("nan")])
async def test_a_deadline_out_of_bounds_is_refused(question, deadline_s):
    with pytest.raises(NlmInputInvalid):
        await RetryingProvider(ExtractiveProvider(), clock=FakeClock()).ask(
            question, agent="gardener", deadline_s=deadline_s
        )


async def test_cancelled_caller_cancels_its_provider_call(question):
    clock = FakeClock()
    provider = scripted(clock, {"after_s": 30} | GOOD, GOOD)
    asker = RetryingProvider(provider, clock=clock)
    gone = asyncio.ensure_future(asker.ask(question, agent="gardener", deadline_s=45))
    await until_asleep(clock, 2)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (await asker.ask(question, agent="gardener", deadline_s=45)).confident


# -- one at a time -------------------------------------------------------------------------------------------------


async def test_an_agent_asks_one_question_at_a_time_and_another_agent_does_not_wait_for_it(question):
    clock = FakeClock()
    provider = scripted(clock, {"after_s": 10} | GOOD)
    asker = RetryingProvider(provider, clock=clock)
    first = asyncio.ensure_future(asker.ask(question, agent="gardener", deadline_s=45))
    await until_asleep(clock, 2)
    second = asyncio.ensure_future(asker.ask(question, agent="gardener", deadline_s=45))
    await until_asleep(clock, 3)
    assert len(provider.asked) == 1
    other = asyncio.ensure_future(asker.ask(question, agent="librarian", deadline_s=45))
    await until_asleep(clock, 5)
    assert len(provider.asked) == 2
    clock.advance(10)
    await asyncio.gather(first, other)
    await until_asleep(clock, 2)
    assert len(provider.asked) == 3
    clock.advance(10)
    assert (await second).confident
    assert not asker._turns


async def test_the_wait_for_ones_turn_counts(question):
    clock = FakeClock()
    asker = RetryingProvider(scripted(clock, {"after_s": 40} | GOOD), clock=clock)
    first = asyncio.ensure_future(asker.ask(question, agent="gardener", deadline_s=45))
    await until_asleep(clock, 2)
    second = asyncio.ensure_future(asker.ask(question, agent="gardener", deadline_s=20))
    await until_asleep(clock, 3)
    clock.advance(20)
    with pytest.raises(NlmTimeout):
        await second
    clock.advance(20)
    assert (await first).confident


# -- verified, whoever answers -------------------------------------------------------------------------------------


class Liar(ExtractiveProvider):
    """A provider that verifies nothing."""

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        return NlmAnswer(
            text="Forty.", citations=(Citation(LEASES, "The lease lasts forty seconds.", 10, 40),), confident=True
        )


@pytest.mark.requirement("NLM-7")
async def test_an_unverified_answer_is_verified_before_an_agent_sees_it(question):
    answer = await RetryingProvider(Liar(), clock=FakeClock()).ask(question, agent="gardener", deadline_s=45)
    assert answer.citations == ()
    assert answer.flags == ("citation_not_found:leases.md", "ungrounded")
    assert not answer.confident


# -- the scripted provider -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, expected",
    [
        ({"status": 429, "retry_after_s": 2}, NlmUnavailable),
        ({"status": 503}, NlmUnavailable),
        ({"status": 400}, NlmRefused),
        ({"raw": "<html>"}, NlmGarbage),
        (GOOD | {"shape": "half"}, NlmGarbage),
        ({"after_s": 60} | GOOD, NlmTimeout),
    ],
)
async def test_a_script_fails_on_cue(question, step, expected):
    provider = scripted(SkippingClock(), step)
    prepared = await provider.prepare(question.sources)
    with pytest.raises(expected) as caught:
        await provider.query(prepared, question, deadline_s=30)
    assert isinstance(caught.value, NlmError)
    assert (await provider.health()).ok is ("status" not in step)


async def test_a_scripted_provider_answers_by_its_steps_and_repeats_the_last_one(question):
    clock = SkippingClock()
    provider = scripted(clock, GOOD, GOOD | {"shape": "twice"}, {"extractive": True})
    prepared = await provider.prepare(question.sources)
    answers = [await provider.query(prepared, question, deadline_s=30) for _ in range(4)]
    await provider.release(prepared)
    await provider.close()
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    assert answers[2].model == "extractive"
    assert all(LASTS in answer.citations[0].excerpt or "lease" in answer.text for answer in answers)


def test_a_scripts_example_is_a_script():
    from trellis.nlm import scripted as module

    text = (module.__doc__ or "").split("\n\n")[1]
    assert len(ProviderScript.model_validate(json.loads(text)).steps) == 7
    assert Path(module.__file__).is_file()
