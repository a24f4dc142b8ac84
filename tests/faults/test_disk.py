"""A full disk and a disk that may not be written: a clear error, nothing half written, and on it goes when there is room."""

import contextlib
import os
import pwd
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import LOGIN
from tests.ledgers.conformance.rig import SUBMITTER
from tests.servers.postgres import PostgresServer, unprivileged_user
from tests.servers.templates import TEMPLATE
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.cli import main
from trellis.engine.errors import DiskFull, LedgerFull, LedgerReadOnly
from trellis.engine.jobs import JobId, NewJob, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.verify import verify
from trellis.http_server.health import ProcessHealth
from trellis.ledgers import open_ledger

PAYLOAD = b'"' + random.Random(0).randbytes(100_000).hex().encode() + b'"'
"""Random, so that no compression makes room."""
JOBS_MAX = 2_000


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own; skips where mounting is not permitted."""
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)


async def fill(ledger: Ledger) -> list[JobId]:
    """Submit until there is no room; what was acknowledged."""
    acknowledged: list[JobId] = []
    for number in range(JOBS_MAX):
        job = NewJob(job_id=JobId(f"job-{number}"), type="big", payload=PAYLOAD)
        try:
            answers = await ledger.submit(SUBMITTER, [job])
        except LedgerFull:
            return acknowledged
        assert answers == [Submitted(job_id=job.job_id, created=True)]
        acknowledged.append(job.job_id)
    raise AssertionError("the disk never was full")


async def check_full(ledger: Ledger, acknowledged: list[JobId]) -> None:
    """The refused job is not there, the acknowledged ones are, and every history replays."""
    assert acknowledged
    assert await ledger.job(JobId(f"job-{len(acknowledged)}")) is None
    assert await ledger.events(JobId(f"job-{len(acknowledged)}")) == []
    report = await verify(ledger)
    assert report.ok, report.violations[:5]
    assert report.jobs == len(acknowledged)


async def test_a_full_disk_refuses_and_loses_nothing_on_sqlite(tmp_path: Path):
    with small_disk(tmp_path / "disk", 6) as disk:
        ledger = await open_ledger(f"sqlite:///{disk / 'ledger.db'}")
        try:
            health = ProcessHealth({"ledger": ledger.ping})
            assert (await health.ready()).is_ready
            acknowledged = await fill(ledger)
            await check_full(ledger, acknowledged)
            full = await health.ready()
            assert (full.is_ready, full.checks) == (False, {"ledger": LedgerFull.code})
            remount(disk, "size=32m")
            assert (await health.ready()).is_ready
            again = NewJob(job_id=JobId(f"job-{len(acknowledged)}"), type="big", payload=PAYLOAD)
            assert await ledger.submit(SUBMITTER, [again]) == [Submitted(job_id=again.job_id, created=True)]
            await check_full(ledger, [*acknowledged, again.job_id])
        finally:
            await ledger.close()


async def test_a_full_disk_refuses_and_loses_nothing_on_postgres(fault_server: PostgresServer, tmp_path: Path):
    folder = fault_server.folder / "full-disk"
    with small_disk(folder, 24):
        _own(folder)
        fault_server.sql(f"CREATE TABLESPACE small LOCATION '{folder}'")
        try:
            fault_server.sql(f'CREATE DATABASE full_disk TEMPLATE "{TEMPLATE}" TABLESPACE small')
            ledger = await open_ledger(fault_server.url("full_disk", LOGIN), hints=False)
            try:
                assert (
                    await verify(ledger)
                ).ok  # every session is open: a new one may need room for the server's own cache
                acknowledged = await fill(ledger)
                await check_full(ledger, acknowledged)
                remount(folder, "size=64m")
                again = NewJob(job_id=JobId(f"job-{len(acknowledged)}"), type="big", payload=PAYLOAD)
                assert await ledger.submit(SUBMITTER, [again]) == [Submitted(job_id=again.job_id, created=True)]
                await check_full(ledger, [*acknowledged, again.job_id])
            finally:
                await ledger.close()
        finally:
            fault_server.drop_database("full_disk")
            fault_server.sql("DROP TABLESPACE small")


@pytest.mark.parametrize("part", ["ledger", "objects", "memory"])
def test_up_on_a_full_disk_ends_with_one_message_that_names_the_folder(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with small_disk(tmp_path / "disk", 4) as disk:
        (disk / "other").write_bytes(bytes(3 * 1024**2))
        at = {name: disk / name if name == part else tmp_path / name for name in ("ledger", "objects", "memory")}
        monkeypatch.setenv("TRELLIS_OBJECTS", f"file://{at['objects']}")
        monkeypatch.setenv("TRELLIS_MEMORY", str(at["memory"]))
        assert main(["up", "--port", "0", "--ledger", f"sqlite:///{at['ledger']}/trellis.db"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: The disk of {at[part]} is full: less than 2 MiB are free.")
        assert "alerts runbook disk-low" in err
        assert not any(folder.exists() for folder in at.values())


@pytest.mark.parametrize("part", ["objects", "memory"])
async def test_an_instance_is_not_ready_while_the_disk_of_a_folder_is_full(part: str, tmp_path: Path):
    with small_disk(tmp_path / "disk", 8) as disk:
        at = {name: disk / name if name == part else tmp_path / name for name in ("objects", "memory")}
        settings = Settings.model_validate({"objects": f"file://{at['objects']}", "memory": str(at["memory"])})
        async with open_instance(settings, f"sqlite:///{tmp_path / 'ledger.db'}") as instance:
            health = ProcessHealth(instance.probes())
            assert (await health.ready()).is_ready
            (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 1024**2))
            assert (await health.ready()).checks == {"ledger": "ok", "objects": "ok", "disk": DiskFull.code}
            (disk / "other").unlink()
            assert (await health.ready()).is_ready


def _own(folder: Path) -> None:
    user = unprivileged_user()
    if user is not None:
        entry = pwd.getpwnam(user)
        os.chown(folder, entry.pw_uid, entry.pw_gid)


async def test_a_disk_that_becomes_read_only_is_reported_on_sqlite(tmp_path: Path):
    with small_disk(tmp_path / "disk", 16) as disk:
        url = f"sqlite:///{disk / 'ledger.db'}"
        ledger = await open_ledger(url)
        await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("before"), type="work")])
        await ledger.close()
        remount(disk, "ro")
        with pytest.raises(LedgerReadOnly):
            await submit_somehow(url)
        remount(disk, "rw")
        ledger = await open_ledger(url)
        assert await ledger.job(JobId("during")) is None
        assert (await verify(ledger)).jobs == 1
        await ledger.close()


async def submit_somehow(url: str) -> None:
    """Opening may already be refused: it would have to write too."""
    ledger = await open_ledger(url)
    try:
        await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("during"), type="work")])
    finally:
        await ledger.close()


async def test_a_read_only_server_is_reported_on_postgres(fault_server: PostgresServer, timed_database: str):
    url = fault_server.url(timed_database, LOGIN)
    fault_server.sql(f'ALTER DATABASE "{timed_database}" SET default_transaction_read_only = on')
    ledger = await open_ledger(url, hints=False)
    try:
        with pytest.raises(LedgerReadOnly):
            await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("during"), type="work")])
        assert (await verify(ledger)).jobs == 0
    finally:
        await ledger.close()
