"""The audit records of acts: no fact replaces a field, and an act that cannot be written stops no other."""

import json
from pathlib import Path

import pytest

from tests.runs.conftest import Stand
from trellis.documents import audit
from trellis.documents.audit_log import ActRecorder
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.admin_acts import ACTS_MAX, RESERVED_FIELDS, NewAct
from trellis.engine.jobs import Actor
from trellis.ledgers.sqlite import ledger as sqlite_ledger
from trellis.lifecycles import Role
from trellis.storage.objects.open import open_objects

ADMIN = Actor(role=Role.CONTROL_PLANE, name="anna")
PROJECTOR = Actor(role=Role.PROJECTOR, name="projector")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger takes any act, as an older version did."""

    def same(act: NewAct) -> NewAct:
        return act

    monkeypatch.setattr(sqlite_ledger, "checked_act", same)


@pytest.mark.requirement("OBS-1")
@pytest.mark.usefixtures("unchecked")
async def test_no_fact_replaces_a_field_of_the_record(stand: Stand):
    plain = NewAct(event="x", subject="y", facts={"mine": 1}, id="refused-1f")
    forged = NewAct(event="x", subject="y", facts={**dict.fromkeys(RESERVED_FIELDS, "forged"), "mine": 1})
    for act in (plain, forged):
        await stand.ledger.record_act(ADMIN, act)
    wanted, found = [json.loads(audit.act_to_bytes(act)) for act in await stand.ledger.acts()]
    assert list(found) == list(wanted)
    assert {**found, "event_id": "", "ts": ""} == {**wanted, "event_id": "", "ts": ""}
    assert audit.is_of_act(found)


@pytest.mark.requirement("OBS-1")
@pytest.mark.usefixtures("unchecked")
async def test_acts_that_cannot_be_written_stop_none_after_them(stand: Stand, tmp_path: Path):
    for number in range(ACTS_MAX):
        await stand.ledger.record_act(ADMIN, NewAct(event="x", subject=str(number), facts={"bad": "\ud800"}))
    good = await stand.ledger.record_act(ADMIN, NewAct(event="x", subject="good"))
    objects = await open_objects(f"file://{tmp_path / 'records'}")
    try:
        recorder = ActRecorder(stand.ledger, PROJECTOR, DocumentPublisher(objects))
        assert [await recorder.publish_new(), await recorder.publish_new(), await recorder.publish_all()] == [1, 0, 0]
        (record,) = (await objects.list("audit/")).items
        assert record.key.endswith(f"/{good}.json")
        assert len(await stand.ledger.acts(unpublished=True)) == ACTS_MAX
    finally:
        await objects.close()
