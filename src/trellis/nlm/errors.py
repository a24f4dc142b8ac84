"""Every error of the NLM part. The docstring is the message, the data sits on the exception, `retries` says who goes on.

NlmError
├── NlmInputInvalid         what the caller gave cannot be asked about; nothing was sent
├── NlmSettingInvalid       the provider cannot be opened as it is set
├── NlmUnavailable          the provider does not answer now: worth another try, after `retry_after_s` if it said so
│   └── NlmTimeout          the time for the question is over: 504 to whoever asked over HTTP (RUN-7)
├── NlmRefused              the provider says no, and would say it again
└── NlmGarbage              the provider answered, but not with an answer: worth another try
"""

from typing import ClassVar

from trellis.engine.errors import TrellisError


class NlmError(TrellisError):
    """{detail}."""

    code: ClassVar[str] = "NLM_UNAVAILABLE"
    retries: ClassVar[bool] = False
    """Whether the same question is worth another try (D7: the caller's tool tries, and no other layer)."""


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
        """Of the answer, where there was one over HTTP."""
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
