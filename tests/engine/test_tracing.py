"""Spans and the trace that is passed on, with an SDK and without one."""

import asyncio
import logging
from typing import Any

import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import StatusCode

from tests.spans import SPAN_ID, TRACE, TRACE_ID, broken, id_of, parent_of, recorded, span_id
from trellis.engine import tracing
from trellis.engine.jobs import Claimed, Epoch, JobId, JobKey, Lease

OTHER = f"00-{'a' * 32}-{'b' * 16}-00"


def claimed(trace: str | None) -> Claimed:
    return Claimed(
        lease=Lease(JobKey(1), Epoch(3), JobId("job-1"), "leased-job"),
        type="index",
        state="running",
        payload=b"null",
        attempt=2,
        generation=0,
        max_attempts=5,
        deaths=0,
        lease_s=30.0,
        heartbeat_s=10.0,
        correlation_id="order-7",
        trace=trace,
        parent_id=None,
        compensates=None,
        checkpoint=None,
        deadline_s=None,
    )


@pytest.mark.requirement("OBS-6")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        TRACE.upper(),
        f"{TRACE}-more",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
        f"00-{TRACE_ID}-{SPAN_ID}-0g",
        f"01-{TRACE_ID}-{SPAN_ID}-01-\N{SEEDLING}",
        "0" * 10_000,
    ],
)
def test_invalid_traceparent_is_ignored(text: str):
    assert tracing.readable(text) is None
    assert tracing.trace_id(text) is None
    with tracing.carried(text, "work"):
        assert tracing.here() is None
    with recorded() as spans:
        with tracing.carried(text, "work"):
            pass
        assert spans.named("work").parent is None


def test_a_later_version_is_read_as_far_as_it_is_known():
    text = f"cc-{TRACE_ID}-{SPAN_ID}-ff-what-comes-later"
    assert (tracing.readable(text), tracing.trace_id(text)) == (text, TRACE_ID)
    with tracing.carried(text, "work"):
        assert tracing.here() == TRACE


@pytest.mark.requirement("OBS-6")
def test_without_an_sdk_a_trace_is_passed_on_as_it_came():
    assert (tracing.here(), tracing.headers()) == (None, {})
    with tracing.carried(TRACE, "outer"):
        with tracing.span("inner") as span:
            span.note({"said": "to nobody"})
            span.rename("other")
            span.fail("not told")
            tracing.note({"said": "to nobody"})
            assert (tracing.here(), tracing.headers()) == (TRACE, {"traceparent": TRACE})
        with tracing.carried(OTHER, "somebody else's"):
            assert tracing.here() == OTHER
        with tracing.carried(None, "nobody's"):
            assert tracing.here() is None
        assert tracing.here() == TRACE
    assert tracing.here() is None


def test_without_an_sdk_and_a_trace_nothing_is_made():
    assert (
        tracing.span("a") is tracing.span("b") is tracing.carried(None, "c") is tracing.attempt_span(claimed(None), "d")
    )


@pytest.mark.requirement("OBS-6")
def test_with_an_sdk_spans_go_on_with_the_trace_that_came():
    with recorded() as spans:
        with tracing.attempt_span(claimed(TRACE), "drive"):
            with tracing.span("step", {"number": 1}):
                inside = tracing.here()
            tracing.note({"more": True})
        drive, step = spans.named("drive"), spans.named("step")
    assert (id_of(drive), parent_of(drive)) == (TRACE_ID, SPAN_ID)
    assert (id_of(step), parent_of(step)) == (TRACE_ID, span_id(drive))
    assert inside == f"00-{TRACE_ID}-{span_id(step)}-01"
    assert dict(step.attributes or {}) == {"number": 1}
    assert dict(drive.attributes or {}) == {
        "trellis.job_id": "job-1",
        "trellis.type": "index",
        "trellis.lifecycle": "leased-job",
        "trellis.attempt": 2,
        "trellis.epoch": 3,
        "trellis.correlation_id": "order-7",
        "more": True,
    }


def test_with_an_sdk_work_without_a_trace_begins_one():
    with recorded() as spans:
        with tracing.carried(TRACE, "around"), tracing.carried(None, "apart"):
            pass
        with tracing.span("not known yet") as span:
            span.rename("alone")
        assert spans.named("apart").parent is spans.named("alone").parent is None
        assert len({id_of(span) for span in spans.all()}) == 3


def test_trace_not_sampled_by_the_caller_is_not_recorded_and_stays_unsampled():
    with recorded() as spans:
        with tracing.carried(OTHER, "work"), tracing.span("part"):
            here = tracing.here() or ""
        assert spans.all() == ()
    assert here.startswith(f"00-{'a' * 32}-")
    assert here.endswith("-00")


def test_work_for_several_is_linked_to_each():
    with recorded() as spans:
        with tracing.attempt_span(claimed(TRACE), "batch", besides=(OTHER, None, "x")):
            pass
        (link,) = spans.named("batch").links
        assert f"{link.context.trace_id:032x}" == "a" * 32


def test_a_span_records_an_error_and_raises_it_and_a_cancellation_is_no_error():
    with recorded() as spans:
        with pytest.raises(ValueError, match="seven"), tracing.span("broken"):
            raise ValueError("seven " * 1_000)
        with pytest.raises(asyncio.CancelledError), tracing.span("cut"):
            raise asyncio.CancelledError
        failed, cut = spans.named("broken"), spans.named("cut")
    assert failed.status.status_code is StatusCode.ERROR
    assert len(failed.status.description or "") == tracing.TEXT_CHARS_MAX
    assert dict(failed.attributes or {}) == {"error.type": "ValueError"}
    assert (cut.status.status_code, dict(cut.attributes or {})) == (StatusCode.UNSET, {"trellis.cancelled": True})


class Failing(SpanProcessor):
    """A processor that fails where it is told to."""

    def __init__(self, where: str) -> None:
        self._where = where

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        if self._where == "start":
            raise RuntimeError("no span may begin")

    def on_end(self, span: ReadableSpan) -> None:
        if self._where == "end":
            raise RuntimeError("no span may end")


@pytest.mark.requirement("OBS-6")
@pytest.mark.parametrize("where", ["start", "end"])
def test_a_failing_tracing_library_is_logged_once_and_breaks_nothing(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracing, "_complaints", set[str]())
    done: list[int] = []
    with caplog.at_level(logging.WARNING, "trellis.tracing"), broken(Failing(where)):
        for n in range(3):
            with tracing.carried(TRACE, "work") as span:
                span.note({"n": n})
                done.append(n)
            assert tracing.here() is None
    assert done == [0, 1, 2]
    assert [record.getMessage().split()[0] for record in caplog.records] == ["tracing_failed"]


def test_logged_failures_of_the_tracing_library_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracing, "_complaints", {f"Error: {n}" for n in range(tracing.COMPLAINTS_MAX)})
    with broken(Failing("start")), tracing.span("work"):
        pass
    assert caplog.records == []


def test_a_provider_is_found_also_where_the_library_keeps_it_elsewhere(monkeypatch: pytest.MonkeyPatch):
    with recorded() as spans:
        provider = api.get_tracer_provider()
        monkeypatch.setattr(api, "get_tracer_provider", lambda: provider)
        with monkeypatch.context() as patched:
            patched.delattr(api, "_TRACER_PROVIDER")
            assert tracing.is_on()
            patched.setattr(api, "get_tracer_provider", api.ProxyTracerProvider)
            assert not tracing.is_on()
        assert spans.all() == ()


async def test_tasks_have_the_trace_of_who_began_them():
    async def inside() -> str | None:
        await asyncio.sleep(0)
        return tracing.here()

    with tracing.carried(TRACE, "work"):
        begun = asyncio.ensure_future(inside())
    assert (await begun, await asyncio.ensure_future(inside())) == (TRACE, None)
