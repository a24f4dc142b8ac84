"""Group commit for ledger calls: calls that arrive while a batch is in progress go together in the next one.

There is no timer: an idle batcher sends at once. A caller that is the only one makes its call itself. A call whose
caller is gone before it was sent is not sent. When one call of a batch is refused, the others are made again without it.
Identical calls share one answer (`SingleFlight`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from trellis.engine.errors import InputError, LedgerUnavailable, Refused

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Answer = TypeVar("Answer")


CANCELLED_S = 10.0
"""How long no caller makes its call itself after one was cancelled that did: its connection was dropped."""


class Batcher(Generic[Item, Answer]):
    """Collects calls that arrive while a batch is in progress into the next batch. When idle, sends at once.

    With `alone`, a caller makes its call itself, without a task in between, as long as callers come one by one. If it is
    cancelled, the call is cancelled with it; calls made by the batcher's task go on without their callers.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Awaitable[list[Answer]]],
        weigh: Callable[[Item], int],
        limit: int,
        *,
        alone: bool = False,
    ) -> None:
        self._run = run
        self._weigh = weigh
        self._limit = limit
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._alone = alone
        self._alone_from = 0.0
        self._last_batch = 1
        self._caller: asyncio.Future[None] | None = None
        """Set while a caller makes its call itself."""

    async def put(self, item: Item) -> Answer:
        """The answer to this item, after the transaction that carried it has committed."""
        loop = asyncio.get_running_loop()
        is_idle = self._caller is None and (self._task is None or self._task.done())
        if self._alone and is_idle and self._last_batch == 1 and loop.time() >= self._alone_from:
            return await self._put_alone(item, loop)
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, future))
        if is_idle:
            self._task = asyncio.create_task(self._drain())
        return await future

    async def _put_alone(self, item: Item, loop: asyncio.AbstractEventLoop) -> Answer:
        """Make the call in the caller's own task. Calls that came meanwhile are a batch afterwards."""
        self._caller = loop.create_future()
        try:
            return (await self._run([item]))[0]
        except asyncio.CancelledError:
            self._alone_from = loop.time() + CANCELLED_S
            raise
        finally:
            self._caller.set_result(None)
            self._caller = None
            if self._waiting:
                self._task = asyncio.create_task(self._drain())

    async def close(self) -> None:
        """Wait for the calls and batches in progress."""
        if self._caller is not None:
            await asyncio.wait([self._caller])
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _drain(self) -> None:
        while self._waiting:
            batch = self._take()
            self._last_batch = len(batch) or 1
            if batch:
                await self._settle(batch)

    def _take(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        """The next batch: up to the weight limit, but at least one item. Items whose caller is gone are left out."""
        batch: list[tuple[Item, asyncio.Future[Answer]]] = []
        weight = 0
        while self._waiting:
            item, future = self._waiting[0]
            weight += self._weigh(item)
            if batch and weight > self._limit:
                break
            self._waiting.popleft()
            if future.done():
                weight -= self._weigh(item)
            else:
                batch.append((item, future))
        return batch

    async def _settle(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._run([item for item, _ in batch])
        except (InputError, Refused) as error:
            # A refusal concerns one caller only: the other calls are made again one by one.
            if len(batch) == 1:
                _fail(batch, error)
            else:
                for one in batch:
                    await self._settle([one])
        except BaseException as error:
            _fail(batch, error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def _fail(batch: Sequence[tuple[Any, asyncio.Future[Any]]], error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error if isinstance(error, Exception) else LedgerUnavailable(reason="closing"))


class SingleFlight(Generic[Key, Answer]):
    """Concurrent calls with the same key share one answer or one error. Nothing is cached after the call has ended."""

    def __init__(self, run: Callable[[Key], Awaitable[Answer]]) -> None:
        self._run = run
        self._under_way: dict[Key, asyncio.Task[Answer]] = {}

    async def call(self, key: Key) -> Answer:
        """The answer for this key. A cancelled caller does not cancel the call for the others."""
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._answer(key))
            # All callers may be gone when it fails: read the exception, so that asyncio does not warn about it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for the calls in progress."""
        if self._under_way:
            await asyncio.wait(list(self._under_way.values()))

    async def _answer(self, key: Key) -> Answer:
        try:
            return await self._run(key)
        finally:
            del self._under_way[key]
