"""Several processes on one file, and processes that die in the middle."""

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ledgers.sqlite.people import claim, complete, submit
from tests.ledgers.sqlite.shell import Shell
from tests.servers.ready_python import ready_python
from trellis.engine.verify import verify
from trellis.ledgers.sqlite.ledger import SqliteLedger

JOBS = 600

DRAIN = """
import asyncio, json, sys, time
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, Turn, TypeClaim
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.lifecycles import Role

async def main(url, name):
    ledger = await SqliteLedger.open(url, clock=time.time)
    actor, mine, advances, number = Actor(role=Role.WORKER, name=name), [], (), 0
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        number += 1
        asked = Claim(claim_id=ClaimId(f"{name}-{number}"), types=(TypeClaim(type="work"),), start=7)
        result = await ledger.turn(Turn(actor=actor, advances=advances, claim=asked))
        mine += [one.lease.job_id for one in result.claimed]
        advances = tuple(Advance(lease=c.lease, source="running", trigger="complete") for c in result.claimed)
        if not advances:
            break
    await ledger.close()
    print(json.dumps(mine), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""

SUBMIT = """
import asyncio, sys, time
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.lifecycles import Role

async def main(url):
    ledger = await SqliteLedger.open(url, clock=time.time)
    actor = Actor(role=Role.SUBMITTER, name="submitter")

    async def go_on(lane):
        number = 0
        while True:
            number += 1
            jobs = [NewJob(job_id=JobId(f"{lane}-{number}-{i}"), type="work", payload=b"x" * 5000) for i in range(3)]
            for answer in await ledger.submit(actor, jobs):
                sys.stdout.write(answer.job_id + "\\n")
            sys.stdout.flush()

    await asyncio.gather(*(go_on(lane) for lane in range(4)))

asyncio.run(main(sys.argv[1]))
"""


@contextmanager
def program(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program of its own, ended with the test whatever happens."""
    command = [ready_python(), "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str], n: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(n)]


@pytest.mark.requirement("DJ-2")
def test_processes_share_a_file_and_no_job_is_claimed_twice(path: Path):
    url = f"sqlite:///{path}"
    asyncio.run(fill(url))
    with program(DRAIN, url, "one") as one, program(DRAIN, url, "two") as two:
        for process in (one, two):
            assert lines(process, 1) == ["ready"]
        for process in (one, two):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        taken = [json.loads(lines(process, 1)[0]) for process in (one, two)]
    counts = Counter(taken[0] + taken[1])
    assert len(counts) == JOBS
    assert set(counts.values()) == {1}
    assert all(taken), "both got some"
    shell = Shell(path)
    assert shell.value("SELECT count(*) FROM trellis_job WHERE place = 5") == JOBS
    assert shell.value("SELECT count(*) FROM trellis_event") == 4 * JOBS


async def fill(url: str) -> None:
    ledger = await SqliteLedger.open(url, clock=lambda: 1.8e9)
    await submit(ledger, JOBS)
    await ledger.close()


@pytest.mark.requirement("DJ-4")
@pytest.mark.parametrize("confirmed", [1, 40, 400])
def test_writes_confirmed_before_a_kill_are_complete(path: Path, confirmed: int):
    with program(SUBMIT, f"sqlite:///{path}") as process:
        known = lines(process, confirmed)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        known += process.stdout.read().split("\n")[:-1]
    asyncio.run(check_whole(path, set(known)))


async def check_whole(path: Path, known: set[str]) -> None:
    """Every confirmed job is there, each call as a whole, and the ledger goes on."""
    ledger = await SqliteLedger.open(f"sqlite:///{path}", clock=lambda: 1.8e9)
    stored = {history.job.job_id async for history in ledger.histories()}
    assert known <= stored
    calls = Counter(job_id.rpartition("-")[0] for job_id in stored)
    assert set(calls.values()) == {3}
    assert (await verify(ledger)).ok
    held = await claim(ledger, 10)
    await complete(ledger, held)
    assert Shell(path).value("PRAGMA integrity_check") == "ok"
    await ledger.close()
