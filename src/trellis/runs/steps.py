"""The interface of a run's steps: what a step receives and what it returns. A step does work and never changes the run.

A step may be executed again after a crash. An action that must not happen twice goes through `StepContext.once`. It
keeps the first answer in the ledger under a name, and returns that answer from then on.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from trellis.agents.run_inputs import JournalOnce
from trellis.documents.run_documents import RunRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """Everything a step may use."""

    run_id: str
    number: int
    name: str
    request: RunRequest
    before: Mapping[str, Mapping[str, Any]]
    """Results of the earlier steps, by step name."""
    once: JournalOnce
    left_s: Callable[[], float]
    """Seconds until the run's deadline or the step's, whichever is sooner."""
    correlation_id: str | None = None
    """The run's correlation id. Everything the step creates carries it too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step returns: `result` goes into its file, `told` into the event that counts the step."""

    result: Mapping[str, Any]
    told: Mapping[str, Any] = field(default_factory=dict[str, Any])
    output: bytes | None = None
    """The bytes of output/proposal.json, from the step `persist-results`."""


class RunStep(Protocol):
    """One of the four steps of a run."""

    async def __call__(self, context: StepContext, /) -> StepResult:
        """Execute the step, or raise a StepError."""
        ...


def result_of(step_file: bytes) -> dict[str, Any]:
    """The `result` field from the bytes of a step's file."""
    return json.loads(step_file)["result"]
