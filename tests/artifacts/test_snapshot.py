"""Context snapshots: the same bytes each way, and nothing that cannot be asked about."""

import json
from typing import Any

import pytest

from trellis.artifacts import payloads as module
from trellis.artifacts.payloads import SNAPSHOT_BYTES_MAX, Snapshot, SnapshotInvalid
from trellis.engine.errors import InputError
from trellis.nlm.provider import corpus

WHOLE: dict[str, Any] = {
    "job_id": "6f1e6b0a-94d5-4a38-8a3c-2f4d93b21a11",
    "epoch": 3,
    "agent_slug": "archivist-violin",
    "memory": {"version": "0a1b2c", "files": [{"ref": "memory/snapshot.md", "text": "# Snapshot\n"}]},
    "entities": [{"slug": "ts-01", "name": "TS-01", "aliases": ["Міттенвальдська скрипка"], "ref": "sources/a.md"}],
    "sources": [{"ref": "sources/a.md", "text": "Текст.\r\n\x0b", "title": None}],
}


def changed(**changes: Any) -> bytes:
    return json.dumps({**WHOLE, **changes}).encode()


def test_a_snapshot_is_the_same_after_bytes_and_back() -> None:
    made = Snapshot.of(**WHOLE)
    again = Snapshot.read(made.to_bytes())
    assert again == made
    assert again.to_bytes() == made.to_bytes() == Snapshot.read(changed()).to_bytes()
    assert json.loads(made.to_bytes()) == WHOLE


def test_a_snapshot_that_can_be_read_can_be_asked_about() -> None:
    assert corpus(Snapshot.read(changed()).corpus()).sources[0].ref == "sources/a.md"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b"<html></html>",
        changed()[:-20],
        changed(epoch="3"),
        changed(epoch=-1),
        changed(more=1),
        changed(job_id=""),
        changed(sources=[{"ref": "a"}]),
        changed(sources=[{"ref": "", "text": ""}]),
        changed(sources=[{"ref": "a\n", "text": ""}]),
        changed(sources=[{"ref": "a", "text": "\0"}]),
        changed(sources=[{"ref": "a", "text": "\ud800"}]),
        changed(sources=[{"ref": "a", "text": ""}, {"ref": "a", "text": ""}]),
        changed(sources=[{"ref": "memory/snapshot.md", "text": ""}]),
        changed(sources=[{"ref": f"{number}", "text": ""} for number in range(201)]),
        changed(sources=[{"ref": "a", "text": "x" * 1_000_001}]),
        changed(sources=[{"ref": f"{number}", "text": "x" * 900_000} for number in range(5)]),
        changed(entities=[{"slug": "a", "name": ""}]),
        changed(entities=[{"slug": "a", "name": "A"}, {"slug": "a", "name": "B"}]),
        b" " * (SNAPSHOT_BYTES_MAX + 1),
    ],
    ids=range(26),
)
def test_garbage_is_refused_with_one_kind_of_error(body: bytes) -> None:
    with pytest.raises(SnapshotInvalid) as caught:
        Snapshot.read(body)
    assert isinstance(caught.value, InputError)
    assert str(caught.value).startswith("This is no context snapshot: ")


def test_a_snapshot_beyond_its_bound_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Snapshot.of(**WHOLE)
    monkeypatch.setattr(module.Snapshot, "bytes_max", 100)
    with pytest.raises(SnapshotInvalid, match="limit is 100"):
        made.to_bytes()


def test_values_that_are_no_json_are_refused() -> None:
    with pytest.raises(SnapshotInvalid):
        Snapshot.of(**{**WHOLE, "epoch": object()})
