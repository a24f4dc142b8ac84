"""`trellis artifacts`: an operator looks at what queue jobs left behind, and removes what is old for good."""

import asyncio
import hashlib
import time
from pathlib import Path

import pytest

from tests.artifacts.desk import BACKEND as NLM
from tests.artifacts.desk import CONTENTS, DAY_S, OPERATOR, SOURCES, call_nlm, complete, draft, queue_job
from tests.cli.conftest import Terminal
from trellis.app.settings import PROJECT_DEFAULT
from trellis.app.wiring import development_key, new_id
from trellis.artifacts.content import JobType
from trellis.artifacts.registry import ArtifactRegistry
from trellis.artifacts.rows import project_id
from trellis.auth.tokens import issue
from trellis.cli.artifacts import show_page
from trellis.cli.invocation import Cli
from trellis.cli.output import Output
from trellis.engine.jobs import CancelMode, RequestId
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.storage.objects.open import open_objects


def finalize(terminal: Terminal, count: int, *, days_ago: float) -> list[str]:
    """Artifacts that became final so long ago."""

    async def make() -> list[str]:
        ledger = await open_ledger(terminal.url, clock=lambda: time.time() - days_ago * DAY_S)
        objects = await open_objects((folder_of(terminal) / "objects").as_uri())
        artifacts = ArtifactRegistry(ledger=ledger, objects=objects, cid=project_id(PROJECT_DEFAULT), new_id=new_id)
        made: list[str] = []
        for _ in range(count):
            lease = await call_nlm(ledger, queue_job(new_id()))
            job = await ledger.job(lease.job_id)
            assert job is not None
            staged = await artifacts.stage(NLM, draft(), job=job)
            assert await complete(ledger, artifacts, lease, staged.artifact_id)
            made.append(staged.artifact_id)
        await objects.close()
        await ledger.close()
        return made

    return asyncio.run(make())


def staged(terminal: Terminal) -> str:
    """An artifact whose job an operator cancelled."""

    async def make() -> str:
        ledger = await open_ledger(terminal.url)
        objects = await open_objects((folder_of(terminal) / "objects").as_uri())
        artifacts = ArtifactRegistry(ledger=ledger, objects=objects, cid=project_id(PROJECT_DEFAULT), new_id=new_id)
        lease = await call_nlm(ledger, queue_job(new_id()))
        job = await ledger.job(lease.job_id)
        assert job is not None
        made = await artifacts.stage(NLM, draft(), job=job)
        request = RequestId(new_id())
        await ledger.cancel(OPERATOR, lease.job_id, CancelMode.HARD, request, grace_s=0, cause="test")
        await objects.close()
        await ledger.close()
        return made.artifact_id

    return asyncio.run(make())


@pytest.mark.requirement("ART-8")
def test_an_operator_discards_a_staged_artifact_and_no_final_one(local: Terminal):
    given_up, (final,) = staged(local), finalize(local, 1, days_ago=0)
    told = local("artifacts", "discard", given_up, "--reason", "not wanted", "--json").record
    assert told == {"artifact_id": given_up, "status": "discarded"}
    assert local("job", "show", given_up, "--json").record["status"] == "discarded"
    refused = local("artifacts", "discard", final)
    assert (refused.code, "it is final" in refused.err) == (1, True)


@pytest.mark.requirement("ART-6")
def test_a_download_is_the_stored_bytes_with_the_hash_that_the_jobs_result_names(local: Terminal, tmp_path: Path):
    (made,) = finalize(local, 1, days_ago=0)
    (stored,) = [path.read_bytes() for path in (tmp_path / "objects").rglob(f"*{made}*") if path.is_file()]
    printed = local("artifacts", "download", made)
    assert (printed.code, printed.out.encode()) == (0, stored)
    assert printed.err == f"sha256 {hashlib.sha256(stored).hexdigest()}, {len(stored)} bytes\n"
    told = local("artifacts", "download", made, "-o", str(tmp_path / "copy.json"), "--json").record
    assert (tmp_path / "copy.json").read_bytes() == stored
    assert (told["sha256"], told["size"]) == (hashlib.sha256(stored).hexdigest(), len(stored))
    refused = local("artifacts", "download", made, "-o", str(tmp_path / "nowhere" / "copy.json"))
    assert (refused.code, "it cannot be written (No such file or directory)" in refused.err) == (2, True)
    assert local("artifacts", "download", "art-unknown").code == 1


def folder_of(terminal: Terminal) -> Path:
    return Path(terminal.url.removeprefix("sqlite:///")).parent


@pytest.mark.requirement("ART-5")
def test_cleanup_removes_old_artifacts_after_the_operator_confirms(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    assert local("migrate").code == 0
    old, young = finalize(local, 2, days_ago=100), finalize(local, 1, days_ago=10)
    assert [one["artifact_id"] for one in local("artifacts", "--json").records] == [*young, *reversed(old)]
    shown = local("artifacts", "--limit", "1")
    assert (young[0] in shown.out, old[0] in shown.out, "10d" in shown.out) == (True, False, True)
    planned = local("retention", "plan").err
    assert "3 finalized artifacts stay for ever: an artifact is a result" in planned
    asked = local("artifacts", "cleanup")
    assert (asked.code, "2 artifacts would be removed: say --yes" in asked.err) == (2, True)
    dry = local("artifacts", "cleanup", "--dry-run")
    assert dry.out.splitlines() == [*old, "2 artifacts older than 90 days would be removed"]
    monkeypatch.setenv("TRELLIS_TOKEN", _token(local, Role.OWNER))
    assert local("artifacts", "cleanup", "--yes").code == 1
    monkeypatch.setenv("TRELLIS_TOKEN", _token(local, Role.CONTROL_PLANE))
    first = local("artifacts", "cleanup", "--yes", "--limit", "1")
    assert (first.out.splitlines()[0], "there are more" in first.err) == (old[0], True)
    monkeypatch.delenv("TRELLIS_TOKEN")
    assert local("artifacts", "cleanup", "--yes", "--json").record["artifacts"] == old[1:]
    assert [one["artifact_id"] for one in local("artifacts", "--json").records] == young
    assert local("artifacts", "show", old[0]).code == 1
    assert local("artifacts", "show", young[0], "--json").record["finalized"] is True
    assert [event["type"] for event in local("job", "show", old[0], "--json").record["events"]] == [
        "artifact.staged",
        "artifact.finalized",
        "artifact.removed",
    ]


@pytest.mark.requirement("ART-5")
def test_how_long_artifacts_are_kept_is_a_setting(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    assert local("migrate").code == 0
    (made,) = finalize(local, 1, days_ago=10)
    assert local("artifacts", "cleanup", "--older-than-days", "9", "--yes").code == 2
    monkeypatch.setenv("TRELLIS_ARTIFACT_DAYS", "7")
    assert local("artifacts", "cleanup", "--older-than-days", "11", "--yes", "--json").record["artifacts"] == []
    assert local("artifacts", "cleanup", "--older-than-days", "9", "--yes", "--json").record["artifacts"] == [made]


def _token(terminal: Terminal, role: Role) -> str:
    return issue(development_key(terminal.url), name="iryna", roles=[role], ttl_s=600, now=time.time())


PAGES = {
    JobType.RESEARCH: ("Research Brief: смичок", "## Hair", "rehaired in March.  (sources/bows.md)", "- Who does it?"),
    JobType.BRIEF: ("Bows", "A bow is strung.", "- bow: Bow", "4 words"),
    JobType.PROPOSAL_PREPROCESS: ('"target": "bow"', "- warning: target: It does not resolve.", "'bow' is bow (91%)"),
}


@pytest.mark.parametrize("job_type", JobType)
def test_an_artifact_is_shown_as_a_page_to_read(job_type: JobType, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    type_, content = CONTENTS[job_type]
    beside = {"type": type_.value, "agent_slug": "a", "finalized_at": "2026-03-01", "job_id": "j-1", "sources": SOURCES}
    out = Output(as_json=False)
    show_page(Cli(ledger=None, data=tmp_path, out=out), {**beside, "content": content})
    told = capsys.readouterr().out
    assert [text for text in PAGES[job_type] if text not in told] == []
    assert "1 quotation of its sources: --json shows them" in told
    show_page(Cli(ledger=None, data=tmp_path, out=out), {**beside, "sources": [], "content": content})
    assert "It quotes no source." in capsys.readouterr().out
