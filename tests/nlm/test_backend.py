"""The provider that asks the NLM backend: what it sends, and what the backend's answers mean."""

import json
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.nlm.endpoint import Endpoint, running_endpoint
from trellis.engine.errors import KeyUnusable, SettingsInvalid
from trellis.nlm.backend import BackendProvider, NlmAskedInVain
from trellis.nlm.provider import (
    Citation,
    Language,
    NlmAnswer,
    NlmError,
    NlmGarbage,
    NlmInputInvalid,
    NlmQuestion,
    NlmRefused,
    NlmSource,
    NlmTimeout,
    NlmUnavailable,
)

SOURCES = (NlmSource("label.md", "Made by Anna Koval in 1887."),)
QUESTION = NlmQuestion(text="Who made it?", sources=SOURCES, agent="archivist-violin")
SAID = {
    "answer": "Anna Koval.",
    "citations": [{"ref": "label.md", "excerpt": "Anna Koval", "start": 8, "end": 18}],
    "flags": ["sources_cut"],
    "confident": True,
}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with running_endpoint() as server:
        yield server


@pytest.fixture
async def provider(endpoint: Endpoint) -> AsyncIterator[BackendProvider]:
    opened = BackendProvider(endpoint.base_url, lambda: "token-1")
    yield opened
    await opened.close()


async def ask(provider: BackendProvider, deadline_s: float = 30.0) -> NlmAnswer:
    return await provider.query(await provider.prepare(SOURCES), QUESTION, deadline_s=deadline_s)


@pytest.mark.requirement("NLM-7")
async def test_question_goes_to_the_backend_with_its_sources_agent_and_token(endpoint, provider):
    endpoint.raw(200, json.dumps(SAID).encode())
    assert await ask(provider) == NlmAnswer(
        text="Anna Koval.",
        citations=(Citation("label.md", "Anna Koval", 8, 18),),
        flags=("sources_cut",),
        confident=True,
    )
    (request,) = endpoint.received
    assert (request.method, request.path) == ("POST", "/v1/query")
    assert request.headers["authorization"] == "Bearer token-1"
    assert request.body == {
        "question": "Who made it?",
        "sources": [{"ref": "label.md", "text": "Made by Anna Koval in 1887."}],
        "agent": "archivist-violin",
    }


@pytest.mark.requirement("NLM-7")
async def test_language_and_number_of_passages_go_to_the_backend_where_the_question_sets_them(endpoint, provider):
    endpoint.raw(200, json.dumps(SAID).encode())
    question = NlmQuestion(text="Who made it?", sources=SOURCES, language=Language.UKRAINIAN, max_passages=2)
    await provider.query(await provider.prepare(SOURCES), question, deadline_s=30.0)
    assert (endpoint.received[0].body["language"], endpoint.received[0].body["max_passages"]) == ("uk", 2)


@pytest.mark.requirement("D7")
@pytest.mark.parametrize(
    "status,body,error,retries,text",
    [
        (502, {"code": "NLM_UNAVAILABLE", "detail": "no model"}, NlmAskedInVain, False, "answered 502: no model"),
        (504, {"code": "AGENT_TIMEOUT", "detail": "too slow"}, NlmAskedInVain, False, "answered 504: too slow"),
        (503, {}, NlmUnavailable, True, "answered 503"),
        (500, {"code": "INTERNAL_ERROR", "detail": "oh"}, NlmUnavailable, True, "answered 500: oh"),
        (429, {"code": "RATE_LIMITED", "detail": "slowly"}, NlmUnavailable, True, "answered 429: slowly"),
        (403, {"detail": "no"}, NlmRefused, False, "needs a token with the role orchestrator"),
        (422, {"detail": "two sources have one name"}, NlmRefused, False, "two sources have one name"),
        (200, {"answer": 1}, NlmGarbage, True, "answer: Input should be a valid string"),
        (200, {**SAID, "citations": [{"ref": "a"}]}, NlmGarbage, True, "citations/0/excerpt"),
    ],
)
async def test_only_what_the_backend_did_not_try_itself_is_worth_another_try(
    endpoint, provider, status: int, body: object, error: type[NlmError], retries: bool, text: str
):
    endpoint.raw(status, json.dumps(body).encode(), Retry_After="7")
    with pytest.raises(error) as caught:
        await ask(provider)
    assert type(caught.value) is error
    assert caught.value.retries is retries
    assert text in str(caught.value)
    assert endpoint.base_url in str(caught.value)
    if error is NlmUnavailable:
        assert isinstance(caught.value, NlmUnavailable)
        assert caught.value.retry_after_s == 7.0


async def test_backend_that_is_away_slow_or_another_program_is_told_apart(endpoint, provider):
    endpoint.raw(200, b"<html>")
    with pytest.raises(NlmGarbage):
        await ask(provider)
    endpoint.hangs()
    with pytest.raises(NlmTimeout, match=r"0\.05 s were not enough"):
        await ask(provider, deadline_s=0.05)
    away = BackendProvider("http://127.0.0.1:9", lambda: "token-1")
    with pytest.raises(NlmUnavailable, match=r"127\.0\.0\.1:9"):
        await ask(away)
    assert not (await away.health()).ok
    await away.close()


async def test_sources_larger_than_the_backend_takes_are_refused_before_they_are_sent(endpoint, provider):
    large = tuple(NlmSource(f"{number}.md", "\u0800" * 1_000_000) for number in range(4))
    with pytest.raises(NlmInputInvalid, match="ask about fewer sources"):
        await provider.query(await provider.prepare(large), NlmQuestion(text="Who?", sources=large), deadline_s=30)
    assert endpoint.received == []


async def test_process_without_a_key_says_what_is_missing_and_asks_nothing(endpoint):
    def no_token() -> str:
        raise KeyUnusable(reason="there is no key")

    provider = BackendProvider(endpoint.base_url, no_token)
    with pytest.raises(NlmRefused, match="there is no key"):
        await ask(provider)
    assert endpoint.received == []
    await provider.close()


async def test_the_nlm_backend_itself_needs_another_provider():
    from trellis.app.nlm import open_settings_provider
    from trellis.app.settings import Settings
    from trellis.app.wiring import SystemClock

    settings = Settings.model_validate({"nlm": "backend"})
    with pytest.raises(SettingsInvalid, match="cannot ask itself"):
        open_settings_provider(settings, clock=SystemClock(), ledger=None)
