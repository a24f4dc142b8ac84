"""Lists ask the ledger a fixed number of times, however many rows they have."""

import pytest

from tests.gateway.conftest import VIOLIN, Gateway
from trellis.ledgers.sqlite.ledger import SqliteLedger

ROWS = 4


async def reads(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, address: str, role: str = "owner"
) -> tuple[int, int]:
    """How many rows a list has, and how often the ledger was asked for it."""
    ledger = gateway.instance.ledger
    assert isinstance(ledger, SqliteLedger)
    lane, asked = ledger.reader, list[object]()
    run = lane.run
    with monkeypatch.context() as patch:
        patch.setattr(lane, "run", lambda work, **options: asked.append(work) or run(work, **options))
        items = (await gateway.client(role).get(address)).json()["items"]
    return len(items), len(asked)


@pytest.mark.parametrize("path, most", [("/runs", 2), ("/proposals", 4), ("/inbox/entries", 2)])
async def test_a_list_asks_the_ledger_as_often_for_many_rows_as_for_one(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str, most: int
):
    owner = gateway.client("owner")
    for number in range(ROWS):
        note = {"summary": "a note", "change": {"type": "create", "text": f"{number} %"}}
        wish = {"action": "propose-note", "target": f"{VIOLIN}/notes/n{number}.md", "payload": note}
        if path == "/runs":
            wish = {"action": "run", "target": VIOLIN, "payload": {"number": number}}
        answer = await owner.post("/inbox/submit", json={"intent": wish})
        assert answer.json()["status"] == "processed", answer.text
    rows, many = await reads(gateway, monkeypatch, f"{path}?limit=100")
    one, once = await reads(gateway, monkeypatch, f"{path}?limit=1")
    assert (rows, one) == (ROWS, 1)
    assert many == once <= most


@pytest.mark.parametrize("role", ["owner", "submitter"])
async def test_the_list_of_jobs_asks_the_ledger_as_often_for_many_rows_as_for_one(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, role: str
):
    caller = gateway.client(role)
    for number in range(ROWS):
        later = {"delay_s": 60} if number % 2 else {}
        assert (await caller.post("/jobs", json={"type": "row.import", **later})).status_code == 202
    rows, many = await reads(gateway, monkeypatch, "/jobs?limit=100", role)
    one, once = await reads(gateway, monkeypatch, "/jobs?limit=1", role)
    assert (rows, one) == (ROWS, 1)
    assert once <= many <= 3, "the jobs; their owners or the rates of their types; the time, if one is due later"


async def test_the_list_of_ended_jobs_asks_the_ledger_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    owner = gateway.client("owner")
    for _ in range(ROWS):
        job_id = (await owner.post("/jobs", json={"type": "row.import"})).json()["job_id"]
        assert (await owner.post(f"/jobs/{job_id}/cancel", json={"mode": "hard"})).status_code == 200
    assert await reads(gateway, monkeypatch, "/jobs?limit=100") == (ROWS, 1)
