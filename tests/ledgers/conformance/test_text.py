"""What handlers put into errors is not always text a database likes; the step must be made all the same."""

import pytest

from tests.ledgers.conformance.rig import ADMIN, Rig
from trellis.engine.jobs import DeadLetterReason, ReasonCode, Stage
from trellis.engine.records import JobFilter
from trellis.lifecycles import Trigger

AWKWARD = ["with a NUL \0 inside", "half a pair \ud800", "Ünïcödé 🌱 'quoted' \\ and \"so on\"", "line\nbreak\r\n\ttab"]


@pytest.mark.parametrize("text", AWKWARD, ids=["nul", "surrogate", "unicode", "controls"])
async def test_awkward_error_text_does_not_keep_a_job_from_ending(rig: Rig, text: str):
    held = await rig.running()
    death = DeadLetterReason(reason_code=ReasonCode.VALIDATION_FAILED, stage=Stage.EXEC, last_error=text)
    await rig.pull(held, "reject", cause=text, death=death)
    assert await rig.state(held.lease.job_id) == "dead_lettered"
    letters = await rig.ledger.dead_letters(JobFilter(), limit=1)
    assert letters[0].last_error.startswith(text[:4])


@pytest.mark.parametrize("text", AWKWARD, ids=["nul", "surrogate", "unicode", "controls"])
async def test_awkward_causes_are_recorded(rig: Rig, text: str):
    held = await rig.running()
    await rig.pull(held, Trigger.RETRY, cause=text)
    await rig.move(held.lease.job_id, "cancelled", by=ADMIN, cause=text)
    assert [bool(event.cause) for event in (await rig.ledger.events(held.lease.job_id))[-2:]] == [True, True]
