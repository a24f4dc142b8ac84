"""The children of a parent since a mark: each is given once, and none is missed, however late it is committed."""

import asyncpg
import pytest

from tests.ledgers.conformance.rig import Rig
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import JobId
from trellis.engine.records import ChildPage, RetentionOptions

PARENT = JobId("p")
DAY_S = 86_400.0


async def children(rig: Rig, since: str | None = None, limit: int = 100) -> ChildPage:
    return await rig.ledger.children(PARENT, since=since, limit=limit)


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-8")
async def test_children_come_in_their_order_and_each_once(rig: Rig):
    assert await children(rig) == ChildPage(job_ids=(), numbers=(), mark=(await children(rig)).mark)
    first = await rig.submit(3, parent_id=PARENT)
    await rig.submit(2, parent_id="somebody-else")
    other = await rig.submit_one(lifecycle="bus-job", parent_id=PARENT)
    page = await children(rig, limit=2)
    assert (list(page.job_ids), page.anew) == (first[:2], False)
    rest = await children(rig, page.mark)
    assert (list(rest.job_ids), rest.anew) == ([first[2], other], False)
    nothing = await children(rig, rest.mark)
    assert nothing == ChildPage(job_ids=(), numbers=(), mark=rest.mark)
    numbers = (*page.numbers, *rest.numbers)
    assert list(numbers) == sorted(set(numbers))
    assert len(numbers) == 4
    new = await rig.submit_one(parent_id=PARENT)
    assert (await children(rig, rest.mark)).job_ids == (new,)


@pytest.mark.requirement("BUS-8")
async def test_children_are_given_anew_when_one_was_removed(rig: Rig):
    gone, stays = await rig.submit_one(parent_id=PARENT), await rig.submit_one(parent_id=PARENT)
    mark = (await children(rig)).mark
    await rig.cancel(gone)
    assert (await children(rig, mark)).job_ids == (), "where they stand does not matter"
    await rig.advance(2 * DAY_S)
    while (await rig.ledger.retain(RetentionOptions(ended_s=DAY_S))).more:
        pass
    assert await rig.ledger.job(gone) is None
    new = await rig.submit_one(parent_id=PARENT)
    again = await children(rig, mark)
    assert (again.job_ids, again.anew) == ((stays, new), True), "as many as before, and not the same"
    assert (await children(rig, again.mark)) == ChildPage(job_ids=(), numbers=(), mark=again.mark)


@pytest.mark.only("postgres")
@pytest.mark.requirement("BUS-8")
async def test_a_child_that_is_committed_after_a_later_one_is_not_missed(rig: Rig):
    connection = await asyncpg.connect(rig.app_url)
    try:
        await connection.execute("SELECT trellis.type_id('work')")
        slow = connection.transaction()
        await slow.start()
        late = await connection.fetchval("SELECT trellis.submit_job('work', p_parent_id => 'p')")
        early = await rig.submit_one(parent_id=PARENT)
        page = await children(rig)
        assert page.job_ids == (early,)
        await slow.commit()
    finally:
        await connection.close()
    again = await children(rig, page.mark)
    assert (again.job_ids, again.anew) == ((late, early), True)


@pytest.mark.parametrize("since", ["", "1.2", "1.2.3.4", "a.b.c", "1..3", "-1.2.3", "1.2." + "9" * 50])
async def test_a_mark_that_nobody_gave_is_refused(rig: Rig, since: str):
    with pytest.raises(OptionInvalid):
        await children(rig, since)


@pytest.mark.parametrize("limit", [0, 1_001])
async def test_a_page_of_children_has_a_bound(rig: Rig, limit: int):
    with pytest.raises(OptionInvalid):
        await children(rig, limit=limit)
