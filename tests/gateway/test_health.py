"""Health: a process lives or not, is ready or not, and says so at once whatever is down."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.faults.proxy import Proxy, proxied
from tests.gateway.door import KEY, opened, token
from tests.gateway.serving import settings_in
from trellis.app.instance import open_instance
from trellis.app.wiring import new_id
from trellis.engine import outage_log
from trellis.engine.errors import LedgerUnavailable, OutcomeUnknown, SettingsInvalid, TrellisError
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.metrics import MEDIA_TYPE, READY, Sample
from trellis.engine.outage_log import Outage
from trellis.gateway import GatewayOptions, create_app
from trellis.http_server import health as health_module
from trellis.http_server.health import PROBE_S, ProcessHealth, health_listener
from trellis.http_server.problems import STATUS_OF_CODE, problem_of_error
from trellis.lifecycles import Role
from trellis.storage.objects.store import StoreUnfit

PATIENCE_S = 15.0
"""Far less than what a call of the ledger waits, and enough for a machine that stands still."""
READ_S = 0.5
VERSION = version("trellis-engine")


async def get(client: httpx2.AsyncClient, path: str) -> tuple[int, dict[str, Any]]:
    async with asyncio.timeout(PATIENCE_S):
        answer = await client.get(path, headers={"Authorization": f"Bearer {token()}"})
    return answer.status_code, answer.json()


@asynccontextmanager
async def on_postgres(url: str, folder: Path) -> AsyncIterator[tuple[Proxy, httpx2.AsyncClient]]:
    """A gateway whose PostgreSQL can be made to fall silent."""
    async with (
        proxied(url, seed=1, aimed=False) as (proxy, through),
        open_instance(settings_in(folder), through) as instance,
    ):
        options = GatewayOptions(read_s=READ_S)
        app = create_app(instance, [KEY], monotonic=time.monotonic, new_id=new_id, options=options)
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            yield proxy, client
        proxy.heal()


async def test_health_answers_while_the_database_is_silent_and_when_it_is_back(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(health_module, "PROBE_S", 0.2)
    async with on_postgres(postgres_url, tmp_path) as (proxy, client):
        assert await get(client, "/system/ready") == (
            200,
            {"status": "ok", "checks": {"ledger": "ok", "objects": "ok", "disk": "ok"}, "version": VERSION},
        )
        proxy.black_hole()
        checks = {"ledger": "UPSTREAM_UNAVAILABLE", "objects": "ok", "disk": "ok"}
        down = {"status": "degraded", "checks": checks, "version": VERSION}
        for path in ("/system/ready", "/system/health"):
            assert await get(client, path) == (503, down)
        assert await get(client, "/system/live") == (200, {"status": "ok"})
        proxy.heal()
        async with asyncio.timeout(PATIENCE_S):
            while (await get(client, "/system/ready"))[0] != 200:
                pass


async def test_a_read_is_answered_and_logged_while_the_database_is_silent(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with on_postgres(postgres_url, tmp_path) as (proxy, client):
        proxy.black_hole()
        status, problem = await get(client, "/jobs")
        assert (status, problem["code"]) == (502, "UPSTREAM_UNAVAILABLE")
        assert "/system/ready" in problem["detail"]
        assert "read_timed_out path='/jobs'" in caplog.text
        proxy.heal()
        async with asyncio.timeout(PATIENCE_S):
            while (await get(client, "/jobs"))[0] != 200:
                pass


async def test_health_names_the_dependency_that_is_down(tmp_path: Path):
    async with opened(tmp_path) as door:
        assert await get(door.client, "/system/ready") == (
            200,
            {"status": "ok", "checks": {"ledger": "ok", "objects": "ok", "disk": "ok"}, "version": VERSION},
        )
        (tmp_path / "door.db").rename(tmp_path / "away.db")
        status, answer = await get(door.client, "/system/ready")
        assert (status, answer["checks"]) == (503, {"ledger": "UPSTREAM_UNAVAILABLE", "objects": "ok", "disk": "ok"})
        assert (await get(door.client, "/system/live"))[0] == 200
        (tmp_path / "away.db").rename(tmp_path / "door.db")


def test_the_whole_answer_takes_less_than_a_second():
    assert PROBE_S < 1.0


@pytest.mark.parametrize(
    "error",
    [
        LedgerUnavailable(reason="nothing listens at db.internal, port 5432"),
        StoreUnfit(url="s3://bucket?endpoint=http://db.internal:8333", reason="it answers without an ETag"),
    ],
)
def test_health_problem_hides_server_addresses(error: TrellisError):
    problem = problem_of_error(error)
    assert STATUS_OF_CODE[problem.code] == 502
    assert "db.internal" not in problem.detail
    assert "try again" in problem.detail


def test_a_problem_with_an_unknown_outcome_says_how_to_learn_it():
    assert "ask again with the same id" in problem_of_error(OutcomeUnknown(verb="submit", request="x")).detail


# --- a process without a gateway -------------------------------------------------------------------------------------


async def fails() -> None:
    raise LedgerUnavailable(reason="nothing listens at db.internal, port 5432")


async def hangs() -> None:
    """Not even a cancellation ends it at once."""
    while True:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            raise


async def well() -> None:
    pass


async def test_a_process_without_a_gateway_answers_at_its_own_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health_module, "PROBE_S", 0.05)
    health = ProcessHealth()
    async with health_listener("127.0.0.1:0", health) as address:
        assert address is not None
        async with httpx2.AsyncClient(base_url=address, trust_env=False) as client:
            assert await get(client, "/system/live") == (200, {"status": "ok"})
            assert await get(client, "/system/ready") == (503, {"status": "starting", "checks": {}})
            health.needs(ledger=well)
            assert await get(client, "/system/ready") == (200, {"status": "ok", "checks": {"ledger": "ok"}})
            health.needs(ledger=fails, objects=hangs, bus=well)
            status, answer = await get(client, "/system/health")
            assert status == 503
            assert answer["checks"] == {
                "ledger": "UPSTREAM_UNAVAILABLE",
                "objects": "UPSTREAM_UNAVAILABLE",
                "bus": "ok",
            }
            assert "db.internal" not in str(answer), "a stranger learns no address"
            assert (await get(client, "/system/live"))[0] == 200
            assert (await get(client, "/runs"))[0] == 404
            assert (await client.post("/system/live")).status_code == 405


@pytest.mark.requirement("OBS-5")
async def test_every_process_shows_its_metrics_and_a_source_that_hangs_costs_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(health_module, "PROBE_S", 0.05)
    health = ProcessHealth()

    async def queues() -> list[Sample]:
        return [Sample(READY, ("bake", "leased-job"), 3)]

    async def silent() -> list[Sample]:
        await hangs()
        return []

    async def broken() -> list[Sample]:
        raise LedgerUnavailable(reason="it is down")

    async with health_listener("127.0.0.1:0", health) as address:
        assert address is not None
        async with httpx2.AsyncClient(base_url=address, trust_env=False) as client:
            before = await client.get("/metrics")
            health.measures(silent, queues, broken)
            after = await client.get("/metrics")
    assert (before.status_code, before.headers["content-type"]) == (200, MEDIA_TYPE)
    assert "\ntrellis_metrics_sources_down 0.0\n" in before.text
    assert '\ntrellis_queue_ready{lifecycle="leased-job",type="bake"} 3.0\n' in after.text
    assert "\ntrellis_metrics_sources_down 2.0\n" in after.text


@pytest.mark.requirement("OBS-5")
async def test_the_gateway_shows_queues_their_age_its_followers_and_its_own_requests(tmp_path: Path):
    async with opened(tmp_path) as door:
        submitter = Actor(role=Role.SUBMITTER, name="test")
        await door.instance.ledger.submit(submitter, [NewJob(job_id=JobId("j1"), type="bake", payload=b"{}")])
        follower = Actor(role=Role.PROJECTOR, name="test")
        following = await door.instance.ledger.subscribe(follower, "reader", lease_s=60.0)
        assert following is not None
        await door.instance.ledger.ack(following, "0", lease_s=60.0)
        assert (await door("GET", "/workers", token())).status_code == 200
        answer = await door("GET", "/metrics", token())
        assert (await door("GET", "/metrics")).status_code == 401
    assert answer.status_code == 200
    lines = set(answer.text.splitlines())
    assert 'trellis_queue_ready{lifecycle="leased-job",type="bake"} 1.0' in lines
    assert 'trellis_http_request_seconds_count{method="GET",status="200"}' in answer.text
    assert "trellis_sse_listeners 0.0" in lines
    assert "trellis_metrics_sources_down 0.0" in lines
    assert 'trellis_feed_lag_seconds{follower="reader"}' in answer.text


async def test_a_dependency_that_stays_down_is_logged_once_and_its_return_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO, "trellis")
    monkeypatch.setattr(outage_log, "LEDGER", Outage("ledger_unavailable"))
    health = ProcessHealth({"ledger": fails})
    for _ in range(20):
        assert not (await health.ready()).is_ready
    health.needs(ledger=well)
    assert (await health.ready()).is_ready
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["ledger_unavailable", "recovered"]


async def test_questions_at_the_same_time_share_one_round():
    asked = 0

    async def probe() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)

    health = ProcessHealth({"ledger": probe})
    await asyncio.gather(*(health.ready() for _ in range(50)))
    assert asked == 1


async def test_an_address_that_cannot_be_had_is_refused_by_name():
    async with health_listener("127.0.0.1:0", ProcessHealth()) as address:
        assert address is not None
        taken = address.removeprefix("http://")
        with pytest.raises(SettingsInvalid, match=f"TRELLIS_HEALTH_ADDRESS: nobody can listen on {taken}"):
            async with health_listener(taken, ProcessHealth()):
                pass


@pytest.mark.parametrize("sent", [b"\0" * 20_000, b"GET /system/live", b"\r\n\r\n"])
async def test_malformed_request_to_the_health_listener_gets_no_200_and_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(health_module, "HEAD_S", 0.1)
    async with health_listener("127.0.0.1:0", ProcessHealth()) as address:
        assert address is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            assert b"200" not in await reader.read()
        writer.close()
        await writer.wait_closed()
