"""What a holder leaves behind while it works: checkpoints, journal entries, signals, results."""

import asyncio

import pytest

from tests.ledgers.conformance.rig import ADMIN, OTHER_WORKER, Rig
from trellis.engine.jobs import JobId, LeaseLost, StepApplied
from trellis.engine.records import RetentionOptions
from trellis.lifecycles import Trigger


@pytest.mark.requirement("DJ-21")
@pytest.mark.oldest_server
async def test_the_last_checkpoint_reaches_the_next_holder(rig: Rig):
    held = await rig.running()
    assert isinstance(await rig.ledger.save_checkpoint(held.lease, b'{"page": 1}'), StepApplied)
    assert isinstance(await rig.ledger.save_checkpoint(held.lease, b'{"page": 2}'), StepApplied)
    await rig.lose_lease()
    again = await rig.claim_one(by=OTHER_WORKER)
    assert (again.checkpoint, again.attempt) == (b'{"page": 2}', 1)
    await rig.pull(again, Trigger.RETRY, by=OTHER_WORKER)
    assert (await rig.claim_one()).checkpoint == b'{"page": 2}'


@pytest.mark.requirement("D5")
async def test_a_checkpoint_is_no_transition(rig: Rig):
    held = await rig.running()
    await rig.ledger.save_checkpoint(held.lease, b"1")
    assert (await rig.job(held.lease.job_id)).version == 3


async def test_a_repeated_claim_brings_the_checkpoint_too(rig: Rig):
    await rig.submit_one()
    held = await rig.claim_one(claim_id="mine")
    await rig.ledger.save_checkpoint(held.lease, b"1")
    assert (await rig.claim_one(claim_id="mine")).checkpoint == b"1"


async def test_the_first_journal_entry_stays(rig: Rig):
    held = await rig.running()
    assert await rig.ledger.journal(held.lease, "charge", b'"first"') == b'"first"'
    assert await rig.ledger.journal(held.lease, "charge", b'"second"') == b'"first"'
    assert await rig.ledger.journal(held.lease, "mail", b'"sent"') == b'"sent"'
    assert await rig.ledger.read_journal(held.lease.job_id) == {"charge": b'"first"', "mail": b'"sent"'}
    wanted = [(held.lease.job_id, "mail"), (held.lease.job_id, "no such entry"), (JobId("nobody"), "charge")]
    assert await rig.ledger.journal_entries(wanted) == {wanted[0]: b'"sent"'}
    assert await rig.ledger.journal_entries([]) == {}


@pytest.mark.requirement("DJ-21")
async def test_journal_entries_survive_to_later_attempts_and_generations(rig: Rig):
    held = await rig.running()
    await rig.ledger.journal(held.lease, "charge", b'"first"')
    await rig.pull(held, Trigger.RETRY)
    again = await rig.claim_one(by=OTHER_WORKER)
    assert await rig.ledger.journal(again.lease, "charge", b'"second"') == b'"first"'
    await rig.pull(again, Trigger.FAIL, by=OTHER_WORKER)
    await rig.ledger.requeue(ADMIN, [held.lease.job_id], rig.request(), limit=1, cause=None)
    third = await rig.claim_one()
    assert await rig.ledger.journal(third.lease, "charge", b'"third"') == b'"first"'


async def test_journal_entries_at_the_same_time_keep_one(rig: Rig):
    another = await rig.open_another()
    held = await rig.running()
    answers = await asyncio.gather(
        *((rig.ledger if i % 2 else another).journal(held.lease, "once", b"%d" % i) for i in range(12))
    )
    assert len(set(map(str, answers))) == 1
    assert await rig.ledger.read_journal(held.lease.job_id) == {"once": answers[0]}


async def test_a_job_without_a_journal_has_an_empty_one(rig: Rig):
    assert await rig.ledger.read_journal(await rig.submit_one()) == {}
    assert await rig.ledger.read_journal(JobId("nobody")) == {}


@pytest.mark.requirement("D5")
async def test_signals_are_kept_apart_from_events(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    await rig.ledger.signal(held.lease, [("job_heartbeat", b'{"done": 1}'), ("job_log", b'"hello"')])
    await rig.ledger.signal(held.lease, [("job_heartbeat", b'{"done": 2}')])
    signals = await rig.ledger.signals(job_id, limit=10)
    assert [(signal.type, signal.data) for signal in signals] == [
        ("job_heartbeat", b'{"done": 1}'),
        ("job_log", b'"hello"'),
        ("job_heartbeat", b'{"done": 2}'),
    ]
    assert {signal.job_id for signal in signals} == {job_id}
    assert len(await rig.ledger.events(job_id)) == 3
    feed = await rig.ledger.feed(None, limit=100)
    assert {event.type for event in feed.events} == {"job_queued", "job_claimed", "job_started"}


async def test_a_listing_of_signals_keeps_the_last(rig: Rig):
    held = await rig.running()
    await rig.ledger.signal(held.lease, [("job_log", b"%d" % i) for i in range(20)])
    signals = await rig.ledger.signals(held.lease.job_id, limit=3)
    assert [signal.data for signal in signals] == [b"17", b"18", b"19"]


async def test_progress_of_a_heartbeat_shows_on_the_job(rig: Rig):
    held = await rig.running()
    await rig.ledger.signal(held.lease, [("job_heartbeat", b'{"done": 3}')])
    assert (await rig.job(held.lease.job_id)).progress == b'{"done": 3}'


@pytest.mark.requirement("DJ-13", "D5")
async def test_signals_end_with_their_time_to_live(rig: Rig):
    held = await rig.running()
    await rig.ledger.signal(held.lease, [("job_log", b"1")])
    await rig.advance(10.0)
    await rig.ledger.signal(held.lease, [("job_log", b"2")])
    report = await rig.ledger.retain(RetentionOptions(signals_s=5.0))
    assert report.signals == 1
    assert [signal.data for signal in await rig.ledger.signals(held.lease.job_id, limit=5)] == [b"2"]


async def test_a_result_has_a_time_to_live_of_its_own(rig: Rig):
    short, long = await rig.running(), await rig.running()
    await rig.pull(short, Trigger.COMPLETE, result=b"1", result_ttl_s=60.0)
    await rig.pull(long, Trigger.COMPLETE, result=b"2")
    await rig.advance(61.0)
    assert (await rig.ledger.retain(RetentionOptions())).results == 1
    assert await rig.ledger.result(short.lease.job_id) is None
    assert await rig.ledger.result(long.lease.job_id) == b"2"
    assert await rig.state(short.lease.job_id) == "succeeded"


async def test_job_has_no_result_before_its_end(rig: Rig):
    held = await rig.running()
    assert await rig.ledger.result(held.lease.job_id) is None
    assert await rig.ledger.result(JobId("nobody")) is None


@pytest.mark.requirement("DJ-7")
async def test_checkpoint_and_journal_are_refused_after_the_end_of_the_job(rig: Rig):
    held = await rig.running()
    await rig.pull(held, Trigger.COMPLETE)
    assert await rig.ledger.save_checkpoint(held.lease, b"1") == LeaseLost(held.lease)
    assert await rig.ledger.signal(held.lease, [("job_log", b"1")]) == LeaseLost(held.lease)
    assert await rig.ledger.journal(held.lease, "late", b"1") == LeaseLost(held.lease)


@pytest.mark.requirement("DJ-7", "DJ-21")
async def test_checkpoint_and_journal_are_refused_once_another_holds_the_job(rig: Rig):
    held = await rig.running()
    await rig.pull(held, Trigger.RELEASE, spare_attempt=True)
    await rig.claim_one(by=OTHER_WORKER)
    assert await rig.ledger.save_checkpoint(held.lease, b"1") == LeaseLost(held.lease)
    assert await rig.ledger.signal(held.lease, [("job_log", b"1")]) == LeaseLost(held.lease)
    assert await rig.ledger.journal(held.lease, "late", b"1") == LeaseLost(held.lease)


async def test_a_checkpoint_of_a_mebibyte_is_read_back_unchanged(rig: Rig):
    held = await rig.running()
    body = b'"' + b"y" * (1024 * 1024 - 2) + b'"'
    await rig.ledger.save_checkpoint(held.lease, body)
    await rig.pull(held, Trigger.RELEASE, spare_attempt=True)
    assert (await rig.claim_one()).checkpoint == body
