"""Workers of the CAP SDK, unmodified, in this process."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from cap import Agent, run_worker

from tests.bus.interop.plane import TOPIC, Plane, pb
from tests.stopped_tasks import stopped

Handle = Callable[[Any], Awaitable[Any]]
BEAT_S = 0.05
WORKER = "sdk-1"
AGENT = "agent-1"


async def succeed(request: Any) -> Any:
    return pb.JobResult(job_id=request.job_id, status=pb.JOB_STATUS_SUCCEEDED, result_ptr="redis://res:x")


async def fail(_: Any) -> Any:
    raise ValueError("no")


@asynccontextmanager
async def sdk_worker(plane: Plane, handle: Handle = succeed, topic: str = TOPIC, **keys: Any) -> AsyncGenerator[None]:
    """The SDK's small worker: it listens at the topic, says nothing of itself and answers when it is done."""
    running = asyncio.create_task(run_worker(plane.server_url, topic, handle, sender_id=WORKER, **keys))
    try:
        yield
    finally:
        running.cancel()
        await stopped(running)


@asynccontextmanager
async def sdk_agent(
    plane: Plane, redis_url: str, *topics: str, worker_id: str = AGENT, **how: Any
) -> AsyncGenerator[list[str]]:
    """The SDK's agent with its own store, which adds numbers; the ids that it was given."""
    seen: list[str] = []
    agent = Agent(nats_url=plane.server_url, redis_url=redis_url, worker_id=worker_id, heartbeat_interval=BEAT_S, **how)

    async def add(context: Any, data: Any) -> dict[str, int]:
        seen.append(context.job_id)
        return {"sum": sum(data["numbers"])}

    for topic in topics or (TOPIC,):
        agent.job(topic)(add)
    await agent.start()
    try:
        yield seen
    finally:
        await agent.close()
