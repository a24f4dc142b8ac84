"""Print what the fault proofs measured when they last ran: `python -m tests.faults.figures`."""

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "faults"


def main() -> int:
    for path in sorted(FOLDER.glob("*.json")):
        measured = json.loads(path.read_text(encoding="utf-8"))
        head = f"{measured.pop('test')}  ({measured.pop('ran_at')}, seed {measured.pop('seed')})"
        sys.stdout.write(head + "\n" + "".join(f"    {name}: {value}\n" for name, value in measured.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
