"""The metrics of Trellis: one table of declarations, and what this process has counted (OBS-5).

A metric is declared once, below. `/metrics` of every role, the Grafana dashboard, the Prometheus rules, the OTLP export
and the reference page are made from that table.

Counting costs one addition under a lock, so that a worker that counts is as fast as one that does not. The Prometheus
library is loaded only when somebody reads the metrics. The values belong to this process and begin at zero with it;
what the ledger stores (queues, followers, workers) is read from the ledger at that moment.
"""

import functools
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import iscoroutinefunction
from threading import Lock
from typing import Any, TypeVar

from trellis.engine.errors import TrellisError
from trellis.engine.logs import log_of
from trellis.lifecycles.nlm_job import NLM_JOB

_log = log_of("trellis.metrics")

LABEL_SETS_MAX = 1_000
"""Most label sets of one metric. What exceeds it is counted under `OTHER`, so that job types cannot fill the memory."""
OTHER = "other"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CALL_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
NLM_BUCKETS_S = (0.05, 0.25, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
WORK_BUCKETS_S = (0.01, 0.05, 0.25, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)


class MetricKind(StrEnum):
    """What a metric's value means, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One declared metric, equal to itself alone, so that it is a fast key.

    A counter's samples have the suffix `_total`, which its name leaves out.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def sample(self) -> str:
        """The name under which Prometheus stores the value."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


def _counter(name: str, help_: str, *labels: str) -> Metric:
    return Metric(f"trellis_{name}", MetricKind.COUNTER, help_, labels)


def _gauge(name: str, help_: str, *labels: str) -> Metric:
    return Metric(f"trellis_{name}", MetricKind.GAUGE, help_, labels)


def _seconds(name: str, help_: str, *labels: str, buckets: tuple[float, ...] = CALL_BUCKETS_S) -> Metric:
    return Metric(f"trellis_{name}_seconds", MetricKind.HISTOGRAM, help_, labels, buckets)


# What this process did. `type` is a job type.

SUBMITTED = _counter("jobs_submitted", "Jobs that this process created.", "type")
CLAIMED = _counter("claims", "Jobs that this process claimed.", "type")
SETTLED = _counter("jobs_settled", "Held jobs that this process let go, by the step it made.", "type", "step")
RETRIES = _counter("retries", "Attempts that ended in an error and will be retried.", "type")
FAILURES = _counter("failures", "Jobs that a holder ended as failed or dead; cancelled ones are none.", "type")
DEAD_LETTERS = _counter("dead_letters", "Dead letters that a holder wrote, by reason code.", "type", "reason")
CLAIM_CONFLICTS = _counter("claim_conflicts", "Steps refused because another process holds the job by now.")
RENEWALS = _counter("lease_renewals", "Leases that were renewed.")
RENEWALS_REFUSED = _counter("lease_renewals_refused", "Renewals refused because the lease was lost.")
LEASE_EXPIRIES = _counter("lease_expiries", "Leases that the sweep of this process ended because nobody renewed them.")
SWEPT = _counter("swept", "What the sweep of this process did, by kind.", "kind")
REMOVED = _counter("removed", "Records that retention removed, by kind.", "kind")
HELD_SECONDS = _seconds("job_duration", "Time from claim or start to settle.", "type", buckets=WORK_BUCKETS_S)
LEDGER_SECONDS = _seconds("ledger_call", "Time of one call of the ledger.", "verb")
LEDGER_ERRORS = _counter("ledger_errors", "Calls of the ledger that failed, by error code.", "verb", "code")
STORE_SECONDS = _seconds("object_store_call", "Time of one call of the object store.", "verb")
STORE_ERRORS = _counter("object_store_errors", "Calls of the object store that failed, by error code.", "verb", "code")
HTTP_SECONDS = _seconds("http_request", "Time until a response of the gateway began.", "method", "status")
PASSES = _counter("service_passes", "Passes of background services, by result.", "service", "result")

STEP_CALL_SECONDS = _seconds(
    "step_call",
    "Time of one call of a run's step: a model request, a tool, a question to the NLM, the memory.",
    "kind",
    "name",
    "outcome",
    buckets=NLM_BUCKETS_S,
)

NLM_JOBS = _counter("nlm_jobs", "Executions that ended in this NLM backend, by outcome.", "outcome")
NLM_PROVIDER_CALLS = _counter("nlm_provider_calls", "Questions to the provider, by result.", "result")
NLM_PROVIDER_SECONDS = _seconds("nlm_provider", "Time of one question to the provider.", buckets=NLM_BUCKETS_S)
NLM_STAGE_SECONDS = _seconds("nlm_stage", "Time of one stage of an execution.", "stage", buckets=NLM_BUCKETS_S)
NLM_CALLBACKS = _counter("nlm_callbacks", "Tries to send a callback, by result.", "result")

# What is, at the moment of reading.

READY = _gauge("queue_ready", "Jobs that can be claimed now.", "type", "lifecycle")
SCHEDULED = _gauge("queue_scheduled", "Jobs that wait for a time.", "type", "lifecycle")
BLOCKED = _gauge("queue_blocked", "Jobs that wait for a slot of their concurrency key.", "type", "lifecycle")
HELD = _gauge("queue_held", "Jobs under a lease.", "type", "lifecycle")
AGE = _gauge("queue_age_seconds", "How long the oldest ready job has been ready.", "type", "lifecycle")
PAUSED = _gauge("queue_paused", "1 while claims of the type are paused.", "type", "lifecycle")
WORKERS = _gauge("workers", "Worker processes with a recent heartbeat.")
DLQ_COUNT = _gauge("dlq_count", "Dead letters that wait for a decision; counted up to 10,000.", "type", "lifecycle")
SWEEP_AGE = _gauge(
    "sweep_age_seconds", "How long ago the last sweep was recorded; up to 5 s is usual while nothing is due."
)
LEDGER_CALLS = _gauge(
    "ledger_calls_open", "Calls of this process that use a connection of its ledger or wait for one.", "connection"
)
FEED_LAG = _gauge("feed_lag_seconds", "Age of the first event that a subscriber has not read.", "follower")
ALERTS = _gauge("alerts", "Open alerts, by name.", "name")
LISTENERS = _gauge("sse_listeners", "Open event streams of this gateway.")
NLM_WAITING = _gauge("nlm_queue_waiting", "Executions that wait, over all NLM backends of the ledger.")
NLM_HELD = _gauge("nlm_queue_held", "Executions under way, over all NLM backends of the ledger.")
NLM_CIRCUIT_OPEN = _gauge("nlm_circuit_open", "1 while this NLM backend asks its provider nothing, because it failed.")
SOURCES_DOWN = _gauge("metrics_sources_down", "Sources of gauges that did not answer this reading.")

NLM_TYPE = "nlm"


def type_label(type_: str, lifecycle: str) -> str:
    """The label of a job type. The type of an NLM job has the address of its gateway in it, which no label shows."""
    return NLM_TYPE if lifecycle == NLM_JOB.name else type_


METRICS: tuple[Metric, ...] = tuple(one for one in list(globals().values()) if isinstance(one, Metric))
"""Every metric, in the order of declaration."""


@dataclass(slots=True)
class _Histogram:
    counts: list[int]
    sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of one metric for one label set; a histogram has counts per bucket and the sum instead."""

    metric: Metric
    labels: tuple[str, ...]
    value: float = 0.0
    counts: tuple[int, ...] = ()
    """How many values fell into each bucket, and above the last one."""


@dataclass(slots=True)
class ProcessMetrics:
    """The counters and histograms of one process. Safe to use from any thread."""

    enabled: bool = True
    _values: dict[tuple[Metric, tuple[str, ...]], float] = field(default_factory=dict[Any, float])
    _histograms: dict[tuple[Metric, tuple[str, ...]], _Histogram] = field(default_factory=dict[Any, _Histogram])
    _label_sets: dict[Metric, int] = field(default_factory=dict[Metric, int])
    _lock: Lock = field(default_factory=Lock)

    def count(self, metric: Metric, n: float = 1, *labels: str) -> None:
        """Add `n` to a counter."""
        if self.enabled and n:
            with self._lock:
                key = (metric, labels)
                try:
                    self._values[key] += n
                except KeyError:
                    key = self._admitted(key)
                    self._values[key] = self._values.get(key, 0) + n

    def observe(self, metric: Metric, value: float, *labels: str, n: int = 1) -> None:
        """Add a value to a histogram, `n` times."""
        if self.enabled:
            with self._lock:
                key = (metric, labels)
                histogram = self._histograms.get(key)
                if histogram is None:
                    key = self._admitted(key)
                    histogram = self._histograms.setdefault(key, _Histogram([0] * (len(metric.buckets) + 1)))
                histogram.counts[bisect_left(metric.buckets, value)] += n
                histogram.sum += value * n

    def _admitted(self, key: tuple[Metric, tuple[str, ...]]) -> tuple[Metric, tuple[str, ...]]:
        metric, labels = key
        assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}"
        seen = self._label_sets.get(metric, 0)
        if seen >= LABEL_SETS_MAX:
            return (metric, (OTHER,) * len(labels))
        self._label_sets[metric] = seen + 1
        return key

    def value(self, metric: Metric, *labels: str) -> float:
        """The current value of a counter, or how many values a histogram has."""
        with self._lock:
            histogram = self._histograms.get((metric, labels))
            return self._values.get((metric, labels), 0) if histogram is None else sum(histogram.counts)

    def samples(self) -> list[Sample]:
        """Everything that was counted, as of now."""
        with self._lock:
            counted = [Sample(metric, labels, value) for (metric, labels), value in self._values.items()]
            counted += [
                Sample(metric, labels, one.sum, tuple(one.counts)) for (metric, labels), one in self._histograms.items()
            ]
        return counted


process_metrics = ProcessMetrics()
"""The metrics of this process. Like a log there is one, because libraries and threads of a process share it."""

Counted = Callable[[Any, Sequence[Any], Any], None]
"""Counts what a call did: the object that was called, the positional arguments, the answer."""
ClassT = TypeVar("ClassT")


def measured_class(
    class_: type[ClassT], verbs: Iterable[str], seconds: Metric, errors: Metric, counted: Mapping[str, Counted]
) -> type[ClassT]:
    """Wrap the coroutine methods `verbs` of a class: their time, their errors, and what their answers say."""
    for verb in verbs:
        call = getattr(class_, verb)
        if iscoroutinefunction(call):
            setattr(class_, verb, _measured_call(verb, call, seconds, errors, counted.get(verb)))
    return class_


def _measured_call(
    verb: str, call: Callable[..., Awaitable[Any]], seconds: Metric, errors: Metric, counted: Counted | None
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(call)
    async def measured_call(self: Any, *args: Any, **options: Any) -> Any:
        if not process_metrics.enabled:
            return await call(self, *args, **options)
        began = time.perf_counter()
        try:
            answer = await call(self, *args, **options)
        except TrellisError as error:
            process_metrics.count(errors, 1, verb, error.code)
            raise
        process_metrics.observe(seconds, time.perf_counter() - began, verb)
        if counted is not None:
            try:
                counted(self, args, answer)
            except Exception:  # noqa: BLE001 - the call is done and committed: a wrong count must not undo its answer
                _log.exception("not_counted", verb=verb)
        return answer

    return measured_call


def exposition(samples: Iterable[Sample]) -> bytes:
    """The samples in Prometheus' text format. A metric without a sample is left out."""
    from prometheus_client import CollectorRegistry, generate_latest  # 30 ms that no worker should pay at its start

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(tuple(samples)))
    return generate_latest(registry)


@dataclass(frozen=True, slots=True)
class _Collector:
    """Gives the library one family for each metric that has a sample, in the order of declaration."""

    samples: tuple[Sample, ...]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        families: dict[Metric, Any] = {}
        sampled = {sample.metric for sample in self.samples}
        for metric in (one for one in METRICS if one in sampled):
            if metric.kind is MetricKind.COUNTER:
                families[metric] = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            elif metric.kind is MetricKind.GAUGE:
                families[metric] = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            else:
                families[metric] = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for sample in self.samples:
            family = families[sample.metric]
            if sample.metric.kind is MetricKind.HISTOGRAM:
                family.add_metric(sample.labels, _cumulated(sample), sample.value)
            else:
                family.add_metric(sample.labels, sample.value)
        yield from families.values()


def _cumulated(sample: Sample) -> list[tuple[str, float]]:
    """How many values are at most as large as each bound."""
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip((*sample.metric.buckets, None), sample.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else str(float(bound)), total))
    return buckets
