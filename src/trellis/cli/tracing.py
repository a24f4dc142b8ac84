"""Where the spans of a process go: as the standard OTEL_* variables of OpenTelemetry say, and nowhere without them (OBS-6)."""

import logging
import os
from collections.abc import Mapping

from opentelemetry import trace

from trellis.cli.logs import LOGGER
from trellis.engine.errors import ExtraMissing, SettingsInvalid
from trellis.engine.extras import Extra, extra_needed
from trellis.engine.logs import log_of
from trellis.wiring import process_name

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
EXPORT_S = 3.0
"""How long a batch of spans may take, where the environment does not say; so long a process that ends waits for its last one."""
EXPORTER = "OTEL_TRACES_EXPORTER"
OTLP, NONE = "otlp", "none"
SERVICE = "trellis"

_log = log_of("trellis.tracing")


def configure_tracing(environment: Mapping[str, str] = os.environ) -> None:
    """Send spans over OTLP, if that is asked for and nobody has done so before; raises SettingsInvalid."""
    if not _is_asked_for(environment) or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
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
        provider = TracerProvider(resource=Resource.create(_about(environment)))
        timeout_s = None if any(environment.get(name) for name in TIMEOUTS) else EXPORT_S
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout_s)))
    except ValueError as error:
        raise SettingsInvalid(source="OTEL_*", detail=str(error)) from error
    told = logging.getLogger("opentelemetry")
    told.handlers[:], told.propagate = logging.getLogger(LOGGER).handlers, False
    trace.set_tracer_provider(provider)


def _is_asked_for(environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    asked = environment.get(EXPORTER, "").strip().lower()
    if asked not in {"", NONE, OTLP}:
        raise SettingsInvalid(source=EXPORTER, detail=f"spans go over OTLP alone; set it to {OTLP} or {NONE}")
    return asked == OTLP or (not asked and any(environment.get(name) for name in ENDPOINTS))


def _about(environment: Mapping[str, str]) -> dict[str, str]:
    """Who this process is, where the environment does not say."""
    named = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    own = {"service.instance.id": process_name(SERVICE)}
    return own if named else {"service.name": SERVICE, **own}
