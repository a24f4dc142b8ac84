"""The inbox: one gate, one effect for each entry, and everything counted."""

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from tests.agents.files import agent_file
from tests.gateway.conftest import VIOLIN, Gateway
from tests.gateway.world import GATEWAY, everything
from trellis.documents.errors import AgentNotRunnable
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.jobs import Actor, JobId
from trellis.engine.records import JobFilter
from trellis.gateway import GatewayOptions
from trellis.inbox import InboxSettler, NewInboxEntry
from trellis.ledgers.sqlite.connection import connect as connect_sqlite
from trellis.ledgers.sqlite.connection import parse_url
from trellis.lifecycles import Role
from trellis.proposals.service import ProposalOffer, ProposalService
from trellis.runs.orchestration import TriggerKind
from trellis.runs.projector import Projector

AT_ONCE = 20
IRYNA = Actor(role=Role.GATEWAY, name="iryna")
NOTE = {"summary": "humidity", "change": {"type": "create", "text": "45 %"}}


def entry(action: str, target: str, payload: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"intent": {"action": action, "target": target, "payload": payload or {}}, **more}


async def jobs(gateway: Gateway, lifecycle: str) -> list[JobId]:
    return [job.job_id for job in (await gateway.instance.ledger.jobs(JobFilter(lifecycle=lifecycle), limit=500)).jobs]


@pytest.mark.requirement("D51", "JQ-12")
@pytest.mark.parametrize(
    "wish, made, lifecycle",
    [
        (entry("run", VIOLIN, {"topic": "bows"}), "run_id", "run"),
        (entry("job", "work", {"type": "work", "payload": {"n": 1}, "max_attempts": 2}), "job_id", "leased-job"),
        (entry("propose-note", f"{VIOLIN}/notes/humidity.md", NOTE), "proposal_id", "proposal"),
    ],
)
async def test_an_entry_makes_what_it_asks_for_and_is_linked_to_it(
    gateway: Gateway, wish: dict[str, Any], made: str, lifecycle: str
):
    client = gateway.client("owner", name="iryna")
    wish = {**wish, "source": {"type": "ui"}, "metadata": {"correlation_id": "press-1"}}
    answer = (await client.post("/inbox/submit", json=wish)).json()
    assert (answer["status"], answer["correlation_id"], answer["rejection"]) == ("processed", "press-1", None)
    assert [answer[made]] == await jobs(gateway, lifecycle)
    job = await gateway.instance.ledger.job(answer[made])
    assert job is not None
    if made != "run_id":  # a run is what it is about, by itself
        assert (job.parent_id, job.correlation_id) == (answer["id"], "press-1")
    (event, *_) = await gateway.instance.ledger.events(answer[made])
    assert (event.role, event.actor) == (Role.GATEWAY, "iryna")
    (shown,) = (await client.get("/inbox/entries")).json()["items"]
    assert shown["source"] == {"type": "ui", "identity": "iryna", "timestamp": "2026-01-01T00:00:00.000Z"}
    assert shown["metadata"] == {"correlation_id": "press-1", "priority": "normal", "ttl_hours": 72.0}
    assert (shown["intent"], shown[made]) == (wish["intent"], answer[made])


@pytest.mark.requirement("D51", "JQ-12")
async def test_the_same_entry_twice_is_the_same_answer_and_one_job(gateway: Gateway):
    client = gateway.client("owner")
    wish = entry("job", "work", {"type": "work"}, id="inbox_2026-01-01_mine")
    first, again = [await client.post("/inbox/submit", json=wish) for _ in range(2)]
    assert (first.status_code, again.status_code, again.content) == (202, 202, first.content)
    assert (first.headers.get("Idempotency-Replayed"), again.headers.get("Idempotency-Replayed")) == (None, "true")
    assert len(await jobs(gateway, "leased-job")) == 1
    other = await client.post("/inbox/submit", json=entry("job", "more", {"type": "more"}, id="inbox_2026-01-01_mine"))
    foreign = await gateway.client("owner", name="olena").post("/inbox/submit", json=wish)
    assert [answer.json()["code"] for answer in (other, foreign)] == ["IDEMPOTENCY_MISMATCH"] * 2


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (entry("run", "nobody"), "NOT_FOUND", "no agent nobody"),
    (entry("run", "No Body"), "VALIDATION_FAILED", "no agent slug"),
    (entry("propose-edit", "nobody/notes/x.md", NOTE), "NOT_FOUND", "no agent nobody"),
    (entry("propose-tag", f"{VIOLIN}/_agent.md", NOTE), "VALIDATION_FAILED", "it may change files below sources/"),
    (entry("propose-note", f"{VIOLIN}/../x.md", NOTE), "VALIDATION_FAILED", "it may change files below sources/"),
    (entry("propose-note", f"{VIOLIN}/notes/.x.md", NOTE), "VALIDATION_FAILED", "that begin with a letter"),
    (entry("propose-note", f"{VIOLIN}/notes/x.md", {"summary": "s"}), "VALIDATION_FAILED", "`change` with a `type`"),
    (
        entry("propose-note", f"{VIOLIN}/notes/x.md", {"summary": "s", "change": {"type": "append", "text": "t"}}),
        "VALIDATION_FAILED",
        "there is no such file",
    ),
    (entry("propose-artifact", f"{VIOLIN}/artifacts/x.md", NOTE), "VALIDATION_FAILED", "safe_outputs"),
    (entry("job", "work", {"type": "other"}), "VALIDATION_FAILED", "the target is 'work'"),
    (entry("job", "work", {}), "VALIDATION_FAILED", "found none"),
    (entry("job", "RESEARCH", {"job_type": "RESEARCH"}), "VALIDATION_FAILED", "name it as agent_slug"),
    (entry("job", "mail", {"topic": "mail", "delay_s": 1}), "VALIDATION_FAILED", "not for jobs on a topic"),
    (entry("job", "work", {"type": "work", "max_attempts": 0}), "VALIDATION_FAILED", "max_attempts"),
    (entry("job", "work", {"type": "work", "uniqe": "args"}), "VALIDATION_FAILED", "did you mean unique?"),
]
"""What the gate refuses, with the code and a part of the reason."""


@pytest.mark.requirement("D51")
async def test_entry_refused_by_the_gate_is_kept_with_the_reason_and_creates_no_work(gateway: Gateway):
    client = gateway.client("owner")
    for wish, code, told in REFUSED:
        answer = (await client.post("/inbox/submit", json=wish)).json()
        assert (wish, answer["status"], answer["rejection"]["code"]) == (wish, "rejected", code)
        assert told in answer["rejection"]["reason"]
        assert (answer["run_id"], answer["job_id"], answer["proposal_id"]) == (None, None, None)
        (shown,) = (await client.get("/inbox/entries?status=rejected&limit=1")).json()["items"]
        assert (shown["id"], shown["rejection"]) == (answer["id"], answer["rejection"])
    for lifecycle in ("run", "leased-job", "proposal"):
        assert await jobs(gateway, lifecycle) == []


@pytest.mark.requirement("D51")
async def test_entry_whose_proposal_waits_for_a_person_is_refused_as_duplicate(gateway: Gateway):
    client, wish = gateway.client("owner"), entry("propose-note", f"{VIOLIN}/notes/humidity.md", NOTE)
    first, second = [(await client.post("/inbox/submit", json=wish)).json() for _ in range(2)]
    assert (first["status"], second["status"]) == ("processed", "rejected")
    assert second["rejection"]["code"] == "DUPLICATE_ENTRY"
    assert first["proposal_id"] in second["rejection"]["reason"]
    note = {"decision": "reject", "note": "not needed at all"}
    assert (await client.patch(f"/proposals/{first['proposal_id']}", json=note)).status_code == 200
    third = (await client.post("/inbox/submit", json=wish)).json()
    assert third["status"] == "processed"


@pytest.mark.requirement("D51")
async def test_concurrent_equal_proposals_create_one(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """All of them find that nothing equal waits before any of them goes on: at the gate, and when it makes its proposal."""
    looked, refuse_duplicate = asyncio.Barrier(AT_ONCE), ProposalService.refuse_duplicate

    async def together(self: ProposalService, offer: ProposalOffer) -> None:
        await refuse_duplicate(self, offer)
        await looked.wait()

    monkeypatch.setattr(ProposalService, "refuse_duplicate", together)
    wish = entry("propose-note", f"{VIOLIN}/notes/humidity.md", NOTE)
    callers = [gateway.client("owner", name=f"person-{number}") for number in range(AT_ONCE)]
    answers = [
        one.json() for one in await asyncio.gather(*(client.post("/inbox/submit", json=wish) for client in callers))
    ]
    monkeypatch.undo()
    made = [one["proposal_id"] for one in answers if one["status"] == "processed"]
    assert made == await jobs(gateway, "proposal")
    assert len(made) == 1
    assert {one["rejection"]["code"] for one in answers if one["status"] == "rejected"} == {"DUPLICATE_ENTRY"}
    note = {"decision": "reject", "note": "not needed at all"}
    assert (await callers[0].patch(f"/proposals/{made[0]}", json=note)).status_code == 200
    assert (await callers[1].post("/inbox/submit", json=wish)).json()["status"] == "processed"


@pytest.mark.requirement("D51")
async def test_an_entry_that_many_settle_at_once_makes_one_proposal_and_keeps_it_when_it_was_decided(gateway: Gateway):
    inbox, id_ = gateway.instance.inbox(IRYNA), JobId("inbox_2026-01-01_note")
    wished = await unsettled(gateway, id_, action="propose-note")
    await inbox.submit(replace(wished, target=f"{VIOLIN}/notes/humidity.md", payload=NOTE), key=None)
    told = json.loads((await inbox.found(id_)).payload or b"")
    first = await inbox._make(told)  # type: ignore[reportPrivateUsage]  # and here it dies
    settled = await asyncio.gather(*(inbox.settle(id_) for _ in range(10)))
    assert {json.dumps(dict(one.made or {})) for one in settled} == {json.dumps(first)}
    note = {"decision": "reject", "note": "not needed at all"}
    await gateway.client("owner").patch(f"/proposals/{first['proposal_id']}", json=note)
    assert await inbox._make(told) == first  # type: ignore[reportPrivateUsage]
    assert await jobs(gateway, "proposal") == [first["proposal_id"]]


@pytest.mark.requirement("D27", "D51")
async def test_an_entry_with_an_id_and_a_key_is_refused_with_another_body_under_either(gateway: Gateway):
    client, first = gateway.client("owner"), entry("job", "work", {"type": "work"}, id="inbox_mine")
    headers = {"Idempotency-Key": "press"}
    assert (await client.post("/inbox/submit", json=first, headers=headers)).status_code == 202
    before = await everything(gateway)
    other = entry("job", "other", {"type": "other"})
    for wish, key in (
        ({**other, "id": "inbox_mine"}, headers),
        ({**other, "id": "inbox_other"}, headers),
        (other, headers),
        ({**other, "id": "inbox_mine"}, {}),
    ):
        refused = await client.post("/inbox/submit", json=wish, headers=key)
        assert (refused.status_code, refused.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")
    assert await everything(gateway) == before
    for key in ({}, {"Idempotency-Key": "late"}):
        again = await client.post("/inbox/submit", json=first, headers=key)
        assert (again.status_code, again.headers.get("Idempotency-Replayed")) == (202, "true")
    late = await client.post("/inbox/submit", json=other, headers={"Idempotency-Key": "late"})
    assert late.json()["code"] == "IDEMPOTENCY_MISMATCH"


MALFORMED: list[dict[str, Any]] = [
    {},
    entry("memory-update", VIOLIN),
    entry("run", ""),
    entry("run", VIOLIN, id="job-7"),
    entry("run", VIOLIN, metadata={"ttl_hours": 0}),
    entry("run", VIOLIN, metadata={"ttl_hours": 10_000}),
    entry("run", VIOLIN, source={"type": "ui", "identity": "somebody else"}),
]


async def test_invalid_entry_is_refused_and_stores_no_record(gateway: Gateway):
    before, client = await everything(gateway), gateway.client("owner")
    for wish in MALFORMED:
        answer = await client.post("/inbox/submit", json=wish)
        assert (wish, answer.status_code, answer.json()["code"]) == (wish, 422, "VALIDATION_FAILED")
    assert await everything(gateway) == before


@pytest.mark.requirement("D51")
async def test_too_many_entries_a_minute_are_refused_and_not_stored(make_gateway: Callable[..., Gateway]):
    gateway = make_gateway(GatewayOptions(entries_per_minute=2))
    client, wish = gateway.client("owner"), entry("job", "work", {"type": "work"})
    answers = [await client.post("/inbox/submit", json=wish) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert answers[2].headers["Retry-After"] == "30"
    assert len(await jobs(gateway, "inbox-entry")) == 2
    gateway.clock.advance(30)
    assert (await client.post("/inbox/submit", json=wish)).status_code == 202
    other = await gateway.client("owner", name="olena").post("/inbox/submit", json=wish)
    assert other.status_code == 202


@pytest.mark.requirement("RUN-9", "D51")
@pytest.mark.parametrize(
    "source, trigger",
    [("cron", "cron"), ("webhook", "event"), ("agent", "event"), ("ui", "manual"), ("telegram", "manual")],
)
async def test_run_from_the_inbox_records_the_trigger_of_its_entry(gateway: Gateway, source: str, trigger: str):
    client = gateway.client("owner", "gateway")
    made = (await client.post("/inbox/submit", json=entry("run", VIOLIN, source={"type": source}))).json()
    assert (await client.get(f"/runs/{made['run_id']}/status")).json()["trigger"] == trigger
    (shown,) = (await client.get("/inbox/entries")).json()["items"]
    assert shown["source"]["type"] == source


@pytest.mark.requirement("D24")
@pytest.mark.parametrize(
    "triggers, source, status",
    [
        ("{manual: false}", "cron", "rejected"),
        ("{manual: false}", "webhook", "rejected"),
        ("{manual: false}", "ui", "rejected"),
        ('{manual: false, cron: "0 6 * * *"}', "cron", "processed"),
        ('{manual: false, cron: "0 6 * * *"}', "webhook", "rejected"),
        ("{manual: false, events: [inbox.item.created]}", "webhook", "processed"),
    ],
)
async def test_agent_without_manual_trigger_starts_only_from_entries_of_its_triggers(
    gateway: Gateway, triggers: str, source: str, status: str
):
    file = agent_file(slug="nightly", triggers=triggers)
    await gateway.instance.objects.put("agents/nightly/_agent.md", file)
    wish = entry("run", "nightly", source={"type": source})
    answer = (await gateway.client("owner", "gateway").post("/inbox/submit", json=wish)).json()
    assert answer["status"] == status, answer
    by_a_person = (await gateway.client("owner").post("/inbox/submit", json=wish)).json()
    assert (by_a_person["status"], by_a_person["rejection"]["code"]) == ("rejected", AgentNotRunnable.code)


@pytest.mark.requirement("RUN-9")
@pytest.mark.parametrize("source", ["cron", "webhook", "agent"])
async def test_a_person_that_calls_its_entry_a_clocks_begins_a_run_by_hand(gateway: Gateway, source: str):
    client = gateway.client("owner")
    made = (await client.post("/inbox/submit", json=entry("run", VIOLIN, source={"type": source}))).json()
    assert (await client.get(f"/runs/{made['run_id']}/status")).json()["trigger"] == "manual"


@pytest.mark.requirement("D24", "D51")
async def test_an_entry_that_waited_is_refused_when_its_agent_has_no_such_trigger_any_more(gateway: Gateway):
    put = gateway.instance.objects.put
    key = "agents/nightly/_agent.md"
    await put(key, agent_file(slug="nightly", triggers='{manual: false, cron: "0 6 * * *"}'))
    inbox, roles = gateway.instance.inbox(IRYNA), frozenset({Role.GATEWAY})
    waits = await unsettled(gateway, "inbox_waits", action="run")
    await inbox.submit(replace(waits, source_type="cron", target="nightly", roles=roles), key=None)
    await put(key, agent_file(slug="nightly", triggers="{manual: false}"))
    standing = await inbox.settle(waits.id)
    assert (standing.status, (standing.rejection or {})["code"]) == ("rejected", AgentNotRunnable.code)


@pytest.mark.requirement("RUN-4", "JQ-12", "D51")
async def test_statistics_match_the_stored_entries(gateway: Gateway):
    client = gateway.client("owner")
    inbox = gateway.instance.inbox(GATEWAY)
    gateway.clock.advance(23.5 * 3600)
    for action, target in (("run", VIOLIN), ("run", "nobody"), ("job", "work"), ("job", "work")):
        await client.post("/inbox/submit", json=entry(action, target, {"type": "work"} if action == "job" else {}))
    for number, hours in enumerate((0.25, 48)):
        await inbox.submit(await unsettled(gateway, f"inbox_2026-01-01_{number}", ttl_hours=hours), key=None)
    gateway.clock.advance(0.25 * 3600)
    await gateway.sweep()
    stats = (await client.get("/inbox/stats")).json()
    assert stats == {"pending": 1, "processed_today": 3, "rejected_today": 1, "expired_today": 1}
    assert stats == await counted(gateway)
    gateway.clock.advance(3600)  # past midnight
    stats = (await client.get("/inbox/stats")).json()
    assert stats == {"pending": 1, "processed_today": 0, "rejected_today": 0, "expired_today": 0}


@pytest.mark.requirement("RUN-4", "D51")
async def test_statistics_count_every_entry_of_a_busy_day(gateway: Gateway):
    client = gateway.client("owner")
    await client.post("/inbox/submit", json=entry("job", "work", {"type": "work"}))
    repeat_event(gateway.instance.places.ledger, "inbox.processed", 10_000)
    assert (await client.get("/inbox/stats")).json()["processed_today"] == 10_001


def repeat_event(ledger_url: str, type_: str, times: int) -> None:
    """Put copies of the event of this type beside it, for jobs that are not there. Only counts may be read afterwards."""
    with closing(connect_sqlite(parse_url(ledger_url))) as db:
        guards = db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'trellis_event'")
        for (guard,) in list(guards):
            db.execute(f"DROP TRIGGER {guard}")
        columns = "version, type, source, target, role, actor, epoch, generation, attempt, at, place"
        db.execute(
            f"WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < ?) "
            f"INSERT INTO trellis_event (job, {columns}) SELECT 1000000 + n, {columns} FROM trellis_event, n "
            "WHERE type = (SELECT id FROM trellis_event_type WHERE name = ?)",
            (times, type_),
        )


async def counted(gateway: Gateway) -> dict[str, int]:
    client = gateway.client("frontend")
    listed = {
        status: len((await client.get("/inbox/entries", params={"status": status})).json()["items"])
        for status in ("pending", "processed", "rejected", "expired")
    }
    return {"pending": listed.pop("pending"), **{f"{status}_today": found for status, found in listed.items()}}


async def unsettled(gateway: Gateway, id_: str, *, ttl_hours: float = 72.0, action: str = "job") -> NewInboxEntry:
    payload = {"type": "work"} if action == "job" else {}
    return NewInboxEntry(
        id=JobId(id_),
        source_type="api",
        identity="iryna",
        at=await gateway.instance.ledger.now(),
        action=action,
        target="work" if action == "job" else VIOLIN,
        payload=payload,
        correlation_id="press-1",
        priority="normal",
        ttl_hours=ttl_hours,
    )


@pytest.mark.requirement("JQ-12")
async def test_an_entry_whose_gateway_died_is_settled_by_another_once(gateway: Gateway):
    inbox = gateway.instance.inbox(IRYNA)
    await inbox.submit(await unsettled(gateway, "inbox_2026-01-01_left"), key=None)
    keeper = InboxSettler(inbox=gateway.instance.inbox(GATEWAY))
    assert (await keeper.run_once()).settled == 1
    assert (await keeper.run_once()).settled == 0
    standing = await inbox.settle(JobId("inbox_2026-01-01_left"))
    assert standing.status == "processed"
    assert standing.made == {"job_id": (await jobs(gateway, "leased-job"))[0]}
    assert len(await jobs(gateway, "leased-job")) == 1


@pytest.mark.requirement("JQ-12")
@pytest.mark.parametrize("action", ["run", "job"])
async def test_an_entry_that_died_after_its_effect_makes_no_second_one(gateway: Gateway, action: str):
    inbox, id_ = gateway.instance.inbox(IRYNA), JobId(f"inbox_2026-01-01_{action}")
    await inbox.submit(await unsettled(gateway, id_, action=action), key=None)
    job = await inbox.found(id_)
    first = await inbox._make(json.loads(job.payload or b""))  # type: ignore[reportPrivateUsage]  # and here it dies
    await gateway.client("owner").patch(f"/agents/{VIOLIN}/status", json={"status": "paused"})
    assert (await inbox.settle(id_)).made == first
    assert len(await jobs(gateway, "run" if action == "run" else "leased-job")) == 1


@pytest.mark.requirement("D51", "D25")
async def test_an_entry_waits_while_its_agent_has_too_many_runs_and_begins_one_afterwards(gateway: Gateway):
    usual = gateway.instance.inbox(GATEWAY)
    settings = gateway.instance.settings.model_copy(update={"runs_waiting": 1})
    crowded = replace(usual, layer=replace(gateway.instance, settings=settings).layer)
    run = (await gateway.instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id
    made = await crowded.submit(await unsettled(gateway, "inbox_2026-01-01_late", action="run"), key=None)
    assert (await crowded.settle(made.job_id)).status == "pending"
    keeper = InboxSettler(inbox=crowded)
    assert (await keeper.run_once()).settled == 0
    await gateway.client("owner").post(f"/runs/{run}/cancel", json={"mode": "hard"})
    assert (await keeper.run_once()).settled == 1
    standing = await usual.entry_state(made.job_id)
    assert (standing.status, await jobs(gateway, "run")) == ("processed", [(standing.made or {})["run_id"], run])


@pytest.mark.requirement("OBS-1", "D35", "D56")
async def test_every_step_of_an_entry_is_audited_like_that_of_any_job(gateway: Gateway):
    answer = (await gateway.client("owner").post("/inbox/submit", json=entry("job", "work", {"type": "work"}))).json()
    instance = gateway.instance
    projector = Projector(
        ledger=instance.ledger,
        actor=instance.actor(Role.PROJECTOR),
        publisher=DocumentPublisher(instance.objects),
        clock=gateway.clock,
    )
    await projector.run_once()
    keys = [item.key for item in (await instance.objects.list(f"audit/20260101/{answer['id']}")).items]
    assert keys == [f"audit/20260101/{answer['id']}-{version}.json" for version in (1, 2)]
    await projector.release()
