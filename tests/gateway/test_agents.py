"""One agent over HTTP: its whole definition, when its schedule is due, what it reads, and what changed in its memory."""

from datetime import datetime
from itertools import pairwise

import pytest

from tests.gateway.conftest import VIOLIN, Gateway
from trellis.agents.catalog import agent_key
from trellis.lifecycles import Role
from trellis.storage.objects.store import CREATE, if_match

TRIGGERS = b"triggers:\n  manual: true\n"
CRON = b'triggers:\n  manual: true\n  cron: "0 3 * * *"\n  events: [proposal.applied, "run.completed:architect-guardian"]\n'


async def replaced(gateway: Gateway, old: bytes, new: bytes) -> None:
    """The file of the violin's archivist with other bytes."""
    stored = await gateway.instance.objects.get(agent_key(VIOLIN))
    assert stored is not None
    assert old in stored.body
    await gateway.instance.objects.put(agent_key(VIOLIN), stored.body.replace(old, new), when=if_match(stored.etag))


@pytest.mark.requirement("D24", "RUN-9")
async def test_agent_is_read_with_its_definition_and_the_next_instants_of_its_schedule(gateway: Gateway):
    owner = gateway.client(Role.OWNER)
    before = (await owner.get(f"/agents/{VIOLIN}")).json()
    assert (before["cron"], before["next"], before["events"], before["manual"]) == (None, [], [], True)
    assert before["instructions"].lstrip().startswith("# What you are for")
    await replaced(gateway, TRIGGERS, CRON)
    after = (await owner.get(f"/agents/{VIOLIN}")).json()
    instants = [datetime.fromisoformat(one) for one in after["next"]]
    assert [(one.hour, one.minute) for one in instants] == [(3, 0)] * 5
    assert [(b - a).days for a, b in pairwise(instants)] == [1] * 4
    assert after["events"] == ["proposal.applied", "run.completed:architect-guardian"]
    assert after["sha256"] != before["sha256"]
    await replaced(gateway, b"status: active", b"status: paused")
    assert (await owner.get(f"/agents/{VIOLIN}")).json()["next"] == [], "a paused agent is started by nothing"


async def test_malformed_agent_says_what_to_correct_and_has_no_sources(gateway: Gateway):
    owner = gateway.client(Role.OWNER)
    await replaced(gateway, b"max_steps: 20", b"max_steps: many")
    found = (await owner.get(f"/agents/{VIOLIN}")).json()
    assert (found["status"], found["instructions"], found["next"]) == ("malformed", None, [])
    assert any("max_steps" in one for one in found["problems"])
    refused = await owner.get(f"/agents/{VIOLIN}/sources")
    assert (refused.status_code, "max_steps" in refused.json()["detail"]) == (422, True), refused.text


async def test_sources_are_what_the_agent_would_read_now_and_say_what_is_left_out(gateway: Gateway):
    picture = agent_key(VIOLIN).replace("_agent.md", "sources/99-scroll.png")
    await gateway.instance.objects.put(picture, b"\x89PNG", when=CREATE)
    found = (await gateway.client(Role.OWNER).get(f"/agents/{VIOLIN}/sources")).json()
    (bows,) = [one for one in found["items"] if one["ref"] == "sources/07-bows.md"]
    assert "Carbon fibre" in bows["text"]
    assert [(one["ref"], one["reason"]) for one in found["left_out"]] == [("sources/99-scroll.png", "not_text")]
    assert (await gateway.client(Role.OWNER).get("/agents/nobody/sources")).status_code == 404


@pytest.mark.requirement("D44")
async def test_diff_of_a_memory_shows_layer_1_between_two_versions(gateway: Gateway):
    owner = gateway.client(Role.OWNER)
    newest = (await owner.get(f"/memory/{VIOLIN}/read")).json()["version"]
    update = {"updates": [{"file": "facts.md", "operation": "append", "content": "- TB-03 is carbon"}]}
    asked = await gateway.client(Role.ORCHESTRATOR).post(f"/memory/{VIOLIN}/propose", json=update)
    assert asked.json()["status"] == "auto_applied", asked.text
    found = (await owner.get(f"/memory/{VIOLIN}/diff", params={"from_version": newest})).json()
    assert (found["from_version"], found["to_version"]) == (newest, newest + 1)
    assert [one for one in found["diff"].splitlines() if one.startswith("+-")] == ["+- TB-03 is carbon"]
    missing = await owner.get(f"/memory/{VIOLIN}/diff", params={"from_version": newest + 9})
    assert (missing.status_code, f"the newest is {newest + 1}" in missing.json()["detail"]) == (404, True)
    refused = await gateway.client(Role.FRONTEND).get(f"/memory/{VIOLIN}/diff", params={"from_version": 0})
    assert (refused.status_code, refused.json()["rule"]) == (403, "memory.read")
