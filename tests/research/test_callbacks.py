"""Callbacks in the whole chain: what is forged, stale, replayed or foreign changes nothing and leaves one record; a zombie changes nothing."""

import json
from typing import Any

import pytest

from tests.research.holding import STAGES
from tests.research.rig import OTHER, Nlm, Rig, accept_only, under_way
from trellis.documents.audit_log import ActRecorder
from trellis.documents.publisher import DocumentPublisher
from trellis.lifecycles import Role
from trellis.research.backend_client import ExecutionRequest, ExecutionUnderWay
from trellis.research.context import snapshot_key


async def _records(rig: Rig) -> list[dict[str, Any]]:
    """The audit records about callbacks."""
    projector = rig.instance.actor(Role.PROJECTOR)
    await ActRecorder(rig.instance.ledger, projector, DocumentPublisher(rig.instance.objects)).publish_new()
    found = [await rig.instance.objects.get(info.key) for info in (await rig.instance.objects.list("audit/2")).items]
    told = [json.loads(one.body) for one in found if one is not None]
    return [one for one in told if one["event"].startswith("callback.")]


@pytest.mark.requirement("D26", "JQ-6")
async def test_forged_stale_foreign_and_replayed_callbacks_have_no_effect_and_one_record_each(rig: Rig):
    rig.nlm.answer = accept_only
    job_id, other = await rig.submit(), await rig.submit(agent_slug=OTHER)
    await rig.work(job_id, "NOTEBOOKLM_CALL")
    await rig.work(other, "NOTEBOOKLM_CALL")
    await rig.until(lambda: len(rig.nlm.asked) == 2)
    mine = next(one for one in rig.nlm.asked if one.job_id == job_id)
    staged = (await rig.nlm.stage(mine)).json()
    good = {"status": "COMPLETE", **{name: staged[name] for name in ("artifact_id", "sha256", "size")}}
    before = [await rig.events(job_id), await rig.events(other)]
    hostile = {
        "forged": (await rig.nlm.call_back(mine, secret=b"x" * 32, **good), 401),
        "stale": (await rig.nlm.call_back(mine, at=rig.clock() - 301, **good), 401),
        "from the future": (await rig.nlm.call_back(mine, at=rig.clock() + 301, **good), 401),
        "foreign": (await rig.nlm.call_back(mine, **{**good, "job_id": other}), 422),
        "older epoch": (await rig.nlm.call_back(mine, **{**good, "epoch": mine.epoch - 1}), 409),
        "newer epoch": (await rig.nlm.call_back(mine, **{**good, "epoch": mine.epoch + 1}), 409),
        "half": (await rig.nlm.call_back(mine, status="COMPLETE"), 422),
    }
    assert {named: answer.status_code for named, (answer, _) in hostile.items()} == {
        named: status for named, (_, status) in hostile.items()
    }
    await rig.pass_time(2.0)
    assert [await rig.events(job_id), await rig.events(other)] == before, "nothing has moved"
    assert [one["event"] for one in await _records(rig)] == ["callback.refused"] * len(hostile)
    assert (await rig.nlm.call_back(mine, id_="the-one", **good)).status_code == 202
    again = await rig.nlm.call_back(mine, id_="the-one", **good)
    assert (again.status_code, again.headers["idempotency-replayed"]) == (202, "true")
    changed = await rig.nlm.call_back(mine, id_="the-one", **{**good, "size": 1})
    assert (changed.status_code, changed.json()["code"]) == (409, "DUPLICATE_ENTRY")
    done = await rig.live(job_id, "COMPLETE")
    late = await rig.nlm.call_back(mine, id_="late", **good)
    assert (late.status_code, late.json()["code"]) == (409, "INVALID_TRANSITION")
    assert await rig.path(job_id) == ["PENDING", "QUEUED", *STAGES, "COMPLETE"]
    assert done["artifact_id"] == staged["artifact_id"]
    kinds = [one["event"] for one in await _records(rig)]
    assert kinds.count("callback.repeated") == 1
    assert kinds.count("callback.refused") == len(hostile) + 2, "the changed one, and the late one"


@pytest.mark.requirement("NLM-5", "ART-3", "D2")
async def test_a_zombie_backend_cannot_replace_the_winners_artifact(rig: Rig):
    rig.nlm.answer = accept_only
    job_id = await rig.submit()
    await rig.work(job_id, "NOTEBOOKLM_CALL")
    await rig.until(lambda: len(rig.nlm.asked) == 1)
    zombie = rig.nlm.asked[0]
    staged = await rig.nlm.stage(zombie)
    rig.orchestrator.claiming = False
    await rig.lose_leases()
    rig.orchestrator.claiming, rig.nlm.answer = True, None
    done = await rig.work(job_id, "COMPLETE")
    winner = (await rig.owner.get(f"/artifacts/{done['artifact_id']}")).content
    assert done["attempt"] == 1
    assert done["artifact_id"] != staged.json()["artifact_id"]
    content = json.loads(winner)["content"]
    other = await rig.nlm.stage(zombie, content={**content, "summary": "of the dead"})
    assert (other.status_code, other.json()["code"]) == (409, "CONFLICT")
    same = await rig.nlm.stage(zombie, content=content)
    assert (same.status_code, same.json()["artifact_id"]) == (200, done["artifact_id"]), "there is one, and it stays"
    called = await rig.nlm.complete(zombie, staged)
    assert (called.status_code, called.json()["code"]) == (409, "LEASE_LOST")
    assert (await rig.owner.get(f"/artifacts/{done['artifact_id']}")).content == winner
    assert (await rig.owner.get(f"/artifacts/{staged.json()['artifact_id']}")).status_code == 404
    assert (await rig.job(job_id))["version"] == done["version"]


@pytest.mark.requirement("D2", "NLM-5")
async def test_a_zombie_that_comes_while_the_next_attempt_is_at_work_changes_nothing(rig: Rig):
    seen: dict[str, int] = {}

    async def overtaken(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
        zombie = nlm.asked[0]
        if execution.epoch == zombie.epoch:
            return under_way(execution)
        late = await nlm.stage(zombie)
        seen["staged"] = late.status_code
        told = {"artifact_id": "art-00000000-0000-4000-8000-000000000000", "sha256": "0" * 64, "size": 1}
        seen["called"] = (await nlm.call_back(zombie, status="COMPLETE", **told)).status_code
        return under_way(execution)

    rig.nlm.answer = overtaken
    job_id = await rig.submit()
    await rig.work(job_id, "NOTEBOOKLM_CALL")
    await rig.until(lambda: len(rig.nlm.asked) == 1)
    await rig.lose_leases()
    await rig.work(job_id, "NOTEBOOKLM_CALL")
    await rig.until(lambda: "called" in seen)
    await rig.pass_time(2.0)
    assert seen == {"staged": 409, "called": 409}
    assert await rig.status(job_id) == "NOTEBOOKLM_CALL", "the attempt at work still waits for its own"


@pytest.mark.requirement("AUTH-3", "AUTH-2")
async def test_a_context_is_read_by_the_backend_of_that_job_and_by_no_other(rig: Rig):
    job_id = await rig.submit(entity_refs=["violin"])
    await rig.work(job_id, "COMPLETE")
    place = f"/jobs/{job_id}/context/{rig.nlm.asked[0].epoch}"
    allowed = [rig.client(Role.NLM_BACKEND, job_id=job_id), rig.owner]
    bodies = {(await client.get(place)).content for client in [*allowed, rig.client(Role.ORCHESTRATOR)]}
    assert len(bodies) == 1
    told = json.loads(bodies.pop())
    assert (told["job_id"], told["epoch"], told["agent_slug"]) == (job_id, rig.nlm.asked[0].epoch, "archivist-violin")
    assert [one["slug"] for one in told["entities"]] == ["violin"]
    assert told["sources"], "the agent's sources may be cited"
    assert {one["ref"] for one in told["memory"]["files"]} <= {"memory/snapshot.md", "memory/open_loops.md"}
    backends = [rig.client(Role.NLM_BACKEND, job_id="another"), rig.client(Role.NLM_BACKEND)]
    refused = [*backends, rig.client(Role.FRONTEND), rig.client(Role.WORKER)]
    assert [(await client.get(place)).status_code for client in refused] == [403] * 4
    for missing in (f"/jobs/{job_id}/context/999", "/jobs/nobody/context/1"):
        assert (await rig.owner.get(missing)).status_code == 404


async def test_a_context_that_was_changed_after_it_was_recorded_is_given_to_nobody(rig: Rig):
    job_id = await rig.submit()
    await rig.work(job_id, "COMPLETE")
    epoch = rig.nlm.asked[0].epoch
    await rig.instance.objects.put(snapshot_key(rig.instance.artifacts.cid, job_id, epoch), b'{"changed":true}')
    answer = await rig.owner.get(f"/jobs/{job_id}/context/{epoch}")
    assert (answer.status_code, answer.json()["code"]) == (409, "CONFLICT")
