"""Sends the metrics of a process over OTLP, if the standard OTEL_* variables of OpenTelemetry name a collector (OBS-5).

What is sent is the table that `/metrics` shows: the counters since the process began, and the gauges of this moment.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trellis.app.settings import Settings
from trellis.app.system import SystemClock
from trellis.cli.telemetry import EXPORT_S, is_asked_for, resource_of
from trellis.engine.clock import sleep_or_stop
from trellis.engine.errors import ExtraMissing, SettingsInvalid, TrellisError
from trellis.engine.extras import Extra, extra_needed
from trellis.engine.logs import log_of
from trellis.engine.metrics import Metric, MetricKind, Sample, process_metrics
from trellis.engine.outage_log import Failures
from trellis.http_server.health import ProcessHealth, health_listener

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData

INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
INTERVAL_MS_DEFAULT = 60_000

_log = log_of("trellis.metrics")


class CollectorRefused(TrellisError):
    """The collector did not take the metrics; look at its log, and at OTEL_EXPORTER_OTLP_ENDPOINT."""

    code = "UPSTREAM_UNAVAILABLE"


@asynccontextmanager
async def process_observed(settings: Settings, health: ProcessHealth) -> AsyncGenerator[str | None]:
    """Serve health and metrics of this process, and send its metrics, as the settings say; yields the address."""
    process_metrics.enabled = settings.metrics
    async with health_listener(settings.health_address, health) as address, metrics_exported(health):
        yield address


@asynccontextmanager
async def metrics_exported(health: ProcessHealth, environment: Mapping[str, str] = os.environ) -> AsyncGenerator[None]:
    """Send the metrics at every interval while the context is open, and once more at its end."""
    export = _exporter(environment)
    if export is None:
        yield
        return
    stop = asyncio.Event()
    sending = asyncio.get_running_loop().create_task(_send_until(stop, health, export))
    try:
        yield
    finally:
        stop.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(EXPORT_S):
                await sending


@dataclass(frozen=True, slots=True)
class _Export:
    send: Callable[["MetricsData"], Any]
    resource: Any
    interval_s: float


def _exporter(environment: Mapping[str, str]) -> _Export | None:
    if not is_asked_for("metrics", environment):
        return None
    try:
        with extra_needed(Extra.OTEL, "Sending metrics"):
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.resources import Resource
    except ExtraMissing as error:
        _log.warning("metrics_not_sent", reason=str(error))
        return None
    text = environment.get(INTERVAL) or str(INTERVAL_MS_DEFAULT)
    if not text.isdecimal() or int(text) < 1:
        raise SettingsInvalid(source=INTERVAL, detail=f"{text!r} is no number of milliseconds")
    exporter: Any = OTLPMetricExporter(timeout=EXPORT_S)
    return _Export(exporter.export, Resource.create(resource_of(environment)), int(text) / 1_000)


async def _send_until(stop: asyncio.Event, health: ProcessHealth, export: _Export) -> None:
    """A collector that does not answer is logged once, and its return too; counters lose nothing by it."""
    began, failures = time.time_ns(), Failures("metrics export", _log)
    last = False
    while not last:
        last = await sleep_or_stop(SystemClock(), stop, export.interval_s)
        now = asyncio.get_running_loop().time()
        try:
            data = otlp_metrics(await health.samples(), export.resource, began_ns=began, now_ns=time.time_ns())
            result = await asyncio.to_thread(export.send, data)
        except Exception as error:  # noqa: BLE001 - the exporter may raise anything, and the process goes on
            failures.failed(error, now=now)
            continue
        if result.name == "SUCCESS":
            failures.succeeded(now=now)
        else:
            failures.failed(CollectorRefused(), now=now)


def otlp_metrics(samples: Sequence[Sample], resource: Any, *, began_ns: int, now_ns: int) -> "MetricsData":
    """The samples in the data model of OpenTelemetry."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    by_metric: dict[Metric, list[Sample]] = {}
    for sample in samples:
        by_metric.setdefault(sample.metric, []).append(sample)
    metrics = [_otlp_metric(metric, each, began_ns, now_ns) for metric, each in by_metric.items()]
    scope = ScopeMetrics(scope=InstrumentationScope("trellis"), metrics=metrics, schema_url="")
    return MetricsData(resource_metrics=[ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])


def _otlp_metric(metric: Metric, samples: Sequence[Sample], began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Sum
    from opentelemetry.sdk.metrics.export import Metric as OtlpMetric

    cumulative = AggregationTemporality.CUMULATIVE
    points = [_point(metric, sample, began_ns, now_ns) for sample in samples]
    if metric.kind is MetricKind.HISTOGRAM:
        data: Any = Histogram(data_points=points, aggregation_temporality=cumulative)
    elif metric.kind is MetricKind.COUNTER:
        data = Sum(data_points=points, aggregation_temporality=cumulative, is_monotonic=True)
    else:
        data = Gauge(data_points=points)
    unit = "s" if metric.name.endswith("_seconds") else "1"
    return OtlpMetric(name=metric.name, description=metric.help, unit=unit, data=data)


def _point(metric: Metric, sample: Sample, began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint

    common: dict[str, Any] = {
        "attributes": dict(zip(metric.labels, sample.labels, strict=True)),
        "start_time_unix_nano": began_ns,
        "time_unix_nano": now_ns,
    }
    if metric.kind is not MetricKind.HISTOGRAM:
        return NumberDataPoint(value=sample.value, **common)
    unknown: dict[str, Any] = {"min": None, "max": None}
    return HistogramDataPoint(
        count=sum(sample.counts),
        sum=sample.value,
        bucket_counts=sample.counts,
        explicit_bounds=metric.buckets,
        **common,
        **unknown,
    )
