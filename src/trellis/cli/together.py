"""Parts of one process that end together."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_together(stop: asyncio.Event, *parts: Coroutine[Any, Any, None]) -> None:
    """Until all have ended; when one fails, the others stop in good order and its error is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    stop.set()
    for task in tasks:
        await task
