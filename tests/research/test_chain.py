"""The whole chain in one process: a gateway and an NLM backend on loopback, the orchestration layer, real time, and the client of ours."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from trellis import connect
from trellis.app.instance import Instance, open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import callback_secrets, new_id, token_key, trusted_keys
from trellis.auth.tokens import issue
from trellis.cli.up_nlm import NlmEndpoint
from trellis.cli.up_process import run_together
from trellis.engine.verify import verify
from trellis.gateway import create_app
from trellis.http.client import GatewayClient
from trellis.http.shapes import QueueJob
from trellis.http_server.server import ServerOptions, listen, serve_gateway
from trellis.lifecycles import Role
from trellis.nlm_backend import open_backend
from trellis.storage.objects.canonical_json import sha256

VIOLIN = "archivist-violin"
LOOPBACK = ServerOptions(host="127.0.0.1", port=0)
PATIENCE_S = 60.0
JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "RESEARCH": ({"query": "What is known about the varnish of the violin?"}, "RESEARCH_BRIEF"),
    "BRIEF": ({"vision_text": "A short text about the violin and its varnish", "entity_refs": ["violin"]}, "BRIEF"),
    "PROPOSAL_PREPROCESS": (
        {"proposal_draft": {"target": "sources/unknown.md", "text": "The varnish is old."}},
        "PREPROCESSED_PROPOSAL",
    ),
}


@asynccontextmanager
async def chain(folder: Path, ledger: str) -> AsyncGenerator[tuple[Instance, GatewayClient]]:
    """Everything that a queue job needs, up; and a client of its owner."""
    key = folder / "key"
    key.write_text(secrets.token_hex(32) + "\n")
    key.chmod(0o600)
    gateway, nlm = listen(LOOPBACK, key_configured=True), listen(LOOPBACK, key_configured=True)
    settings = Settings.model_validate(
        {
            "objects": (folder / "objects").as_uri(),
            "memory": folder / "memory.git",
            "gateway": gateway.url,
            "nlm_backend": nlm.url,
            "nlm_ledger": f"sqlite:///{folder / 'nlm.db'}",
            "token_key_file": key,
            "callback_key_file": key,
        }
    )
    keys, stop = trusted_keys(ledger, settings), asyncio.Event()
    async with open_instance(settings, ledger) as instance, open_backend(settings, ledger) as backend:
        await instance.plant()
        app = create_app(
            instance,
            keys,
            monotonic=asyncio.get_running_loop().time,
            new_id=new_id,
            callback_secrets=callback_secrets(ledger, settings),
        )
        up = asyncio.ensure_future(
            run_together(
                stop,
                serve_gateway(app, gateway, LOOPBACK, stop, end_streams=app.state.streams.hub.close),
                NlmEndpoint(options=LOOPBACK, listening=nlm, keys=keys).serve(backend, stop),
                instance.serve(stop),
            )
        )
        now = (await instance.ledger.now()).timestamp()
        token = issue(token_key(ledger, settings), name="iryna", roles=[Role.OWNER], ttl_s=600.0, now=now)
        try:
            async with connect(gateway=gateway.url, token=token) as client:
                yield instance, client
        finally:
            stop.set()
            await up
        report = await verify(instance.ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))


async def _done(client: GatewayClient, job_id: str) -> QueueJob:
    job = await client.jobs.wait(job_id, PATIENCE_S)
    assert isinstance(job, QueueJob)
    assert job.status == "COMPLETE", job.error
    return job


@pytest.mark.requirement("JQ-13", "D15", "D34")
async def test_every_type_of_job_becomes_its_artifact(tmp_path: Path):
    async with chain(tmp_path, f"sqlite:///{tmp_path / 'ledger.db'}") as (instance, client):
        made = [await client.jobs.submit_for(VIOLIN, type_, payload) for type_, (payload, _) in JOBS.items()]
        for (type_, (payload, yields)), one in zip(JOBS.items(), made, strict=True):
            job = await _done(client, one.job_id)
            assert (job.job_type, job.payload, job.attempt) == (type_, payload, 0)
            artifact = await client.artifacts.get(job.artifact_id or "")
            assert (artifact.type, artifact.job_id, artifact.run_id) == (yields, job.job_id, job.run_id)
            assert artifact.finalized
            assert job.result["sha256"] == await _stored_hash(instance, job)


async def _stored_hash(instance: Instance, job: QueueJob) -> str:
    """The hash of what readers get, published or not yet."""
    row = await instance.artifacts.row(job.artifact_id or "")
    assert row is not None
    for key in (row.key, row.staged_key, row.key):
        found = await instance.objects.get(key)
        if found is not None:
            return sha256(found.body)
    raise AssertionError("there is no artifact to read")


@pytest.mark.requirement("JQ-13")
async def test_queue_job_runs_from_request_to_artifact_on_postgresql(tmp_path: Path, postgres_url: str):
    async with chain(tmp_path, postgres_url) as (_, client):
        made = await client.jobs.submit_for(VIOLIN, "RESEARCH", JOBS["RESEARCH"][0], entity_refs=["violin"])
        job = await _done(client, made.job_id)
        artifact = await client.artifacts.get(job.artifact_id or "")
        assert (artifact.type, job.context.entity_refs) == ("RESEARCH_BRIEF", ["violin"])
