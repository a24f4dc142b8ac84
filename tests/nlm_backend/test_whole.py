"""The backend with the real gateway, the real orchestrator and the keys of an instance: from POST /jobs to a readable artifact."""

import asyncio
import json
import time
from pathlib import Path

import httpx2
import pytest

from tests.nlm_backend.conftest import provider_calls
from trellis.app.instance import Instance, open_instance
from trellis.app.settings import read_settings
from trellis.app.wiring import callback_secrets, development_key, make_development_key, new_id
from trellis.auth.tokens import issue
from trellis.cli import main
from trellis.cli.up_nlm import NlmEndpoint, with_own_addresses
from trellis.engine.admin_acts import this_node
from trellis.engine.ledger import Ledger
from trellis.engine.verify import verify
from trellis.gateway import create_app
from trellis.http_server.server import ServerOptions, listen, serve_gateway
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.nlm_backend import BackendProcess, open_backend

LOOPBACK = ServerOptions(host="127.0.0.1", port=0, drain_s=1)
ROLES = frozenset({"orchestrator", "projector", "sweeper"})


@pytest.mark.requirement("NLM-1", "NLM-2", "NLM-4", "NLM-9", "D42", "OBS-1", "OBS-6", "D35")
async def test_a_queue_job_becomes_a_finalized_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    url = f"sqlite:///{tmp_path / 'trellis.db'}"
    await (await open_ledger(url)).close()
    make_development_key(url)
    keys, stop = [development_key(url)], asyncio.Event()
    front, back = listen(LOOPBACK, key_configured=False), listen(LOOPBACK, key_configured=False)
    place = NlmEndpoint(options=LOOPBACK, listening=back, keys=keys)
    settings = with_own_addresses(read_settings({}, tmp_path), front, place)
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
            begun = await client.post("/jobs", json=asked, headers={"X-Correlation-ID": "press-7"})
            assert begun.status_code in {201, 202}, begun.text
            job_id = begun.json()["job_id"]
            await _until_complete(client, job_id)
            artifact_id = (await client.get(f"/jobs/{job_id}")).json()["artifact_id"]
            document = (await client.get(f"/artifacts/{artifact_id}")).json()
            assert (document["job_id"], document["finalized"]) == (job_id, True)
            await _check_shown(client, job_id)
            frontend = issue(keys[0], name="page", roles=[Role.FRONTEND], ttl_s=600.0, now=time.time())
            refused = await client.get("/jobs?lifecycle=nlm-job", headers={"Authorization": f"Bearer {frontend}"})
            assert (refused.status_code, refused.json()["rule"]) == (403, "nlm.read")
        assert settings.nlm_ledger_of(url) == f"sqlite:///{tmp_path / 'nlm.db'}"
        assert provider_calls(backend) == 1
        for ledger in (instance.ledger, backend.ledger):
            report = await verify(ledger)
            assert report.ok, report.violations[:5]
        await _until_acts_are_recorded(instance.ledger, backend.ledger)
        stop.set()
        await parts
        await _check_recorded(instance, backend)
    command = ["jobs", "--lifecycle", "nlm-job", "--json", "--ledger", url]
    assert await asyncio.to_thread(main, command) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["parent_id"], listed["status"]) == (job_id, "DONE")
    assert await asyncio.to_thread(main, ["job", "show", listed["job_id"], "--json", "--ledger", url]) == 0
    assert json.loads(capsys.readouterr().out)["events"][-1]["type"] == "nlm_done"


async def _check_shown(client: httpx2.AsyncClient, job_id: str) -> None:
    """An operator sees the execution of the job through the gateway, though the backend alone knows it."""
    found = (await client.get("/jobs", params={"lifecycle": "nlm-job", "parent_id": job_id, "limit": 1})).json()
    (listed,) = found["items"]
    assert (listed["parent_id"], listed["correlation_id"]) == (job_id, "press-7")
    assert (await client.get("/jobs", params={"lifecycle": "nlm-job", "status": "ERROR"})).json()["items"] == []
    bad = await client.get("/jobs", params={"lifecycle": "nlm-job", "cursor": "nlm:nonsense"})
    assert bad.status_code == 422
    shown = (await client.get(f"/jobs/{listed['job_id']}")).json()
    assert (shown["lifecycle"], shown["payload"]["payload"]) == ("nlm-job", {"query": "Who made the violin?"})
    first = (await client.get(f"/jobs/{listed['job_id']}/events", params={"limit": 1})).json()
    assert (first["items"][0]["type"], first["next_cursor"]) == ("nlm_accepted", "1")
    after = (await client.get(f"/jobs/{listed['job_id']}/events", params={"cursor": 1})).json()["items"]
    assert after[0]["type"] == "nlm_context_fetching"
    assert (await client.get("/jobs/nobody@1")).status_code == 404


async def _check_recorded(instance: Instance, backend: BackendProcess) -> None:
    """Every event and act of both ledgers has one audit record, with a node; those of the job have the caller's correlation id."""
    ledgers = (instance.ledger, backend.ledger)
    events = [event.id for one in ledgers for event in (await one.feed(None, limit=500)).events]
    acts = [act for one in ledgers for act in await one.acts()]
    assert [act.event for act in acts].count("access.refused") == 1
    keys = [info.key for info in (await instance.objects.list("audit/2")).items]
    found = [json.loads(there.body) for key in keys if (there := await instance.objects.get(key)) is not None]
    assert sorted(record["event_id"] for record in found) == sorted([*events, *(act.id for act in acts)])
    assert {record["node"] for record in found} == {this_node()}
    of_jobs = [record for record in found if record.get("lifecycle") in {"queue-job", "nlm-job", "artifact"}]
    assert {record["correlation_id"] for record in of_jobs} == {"press-7"}
    assert {record["event"] for record in of_jobs} > {"nlm_accepted", "nlm_done", "job_accepted", "artifact.finalized"}


async def _until_acts_are_recorded(*ledgers: Ledger) -> None:
    waiting = True
    async with asyncio.timeout(60):
        while waiting:
            waiting = any([await ledger.acts(unpublished=True) for ledger in ledgers])
            await asyncio.sleep(0.02)


async def _until_complete(client: httpx2.AsyncClient, job_id: str) -> None:
    found: dict[str, object] = {}
    async with asyncio.timeout(60):
        while found.get("status") != "COMPLETE":
            found = (await client.get(f"/jobs/{job_id}")).json()
            assert found["status"] not in {"FAILED", "DEAD", "RETRY_BACKOFF"}, found
            await asyncio.sleep(0.02)
