"""An agent of the CAP SDK as a process of its own, whose jobs never end: `python -m tests.bus.interop.sdk_agent_process NATS REDIS ID TOPIC…`.

It says each job that it has begun on a line of its own, and is there to be killed.
"""

import asyncio
import sys
from typing import Any

from cap import Agent


async def main(nats_url: str, redis_url: str, worker_id: str, *topics: str) -> None:
    agent = Agent(
        nats_url=nats_url, redis_url=redis_url, worker_id=worker_id, heartbeat_interval=0.05, max_parallel=len(topics)
    )

    async def hang(context: Any, _: Any) -> None:
        sys.stdout.write(f"{context.job_id}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    for topic in topics:
        agent.job(topic)(hang)
    await agent.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
