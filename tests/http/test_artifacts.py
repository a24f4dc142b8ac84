"""Artifacts through the client, its blocking twin and the command line, over a gateway that is really served."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.desk import CONTENTS, SOURCES, call_nlm, complete, queue_job
from tests.gateway.serving import PATIENCE_S, Served
from tests.http.conftest import Place, Shell, Token
from trellis import connect, connect_sync
from trellis.app.wiring import new_id
from trellis.artifacts.content import JobType
from trellis.artifacts.rows import make_artifact_id
from trellis.engine.jobs import JobId, Lease
from trellis.http.errors import GatewayRefused, NotFound
from trellis.lifecycles import Role

TYPE, CONTENT = CONTENTS[JobType.BRIEF]
MISSING = make_artifact_id("00000000-0000-4000-8000-000000000000")


def there(served: Served, work: Any) -> Any:
    """Do something in the server's own loop."""
    return asyncio.run_coroutine_threadsafe(work, served.loop).result(PATIENCE_S)


@pytest.fixture
def lease(served: Served) -> Lease:
    return there(served, call_nlm(served.instance.ledger, queue_job(new_id(), JobType.BRIEF)))


@pytest.fixture
def final(served: Served, lease: Lease, address: str, token: Token) -> str:
    """A finalized artifact, staged by the blocking client."""
    with connect_sync(gateway=address, token=token(Role.NLM_BACKEND, job_id=lease.job_id)) as backend:
        made = backend.artifacts.stage(
            lease.job_id, TYPE.value, CONTENT, epoch=lease.epoch, entity_refs=["bow"], tags=["test"], sources=SOURCES
        )
        assert (made.job_id, made.finalized, made.url) == (lease.job_id, False, None)
        again = backend.artifacts.stage(lease.job_id, TYPE.value, CONTENT, sources=SOURCES)
        assert again.artifact_id == made.artifact_id
        with pytest.raises(
            NotFound, match="There is no artifact"
        ):  # it reaches its own, and no reader sees a staged one
            backend.artifacts.get(made.artifact_id)
        with pytest.raises(GatewayRefused, match="may not read artifacts"):
            backend.artifacts.get(MISSING)
    instance = served.instance
    assert there(served, complete(instance.ledger, instance.artifacts, lease, JobId(made.artifact_id)))
    return made.artifact_id


@pytest.mark.requirement("ART-1", "ART-4")
async def test_the_client_reads_what_its_twin_staged(final: str, lease: Lease, address: str, token: Token):
    async with connect(gateway=address, token=token(Role.FRONTEND)) as client:
        document = await client.artifacts.get(final)
        assert (document.content, [source.model_dump() for source in document.sources]) == (CONTENT, SOURCES)
        assert (document.finalized, document.version, document.job_id) == (True, 1, lease.job_id)
        (listed,) = (await client.artifacts.list(job_id=lease.job_id, type_=TYPE.value)).items
        assert listed.model_dump() == document.model_dump(exclude={"content", "sources"})
        with pytest.raises(GatewayRefused, match=r"artifacts\.cleanup"):
            await client.artifacts.cleanup()
    async with connect(gateway=address, token=token(Role.CONTROL_PLANE)) as operator:
        done = await operator.artifacts.cleanup(older_than_days=90, dry_run=True, limit=5)
        assert (done.older_than_days, done.dry_run, done.items, done.more) == (90, True, [], False)


def test_the_commands_say_the_same_through_a_gateway_and_from_a_ledger(
    final: str, lease: Lease, shell: Shell, place: Place
):
    ledger = ("--ledger", place.ledger)
    for arguments in (("artifacts", "--job", lease.job_id), ("artifacts", "show", final)):
        remote, local = shell.records(*arguments), shell.records(*arguments, *ledger)
        assert remote == local
        assert remote[0]["artifact_id"] == final
    assert shell("artifacts", "show", final) == shell("artifacts", "show", final, *ledger)
    for where in ((), ledger):
        listed = shell("artifacts", "list", "--type", "brief", "--limit", "3", *where)
        assert (final in listed, "archivist-violin: job" in listed) == (True, True)
        assert shell("artifacts", "--type", "PREPROCESSED_PROPOSAL", *where) == ""
        assert "RESEARCH_BRIEF" in shell("artifacts", "--type", "NOVEL", *where, code=2)
        assert MISSING in shell("artifacts", "show", MISSING, *where, code=1)
        assert "error: There is no" in shell("artifacts", "show", "../x", *where, code=1)
        assert shell("artifacts", "cleanup", "--yes", *where).strip() == "0 artifacts older than 90 days removed"
        assert shell.records("artifacts", "cleanup", "--dry-run", *where) == [
            {"older_than_days": 90, "dry_run": True, "artifacts": [], "more": False}
        ]
        assert "90" in shell("artifacts", "cleanup", "--older-than-days", "3", *where, code=2)
        assert "--older-than-days" in shell("artifacts", "cleanup", "--older-than-days", "0", *where, code=2)


def test_a_download_overwrites_a_file_only_with_force(final: str, shell: Shell, place: Place, tmp_path: Path):
    target = tmp_path / "brief.json"
    for where in ((), ("--ledger", place.ledger)):
        asked = ("artifacts", "download", final, "--output", str(target), *where)
        target.write_bytes(b"mine")
        refused = shell(*asked, code=2)
        assert "the file exists already; name another one, or give --force to overwrite it" in refused
        assert target.read_bytes() == b"mine"
        shell(*asked, "--force")
        assert final.encode() in target.read_bytes()
        shell("artifacts", "download", final, "--output", "/dev/null", *where)
