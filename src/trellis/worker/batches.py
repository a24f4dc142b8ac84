"""How the jobs of a batch have ended, as the handler of its completion job sees it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from trellis.engine.errors import OptionInvalid
from trellis.engine.job_batches import BatchMembers
from trellis.engine.jobs import JobId

ERROR_CHARS_OF_BATCH = 500
"""How much of the error of each job a completion job is told."""
RESULTS_READ = 100
"""How many results are read at once."""
RESULTS_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of results that one call returns."""
SUCCEEDED = "succeeded"


class MemberOutcome(NamedTuple):
    """How one job of a batch has ended."""

    job_id: JobId
    type: str
    state: str
    """`succeeded`, `failed`, `cancelled`, `dead_lettered`; `removed` once retention has removed the job."""
    error: str | None
    """Why it did not succeed, up to 500 characters."""

    @property
    def success(self) -> bool:
        """Whether it succeeded."""
        return self.state == SUCCEEDED


@dataclass(frozen=True)
class BatchOutcome:
    """How the jobs of a batch have ended, in the order of their submit."""

    jobs: tuple[MemberOutcome, ...]

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """How many jobs ended in each state."""
        return Counter(one.state for one in self.jobs)

    @cached_property
    def failed(self) -> tuple[MemberOutcome, ...]:
        """The jobs that ended without success."""
        return tuple(one for one in self.jobs if not one.success)

    @property
    def all_succeeded(self) -> bool:
        """Whether every job succeeded. True for an empty batch."""
        return not self.failed


@dataclass(frozen=True, slots=True)
class EndedBatch:
    """The jobs of a batch with their outcomes, as the journal of the completion job stores them."""

    members: BatchMembers
    outcomes: list[Any]

    def part(self, start: int, stop: int | None) -> tuple[MemberOutcome, ...]:
        """Some of the jobs, by their places from 0. Raises OptionInvalid."""
        for name, place in (("start", start), ("stop", 0 if stop is None else stop)):
            if place < 0:
                raise OptionInvalid(option=name, value=place, expected="a place from 0, in the order of the submit")
        return batch_outcome(self).jobs[start:stop]


def batch_outcome(ended: EndedBatch) -> BatchOutcome:
    """What a handler is told about its batch."""
    jobs = zip(ended.members.ids, ended.members.types, ended.outcomes, strict=True)
    return BatchOutcome(tuple(MemberOutcome(job_id, type_, *_state(outcome)) for job_id, type_, outcome in jobs))


def short_outcome(outcome: dict[str, Any]) -> dict[str, Any]:
    """The outcome of an ended job without its result, and with a short error."""
    if "failed" not in outcome:
        return {"ok": None}
    error: str | None = outcome["error"]
    return {**outcome, "error": None if error is None else error[:ERROR_CHARS_OF_BATCH]}


def _state(outcome: dict[str, Any]) -> tuple[str, str | None]:
    return (outcome["failed"], outcome["error"]) if "failed" in outcome else (SUCCEEDED, None)
