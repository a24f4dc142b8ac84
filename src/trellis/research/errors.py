"""Errors of queue jobs.

    TrellisError
    ├── RequestUnreadable     the stored request is invalid
    └── StageError            an execution failed; `code` is what the job's document shows
        ├── ContextTimeout    memory or object store did not answer in time
        ├── ContextUnavailable
        ├── RateLimited       status 429 of the NLM backend
        ├── BackendUnavailable    503, another 5xx, no connection, incomplete answer
        ├── BackendRefused        401, 403: our credential, key or clock is wrong
        ├── NlmAnswerInvalid  an invalid answer
        ├── NlmFailed         the backend reported a failure; `code` is its own
        ├── ExecutionForgotten the backend no longer knows the execution
        ├── CallbackMissing   no callback before the end of the execution
        ├── ArtifactMismatch  the staged artifact is not the announced one
        ├── ArtifactUnwritten the artifact could not be read or stored
        ├── StageHopeless     no other attempt would help
        └── DeadlinePassed    the job's own deadline has passed
    InputError
    ├── SettingNotForQueue    an option that the lifecycle of queue jobs decides
    └── SourceNotARef         an address instead of a ref of the agent's sources

`retries` of a class says whether another attempt is worthwhile; `retry_policy` says when. One layer retries each error
(D7): nothing here is retried inside a stage.
"""

from typing import ClassVar

from trellis.engine.errors import InputError, TrellisError


class RequestUnreadable(TrellisError):
    """The stored request of job {job_id} cannot be read: {problem}."""


class SettingNotForQueue(InputError):
    """{fields} cannot be set for a job named by 'job_type': its attempts, its turn and its start are those of the job queue; leave it out."""


class SourceNotARef(InputError):
    """payload.sources names the address {source!r}; name files of the agent instead, such as sources/notes.md."""


class SourceUnreadable(InputError):
    """Source {source!r} cannot be read: {why}."""


class StageError(TrellisError):
    """{detail}"""

    code: ClassVar[str] = "INTERNAL_ERROR"
    retries: ClassVar[bool] = True
    """Whether another attempt may succeed."""

    def __init_subclass__(cls) -> None:
        cls.__doc__ = cls.__doc__ or StageError.__doc__  # the message

    @property
    def shown_code(self) -> str:
        """The code that the job's document shows before the colon."""
        return self.code


class ContextTimeout(StageError):
    code = "CONTEXT_TIMEOUT"


class ContextUnavailable(StageError):
    code = "UPSTREAM_UNAVAILABLE"


class RateLimited(StageError):
    code = "RATE_LIMIT"


class BackendUnavailable(StageError):
    code = "NLM_UNAVAILABLE"


class BackendRefused(StageError):
    code = "NLM_REFUSED"


class NlmAnswerInvalid(StageError):
    code = "NLM_UNAVAILABLE"


class ExecutionForgotten(StageError):
    code = "NLM_UNAVAILABLE"


class NlmFailed(StageError):
    code = "NLM_UNAVAILABLE"

    @property
    def shown_code(self) -> str:
        """The backend's own code."""
        return str(self.data["said"])


class CallbackMissing(StageError):
    code = "MISSING_CALLBACK"


class ArtifactMismatch(StageError):
    code = "HASH_MISMATCH"


class ArtifactUnwritten(StageError):
    code = "ARTIFACT_WRITE_FAILED"


class StageHopeless(StageError):
    code = "VALIDATION_ERROR"
    retries = False


class DeadlinePassed(StageError):
    code = "DEADLINE_PASSED"
    retries = False
