"""Errors of the NLM package. The docstring is the message; `retries` says whether the caller may retry.

NlmError
├── NlmInputInvalid         the input is invalid; nothing was sent
├── NlmSettingInvalid       the provider cannot be opened with these settings
├── NlmUnavailable          the provider does not answer now: retry, after `retry_after_s` if given
│   └── NlmTimeout          the time for the question is over: 504 over HTTP (RUN-7)
├── NlmRefused              the provider refuses the question, and would again
└── NlmGarbage              the provider's response is not an answer: retry
"""

from typing import ClassVar

from trellis.engine.errors import TrellisError


class NlmError(TrellisError):
    """{detail}."""

    code: ClassVar[str] = "NLM_UNAVAILABLE"
    retries: ClassVar[bool] = False
    """Whether the same question is worth a retry (D7: only the caller's tool retries)."""


class NlmInputInvalid(NlmError):
    """{what} cannot be taken: {detail}."""

    code = "VALIDATION_FAILED"


class NlmSettingInvalid(NlmError):
    """NLM provider {setting!r} cannot be opened: {detail}."""

    code = "VALIDATION_FAILED"


class NlmUnavailable(NlmError):
    """NLM provider {provider} does not answer: {reason}."""

    retries = True

    def __init__(
        self, *, provider: str, reason: str, retry_after_s: float | None = None, status: int | None = None
    ) -> None:
        self.retry_after_s = retry_after_s
        self.status = status
        """The HTTP status of the response, if there was one."""
        super().__init__(provider=provider, reason=reason, retry_after_s=retry_after_s)


class NlmTimeout(NlmUnavailable):
    """NLM provider {provider} did not answer in time: {reason}."""

    code = "AGENT_TIMEOUT"
    retries = False


class NlmRefused(NlmError):
    """NLM provider {provider} refused the question: {reason}. Check its address, model and key."""


class NlmGarbage(NlmError):
    """NLM provider {provider} sent no usable answer: {reason}."""

    retries = True
