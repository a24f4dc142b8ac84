"""A process that applies proposals and tells each one that was acknowledged. Started by the tests with:

address of the memory, name, how many, agents. Each line it prints: agent, proposal, commit, version.
"""

import sys
from datetime import datetime, timedelta

from tests.storage.memory.rig import AT, append, apply, open_address
from trellis.storage.memory.layout import Committed, VersionConflict
from trellis.storage.memory.repository import MemoryRepository

TRIES_MAX = 1_000


def main(address: str, name: str, number: str, *agents: str) -> None:
    memory = open_address(address)
    for turn in range(int(number)):
        agent = agents[turn % len(agents)]
        proposal = f"prop_{name}_{turn}"
        outcome = committed(memory, agent, proposal, AT + timedelta(seconds=turn))
        sys.stdout.write(f"{agent} {proposal} {outcome.commit} {outcome.version}\n")
        sys.stdout.flush()


def committed(memory: MemoryRepository, agent: str, proposal: str, at: datetime) -> Committed:
    """Ask again with the newest version while others are faster."""
    update = append("decisions.md", f"- {proposal}")
    for _ in range(TRIES_MAX):
        outcome = apply(memory, update, proposal_id=proposal, agent_id=agent, at=at)
        if not isinstance(outcome, VersionConflict):
            assert isinstance(outcome, Committed), outcome
            return outcome
    raise AssertionError(f"{proposal}: {TRIES_MAX} conflicts")


if __name__ == "__main__":
    main(*sys.argv[1:])
