"""Jobs on topics through the client of a gateway."""

import asyncio
import json

import pytest

from tests.http.conftest import Place, Token
from trellis import connect, connect_sync
from trellis.http.errors import KeyTaken, NotFound
from trellis.http.job_shapes import BusJob
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role


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
            child.model_copy(update={"created": False})
        )
        assert [one.job_id for one in (await client.jobs.list(parent_id="topic-1")).items] == [child.job_id]
        with pytest.raises(NotFound):
            await client.jobs.result("topic-1")


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
