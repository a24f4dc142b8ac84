"""A whole instance behind the gateway: a run from its beginning to what a person decided about it."""

import pytest

from tests.gateway.serving import PATIENCE_S
from tests.http.conftest import Shell, Token
from trellis import connect
from trellis.http.errors import NotFound, RequestInvalid, VersionDiffers
from trellis.lifecycles import Role

AGENT = "archivist-violin"


@pytest.mark.requirement("RUN-4")
async def test_a_person_decides_about_what_a_run_proposed(address: str, token: Token, working: None):
    async with connect(gateway=address, token=token(Role.OWNER)) as client:
        run = await client.runs.start(AGENT, {"topic": "bows"})
        asked = await client.runs.request(run.run_id)
        assert (asked.agent_slug, asked.trigger, asked.params) == (AGENT, "manual", {"topic": "bows"})
        with pytest.raises(NotFound):
            await client.runs.request("run_2026-01-01_000000_abcdef")
        done = await client.runs.wait(run.run_id, timeout_s=PATIENCE_S)
        assert (done.status, done.steps_completed) == ("completed", 4)
        assert [step.step for step in await client.runs.steps(run.run_id)] == [1, 2, 3, 4]
        assert (await client.runs.manifest(run.run_id)).proposals_created == done.proposals_created
        first, *_ = (await client.proposals.pending()).items
        assert await client.proposals.get(first.id) == first
        with pytest.raises(VersionDiffers):
            await client.proposals.approve(first.id, version=first.version + 1)
        with pytest.raises(RequestInvalid):
            await client.proposals.reject(first.id, "no")
        decided = await client.proposals.approve(first.id, version=first.version, idempotency_key="a")
        assert decided.status != "pending"
        assert (await client.proposals.approve(first.id, version=first.version, idempotency_key="a")).id == first.id
        assert (await client.proposals.apply(first.id)).status == "applied"
        assert first.id in [one.id for one in (await client.proposals.list(status="applied")).items]
        assert (await client.memory.read(AGENT, mode="wide")).version >= 1
        assert (await client.memory.history(AGENT)).items


def test_a_run_is_watched_shown_and_decided_about(shell: Shell, working: None):
    told = shell("run", AGENT, "--watch", "--param", "topic=bows")
    run_id, status, *_ = told.split()
    assert status == "completed"
    assert [one["run_id"] for one in shell.records("runs", "--agent", AGENT, "--limit", "1")] == [run_id]
    assert "4 of 4" in shell("runs", "show", run_id)
    assert len(shell.records("runs", "show", run_id)[0]["steps"]) == 4
    waiting = shell.records("proposals", "--state", "pending")
    assert waiting[0]["id"] in shell("proposals")
    page = shell("proposals", "show", waiting[0]["id"])
    assert page.index("What it would change now") < page.index("\n+++ ") < page.index("\nSources\n")
    assert shell("proposals", "--state", "pending", "--ids").split() == [one["id"] for one in waiting]
    (record,) = shell.records("proposals", "show", waiting[0]["id"])
    assert record.pop("diff")
    assert (record["conflict"], record.pop("rules_out"), record.pop("ruled_out_by")) == (None, [], [])
    assert record.pop("source_warnings") == []
    assert record == waiting[0]
    assert shell("proposals", "approve", waiting[0]["id"]).strip() == f"{waiting[0]['id']} is applied"
    assert "10 characters" in shell("proposals", "reject", waiting[1]["id"], "--note", "no", code=2)
    assert "rejected" in shell("proposals", "reject", waiting[1]["id"], "--note", "the source says otherwise")
    assert "has ended" in shell("runs", "cancel", run_id, code=1)
    assert shell("run", AGENT, "--wait", "60s").split()[1] == "completed"
