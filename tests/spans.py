"""Spans as a test sees them: an SDK that keeps them in memory, for as long as the test wants one."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace as api
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
TRACE = f"00-{TRACE_ID}-{SPAN_ID}-01"
"""A caller's."""
_KEPT = InMemorySpanExporter()
_MANY = SynchronousMultiSpanProcessor()
_PROVIDER = TracerProvider(resource=Resource({}), shutdown_on_exit=False, active_span_processor=_MANY)
_PROVIDER.add_span_processor(SimpleSpanProcessor(_KEPT))


class Spans:
    """What was recorded so far."""

    def all(self) -> tuple[ReadableSpan, ...]:
        return _KEPT.get_finished_spans()

    def named(self, name: str) -> ReadableSpan:
        """The one of this name."""
        (found,) = [span for span in self.all() if span.name == name]
        return found

    def of(self, trace_id: str) -> list[ReadableSpan]:
        return [span for span in self.all() if id_of(span) == trace_id]


@contextmanager
def recorded() -> Iterator[Spans]:
    """With an SDK. A process can set one only once, and other tests want none: so it is put where that would put it."""
    _KEPT.clear()
    api._TRACER_PROVIDER = _PROVIDER
    try:
        yield Spans()
    finally:
        api._TRACER_PROVIDER = None


@contextmanager
def broken(processor: SpanProcessor) -> Iterator[Spans]:
    """With an SDK in which somebody's part fails."""
    before = _MANY._span_processors
    _MANY._span_processors = (processor, *before)
    try:
        with recorded() as spans:
            yield spans
    finally:
        _MANY._span_processors = before


def id_of(span: ReadableSpan) -> str:
    """The id of its trace."""
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}"


def parent_of(span: ReadableSpan) -> str | None:
    """The id of the span that it is a part of."""
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def span_id(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"{context.span_id:016x}"
