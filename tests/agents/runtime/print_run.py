"""Runs the offline model once and prints digests of everything it journalled: a process of its own for a test."""

import asyncio
import hashlib
import sys

from tests.agents.runtime.stage import Stage, agent

BODY = "Compare.\n\n# Questions\n\n- How often is the north bed watered in summer?\n"


async def main() -> None:
    stage = Stage()
    output = await stage.run(agent(body=BODY))
    for name, body in [*stage.journal.entries.items(), ("output", output.to_bytes())]:
        sys.stdout.write(f"{name} {hashlib.sha256(body).hexdigest()}\n")


asyncio.run(main())
