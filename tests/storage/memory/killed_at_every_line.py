"""Kills a writer at every line of the modules that write, one after the other, and goes on with the same memory.

Started by the tests with the address of a memory and a step (1: every line, 4: every fourth one); prints what it saw
as JSON. A process of its own, because it forks.
"""

import json
import os
import signal
import sys
from types import FrameType

from tests.storage.memory.rig import AGENT, append, apply, open_address
from trellis.storage.memory import bare_repository, shared_repository
from trellis.storage.memory.layout import AlreadyApplied, Committed
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.verification import verify

POINTS_MAX = 4_000
WRITING = {bare_repository.__file__, shared_repository.__file__}
LEFTOVERS = ("objects/tmp_*", "refs/heads/*.lock", "trellis.ref")


def main(address: str, step: str) -> None:
    memory = open_address(address)
    seen = {"killed": 0, "acknowledged": 0, "applied": 0, "not_applied": 0, "problems": []}
    number = 0
    for number, point in enumerate(range(1, POINTS_MAX, int(step)), 1):
        proposal = f"prop_{point}"
        ended, told = write_and_die(address, proposal, point)
        check(memory, proposal, number, told, seen)
        if ended:
            break
        seen["killed"] += 1
    verified = verify(memory)
    seen["problems"] += verified.findings
    seen["versions"] = memory.read(AGENT).version
    seen["points"] = number
    sys.stdout.write(json.dumps(seen))


def write_and_die(address: str, proposal: str, point: int) -> tuple[bool, bool]:
    """Whether the child reached its end, and whether it told of its commit."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            memory = open_address(address)  # threads do not come along into this process
            sys.settrace(killer(point))
            outcome = write(memory, proposal)
            if isinstance(outcome, Committed):
                os.write(writing, b"acknowledged")
            sys.settrace(None)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    told = os.read(reading, 100)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return not os.WIFSIGNALED(status), bool(told)


def write(memory: MemoryRepository, proposal: str) -> object:
    return apply(memory, append("decisions.md", f"- {proposal}"), proposal_id=proposal)


def killer(point: int):
    """A trace function that ends this process without warning before the `point`-th line of the writing module."""
    left = point

    def trace(frame: FrameType, event: str, _argument: object):
        nonlocal left
        if frame.f_code.co_filename not in WRITING:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def check(memory: MemoryRepository, proposal: str, number: int, told: bool, seen: dict) -> None:
    """Whole before or whole after, never lost once told, and applied once when asked again."""
    there = memory.read(AGENT).version == number
    seen["applied" if there else "not_applied"] += 1
    seen["acknowledged"] += told
    if told and not there:
        seen["problems"].append(f"{proposal}: acknowledged and lost")
    again = write(memory, proposal)
    if not isinstance(again, AlreadyApplied if there else Committed) or again.version != number:
        seen["problems"].append(f"{proposal}: {again} after a kill")
    left = [path.name for pattern in LEFTOVERS for path in memory.path.glob(pattern)]
    if left and isinstance(memory._bare, bare_repository.BareRepository):
        seen["problems"].append(f"{proposal}: left {left}")


if __name__ == "__main__":
    main(*sys.argv[1:])
