"""The provider for any server with OpenAI's chat completions API: OpenAI, vLLM, Ollama, llama.cpp and others.

The key is never shown: not in logs, errors or `repr`, even if the server repeats it. A response is read up to
`RESPONSE_BYTES_MAX` and only uncompressed. No redirect is followed. The deadline ends everything in progress. Sources
longer than the limit are reduced to the passages that fit the question best, and the answer has a flag that says so.
"""

import asyncio
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import pydantic

from trellis.net.retry_after import retry_after_s
from trellis.nlm.chat import error_of, messages, one_line, read_reply
from trellis.nlm.citations import verify
from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.provider import (
    AnswerFlag,
    NlmAnswer,
    NlmGarbage,
    NlmQuestion,
    NlmRefused,
    NlmSettingInvalid,
    NlmSource,
    NlmTimeout,
    NlmUnavailable,
    NlmUsage,
    PreparedCorpus,
    ProviderHealth,
    check_fits,
    corpus,
    no_answer,
)
from trellis.nlm.words import stems

NAME = "openai"
RESPONSE_BYTES_MAX = 2_000_000
ERROR_BYTES_MAX = 20_000
CONNECT_S = 10.0
HEALTH_S = 5.0
HEALTHY = (200, 404, 405, 501)
"""Statuses of a server that would answer questions. Some have no list of models."""
CONNECTIONS_MAX = 16
SOURCE_CHARS_DEFAULT = 80_000
"""About 20,000 tokens of English, a run's budget for sources."""
OUTPUT_TOKENS_DEFAULT = 2_000
PASSAGES_SHOWN_MAX = 400
_PART_JOINED = "\n\n"


@dataclass(frozen=True, kw_only=True)
class OpenAiOptions:
    """The server's address, the model and its limits."""

    base_url: str
    model: str
    key: pydantic.SecretStr | None = None
    source_chars_max: int = SOURCE_CHARS_DEFAULT
    output_tokens_max: int = OUTPUT_TOKENS_DEFAULT

    def __post_init__(self) -> None:
        try:
            url = httpx2.URL(self.base_url)
        except httpx2.InvalidURL:
            raise NlmSettingInvalid(setting=NAME, detail="its base URL is no address") from None
        if url.scheme not in {"http", "https"} or not url.host or url.userinfo or url.fragment:
            detail = "its base URL must look like https://host/v1, without a password and without `#`"
            raise NlmSettingInvalid(setting=NAME, detail=detail)
        if not self.model.strip():
            raise NlmSettingInvalid(setting=NAME, detail="name a model")
        if self.key is not None and not self._key_is_sendable():
            raise NlmSettingInvalid(setting=NAME, detail="its key must be one line of printable ASCII without spaces")

    def _key_is_sendable(self) -> bool:
        key = self.key.get_secret_value() if self.key else ""
        return bool(key) and key.isascii() and key.isprintable() and " " not in key


class OpenAiProvider:
    """Asks a model over HTTP, and keeps only citations that are found in the sources."""

    name = NAME

    def __init__(self, options: OpenAiOptions) -> None:
        self._options = options
        self._base_url = httpx2.URL(options.base_url)
        self._indexes = ExtractiveProvider()
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=CONNECT_S, pool=CONNECT_S),
            limits=httpx2.Limits(max_connections=CONNECTIONS_MAX),
            follow_redirects=False,
        )

    async def prepare(self, sources: tuple[NlmSource, ...]) -> PreparedCorpus:
        """Validate the sources. They are sent with each question."""
        prepared = corpus(sources)
        if self._too_long(prepared):
            await self._indexes.index(prepared)
        return prepared

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        check_fits(prepared, question)
        if not any(source.text.strip() for source in prepared.sources):
            return no_answer(question, model=self._options.model)
        try:
            async with asyncio.timeout(max(0.0, deadline_s)):
                shown = await self._shown(prepared, question)
                request = json.dumps(self._request(prepared, question, shown), ensure_ascii=False).encode()
                body = await self._send("POST", "/chat/completions", request)
        except TimeoutError:
            raise NlmTimeout(provider=NAME, reason=f"{deadline_s:g} s were not enough") from None
        answer = self._answer(body, question)
        if shown != prepared.sources:
            answer = replace(answer, flags=(*answer.flags, AnswerFlag.SOURCES_CUT.value))
        return verify(answer, prepared.sources)

    async def health(self) -> ProviderHealth:
        """Whether the server answers and accepts the key. It is asked for its models, a list that not every server has."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._send("GET", "/models", None, accepted=HEALTHY)
        except (NlmUnavailable, NlmRefused, NlmGarbage) as error:
            return ProviderHealth(ok=False, detail=str(error.data["reason"]))
        except TimeoutError:
            return ProviderHealth(ok=False, detail=f"no answer within {HEALTH_S:g} s")
        return ProviderHealth(ok=True, detail=f"{self._options.model} at {self._base_url.host}")

    async def release(self, prepared: PreparedCorpus) -> None:
        """Make the corpus's index the first to be dropped."""
        await self._indexes.release(prepared)

    async def close(self) -> None:
        await self._indexes.close()
        await self._client.aclose()

    def _too_long(self, prepared: PreparedCorpus) -> bool:
        return sum(len(source.text) for source in prepared.sources) > self._options.source_chars_max

    async def _shown(self, prepared: PreparedCorpus, question: NlmQuestion) -> tuple[NlmSource, ...]:
        """All sources; if they are too long, the passages that fit the question best, in their own order."""
        if not self._too_long(prepared):
            return prepared.sources
        index = await self._indexes.index(prepared)
        ranked = index.rank(stems(question.text), PASSAGES_SHOWN_MAX)
        entries = [best.entry for best in ranked] or index.entries[:PASSAGES_SHOWN_MAX]
        room, chosen = self._options.source_chars_max, dict[str, list[tuple[int, int]]]()
        for entry in entries:
            start, end = entry.passage.sentences[0].start, entry.passage.sentences[-1].end
            if end - start <= room:
                room -= end - start
                chosen.setdefault(entry.passage.ref, []).append((start, end))
        return tuple(
            NlmSource(
                source.ref, _PART_JOINED.join(source.text[start:end] for start, end in sorted(chosen[source.ref]))
            )
            for source in prepared.sources
            if source.ref in chosen
        )

    def _request(self, prepared: PreparedCorpus, question: NlmQuestion, shown: tuple[NlmSource, ...]) -> dict[str, Any]:
        return {
            "model": self._options.model,
            "messages": messages(prepared, question, shown),
            "temperature": 0,
            "max_tokens": self._options.output_tokens_max,
            "stream": False,
            "response_format": {"type": "json_object"},
        }

    async def _send(self, method: str, path: str, content: bytes | None, accepted: Collection[int] = (200,)) -> bytes:
        """The body of a response with one of these statuses; raises NlmUnavailable, NlmRefused, NlmGarbage."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._options.key is not None:
            headers["Authorization"] = f"Bearer {self._options.key.get_secret_value()}"
        # The query of the base URL, such as `?api-version=1`, goes with each request.
        url = self._base_url.copy_with(path=self._base_url.path.rstrip("/") + path)
        # `from None` below: the library's errors contain the request, and the request contains the key.
        try:
            async with self._client.stream(method, url, content=content, headers=headers) as response:
                if response.status_code not in accepted:
                    reason = self._scrubbed(_message(await _read(response, ERROR_BYTES_MAX, cut=True)))
                    after_s = retry_after_s(response.headers)
                    raise error_of(response.status_code, reason, provider=NAME, retry_after_s=after_s)
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise NlmGarbage(provider=NAME, reason="it is compressed, which was not asked for")
                return await _read(response, RESPONSE_BYTES_MAX)
        except httpx2.TimeoutException as error:
            raise NlmUnavailable(provider=NAME, reason=f"no connection in time ({type(error).__name__})") from None
        except httpx2.HTTPError as error:
            reason = one_line(self._scrubbed(f"{type(error).__name__}: {error}"))
            raise NlmUnavailable(provider=NAME, reason=reason) from None

    def _scrubbed(self, text: str) -> str:
        key = self._options.key.get_secret_value() if self._options.key else ""
        return text.replace(key, "[key]") if key else text

    def _answer(self, body: bytes, question: NlmQuestion) -> NlmAnswer:
        try:
            completion = _Completion.model_validate_json(body)
        except ValueError:
            raise NlmGarbage(provider=NAME, reason="it is no chat completion") from None
        choice = completion.choices[0]
        if choice.message.refusal or choice.finish_reason == "content_filter":
            raise NlmRefused(provider=NAME, reason=one_line(choice.message.refusal or "its content filter"))
        if choice.finish_reason == "length":
            raise NlmGarbage(provider=NAME, reason=f"cut off after {self._options.output_tokens_max} tokens")
        counted = completion.usage or _TokenCounts()
        usage = NlmUsage(input_tokens=counted.prompt_tokens, output_tokens=counted.completion_tokens)
        model = one_line(completion.model or self._options.model)
        return read_reply(choice.message.content or "", question, provider=NAME, model=model, usage=usage)


class _Message(pydantic.BaseModel):
    content: str | None = None
    refusal: str | None = None


class _CompletionChoice(pydantic.BaseModel):
    message: _Message
    finish_reason: str | None = None


class _TokenCounts(pydantic.BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(pydantic.BaseModel):
    """The fields of a chat completion that are used."""

    choices: list[_CompletionChoice] = pydantic.Field(min_length=1)
    model: str | None = None
    usage: _TokenCounts | None = None


class _ProblemDetail(pydantic.BaseModel):
    message: str


class _Problem(pydantic.BaseModel):
    """The fields of an error response that are used."""

    error: _ProblemDetail | str


async def _read(response: httpx2.Response, limit: int, *, cut: bool = False) -> bytes:
    """The body up to a limit. If it is longer, it is truncated (`cut`), or NlmGarbage is raised."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
            if cut:
                return bytes(body[:limit])
            raise NlmGarbage(provider=NAME, reason=f"it has more than {limit} bytes")
    return bytes(body)


def _message(body: bytes) -> str:
    """The server's error message, in OpenAI's form or its own."""
    text = body.decode("utf-8", "replace")
    try:
        problem = _Problem.model_validate_json(body)
    except ValueError:
        return text
    return problem.error if isinstance(problem.error, str) else problem.error.message
