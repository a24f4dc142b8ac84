"""An older version's processes and this version's work on one PostgreSQL ledger while it is migrated under load."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path

import pytest

from tests.faults.effects import EFFECTS_APPLICATION
from trellis import connect
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.migrate import migrate

ROOT = Path(__file__).resolve().parents[2]
OLDER = "d480ad20"
"""The commit of the older version: the last one with schema version 22."""
APP = f"""{EFFECTS_APPLICATION}
@app.job("effect", lease_s=30)
async def effect(ctx: Context, payload: int) -> int:
    return await leave_line(payload)

@app.job("flaky", lease_s=30)
async def flaky(ctx: Context, payload: int) -> int:
    if ctx.attempt < 2:
        raise RuntimeError("the first attempt fails")
    return payload
"""
SUBMITTER = """
import asyncio, sys
from trellis import connect

async def main():
    async with connect(sys.argv[1]) as trellis:
        for line in sys.stdin:
            first, n = map(int, line.split())
            for type_ in ("effect", "flaky"):
                await trellis.submit_many(type_, range(first, first + n))
            print(n, flush=True)

asyncio.run(main())
"""
QUARTER = 500
A_BATCH = 25


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the older version."""
    folder = tmp_path_factory.mktemp("older")
    archive = subprocess.run(["git", "archive", OLDER, "src"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history of this clone does not reach back to {OLDER}")
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "src"


class Fleet:
    """Processes of both versions on one ledger."""

    def __init__(self, url: str, folder: Path, older: Path) -> None:
        self.url, self.folder = url, folder
        self._sources = {"older": older, "newer": ROOT / "src"}
        self._started: list[subprocess.Popen[bytes]] = []

    def environment(self, version: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": f"{self._sources[version]}:{self.folder}",
            "EFFECTS": str(self.folder / "effects"),
            "TRELLIS_LEDGER": self.url,
        }

    @property
    def effects(self) -> list[str]:
        """The payloads for which a handler ran, in order."""
        file = self.folder / "effects"
        return file.read_text().split() if file.exists() else []

    def log(self, version: str) -> str:
        return (self.folder / f"{version}.log").read_text()

    def start(self, version: str, *words: str) -> "subprocess.Popen[bytes]":
        environment = self.environment(version)
        with (self.folder / f"{version}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trellis", *words], cwd=self.folder, env=environment, stdout=log, stderr=log
            )
        self._started.append(process)
        return process

    def run(self, version: str, *words: str) -> None:
        assert self.start(version, *words).wait(120) == 0, self.logs()

    def worker(self, version: str) -> "subprocess.Popen[bytes]":
        return self.start(version, "worker", "app:app", "--concurrency", "8")

    def logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in self.folder.glob("*.log"))

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def fleet(new_postgres_database: Callable[..., str], tmp_path: Path, older: Path) -> Generator[Fleet]:
    (tmp_path / "app.py").write_text(APP)
    with contextlib.closing(Fleet(new_postgres_database(), tmp_path, older)) as made:
        yield made


@pytest.mark.prove
@pytest.mark.timeout(600)
async def test_older_and_newer_processes_share_a_ledger_that_is_migrated_under_load(fleet: Fleet):
    fleet.run("older", "migrate")
    older = [fleet.worker("older") for _ in range(2)]
    async with _older_submitter(fleet) as submit:
        await submit(range(QUARTER))
        await _until(lambda: fleet.effects, "older workers work", fleet.logs)
        await submit(range(QUARTER, 2 * QUARTER))
        await migrate(fleet.url)
        seen = len(fleet.effects)
        await submit(range(2 * QUARTER, 3 * QUARTER))
        await _until(lambda: len(fleet.effects) > seen, "older workers go on after the migration", fleet.logs)
        for _ in range(2):
            fleet.worker("newer")
        await _until(lambda: fleet.log("newer").count("serves") == 2, "newer workers work", fleet.logs)
        assert [process.poll() for process in older] == [None, None], fleet.logs()
    older[0].send_signal(signal.SIGTERM)
    async with connect(fleet.url) as trellis:
        for type_ in ("effect", "flaky"):
            await trellis.submit_many(type_, range(3 * QUARTER, 4 * QUARTER))
    older[1].send_signal(signal.SIGTERM)
    assert [await asyncio.to_thread(process.wait, 60) for process in older] == [0, 0], fleet.logs()
    await _check_ends(fleet.url, 4 * QUARTER)
    effects = Counter(fleet.effects)
    assert len(effects) == 4 * QUARTER, "no job was lost"
    assert set(effects.values()) == {1}, "no job ran twice"


@contextlib.asynccontextmanager
async def _older_submitter(fleet: Fleet) -> AsyncIterator[Callable[[range], Awaitable[None]]]:
    """A client of the older version that was opened before the migration and submits all the time."""
    (fleet.folder / "submitter.py").write_text(SUBMITTER)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(fleet.folder / "submitter.py"), fleet.url),
        env=fleet.environment("older"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    sink, source = process.stdin, process.stdout

    async def submit(numbers: range) -> None:
        for first in range(numbers.start, numbers.stop, A_BATCH):
            sink.write(f"{first} {A_BATCH}\n".encode())
            await sink.drain()
            assert await source.readline(), fleet.logs()

    yield submit
    sink.close()
    assert await process.wait() == 0


async def _until(condition: Callable[[], object], what: str, logs: Callable[[], str] = str) -> None:
    """Wait for other processes."""
    try:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - other processes change it
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"did not happen: {what}\n{logs()}")


async def _check_ends(url: str, submitted: int) -> None:
    """Wait until every job succeeded, with a history that replays."""
    ledger = await open_ledger(url)
    try:
        async with asyncio.timeout(120):
            while any(  # noqa: ASYNC110 - other processes change it
                queue.ready + queue.scheduled + queue.blocked + queue.held for queue in await ledger.queues()
            ):
                await asyncio.sleep(0.2)
        report = await verify(ledger)
        assert report.ok, report.violations[:3]
        ended = Counter([(history.job.type, history.job.state) async for history in ledger.histories()])
    finally:
        await ledger.close()
    assert ended == {("effect", "succeeded"): submitted, ("flaky", "succeeded"): submitted}
