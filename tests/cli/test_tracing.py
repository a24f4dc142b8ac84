"""Where the spans of a process go (OBS-6)."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry import trace as api

from trellis.cli.telemetry import _about, _is_asked_for, configure_tracing
from trellis.engine.errors import SettingsInvalid

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
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that takes whatever is sent."""
    taken: list[tuple[str, bytes]] = []

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
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
        [sys.executable, "-c", WORK],
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )


@pytest.mark.requirement("OBS-6")
def test_spans_go_where_the_environment_says_and_are_there_when_the_process_has_ended():
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
    assert _is_asked_for(variables) is asked


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
    assert ("service.name" in _about(variables)) is named
