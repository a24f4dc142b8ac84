"""Three failed runs in a row stop an agent: what counts, what is written, and what a crash leaves."""

import json
import os
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.agents.files import agent_file
from tests.runs.conftest import ORCHESTRATOR, Stand
from trellis.agents.catalog import AgentMissing, Catalog
from trellis.agents.definition import AgentDefinition, AgentStatus
from trellis.agents.errors import AgentNotFound, DefinitionMalformed, StatusChangeRefused
from trellis.documents import ids
from trellis.documents.audit_log import ActRecorder
from trellis.documents.errors import AgentNotRunnable, NlmDown, StepHopeless, UpstreamUnavailable
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.admin_acts import this_node
from trellis.engine.jobs import Actor, CancelMode, JobId, NewJob, RequestId
from trellis.engine.records import Event
from trellis.lifecycles import Role
from trellis.operations.alert_conditions import LedgerConditions
from trellis.operations.alerts import AlertEvaluator, AlertThresholds
from trellis.runs import agent_status
from trellis.runs.agent_status import (
    AgentHealth,
    HealthOptions,
    UnservedAgents,
    failed_in_a_row,
    last_failure,
    set_status,
)
from trellis.runs.orchestration import BuiltinLayer, TriggerKind
from trellis.runs.orchestrator import StepContext, StepResult
from trellis.runs.timetable import Timetable
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore

SLUG = "gardener"
OWNER = Actor(role=Role.OWNER, name="anna@home")
PROJECTOR = Actor(role=Role.PROJECTOR, name="p@home:1")
FAILED, COMPLETED, CANCELLED = "failed", "completed", "cancelled"
UPSTREAM, NLM = "upstream", "nlm"
ERRORS = {FAILED: StepHopeless, UPSTREAM: UpstreamUnavailable, NLM: NlmDown}
"""How a run fails that ends like this."""


class Ward:
    """An agent whose runs end as the test says, and the service that watches it."""

    def __init__(self, stand: Stand, objects: ObjectStore, folder: Path) -> None:
        self.stand, self.objects = stand, objects
        self.catalog = Catalog(objects)
        self.file = folder / "agents" / SLUG / "_agent.md"
        self.health = self.service()
        self._usual = stand.steps.acts["execute-agent"]

    def service(self, name: str = "health@test") -> AgentHealth:
        return AgentHealth(
            ledger=self.stand.ledger,
            actor=Actor(role=Role.CONTROL_PLANE, name=name),
            clock=self.stand.clock,
            catalog=Catalog(self.objects),
            options=HealthOptions(batch=3),
        )

    def layer(self) -> BuiltinLayer:
        return BuiltinLayer(
            ledger=self.stand.ledger,
            gateway=Actor(role=Role.GATEWAY, name="gateway@test"),
            orchestrator=ORCHESTRATOR,
            catalog=self.catalog,
            publisher=DocumentPublisher(self.objects),
            timetable=Timetable(objects=self.objects),
            random_text=lambda: "abcdef",
        )

    async def write(self, body: bytes) -> None:
        """The owner saves the agent's file at this moment."""
        await self.objects.put(f"agents/{SLUG}/_agent.md", body)
        self.saved()

    def saved(self) -> None:
        """The file's time is that of the test's clock."""
        os.utime(self.file, (self.stand.clock(), self.stand.clock()))

    async def ran(self, *ends: str) -> list[JobId]:
        """Runs that end like this, one after another, ten seconds each."""
        runs: list[JobId] = []
        for number, end in enumerate(ends):
            self.stand.clock.advance(10.0)
            runs.append(await self._ran(end, number))
        return runs

    async def completes_one_of(self, slug: str) -> None:
        """Another agent has a completed run."""
        self.stand.clock.advance(10.0)
        await self.stand.run_of(slug)
        self.stand.steps.acts["execute-agent"] = self._usual
        assert (await self.stand.drive(retry_delays_s=())).state == COMPLETED

    async def _ran(self, end: str, number: int) -> JobId:
        async def breaks(context: StepContext, /) -> StepResult:
            raise ERRORS[end](detail=f"failure {number}")

        run_id = await self.stand.run_of(SLUG)
        if end == CANCELLED:
            request = RequestId(f"stop-{run_id}")
            await self.stand.ledger.cancel(ORCHESTRATOR, run_id, CancelMode.HARD, request, grace_s=0.0, cause="no")
            return run_id
        self.stand.steps.acts["execute-agent"] = breaks if end in ERRORS else self._usual
        ended = FAILED if end in ERRORS else COMPLETED
        assert (await self.stand.drive(retry_delays_s=())).state == ended
        return run_id

    async def judged(self, health: AgentHealth | None = None) -> tuple[str, ...]:
        """Let the service come to the end of the feed; the agents that it stopped."""
        stopped: tuple[str, ...] = ()
        while True:
            report = await (health or self.health).run_once()
            stopped += report.stopped
            if not report.events:
                return stopped

    async def status(self) -> str:
        agent = await self.catalog.load(SLUG)
        assert isinstance(agent, AgentDefinition)
        return agent.status.value

    async def records(self) -> list[dict[str, Any]]:
        """The audit records that are there once the projector has published the acts."""
        await ActRecorder(self.stand.ledger, PROJECTOR, DocumentPublisher(self.objects)).publish_new()
        keys = [item.key for item in (await self.objects.list("audit/")).items]
        found = [await self.objects.get(key) for key in keys]
        return [{**json.loads(one.body), "key": one.key} for one in found if one is not None]


@pytest.fixture
async def ward(stand: Stand, tmp_path: Path) -> AsyncGenerator[Ward]:
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    made = Ward(stand, objects, tmp_path / "objects")
    await made.write(agent_file(updated_at="2025-12-01T00:00:00Z", status="'active' # as of today"))
    yield made
    await objects.close()


@pytest.mark.requirement("D24", "OBS-1")
async def test_three_failed_runs_in_a_row_stop_the_agent_and_change_nothing_else_in_its_file(ward: Ward):
    before = ward.file.read_bytes()
    runs = await ward.ran(FAILED, FAILED)
    assert await ward.judged() == ()
    assert ward.file.read_bytes() == before
    runs += await ward.ran(FAILED)
    assert await ward.judged() == (SLUG,)
    ended = (await ward.stand.events(runs[-1]))[-1]
    expected = before.replace(b"'active' #", b"'error' #").replace(b"2025-12-01T00:00:00Z", b"2026-01-01T00:00:30.000Z")
    assert ward.file.read_bytes() == expected
    (record,) = await ward.records()
    assert record == {
        "ts": "2026-01-01T00:00:30.000000Z",
        "event": "agent.status.changed",
        "actor": "control-plane",
        "job_id": runs[-1],
        "from": "active",
        "to": "error",
        "node": this_node(),
        "format": 2,
        "event_id": f"{ended.id}-agent",
        "subject": SLUG,
        "role": "control-plane",
        "actor_name": "agent-health",
        "correlation_id": ended.correlation_id,
        "cause": "3 failed runs in a row, the last with INTERNAL_ERROR: failure 0",
        "key": f"audit/20260101/{ended.id}-agent.json",
    }
    index = await ward.objects.get("agents/index.json")
    assert index is not None
    assert json.loads(index.body)["agents"][0]["status"] == "error"


@pytest.mark.requirement("D24")
async def test_row_of_failures_is_counted_as_it_is_judged_and_begins_again_with_the_agent(ward: Ward):
    async def row() -> int:
        file = await ward.catalog.file(SLUG)
        assert not isinstance(file, AgentMissing)
        return await failed_in_a_row(ward.stand.ledger, SLUG, file)

    await ward.ran(FAILED, COMPLETED, FAILED, UPSTREAM, CANCELLED, FAILED)
    assert await row() == 2
    await ward.ran(FAILED)
    assert await ward.judged() == (SLUG,)
    ward.saved()
    assert (await ward.status(), await row()) == ("error", 3)
    await set_status(ward.catalog, ward.stand.ledger, OWNER, SLUG, AgentStatus.ACTIVE, reason=None)
    ward.saved()
    assert await row() == 0


@pytest.mark.requirement("D24", "D19")
@pytest.mark.parametrize(
    "ends, status",
    [
        ((FAILED, FAILED, COMPLETED, FAILED, FAILED), "active"),
        ((FAILED, FAILED, CANCELLED, FAILED), "error"),
        ((CANCELLED, CANCELLED, CANCELLED, FAILED, FAILED), "active"),
        ((FAILED, CANCELLED, FAILED, CANCELLED, CANCELLED), "active"),
        ((COMPLETED, FAILED, FAILED, FAILED), "error"),
    ],
)
async def test_a_completed_run_ends_the_row_and_a_cancelled_one_neither_counts_nor_ends_it(
    ward: Ward, ends: tuple[str, ...], status: str
):
    await ward.ran(*ends)
    await ward.judged()
    assert await ward.status() == status


@pytest.mark.requirement("D24")
@pytest.mark.parametrize(
    "ends, status",
    [
        ((UPSTREAM,) * 5, "active"),
        ((NLM,) * 5, "active"),
        ((FAILED, UPSTREAM, FAILED, NLM, UPSTREAM), "active"),
        ((FAILED, UPSTREAM, FAILED, NLM, FAILED), "error"),
    ],
)
async def test_a_run_that_upstream_failed_neither_counts_nor_ends_the_row(
    ward: Ward, ends: tuple[str, ...], status: str
):
    await ward.ran(*ends)
    await ward.judged()
    assert await ward.status() == status


@pytest.mark.requirement("D24", "OBS-1")
async def test_a_row_that_is_judged_late_is_ended_by_its_third_failure(ward: Ward):
    runs = await ward.ran(FAILED, FAILED, FAILED, CANCELLED, FAILED)
    assert await ward.judged() == (SLUG,)
    (record,) = await ward.records()
    assert record["job_id"] == runs[2]


@pytest.mark.requirement("D24")
async def test_a_file_that_its_owner_corrects_by_hand_begins_the_row_anew(ward: Ward):
    await ward.ran(FAILED, FAILED)
    ward.stand.clock.advance(1.0)
    await ward.write(ward.file.read_bytes() + b"Water first.\n")
    await ward.ran(FAILED, FAILED)
    assert await ward.judged() == ()
    await ward.ran(FAILED)
    assert await ward.judged() == (SLUG,)


@pytest.mark.requirement("D24")
async def test_a_row_that_is_long_over_when_it_is_seen_stops_nobody(ward: Ward):
    await ward.ran(FAILED, FAILED, FAILED, COMPLETED)
    assert await ward.judged() == ()
    assert await ward.status() == "active"


@pytest.mark.requirement("D24")
async def test_a_stopped_agent_is_refused_with_the_reason_and_the_way_out(ward: Ward):
    *_, last = await ward.ran(FAILED, FAILED, FAILED)
    await ward.judged()
    reason = f"it is error; .*{last} ended with INTERNAL_ERROR: failure 2; `trellis agents activate {SLUG}`"
    with pytest.raises(AgentNotRunnable, match=reason):
        await ward.layer().trigger(SLUG, {}, kind=TriggerKind.MANUAL)
    failure = await last_failure(ward.stand.ledger, SLUG)
    assert failure is not None
    assert (failure.run_id, failure.error) == (last, "INTERNAL_ERROR: failure 2")
    assert await last_failure(ward.stand.ledger, "nobody") is None


@pytest.mark.requirement("D24")
@pytest.mark.parametrize("by_hand", [False, True], ids=["by command", "by hand, without a new updated_at"])
async def test_an_agent_that_was_set_active_again_has_three_new_tries(ward: Ward, by_hand: bool):
    await ward.ran(FAILED, FAILED, FAILED)
    await ward.judged()
    ward.stand.clock.advance(10.0)
    if by_hand:
        await ward.write(ward.file.read_bytes().replace(b"'error'", b"'active'"))
    else:
        await set_status(ward.catalog, ward.stand.ledger, OWNER, SLUG, AgentStatus.ACTIVE, reason="fixed")
        ward.saved()
    await ward.ran(FAILED, FAILED)
    assert await ward.judged() == ()
    assert await ward.status() == "active"
    await ward.ran(FAILED)
    assert await ward.judged() == (SLUG,)


@pytest.mark.requirement("D24")
@pytest.mark.parametrize("status", [status for status in AgentStatus if status is not AgentStatus.ACTIVE])
async def test_an_agent_that_is_not_active_keeps_its_status(ward: Ward, status: AgentStatus):
    await ward.ran(FAILED, FAILED, FAILED)
    await ward.write(agent_file(status=status.value))
    before = ward.file.read_bytes()
    assert await ward.judged() == ()
    assert ward.file.read_bytes() == before
    assert await ward.records() == []


@pytest.mark.requirement("D24")
async def test_an_agent_that_is_gone_or_malformed_is_passed_over(ward: Ward):
    await ward.ran(FAILED, FAILED, FAILED)
    ward.file.write_bytes(b"nothing")
    assert await ward.judged() == ()
    await ward.ran(FAILED)
    ward.file.unlink()
    assert await ward.judged() == ()
    assert isinstance(await ward.catalog.load(SLUG), AgentMissing)


@pytest.mark.requirement("D24", "OBS-1", "PIPE-11")
async def test_death_after_a_status_change_leaves_only_the_record_to_be_made(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
):
    async def dies(*arguments: object) -> str:
        raise ConnectionError("killed here")

    await ward.ran(FAILED, FAILED, FAILED)
    doomed = ward.service("doomed@test")
    with monkeypatch.context() as patch:
        patch.setattr(ward.stand.ledger, "record_act", dies)
        with pytest.raises(ConnectionError):
            await ward.judged(doomed)
    assert (await ward.status(), await ward.records()) == ("error", [])
    changed = ward.file.read_bytes()
    ward.stand.clock.advance(60.0)
    assert await ward.judged() == (SLUG,)
    assert ward.file.read_bytes() == changed
    assert len(await ward.records()) == 1


@pytest.mark.requirement("D24", "OBS-1", "PIPE-11")
async def test_a_page_that_is_judged_again_changes_nothing(ward: Ward, monkeypatch: pytest.MonkeyPatch):
    async def dies(*arguments: object, **named: object) -> bool:
        raise ConnectionError("killed here")

    await ward.ran(FAILED, FAILED, FAILED)
    doomed = ward.service("doomed@test")
    doomed.options = HealthOptions(batch=100)
    with monkeypatch.context() as patch:
        patch.setattr(ward.stand.ledger, "ack", dies)
        with pytest.raises(ConnectionError):
            await doomed.run_once()
    records, changed = await ward.records(), ward.file.read_bytes()
    assert len(records) == 1
    ward.stand.clock.advance(60.0)
    await ward.judged()
    assert (await ward.records(), ward.file.read_bytes()) == (records, changed)


@pytest.mark.requirement("D24")
async def test_a_file_that_its_owner_saves_meanwhile_is_judged_anew_and_not_overwritten(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
):
    await ward.ran(FAILED, FAILED, FAILED)
    ward.stand.clock.advance(1.0)
    edited = ward.file.read_bytes() + b"Water first.\n"
    usual = ward.health.catalog.change_status

    async def late(*arguments: Any, **named: Any) -> Any:
        await ward.write(edited)
        return await usual(*arguments, **named)

    monkeypatch.setattr(ward.health.catalog, "change_status", late)
    assert await ward.judged() == ()
    assert ward.file.read_bytes() == edited
    assert await ward.records() == []


async def test_one_health_process_judges_at_a_time_and_another_takes_over_its_position(ward: Ward):
    await ward.ran(FAILED, FAILED)
    await ward.judged()
    other = ward.service("other@test")
    report = await other.run_once()
    assert (report.following, other.pause_s(report)) == (False, other.options.lease_s / 3)
    await ward.health.release()
    await ward.ran(FAILED)
    assert await ward.judged(other) == (SLUG,)


@pytest.mark.requirement("OBS-1", "D24")
async def test_decision_of_a_person_about_an_agent_is_recorded_once(ward: Ward):
    async def decide(slug: str, status: AgentStatus) -> str:
        changed = await set_status(ward.catalog, ward.stand.ledger, OWNER, slug, status, reason="spring")
        return changed.previous.value

    assert await decide(SLUG, AgentStatus.PAUSED) == "active"
    assert await decide(SLUG, AgentStatus.PAUSED) == "paused"
    acts = ActRecorder(ward.stand.ledger, PROJECTOR, DocumentPublisher(ward.objects))
    assert (await acts.publish_new(), await acts.publish_new(), await acts.publish_all()) == (1, 0, 0)
    (record,) = await ward.records()
    assert record["key"] == f"audit/20260101/{record['event_id']}.json"
    wanted = ("actor", "actor_name", "node", "subject", "from", "to", "cause", "job_id")
    assert {name: record[name] for name in wanted} == {
        "actor": "owner",
        "actor_name": "anna@home",
        "node": this_node(),
        "subject": SLUG,
        "from": "active",
        "to": "paused",
        "cause": "spring",
        "job_id": None,
    }
    with pytest.raises(StatusChangeRefused, match="from paused it may go to active, archived"):
        await decide(SLUG, AgentStatus.ERROR)
    with pytest.raises(AgentNotFound):
        await decide("nobody", AgentStatus.ACTIVE)
    ward.file.write_bytes(b"nothing")
    with pytest.raises(DefinitionMalformed):
        await decide(SLUG, AgentStatus.ACTIVE)
    assert len(await ward.records()) == 1


@pytest.mark.requirement("OBS-1")
async def test_a_change_of_status_whose_act_was_lost_in_a_crash_is_recorded_when_it_is_asked_for_again(ward: Ward):
    ledger = ward.stand.ledger

    async def decide(status: AgentStatus) -> None:
        await set_status(ward.catalog, ledger, OWNER, SLUG, status, reason="spring")

    await decide(AgentStatus.PAUSED)
    await ward.catalog.change_status(SLUG, AgentStatus.ACTIVE, at=await ledger.now())  # and here the process died
    for _ in range(2):
        await decide(AgentStatus.ACTIVE)
    acts = [(act.source, act.target) for act in await ledger.acts()]
    assert acts == [("active", "paused"), ("paused", "active")]


@pytest.mark.requirement("D24")
@pytest.mark.parametrize(
    "payload", [b"no request", b"[]", b"{}", b'{"agent_slug": "../x", "trigger": "t", "params": {}}']
)
async def test_a_run_that_nobody_can_read_stops_no_other_agents_judgement(ward: Ward, payload: bytes):
    odd = NewJob(job_id=JobId("run_2026-01-01_000000_odd123"), type="agent-run", lifecycle="run", payload=payload)
    await ward.stand.ledger.submit(ORCHESTRATOR, [odd])
    request = RequestId("stop-odd")
    await ward.stand.ledger.cancel(ORCHESTRATOR, odd.job_id, CancelMode.HARD, request, grace_s=0.0, cause="no")
    await ward.ran(FAILED, FAILED, FAILED)
    assert await ward.judged() == (SLUG,)


@pytest.mark.requirement("D24")
async def test_a_record_that_is_there_with_other_bytes_stops_no_other_agents_judgement(ward: Ward):
    runs = await ward.ran(FAILED, FAILED, FAILED)
    ended = (await ward.stand.events(runs[-1]))[-1]
    await ward.objects.put(ids.audit_key(ended.ts, f"{ended.id}-agent"), b"another")
    assert await ward.judged() == (SLUG,)
    assert await ward.status() == "error"


async def alert_changes(ward: Ward) -> list[tuple[str, str, str]]:
    """What a round of the alerts about agents raises and resolves."""
    conditions = LedgerConditions(
        ledger=ward.stand.ledger,
        thresholds=AlertThresholds(),
        failing_agents=partial(ward.catalog.indexed, AgentStatus.ERROR),
        unserved_agents=UnservedAgents(ledger=ward.stand.ledger, catalog=ward.catalog),
    )
    evaluator = AlertEvaluator(
        ledger=ward.stand.ledger,
        actor=Actor(role=Role.CONTROL_PLANE, name="alerts@test"),
        clock=ward.stand.clock,
        checks=(conditions.agents,),
        new_id=lambda: str(ward.stand.clock()),
    )
    changes = (await evaluator.run_once()).changes
    return [(change.kind.value, change.alert.name, change.alert.subject) for change in changes]


@pytest.mark.requirement("OBS-4", "D24")
async def test_an_agent_whose_upstream_is_away_stays_active_and_raises_an_alert_until_a_run_completes(ward: Ward):
    await ward.ran(COMPLETED, UPSTREAM, CANCELLED, NLM)
    await ward.judged()
    assert await alert_changes(ward) == []
    await ward.ran(UPSTREAM)
    assert await ward.judged() == ()
    assert await ward.status() == "active"
    assert await alert_changes(ward) == [("raised", "agent-failing", SLUG)]
    (alert,) = await ward.stand.ledger.alerts(only_open=True)
    assert "It stays active: UPSTREAM_UNAVAILABLE:" in alert.text
    await ward.ran(UPSTREAM)
    assert await alert_changes(ward) == []
    await ward.ran(COMPLETED)
    assert await alert_changes(ward) == [("resolved", "agent-failing", SLUG)]


async def test_an_agent_that_completed_a_run_long_ago_is_found_behind_a_page_of_other_agents_runs(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agent_status, "PAGE", 4)
    unserved = UnservedAgents(ledger=ward.stand.ledger, catalog=ward.catalog)
    await ward.ran(UPSTREAM, UPSTREAM, COMPLETED, UPSTREAM)
    for _ in range(4):
        await ward.completes_one_of("other")
    assert await unserved() == {}, "two of its three failures are older than its completed run"
    await ward.ran(UPSTREAM, UPSTREAM)
    assert list(await unserved()) == [SLUG]


async def test_errors_of_ended_runs_are_read_once(ward: Ward, monkeypatch: pytest.MonkeyPatch):
    await ward.ran(UPSTREAM, UPSTREAM, UPSTREAM)
    unserved = UnservedAgents(ledger=ward.stand.ledger, catalog=ward.catalog)
    first = await unserved()
    assert list(first) == [SLUG]
    read = list[JobId]()
    events_of = ward.stand.ledger.events_of

    async def counted(job_ids: Sequence[JobId], *, last: int | None = None) -> dict[JobId, list[Event]]:
        read.extend(job_ids)
        return await events_of(job_ids, last=last)

    monkeypatch.setattr(ward.stand.ledger, "events_of", counted)
    assert await unserved() == first
    assert read == []
    (run,) = await ward.ran(UPSTREAM)
    read.clear()  # the run itself reads its events when it begins
    await unserved()
    assert read == [run]


@pytest.mark.requirement("OBS-4", "D24")
async def test_an_agent_that_was_stopped_raises_an_alert_until_it_is_active_again(ward: Ward):
    evaluated = partial(alert_changes, ward)
    await ward.ran(FAILED, FAILED)
    await ward.judged()
    assert await evaluated() == []
    await ward.ran(FAILED)
    await ward.judged()
    assert await evaluated() == [("raised", "agent-failing", SLUG)]
    assert await evaluated() == []
    await set_status(ward.catalog, ward.stand.ledger, OWNER, SLUG, AgentStatus.ACTIVE, reason="mended")
    assert await evaluated() == [("resolved", "agent-failing", SLUG)]
