"""Events begin runs of the agents that name them: once each, in bounded chains, and skipped ones say why (RUN-9, D24)."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from tests.agents.files import agent_file
from tests.ledgers.conformance.rig import SUBMITTER, Rig, actor
from trellis.agents.catalog import Catalog
from trellis.documents import ids
from trellis.documents.publisher import DocumentPublisher
from trellis.documents.run_documents import RunRequest
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import JobId
from trellis.engine.records import JobFilter
from trellis.lifecycles import Role
from trellis.proposals.apply import INTENT
from trellis.runs.event_triggers import ALWAYS_READ, SKIPPED, EventTriggers
from trellis.runs.orchestration import BuiltinLayer, TriggerKind
from trellis.runs.source_changes import NOTED_AGAIN_S, SourceChanges, known_key
from trellis.runs.timetable import Timetable
from trellis.runs.trigger_chain import CHAIN_MAX, TriggerOrigin
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock

APPLIED, RECEIVED = "{events: [proposal.applied]}", "{events: [inbox.item.created]}"


class Listeners:
    """Agents that wait for events, and processes that begin their runs."""

    def __init__(self, rig: Rig, objects: ObjectStore) -> None:
        self.rig, self.objects, self.clock = rig, objects, FakeClock()

    def process(self, name: str = "triggers@test") -> EventTriggers:
        return EventTriggers(
            ledger=self.rig.ledger,
            actor=actor(Role.CONTROL_PLANE, name),
            clock=self.clock,
            catalog=Catalog(self.objects),
            layer=self.layer(),
        )

    def watcher(self) -> SourceChanges:
        """A process that compares the sources of agents."""
        return SourceChanges(
            ledger=self.rig.ledger,
            actor=actor(Role.CONTROL_PLANE, "sources@test"),
            objects=self.objects,
            catalog=Catalog(self.objects),
            layer=self.layer(),
        )

    def layer(self) -> BuiltinLayer:
        return BuiltinLayer(
            ledger=self.rig.ledger,
            gateway=actor(Role.GATEWAY),
            orchestrator=actor(Role.ORCHESTRATOR),
            catalog=Catalog(self.objects),
            publisher=DocumentPublisher(self.objects),
            timetable=Timetable(objects=self.objects),
            random_text=lambda: f"{next(self.rig.numbers):06x}",
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

    async def source(self, slug: str, name: str, text: str) -> None:
        await self.objects.put(f"agents/{slug}/sources/{name}", text.encode())

    async def edited(self, slug: str, name: str, text: str, parent_id: str, to: str = "applied") -> None:
        """A source that a proposal of this run or entry wrote, and the status that the proposal has then."""
        body = json.dumps({"agent_slug": slug, "target": f"sources/{name}"}).encode()
        proposal = await self.rig.submit_one(
            lifecycle="proposal", type="proposal", by=actor(Role.ORCHESTRATOR), parent_id=parent_id, payload=body
        )
        lease = await self.rig.drive(proposal, "applying")
        assert lease is not None
        await self.rig.ledger.journal(lease, INTENT, sha256(text.encode()).encode())
        await self.source(slug, name, text)
        if to != "applying":
            await self.rig.drive(proposal, to, lease)

    async def ended(self, to: str, lifecycle: str = "leased-job", **options: object) -> JobId:
        """A job that ended so."""
        by = actor(Role.GATEWAY) if lifecycle == "queue-job" else SUBMITTER
        job = await self.rig.submit_one(lifecycle=lifecycle, by=by, **options)
        await self.rig.drive(job, to)
        return job

    async def run(self, slug: str, to: str, **options: object) -> JobId:
        """A run of an agent that a person began, or `key`, and that ended so."""
        run = await self.layer().trigger(slug, {}, kind=TriggerKind.MANUAL, **options)  # pyright: ignore[reportArgumentType]
        await self.rig.drive(run.job_id, to)
        return run.job_id

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


@pytest.mark.requirement("RUN-9", "D24")
async def test_a_process_that_dies_right_after_the_first_subscription_loses_no_event(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
):
    await listeners.agent("reader", RECEIVED)
    await listeners.entry()
    process = listeners.process("first@test")
    begin = process.begin

    async def begin_and_die(first: str | None = None) -> bool:
        assert await begin(first)
        raise LedgerUnavailable(reason="the process was killed")

    monkeypatch.setattr(process, "begin", begin_and_die)
    with pytest.raises(LedgerUnavailable):
        await process.run_once()
    after = await listeners.entry()
    await listeners.rig.advance(process.options.lease_s + 1)
    assert len((await listeners.process("next@test").run_once()).runs) == 1
    assert [one.params["job_id"] for one in await listeners.runs()] == [after]


@pytest.mark.requirement("RUN-9", "D24")
async def test_an_event_right_after_the_first_subscription_begins_a_run(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
):
    await listeners.agent("reader", RECEIVED)
    process = listeners.process()
    begin = process.begin

    async def begin_and_receive(first: str | None = None) -> bool:
        following = await begin(first)
        await listeners.entry()
        return following

    monkeypatch.setattr(process, "begin", begin_and_receive)
    assert len((await process.run_once()).runs) == 1


@pytest.mark.requirement("RUN-9")
async def test_a_process_that_died_before_it_saved_its_position_begins_nothing_twice(listeners: Listeners):
    await listeners.agent("reader", RECEIVED)
    first = listeners.process()
    await first.run_once()
    entry = await listeners.entry()
    (event,) = await listeners.rig.ledger.events(entry)
    (occurred,) = await first._occurrences([event])
    (run,) = [await first._trigger(occurred, "reader", TriggerOrigin())]  # and here it dies, with its position unsaved
    await first.release()
    assert (await listeners.process("other@test").run_once()).runs == (run,)
    assert len(await listeners.runs()) == 1


@pytest.mark.requirement("RUN-9", "D71")
async def test_a_chain_of_events_ends_and_says_why(listeners: Listeners):
    slugs = [f"link-{number}" for number in range(CHAIN_MAX + 1)]
    await listeners.agent(slugs[0], f"{{events: [proposal.applied, 'run.completed:{slugs[-2]}']}}")
    for before, slug in pairwise(slugs):
        await listeners.agent(slug, f"{{events: ['run.completed:{before}']}}")
    process = listeners.process()
    await process.run_once()
    await listeners.applied()
    for depth in range(1, CHAIN_MAX + 1):
        (run,) = (await process.run_once()).runs
        begun = (await listeners.runs())[-1]
        assert (begun.agent_slug, begun.params["depth"]) == (slugs[depth - 1], depth)
        assert begun.params["chain"] == slugs[: depth - 1]
        await listeners.rig.drive(JobId(run), "completed")
    last = await process.run_once()
    assert (last.runs, last.skipped) == ((), 2)
    reasons = dict(await listeners.skips())
    assert "the same agent" in reasons[slugs[0]]
    assert f"{CHAIN_MAX} is the limit" in reasons[slugs[-1]]


@pytest.mark.requirement("RUN-9", "D71")
async def test_a_proposal_of_an_agents_own_run_does_not_begin_it(listeners: Listeners):
    await listeners.agent("keeper", APPLIED)
    process = listeners.process()
    await process.run_once()
    await listeners.applied(await listeners.run("keeper", "completed"))
    assert ((await process.run_once()).skipped, len(await listeners.runs())) == (1, 1)


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


@pytest.mark.requirement("RUN-9", "D71")
async def test_the_end_of_a_job_of_a_named_type_begins_one_run(listeners: Listeners):
    await listeners.agent("clerk", "{events: [job.ended:import, job.ended:RESEARCH]}")
    process = listeners.process()
    await process.run_once()
    done = await listeners.ended("succeeded", type="import")
    dead = await listeners.ended("dead_lettered", type="import")
    await listeners.ended("succeeded", type="export")
    queued = await listeners.ended("FAILED", "queue-job", type="RESEARCH")
    await listeners.rig.submit_one(type="import")
    assert len((await process.run_once()).runs) == 3
    found = [one.params for one in await listeners.runs()]
    assert {(one["event"], one["type"], one["status"], one["job_id"]) for one in found} == {
        ("job.ended", "import", "succeeded", done),
        ("job.ended", "import", "dead_lettered", dead),
        ("job.ended", "RESEARCH", "FAILED", queued),
    }
    await listeners.rig.drive(queued, "DEAD")
    assert (await process.run_once()).runs == (), "its work had ended before"


@pytest.mark.requirement("RUN-9", "D71")
@pytest.mark.parametrize("job_id", ["order:42@shop", "x" * 200])
async def test_a_job_of_any_id_begins_its_run_or_says_why_not_and_stops_nothing(listeners: Listeners, job_id: str):
    await listeners.agent("clerk", "{events: [job.ended:import]}")
    process = listeners.process()
    await process.run_once()
    job = listeners.rig.new_job(job_id=JobId(job_id), type="import", correlation_id="order 42, the second")
    await listeners.rig.offer(job)
    await listeners.rig.drive(job.job_id, "succeeded")
    usual = await listeners.ended("succeeded", type="import")
    report = await process.run_once()
    assert (len(report.runs) + report.skipped, report.held_up) == (2, False)
    assert usual in [one.params["job_id"] for one in await listeners.runs()]
    assert (await process.run_once()).events == 0, "none of them is read again"


@pytest.mark.requirement("RUN-9", "D71")
async def test_the_end_of_another_agents_run_begins_a_run_but_no_chain_comes_back(listeners: Listeners):
    await listeners.agent("writer", "{events: [run.completed:checker]}")
    await listeners.agent("checker", "{events: [run.completed:writer]}")
    await listeners.agent("nurse", "{events: [run.failed:writer]}")
    process = listeners.process()
    await process.run_once()
    first = await listeners.run("writer", "completed")
    (checked,) = (await process.run_once()).runs
    (request,) = [one for one in await listeners.runs() if one.agent_slug == "checker"]
    params = {name: request.params[name] for name in ("event", "agent", "status", "job_id", "chain")}
    assert params == {
        "event": "run.completed",
        "agent": "writer",
        "status": "completed",
        "job_id": first,
        "chain": ["writer"],
    }
    await listeners.rig.drive(JobId(checked), "completed")
    last = await process.run_once()
    assert (last.runs, last.skipped) == ((), 1)
    assert [slug for slug, reason in await listeners.skips() if "the same agent" in reason] == ["writer"]
    await listeners.run("writer", "failed")
    assert len((await process.run_once()).runs) == 1
    assert (await listeners.runs())[-1].agent_slug == "nurse"


@pytest.mark.requirement("RUN-9", "D71")
async def test_an_entry_of_another_action_begins_nothing(listeners: Listeners):
    await listeners.agent("editor", "{events: ['inbox.item.created:propose-edit']}")
    process = listeners.process()
    await process.run_once()
    await listeners.entry()
    wanted = await listeners.entry(intent={"action": "propose-edit", "target": "x/sources/a.md"})
    assert (len((await process.run_once()).runs), await listeners.skips()) == (1, [])
    assert [one.params["job_id"] for one in await listeners.runs()] == [wanted]


@pytest.mark.requirement("RUN-9", "D71")
async def test_what_an_agents_own_run_caused_through_jobs_and_the_inbox_does_not_begin_it(listeners: Listeners):
    await listeners.agent("clerk", "{events: [job.ended:import, run.completed:helper]}")
    await listeners.agent("helper", "{manual: true}")
    process = listeners.process()
    await process.run_once()
    run = await listeners.run("clerk", "completed", correlation_id="press-9")
    child = await listeners.rig.submit_one(type="other", parent_id=run)
    await listeners.ended("succeeded", type="import", parent_id=child)
    entry = await listeners.entry("agent", correlation="press-9")
    await listeners.ended("succeeded", type="import", parent_id=entry)
    await listeners.run("helper", "completed", correlation_id="press-9", key=f"inbox:{entry}")
    report = await process.run_once()
    assert (report.runs, report.skipped) == ((), 3)
    await listeners.ended("succeeded", type="import", parent_id=await listeners.entry(correlation="press-9"))
    assert len((await process.run_once()).runs) == 1, "a person's entry begins a chain of its own"


@pytest.mark.requirement("RUN-9", "D71")
async def test_events_of_jobs_and_runs_are_read_only_while_an_agent_names_them(listeners: Listeners):
    await listeners.agent("reader", RECEIVED)
    process = listeners.process()
    await process.run_once()
    await listeners.ended("succeeded", type="import")
    assert ((await process.run_once()).events, process.lifecycle) == (0, ALWAYS_READ)
    await listeners.agent("clerk", "{events: [job.ended:import]}")
    listeners.clock.advance(process.options.agents_s)
    await process.run_once()
    assert process.lifecycle == ALWAYS_READ | {"leased-job", "queue-job"}
    await listeners.ended("succeeded", type="import")
    assert len((await process.run_once()).runs) == 1
    await listeners.agent("clerk", "{events: [run.completed:reader]}")
    listeners.clock.advance(process.options.agents_s)
    await process.run_once()
    assert process.lifecycle == ALWAYS_READ | {"run"}


@pytest.mark.requirement("RUN-9", "D71")
async def test_a_changed_source_begins_one_run_over_several_processes(listeners: Listeners):
    await listeners.agent("reader", "{events: [source.changed]}")
    await listeners.agent("other", RECEIVED)
    await listeners.source("reader", "a.md", "one")
    await listeners.source("reader", "b.md", "two")
    first, second = listeners.watcher(), listeners.watcher()
    for process in (first, second):
        assert (await process.run_once()).runs == (), "the first look only remembers"
    await listeners.source("reader", "a.md", "one")
    assert (await first.run_once()).runs == (), "the same bytes are no change"
    await listeners.source("reader", "a.md", "three")
    await listeners.source("reader", "c.md", "new")
    await listeners.source("other", "a.md", "not its own")
    await listeners.objects.delete("agents/reader/sources/b.md")
    reports = await asyncio.gather(first.run_once(), second.run_once(), first.run_once())
    (request,) = await listeners.runs()
    assert {run for report in reports for run in report.runs} != set()
    assert (request.agent_slug, request.trigger, request.params["event"]) == ("reader", "event", "source.changed")
    assert request.params["files"] == ["sources/a.md", "sources/b.md", "sources/c.md"]
    await first.run_once()
    await listeners.source("reader", "a.md", "four")
    assert len((await second.run_once()).runs) == 1
    await listeners.source("reader", "a.md", "three")
    assert len((await first.run_once()).runs) == 1, "also when a source is again as this process last saw it"
    await listeners.agent("reader", "{events: [source.changed]}", context="{max_sources: 1}")
    assert (await first.run_once()).runs == (), "another context is no change of a source"


@pytest.mark.requirement("RUN-9", "D71")
async def test_a_source_that_an_agents_own_run_changed_does_not_begin_it(listeners: Listeners):
    await listeners.agent("reader", "{events: [source.changed]}")
    watcher = listeners.watcher()
    await watcher.run_once()
    run = await listeners.run("reader", "completed")
    await listeners.edited("reader", "a.md", "by itself", run)
    report = await watcher.run_once()
    assert (report.runs, report.skipped) == ((), 1)
    assert [slug for slug, reason in await listeners.skips() if "the same agent" in reason] == ["reader"]
    await listeners.edited("reader", "a.md", "by a person", await listeners.entry())
    assert len((await watcher.run_once()).runs) == 1
    await listeners.edited("reader", "a.md", "by itself again", run)
    await listeners.source("reader", "b.md", "by a person meanwhile")
    assert len((await watcher.run_once()).runs) == 1


@pytest.mark.requirement("RUN-9", "D71")
async def test_a_change_that_may_be_of_an_agents_own_run_does_not_begin_it(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
):
    await listeners.agent("reader", "{events: [source.changed]}")
    watcher, run = listeners.watcher(), await listeners.run("reader", "completed")
    for number in range(2):
        await listeners.edited("other", "a.md", f"{number} failed long ago", run, "failed")
    await listeners.rig.advance(1.0)
    await watcher.run_once()
    monkeypatch.setattr("trellis.runs.source_changes.APPLYING_MAX", 2)
    await listeners.source("reader", "a.md", "by a person")
    assert len((await watcher.run_once()).runs) == 1, "proposals that failed before the last look do not count"
    await listeners.edited("reader", "a.md", "written before it failed", run, "failed")
    assert (await watcher.run_once()).skipped == 1
    for number in range(2):
        await listeners.edited("other", "a.md", f"{number} at work", run, "applying")
    await listeners.source("reader", "a.md", "by a person, or by one of too many proposals at work")
    assert (await watcher.run_once()).skipped == 1


@pytest.mark.requirement("RUN-9", "D71")
async def test_proposals_are_compared_with_a_change_several_at_a_time(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
):
    await listeners.agent("reader", "{events: [source.changed]}")
    watcher, run = listeners.watcher(), await listeners.run("reader", "completed")
    await watcher.run_once()
    for name in ("a.md", "b.md", "c.md"):
        await listeners.edited("reader", name, "by itself", run)
    monkeypatch.setattr("trellis.runs.source_changes.PAYLOADS_AT_ONCE", 2)
    calls: list[int] = []
    payloads = watcher.ledger.payloads

    async def counted(job_ids: Sequence[JobId]) -> dict[JobId, bytes]:
        calls.append(len(job_ids))
        return await payloads(job_ids)

    monkeypatch.setattr(watcher.ledger, "payloads", counted)
    assert (await watcher.run_once()).skipped == 1, "the proposals of every call count"
    assert calls.count(2) == 1, "two in one call, and the third in a call of its own"


@pytest.mark.requirement("RUN-9", "D71")
async def test_a_change_that_was_recorded_by_a_process_that_died_still_begins_its_run(listeners: Listeners):
    await listeners.agent("reader", "{events: [source.changed]}")
    await listeners.watcher().run_once()
    await listeners.source("reader", "a.md", "new")
    (run,) = (await listeners.watcher().run_once()).runs
    there = await listeners.objects.get(known_key("reader"))
    assert there is not None
    recorded = json.loads(there.body)
    recorded["last"]["run_id"] = None  # the process died before it stored the result
    await listeners.objects.put(known_key("reader"), json.dumps(recorded).encode())
    assert (await listeners.watcher().run_once()).runs == (run,)
    assert (await listeners.watcher().run_once()).runs == ()
    await listeners.objects.put(known_key("reader"), b"no JSON")
    assert (await listeners.watcher().run_once()).runs == (), "unreadable: the sources are remembered anew"
    assert len(await listeners.runs()) == 1
    known = await listeners.objects.get(known_key("reader"))
    await listeners.rig.advance(NOTED_AGAIN_S)
    assert (await listeners.watcher().run_once()).runs == ()
    later = await listeners.objects.get(known_key("reader"))
    assert known is not None
    assert later is not None
    assert json.loads(known.body)["seen_at"] < json.loads(later.body)["seen_at"], "noted anew after an hour"
