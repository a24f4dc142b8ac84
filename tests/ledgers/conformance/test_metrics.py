"""What a process counts of its calls to the ledger, the same on every implementation."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.ledgers.conformance.rig import ADMIN, LENGTH_S, WORKER, Rig
from trellis.engine.errors import TrellisError
from trellis.engine.jobs import CancelMode, DeadLetterReason, JobId, ReasonCode, Stage
from trellis.engine.metrics import (
    DLQ_COUNT,
    HELD,
    HELD_SECONDS,
    LEDGER_SECONDS,
    READY,
    SWEEP_AGE,
    Metric,
    process_metrics,
)
from trellis.engine.records import JobFilter
from trellis.lifecycles import Trigger
from trellis.operations.metrics import ledger_gauges

TIMED = {LEDGER_SECONDS, HELD_SECONDS}


@contextmanager
def counted() -> Iterator[dict[tuple[str, ...], float]]:
    """What was counted inside the block, by metric and labels; of durations only how many there were."""

    def now() -> dict[tuple[Metric, tuple[str, ...]], float]:
        return {
            (one.metric, one.labels): sum(one.counts) if one.metric in TIMED else one.value
            for one in process_metrics.samples()
        }

    before, changed = now(), dict[tuple[str, ...], float]()
    yield changed
    for (metric, labels), value in now().items():
        if value != before.get((metric, labels), 0) and metric is not LEDGER_SECONDS:
            changed[metric.name.removeprefix("trellis_"), *labels] = value - before.get((metric, labels), 0)


@pytest.mark.requirement("OBS-5")
async def test_claims_settles_retries_dead_letters_and_lost_leases_are_counted_by_type(rig: Rig):
    with counted() as counts:
        await rig.submit(5, type="metered")
        first, second, third, fourth = await rig.claim(4, types=("metered",))
        await rig.pull(first, Trigger.COMPLETE)
        await rig.pull(second, Trigger.RETRY, delay_s=60.0)
        reason = DeadLetterReason(reason_code=ReasonCode.VALIDATION_FAILED, stage=Stage.INPUT, last_error="no")
        await rig.pull(third, "reject", death=reason)
        await rig.ledger.renew(WORKER, [fourth.lease, first.lease])
        await rig.pass_time(LENGTH_S + 1)
        await rig.pull(fourth, Trigger.COMPLETE)
    assert {key: value for key, value in counts.items() if key[0] not in {"swept", "service_passes"}} == {
        ("jobs_submitted", "metered"): 5,
        ("claims", "metered"): 4,
        ("jobs_settled", "metered", "complete"): 1,
        ("jobs_settled", "metered", "retry"): 1,
        ("jobs_settled", "metered", "reject"): 1,
        ("retries", "metered"): 1,
        ("failures", "metered"): 1,
        ("dead_letters", "metered", "validation_failed"): 1,
        ("job_duration_seconds", "metered"): 3,
        ("lease_renewals",): 1,
        ("lease_renewals_refused",): 1,
        ("lease_expiries",): 1,
        ("claim_conflicts",): 1,
    }


@pytest.mark.requirement("OBS-5")
async def test_a_repeated_submit_is_no_new_job_and_a_refused_call_is_counted_by_its_code(rig: Rig):
    with counted() as counts:
        for _ in range(2):
            await rig.offer(rig.new_job(type="metered-twice", idempotency_key="once", fingerprint=b"same"))
        with pytest.raises(TrellisError):
            await rig.move(JobId("nobody"), "succeeded", by=WORKER)
    assert counts == {("jobs_submitted", "metered-twice"): 1, ("ledger_errors", "move", "NOT_FOUND"): 1}


async def test_a_job_that_stops_because_somebody_cancelled_it_is_no_failure(rig: Rig):
    held = await rig.running(type="stopped")
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    with counted() as counts:
        await rig.pull(held, "stop")
    assert await rig.state(held.lease.job_id) == "cancelled"
    assert counts == {("jobs_settled", "stopped", "stop"): 1, ("job_duration_seconds", "stopped"): 1}


async def test_metrics_that_are_switched_off_count_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_metrics, "enabled", False)
    with counted() as counts:
        held = await rig.running(type="unmetered")
        await rig.pull(held, Trigger.COMPLETE)
    assert counts == {}


@pytest.mark.requirement("OBS-5")
async def test_no_label_has_the_address_that_is_in_the_type_of_an_nlm_job(rig: Rig):
    types = ("nlm:http:127.0.0.1:8420", "nlm:https:garden.example")
    with counted() as counts:
        for type_ in types:
            await rig.submit(2, type=type_, lifecycle="nlm-job")
        await rig.claim(1, types=types, lifecycle="nlm-job")
    gauges = [one for one in await ledger_gauges(rig.ledger) if "nlm-job" in one.labels]
    assert {key[1] for key in counts if len(key) > 1 and key[0] in {"jobs_submitted", "claims"}} == {"nlm"}
    assert {one.labels for one in gauges} == {("nlm", "nlm-job")}
    assert {one.metric: one.value for one in gauges if one.metric in {READY, HELD}} == {READY: 3, HELD: 1}


@pytest.mark.requirement("OBS-5")
async def test_dead_letters_are_counted_by_type_also_those_that_the_sweep_made(rig: Rig):
    assert (await rig.ledger.figures()).dead_letters == ()
    reason = DeadLetterReason(reason_code=ReasonCode.VALIDATION_FAILED, stage=Stage.INPUT, last_error="no")
    for _ in range(2):
        await rig.pull(await rig.running(type="metered"), "reject", death=reason)
    await rig.submit_one(type="late", deadline_s=5.0)
    await rig.pass_time(6.0)

    async def gauges() -> dict[tuple[str, ...], float]:
        return {(one.metric.name, *one.labels): one.value for one in await ledger_gauges(rig.ledger)}

    counted, by_type = await gauges(), ("trellis_dlq_count", "metered", "leased-job")
    assert (counted[by_type], counted["trellis_dlq_count", "late", "leased-job"]) == (2, 1)
    letter = (await rig.ledger.dead_letters(JobFilter(type="metered"), limit=1))[0]
    await rig.ledger.requeue(ADMIN, [letter.job_id], rig.request(), limit=1, cause=None)
    assert (await gauges())[by_type] == 1


@pytest.mark.requirement("OBS-5")
async def test_job_types_beyond_the_limit_share_one_label(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.operations.metrics.LABEL_SETS_MAX", 2)
    reason = DeadLetterReason(reason_code=ReasonCode.VALIDATION_FAILED, stage=Stage.INPUT, last_error="no")
    for number in range(4):
        await rig.submit_one(type=f"users-{number}")
        await rig.pull(await rig.running(type=f"dead-{number}"), "reject", death=reason)
    gauges = await ledger_gauges(rig.ledger)
    for metric in (READY, DLQ_COUNT):
        found = {one.labels: one.value for one in gauges if one.metric is metric}
        assert (len(found), "leased-job" in str(found)) == (3, True)
        assert sum(found.values()) == 4
        assert ("other", "leased-job") in found
    letters = {one.labels: one.value for one in gauges if one.metric is DLQ_COUNT}
    assert letters["other", "leased-job"] == 2


async def test_the_age_of_the_last_sweep_is_shown(rig: Rig):
    await rig.sweep()
    await rig.advance(90.0)
    ages = [one.value for one in await ledger_gauges(rig.ledger) if one.metric is SWEEP_AGE]
    assert ages == [pytest.approx(90.0, abs=1.0)]


async def test_calls_that_use_a_connection_or_wait_for_one_are_shown_while_they_do(rig: Rig):
    def waiting() -> int:
        return sum(one.calls for one in rig.ledger.connections())

    assert (len({one.name for one in rig.ledger.connections()}) > 0, waiting()) == (True, 0)
    calls = [asyncio.ensure_future(rig.ledger.now() if n % 2 else rig.ledger.workers()) for n in range(6)]
    await asyncio.sleep(0)
    assert waiting() >= 3
    await asyncio.gather(*calls)
    assert waiting() == 0
