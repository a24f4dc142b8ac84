"""What a step of a run is given and what it gives back. A step decides nothing about the run: it only does its work.

A step may be executed again after a crash. Whatever must not happen twice goes through `StepContext.once`, which keeps the
first answer in the ledger under a name, and gives it back ever after.
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
    """Results of the steps before, by name."""
    once: JournalOnce
    left_s: Callable[[], float]
    """Seconds until the run's absolute deadline or the step's, whichever is sooner."""
    correlation_id: str | None = None
    """What the run belongs to for whoever asked for it; what the step makes belongs to the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves: `result` goes into its file, `told` into the event that counts it."""

    result: Mapping[str, Any]
    told: Mapping[str, Any] = field(default_factory=dict[str, Any])
    output: bytes | None = None
    """The bytes of output/proposal.json, from the step that persists."""


class RunStep(Protocol):
    """One of the four."""

    async def __call__(self, context: StepContext, /) -> StepResult:
        """Do it, or raise a StepError."""
        ...


def result_of(step_file: bytes) -> dict[str, Any]:
    """The result inside the bytes of a step's file."""
    return json.loads(step_file)["result"]
