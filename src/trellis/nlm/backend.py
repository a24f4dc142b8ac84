"""The provider that asks the NLM backend of the instance, which has the provider and its key.

A process with this provider needs no key of a model on its host. It shows the backend a credential of its own.
"""

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Annotated, Any

import pydantic

from trellis.engine import tracing
from trellis.engine.errors import KeyUnusable
from trellis.net.components import AnswerUnreadable, ComponentClient, problem_detail, problem_fields, read_shape
from trellis.net.guard import FetchedResponse
from trellis.net.retry_after import retry_after_s
from trellis.net.targets import OutgoingError
from trellis.nlm.open import ASKS_BACKEND
from trellis.nlm.provider import (
    PASSAGES_DEFAULT,
    Citation,
    NlmAnswer,
    NlmError,
    NlmGarbage,
    NlmInputInvalid,
    NlmQuestion,
    NlmRefused,
    NlmSource,
    NlmTimeout,
    NlmUnavailable,
    PreparedCorpus,
    ProviderHealth,
    check_fits,
    corpus,
)

NAME = ASKS_BACKEND
QUERY_PATH = "/query"
LIVE_PATH = "/system/live"
ANSWER_BYTES_MAX = 4_000_000
BODY_BYTES_MAX = 10 * 1024 * 1024
"""What the NLM backend takes."""
ANSWER_S = 600.0
"""Bound on one request. The deadline of a question is shorter and ends it first."""
DETAIL_CHARS_MAX = 300
WORTH_ANOTHER_TRY = frozenset({408, 425, 429, 503})
CREDENTIAL_STATUSES = frozenset({401, 403})
ASKED_IN_VAIN = frozenset({"NLM_UNAVAILABLE", "AGENT_TIMEOUT"})
"""Codes of a backend that asked its provider as often as a question may be asked (D7)."""


class NlmAskedInVain(NlmUnavailable):
    """NLM provider {provider} got no answer from its own provider: {reason}."""

    retries = False


class _QueryOut(pydantic.BaseModel):
    """The answer of POST /query."""

    answer: str
    citations: tuple[Citation, ...]
    flags: tuple[Annotated[str, pydantic.Field(max_length=1_000)], ...]
    confident: bool


class BackendProvider:
    """Asks the NLM backend at `url`. `token` returns a credential for each request."""

    name = NAME

    def __init__(self, url: str, token: Callable[[], str], tls: ssl.SSLContext | None = None) -> None:
        self._url, self._token = url, token
        self._client = ComponentClient(url=url, tls=tls, answer_bytes_max=ANSWER_BYTES_MAX, answer_s=ANSWER_S)

    async def prepare(self, sources: tuple[NlmSource, ...]) -> PreparedCorpus:
        """Validate the sources. They are sent with each question."""
        return corpus(sources)

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        check_fits(prepared, question)
        content = json.dumps(_body(prepared, question), ensure_ascii=False).encode()
        if len(content) > BODY_BYTES_MAX:
            detail = (
                f"the NLM backend takes {BODY_BYTES_MAX} bytes and they have {len(content)}; ask about fewer sources"
            )
            raise NlmInputInvalid(what="the sources", detail=detail)
        try:
            async with asyncio.timeout(max(0.0, deadline_s)):
                answer = await self._send(content)
        except TimeoutError:
            raise NlmTimeout(provider=self._named, reason=f"{deadline_s:g} s were not enough") from None
        if answer.status != 200:
            raise self._error(answer)
        return self._parsed(answer.body)

    async def health(self) -> ProviderHealth:
        try:
            answer = await self._client.send("GET", LIVE_PATH, headers={})
        except OutgoingError as error:
            return ProviderHealth(ok=False, detail=str(error))
        detail = f"the NLM backend at {self._url} answered {answer.status}"
        return ProviderHealth(ok=answer.status == 200, detail=detail)

    async def release(self, prepared: PreparedCorpus) -> None:
        """Nothing is kept between questions."""

    async def close(self) -> None:
        await self._client.close()

    @property
    def _named(self) -> str:
        """The provider's name in errors."""
        return f"{NAME} at {self._url}"

    async def _send(self, body: bytes) -> FetchedResponse:
        try:
            headers = {"authorization": f"Bearer {self._token()}", "content-type": "application/json"}
            with tracing.span("nlm_backend.query", {}, kind=tracing.CLIENT):
                return await self._client.send("POST", QUERY_PATH, headers=headers | tracing.headers(), content=body)
        except KeyUnusable as error:
            raise NlmRefused(provider=self._named, reason=str(error.data["reason"])) from error
        except OutgoingError as error:
            raise NlmUnavailable(provider=self._named, reason=str(error)) from error

    def _error(self, answer: FetchedResponse) -> NlmError:
        """The error of an answer that is no answer to the question."""
        reason = f"it answered {answer.status}{problem_detail(answer.body, DETAIL_CHARS_MAX)}"
        if problem_fields(answer.body).get("code") in ASKED_IN_VAIN:
            return NlmAskedInVain(provider=self._named, reason=reason, status=answer.status)
        if answer.status >= 500 or answer.status in WORTH_ANOTHER_TRY:
            wait_s = retry_after_s({"Retry-After": answer.headers.get("retry-after", "")})
            return NlmUnavailable(provider=self._named, reason=reason, retry_after_s=wait_s, status=answer.status)
        if answer.status in CREDENTIAL_STATUSES:
            reason += "; this process needs a token with the role orchestrator"
        return NlmRefused(provider=self._named, reason=reason)

    def _parsed(self, body: bytes) -> NlmAnswer:
        try:
            out = read_shape(_QueryOut, body)
        except AnswerUnreadable as error:
            raise NlmGarbage(provider=self._named, reason=str(error)) from None
        return NlmAnswer(text=out.answer, citations=out.citations, flags=out.flags, confident=out.confident)


def _body(prepared: PreparedCorpus, question: NlmQuestion) -> dict[str, Any]:
    """The body of POST /query. Defaults are left out: a backend of an older version refuses fields that it does not know."""
    body: dict[str, Any] = {
        "question": question.text,
        "sources": [{"ref": source.ref, "text": source.text} for source in prepared.sources],
        "agent": question.agent,
    }
    if question.language is not None:
        body["language"] = question.language.value
    if question.max_passages != PASSAGES_DEFAULT:
        body["max_passages"] = question.max_passages
    return body
