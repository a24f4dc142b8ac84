"""Lists ask the ledger a fixed number of times, however many rows they have."""

import pytest

from tests.gateway.conftest import VIOLIN, Gateway
from trellis.ledgers.sqlite.ledger import SqliteLedger

ROWS = 4


async def reads(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, address: str) -> tuple[int, int]:
    """How many rows a list has, and how often the ledger was asked for it."""
    ledger = gateway.instance.ledger
    assert isinstance(ledger, SqliteLedger)
    lane, asked = ledger.reader, list[object]()
    run = lane.run
    with monkeypatch.context() as patch:
        patch.setattr(lane, "run", lambda work: asked.append(work) or run(work))
        items = (await gateway.client("owner").get(address)).json()["items"]
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
