"""The suite must be able to fail: a ledger with one safety property taken out is caught by the test of that property.

Each mutant wraps a real ledger and gives back what the broken one would. The test it names is run on it as it stands.
"""

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.ledgers.conformance import (
    test_advance,
    test_cancel,
    test_claim,
    test_feed,
    test_fence,
    test_keys,
    test_progress,
    test_renew,
    test_requeue,
    test_retention,
    test_submit,
    test_sweep,
)
from tests.ledgers.conformance.opening import sqlite_rig
from tests.ledgers.conformance.rig import Rig
from trellis.engine.jobs import Actor, ClaimId, Epoch, Lease, LeaseLost, NewJob, Renewed, RequestId, StepApplied, Turn
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, FeedPage, JobHistory, RetentionOptions, SweepOptions


class Mutant:
    """Everything as the real ledger does it, but for what a subclass breaks."""

    def __init__(self, real: Ledger) -> None:
        self.real = real
        self.url = real.url

    def __getattr__(self, name: str):
        return getattr(self.real, name)

    async def current(self, lease: Lease) -> Lease:
        job = await self.real.job(lease.job_id)
        assert job is not None
        return lease._replace(epoch=job.epoch)


class NoFenceOnSteps(Mutant):
    """Steps are made with whatever epoch the job has now."""

    async def turn(self, turn: Turn):
        steps = [step._replace(lease=await self.current(step.lease)) for step in turn.advances]
        return await self.real.turn(dataclasses.replace(turn, advances=tuple(steps)))


class NoFenceOnCheckpoints(Mutant):
    async def save_checkpoint(self, lease: Lease, body: bytes):
        return await self.real.save_checkpoint(await self.current(lease), body)


class NoFenceOnJournal(Mutant):
    async def journal(self, lease: Lease, entry: str, body: bytes):
        return await self.real.journal(await self.current(lease), entry, body)


class NoFenceOnSignals(Mutant):
    async def signal(self, lease: Lease, signals):
        return await self.real.signal(await self.current(lease), signals)


class NoFenceOnRenewal(Mutant):
    async def renew(self, actor, leases):
        return await self.real.renew(actor, [await self.current(lease) for lease in leases])


class SilentLoss(Mutant):
    """A refused step is answered as if it had been made."""

    async def turn(self, turn: Turn):
        result = await self.real.turn(turn)
        outcomes = [StepApplied(version=1) if isinstance(one, LeaseLost) else one for one in result.outcomes]
        return dataclasses.replace(result, outcomes=outcomes)


class ForgetsClaims(Mutant):
    """A repeated claim id is a new claim."""

    async def turn(self, turn: Turn):
        if turn.claim is not None:
            number = getattr(self, "number", 0) + 1
            self.number = number
            claim = dataclasses.replace(turn.claim, claim_id=ClaimId(f"{turn.claim.claim_id}-{number}"))
            turn = dataclasses.replace(turn, claim=claim)
        return await self.real.turn(turn)


class ForgetsKeys(Mutant):
    """Idempotency keys are not looked at."""

    async def submit(self, actor, jobs, **options):
        return await self.real.submit(
            actor, [dataclasses.replace(job, idempotency_key=None) for job in jobs], **options
        )


class IgnoresFingerprints(Mutant):
    async def submit(self, actor, jobs, **options):
        return await self.real.submit(actor, [dataclasses.replace(job, fingerprint=b"") for job in jobs], **options)


class IgnoresConcurrencyKeys(Mutant):
    async def submit(self, actor, jobs: list[NewJob], **options):
        return await self.real.submit(
            actor, [dataclasses.replace(job, concurrency_key=None) for job in jobs], **options
        )


class NeverElects(Mutant):
    """Every sweeper acts, whoever else did."""

    async def sweep(self, actor, options: SweepOptions):
        return await self.real.sweep(actor, dataclasses.replace(options, elect=False))


class HidesCancels(Mutant):
    async def renew(self, actor, leases):
        answers = await self.real.renew(actor, leases)
        return [Renewed(cancel=False) if isinstance(one, Renewed) else one for one in answers]


class LosesFeedEvents(Mutant):
    """Each page leaves out its last event but moves past it."""

    async def feed(self, position, *, limit: int, **options) -> FeedPage:
        page = await self.real.feed(position, limit=limit, **options)
        return dataclasses.replace(page, events=page.events[:-1]) if len(page.events) > 1 else page


class RequeuesTwice(Mutant):
    """The request id is not remembered."""

    async def requeue(self, actor, jobs, request_id, *, limit: int, cause):
        self.number = getattr(self, "number", 0) + 1
        request = RequestId(f"{request_id}-{self.number}")
        return await self.real.requeue(actor, jobs, request, limit=limit, cause=cause)


class DropsEvents(Mutant):
    """A transition in the middle of a history left no event."""

    async def histories(self, *, batch: int = 500):
        async for history in self.real.histories(batch=batch):
            yield dataclasses.replace(history, events=(*history.events[:1], *history.events[2:]))


class LetsEpochsFall(Mutant):
    async def histories(self, *, batch: int = 500):
        async for history in self.real.histories(batch=batch):
            yield _with_last_epoch(history, Epoch(0))


class WaitsForNoFollower(Mutant):
    async def retain(self, options: RetentionOptions, **by: Actor):
        return await self.real.retain(dataclasses.replace(options, unread_s=0.0), **by)


def _with_last_epoch(history: JobHistory, epoch: Epoch) -> JobHistory:
    last: Event = dataclasses.replace(history.events[-1], epoch=epoch)
    return dataclasses.replace(history, events=(*history.events[:-1], last))


async def _fence(rig: Rig) -> None:
    await test_fence.test_every_write_of_a_holder_that_lost_its_lease_is_refused(rig, test_fence._expired_and_reclaimed)


async def _verified_life(rig: Rig) -> None:
    held = await rig.running()
    await rig.pull(held, "complete")
    report = await rig.verify()
    assert report.ok, report.violations


# A test that unpacks one answer and gets two fails with a ValueError.
CAUGHT_AS = (AssertionError, pytest.fail.Exception, ValueError)
CAUGHT: list[tuple[type[Mutant], Callable[[Rig], Awaitable[None]]]] = [
    (NoFenceOnSteps, _fence),
    (NoFenceOnCheckpoints, _fence),
    (NoFenceOnCheckpoints, test_fence.test_the_losers_checkpoint_does_not_reach_the_next_holder),
    (NoFenceOnJournal, _fence),
    (NoFenceOnSignals, _fence),
    (NoFenceOnRenewal, _fence),
    (SilentLoss, test_cancel.test_cancel_then_complete_stays_cancelled),
    (SilentLoss, test_advance.test_a_lost_step_takes_nothing_of_its_turn_with_it),
    (ForgetsClaims, test_claim.test_the_same_claim_id_returns_the_same_jobs_while_their_leases_live),
    (ForgetsKeys, test_submit.test_a_hundred_concurrent_submits_of_one_key_make_one_job),
    (IgnoresFingerprints, test_submit.test_the_same_key_with_another_request_is_refused),
    (IgnoresConcurrencyKeys, test_keys.test_one_job_of_a_concurrency_key_is_claimed_at_a_time),
    (NeverElects, test_sweep.test_one_sweeper_is_elected_in_each_interval),
    (HidesCancels, test_renew.test_renewals_return_the_cancel_request_until_the_holder_settles),
    (LosesFeedEvents, test_feed.test_the_feed_yields_every_event_once_in_order),
    (RequeuesTwice, test_requeue.test_the_same_request_requeues_once),
    (NoFenceOnJournal, test_progress.test_checkpoint_and_journal_are_refused_once_another_holds_the_job),
    (DropsEvents, _verified_life),
    (LetsEpochsFall, _verified_life),
    (WaitsForNoFollower, test_retention.test_events_that_a_follower_has_not_read_are_retained),
]


@pytest.mark.requirement("DJ-7", "DJ-2", "DJ-4", "DJ-5", "DJ-14", "D2", "D6")
@pytest.mark.parametrize("mutant, test", CAUGHT, ids=lambda one: one.__name__)
async def test_a_broken_ledger_is_caught(mutant: type[Mutant], test: Callable[[Rig], Awaitable[None]], tmp_path: Path):
    async with sqlite_rig(tmp_path / "sound.db") as rig:
        await test(rig)
    async with sqlite_rig(tmp_path / "broken.db") as rig:
        real, reopen = rig.ledger, rig.reopen

        async def reopened() -> Ledger:
            return mutant(await reopen())  # type: ignore[return-value]

        rig.ledger, rig.reopen = mutant(real), reopened  # type: ignore[assignment]
        with pytest.raises(CAUGHT_AS):
            await test(rig)
