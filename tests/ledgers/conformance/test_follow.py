"""Following the feed under a name: one at a time, where the last one stopped. And how many of a type may be held."""

import asyncio

import pytest

from tests.ledgers.conformance.rig import ADMIN, Rig, actor
from trellis.engine.errors import OptionInvalid
from trellis.lifecycles import Role

ONE, OTHER = actor(Role.PROJECTOR, "projector-1"), actor(Role.PROJECTOR, "projector-2")


@pytest.mark.requirement("D14")
async def test_second_follower_waits_until_the_subscription_of_the_first_expires(rig: Rig):
    first = await rig.ledger.subscribe(ONE, "documents", lease_s=10.0)
    assert first is not None
    assert first.position is None
    assert await rig.ledger.subscribe(OTHER, "documents", lease_s=10.0) is None
    await rig.pass_time(9.0)
    assert await rig.ledger.ack(first, "7", lease_s=10.0)
    await rig.pass_time(9.0)
    assert await rig.ledger.subscribe(OTHER, "documents", lease_s=10.0) is None
    await rig.pass_time(2.0)
    second = await rig.ledger.subscribe(OTHER, "documents", lease_s=10.0)
    assert second is not None
    assert second.position == "7"


@pytest.mark.requirement("D14")
async def test_follower_that_was_taken_over_cannot_move_the_position(rig: Rig):
    first = await rig.ledger.subscribe(ONE, "documents", lease_s=10.0)
    assert first is not None
    await rig.pass_time(11.0)
    second = await rig.ledger.subscribe(OTHER, "documents", lease_s=10.0)
    assert second is not None
    assert not await rig.ledger.ack(first, "9", lease_s=10.0)
    await rig.ledger.unsubscribe(first)
    assert await rig.ledger.ack(second, None, lease_s=10.0)
    assert await rig.ledger.subscribe(ONE, "documents", lease_s=10.0) is None


async def test_a_released_subscription_is_taken_over_at_once_at_its_position(rig: Rig):
    first = await rig.ledger.subscribe(ONE, "documents", lease_s=600.0)
    assert first is not None
    await rig.ledger.ack(first, "12", lease_s=600.0)
    await rig.ledger.unsubscribe(first)
    second = await rig.ledger.subscribe(OTHER, "documents", lease_s=10.0)
    assert second is not None
    assert second.position == "12"


async def test_subscriptions_of_different_names_have_their_own_positions(rig: Rig):
    assert await rig.ledger.subscribe(ONE, "documents", lease_s=10.0) is not None
    assert await rig.ledger.subscribe(OTHER, "audit", lease_s=10.0) is not None


async def test_concurrent_subscribers_of_one_name_elect_one(rig: Rig):
    names = [actor(Role.PROJECTOR, f"projector-{n}") for n in range(16)]
    answers = await asyncio.gather(*(rig.ledger.subscribe(name, "documents", lease_s=10.0) for name in names))
    assert sum(answer is not None for answer in answers) == 1


@pytest.mark.requirement("PIPE-3")
async def test_no_more_of_a_type_are_held_than_its_limit(rig: Rig):
    await rig.submit(6)
    await rig.ledger.limit_held(ADMIN, "work", 3)
    batches = await asyncio.gather(*(rig.claim(2) for _ in range(5)))
    held = [job for batch in batches for job in batch]
    assert len(held) == 3
    await rig.pull(held[0], "complete")
    assert len(await rig.claim(5)) == 1
    await rig.ledger.limit_held(ADMIN, "work", None)
    assert len(await rig.claim(5)) == 2


async def test_a_limit_of_another_type_does_not_count(rig: Rig):
    await rig.submit(2)
    await rig.ledger.limit_held(ADMIN, "other", 1)
    assert len(await rig.claim(5)) == 2


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_limit_that_holds_nothing_is_refused(rig: Rig, limit: int):
    with pytest.raises(OptionInvalid, match="pause the type"):
        await rig.ledger.limit_held(ADMIN, "work", limit)
