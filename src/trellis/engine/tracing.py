"""Spans, and the trace that goes on from one part to the next (OBS-6), through the API of OpenTelemetry.

What holds:
- a job keeps the `traceparent` (W3C) of whoever submitted it; who takes the job up goes on with that trace, however often and wherever;
- where no SDK is configured no span is made: a trace that came from outside is passed on as it came, and work without one costs nothing;
- text from outside that is no traceparent begins nothing, is passed to nobody and never stored;
- whatever the tracing library raises is told once in the log, and the work goes on.
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
"""Where the trace stands among environment variables, and in the `env` of a request on the bus."""
CLIENT, SERVER, PRODUCER, CONSUMER = SpanKind.CLIENT, SpanKind.SERVER, SpanKind.PRODUCER, SpanKind.CONSUMER
"""What a span is of: a request that goes out, one that came in, a job that is submitted, one that is taken up."""
TEXT_CHARS_MAX = 500
LINKS_MAX = 100
COMPLAINTS_MAX = 16
"""How many different failures of the tracing library one process tells of."""

Value: TypeAlias = str | bool | int | float
Values: TypeAlias = Mapping[str, Value]
MadeT = TypeVar("MadeT")

_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]{0,400})?")
_tracer = api.get_tracer("trellis")  # follows whichever provider is set, now or later
_complaints: set[str] = set()
_log = log_of("trellis.tracing")


class Span:
    """One piece of work. It begins and ends with its `with` block; without an SDK it does nothing."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def note(self, values: Values) -> None:
        """Say more about it."""

    def rename(self, name: str) -> None:
        """What it turned out to be."""

    def fail(self, text: str) -> None:
        """It went wrong, and nothing is raised."""


class _ForwardedSpan(Span):
    """No span: the trace that came, or none, is what those inside go on with."""

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
    """A span that the SDK knows of."""

    __slots__ = ("_span", "_token")

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
    """Whether somebody set a provider: only then is it worth a question to find out which trace a piece of work goes on with."""
    try:
        # The library's public question reads the environment each time, at ten times the price.
        return api._TRACER_PROVIDER is not None  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    except AttributeError:
        return not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)


def span(name: str, values: Values | None = None, *, kind: SpanKind = SpanKind.INTERNAL) -> Span:
    """A part of what is under way here; where nothing is, the first of a new trace."""
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
    """What goes on with a trace that came from elsewhere: a header, a stored job. Without one, the first of a new trace.

    `besides` are the traces of others that the same work serves; it is linked to them.
    """
    if not is_on():
        return _passed_on(trace)
    links = [Link(found) for one in besides[:LINKS_MAX] if (found := _parent(one)) is not None]
    return _begun(name, values, kind, _around(_parent(trace)), links)


def attempt_span(claimed: Claimed, name: str, *, besides: tuple[str | None, ...] = ()) -> Span:
    """The work of one attempt of a job, in the trace of whoever submitted it."""
    if not is_on():
        return _passed_on(claimed.trace)
    return carried(claimed.trace, name, about(claimed), kind=CONSUMER, besides=besides)


def about(claimed: Claimed) -> dict[str, Value]:
    """What a span says of the attempt that it is."""
    return {
        "trellis.job_id": claimed.lease.job_id,
        "trellis.type": claimed.type,
        "trellis.lifecycle": claimed.lease.lifecycle,
        "trellis.attempt": claimed.attempt,
        "trellis.epoch": claimed.lease.epoch,
        "trellis.correlation_id": claimed.correlation_id,
    }


def of_job(job: Job) -> dict[str, Value]:
    """What a span says of the job that it is about."""
    return {
        "trellis.job_id": job.job_id,
        "trellis.type": job.type,
        "trellis.lifecycle": job.lifecycle,
        "trellis.correlation_id": job.correlation_id,
    }


def note(values: Values) -> None:
    """Say more about the span that is under way here, if there is one."""
    current = api.get_current_span()
    if current.is_recording():
        _guarded(lambda: current.set_attributes(values))


# --- passing the trace on --------------------------------------------------------------------------------------------


def here() -> str | None:
    """The traceparent for whatever is begun here: what a new job keeps; None where there is no trace."""
    current = api.get_current_span()
    if current is INVALID_SPAN:
        return None
    found = current.get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}" if found.is_valid else None


def headers() -> dict[str, str]:
    """The header that takes the trace along with a request; none where there is no trace."""
    trace = here()
    return {} if trace is None else {HEADER: trace}


def readable(text: str | None) -> str | None:
    """The same text when it is a traceparent, else None."""
    return None if _parent(text) is None else text


def trace_id(trace: str | None) -> str | None:
    """The id of a traceparent's trace, None when it is none."""
    found = _parent(trace)
    return None if found is None else f"{found.trace_id:032x}"


# --- inside ----------------------------------------------------------------------------------------------------------


def _begun(
    name: str, values: Values | None, kind: SpanKind, around: Context | None, links: "tuple[()] | list[Link]"
) -> Span:
    made = _guarded(lambda: _tracer.start_span(name, context=around, kind=kind, attributes=values, links=links or None))
    return _NO_SPAN if made is None else _RecordedSpan(made)


def _around(parent: SpanContext | None) -> Context:
    """A context with this parent alone: what else is under way here has nothing to do with it."""
    return Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())


def _passed_on(trace: str | None) -> Span:
    """What is done without an SDK: nothing, where no trace came and none is here."""
    parent = _parent(trace)
    return _NO_SPAN if parent is None and not contexts.get_current() else _ForwardedSpan(parent)


def _parent(trace: str | None) -> SpanContext | None:
    """The parent that a traceparent names, None when it names none. One of a later version is read as far as we know it."""
    found = None if trace is None else _FORM.fullmatch(trace)
    if found is None or (found[5] is not None and found[1] == "00"):
        return None
    flags = TraceFlags(int(found[4], 16) & TraceFlags.SAMPLED)
    parent = SpanContext(int(found[2], 16), int(found[3], 16), is_remote=True, trace_flags=flags)
    return parent if parent.is_valid else None


def _guarded(call: Callable[[], MadeT]) -> MadeT | None:
    """What the tracing library gives, None when it fails: its failures are not those of the work."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever it raises, the work must not notice
        what = f"{type(error).__name__}: {error}"[:TEXT_CHARS_MAX]
        if what not in _complaints and len(_complaints) < COMPLAINTS_MAX:
            _complaints.add(what)
            _log.warning("tracing_failed", error=what)
        return None
