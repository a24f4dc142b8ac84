"""`trellis rebuild`: one side of an instance is lost and comes back, as a person types it."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal, stored_rows
from tests.cli.test_up import PATIENCE_S, up
from tests.servers.ready_python import ready_python
from tests.servers.seaweedfs import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedServer
from tests.storage.conftest import seaweedfs
from trellis.app.instance import open_instance
from trellis.app.settings import Settings, read_settings
from trellis.app.wiring import SystemClock
from trellis.documents.audit_chain import NLM_CHAIN, AuditSealer
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.runs.projector import Projector
from trellis.storage.objects.open import open_objects

__all__ = ["seaweedfs"]
VIOLIN = "archivist-violin"


def files(folder: Path) -> dict[str, bytes]:
    """What is published; the store's own locks are not. A rebuild's own record, and the chain it begins, are made by it."""
    found = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    published = {name: file for name, file in found.items() if not name.startswith(".trellis/")}
    return {
        name: file.read_bytes() for name, file in published.items() if "-rebuilt-" not in name and "/chain/" not in name
    }


def lose_ledger(folder: Path) -> None:
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        (folder / name).unlink(missing_ok=True)


def publish(url: str) -> None:
    """Publish everything of the instance."""

    async def publish_all() -> None:
        async with open_instance(read_settings(os.environ, Path()), url) as instance:
            (projector,) = (one for one in instance.services() if isinstance(one, Projector))
            while (await projector.run_once()).events:
                pass
            await projector.release()

    asyncio.run(publish_all())


@pytest.fixture
def used(local: Terminal) -> Terminal:
    """An instance with jobs of which everything is published."""
    local.submit("greet", '"world"', "--id", "first", "--key", "once")
    local.submit("greet", '"later"', "--delay", "1h")

    publish(local.url)
    return local


@pytest.fixture
def planted(local: Terminal) -> Terminal:
    """An instance with the agents of the garden."""

    async def plant() -> None:
        async with open_instance(Settings.model_validate({}), local.url) as instance:
            await instance.plant()

    asyncio.run(plant())
    return local


@pytest.mark.requirement("D14", "OBS-1", "PIPE-8")
def test_a_lost_ledger_comes_back_and_then_a_lost_bucket(planted: Terminal, tmp_path: Path):
    used = planted
    used.submit("greet", '"world"', "--id", "first", "--key", "once")
    assert used("run", VIOLIN, "--watch").code == 0
    jobs = {record["job_id"]: record["status"] for record in stored_rows(used)}
    before = files(tmp_path / "objects")
    lose_ledger(tmp_path)
    (tmp_path / "ledger.db.key").unlink()
    done = used("rebuild", "--from", "objects", "--json").record
    assert (done["jobs"], done["refused"]) == (len(jobs), 0)
    assert {record["job_id"]: record["status"] for record in stored_rows(used)} == jobs
    assert used("verify").code == 0
    assert files(tmp_path / "objects") == before
    assert used("submit", "greet", '"world"', "--id", "first", "--key", "once").out.strip() == "first"
    again = used("rebuild", "--from", "objects")
    assert (again.code, f"{len(jobs)} there already" in again.out) == (0, True)
    shutil.rmtree(tmp_path / "objects" / "audit")
    (run,) = (tmp_path / "objects" / "agents" / VIOLIN / "runs").iterdir()
    shutil.rmtree(run)
    answer = used("rebuild", "--from", "ledger")
    assert answer.code == 0
    assert f"{len(jobs)} jobs" in answer.out
    assert files(tmp_path / "objects") == before
    assert used("rebuild", "--from", "ledger", "--json").record["written"] == 0


async def publish_of_nlm_backend(url: str, place: Path) -> None:
    """Give the NLM backend's own ledger one job, and publish and seal its events as the backend does."""
    ledger, objects = await open_ledger(url), await open_objects(f"file://{place}")
    job = NewJob(job_id=JobId("asked@1"), type="nlm.process", lifecycle=NLM_JOB.name, payload=b"{}")
    await ledger.submit(Actor(role=Role.NLM_BACKEND, name="backend@test"), [job])
    actor, clock = Actor(role=Role.PROJECTOR, name="projector@test"), SystemClock()
    sealer = AuditSealer(ledger=ledger, actor=actor, objects=objects, clock=clock, chain=NLM_CHAIN)
    publisher = DocumentPublisher(objects)
    projector = Projector(ledger=ledger, actor=actor, publisher=publisher, sealer=sealer, clock=clock)
    while (await projector.run_once()).events:
        pass
    await projector.release()
    await objects.close()
    await ledger.close()


@pytest.mark.requirement("OBS-1", "D14")
def test_records_of_the_nlm_backend_come_back_with_a_lost_bucket(used: Terminal, tmp_path: Path):
    """The backend has a ledger and an audit chain of its own: without them every later audit would find violations."""
    asyncio.run(publish_of_nlm_backend(f"sqlite:///{tmp_path / 'nlm.db'}", tmp_path / "objects"))
    assert "of the NLM backend with 1 record" in used("audit", "verify").out
    before = files(tmp_path / "objects")
    shutil.rmtree(tmp_path / "objects" / "audit")
    answer = used("rebuild", "--from", "ledger")
    assert (answer.code, "NLM backend: 1 job, 1 event: 1 object written" in answer.out) == (0, True), answer.out
    assert files(tmp_path / "objects").keys() == before.keys()
    audited = used("audit", "verify")
    assert (audited.code, "no violation" in audited.out) == (0, True), audited.out
    record = used("rebuild", "--from", "ledger", "--json").record
    assert (record["written"], record["nlm_backend"]["written"]) == (0, 0)


def test_objects_that_differ_are_named_and_left(planted: Terminal, tmp_path: Path):
    assert planted("run", VIOLIN, "--watch").code == 0
    (run,) = (tmp_path / "objects" / "agents" / VIOLIN / "runs").iterdir()
    damaged = [run / "steps" / "02-execute-agent.json", *(tmp_path / "objects" / "audit").rglob("prop_*-1.json")][:2]
    for file in damaged:
        file.write_bytes(b"{}")
    answer = planted("rebuild", "--from", "ledger")
    assert (answer.code, "2 objects not as the ledger recorded" in answer.out) == (1, True)
    named = planted("rebuild", "--from", "ledger", "--json").record["differing"]
    assert named == sorted(str(file.relative_to(tmp_path / "objects")) for file in damaged)
    for file in damaged:
        file.unlink()
    assert planted("rebuild", "--from", "ledger").code == 0


def test_rebuild_names_each_job_it_could_not_restore(used: Terminal, tmp_path: Path):
    (segment,) = (tmp_path / "objects" / "audit").rglob("*.jsonl")
    line = next(line for line in segment.read_bytes().splitlines() if b"first-1" in line)
    segment.with_name("again.jsonl").write_bytes(line.replace(b'"version":1', b'"version":3'))
    lose_ledger(tmp_path)
    answer = used("rebuild", "--from", "objects")
    assert answer.code == 1
    assert "1 job not put back" in answer.out
    assert "first  version 3" in answer.out
    assert used("verify").code == 0


def test_contradictory_rebuild_options_are_refused_with_a_remedy(
    used: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert (used("rebuild", "--from", "memory").code, used("rebuild").code) == (2, 2)
    used.submit("greet", '"new"')
    other = used("rebuild", "--from", "objects")
    assert (other.code, "not in the record" in other.err) == (1, True)
    lose_ledger(tmp_path)
    missing = used("rebuild", "--from", "ledger")
    assert (missing.code, "no such file" in missing.err) == (1, True)
    monkeypatch.setenv("TRELLIS_OBJECTS", f"file://{tmp_path / 'elsewhere'}")
    empty = used("rebuild", "--from", "objects")
    assert (empty.code, "TRELLIS_OBJECTS" in empty.err) == (1, True)
    assert not (tmp_path / "ledger.db").exists(), "nothing is made where nothing can be put back"


@pytest.mark.parametrize("remains", ["no file", "an empty file"])
def test_up_makes_no_new_ledger_beside_records_of_a_lost_one(used: Terminal, tmp_path: Path, remains: str):
    lose_ledger(tmp_path)
    if remains == "an empty file":
        (tmp_path / "ledger.db").touch()
    refused = subprocess.run(
        [ready_python(), "-m", "trellis", "up", "--roles", "sweeper", "--ledger", used.url],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert refused.returncode == 1
    assert "is empty" in refused.stderr if remains == "an empty file" else "does not exist" in refused.stderr
    assert f"trellis rebuild --from objects --ledger {used.url}`" in refused.stderr
    assert f"move {tmp_path / 'objects'} away" in refused.stderr
    assert (tmp_path / "ledger.db").exists() == (remains == "an empty file")
    assert used("rebuild", "--from", "objects", "--json").record["jobs"] == 2
    with up(tmp_path, "--roles", "sweeper", "--ledger", used.url) as running:
        assert "ledger    sqlite:" in running.said


def test_migrate_says_that_the_new_ledger_is_beside_records_of_a_lost_one(used: Terminal, tmp_path: Path):
    lose_ledger(tmp_path)
    migrated = used("migrate")
    assert f"{tmp_path / 'objects'} has audit records of one that was lost" in " ".join(migrated.err.split())
    assert used("rebuild", "--from", "objects", "--json").record["jobs"] == 2
    assert "lost" not in used("migrate").err


def test_up_refuses_an_empty_ledger_beside_the_records_of_a_lost_one_in_a_bucket(
    local: Terminal, tmp_path: Path, seaweedfs: SeaweedServer, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRELLIS_OBJECTS", seaweedfs.url("lost-ledger"))
    local.submit("greet", '"world"', "--id", "first")
    publish(local.url)
    lose_ledger(tmp_path)
    refused = local("up", "--roles", "sweeper")
    assert (refused.code, refused.out) == (1, "")
    assert f"s3://{BUCKET}/lost-ledger has audit records" in refused.err
    assert "TRELLIS_OBJECTS to another bucket or prefix" in refused.err
    assert not (tmp_path / "ledger.db").exists()
    assert f"s3://{BUCKET}/lost-ledger has audit records of one that was lost" in " ".join(local("migrate").err.split())
    assert local("rebuild", "--from", "objects", "--json").record["jobs"] == 1


def test_up_makes_a_ledger_where_the_objects_were_moved_away_or_have_no_records(used: Terminal, tmp_path: Path):
    lose_ledger(tmp_path)
    (tmp_path / "objects").rename(tmp_path / "objects-before")
    (tmp_path / "objects" / "agents").mkdir(parents=True)
    (tmp_path / "objects" / "agents" / "note.md").write_text("no record of a job")
    with up(tmp_path, "--roles", "sweeper", "--ledger", used.url) as running:
        assert "ledger    sqlite:" in running.said
    assert stored_rows(used) == []


@pytest.mark.requirement("AUTH-7")
def test_only_an_operator_may_rebuild_from_the_command_line(
    local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    token = local("token", "issue", "--role", "submitter").out.strip()
    monkeypatch.setenv("TRELLIS_TOKEN", token)
    answer = local("rebuild", "--from", "ledger")
    assert (answer.code, "control-plane" in answer.err) == (1, True)


def test_types_with_records_of_their_own_are_listed_in_a_setting(tmp_path: Path):
    assert read_settings({"TRELLIS_AUDIT_OBJECTS": "pay, pay.back"}, tmp_path).audit_objects == ("pay", "pay.back")
    (tmp_path / "trellis.toml").write_text('audit_objects = ["pay"]\n')
    assert read_settings({}, tmp_path).audit_objects == ("pay",)
