"""The connections of each role to PostgreSQL, counted in the server while jobs, queue jobs and runs flow."""

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.faults.fleet import POLL_S
from tests.faults.platform import BUS_WORKER, EVERYBODY, WORKER, Platform, loaded, until
from tests.faults.test_stopped_roles import nats, platform
from trellis.cli.up_process import GATEWAY, NLM, SAFETY_KERNEL
from trellis.ledgers.postgres.lanes import CONNECTIONS_MAX

__all__ = ["nats", "platform"]

WATCHED = 200
"""How often the server is asked."""
COUNTED = "select application_name, count(*) from pg_stat_activity where datname = $1 group by 1"
WITHOUT_LEDGER = {SAFETY_KERNEL, BUS_WORKER}


async def peaks(url: str, of: dict[str, int]) -> None:
    """Note the highest number of connections of each name to the database of this URL."""
    observer = await asyncpg.connect(url)
    database = urlsplit(url).path.lstrip("/")
    try:
        for _ in range(WATCHED):
            for name, count in await observer.fetch(COUNTED, database):
                of[name] = max(of.get(name, 0), count)
            await asyncio.sleep(POLL_S)
    finally:
        await observer.close()


@pytest.mark.prove
@pytest.mark.timeout(900)
async def test_no_role_has_more_connections_under_load_than_stated(platform: Platform, figures: Callable[..., None]):
    everybody = [*EVERYBODY, WORKER, BUS_WORKER]
    for role in everybody:
        platform.start(role)
        if role == GATEWAY:  # it plants the agents
            await platform.ready(role)
    for role in everybody:
        await platform.ready(role)
    most: dict[str, int] = {}
    async with loaded(platform) as load:
        async with load.flowing():
            await until(platform.effects, "work is done")
            ledgers = [platform.environment[name] for name in ("TRELLIS_LEDGER", "TRELLIS_NLM_LEDGER")]
            await asyncio.gather(*(peaks(url, most) for url in ledgers))
        await load.all_ended(platform.logs)
    of_processes = {name: count for name, count in most.items() if name.startswith("trellis-")}
    assert {name for name, count in of_processes.items() if count > CONNECTIONS_MAX} == set(), most
    roles = {f"trellis-{role}" for role in EVERYBODY if role not in WITHOUT_LEDGER}
    assert roles - set(of_processes) <= {f"trellis-{NLM}"}, "every role is seen"
    assert any(name.startswith("trellis-worker@") for name in of_processes)
    figures(
        **{name.removeprefix("trellis-").partition("@")[0].replace("-", "_"): n for name, n in of_processes.items()}
    )
