"""Counters and durations of one backend process, in Prometheus' text format. Labels contain no text from callers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trellis.engine.records import QueueDepth
from trellis.lifecycles.nlm_job import HELD, NLM_JOB

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.05, 0.25, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TYPICAL_S_DEFAULT = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionDepth:
    """Number of waiting and running executions, over all gateways and processes of one ledger."""

    waiting: int = 0
    under_way: int = 0

    @classmethod
    def of(cls, queues: Iterable[QueueDepth]) -> "ExecutionDepth":
        ours = [one for one in queues if one.lifecycle == NLM_JOB.name]
        waiting = sum(one.ready + one.parked + one.resting for one in ours)
        return cls(waiting=waiting, under_way=sum(one.held for one in ours))


@dataclass(slots=True)
class Durations:
    """A histogram of durations."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BUCKETS_S))
    sum_s: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.sum_s += seconds
        self.count += 1
        for at, bound in enumerate(BUCKETS_S):
            self.counts[at] += seconds <= bound

    def lines(self, name: str, labels: str = "") -> list[str]:
        comma = f"{labels}," if labels else ""
        around = f"{{{labels}}}" if labels else ""
        bounds = [*zip(map("{:g}".format, BUCKETS_S), self.counts, strict=True), ("+Inf", self.count)]
        return [
            *(f'{name}_bucket{{{comma}le="{bound}"}} {count}' for bound, count in bounds),
            f"{name}_sum{around} {self.sum_s:.6f}",
            f"{name}_count{around} {self.count}",
        ]


@dataclass(slots=True)
class Metrics:
    """What this process did since it started."""

    _jobs: dict[str, int] = field(default_factory=dict[str, int])
    _provider: dict[str, int] = field(default_factory=dict[str, int])
    _deliveries: dict[str, int] = field(default_factory=dict[str, int])
    _asked: Durations = field(default_factory=Durations)
    _stages: Mapping[str, Durations] = field(default_factory=lambda: {stage: Durations() for stage in HELD})
    _whole: Durations = field(default_factory=Durations)

    def job_ended(self, outcome: str, seconds: float) -> None:
        """Counts an ended execution: `DONE` or the fault's code, and the `seconds` of this drive."""
        self._jobs[outcome] = self._jobs.get(outcome, 0) + 1
        self._whole.add(seconds)

    def provider_asked(self, result: str, seconds: float) -> None:
        self._provider[result] = self._provider.get(result, 0) + 1
        self._asked.add(seconds)

    def delivery_tried(self, result: str) -> None:
        self._deliveries[result] = self._deliveries.get(result, 0) + 1

    def stage_took(self, stage: str, seconds: float) -> None:
        self._stages[stage].add(seconds)

    @property
    def provider_calls(self) -> int:
        return sum(self._provider.values())

    @property
    def typical_s(self) -> float:
        """The average duration of an execution."""
        return self._whole.sum_s / self._whole.count if self._whole.count else TYPICAL_S_DEFAULT

    def text(self, depth: ExecutionDepth, circuit: str) -> str:
        lines = [
            *_counter("trellis_nlm_jobs_total", "Executions ended here, by outcome.", "outcome", self._jobs),
            *_counter("trellis_nlm_provider_calls_total", "Questions asked, by result.", "result", self._provider),
            *_counter("trellis_nlm_callbacks_total", "Callbacks sent, by result.", "result", self._deliveries),
            *_metric_header("trellis_nlm_provider_seconds", "How long the provider took.", "histogram"),
            *self._asked.lines("trellis_nlm_provider_seconds"),
            *_metric_header("trellis_nlm_stage_seconds", "How long each stage took.", "histogram"),
            *(
                line
                for stage, took in self._stages.items()
                for line in took.lines("trellis_nlm_stage_seconds", f'stage="{stage}"')
            ),
            *_gauge("trellis_nlm_queue_waiting", "Jobs that wait, over all processes.", depth.waiting),
            *_gauge("trellis_nlm_queue_held", "Jobs under way, over all processes.", depth.under_way),
            *_gauge("trellis_nlm_circuit_open", "1 while the provider is left alone.", int(circuit != "closed")),
        ]
        return "\n".join(lines) + "\n"


def _metric_header(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _counter(name: str, text: str, label: str, counts: Mapping[str, int]) -> list[str]:
    return [
        *_metric_header(name, text, "counter"),
        *(f'{name}{{{label}="{value}"}} {count}' for value, count in sorted(counts.items())),
    ]


def _gauge(name: str, text: str, value: int) -> list[str]:
    return [*_metric_header(name, text, "gauge"), f"{name} {value}"]
