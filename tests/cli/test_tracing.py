"""Where the spans and metrics of a process go (OBS-5, OBS-6)."""

import asyncio
import gzip
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry import trace as api
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.servers.ready_python import ready_python
from trellis.cli import metrics_export
from trellis.cli.metrics_export import INTERVAL, metrics_exported
from trellis.cli.telemetry import configure_tracing, is_asked_for, resource_of
from trellis.engine.errors import SettingsInvalid
from trellis.engine.metrics import CLAIMED, HELD_SECONDS, WORK_BUCKETS_S, process_metrics
from trellis.http_server.health import ProcessHealth

WORK = """
from trellis.cli.telemetry import configure_tracing
from trellis.engine import tracing
configure_tracing()
configure_tracing()  # once is enough
with tracing.span("water the garden"):
    print(tracing.here())
"""
PATIENCE_S = 60.0


@contextmanager
def collector(arrived: threading.Semaphore | None = None) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that takes whatever is sent."""
    taken: list[tuple[str, bytes]] = []

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            if arrived is not None:
                arrived.release()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is called there
            pass

    server = HTTPServer(("127.0.0.1", 0), Take)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def ran(**variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [ready_python(), "-c", WORK],
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )


@pytest.mark.requirement("OBS-6")
def test_spans_are_exported_to_the_configured_collector_before_the_process_ends():
    with collector() as (url, taken):
        told = ran(OTEL_EXPORTER_OTLP_ENDPOINT=url).stdout
    ((path, body),) = taken
    assert path == "/v1/traces"
    assert b"water the garden" in body
    assert b"service.name" in body
    assert bytes.fromhex(told.split("-")[1]) in body


def test_missing_trace_collector_is_reported_and_the_process_ends_normally():
    with collector() as (url, _):
        pass
    ended = ran(OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert ended.stdout.startswith("00-")
    assert "export" in ended.stderr.lower()


@pytest.mark.parametrize(
    "variables, asked",
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, False),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_TRACES_EXPORTER": "otlp"}, False),
    ],
)
def test_tracing_is_asked_for_by_the_standard_variables(variables: dict[str, str], asked: bool):
    assert is_asked_for("traces", variables) is asked


def test_an_exporter_that_we_do_not_have_is_refused():
    with pytest.raises(SettingsInvalid, match="otlp or none"):
        configure_tracing({"OTEL_TRACES_EXPORTER": "zipkin"})


def test_a_setting_that_the_sdk_refuses_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    with pytest.raises(SettingsInvalid, match="max_queue_size"):
        configure_tracing({"OTEL_TRACES_EXPORTER": "otlp"})
    assert isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)


def test_without_the_sdk_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    configure_tracing({"OTEL_TRACES_EXPORTER": "otlp"})
    assert "pip install 'trellis-engine[otel]'" in caplog.text


@pytest.mark.parametrize(
    "variables, named",
    [
        ({}, True),
        ({"OTEL_SERVICE_NAME": "garden"}, False),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=garden"}, False),
    ],
)
def test_the_environment_may_name_the_service(variables: dict[str, str], named: bool):
    assert ("service.name" in resource_of(variables)) is named


@pytest.mark.requirement("OBS-5")
async def test_metrics_go_to_the_collector_at_every_interval_and_once_more_at_the_end(monkeypatch: pytest.MonkeyPatch):
    process_metrics.count(CLAIMED, 2, "sent-over-otlp")
    process_metrics.observe(HELD_SECONDS, 0.3, "sent-over-otlp")
    arrived = threading.Semaphore(0)
    with collector(arrived) as (url, taken):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        async with metrics_exported(ProcessHealth(), {"OTEL_EXPORTER_OTLP_ENDPOINT": url, INTERVAL: "20"}):
            for _ in range(2):
                assert await asyncio.to_thread(arrived.acquire, timeout=PATIENCE_S)
            before = len(taken)
            process_metrics.count(CLAIMED, 1, "counted-last")
        assert len(taken) > before
    assert {path for path, _ in taken} == {"/v1/metrics"}
    sent = ExportMetricsServiceRequest.FromString(gunzipped(taken[0][1]))
    (resource,) = sent.resource_metrics
    by_name = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    (claims,) = [p for p in by_name["trellis_claims"].sum.data_points if labels(p) == {"type": "sent-over-otlp"}]
    (held,) = [
        p
        for p in by_name["trellis_job_duration_seconds"].histogram.data_points
        if labels(p) == {"type": "sent-over-otlp"}
    ]
    assert (claims.as_int, held.count, held.sum) == (2, 1, 0.3)
    assert list(held.explicit_bounds) == list(WORK_BUCKETS_S)
    assert by_name["trellis_claims"].sum.is_monotonic
    assert "counted-last" in gunzipped(taken[-1][1]).decode("utf-8", "replace")


def labels(point: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in point.attributes}


def gunzipped(body: bytes) -> bytes:
    return gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body


async def test_a_collector_that_is_away_costs_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "trellis")
    url = "http://127.0.0.1:9"  # a port that no test is given: another server may listen at one that was free
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setattr(metrics_export, "EXPORT_S", 0.2)
    async with metrics_exported(ProcessHealth(), {"OTEL_EXPORTER_OTLP_ENDPOINT": url}):
        pass
    assert any("metrics export" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("interval", ["0", "soon", "-5"])
async def test_an_interval_that_is_none_is_refused(interval: str):
    with pytest.raises(SettingsInvalid, match="no number of milliseconds"):
        async with metrics_exported(ProcessHealth(), {"OTEL_METRICS_EXPORTER": "otlp", INTERVAL: interval}):
            pass
