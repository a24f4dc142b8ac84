"""What `Instance.serve` joins: events begin runs, and TRELLIS_RUNS limits the runs of all processes together."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.agents.files import agent_file
from trellis.app.instance import Instance, open_instance
from trellis.app.settings import read_settings
from trellis.app.wiring import SystemClock
from trellis.documents.run_documents import RunRequest
from trellis.engine.jobs import CancelMode, Claim, ClaimId, JobId, NewJob, RequestId, Turn, TypeClaim
from trellis.engine.records import Job, JobFilter
from trellis.lifecycles import Role
from trellis.runs.event_triggers import SUBSCRIBER_NAME
from trellis.runs.orchestration import TriggerKind
from trellis.runs.orchestrator import TYPE

PATIENCE_S = 20.0
LOOK_AGAIN_S = 0.02
AGENTS = ("first-listener", "second-listener")


@pytest.fixture
async def instance(tmp_path: Path) -> AsyncIterator[Instance]:
    settings = read_settings({"TRELLIS_RUNS": "1"}, tmp_path)
    async with open_instance(settings, f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        for slug in AGENTS:
            await opened.objects.put(
                f"agents/{slug}/_agent.md",
                agent_file(slug=slug, triggers="{manual: true, events: [inbox.item.created]}"),
            )
        yield opened


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    clock = SystemClock()
    end = clock.monotonic() + PATIENCE_S
    while not await holds():
        assert clock.monotonic() < end, holds.__name__
        await clock.sleep(LOOK_AGAIN_S)


async def runs(instance: Instance) -> tuple[Job, ...]:
    return (await instance.ledger.jobs(JobFilter(lifecycle="run"), limit=10)).jobs


@pytest.mark.requirement("RUN-9", "D24")
async def test_an_event_begins_a_run_in_a_served_instance(instance: Instance):
    async def listens() -> bool:
        return any(one.name == SUBSCRIBER_NAME and one.waits for one in await instance.ledger.followers())

    async def all_began() -> bool:
        return len(await runs(instance)) == len(AGENTS)

    stop = asyncio.Event()
    served = asyncio.ensure_future(instance.serve(stop, frozenset({"schedules"})))
    try:
        await until(listens)
        entry = b'{"source": {"type": "webhook"}, "intent": {"action": "job", "target": "x"}, "refusal": null}'
        new = NewJob(job_id=JobId("entry"), type="inbox-entry", lifecycle="inbox-entry", payload=entry)
        await instance.ledger.submit(instance.actor(Role.GATEWAY), [new])
        await until(all_began)
    finally:
        stop.set()
        await served
    payloads = await instance.ledger.payloads([run.job_id for run in await runs(instance)])
    requests = [RunRequest.read(payload) for payload in payloads.values()]
    assert sorted((one.agent_slug, one.trigger) for one in requests) == [(slug, "event") for slug in AGENTS]


@pytest.mark.requirement("RUN-9", "D71")
async def test_the_end_of_a_job_and_a_changed_source_begin_runs_in_a_served_instance(instance: Instance):
    for slug, event in (("clerk", "job.ended:import"), ("librarian", "source.changed")):
        await instance.objects.put(
            f"agents/{slug}/_agent.md", agent_file(slug=slug, triggers=f"{{events: ['{event}']}}")
        )
    (watcher,) = [one for one in instance.services_of(frozenset({"schedules"})) if one.name == "source-changes"]
    await watcher.run_once()
    await instance.objects.put("agents/librarian/sources/a.md", b"new")

    async def listens() -> bool:
        return any(one.name == SUBSCRIBER_NAME and one.waits for one in await instance.ledger.followers())

    async def both_began() -> bool:
        return len(await runs(instance)) == 2

    stop = asyncio.Event()
    served = asyncio.ensure_future(instance.serve(stop, frozenset({"schedules"})))
    try:
        await until(listens)
        submitter, job_id = instance.actor(Role.SUBMITTER), JobId("one-import")
        await instance.ledger.submit(submitter, [NewJob(job_id=job_id, type="import")])
        await instance.ledger.cancel(submitter, job_id, CancelMode.HARD, RequestId("enough"), grace_s=1.0, cause=None)
        await until(both_began)
    finally:
        stop.set()
        await served
    payloads = await instance.ledger.payloads([run.job_id for run in await runs(instance)])
    requests = [RunRequest.read(payload) for payload in payloads.values()]
    begun = sorted((one.agent_slug, one.params["event"]) for one in requests)
    assert begun == [("clerk", "job.ended"), ("librarian", "source.changed")]


@pytest.mark.requirement("D25", "PIPE-3")
async def test_the_setting_of_runs_limits_the_runs_of_all_processes_together(instance: Instance):
    ended = asyncio.Event()
    ended.set()
    await instance.serve(ended, frozenset({"orchestrator"}))
    for slug in AGENTS:
        await instance.layer.trigger(slug, {}, kind=TriggerKind.MANUAL)
    assert [run.state for run in await runs(instance)] == ["queued", "queued"]
    held = []
    for process in ("one", "two"):
        claim = Claim(claim_id=ClaimId(process), types=(TypeClaim(type=TYPE),), start=2, lifecycle="run")
        turn = Turn(actor=instance.actor(Role.ORCHESTRATOR), claim=claim)
        held.extend((await instance.ledger.turn(turn)).claimed)
    assert len(held) == 1
