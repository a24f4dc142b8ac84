"""Every declared transition of a queue job is reached through the gateway, by its writer and with its event; no other one happens."""

from dataclasses import replace

import pytest

from tests.research.holding import CALL, CONTEXT, STAGES, NoMemory, held_in, wrong_hash
from tests.research.rig import OTHER, Rig, failing, saying, seconds_to_due
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.research.errors import RateLimited


@pytest.mark.requirement("JQ-2", "JQ-6", "JQ-9", "D8", "D19")
async def test_every_declared_transition_is_reached_over_http_and_no_other(rig: Rig):
    seen: set[tuple[str | None, str, str, str]] = set()
    for scenario in (
        _succeeds,
        _fails_in_each_stage,
        _dies_and_is_requeued,
        _is_lost,
        _is_too_late,
        _is_cancelled,
        _is_discarded,
    ):
        for job_id in await scenario(rig):
            for event in await rig.recorded(job_id):
                seen.add((event.source, event.target, event.type, event.role.value))
    declared = {(one.source, one.target, one.event, role.value) for one in QUEUE_JOB.transitions for role in one.actors}
    assert seen <= declared, sorted(map(str, seen - declared))
    reached = {one[:3] for one in seen}
    assert reached == {(one.source, one.target, one.event) for one in QUEUE_JOB.transitions}


async def _succeeds(rig: Rig) -> list[str]:
    job_id = await rig.submit()
    await rig.work(job_id, "COMPLETE")
    assert await rig.path(job_id) == ["PENDING", "QUEUED", *STAGES, "COMPLETE"]
    return [job_id]


async def _fails_in_each_stage(rig: Rig) -> list[str]:
    driver, made = rig.orchestrator.driver, list[str]()
    assembly = driver.assembly
    for stage in STAGES:
        job_id = await rig.submit()
        driver.assembly = replace(assembly, memory=NoMemory()) if stage == CONTEXT else assembly
        rig.nlm.answer = failing(RateLimited(detail="429")) if stage == CALL else wrong_hash
        await rig.work(job_id, "RETRY_BACKOFF")
        assert (await rig.events(job_id))[-1]["payload"]["from"] == stage
        rig.nlm.answer, driver.assembly = None, assembly
        await rig.pass_time(15.0)
        await rig.work(job_id, "COMPLETE")
        made.append(job_id)
    return made


async def _dies_and_is_requeued(rig: Rig) -> list[str]:
    failed, dead = await rig.submit(), await rig.submit(agent_slug=OTHER)
    rig.nlm.answer = saying("VALIDATION_ERROR")
    await rig.work(failed, "FAILED")
    await rig.work(dead, "FAILED")
    assert (await rig.requeue(failed)).json()["status"] == "QUEUED"
    rig.nlm.answer = None
    await rig.work(failed, "COMPLETE")
    await rig.leap(900.0)
    assert await rig.status(dead) == "DEAD"
    assert (await rig.requeue(dead)).json()["status"] == "QUEUED"
    await rig.work(dead, "COMPLETE")
    return [failed, dead]


async def _is_discarded(rig: Rig) -> list[str]:
    rig.nlm.answer = saying("VALIDATION_ERROR")
    dead = await rig.submit(agent_slug=OTHER)
    await rig.work(dead, "FAILED")
    await rig.leap(900.0)
    failed = await rig.submit()
    await rig.work(failed, "FAILED")
    discarded = await rig.admin.post("/jobs/discard", json={"job_ids": [failed, dead], "reason": "not needed"})
    assert discarded.json()["changed"] == 2, discarded.text
    assert (await rig.requeue(dead)).json()["status"] == "QUEUED"
    rig.nlm.answer = None
    await rig.work(dead, "COMPLETE")
    return [failed, dead]


async def _is_lost(rig: Rig) -> list[str]:
    made: list[str] = []
    for stage in STAGES:
        job_id = await rig.submit()
        async with held_in(rig, job_id, stage):
            rig.orchestrator.claiming = False
            await rig.lose_leases()
            job = await rig.job(job_id)
            assert (job["status"], job["attempt"]) == ("QUEUED", 1), "a lost lease waits for nothing"
        rig.orchestrator.claiming = True
        await rig.work(job_id, "COMPLETE")
        made.append(job_id)
    return made


async def _is_too_late(rig: Rig) -> list[str]:
    made: list[str] = []
    for stage in STAGES:
        job_id = await rig.submit(deadline_s=10.0)
        async with held_in(rig, job_id, stage):
            await rig.leap(10.0)
            job = await rig.job(job_id)
            assert (job["status"], job["attempt"]) == ("FAILED", 0), "no other attempt after the deadline"
            assert job["error"] == "DEADLINE_PASSED: the job's deadline is over"
            await rig.orchestrator.renew()
        made.append(job_id)
    return made


async def _is_cancelled(rig: Rig) -> list[str]:
    pending, queued, backing_off = await rig.submit(), await rig.submit(), await rig.submit(agent_slug=OTHER)
    assert (await rig.cancel(pending)).json()["status"] == "FAILED"
    rig.nlm.answer = failing(RateLimited(detail="429"))
    rig.orchestrator.claiming = False
    await rig.work(queued, "QUEUED")
    assert (await rig.cancel(queued)).json()["status"] == "FAILED"
    rig.orchestrator.claiming = True
    assert seconds_to_due(await rig.work(backing_off, "RETRY_BACKOFF")) == 15.0
    assert (await rig.cancel(backing_off)).json()["status"] == "FAILED"
    made = [pending, queued, backing_off]
    for stage in STAGES:
        job_id = await rig.submit()
        async with held_in(rig, job_id, stage):
            answer = await rig.cancel(job_id, reason="not needed")
            assert answer.json()["status"] == "FAILED", answer.text
            await rig.orchestrator.renew()
        made.append(job_id)
        assert (await rig.job(job_id))["error"] == "CANCELLED: not needed"
    await rig.leap(100_000.0)
    assert {await rig.status(job_id) for job_id in made} == {"FAILED"}, "what was cancelled rests there"
    return made
