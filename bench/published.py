"""The object store's folder as a reader sees it: a run counts when its status.json says completed."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from bench.processes import ChildFailed
from bench.subjects.runs import names
from trellis.documents import ids

PATIENCE_S = 60.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Folder:
    """Where `runs` runs are published."""

    path: Path
    runs: int

    def wait(self) -> None:
        """Come back when readers see every run completed; raises ChildFailed when one ended otherwise or too late."""
        deadline = time.monotonic() + PATIENCE_S
        for slug, run_id in names(self.runs):
            while (status := self._status(slug, run_id)) != "completed":
                if status == "failed" or time.monotonic() > deadline:
                    raise ChildFailed(f"{run_id} is {status} for its readers")
                time.sleep(POLL_S)

    def _status(self, slug: str, run_id: str) -> str | None:
        try:
            return json.loads((self.path / ids.status_key(slug, run_id)).read_bytes())["status"]
        except FileNotFoundError:
            return None
