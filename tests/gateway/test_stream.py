"""Live events: their shapes, who gets which, and where a stream goes on."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.desk import BACKEND, call_nlm, complete, draft, queue_job
from tests.gateway.description import description
from tests.gateway.listening import PATIENCE_S
from tests.gateway.stand import BEGINNING, ORCHESTRATOR, Stand, standing
from trellis.app.wiring import SystemClock, new_id
from trellis.artifacts.registry import ArtifactRegistry
from trellis.artifacts.rows import project_id
from trellis.auth.matrices import RULES, Grant
from trellis.auth.principals import Principal
from trellis.documents import ids
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Actor, Epoch, JobId, Move, NewJob, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, FeedPage
from trellis.gateway.events import StreamFilter, StreamView, rule_of, to_streamed_event, types_of
from trellis.gateway.hub import PAGE, PAUSE_S, READ_MAX, EventBatch, EventHub, StreamOptions
from trellis.gateway.visibility import PublishedVersions
from trellis.ledgers import open_ledger
from trellis.lifecycles import LIFECYCLES, Role
from trellis.runs.projector import ProjectorAlert, raise_alert

ALL = f"last_event_id={BEGINNING}"
OWNER = Actor(role=Role.OWNER, name="iryna")
EVERYTHING = StreamView(filter=StreamFilter(), whole=frozenset(LIFECYCLES))


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with standing(tmp_path) as made:
        yield made


# --- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("RUN-5", "RUN-10", "PIPE-9")
async def test_events_of_a_run_are_streamed_from_the_ledger_while_no_orchestrator_runs(stand: Stand):
    async with stand.listen() as listener:
        run_id = await stand.run_to_its_end()
        told = await listener.until_events(5)
    async with stand.client() as client:
        polled = (await client.get(f"/runs/{run_id}/status")).json()
    assert [data.get("proposals_created") for data in told] == [None] * 4 + [polled["proposals_created"]]
    assert (polled["status"], polled["proposals_created"]) == ("completed", ["prop_1"])
    assert [(data["type"], data.get("status"), data.get("step")) for data in told] == [
        ("run.status.changed", "requested", None),
        ("run.status.changed", "queued", None),
        ("run.status.changed", "running", None),
        ("run.step.completed", None, 1),
        ("run.status.changed", "completed", None),
    ]
    assert {data["runId"] for data in told} == {run_id}
    assert {data["agentSlug"] for data in told} == {"archivist-violin"}
    assert [data["version"] for data in told] == [1, 2, 3, 4, 5]
    assert [data["eventId"] for data in told] == [event.id for event in await stand.ledger.events(run_id)]


@pytest.mark.requirement("RUN-5")
async def test_a_proposal_is_created_once_and_then_changes(stand: Stand):
    run_id = await stand.run_requested()
    async with stand.listen() as listener:
        proposal = await stand.proposal_of(run_id)
        await stand.ledger.move(OWNER, Move(job_id=proposal, target="approved", request_id=RequestId("1")))
        created, approved = await listener.until_events(2)
    assert (created["type"], created["proposalId"]) == ("proposal.created", proposal)
    assert (approved["type"], approved["proposalId"], approved["status"]) == (
        "proposal.status.changed",
        proposal,
        "approved",
    )
    assert created["agentSlug"] == approved["agentSlug"] == "archivist-violin"
    assert created["correlationId"] == run_id


async def test_other_jobs_say_their_lifecycle(stand: Stand):
    (job_id,) = await stand.jobs(1)
    (_, told), *_ = (await stand.heard(ALL)).heard.events
    assert (told["type"], told["jobId"], told["lifecycle"], told["status"]) == (
        "job.status.changed",
        job_id,
        "leased-job",
        "queued",
    )
    assert "agentSlug" not in told


def event(lifecycle: str, type_: str, source: str | None, target: str, data: bytes | None = None) -> Event:
    return Event(
        id="a-1",
        job_id=JobId("a"),
        lifecycle=lifecycle,
        type=type_,
        ts=datetime(2026, 2, 14, tzinfo=UTC),
        role=Role.WORKER,
        actor="w",
        correlation_id="a",
        cause=None,
        source=source,
        target=target,
        generation=0,
        attempt=0,
        epoch=Epoch(1),
        version=1,
        data=data,
    )


@pytest.mark.parametrize("lifecycle", LIFECYCLES)
def test_every_event_of_every_lifecycle_has_one_type_and_a_change_of_status_changes_it(lifecycle: str):
    for step in LIFECYCLES[lifecycle].transitions:
        told = to_streamed_event(event(lifecycle, step.event, step.source, step.target), BEGINNING, None)
        assert told.type in types_of(lifecycle)
        assert told.type.endswith(".status.changed") == (step.source != step.target and told.type != "proposal.created")


@pytest.mark.parametrize("data", [None, b"null", b"[]", b'{"other": 1}'])
def test_stream_event_of_a_step_without_a_number_omits_it(data: bytes | None):
    told = to_streamed_event(event("run", "run.step.completed", "running", "running", data), BEGINNING, None)
    assert b'"step":null' in told.frame


def test_event_name_with_line_breaks_stays_on_one_stream_line():
    told = to_streamed_event(event("leased-job", "job_queued", None, "queued\nid: 9\n\ndata: {}"), BEGINNING, None)
    assert told.frame.count(b"\n") == 3


# --- where a stream begins and goes on -----------------------------------------------------------------------------


async def test_a_stream_begins_now_and_can_go_on_before_its_first_event(stand: Stand):
    await stand.jobs(3)
    first = await stand.heard()
    assert first.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert first.headers["cache-control"] == "no-cache"
    assert first.headers["x-accel-buffering"] == "no"
    assert first.heard.events == []
    assert first.heard.retry_ms is not None
    assert 1_000 <= first.heard.retry_ms <= 3_000
    (job_id,) = await stand.jobs(1)
    again = await stand.heard(Last_Event_ID=first.heard.last_id)
    assert [data["jobId"] for _, data in again.heard.events] == [job_id]


@pytest.mark.requirement("RUN-5")
async def test_a_stream_goes_on_exactly_after_any_event(stand: Stand):
    await stand.run_to_its_end()
    await stand.jobs(4)
    whole = (await stand.heard(ALL)).heard.events
    assert len(whole) == 9
    for number, (position, _) in enumerate(whole, 1):
        assert (await stand.heard(f"last_event_id={position}")).heard.events == whole[number:]


async def test_the_header_of_a_reconnect_counts_more_than_the_address(stand: Stand):
    await stand.jobs(3)
    positions = [position for position, _ in (await stand.heard(ALL)).heard.events]
    assert len((await stand.heard(ALL, Last_Event_ID=positions[1])).heard.events) == 1


NO_POSITIONS = ("abc", "1", "-000000000000001", "9" * 16, "9" * 500, "0" * 17, "0" * 14 + ".1", "%D9%A0" * 16)


async def test_invalid_stream_position_is_refused(stand: Stand):
    await stand.jobs(2)
    for position in NO_POSITIONS:
        answer = await stand.heard(f"last_event_id={position}")
        assert answer.status == 422, position
        assert b"leave it out to begin now" in answer.body


async def test_positions_of_postgresql_are_taken_and_others_refused(postgres_url: str, stand: Stand):
    ledger = await open_ledger(postgres_url)
    try:
        published = PublishedVersions(objects=stand.objects, clock=SystemClock())
        hub = EventHub(ledger=ledger, published=published, clock=SystemClock(), rng=random.Random(1))
        for number in range(32):  # as many transactions as the feed looks at in one go
            await _submit(ledger, f"job-{number}")
        page = await ledger.feed(None, limit=500)
        for position in (*page.positions, page.position, await ledger.feed_end()):
            assert await hub.begin(position) == position
        foreign = page.position.split(".")
        foreign[0] = f"{int(foreign[0]) + 1:020}"
        for position in ("abc", "1.2.3", ".".join(foreign)):
            with pytest.raises(OptionInvalid, match="leave it out"):
                await hub.begin(position)
        with pytest.raises(OptionInvalid, match="a position the feed gave"):
            await ledger.feed(f"{1:020}.{10**20 - 1:020}.{0:010}", limit=1)
    finally:
        await ledger.close()


async def _submit(ledger: Ledger, job_id: str) -> None:
    await ledger.submit(Actor(role=Role.SUBMITTER, name="s"), [NewJob(job_id=JobId(job_id), type="index")])


# --- what readers can see ------------------------------------------------------------------------------------------


@pytest.mark.requirement("RUN-10", "D58")
async def test_an_event_of_a_run_waits_for_its_status_document_and_other_events_do_not_wait_for_it(stand: Stand):
    async with stand.listen() as everything, stand.listen("lifecycle=leased-job") as jobs_only:
        run_id = await stand.run_to_its_end(published=False)
        (job_id,) = await stand.jobs(1)
        assert (await jobs_only.until_events(1))[0]["jobId"] == job_id
        assert everything.heard.events == []
        assert (await stand.heard(ALL)).heard.events == []
        await stand.publish(run_id)
        told = await everything.until_events(6)
        async with stand.client() as client:
            shown = (await client.get(f"/runs/{run_id}/status")).json()
    assert [data.get("version") for data in told if data.get("runId") == run_id] == [1, 2, 3, 4, 5]
    assert (shown["version"], shown["status"]) == (5, "completed")
    assert told[-1]["jobId"] == job_id


@pytest.mark.requirement("RUN-10", "D58", "RUN-5")
async def test_stream_shows_run_events_after_publication_without_loss(stand: Stand):
    run_id = await stand.run_requested()
    await stand.ledger.move(ORCHESTRATOR, Move(job_id=run_id, target="queued", request_id=RequestId("1")))
    first = (await stand.heard(ALL)).heard
    assert [data["status"] for _, data in first.events] == ["requested"]
    await stand.publish(run_id)
    again = (await stand.heard(Last_Event_ID=first.last_id)).heard
    assert [data["status"] for _, data in again.events] == ["queued"]


@pytest.mark.requirement("D58")
async def test_a_run_that_the_projector_set_aside_is_passed_over_and_stops_nobody(stand: Stand):
    run_id = await stand.run_requested(published=False)
    async with stand.listen(ALL) as listener:
        (job_id,) = await stand.jobs(1)
        assert listener.heard.events == []
        await raise_alert(stand.objects, ProjectorAlert(job_id=run_id, version=1, key="agents/x/runs/y/status.json"))
        (told,) = await listener.until_events(1)
    assert told["jobId"] == job_id


# --- filters -------------------------------------------------------------------------------------------------------


async def test_filters_take_what_was_asked_for(stand: Stand):
    violin = await stand.run_to_its_end("archivist-violin")
    drum = await stand.run_to_its_end("archivist-drum")
    proposal = await stand.proposal_of(drum, "archivist-drum")
    one, _ = await stand.jobs(2)

    async def heard(query: str) -> set[str]:
        found = (await stand.heard(f"{ALL}&{query}")).heard.events
        return {data.get("runId") or data.get("proposalId") or data["type"] for _, data in found}

    assert await heard(f"run={violin}") == {violin}
    assert await heard(f"run={ids.short_form(drum)}") == {drum, proposal}
    assert await heard("agent=archivist-drum") == {drum, proposal}
    assert await heard("lifecycle=proposal") == {proposal}
    assert await heard("type=job.status.changed&type=proposal.created") == {proposal, "job.status.changed"}
    assert await heard(f"run={violin}&type=proposal.created") == set()
    assert [data["jobId"] for _, data in (await stand.heard(f"{ALL}&job={one}")).heard.events] == [one]
    assert (await heard(f"job={drum}"), await heard(f"job={proposal}")) == ({drum}, {proposal})
    assert await heard(f"job={drum}&agent=archivist-violin") == set()
    assert (await stand.heard(f"{ALL}&type=run.step.completed")).heard.types == ["run.step.completed"] * 2


async def test_an_agent_is_known_also_when_its_run_began_long_before(stand: Stand):
    run_id = await stand.run_requested()
    async with stand.listen("agent=archivist-violin") as listener:
        await stand.ledger.move(ORCHESTRATOR, Move(job_id=run_id, target="queued", request_id=RequestId("1")))
        await stand.publish(run_id)
        (told,) = await listener.until_events(1)
    assert told["agentSlug"] == "archivist-violin"


@pytest.mark.requirement("AUTH-2")
async def test_a_filter_for_a_job_of_another_gives_nothing(stand: Stand):
    (own,), (other,) = await stand.jobs(1, by="iryna"), await stand.jobs(1)
    for job_id, events in ((own, 1), (other, 0)):
        heard = (await stand.heard(f"{ALL}&job={job_id}", role=Role.SUBMITTER, name="iryna")).heard
        assert len(heard.events) == events


async def test_a_filter_that_means_nothing_is_refused(stand: Stand):
    for query in ("type=run.done", "lifecycle=walk", "lifecycle=run&type=proposal.created", "for_s=-1"):
        assert (await stand.heard(query)).status == 422, query


# --- authority -----------------------------------------------------------------------------------------------------


def grant(role: Role, lifecycle: str) -> Grant:
    return RULES[rule_of(lifecycle)].grants[role]


@pytest.mark.requirement("RUN-5", "AUTH-2")
async def test_every_role_gets_what_it_may_read_and_nothing_else(stand: Stand):
    run_id = await stand.run_to_its_end()
    await stand.proposal_of(run_id)
    await stand.jobs(1, by="somebody")
    (mine,) = await stand.jobs(1, by="mine", type_="other")
    await stand.claim_job("other")
    for role in Role:
        given = mine if role is Role.NLM_BACKEND else None
        answer = await stand.heard(ALL, role=role, name="mine", job_id=given)
        granted = {name: grant(role, name) for name in LIFECYCLES}
        if set(granted.values()) == {Grant.NO}:
            assert answer.status == 403, role
            continue
        found = answer.heard.events
        kinds = {data.get("lifecycle") or data["type"].partition(".")[0] for _, data in found}
        assert kinds == {name for name in ("run", "proposal", "leased-job") if granted[name] is not Grant.NO}, role
        jobs = [data["jobId"] for _, data in found if "jobId" in data]
        if granted["leased-job"] is Grant.OWN:
            assert jobs == [mine] * 3, role  # also what the worker did to it


@pytest.mark.requirement("ART-7", "AUTH-2")
async def test_stream_shows_an_artifact_when_final_to_those_who_may_read_it(stand: Stand):
    artifacts = ArtifactRegistry(ledger=stand.ledger, objects=stand.objects, cid=project_id("garden"), new_id=new_id)
    lease, given_up = [await call_nlm(stand.ledger, queue_job(new_id())) for _ in range(2)]
    ids_: list[JobId] = []
    for one in (lease, given_up):
        job = await stand.ledger.job(one.job_id)
        assert job is not None
        ids_.append((await artifacts.stage(BACKEND, draft(), job=job)).artifact_id)
    await artifacts.discard(BACKEND, ids_[1], cause="given up")
    assert await complete(stand.ledger, artifacts, lease, ids_[0])
    for role in Role:
        given = lease.job_id if role is Role.NLM_BACKEND else None
        heard = (await stand.heard(f"{ALL}&lifecycle=artifact", role=role, name="mine", job_id=given)).heard.events
        hears = grant(role, "artifact") is Grant.YES and RULES["events.read"].grants[role] is Grant.YES
        told = [(data["type"], data["artifactId"], data["status"]) for _, data in heard]
        assert told == ([("artifact.status.changed", ids_[0], "finalized")] if hears else []), role


def test_caller_that_may_read_any_lifecycle_may_open_a_stream():
    for role in Role:
        best = {grant(role, name) for name in LIFECYCLES if name != "artifact"}  # who reads those alone asks for them
        expected = next(found for found in (Grant.YES, Grant.OWN, Grant.NO) if found in best)
        assert RULES["events.read"].grants[role] is expected, role


async def test_event_stream_shows_an_own_job_that_was_submitted_long_before(stand: Stand):
    (mine,) = await stand.jobs(1, by="mine")
    async with stand.listen(role=Role.SUBMITTER, name="mine") as listener:
        await stand.claim_job()
        told = await listener.until_events(2)
    assert [data["jobId"] for data in told] == [mine, mine]


@pytest.mark.requirement("AUTH-3")
async def test_a_token_for_one_job_streams_events_of_that_job_alone(stand: Stand):
    first, second = await stand.jobs(2, by="mine")
    for role in (Role.SUBMITTER, Role.NLM_BACKEND):
        found = (await stand.heard(ALL, role=role, name="mine", job_id=second)).heard.events
        assert [data["jobId"] for _, data in found] == [second]
    assert (await stand.heard(ALL, role=Role.NLM_BACKEND, name="mine")).heard.events == []
    assert len((await stand.heard(ALL, role=Role.SUBMITTER, name="mine")).heard.events) == len({first, second})


async def test_asking_for_a_kind_one_may_not_read_is_refused_with_the_rule(stand: Stand):
    answer = await stand.heard("lifecycle=run", role=Role.WORKER)
    assert answer.status == 403
    assert b"runs.read" in answer.body


@pytest.mark.requirement("AUTH-5")
async def test_a_stream_without_a_token_is_refused(stand: Stand):
    async with stand.client(None) as client:
        assert (await client.get("/events/stream")).status_code == 401
        assert (await client.post("/events/tickets")).status_code == 401


# --- the description and the pace ----------------------------------------------------------------------------------


async def test_the_description_says_how_a_stream_reads(stand: Stand):
    paths = description()["paths"]
    answer = paths["/events/stream"]["get"]["responses"]["200"]["content"]["text/event-stream"]
    assert set(answer["x-event-data"]["properties"]["type"]["enum"]) == set().union(*map(types_of, LIFECYCLES))
    assert "id: " in answer["example"]
    names = {one["name"] for one in paths["/events/stream"]["get"]["parameters"]}
    assert names >= {"run", "agent", "type", "lifecycle", "last-event-id", "last_event_id", "ticket", "for_s"}


async def test_event_stream_reads_on_at_once_while_more_events_follow(stand: Stand):
    hub = stand.hub
    assert hub.pause_s(500) == 0
    assert 0 < hub.pause_s(1) <= PAUSE_S
    assert 0 < hub.pause_s(0) <= PAUSE_S


class ClockWithoutPolls(SystemClock):
    """The system's clock, but nothing that sleeps longer than the pause between two reads ever wakes."""

    async def sleep(self, seconds: float) -> None:
        if seconds > PAUSE_S:
            await asyncio.Event().wait()
        await super().sleep(seconds)


@dataclass
class WaitingReader:
    """A stream that notes what the hub writes to it; without `takes`, its task has to send everything."""

    position: str
    takes: bool = True
    view: StreamView = EVERYTHING
    written: "asyncio.Queue[EventBatch]" = field(default_factory=asyncio.Queue[EventBatch])

    def write(self, batch: EventBatch) -> bool:
        if self.takes:
            self.written.put_nowait(batch)
            self.position = batch.position
        return self.takes


async def test_events_are_written_to_waiting_streams_without_their_tasks(stand: Stand):
    hub = EventHub(ledger=stand.ledger, published=stand.hub.published, clock=stand.hub.clock, rng=random.Random(1))
    with hub.joined("me") as listener, hub.joined("me") as other:
        async with asyncio.timeout(PATIENCE_S):
            await listener.woken()  # the hub knows where the feed ends
            begins = await stand.ledger.feed_end()
            reader, busy = WaitingReader(begins), WaitingReader(begins, takes=False)
            waiting = asyncio.create_task(hub.wait(listener, reader, math.inf))
            sending = asyncio.create_task(hub.wait(other, busy, math.inf))
            for number in range(2):
                await _submit(stand.ledger, f"written-{number}")
                batch = await reader.written.get()
                assert f"written-{number}".encode() in batch.body
                assert batch.position == reader.position
            await sending
            assert not waiting.done()
            assert busy.position == begins
            listener.wake()
            await waiting
            assert listener.waiting is None
    await hub.close()


async def _an_event_that_waits_for_its_document(stand: Stand) -> None:
    await stand.run_requested(published=False)


async def _more_events_than_one_batch_holds(stand: Stand) -> None:
    await stand.jobs(READ_MAX + 1)


async def _three_events(stand: Stand) -> None:
    await stand.jobs(3)


ONLY_ITS_OWN = StreamView(
    filter=StreamFilter(),
    whole=frozenset(),
    own=frozenset({"leased-job"}),
    principal=Principal(name="submitter@test", roles=frozenset({Role.SUBMITTER})),
)


@pytest.mark.requirement("RUN-5")
@pytest.mark.parametrize(
    "happens, view, ring",
    [
        pytest.param(_an_event_that_waits_for_its_document, EVERYTHING, 10_000, id="held"),
        pytest.param(_more_events_than_one_batch_holds, EVERYTHING, 10_000, id="more-follow"),
        pytest.param(_three_events, EVERYTHING, 1, id="below-the-floor"),
        pytest.param(_three_events, ONLY_ITS_OWN, 10_000, id="own-jobs"),
    ],
)
async def test_hub_wakes_the_task_of_a_stream_whose_next_events_may_have_to_wait(
    stand: Stand,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Stand], Awaitable[None]],
    view: StreamView,
    ring: int,
):
    clock = ClockWithoutPolls()
    published = PublishedVersions(objects=stand.objects, clock=clock)
    options = StreamOptions(ring=ring)
    hub = EventHub(ledger=stand.ledger, published=published, clock=clock, rng=random.Random(1), options=options)
    limits, read_feed = set[int](), stand.ledger.feed

    async def feed(after: str | None, *, limit: int, **others: Any) -> FeedPage:
        limits.add(limit)
        return await read_feed(after, limit=limit, **others)

    monkeypatch.setattr(stand.ledger, "feed", feed)
    with hub.joined("me") as listener:
        async with asyncio.timeout(PATIENCE_S):
            await listener.woken()  # the hub knows where the feed ends
            reader = WaitingReader(await stand.ledger.feed_end(), view=view)
            waiting = asyncio.create_task(hub.wait(listener, reader, math.inf))
            written = asyncio.create_task(reader.written.get())
            await asyncio.sleep(0)
            await happens(stand)
            first, _ = await asyncio.wait({waiting, written}, return_when=asyncio.FIRST_COMPLETED)
    assert first == {waiting}
    assert written.cancel()
    assert limits == {PAGE}, "the hub read the ledger for one listener, and the others waited"
    await hub.close()


async def test_a_hint_of_events_wakes_the_listeners_of_the_stream_without_a_poll(stand: Stand):
    clock = ClockWithoutPolls()
    published = PublishedVersions(objects=stand.objects, clock=clock)
    hub = EventHub(ledger=stand.ledger, published=published, clock=clock, rng=random.Random(1))
    with hub.joined("me") as listener:
        async with asyncio.timeout(PATIENCE_S):
            await listener.woken()  # the hub knows where the feed ends
            for number in range(3):
                position = await stand.ledger.feed_end()
                await _submit(stand.ledger, f"hinted-{number}")
                await hub.wait(listener, WaitingReader(position, takes=False), wake_at=math.inf)
    await hub.close()


async def test_feed_is_not_read_without_listeners_of_the_event_stream(stand: Stand):
    async with stand.listen() as listener:
        await stand.jobs(1)
        await listener.until_events(1)
        assert stand.hub.listeners == 1
    assert stand.hub.listeners == 0
    await asyncio.gather(*stand.hub._tasks)
    assert not stand.hub._tasks
    (late,) = await stand.jobs(1)
    assert [data["jobId"] for _, data in (await stand.heard(ALL)).heard.events][-1] == late
