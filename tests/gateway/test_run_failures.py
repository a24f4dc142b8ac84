"""What a request about runs gets when it meets a failure itself: the status and the code of document 002, 5.3 (RUN-7).

A provider that fails or takes too long is met at the NLM backend: `tests/nlm_backend/test_questions.py` has those two rows.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from tests.gateway.conftest import FREE, KEY, VIOLIN, Gateway
from tests.gateway.test_runs import begun, ended, publish
from trellis.app.wiring import new_id
from trellis.documents import ids
from trellis.gateway import create_app
from trellis.ledgers import open_ledger

Break = Callable[[Path], None]


def folder_of(gateway: Gateway) -> Path:
    return Path(gateway.instance.places.objects.removeprefix("file://"))


def unreadable(file: Path) -> None:
    """The store cannot open what lies there."""
    file.unlink()
    file.mkdir()


def damaged(file: Path) -> None:
    """The store gives something that is no document."""
    file.write_bytes(b"}{")


@pytest.mark.requirement("RUN-7", "D27")
@pytest.mark.parametrize(
    "harm, status, code", [(unreadable, 502, "UPSTREAM_UNAVAILABLE"), (damaged, 500, "INTERNAL_ERROR")]
)
@pytest.mark.parametrize("part", ["status", "manifest"])
async def test_a_read_while_the_object_store_fails_is_answered_with_its_error_code(
    gateway: Gateway, part: str, harm: Break, status: int, code: str
):
    run_id = await ended(gateway)
    key = ids.status_key(VIOLIN, run_id) if part == "status" else ids.manifest_key(VIOLIN, run_id)
    harm(folder_of(gateway) / key)
    answer = await gateway.client("owner").get(f"/runs/{run_id}/{part}")
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.requirement("RUN-7")
async def test_a_run_is_not_begun_while_the_store_fails_and_nothing_is_stored(gateway: Gateway):
    unreadable(folder_of(gateway) / f"agents/{VIOLIN}/_agent.md")
    client = gateway.client("owner")
    answer = await client.post("/agents/run", json={"agent_slug": VIOLIN})
    assert (answer.status_code, answer.json()["code"]) == (502, "UPSTREAM_UNAVAILABLE")
    assert answer.headers["retry-after"] == "1"
    assert (await client.get("/runs")).json()["items"] == []


@pytest.mark.requirement("RUN-7")
async def test_request_during_an_orchestration_outage_is_answered_with_the_reason(gateway: Gateway):
    run_id = await begun(gateway)
    away = await open_ledger(gateway.instance.places.ledger, clock=gateway.clock)
    await away.close()
    instance = replace(gateway.instance, ledger=away)
    app = create_app(instance, [KEY], monotonic=time.monotonic, new_id=new_id, options=FREE)
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {gateway.token('owner')}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        for method, path, body in (
            ("POST", "/agents/run", {"agent_slug": VIOLIN}),
            ("POST", f"/runs/{run_id}/cancel", {"mode": "hard"}),
            ("GET", f"/runs/{run_id}/status", None),
        ):
            answer = await client.request(method, path, json=body)
            assert (answer.status_code, answer.json()["code"]) == (502, "UPSTREAM_UNAVAILABLE"), path


@pytest.mark.requirement("RUN-7", "D27")
async def test_a_failed_run_is_no_failed_request_and_a_busy_agent_is_no_error(gateway: Gateway):
    failed = await ended(gateway)
    first, second = await begun(gateway), await begun(gateway)
    await publish(gateway)
    client = gateway.client("owner")
    answer = await client.get(f"/runs/{failed}/status")
    assert (answer.status_code, answer.json()["status"], answer.json()["error"]) == (200, "failed", "CANCELLED: enough")
    for run_id in (first, second):
        waiting = (await client.get(f"/runs/{run_id}/status")).json()
        assert (waiting["status"], waiting["error"]) == ("queued", None)
