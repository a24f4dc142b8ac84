"""A process that reads a run's documents in a tight loop, as a stranger without Trellis would, and tells what it saw.

It looks only at files. `python -m tests.runs.processes.reader FOLDER OUT` reads every run below FOLDER until OUT.stop appears
and then writes to OUT what was wrong and how often it looked.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENDED = frozenset({"completed", "failed"})
STEP_PATTERN = "{number:02}-*.json"


@dataclass
class Watched:
    """What was seen of one run."""

    version: int = 0
    steps: int = 0
    closed: tuple[str, ...] | None = None
    """What lay in the folder when its terminal status was first seen."""
    seen: set[str] = field(default_factory=set)


class Reader:
    """Looks, and notes what must not be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[Path, Watched] = {}
        self.looks = 0
        self.changes = 0
        self.problems: list[str] = []

    def look(self) -> None:
        """Once at every run there is."""
        for path in self._folder.glob("agents/*/runs/*/status.json"):
            self.looks += 1
            # What the status promises is looked for after it was read: whatever it counts was there before it.
            self._compare(path.parent, json.loads(path.read_bytes()))

    def _compare(self, run: Path, status: dict[str, Any]) -> None:
        known = self._runs.setdefault(run, Watched())
        if status["version"] < known.version or status["steps_completed"] < known.steps:
            self.problems.append(f"{run.name} went back from version {known.version} to {status['version']}")
        self.changes += status["version"] != known.version
        known.version, known.steps = status["version"], status["steps_completed"]
        known.seen.add(status["status"])
        for number in range(1, status["steps_completed"] + 1):
            files = list((run / "steps").glob(STEP_PATTERN.format(number=number)))
            if len(files) != 1 or json.loads(files[0].read_bytes())["step"] != number:
                self.problems.append(
                    f"{run.name} counts {status['steps_completed']} steps and step {number} is not there"
                )
        if status["status"] in ENDED:
            self._compare_closed(run, known)

    def _compare_closed(self, run: Path, known: Watched) -> None:
        there = tuple(sorted(f"{path.relative_to(run)} {path.stat().st_mtime_ns}" for path in run.rglob("*.json")))
        if known.closed is None:
            known.closed = there
            if not any(name.startswith("manifest.json ") for name in there):
                self.problems.append(f"{run.name} has ended and has no manifest")
        elif known.closed != there:
            self.problems.append(f"{run.name} had ended and was written to: {set(there) ^ set(known.closed)}")

    def told(self) -> dict[str, Any]:
        states = {state for known in self._runs.values() for state in known.seen}
        return {
            "looks": self.looks,
            "changes": self.changes,
            "runs": len(self._runs),
            "ended": sum(known.closed is not None for known in self._runs.values()),
            "states": sorted(states),
            "problems": self.problems[:20],
        }


def main(folder: Path, out: Path) -> int:
    reader, stop = Reader(folder), out.with_suffix(".stop")
    while not stop.exists():
        reader.look()
    reader.look()
    written = out.with_suffix(".part")
    written.write_text(json.dumps(reader.told()), encoding="utf-8")
    written.rename(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
