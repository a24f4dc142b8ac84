"""What a child process is asked to do."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BATCH = 500
"""Jobs per batch: of bulk submits, of a peer's dequeue, of a floor's claim."""
PLACE = "place.json"
"""Beside the marks: where a server process is."""

STEPS, CHILDREN, SLEEP_S = 4, 100, 1
"""What a workflow of the group `workflows` does: steps, or children to join, or a sleep."""
LISTED_STATES = ("succeeded", "queued", "dead_lettered")
"""States whose jobs are listed: very many that ended, few that wait, and none at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The options of every action; each reads what concerns it."""

    url: str
    jobs: int = 0
    concurrency: int = 1
    per_s: float = 0.0
    batch: int = BATCH
    marks: str = ""
    hints: bool = True
    handler: str = "noop"
    poll_s: float = 0.02
    """How often a peer looks for work that cannot be woken."""
    objects: str = ""
    """The folder of the object store, for runs that are published."""

    @property
    def folder(self) -> Path:
        """Where handler marks go."""
        return Path(self.marks)

    def write_place(self, **about: Any) -> None:
        """Of a server process: say where it is, when it can be asked."""
        half = self.folder / f"{PLACE}.half"
        half.write_text(json.dumps({"pid": os.getpid(), **about}), encoding="utf-8")
        half.replace(self.folder / PLACE)

    def read_place(self) -> dict[str, Any]:
        """Where the server process is, as it said."""
        return json.loads((self.folder / PLACE).read_text(encoding="utf-8"))

    def as_dict(self) -> dict[str, Any]:
        """The form in which it is handed to the child."""
        return asdict(self)
