"""A large instance is moved by a process that is killed twice on the way."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import asyncpg
import pytest

from tests.cli.moving import fill, seal
from tests.cli.test_move import VIOLIN, Fleet, fleet, seaweedfs
from tests.ledgers.conformance.rig import SUBMITTER, WORKER, Rig
from tests.storage.conftest import CREDENTIALS
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.engine.jobs import Advance, Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.ledgers import open_ledger
from trellis.storage.objects.open import open_objects

__all__ = ["fleet", "seaweedfs"]
JOBS = 100_000
ENDED = 60_000
ARTIFACTS = 300
OBJECTS = 3_000
RUNS = 5


async def _grow(url: str) -> None:
    """Add plain jobs, most of which have ended; jobs that completed with an artifact; and objects of all sizes."""
    async with open_instance(Settings.model_validate({}), url) as instance:
        ledger = instance.ledger
        rig = Rig(kind="sqlite", ledger=ledger, advance=None, reopen=None, numbers=count(10_000))  # type: ignore[arg-type]
        for _ in range(ARTIFACTS):
            await rig.complete_for(await rig.submit_one(lifecycle="artifact"))
        for first in range(0, JOBS, 5_000):
            new = [
                NewJob(job_id=JobId(f"bulk-{n}"), type="bulk", payload=b'{"n":%d}' % n, idempotency_key=f"k{n}")
                for n in range(first, first + 5_000)
            ]
            await ledger.submit(SUBMITTER, new)
        for number in range(ENDED // 1_000):
            claim = Claim(claim_id=ClaimId(f"c{number}"), types=(TypeClaim(type="bulk"),), start=1_000)
            claimed = (await ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
            steps = tuple(
                Advance(lease=one.lease, source="running", trigger="complete", result=b"1") for one in claimed
            )
            await ledger.turn(Turn(actor=WORKER, advances=steps))
        for number in range(OBJECTS):
            await instance.objects.put(f"artifacts/{number % 50}/{number}.bin", number.to_bytes(4) * (number % 2_000))


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.requirement("PIPE-2", "D32")
def test_a_large_instance_arrives_whole_though_the_move_is_killed_twice(
    fleet: Fleet, new_postgres_database: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    asyncio.run(_plant(fleet.terminal.url))
    for _ in range(RUNS):
        assert fleet.terminal("run", VIOLIN, "--watch").code == 0
    asyncio.run(fill(fleet.terminal.url, fleet.folder / "nlm.db"))
    asyncio.run(seal(fleet.terminal.url))
    asyncio.run(_grow(fleet.terminal.url))
    fleet.nlm_ledger = new_postgres_database()
    command = [sys.executable, "-m", "trellis", "move", *fleet.options, "--ledger", fleet.terminal.url, "--json"]
    began = time.monotonic()
    for part in ("jobs", "events"):
        process = subprocess.Popen(command, cwd=fleet.folder, stdout=subprocess.DEVNULL)
        place = asyncio.run(_until_copying(fleet.ledger, part, process))
        process.kill()
        process.wait()
        assert place is not None, f"it was over before {part} were copied"
    end = subprocess.run(command, cwd=fleet.folder, capture_output=True, text=True, check=False)
    assert end.returncode == 0, end.stderr
    with capsys.disabled():
        sys.stdout.write(f"\nmoved in {time.monotonic() - began:.1f} s, killed twice; at last {end.stdout.strip()}\n")
    assert fleet.terminal("verify").code == 0
    assert fleet.terminal("verify", ledger=fleet.ledger).code == 0
    assert fleet.terminal("verify", ledger=str(fleet.nlm_ledger)).code == 0
    asyncio.run(_compare(fleet))


async def _plant(url: str) -> None:
    async with open_instance(Settings.model_validate({}), url) as instance:
        await instance.plant()


async def _until_copying(url: str, part: str, process: "subprocess.Popen[bytes]") -> object:
    """Wait until the process has copied some rows of a part and not all; None if it has ended."""
    connection = await asyncpg.connect(url)
    try:
        while process.poll() is None:
            if await connection.fetchval("select to_regclass('trellis.meta')") is not None:
                place = await connection.fetchval(f"select value from trellis.meta where name = 'move:{part}'")
                if place is not None and place != '"finished"':
                    return place
            await asyncio.sleep(0.005)
        return None
    finally:
        await connection.close()


async def _compare(fleet: Fleet) -> None:
    """Read everything once more, not by the program's own comparison."""
    here, there = await open_ledger(fleet.terminal.url), await open_ledger(fleet.ledger)
    try:
        page = other = None
        count = 0
        while True:
            ours = await here.feed(page, limit=1_000)
            theirs = await there.feed(other, limit=1_000)
            assert ours.events == theirs.events
            count += len(ours.events)
            page, other = ours.position, theirs.position
            if not ours.events:
                break
        assert count > 2 * JOBS
        ids = [JobId(f"bulk-{n}") for n in range(0, JOBS, 997)]
        assert await here.payloads(ids) == await there.payloads(ids)
        assert [await here.result(one) for one in ids] == [await there.result(one) for one in ids]
    finally:
        await here.close()
        await there.close()
    await _compare_objects(fleet.folder / "objects", fleet.objects)


async def _compare_objects(folder: Path, url: str) -> None:
    store, local = await open_objects(url, credentials=CREDENTIALS), await open_objects(f"file://{folder}")
    after, more, count = None, True, 0
    while more:
        page = await local.list("", after=after)
        for info in page.items:
            mine, theirs = await local.get(info.key), await store.get(info.key)
            assert mine is not None
            assert theirs is not None
            assert mine.body == theirs.body, info.key
        count += len(page.items)
        after, more = page.items[-1].key if page.items else None, page.more
    assert count >= OBJECTS
    await store.close()
    await local.close()
