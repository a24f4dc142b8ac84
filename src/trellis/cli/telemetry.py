"""Telemetry of a process: its log format, and where its spans are sent."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace

from trellis.app.settings import Settings
from trellis.app.system import process_name
from trellis.cli.output import Output, escape_terminal_codes, json_line
from trellis.engine import tracing
from trellis.engine.errors import ExtraMissing, SettingsInvalid
from trellis.engine.extras import Extra, extra_needed
from trellis.engine.logs import log_of

# The log of a process: lines for people or JSON for machines, always on standard error.

LOGGER = "trellis"


class _Lines(logging.Formatter):
    """One line per record, times in UTC."""

    converter = time.gmtime
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("{asctime} {levelname:<7} {name}: {message}", style="{")

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, plus a traceback; control and invisible characters are escaped."""
        return escape_terminal_codes(super().format(record))


class _Json(_Lines):
    """One JSON object per record; event fields keep their names."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        line = {
            **fields,
            "ts": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", record.getMessage()),
        }
        if (trace_id := tracing.trace_id(tracing.here())) is not None:
            line["trace_id"] = trace_id
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_line(line)


class _StandardError(logging.StreamHandler[Any]):
    """Writes to the current standard error, because an embedding program may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # not setStream, which flushes the previous stream: it may be closed
        super().emit(record)


def configure_logging(settings: Settings, *, printed: frozenset[str] = frozenset()) -> None:
    """Send Trellis's own log to standard error as configured; other loggers are left alone.

    `printed` are events that the command tells in its own words: in a log for people they are left out.
    """
    handler = _StandardError()
    if settings.log_format != "json":
        handler.addFilter(lambda record: getattr(record, "event", None) not in printed)
    handler.setFormatter(_Json() if settings.log_format == "json" else _Lines())
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(settings.log_level.upper())
    root = logging.getLogger()
    if settings.log_format == "json" and not root.handlers:  # library warnings must not break the format
        root.addHandler(handler)


def log_only(settings: Settings, out: Output) -> None:
    """Configure the log of a long-running process. With JSON logs, all output of the command goes to the log."""
    configure_logging(settings)
    if settings.log_format == "json":
        out.log_to(log_of("trellis.process"))


# Spans are sent as the standard OTEL_* variables of OpenTelemetry say, and not at all without them (OBS-6).

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
EXPORT_S = 3.0
"""Default timeout of a batch of spans, in seconds. An ending process waits this long for its last batch."""
OTLP, NONE = "otlp", "none"
SERVICE = "trellis"

_log = log_of("trellis.tracing")


def configure_tracing(environment: Mapping[str, str] = os.environ) -> None:
    """Send spans over OTLP if configured and no provider is set yet; raises SettingsInvalid."""
    if not is_asked_for("traces", environment) or not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    ):
        return
    try:
        with extra_needed(Extra.OTEL, "Tracing"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ExtraMissing as error:
        _log.warning("tracing_off", reason=str(error))
        return
    try:
        provider = TracerProvider(resource=Resource.create(resource_of(environment)))
        timeout_s = None if any(environment.get(name) for name in TIMEOUTS) else EXPORT_S
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout_s)))
    except ValueError as error:
        raise SettingsInvalid(source="OTEL_*", detail=str(error)) from error
    exporter_log = logging.getLogger("opentelemetry")
    exporter_log.handlers[:], exporter_log.propagate = logging.getLogger(LOGGER).handlers, False
    trace.set_tracer_provider(provider)


def is_asked_for(signal: str, environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for `traces` or `metrics` over OTLP; raises SettingsInvalid."""
    exporter = f"OTEL_{signal.upper()}_EXPORTER"
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    value = environment.get(exporter, "").strip().lower()
    if value not in {"", NONE, OTLP}:
        raise SettingsInvalid(source=exporter, detail=f"{signal} go over OTLP alone; set it to {OTLP} or {NONE}")
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", ENDPOINT)
    return value == OTLP or (not value and any(environment.get(name) for name in endpoints))


def resource_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Service name and instance id of this process, unless the environment sets the name."""
    named = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    own = {"service.instance.id": process_name(SERVICE)}
    return own if named else {"service.name": SERVICE, **own}
