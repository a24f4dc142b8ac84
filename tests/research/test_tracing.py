"""One trace and one correlation id over the whole chain: gateway, orchestrator, NLM backend, callback, events (OBS-6)."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from tests.research.test_chain import JOBS, VIOLIN, chain
from tests.spans import SPAN_ID, TRACE, TRACE_ID, Spans, parent_of, recorded, span_id
from trellis.app.instance import Instance
from trellis.engine import tracing
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter
from trellis.http.calls import GatewayRequest
from trellis.http.client import GatewayClient
from trellis.http.shapes import QueueJob
from trellis.ledgers import open_ledger

ORDER = "order-7"
PATIENCE_S = 60.0
QUEUE_CHAIN = {
    "POST /jobs",
    "job.submit",
    "queue.drive",
    "queue.stage CONTEXT_ASSEMBLY",
    "queue.stage NOTEBOOKLM_CALL",
    "nlm_backend.POST",
    "POST /jobs/process",
    "nlm.drive",
    "nlm.snapshot",
    "GET /jobs/{job_id}/context/{epoch}",
    "nlm.prompt",
    "nlm.answer",
    "nlm.query",
    "nlm.draft",
    "nlm.staged",
    "POST /artifacts",
    "nlm.callback",
    "POST /jobs/{job_id}/result",
    "queue.stage ARTIFACT_WRITE",
}
LOOKS = {"nlm_backend.GET", "GET /jobs/{job_id}/executions/{epoch}"}
"""What a slow machine adds: when no callback comes for a while one looks how the backend stands."""
RUN_CHAIN = {
    "POST /agents/run",
    "job.submit",
    "run.drive",
    "run.step load-context",
    "run.step execute-agent",
    "model.request",
    "nlm.ask",
    "run.step persist-results",
    "proposal.apply",
    "run.step finalize",
}


async def submitted(client: GatewayClient) -> str:
    """A queue job of a caller from outside, who has a trace and a correlation id."""
    body = {"job_type": "RESEARCH", "agent_slug": VIOLIN, "payload": JOBS["RESEARCH"][0]}
    headers = {"traceparent": TRACE, "X-Correlation-ID": ORDER}
    made = await client._calls.ask(GatewayRequest(method="POST", path="/jobs", body=body, headers=headers))
    (job,) = (await client.jobs.list(correlation_id=ORDER)).items
    assert job.job_id.encode() in made.body
    return job.job_id


async def all_jobs(ledger: Ledger) -> list[Job]:
    return list((await ledger.jobs(JobFilter(), limit=100)).jobs)


async def correlations(ledger: Ledger, jobs: Sequence[Job]) -> set[str]:
    return {event.correlation_id for job in jobs for event in await ledger.events(job.job_id)}


def is_one_tree(spans: Sequence[ReadableSpan], root: str) -> bool:
    """Whether each is a part of another, and one of them of the root."""
    known = {span_id(span) for span in spans}
    parents = [parent_of(span) for span in spans]
    return parents.count(root) == 1 and all(parent in known | {root} for parent in parents)


async def finished(instance: Instance, spans: Spans, name: str) -> None:
    """Until a span of this name has ended: a callback is taken a moment before its sender knows."""
    async with asyncio.timeout(PATIENCE_S):
        while not any(span.name == name for span in spans.all()):
            await instance.ledger.now()


@pytest.mark.requirement("OBS-6")
async def test_a_queue_job_is_one_trace_from_the_caller_to_the_callback(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with recorded() as spans:
        async with chain(tmp_path, url) as (instance, client):
            job_id = await submitted(client)
            done = await client.jobs.wait(job_id, PATIENCE_S)
            assert done.status == "COMPLETE"
            await finished(instance, spans, "nlm.drive")
            kept = [job for job in await all_jobs(instance.ledger) if job.lifecycle in {"queue-job", "artifact"}]
            assert {job.lifecycle for job in kept} == {"queue-job", "artifact"}
            assert await correlations(instance.ledger, kept) == {ORDER}
            told = {one.correlation_id for one in (await client.jobs.events(job_id)).items}
            assert told == {ORDER}
        backend = await open_ledger(f"sqlite:///{tmp_path / 'nlm.db'}")
        executions = await all_jobs(backend)
        assert await correlations(backend, executions) == {ORDER}
        await backend.close()
    assert {tracing.trace_id(job.trace) for job in (*kept, *executions)} == {TRACE_ID}
    found = spans.of(TRACE_ID)
    assert {span.name for span in found} - LOOKS == QUEUE_CHAIN
    assert is_one_tree(found, SPAN_ID)
    # What the test itself asked meanwhile, and nothing else, is of other traces.
    assert all(span.name.startswith("GET ") for span in set(spans.all()) - set(found))


@pytest.mark.requirement("OBS-6")
async def test_a_run_is_one_trace_from_its_begin_to_what_it_applied(tmp_path: Path):
    with recorded() as spans:
        async with chain(tmp_path, f"sqlite:///{tmp_path / 'ledger.db'}") as (instance, client):
            with tracing.carried(TRACE, "caller"):
                run = await client.runs.start(VIOLIN, {"topic": "bows"})
            assert (await client.runs.wait(run.run_id, PATIENCE_S)).status == "completed"
            await finished(instance, spans, "run.drive")
            kept = [job for job in await all_jobs(instance.ledger) if job.lifecycle in {"run", "proposal"}]
            assert {job.lifecycle for job in kept} == {"run", "proposal"}
            # What a run does has the run's own id: it is how its proposals are found.
            assert await correlations(instance.ledger, kept) == {run.run_id}
    assert {tracing.trace_id(job.trace) for job in kept} == {TRACE_ID}
    found = spans.of(TRACE_ID)
    assert {span.name for span in found} == RUN_CHAIN | {"caller"}
    assert is_one_tree(found, SPAN_ID)


@pytest.mark.requirement("OBS-6")
async def test_a_callers_correlation_id_and_trace_go_from_its_run_to_the_artifact(tmp_path: Path):
    async with chain(tmp_path, f"sqlite:///{tmp_path / 'ledger.db'}") as (instance, client):
        headers = {"traceparent": TRACE, "X-Correlation-ID": ORDER}
        body = {"agent_slug": VIOLIN, "params": {"topic": "bows"}}
        begun = await client._calls.ask(GatewayRequest(method="POST", path="/agents/run", body=body, headers=headers))
        run_id = json.loads(begun.body)["run_id"]
        # The job is submitted for the run, by somebody who knows neither id: it takes both from the run.
        made = await client.jobs.submit_for(VIOLIN, "RESEARCH", JOBS["RESEARCH"][0], run_id=run_id)
        done = await client.jobs.wait(made.job_id, PATIENCE_S)
        assert isinstance(done, QueueJob)
        assert (done.status, done.run_id) == ("COMPLETE", run_id)
        assert (await client.runs.wait(run_id, PATIENCE_S)).status == "completed"
        artifact = await client.artifacts.get(done.artifact_id or "")
        assert (artifact.run_id, artifact.finalized) == (run_id, True)
        found = (await client.feed.find(correlation_id=ORDER, limit=500)).items
        assert {one.lifecycle for one in found} == {"run", "proposal", "queue-job", "artifact"}
        assert {done.artifact_id, run_id, made.job_id} <= {one.job_id for one in found}
        kept = await all_jobs(instance.ledger)
        assert await correlations(instance.ledger, kept) == {ORDER}
    backend = await open_ledger(f"sqlite:///{tmp_path / 'nlm.db'}")
    executions = await all_jobs(backend)
    assert await correlations(backend, executions) == {ORDER}
    await backend.close()
    assert {job.trace for job in (*kept, *executions)} == {TRACE}


@pytest.mark.requirement("OBS-6")
async def test_without_an_sdk_the_whole_chain_hands_the_trace_on(tmp_path: Path):
    async with chain(tmp_path, f"sqlite:///{tmp_path / 'ledger.db'}") as (instance, client):
        job_id = await submitted(client)
        assert (await client.jobs.wait(job_id, PATIENCE_S)).status == "COMPLETE"
        kept = [job for job in await all_jobs(instance.ledger) if job.lifecycle in {"queue-job", "artifact"}]
    backend = await open_ledger(f"sqlite:///{tmp_path / 'nlm.db'}")
    executions = await all_jobs(backend)
    await backend.close()
    assert [job.trace for job in (*kept, *executions)] == [TRACE] * 3
