"""The backend with the real gateway, the real orchestrator and the keys of an instance: from POST /jobs to a readable artifact."""

import asyncio
import time
from pathlib import Path

import httpx2
import pytest

from trellis.cli.serving_nlm import NlmPlace, addressed
from trellis.engine.verify import verify
from trellis.gateway import create_app
from trellis.identity import issue
from trellis.instance import open_instance
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.nlm_backend import open_backend
from trellis.nlm_backend.backend import ledger_place
from trellis.settings import read_settings
from trellis.web.server import ServerOptions, listen, serve_gateway
from trellis.wiring import callback_secrets, development_key, make_development_key, new_id

LOOPBACK = ServerOptions(host="127.0.0.1", port=0, drain_s=1)
ROLES = frozenset({"orchestrator", "projector", "sweeper"})


@pytest.mark.requirement("NLM-1", "NLM-2", "NLM-4", "NLM-9", "D42", "AUTH-3")
async def test_a_queue_job_becomes_a_finalized_artifact(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'trellis.db'}"
    await (await open_ledger(url)).close()
    make_development_key(url)
    keys, stop = [development_key(url)], asyncio.Event()
    front, back = listen(LOOPBACK, key_configured=False), listen(LOOPBACK, key_configured=False)
    place = NlmPlace(options=LOOPBACK, listening=back, keys=keys)
    settings = addressed(read_settings({}, tmp_path), front, place)
    assert (settings.gateway, settings.nlm_backend) == (front.url, back.url)
    token = issue(keys[0], name="iryna", roles=[Role.OWNER], ttl_s=600.0, now=time.time())
    async with open_instance(settings, url) as instance, open_backend(settings, url) as backend:
        await instance.plant()
        secrets = callback_secrets(url, settings)
        app = create_app(instance, keys, monotonic=time.monotonic, new_id=new_id, callback_secrets=secrets)
        up = asyncio.Event()
        closing = app.state.streams.hub.close
        parts = asyncio.gather(
            serve_gateway(app, front, LOOPBACK, stop, end_streams=closing, ready=up.set),
            place.serve(backend, stop),
            instance.serve(stop, ROLES),
        )
        await up.wait()
        client = httpx2.AsyncClient(base_url=front.url, headers={"Authorization": f"Bearer {token}"})
        async with client:
            payload = {"query": "Who made the violin?"}
            asked = {"job_type": "RESEARCH", "agent_slug": "archivist-violin", "payload": payload}
            begun = await client.post("/jobs", json=asked)
            assert begun.status_code in {201, 202}, begun.text
            job_id = begun.json()["job_id"]
            await _until_complete(client, job_id)
            artifact_id = (await client.get(f"/jobs/{job_id}")).json()["artifact_id"]
            document = (await client.get(f"/artifacts/{artifact_id}")).json()
            assert (document["job_id"], document["finalized"]) == (job_id, True)
        assert ledger_place(settings, url) == f"sqlite:///{tmp_path / 'nlm.db'}"
        assert backend.metrics.provider_calls == 1
        for ledger in (instance.ledger, backend.ledger):
            report = await verify(ledger)
            assert report.ok, report.violations[:5]
        stop.set()
        await parts


async def _until_complete(client: httpx2.AsyncClient, job_id: str) -> None:
    found: dict[str, object] = {}
    async with asyncio.timeout(60):
        while found.get("status") != "COMPLETE":
            found = (await client.get(f"/jobs/{job_id}")).json()
            assert found["status"] not in {"FAILED", "DEAD", "RETRY_BACKOFF"}, found
            await asyncio.sleep(0.02)
