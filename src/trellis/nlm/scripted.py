"""A provider that follows a script, for tests and rehearsals: it fails exactly where the script says.

    {"steps": [
      {"status": 429, "retry_after_s": 2},
      {"status": 503},
      {"after_s": 60, "answer": {"answer": "late", "citations": []}},
      {"raw": "<html>not an answer</html>"},
      {"answer": {"answer": "…", "citations": [{"ref": "a.md", "excerpt": "…"}]}, "shape": "half"},
      {"answer": {"answer": "…", "citations": [{"ref": "a.md", "excerpt": "…"}]}, "shape": "twice"},
      {"extractive": true}
    ]}

Each question uses one step; the last step is repeated. Replies are parsed and verified by the same code as a real
model's.
"""

import json
from collections import deque
from enum import StrEnum
from pathlib import Path
from typing import Self

import pydantic

from trellis.engine.clock import Clock
from trellis.nlm.chat import ModelReply, error_of, read_reply
from trellis.nlm.citations import verify
from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.provider import (
    NlmAnswer,
    NlmQuestion,
    NlmSettingInvalid,
    NlmSource,
    NlmTimeout,
    PreparedCorpus,
    ProviderHealth,
    check_fits,
    corpus,
)

NAME = "scripted"
STEPS_MAX = 10_000
SCRIPT_BYTES_MAX = 5_000_000
ASKED_MAX = 1_000


class ReplyShape(StrEnum):
    """How much of an answer is sent."""

    WHOLE = "whole"
    HALF = "half"
    TWICE = "twice"


class ScriptStep(pydantic.BaseModel):
    """The response to one question: exactly one of `status`, `answer`, `raw` and `extractive`, after `after_s`."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    after_s: float = pydantic.Field(0.0, ge=0.0, le=86_400.0)
    status: int | None = pydantic.Field(None, ge=400, le=599)
    retry_after_s: float | None = pydantic.Field(None, ge=0.0)
    answer: ModelReply | None = None
    shape: ReplyShape = ReplyShape.WHOLE
    raw: str | None = None
    extractive: bool = False

    @pydantic.model_validator(mode="after")
    def _check_response(self) -> Self:
        if sum((self.status is not None, self.answer is not None, self.raw is not None, self.extractive)) != 1:
            raise ValueError("give exactly one of status, answer, raw and extractive")
        return self

    def content(self) -> str:
        """The text that the model sends."""
        if self.answer is None:
            return self.raw or ""
        whole = json.dumps(self.answer.model_dump(), ensure_ascii=False)
        return {ReplyShape.WHOLE: whole, ReplyShape.HALF: whole[: len(whole) // 2], ReplyShape.TWICE: whole + whole}[
            self.shape
        ]


class ProviderScript(pydantic.BaseModel):
    """The steps, in order."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    steps: tuple[ScriptStep, ...] = pydantic.Field(min_length=1, max_length=STEPS_MAX)


class ScriptedProvider:
    """Plays a script. `asked` holds the latest questions, for assertions in tests."""

    name = NAME

    def __init__(self, script: ProviderScript, *, clock: Clock) -> None:
        self.asked: deque[NlmQuestion] = deque(maxlen=ASKED_MAX)
        self._steps = script.steps
        self._at = 0
        self._clock = clock
        self._extractive = ExtractiveProvider()

    async def prepare(self, sources: tuple[NlmSource, ...]) -> PreparedCorpus:
        return corpus(sources)

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        check_fits(prepared, question)
        self.asked.append(question)
        step = self._steps[self._at]
        self._at = min(self._at + 1, len(self._steps) - 1)
        await self._clock.sleep(min(step.after_s, deadline_s))
        if step.after_s >= deadline_s:
            raise NlmTimeout(provider=NAME, reason=f"{deadline_s:g} s were not enough")
        if step.status is not None:
            raise error_of(step.status, "as the script says", provider=NAME, retry_after_s=step.retry_after_s)
        if step.extractive:
            return await self._extractive.query(prepared, question, deadline_s=deadline_s - step.after_s)
        return verify(read_reply(step.content(), question, provider=NAME, model=NAME), prepared.sources)

    async def health(self) -> ProviderHealth:
        """Healthy, unless the next step has an error status."""
        status = self._steps[self._at].status
        return ProviderHealth(
            ok=status is None, detail="plays a script" if status is None else f"HTTP {status} comes next"
        )

    async def release(self, prepared: PreparedCorpus) -> None:
        await self._extractive.release(prepared)

    async def close(self) -> None:
        await self._extractive.close()


def read_script(path: Path) -> ProviderScript:
    """Read the script in a file; raises NlmSettingInvalid."""
    setting = f"{NAME}:{path}"
    try:
        if path.stat().st_size > SCRIPT_BYTES_MAX:
            raise NlmSettingInvalid(setting=setting, detail=f"the file has more than {SCRIPT_BYTES_MAX} bytes")
        return ProviderScript.model_validate_json(path.read_bytes())
    except OSError as error:
        raise NlmSettingInvalid(setting=setting, detail=f"the file cannot be read ({error.strerror})") from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise NlmSettingInvalid(setting=setting, detail=f"{where or 'the file'}: {first['msg']}") from error
