"""Runs the offline model once and gives digests of everything it journalled; prints them as a process of its own."""

import asyncio
import hashlib
import sys

from tests.agents.runtime.stage import Stage, agent

BODY = "Compare.\n\n# Questions\n\n- How often is the north bed watered in summer?\n"


async def digests() -> str:
    """A line for each entry of the journal, and one for the output."""
    stage = Stage()
    output = await stage.run(agent(body=BODY))
    entries = [*stage.journal.entries.items(), ("output", output.to_bytes())]
    return "".join(f"{name} {hashlib.sha256(body).hexdigest()}\n" for name, body in entries)


if __name__ == "__main__":
    sys.stdout.write(asyncio.run(digests()))
