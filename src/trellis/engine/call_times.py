"""How long each call of a step took: requests to a model, tool calls, questions to the NLM, reads of the memory (OBS-3).

The file of a run's step lists those of the try that succeeded. A call whose answer is journaled keeps its time in the
journal, beside the answer: a later try, or a driver that continues after a crash, lists the time that was measured then.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from trellis.engine.clock import Clock
from trellis.engine.metrics import STEP_CALL_SECONDS, process_metrics

CALLS_MAX = 200
"""Most calls that the file of a step lists. It says how many more there were."""
NAME_CHARS_MAX = 100


class CallKind(StrEnum):
    """What a step called."""

    MODEL = "model"
    TOOL = "tool"
    NLM = "nlm"
    MEMORY = "memory"
    STORE = "store"


class CallOutcome(StrEnum):
    """How a call ended. A refused call was answered with a refusal."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTime:
    """One call of a step."""

    name: str
    kind: CallKind
    duration_ms: int
    outcome: CallOutcome


@dataclass(slots=True)
class CallTimer:
    """The time of one call, set when the call has ended."""

    ms: int = 0


@dataclass(kw_only=True)
class CallTimes:
    """The calls of one try of a step, in the order in which they ended."""

    clock: Clock
    calls: list[CallTime] = field(default_factory=list[CallTime])
    left_out: int = 0
    _listed: set[str] = field(default_factory=set[str])

    @contextmanager
    def timed(self, name: str, kind: CallKind, *, journaled: bool = False) -> Generator[CallTimer]:
        """Time a call. One that raises is listed as failed.

        With `journaled`, an answered call is not listed yet: `answered` does so, from its journal entry.
        """
        timer, began = CallTimer(), self.clock.monotonic()
        outcome = CallOutcome.FAILED
        try:
            yield timer
            outcome = CallOutcome.OK
        finally:
            seconds = self.clock.monotonic() - began
            timer.ms = round(1000 * seconds)
            process_metrics.observe(STEP_CALL_SECONDS, seconds, kind, name[:NAME_CHARS_MAX], outcome)
            if outcome is CallOutcome.FAILED or not journaled:
                self._add(name, kind, timer.ms, outcome)

    def answered(self, entry: str, name: str, kind: CallKind, ms: int | None, outcome: CallOutcome) -> None:
        """List a call from its journal entry, once. `ms` is None in entries from before times were kept."""
        if ms is not None and entry not in self._listed:
            self._listed.add(entry)
            self._add(name, kind, ms, outcome)

    def _add(self, name: str, kind: CallKind, ms: int, outcome: CallOutcome) -> None:
        if len(self.calls) >= CALLS_MAX:
            self.left_out += 1
            return
        self.calls.append(CallTime(name=name[:NAME_CHARS_MAX], kind=kind, duration_ms=ms, outcome=outcome))

    def to_dict(self) -> dict[str, Any]:
        """The fields of a step's file."""
        listed = {"calls": [asdict(call) for call in self.calls]}
        return listed | ({"calls_left_out": self.left_out} if self.left_out else {})


def durations_ms(step_file: dict[str, Any], kind: CallKind) -> list[int]:
    """How long the answered calls of this kind took, from a step's file."""
    calls: list[dict[str, Any]] = step_file.get("calls", [])
    return [one["duration_ms"] for one in calls if one["kind"] == kind and one["outcome"] == CallOutcome.OK]
