"""Runs tasks so that a test decides, call by call, which of them goes on: every call of a wrapped ledger or store waits its turn."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

PATIENCE_S = 60.0


class Turnstile:
    """Lets one waiting task pass at a time, and waits until every task waits again or has ended."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        self._news = asyncio.Event()

    def wrap(self, inner: Any) -> Any:
        """The same object; each of its coroutines waits its turn first."""
        return _Gated(inner, self)

    async def wait(self) -> None:
        """Wait until this task is let pass; a task that nobody runs here passes at once."""
        task = asyncio.current_task()
        if task is None or task.get_name() != "turns":
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[task] = turn
        self._news.set()
        await turn

    async def run(self, works: Sequence[Coroutine[Any, Any, Any]], choose: Callable[[int], int]) -> list[Any]:
        """Run the works to their ends; `choose(n)` says which of the n waiting tasks goes on."""
        tasks = [asyncio.create_task(work, name="turns") for work in works]
        for task in tasks:
            task.add_done_callback(lambda _: self._news.set())
        async with asyncio.timeout(PATIENCE_S):
            while not all(task.done() for task in tasks):
                waiting = [task for task in tasks if task in self._waiting]
                if len(waiting) < sum(not task.done() for task in tasks):
                    self._news.clear()
                    await self._news.wait()
                    continue
                self._waiting.pop(waiting[choose(len(waiting)) % len(waiting)]).set_result(None)
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks, return_exceptions=True)


class _Gated:
    def __init__(self, inner: Any, turnstile: Turnstile) -> None:
        self._inner, self._turnstile = inner, turnstile

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def gated(*args: Any, **kwargs: Any) -> Any:
            await self._turnstile.wait()
            return await found(*args, **kwargs)

        return gated
