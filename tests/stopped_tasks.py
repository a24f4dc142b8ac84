"""Waiting for tasks that a test has stopped, without hiding what else went wrong in them."""

import asyncio
from collections.abc import Awaitable
from typing import Any


async def stopped(*tasks: Awaitable[Any], but: tuple[type[Exception], ...] = ()) -> None:
    """Wait until these tasks are over. An error of theirs is raised, unless they were cancelled or it is one of `but`."""
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(answer, BaseException) and not isinstance(answer, (asyncio.CancelledError, *but)):
            raise answer
