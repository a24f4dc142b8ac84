"""What a child process is asked to do."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BATCH = 500
"""Jobs per batch: of bulk submits, of a peer's dequeue, of a floor's claim."""


STEPS, CHILDREN, SLEEP_S = 4, 100, 1
"""What a workflow of the group `workflows` does: steps, or children to join, or a sleep."""


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
    objects: str = ""
    """The folder of the object store, for runs that are published."""

    @property
    def folder(self) -> Path:
        """Where handler marks go."""
        return Path(self.marks)

    def as_dict(self) -> dict[str, Any]:
        """The form in which it is handed to the child."""
        return asdict(self)
