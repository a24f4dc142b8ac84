"""`python -m bench.child SUBJECT ACTION OPTIONS`: one piece of work in a process of its own.

It imports everything, says `ready`, waits for a line, works, and prints what it measured as JSON. So the time to start
an interpreter is in no figure, and several workers begin at the same moment.
"""

import importlib
import inspect
import json
import sys

from bench.processes import READY
from bench.task import Task


def main(subject: str, action: str, options: str) -> None:
    """Do one action."""
    work = getattr(importlib.import_module(f"bench.subjects.{subject}"), action)
    task = Task(**json.loads(options))
    print(READY, flush=True)
    if not sys.stdin.readline():
        return
    answer = work(task)
    if inspect.iscoroutine(answer):
        import uvloop

        answer = uvloop.run(answer)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
