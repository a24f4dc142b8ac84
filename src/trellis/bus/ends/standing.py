"""Where a job stands. A retry stands for the job that it does again."""

from dataclasses import dataclass

from trellis.bus.requests import JobRequest
from trellis.engine.records import Job, JobPlace

SUCCEEDED = "SUCCEEDED"
CANCELLED = "CANCELLED"
WAITING_STATES = frozenset({"PENDING", "SCHEDULED"})
RETRYABLE_ENDS = frozenset({"FAILED", "TIMEOUT", "DENIED"})
"""Ends after which a job may be done again under another id, by itself or by an operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveJob:
    """A job through its last retry: where it stands, and whether that is its end."""

    job: Job
    request: JobRequest
    to_be_retried: bool = False

    @property
    def open(self) -> bool:
        """Whether something will still come of it."""
        return self.job.place is not JobPlace.ENDED or self.to_be_retried

    @property
    def failed(self) -> bool:
        """Whether it came to a bad end for good."""
        return not self.open and self.job.state != SUCCEEDED

    @property
    def waiting(self) -> bool:
        """Whether no worker has it."""
        return self.job.state in WAITING_STATES

    @property
    def resting(self) -> bool:
        """Whether it waits for a time or a person, or for its turn."""
        return self.job.state == "SCHEDULED" and self.job.place is JobPlace.SCHEDULED
