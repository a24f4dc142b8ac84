"""Counters and durations of one NLM backend. They are declared in `engine/metrics.py`, like all metrics."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from trellis.engine.metrics import (
    NLM_CALLBACKS,
    NLM_CIRCUIT_OPEN,
    NLM_HELD,
    NLM_JOBS,
    NLM_PROVIDER_CALLS,
    NLM_PROVIDER_SECONDS,
    NLM_STAGE_SECONDS,
    NLM_WAITING,
    ProcessMetrics,
    Sample,
    exposition,
)
from trellis.engine.records import QueueDepth
from trellis.lifecycles.nlm_job import NLM_JOB

TYPICAL_S_DEFAULT = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionDepth:
    """Number of waiting and running executions, over all gateways and processes of one ledger."""

    waiting: int = 0
    under_way: int = 0

    @classmethod
    def of(cls, queues: Iterable[QueueDepth]) -> "ExecutionDepth":
        ours = [one for one in queues if one.lifecycle == NLM_JOB.name]
        waiting = sum(one.ready + one.blocked + one.scheduled for one in ours)
        return cls(waiting=waiting, under_way=sum(one.held for one in ours))


@dataclass(slots=True)
class Metrics:
    """What this backend did since it started."""

    counted: ProcessMetrics = field(default_factory=ProcessMetrics)
    _ended: int = 0
    _ended_s: float = 0.0

    def job_ended(self, outcome: str, seconds: float) -> None:
        """Counts an ended execution: `DONE` or the fault's code, and the `seconds` of this drive."""
        self.counted.count(NLM_JOBS, 1, outcome)
        self._ended += 1
        self._ended_s += seconds

    def provider_asked(self, result: str, seconds: float) -> None:
        """Counts one call of the provider."""
        self.counted.count(NLM_PROVIDER_CALLS, 1, result)
        self.counted.observe(NLM_PROVIDER_SECONDS, seconds)

    def delivery_tried(self, result: str) -> None:
        """Counts one try to send a callback."""
        self.counted.count(NLM_CALLBACKS, 1, result)

    def stage_took(self, stage: str, seconds: float) -> None:
        """Records the duration of a finished stage."""
        self.counted.observe(NLM_STAGE_SECONDS, seconds, stage)

    @property
    def typical_s(self) -> float:
        """The average duration of an execution."""
        return self._ended_s / self._ended if self._ended else TYPICAL_S_DEFAULT

    def text(self, depth: ExecutionDepth, circuit: str) -> bytes:
        """What was counted here, and the current queue, in Prometheus' text format.

        Those of its process name job types of everybody, and this address asks for no token.
        """
        now = [
            Sample(NLM_WAITING, (), depth.waiting),
            Sample(NLM_HELD, (), depth.under_way),
            Sample(NLM_CIRCUIT_OPEN, (), int(circuit != "closed")),
        ]
        return exposition([*self.counted.samples(), *now])
