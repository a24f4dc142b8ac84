"""What can go wrong with queue jobs.

QueueError
├── RequestUnreadable     the stored request is none of ours
├── SettingNotForQueue    an option that a queue job's lifecycle decides
├── SourceNotARef         an address where a ref of the agent's sources belongs
└── StageError            an execution failed; `code` is what the job's document shows
    ├── ContextTimeout    memory or object store did not answer in time
    ├── ContextUnavailable
    ├── RateLimited       429 of the NLM backend
    ├── BackendUnavailable    503, another 5xx, no connection, half an answer
    ├── BackendRefused        401, 403: our credential, our key or our clock
    ├── NlmAnswerInvalid  an answer that is none
    ├── NlmFailed         the backend says that it failed; `code` is its own
    ├── ExecutionForgotten the backend has lost the job
    ├── CallbackMissing   nothing came before the execution's end
    ├── ArtifactMismatch  what was staged is not what was announced
    ├── ArtifactUnwritten the artifact could not be read or kept
    ├── StageFailed       anything else
    ├── StageHopeless     no other attempt would help
    └── DeadlinePassed    the job's own deadline is over

A class says whether another attempt is worth it (`retries`); `retrying` says when. One layer retries each error (D7): nothing here is
tried again inside a stage.
"""

from typing import ClassVar

from trellis.engine.errors import InputError, TrellisError


class QueueError(TrellisError):
    """{detail}"""


class RequestUnreadable(QueueError):
    """The stored request of job {job_id} cannot be read: {problem}."""


class SettingNotForQueue(InputError):
    """{fields} cannot be set for a job named by 'job_type': its attempts, its turn and its start are those of the job queue; leave it out."""


class SourceNotARef(InputError):
    """payload.sources names the address {source!r}; name files of the agent instead, such as sources/notes.md."""


class StageError(QueueError):
    """{detail}"""

    code: ClassVar[str] = "INTERNAL_ERROR"
    retries: ClassVar[bool] = True
    """Whether another attempt may end otherwise."""

    @property
    def shown_code(self) -> str:
        """What the job's document shows before the colon."""
        return self.code


class ContextTimeout(StageError):
    """{detail}"""

    code = "CONTEXT_TIMEOUT"


class ContextUnavailable(StageError):
    """{detail}"""

    code = "UPSTREAM_UNAVAILABLE"


class RateLimited(StageError):
    """{detail}"""

    code = "RATE_LIMIT"


class BackendUnavailable(StageError):
    """{detail}"""

    code = "NLM_UNAVAILABLE"


class BackendRefused(StageError):
    """{detail}"""

    code = "NLM_REFUSED"


class NlmAnswerInvalid(StageError):
    """{detail}"""

    code = "NLM_UNAVAILABLE"


class ExecutionForgotten(StageError):
    """{detail}"""

    code = "NLM_UNAVAILABLE"


class NlmFailed(StageError):
    """{detail}"""

    code = "NLM_UNAVAILABLE"

    @property
    def shown_code(self) -> str:
        """The backend's own word."""
        return str(self.data["said"])


class CallbackMissing(StageError):
    """{detail}"""

    code = "MISSING_CALLBACK"


class ArtifactMismatch(StageError):
    """{detail}"""

    code = "HASH_MISMATCH"


class ArtifactUnwritten(StageError):
    """{detail}"""

    code = "ARTIFACT_WRITE_FAILED"


class StageFailed(StageError):
    """{detail}"""


class StageHopeless(StageError):
    """{detail}"""

    code = "VALIDATION_ERROR"
    retries = False


class DeadlinePassed(StageError):
    """{detail}"""

    code = "DEADLINE_PASSED"
    retries = False
