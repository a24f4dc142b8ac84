"""docs/how-to/move-to-a-fleet.md does what it says, on real PostgreSQL and S3."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, run
from tests.servers.seaweedfs import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.storage.conftest import seaweedfs

__all__ = ["seaweedfs"]
GUIDE = ROOT / "docs" / "how-to" / "move-to-a-fleet.md"


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_the_guide_to_moving_does_what_it_says(
    tmp_path: Path, seaweedfs: SeaweedServer, new_postgres_database: Callable[..., str]
):
    output = run(
        GUIDE,
        tmp_path,
        {
            "FLEET_LEDGER": new_postgres_database(),
            "FLEET_OBJECTS": seaweedfs.url("guide"),
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        },
    )
    assert "the move is possible; nothing was changed" in output
    assert "the instance is open there" in output
    assert output.count("report-3") >= 2, "the same key gives the same job after the move"
