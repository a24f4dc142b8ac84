"""Spans and trace propagation through the OpenTelemetry API (OBS-6).

Invariants:
- A job stores the `traceparent` (W3C) of its submitter. Every attempt, on any worker, continues that trace.
- Without a configured SDK no span is made. An incoming trace is passed on unchanged, and work without one costs
  nothing.
- Incoming text that is no traceparent starts no trace, is not forwarded and is never stored.
- An exception of the tracing library is logged once, and the work continues.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from trellis.engine.jobs import Claimed
from trellis.engine.logs import log_of
from trellis.engine.records import Job
from trellis.engine.text import error_message

HEADER = "traceparent"
IN_ENV = "TRACEPARENT"
"""The environment variable of the trace, also used in the `env` of a request on the bus."""
CLIENT, SERVER, PRODUCER, CONSUMER = SpanKind.CLIENT, SpanKind.SERVER, SpanKind.PRODUCER, SpanKind.CONSUMER
"""Span kinds: an outgoing request, an incoming request, a job being submitted, a job being run."""
TEXT_CHARS_MAX = 500
LINKS_MAX = 100
COMPLAINTS_MAX = 16
"""How many different failures of the tracing library one process logs."""

Value: TypeAlias = str | bool | int | float
Values: TypeAlias = Mapping[str, Value]
MadeT = TypeVar("MadeT")

_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]{0,400})?")
_tracer = api.get_tracer("trellis")  # follows whichever provider is set, now or later
_complaints: set[str] = set()
_log = log_of("trellis.tracing")


class Span:
    """One span. It begins and ends with its `with` block. Without an SDK it does nothing."""

    __slots__ = ()
    is_recorded = False
    """Whether anybody reads what is noted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def note(self, values: Values) -> None:
        """Add attributes."""

    def rename(self, name: str) -> None:
        """Change the span's name."""

    def fail(self, text: str) -> None:
        """Set the error status, without an exception."""


class _ForwardedSpan(Span):
    """Makes no span; the incoming trace, or none, is the current trace inside the block."""

    __slots__ = ("_parent", "_token")

    def __init__(self, parent: SpanContext | None) -> None:
        self._parent = parent

    def __enter__(self) -> Self:
        self._token = contexts.attach(_around(self._parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        contexts.detach(self._token)


class _RecordedSpan(Span):
    __slots__ = ("_span", "_token")
    is_recorded = True

    def __init__(self, span: api.Span) -> None:
        self._span = span

    def __enter__(self) -> Self:
        self._token = contexts.attach(set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        contexts.detach(self._token)
        if isinstance(error, asyncio.CancelledError):
            self.note({"trellis.cancelled": True})
        elif error is not None:
            self.note({"error.type": type(error).__name__})
            self.fail(f"{type(error).__name__}: {error_message(error)}")
        _guarded(self._span.end)

    def note(self, values: Values) -> None:
        _guarded(lambda: self._span.set_attributes(values))

    def rename(self, name: str) -> None:
        _guarded(lambda: self._span.update_name(name))

    def fail(self, text: str) -> None:
        _guarded(lambda: self._span.set_status(StatusCode.ERROR, text[:TEXT_CHARS_MAX]))


_NO_SPAN = Span()


# --- beginning spans -------------------------------------------------------------------------------------------------


def is_on() -> bool:
    """Whether a tracer provider is set. Callers skip finding the parent trace otherwise."""
    try:
        # The library's public function reads the environment each time, at ten times the cost.
        return api._TRACER_PROVIDER is not None  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    except AttributeError:
        return not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)


def span(name: str, values: Values | None = None, *, kind: SpanKind = SpanKind.INTERNAL) -> Span:
    """A child of the current span, or the root of a new trace."""
    if not is_on():
        return _NO_SPAN
    return _begun(name, values, kind, None, ())


def carried(
    trace: str | None,
    name: str,
    values: Values | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    besides: tuple[str | None, ...] = (),
) -> Span:
    """A span that continues a trace from elsewhere (a header, a stored job). Without one, the root of a new trace.

    `besides` are the traces of other work that this span also serves; it is linked to them.
    """
    if not is_on():
        return _passed_on(trace)
    links = [Link(parent) for one in besides[:LINKS_MAX] if (parent := _parent(one)) is not None]
    return _begun(name, values, kind, _around(_parent(trace)), links)


def attempt_span(claimed: Claimed, name: str, *, besides: tuple[str | None, ...] = ()) -> Span:
    """The span of one attempt of a job, in its submitter's trace."""
    if not is_on():
        return _passed_on(claimed.trace)
    return carried(claimed.trace, name, about(claimed), kind=CONSUMER, besides=besides)


def about(claimed: Claimed) -> dict[str, Value]:
    """The span attributes of an attempt."""
    return {
        "trellis.job_id": claimed.lease.job_id,
        "trellis.type": claimed.type,
        "trellis.lifecycle": claimed.lease.lifecycle,
        "trellis.attempt": claimed.attempt,
        "trellis.epoch": claimed.lease.epoch,
        "trellis.correlation_id": claimed.correlation_id,
    }


def of_job(job: Job) -> dict[str, Value]:
    """The span attributes of a job."""
    return {
        "trellis.job_id": job.job_id,
        "trellis.type": job.type,
        "trellis.lifecycle": job.lifecycle,
        "trellis.correlation_id": job.correlation_id,
    }


def note(values: Values) -> None:
    """Add attributes to the current span, if there is one."""
    current = api.get_current_span()
    if current.is_recording():
        _guarded(lambda: current.set_attributes(values))


# --- passing the trace on --------------------------------------------------------------------------------------------


def here() -> str | None:
    """The traceparent of the current span, as a new job stores it; None without a trace."""
    if (
        not contexts.get_current()
    ):  # as in most processes; the library's own function takes four times as long to see it
        return None
    current = api.get_current_span()
    if current is INVALID_SPAN:
        return None
    span_context = current.get_span_context()
    return (
        f"00-{span_context.trace_id:032x}-{span_context.span_id:016x}-{span_context.trace_flags:02x}"
        if span_context.is_valid
        else None
    )


def headers() -> dict[str, str]:
    """The header that propagates the trace with a request; empty without a trace."""
    trace = here()
    return {} if trace is None else {HEADER: trace}


def readable(text: str | None) -> str | None:
    """The text if it is a valid traceparent, else None."""
    return None if _parent(text) is None else text


def trace_id(trace: str | None) -> str | None:
    """The trace id of a traceparent; None if it is invalid."""
    parent = _parent(trace)
    return None if parent is None else f"{parent.trace_id:032x}"


# --- inside ----------------------------------------------------------------------------------------------------------


def _begun(
    name: str, values: Values | None, kind: SpanKind, around: Context | None, links: "tuple[()] | list[Link]"
) -> Span:
    started = _guarded(
        lambda: _tracer.start_span(name, context=around, kind=kind, attributes=values, links=links or None)
    )
    return _NO_SPAN if started is None else _RecordedSpan(started)


def _around(parent: SpanContext | None) -> Context:
    """A context with this parent alone, independent of the current one."""
    return Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())


def _passed_on(trace: str | None) -> Span:
    """The span when no SDK is configured: a no-op if there is neither an incoming nor a current trace."""
    parent = None if trace is None else _parent(trace)
    return _NO_SPAN if parent is None and not contexts.get_current() else _ForwardedSpan(parent)


def _parent(trace: str | None) -> SpanContext | None:
    """The parent span of a traceparent; None if it is invalid. Of a later version, only the known fields are read."""
    match = None if trace is None else _FORM.fullmatch(trace)
    if match is None or (match[5] is not None and match[1] == "00"):
        return None
    flags = TraceFlags(int(match[4], 16) & TraceFlags.SAMPLED)
    parent = SpanContext(int(match[2], 16), int(match[3], 16), is_remote=True, trace_flags=flags)
    return parent if parent.is_valid else None


def _guarded(call: Callable[[], MadeT]) -> MadeT | None:
    """Call the tracing library. Returns None if it raises: its failures must not affect the work."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever it raises, the work must not notice
        what = f"{type(error).__name__}: {error}"[:TEXT_CHARS_MAX]
        if what not in _complaints and len(_complaints) < COMPLAINTS_MAX:
            _complaints.add(what)
            _log.warning("tracing_failed", error=what)
        return None
