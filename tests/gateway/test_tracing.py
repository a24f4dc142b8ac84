"""The span of a request, and the trace it goes on with (OBS-6)."""

import logging
from typing import Any

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from tests.gateway.conftest import VIOLIN, Gateway
from tests.spans import SPAN_ID, TRACE, TRACE_ID, id_of, parent_of, recorded, span_id
from trellis.cli.telemetry import _Json
from trellis.engine import tracing
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import JobId
from trellis.engine.records import JobFilter
from trellis.lifecycles import Role

JOB = {"type": "index.document", "payload": {"id": 7}}
pytestmark = pytest.mark.requirement("OBS-6")


async def stored_trace(gateway: Gateway, job_id: str) -> str | None:
    job = await gateway.instance.ledger.job(JobId(job_id))
    assert job is not None
    return job.trace


async def submitted(gateway: Gateway, headers: list[tuple[str, str]]) -> str:
    answer = await gateway.client(Role.OWNER).post("/jobs", json=JOB, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json()["job_id"]


async def test_a_request_goes_on_with_the_callers_trace(gateway: Gateway):
    with recorded() as spans:
        job_id = await submitted(gateway, [("Traceparent", TRACE), ("X-Correlation-ID", "order-7")])
        request, submit = spans.named("POST /jobs"), spans.named("job.submit")
    assert (id_of(request), parent_of(request), request.kind) == (TRACE_ID, SPAN_ID, SpanKind.SERVER)
    assert dict(request.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/jobs",
        "url.path": "/jobs",
        "http.response.status_code": 202,
        "trellis.correlation_id": "order-7",
    }
    assert dict(submit.attributes or {}) == {
        "trellis.job_id": job_id,
        "trellis.type": "index.document",
        "trellis.lifecycle": "leased-job",
        "trellis.correlation_id": "order-7",
    }
    assert await stored_trace(gateway, job_id) == f"00-{TRACE_ID}-{span_id(submit)}-01"


async def test_without_an_sdk_the_callers_trace_is_stored_as_it_came(gateway: Gateway):
    assert await stored_trace(gateway, await submitted(gateway, [("traceparent", TRACE)])) == TRACE
    assert await stored_trace(gateway, await submitted(gateway, [])) is None


@pytest.mark.parametrize(
    "sent",
    [["nonsense"], [""], [TRACE, TRACE], [TRACE.upper()], ["\x00\xff"], ["00-" + "0" * 60_000]],
    ids=["nonsense", "empty", "two", "capitals", "bytes", "long"],
)
async def test_invalid_trace_header_is_ignored_and_never_stored(gateway: Gateway, sent: list[str]):
    headers: Any = [(b"traceparent", text.encode("latin-1")) for text in sent]
    assert await stored_trace(gateway, await submitted(gateway, headers)) is None
    with recorded() as spans:
        job_id = await submitted(gateway, headers)
        assert spans.named("POST /jobs").parent is None
        begun = tracing.trace_id(await stored_trace(gateway, job_id))
        assert begun == id_of(spans.named("POST /jobs"))


async def test_events_have_the_trace_and_the_correlation_id_of_their_job(gateway: Gateway):
    job_id = await submitted(gateway, [("traceparent", TRACE), ("X-Correlation-ID", "order-7")])
    (event,) = (await gateway.client(Role.OWNER).get(f"/jobs/{job_id}/events")).json()["items"]
    assert (event["correlation_id"], event["payload"]["trace_id"]) == ("order-7", TRACE_ID)


async def test_span_names_are_routes_and_attributes_leave_out_the_query(gateway: Gateway):
    owner = gateway.client(Role.OWNER)
    with recorded() as spans:
        assert (await owner.get("/jobs/none-such", params={"ticket": "secret"})).status_code == 422
        assert (await owner.request("BREW", "/jobs")).status_code == 405
        assert (await owner.get("/" + "x" * 5_000)).status_code == 404
        names = [span.name for span in spans.all()]
        told = [str(dict(span.attributes or {})) for span in spans.all()]
        lengths = [len(str((span.attributes or {})["url.path"])) for span in spans.all()]
    assert (names[0], names[2]) == ("GET /jobs/{job_id}", "GET")
    assert names[1].startswith("HTTP")
    assert max(lengths) == 200
    assert not any("secret" in text for text in told)


async def test_the_span_of_a_server_error_has_status_error(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    async def down(*_: object, **__: object) -> None:
        raise LedgerUnavailable(reason="gone")

    monkeypatch.setattr(gateway.instance.ledger, "jobs", down)
    with recorded() as spans:
        answer = await gateway.client(Role.OWNER).get("/jobs")
        assert answer.status_code >= 500
        assert spans.named("GET /jobs").status.status_code is StatusCode.ERROR


async def test_runs_and_what_the_inbox_makes_keep_the_trace_they_came_with(gateway: Gateway):
    owner, headers = gateway.client(Role.OWNER), {"traceparent": TRACE}
    run = await owner.post("/agents/run", json={"agent_slug": VIOLIN, "params": {}}, headers=headers)
    entry = await owner.post(
        "/inbox/submit",
        json={
            "source": {"type": "api"},
            "intent": {"action": "job", "target": "index.document", "payload": JOB},
            "metadata": {},
        },
        headers=headers,
    )
    assert (run.status_code, entry.status_code) == (202, 202), (run.text, entry.text)
    made = [run.json()["run_id"], entry.json()["id"]]
    made += [
        job.job_id
        for job in (await gateway.instance.ledger.jobs(JobFilter(), limit=10)).jobs
        if job.parent_id == made[1]
    ]
    assert len(made) == 3
    assert [await stored_trace(gateway, one) for one in made] == [TRACE] * 3


def test_lines_of_a_json_log_have_the_trace_id():
    record = logging.LogRecord("trellis", logging.INFO, "", 0, "said", None, None)
    with tracing.carried(TRACE, "work"):
        assert f'"trace_id": "{TRACE_ID}"' in _Json().format(record)
    assert "trace_id" not in _Json().format(record)
