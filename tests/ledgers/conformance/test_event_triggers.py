"""Events begin runs of the agents that name them: once each, in bounded chains, and skipped ones say why (RUN-9, D24)."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.agents.files import agent_file
from tests.ledgers.conformance.rig import Rig, actor
from trellis.agents.catalog import Catalog
from trellis.documents import ids
from trellis.documents.publisher import DocumentPublisher
from trellis.documents.run_documents import RunRequest
from trellis.engine.jobs import JobId
from trellis.engine.records import JobFilter
from trellis.lifecycles import Role
from trellis.runs.event_triggers import CHAIN_MAX, SKIPPED, EventTriggers
from trellis.runs.orchestration import BuiltinLayer
from trellis.runs.timetable import Timetable
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock

APPLIED, RECEIVED = "{events: [proposal.applied]}", "{events: [inbox.item.created]}"


class Listeners:
    """Agents that wait for events, and processes that begin their runs."""

    def __init__(self, rig: Rig, objects: ObjectStore) -> None:
        self.rig, self.objects, self.clock = rig, objects, FakeClock()

    def process(self, name: str = "triggers@test") -> EventTriggers:
        layer = BuiltinLayer(
            ledger=self.rig.ledger,
            gateway=actor(Role.GATEWAY),
            orchestrator=actor(Role.ORCHESTRATOR),
            catalog=Catalog(self.objects),
            publisher=DocumentPublisher(self.objects),
            timetable=Timetable(objects=self.objects),
            random_text=lambda: f"{next(self.rig.numbers):06x}",
        )
        return EventTriggers(
            ledger=self.rig.ledger,
            actor=actor(Role.CONTROL_PLANE, name),
            clock=self.clock,
            catalog=Catalog(self.objects),
            layer=layer,
        )

    async def agent(self, slug: str, triggers: str, **fields: str) -> None:
        await self.objects.put(f"agents/{slug}/_agent.md", agent_file(slug=slug, triggers=triggers, **fields))

    async def entry(self, source: str = "webhook", correlation: str | None = None, **more: object) -> JobId:
        body = {"source": {"type": source}, "intent": {"action": "job", "target": "x"}, "refusal": None, **more}
        return await self.rig.submit_one(
            lifecycle="inbox-entry",
            type="inbox-entry",
            by=actor(Role.GATEWAY),
            payload=json.dumps(body).encode(),
            correlation_id=correlation,
        )

    async def applied(self, run_id: str | None = None) -> JobId:
        """A proposal that was applied, made by this run."""
        proposal = await self.rig.submit_one(
            lifecycle="proposal", type="proposal", by=actor(Role.ORCHESTRATOR), parent_id=run_id
        )
        await self.rig.drive(proposal, "applied")
        return proposal

    async def runs(self) -> list[RunRequest]:
        found = (await self.rig.ledger.jobs(JobFilter(lifecycle="run"), limit=100)).jobs
        payloads = await self.rig.ledger.payloads([job.job_id for job in found])
        return [RunRequest.read(payloads[job.job_id]) for job in reversed(found)]

    async def skips(self) -> list[tuple[str, str]]:
        return [(act.subject, act.cause or "") for act in await self.rig.ledger.acts() if act.event == SKIPPED]


@pytest_asyncio.fixture(loop_scope="session")
async def listeners(rig: Rig, tmp_path: Path) -> AsyncGenerator[Listeners]:
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    yield Listeners(rig, objects)
    await objects.close()


@pytest.mark.requirement("RUN-9", "D24")
async def test_an_event_begins_one_run_of_each_agent_that_names_it(listeners: Listeners):
    await listeners.agent("reader", RECEIVED)
    await listeners.agent("keeper", APPLIED)
    await listeners.agent("both", "{manual: false, events: [inbox.item.created, proposal.applied]}")
    await listeners.agent("by-hand", "{manual: true}")
    early = await listeners.entry()
    process = listeners.process()
    assert (await process.run_once()).runs == (), "what happened before the first subscription begins nothing"
    entry, proposal = await listeners.entry(), await listeners.applied()
    report = await process.run_once()
    assert (len(report.runs), report.skipped) == (4, 0)
    found = await listeners.runs()
    assert {(one.agent_slug, one.params["event"], one.params["job_id"]) for one in found} == {
        ("reader", "inbox.item.created", entry),
        ("both", "inbox.item.created", entry),
        ("keeper", "proposal.applied", proposal),
        ("both", "proposal.applied", proposal),
    }
    assert {(one.trigger, one.params["depth"]) for one in found} == {("event", 1)}
    assert early not in {one.params["job_id"] for one in found}
    shown = [
        await listeners.objects.get(ids.status_key(one.agent_slug, run))
        for one, run in zip(found, report.runs, strict=True)
    ]
    assert [json.loads(one.body)["trigger"] for one in shown if one is not None] == ["event"] * 4


@pytest.mark.requirement("RUN-9")
async def test_a_process_that_died_before_it_saved_its_position_begins_nothing_twice(listeners: Listeners):
    await listeners.agent("reader", RECEIVED)
    first = listeners.process()
    await first.run_once()
    entry = await listeners.entry()
    (event,) = await listeners.rig.ledger.events(entry)
    (run,) = [await first._trigger(event, "reader")]  # and here it dies, with its position unsaved
    await first.release()
    assert (await listeners.process("other@test").run_once()).runs == (run,)
    assert len(await listeners.runs()) == 1


@pytest.mark.requirement("RUN-9")
async def test_a_chain_of_events_ends_and_says_why(listeners: Listeners):
    for slug in ("ping", "pong"):
        await listeners.agent(slug, APPLIED)
    process = listeners.process()
    await process.run_once()
    await listeners.applied()
    for depth in range(1, CHAIN_MAX + 1):
        report = await process.run_once()
        assert {one.params["depth"] for one in (await listeners.runs())[-len(report.runs) :]} == {depth}
        await listeners.applied(report.runs[0])
    last = await process.run_once()
    assert (last.runs, last.skipped) == ((), 2)
    reasons = [reason for _, reason in await listeners.skips()]
    assert sum("the same agent" in reason for reason in reasons) == CHAIN_MAX
    assert sum(f"{CHAIN_MAX} is the limit" in reason for reason in reasons) == 1


@pytest.mark.requirement("RUN-9")
async def test_what_an_event_does_not_begin_is_recorded_with_the_reason(listeners: Listeners):
    await listeners.agent("reader", RECEIVED)
    await listeners.agent("asleep", RECEIVED, status="paused")
    process = listeners.process()
    await process.run_once()
    await listeners.entry(refusal={"code": "no"})
    await listeners.entry(intent={"action": "run", "target": "reader"})
    assert (await process.run_once()).runs == ()
    reasons = [reason for slug, reason in await listeners.skips() if slug == "reader"]
    assert reasons == ["the inbox refused the entry", "the entry itself asks for a run of this agent"]
    assert sum(slug == "asleep" for slug, _ in await listeners.skips()) == 2


@pytest.mark.requirement("RUN-9")
async def test_an_entry_that_an_agents_own_run_put_into_the_inbox_goes_on_with_the_chain(listeners: Listeners):
    await listeners.agent("reader", RECEIVED)
    process = listeners.process()
    await process.run_once()
    await listeners.entry(correlation="press-9")
    assert len((await process.run_once()).runs) == 1
    await listeners.entry("agent", correlation="press-9")
    assert (await process.run_once()).skipped == 1
    await listeners.entry(correlation="press-9")
    assert len((await process.run_once()).runs) == 1, "a person's entry begins a chain of its own"
