"""`verify` holds concurrency keys to the limits that the ledger stores, also while it is at work."""

import apsw
import pytest

from tests.ledgers.conformance.rig import ADMIN, Rig
from trellis.engine.verify import VerifyRule, verify


@pytest.mark.requirement("D49")
async def test_a_key_held_beyond_its_stored_limit_is_found_without_being_asked_for(rig: Rig):
    await rig.submit(3, concurrency_key="k", concurrency_limit=2)
    await rig.claim(3)
    assert (await verify(rig.ledger)).ok
    await rig.ledger.limit_key(ADMIN, "k", 1)
    assert (await verify(rig.ledger)).ok, "who held a slot when the limit was lowered may go on"
    await _forget_the_second_slot(rig)
    report = await verify(rig.ledger)
    assert [violation.rule for violation in report.violations] == [VerifyRule.KEY_LIMIT]
    assert report.violations[0].detail == "2 jobs of key 'k' are held and its limit is 1"
    await rig.ledger.limit_key(ADMIN, "k", 2)


async def _forget_the_second_slot(rig: Rig) -> None:
    """What a promotion that miscounts would leave: two holders and one slot."""
    if rig.admin_sql is not None:
        await rig.admin_sql("delete from trellis.slot where n = 2")
        return
    shell = apsw.Connection(rig.ledger.url.removeprefix("sqlite:///"))
    shell.execute(
        "DROP TRIGGER trellis_job_place_fits; DROP INDEX trellis_job_slot; UPDATE trellis_job SET slot = 0 WHERE slot = 1"
    )
    shell.close()
