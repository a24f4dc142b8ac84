"""Jobs on topics through the client of a gateway."""

import asyncio
import json

import pytest

from tests.cli.test_bus_jobs import failed, followed_up, reported
from tests.http.conftest import Place, Shell, Token
from trellis import connect, connect_sync
from trellis.cli import main
from trellis.http.errors import KeyTaken, NotFound
from trellis.http.shapes import BusJob
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role, Trigger


@pytest.mark.requirement("BUS-2", "BUS-11")
async def test_a_job_on_a_topic_is_submitted_once_read_and_listed(address: str, token: Token):
    async with connect(gateway=address, token=token(Role.OWNER, name="iryna")) as client:
        wishes = {"tenant_id": "acme", "labels": {"worker.region": "eu"}}
        made = await client.jobs.submit_topic("job.echo", {"n": 1}, job_id="topic-1", correlation_id="press", **wishes)
        again = await client.jobs.submit_topic("job.echo", {"n": 1}, job_id="topic-1", correlation_id="press", **wishes)
        assert (made.lifecycle, made.created, again.created) == ("bus-job", True, False)
        with pytest.raises(KeyTaken):
            await client.jobs.submit_topic("job.echo", {"n": 2}, job_id="topic-1")
        found = await client.jobs.get("topic-1")
        assert isinstance(found, BusJob)
        assert (found.topic, found.principal_id, found.tenant_id) == ("job.echo", "iryna", "acme")
        assert (found.correlation_id, found.hold, found.context_ptr[:10]) == ("press", None, "objects://")
        child = await client.jobs.submit_topic("job.echo", parent_job_id="topic-1", meta={"idempotency_key": "k"})
        assert (await client.jobs.submit_topic("job.echo", parent_job_id="topic-1", meta={"idempotency_key": "k"})) == (
            child.model_copy(update={"created": False, "outcome": "returned"})
        )
        assert [one.job_id for one in (await client.jobs.list(parent_id="topic-1")).items] == [child.job_id]
        with pytest.raises(NotFound):
            await client.jobs.result("topic-1")
        assert await client.jobs.context("topic-1") == b'{"n":1}'
        with pytest.raises(NotFound, match="has none"):
            await client.jobs.context(child.job_id)


@pytest.mark.requirement("BUS-7", "BUS-9")
def test_client_of_a_gateway_waits_over_retries_and_may_read_the_input_of_the_job(
    shell: Shell, place: Place, capsys: pytest.CaptureFixture[str]
):
    for name in ("kept", "lost"):
        shell("submit", "--topic", "job.echo", '{"n": 1}', "--id", name)
        failed(place.ledger, name, status="FAILED_RETRYABLE")
    followed_up(place.ledger)
    reported(place.ledger, "kept.r1", Trigger.COMPLETE, {"worker_id": "echo-1"})
    failed(place.ledger, "lost.r1", status="FAILED_FATAL", error_code="WORSE")
    asked = ("submit", "--topic", "job.echo", '{"n": 1}', "--wait", "30s", "--id")
    (told,) = shell.records(*asked, "kept")
    assert (told["job_id"], told["result"]) == ("kept.r1", {"worker_id": "echo-1"})
    in_vain = " ".join(shell(*asked, "lost", code=1).split())
    assert "lost is FAILED (BAD: no text); it is done again as lost.r1" in in_vain
    assert "job lost.r1 ended as FAILED: WORSE: no text" in in_vain
    assert shell("job", "context", "kept") == '{"n":1}\n'
    assert main(["job", "show", "kept"]) == 0
    assert "trellis job context kept" in " ".join(capsys.readouterr().err.split())


def test_without_async_the_result_is_fetched_as_bytes(address: str, token: Token, place: Place):
    with connect_sync(address, token=token(Role.OWNER)) as client:
        made = client.jobs.submit("plain", {"n": 1})

        async def run() -> None:
            from trellis import App, Context
            from trellis.testing import run_until_idle

            app = App(testing=True)

            @app.job("plain")
            async def plain(ctx: Context, said: dict[str, int]) -> int:
                return said["n"] + 1

            ledger = await open_ledger(place.ledger)
            try:
                await run_until_idle(app, ledger)
            finally:
                await ledger.close()

        asyncio.run(run())
        assert json.loads(client.jobs.result(made.job_id)) == 2
