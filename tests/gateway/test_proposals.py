"""Proposals, memory and logic over HTTP: anybody who may proposes, a person decides, the apply engine changes."""

import asyncio
from typing import Any

import pytest

from tests.gateway.conftest import VIOLIN, Gateway
from tests.gateway.world import LOGICIAN, everything, make_world, proposal
from trellis.api import proposals as application
from trellis.cli.run_output import flags_of
from trellis.engine.jobs import Actor, Claim, ClaimId, JobId, Turn, TypeClaim
from trellis.http.calls import ATTEMPT_S_DEFAULT
from trellis.lifecycles import Role
from trellis.proposals import proposal as proposals
from trellis.runs.orchestration import TriggerKind
from trellis.storage.memory.layout import ReadMode

FACT = {"file": "facts.md", "operation": "append", "content": "- TB-02 was rehaired in March"}


def memory_wish(**more: Any) -> dict[str, Any]:
    return {"summary": "one more fact", "updates": [FACT], **more}


@pytest.mark.requirement("RUN-4")
async def test_proposals_are_listed_by_state_page_by_page(gateway: Gateway):
    client = gateway.client("frontend")
    made = [await proposal(gateway) for _ in range(3)]
    approved = await proposal(gateway, approved=True)
    first = (await client.get("/proposals/pending", params={"limit": 2})).json()
    rest = (await client.get("/proposals/pending", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert [item["id"] for item in first["items"] + rest["items"]] == made[::-1]
    assert rest["next_cursor"] is None
    assert [item["id"] for item in (await client.get("/proposals?status=approved")).json()["items"]] == [approved]
    assert len((await client.get("/proposals")).json()["items"]) == 4
    assert (await client.get("/proposals?status=lost")).status_code == 422


async def test_a_proposal_is_read_with_its_version_as_its_etag(gateway: Gateway):
    id_ = await proposal(gateway, text="keep the humidity at 45 %")
    client = gateway.client("owner")
    found = await client.get(f"/proposals/{id_}")
    assert (found.headers["ETag"], found.json()["version"], found.json()["status"]) == ('"1"', 1, "pending")
    assert found.json()["content"]["change"]["text"] == "keep the humidity at 45 %"
    assert (await client.get(f"/proposals/{id_}", headers={"If-None-Match": '"1"'})).status_code == 304
    assert (await client.get(f"/proposals/{id_}", headers={"If-None-Match": '"2"'})).status_code == 200
    assert (await client.get("/proposals/prop_2026-01-01_nothing")).status_code == 404


@pytest.mark.requirement("D22")
@pytest.mark.parametrize(
    "grounds",
    [[None, "abc", 3], "abc", [{"citations": [{}, None, {"ref": 1}], "flags": 2}], [{"citations": {"ref": "x"}}]],
)
async def test_proposal_with_reasons_of_another_form_is_shown(gateway: Gateway, grounds: Any):
    note = await proposal(gateway, text="a note", grounds=grounds)
    answer = await gateway.client("owner").get(f"/proposals/{note}/diff")
    assert (answer.status_code, answer.json()["source_warnings"]) == (200, [])
    assert flags_of((await gateway.client("owner").get(f"/proposals/{note}")).json()["content"]) == []


@pytest.mark.requirement("D22", "D44")
async def test_proposal_diff_shows_the_present_change(gateway: Gateway):
    owner = gateway.client("owner")
    note = await proposal(gateway, text="keep the humidity at 45 %")
    key = f"agents/{VIOLIN}/notes/{note}.md"
    found = (await owner.get(f"/proposals/{note}/diff")).json()
    assert found == {
        "id": note,
        "version": 1,
        "diff": f"--- /dev/null\n+++ {key}\n@@ -0,0 +1 @@\n+keep the humidity at 45 %\n",
        "conflict": None,
        "rules_out": [],
        "ruled_out_by": [],
        "source_warnings": [],
    }
    await gateway.instance.objects.put(key, b"somebody was faster\n")
    answer = (await owner.get(f"/proposals/{note}/diff")).json()
    changed = answer["diff"]
    assert answer["conflict"].startswith(f"{key} has changed since this was proposed")
    assert changed == f"--- {key}\n+++ {key}\n@@ -1 +1 @@\n-somebody was faster\n+keep the humidity at 45 %\n"
    runtime = gateway.client("agent-runtime")
    fact = (await runtime.post(f"/memory/{VIOLIN}/propose", json=memory_wish(priority="high"))).json()["proposalId"]
    diff = (await owner.get(f"/proposals/{fact}/diff")).json()["diff"]
    assert diff.endswith("+- TB-02 was rehaired in March\n"), diff
    reader = gateway.client("frontend")
    assert (await reader.get(f"/proposals/{note}/diff")).json() == answer, "who may read the proposal sees its change"
    refused = await reader.get(f"/proposals/{fact}/diff")
    assert (refused.status_code, refused.json()["rule"]) == (403, "memory.read")
    assert (await gateway.client("owner", agent=LOGICIAN).get(f"/proposals/{fact}/diff")).status_code == 403
    assert (await owner.get("/proposals/prop_2026-01-01_nothing/diff")).status_code == 404
    await owner.patch(f"/proposals/{fact}", json={"decision": "reject", "note": "the source says not"})
    assert (await owner.get(f"/proposals/{fact}/diff")).json()["diff"] is None


@pytest.mark.requirement("D22")
async def test_diff_of_an_agents_logic_is_shown_only_to_those_who_decide(gateway: Gateway):
    await make_world(gateway, "mine")
    runtime, wish = gateway.client("agent-runtime", agent=LOGICIAN), {"summary": "ask first", "text": "1. Ask.\n"}
    logic = (await runtime.post(f"/logic/{LOGICIAN}/propose", json=wish)).json()["proposalId"]
    assert "+1. Ask." in (await gateway.client("owner").get(f"/proposals/{logic}/diff")).json()["diff"]
    refused = await gateway.client("frontend").get(f"/proposals/{logic}/diff")
    assert (refused.status_code, refused.json()["rule"]) == (403, "proposals.decide")


@pytest.mark.requirement("PIPE-11")
async def test_pending_proposal_is_not_created_twice_over_http(gateway: Gateway):
    await make_world(gateway, "mine")
    client, wish = gateway.client("agent-runtime", agent=LOGICIAN), {"summary": "ask first", "text": "1. Ask.\n"}
    path, key = f"/logic/{LOGICIAN}/propose", {"Idempotency-Key": "once"}
    first = (await client.post(path, json=wish, headers=key)).json()["proposalId"]
    refused = await client.post(path, json={**wish, "summary": "said otherwise"})
    assert (refused.status_code, refused.json()["code"]) == (409, "DUPLICATE_ENTRY")
    assert f"{first} is pending" in refused.json()["detail"]
    replayed = await client.post(path, json=wish, headers=key)
    assert (replayed.status_code, replayed.json()["proposalId"]) == (202, first)
    no = {"decision": "reject", "note": "it asks too often"}
    assert (await gateway.client("owner").patch(f"/proposals/{first}", json=no)).status_code == 200
    assert (await client.post(path, json=wish)).status_code == 202, "whoever asks for it by hand means it"


async def test_a_list_of_proposals_names_those_that_can_no_longer_be_applied(gateway: Gateway):
    client, (gone, good) = gateway.client("owner"), [await proposal(gateway) for _ in range(2)]
    await gateway.instance.objects.put(f"agents/{VIOLIN}/notes/{gone}.md", b"somebody was faster\n")
    items = (await client.get("/proposals?conflicts=true")).json()["items"]
    assert {one["id"]: bool(one["conflict"]) for one in items} == {gone: True, good: False}
    assert not any(one["conflict"] for one in (await client.get("/proposals")).json()["items"])


@pytest.mark.requirement("D22")
async def test_proposal_about_a_memory_that_has_moved_on_says_so_before_it_is_approved(gateway: Gateway):
    owner, runtime = gateway.client("owner"), gateway.client("agent-runtime")
    wish = memory_wish(priority="high")
    fact = (await runtime.post(f"/memory/{VIOLIN}/propose", json=wish)).json()["proposalId"]
    assert (await owner.get(f"/proposals/{fact}/diff")).json()["conflict"] is None
    other = {"updates": [{"file": "facts.md", "operation": "append", "content": "- TB-03 is carbon"}]}
    assert (await runtime.post(f"/memory/{VIOLIN}/propose", json=other)).json()["status"] == "auto_applied"
    found = (await owner.get(f"/proposals/{fact}/diff")).json()
    version = (await owner.get(f"/memory/{VIOLIN}/read")).json()["version"]
    expected = f"the memory was at version {version - 1} when this was proposed and is at {version} now, so it can no"
    assert found["conflict"].startswith(expected), found
    (listed,) = (await owner.get("/proposals?conflicts=true&status=pending")).json()["items"]
    assert (listed["id"], listed["conflict"]) == (fact, found["conflict"])


@pytest.mark.requirement("D22", "AUTH-6")
async def test_a_person_approves_what_was_seen_and_it_is_applied_once(gateway: Gateway):
    id_, client = await proposal(gateway), gateway.client("owner", name="iryna")
    stale = await client.patch(f"/proposals/{id_}", json={"decision": "approve"}, headers={"If-Match": '"7"'})
    assert (stale.status_code, stale.json()["code"], stale.headers["ETag"]) == (412, "PRECONDITION_FAILED", '"1"')
    decided = await client.patch(
        f"/proposals/{id_}", json={"decision": "approve", "note": "yes"}, headers={"If-Match": '"1"'}
    )
    assert (decided.status_code, decided.json()["status"], decided.headers["ETag"]) == (200, "approved", '"2"')
    assert decided.json()["approval"]["decided_by"] == "iryna"
    applied = await client.post(f"/proposals/{id_}/apply")
    assert (applied.status_code, applied.json()["status"]) == (200, "applied")
    key = f"agents/{VIOLIN}/notes/{id_}.md"
    assert applied.json()["apply_result"]["object_key"] == key
    written = await gateway.instance.objects.get(key)
    assert written is not None
    before = await everything(gateway)
    again = await client.post(f"/proposals/{id_}/apply")
    assert (again.status_code, again.json()["status"]) == (200, "applied")
    assert await everything(gateway) == before


@pytest.mark.requirement("D22")
async def test_approval_of_a_proposal_that_no_longer_fits_is_refused_and_leaves_it_pending(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trellis.proposals.apply.OTHERS_PAGE", 1)
    client, note, runtime = gateway.client("owner"), await proposal(gateway), gateway.client("agent-runtime")
    facts = [
        (await runtime.post(f"/memory/{VIOLIN}/propose", json=memory_wish(priority="high", updates=[update]))).json()
        for update in (FACT, {**FACT, "content": "- TB-03 was sold in May"})
    ]
    first, second = (fact["proposalId"] for fact in facts)
    related = (await client.get(f"/proposals/{first}/diff")).json()
    assert (related["rules_out"], related["ruled_out_by"]) == ([second], [second])
    related = (await client.get(f"/proposals/{second}/diff")).json()
    assert (related["rules_out"], related["ruled_out_by"]) == ([first], [first]), "it is on a later page"
    monkeypatch.setattr("trellis.proposals.apply.PENDING_COMPARED_MAX", 1)
    related = (await client.get(f"/proposals/{second}/diff")).json()
    assert (related["rules_out"], related["ruled_out_by"]) == ([], []), "the newest is the proposal itself"
    related = (await client.get(f"/proposals/{first}/diff")).json()
    assert (related["rules_out"], related["ruled_out_by"]) == ([second], [second])
    await gateway.instance.objects.put(f"agents/{VIOLIN}/notes/{note}.md", b"somebody was faster\n")
    folder = gateway.instance.memory.path
    folder.rename(folder.with_suffix(".away"))
    assert (await client.get("/proposals", params={"conflicts": "true"})).json()["items"][0]["conflict"] is None
    folder.with_suffix(".away").rename(folder)
    assert (await client.patch(f"/proposals/{first}", json={"decision": "approve"})).status_code == 200
    early = await client.patch(f"/proposals/{second}", json={"decision": "approve"})
    assert (early.status_code, early.json()["code"]) == (409, "CONFLICT")
    assert f"{first} changes the same version, is approved and not applied yet" in early.json()["detail"]
    assert early.json()["detail"].endswith((await client.get(f"/proposals/{second}/diff")).json()["conflict"] + ".")
    assert (await client.post(f"/proposals/{first}/apply")).json()["status"] == "applied"
    for id_, reason in ((note, f"notes/{note}.md has changed"), (second, "the memory was at version")):
        refused = await client.patch(f"/proposals/{id_}", json={"decision": "approve"})
        assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT")
        assert reason in refused.json()["detail"]
        assert "reject it and run the agent again" in refused.json()["detail"]
        kept = (await client.get(f"/proposals/{id_}")).json()
        assert (kept["status"], kept["version"]) == ("pending", 1)
    await gateway.instance.objects.delete(f"agents/{VIOLIN}/notes/{note}.md")
    assert (await client.patch(f"/proposals/{note}", json={"decision": "approve"})).status_code == 200, "it fits again"
    assert (
        await client.patch(f"/proposals/{second}", json={"decision": "reject", "note": "it came too late"})
    ).status_code == 200


@pytest.mark.requirement("D22")
async def test_rejecting_says_why_and_ends_it(gateway: Gateway):
    id_, client = await proposal(gateway), gateway.client("owner")
    short = await client.patch(f"/proposals/{id_}", json={"decision": "reject", "note": "no"})
    assert (short.status_code, short.json()["code"]) == (422, "VALIDATION_FAILED")
    rejected = await client.patch(f"/proposals/{id_}", json={"decision": "reject", "note": "the source says not"})
    assert rejected.json()["status"] == "rejected"
    again = await client.patch(f"/proposals/{id_}", json={"decision": "reject", "note": "the source says not"})
    assert again.status_code == 200
    late = await client.patch(f"/proposals/{id_}", json={"decision": "approve"})
    assert (late.status_code, late.json()["code"]) == (409, "INVALID_TRANSITION")
    apply = await client.post(f"/proposals/{id_}/apply")
    assert (apply.status_code, apply.json()["status_now"]) == (409, "rejected")


@pytest.mark.requirement("D22")
async def test_proposal_on_a_changed_target_fails_and_is_applied_again_later(gateway: Gateway):
    id_, client = await proposal(gateway, approved=True), gateway.client("owner")
    key = f"agents/{VIOLIN}/notes/{id_}.md"
    await gateway.instance.objects.put(key, b"somebody was faster\n")
    failed = (await client.post(f"/proposals/{id_}/apply")).json()
    assert (failed["status"], "conflict" in failed["apply_result"]["error"]) == ("failed", True)
    await gateway.instance.objects.delete(key)
    assert (await client.post(f"/proposals/{id_}/apply")).json()["status"] == "applied"


@pytest.mark.requirement("D22")
async def test_apply_of_a_proposal_held_by_another_engine_returns_its_status(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    assert application.APPLY_PATIENCE_S < ATTEMPT_S_DEFAULT
    monkeypatch.setattr(application, "APPLY_PATIENCE_S", 0.0)
    id_, client = await proposal(gateway, approved=True), gateway.client("owner")
    other = Actor(role=Role.APPLY_ENGINE, name="another engine")
    claim = Claim(claim_id=ClaimId("c-1"), types=(TypeClaim(type=proposals.TYPE),), lifecycle="proposal")
    (held,) = (await gateway.instance.ledger.turn(Turn(actor=other, claim=claim))).claimed
    answer = await client.post(f"/proposals/{id_}/apply")
    assert (held.lease.job_id, answer.status_code) == (id_, 200)
    assert (answer.json()["status"], answer.headers["Retry-After"]) == ("applying", "1")


@pytest.mark.requirement("D22", "AUTH-6")
async def test_a_memory_update_of_normal_priority_is_applied_at_once_and_names_its_proposal(gateway: Gateway):
    run_id = (await gateway.instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id
    client = gateway.client("agent-runtime", name="runtime-1")
    answer = await client.post(f"/memory/{VIOLIN}/propose", json=memory_wish(run_id=run_id))
    assert (answer.status_code, answer.json()["status"]) == (202, "auto_applied")
    owner = gateway.client("owner")
    read = (await owner.get(f"/memory/{VIOLIN}/read", params={"mode": "wide"})).json()
    assert "- TB-02 was rehaired in March" in read["files"]["facts.md"]
    assert "facts.md" not in (await owner.get(f"/memory/{VIOLIN}/read")).json()["files"]
    newest = (await owner.get(f"/memory/{VIOLIN}/history", params={"limit": 1})).json()
    (change,) = newest["items"]
    told = (change["proposal_id"], change["run_id"], change["auto_approved"], change["version"])
    assert told == (answer.json()["proposalId"], run_id, True, read["version"])
    older = (await owner.get(f"/memory/{VIOLIN}/history", params={"cursor": newest["next_cursor"]})).json()
    assert [item["version"] for item in older["items"]] == [1]


@pytest.mark.requirement("PIPE-7")
async def test_a_memory_update_is_taken_as_the_pipeline_document_writes_it(gateway: Gateway):
    close = {"file": "open_loops.md", "operation": "append", "content": "- [ ] loop-9: ask the luthier"}
    body = {"type": "memory-update", "updates": [FACT, FACT, close]}
    answer = await gateway.client("orchestrator").post(f"/memory/{VIOLIN}/propose", json=body)
    assert (answer.status_code, set(answer.json())) == (202, {"proposalId", "status"})
    assert answer.json()["status"] in {"auto_applied", "pending"}
    found = (await gateway.client("owner").get(f"/proposals/{answer.json()['proposalId']}")).json()
    assert found["content"]["summary"] == "append in facts.md; append in open_loops.md"


@pytest.mark.requirement("D22")
async def test_a_memory_update_of_high_priority_waits_for_a_person(gateway: Gateway):
    client, before = gateway.client("orchestrator"), gateway.instance.memory.read(VIOLIN).version
    answer = (await client.post(f"/memory/{VIOLIN}/propose", json=memory_wish(priority="high"))).json()
    assert answer["status"] == "pending"
    assert gateway.instance.memory.read(VIOLIN).version == before
    owner = gateway.client("owner")
    await owner.patch(f"/proposals/{answer['proposalId']}", json={"decision": "approve"})
    assert (await owner.post(f"/proposals/{answer['proposalId']}/apply")).json()["status"] == "applied"
    assert gateway.instance.memory.read(VIOLIN).version == before + 1


@pytest.mark.requirement("D22", "D23")
async def test_lines_that_many_add_to_a_memory_at_the_same_moment_are_all_kept(gateway: Gateway):
    clients, files = [gateway.client(role) for role in ("orchestrator", "agent-runtime")], ["facts.md", "snapshot.md"]
    wishes = [
        memory_wish(updates=[{**FACT, "file": files[number % 2], "content": f"- Note {number} of many."}])
        for number in range(8)
    ]
    answers = await asyncio.gather(
        *(clients[number % 2].post(f"/memory/{VIOLIN}/propose", json=wish) for number, wish in enumerate(wishes))
    )
    assert [answer.json()["status"] for answer in answers] == ["auto_applied"] * 8
    memory = gateway.instance.memory.read(VIOLIN, ReadMode.WIDE)
    text = "".join(memory.content.values())
    assert [text.count(f"- Note {number} of many.\n") for number in range(8)] == [1] * 8
    assert memory.version == 9


@pytest.mark.requirement("D22", "D23")
async def test_a_text_that_replaces_another_is_for_the_version_that_was_seen(gateway: Gateway):
    client, text = gateway.client("orchestrator"), {"file": "snapshot.md", "operation": "replace"}
    wishes = [memory_wish(updates=[FACT, {**text, "content": f"# Snapshot {number}"}]) for number in range(2)]
    answers = [client.post(f"/memory/{VIOLIN}/propose", json={**wish, "expected_version": 1}) for wish in wishes]
    first, second = [(await answer).json() for answer in answers]
    assert (first["status"], second["status"]) == ("auto_applied", "failed")
    assert second["error"] == "conflict: the memory was at version 1 when this was proposed and is at 2 now"
    assert gateway.instance.memory.read(VIOLIN).content["snapshot.md"] == "# Snapshot 0\n"


@pytest.mark.requirement("D22", "D23")
async def test_a_memory_update_for_an_older_version_fails_and_changes_no_memory(gateway: Gateway):
    client = gateway.client("orchestrator")
    answer = await client.post(f"/memory/{VIOLIN}/propose", json=memory_wish(expected_version=0))
    assert answer.json()["status"] == "failed"
    assert answer.json()["error"] == "conflict: the memory was at version 0 when this was proposed and is at 1 now"
    again = await client.post(f"/memory/{VIOLIN}/propose", json=memory_wish(expected_version=0))
    assert again.json()["proposalId"] != answer.json()["proposalId"]
    assert gateway.instance.memory.read(VIOLIN).version == 1


@pytest.mark.requirement("D22")
@pytest.mark.parametrize("priority", ["normal", "high"])
async def test_logic_always_waits_for_a_person(gateway: Gateway, priority: str):
    await make_world(gateway, "mine")
    client, owner = gateway.client("agent-runtime", agent=LOGICIAN), gateway.client("owner")
    wish = {"summary": "ask first", "text": "1. Ask.\n", "priority": priority}
    answer = (await client.post(f"/logic/{LOGICIAN}/propose", json=wish)).json()
    assert (answer["status"], answer["requiresHumanReview"]) == ("pending", True)
    await gateway.instance.apply_engine().run_once()
    found = (await owner.get(f"/proposals/{answer['proposalId']}")).json()
    assert (found["status"], found["action"], found["target"]) == ("pending", "logic-update", "pseudocode.md")
    await owner.patch(f"/proposals/{answer['proposalId']}", json={"decision": "approve"})
    await owner.post(f"/proposals/{answer['proposalId']}/apply")
    written = await gateway.instance.objects.get(f"agents/{LOGICIAN}/pseudocode.md")
    assert written is not None
    assert written.body == b"1. Ask.\n"


REFUSED: list[tuple[str, dict[str, Any], int]] = [
    (f"/logic/{VIOLIN}/propose", {"summary": "s", "text": "t"}, 422),  # not among its safe outputs
    ("/memory/nobody/propose", memory_wish(), 404),
    ("/memory/No-Body/propose", memory_wish(), 422),
    (f"/memory/{VIOLIN}/propose", memory_wish(run_id="run_2026-01-01_000000_nobody"), 404),
    (f"/memory/{VIOLIN}/propose", memory_wish(run_id="../secrets"), 422),
    (f"/memory/{VIOLIN}/propose", memory_wish(updates=[]), 422),
    (f"/memory/{VIOLIN}/propose", memory_wish(updates=[FACT] * 33), 422),
    (f"/memory/{VIOLIN}/propose", memory_wish(autoApprove=True), 422),
    *(
        (f"/memory/{VIOLIN}/propose", memory_wish(updates=[{**FACT, **update}], priority=priority), 422)
        for update in ({"file": "../facts.md"}, {"file": "runs/other.md"}, {"content": "to\u202eht"})
        for priority in ("normal", "high")
    ),
    (f"/logic/{VIOLIN}/propose", {"summary": "s", "text": "t", "requiresHumanReview": False}, 422),
]


async def test_invalid_proposal_is_refused_and_not_stored(gateway: Gateway):
    before, client = await everything(gateway), gateway.client("orchestrator")
    for path, wish, status in REFUSED:
        answer = await client.post(path, json=wish)
        assert (path, wish, answer.status_code) == (path, wish, status)
    wrong = memory_wish(updates=[{**FACT, "file": "../facts.md"}])
    told = (await client.post(f"/memory/{VIOLIN}/propose", json=wrong)).json()["detail"]
    assert told.endswith("use snapshot.md, open_loops.md, facts.md, decisions.md, runs/<run>.md")
    assert await everything(gateway) == before


async def test_proposal_for_a_run_of_another_agent_is_refused(gateway: Gateway):
    run_id = (await gateway.instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id
    wish = memory_wish(run_id=run_id)
    answer = await gateway.client("orchestrator").post("/memory/architect-guardian/propose", json=wish)
    assert (answer.status_code, f"{run_id} is a run of agent {VIOLIN}" in answer.json()["detail"]) == (422, True)


@pytest.mark.requirement("AUTH-4")
async def test_layer_2_is_read_part_by_part_and_never_with_layer_1(gateway: Gateway):
    runtime = gateway.client("agent-runtime")
    for number in range(3):
        decision = {"file": "decisions.md", "operation": "append", "content": f"## Decision {number}\n\nKeep it."}
        made = await runtime.post(f"/memory/{VIOLIN}/propose", json=memory_wish(updates=[decision]))
        assert made.json()["status"] == "auto_applied"
    first = (await runtime.get(f"/memory/{VIOLIN}/deep", params={"part": "decisions", "limit": 2})).json()
    cursor = first["next_cursor"]
    rest = (await runtime.get(f"/memory/{VIOLIN}/deep", params={"part": "decisions", "cursor": cursor})).json()
    told = [item["text"] for item in first["items"] + rest["items"]]
    assert ["Decision 2" in told[0], "Decision 1" in told[1], "Decision 0" in told[2]] == [True, True, True]
    assert rest["next_cursor"] is None
    read = (await runtime.get(f"/memory/{VIOLIN}/read", params={"mode": "wide"})).json()
    assert set(read["files"]) == {"snapshot.md", "open_loops.md", "facts.md"}
    assert (await runtime.get(f"/memory/{VIOLIN}/deep", params={"part": "secrets"})).status_code == 422
    assert (await gateway.client("owner").get("/memory/nobody/read")).status_code == 404
    for role in ("orchestrator", "nlm-backend", "frontend"):
        refused = await gateway.client(role).get(f"/memory/{VIOLIN}/deep", params={"part": "decisions"})
        assert (role, refused.status_code) == (role, 403)


async def test_a_proposal_is_no_other_kind_of_job(gateway: Gateway):
    world = await make_world(gateway, "mine")
    owner = gateway.client("owner")
    assert (await owner.get(f"/proposals/{world.own_job}")).status_code == 404
    assert (await owner.patch(f"/proposals/{world.run}", json={"decision": "approve"})).status_code == 404
    assert len(await gateway.instance.ledger.events(JobId(world.run))) == 2
