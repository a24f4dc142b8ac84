"""Whether a disk has room for what an instance writes."""

import shutil
from pathlib import Path

import pytest

from trellis.engine.disk_room import ROOM_BYTES_MIN, has_room


@pytest.mark.parametrize(
    "total, free, has",
    [(1 << 40, ROOM_BYTES_MIN, True), (1 << 40, ROOM_BYTES_MIN - 1, False), (0, 0, True)],
    ids=["room", "full", "a file system that reports no size"],
)
def test_a_disk_is_full_when_it_says_so(
    total: int, free: int, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(total, total - free, free))  # type: ignore[attr-defined]
    assert has_room(tmp_path / "not made yet" / "ledger.db") is has
