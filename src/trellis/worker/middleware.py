"""Middleware: async functions around the handlers of an application.

    @app.middleware
    async def timed(ctx: Context, call_next: CallNext) -> Any:
        began = time.monotonic()
        try:
            return await call_next()
        finally:
            ctx.logger.info("took", seconds=time.monotonic() - began)

The first one registered is the outermost. `call_next()` runs the rest and returns the handler's result. A middleware that
returns a value replaces the result; one that returns None leaves it. What it raises is the outcome of the attempt, as if
the handler had raised it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from trellis.engine.errors import PermanentError
from trellis.worker.context import Item
from trellis.worker.parameters import name_of
from trellis.worker.threads import ordinary, resolve


class CallNext(Protocol):
    """What a middleware calls, once, to run the middleware after it and then the handler."""

    async def __call__(self) -> Any:
        """Returns the handler's result. Raises what the handler raised."""
        ...


BoundMiddleware = Callable[[Any, CallNext], Awaitable[Any]]
"""A middleware of the application with its resources filled in."""


def through(middleware: Sequence[BoundMiddleware], ctx: Any, handler: CallNext) -> CallNext:
    """The handler's call inside all its middleware."""
    call = handler
    for one in reversed(middleware):
        call = _Wrapped(one, ctx, call)
    return call


class _Wrapped:
    """One middleware around what comes after it."""

    __slots__ = ("_called", "_ctx", "_inner", "_middleware", "_result")

    def __init__(self, middleware: BoundMiddleware, ctx: Any, inner: CallNext) -> None:
        self._middleware = middleware
        self._ctx = ctx
        self._inner = inner
        self._called = False
        self._result: Any = None

    async def __call__(self) -> Any:
        value = await self._middleware(self._ctx, self._next)
        return self._result if value is None else value

    async def _next(self) -> Any:
        if self._called:
            name = name_of(getattr(self._middleware, "func", self._middleware))
            raise PermanentError(f"the middleware {name} called call_next twice: an attempt runs its handler once")
        self._called = True
        self._result = await self._inner()
        return self._result


@dataclass
class BatchCall:
    """One call of a batch handler inside the middleware of each of its jobs. `run` marks every item with its outcome.

    The middleware of the jobs run side by side, each in a task of its own. The handler is called once, when each of them
    has called `call_next` or has ended; it gets the jobs that came so far.
    """

    middleware: Sequence[BoundMiddleware]
    items: Sequence[Item[Any]]
    handler: Callable[[list[Item[Any]]], Awaitable[Any]]
    _arrived: dict[int, asyncio.Future[Any]] = field(default_factory=dict[int, "asyncio.Future[Any]"])
    _all_here: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._pending = len(self.items)

    async def run(self) -> None:
        tasks = [asyncio.create_task(self._one(number)) for number in range(len(self.items))]
        try:
            await self._all_here.wait()
            error = await self._call_handler() if self._arrived else None
            for number, future in self._arrived.items():
                item = self.items[number]
                resolve(future, item.value, item.error if item.marked else error)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _call_handler(self) -> BaseException | None:
        try:
            await self.handler([self.items[number] for number in sorted(self._arrived)])
        except Exception as error:  # noqa: BLE001 - each job's middleware sees it, and it is their outcome
            return error
        return None

    async def _one(self, number: int) -> None:
        """Runs the middleware of one job and marks its item with what they returned or raised."""
        item = self.items[number]
        try:
            value = await through(self.middleware, item.ctx, partial(self._arrive, number))()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever middleware raises is the outcome of its job
            item.fail(ordinary(error))
        else:
            has_heard = item.heard if item.marked else item.ctx.heard
            item.done(value)
            item.heard = has_heard
        finally:
            if number not in self._arrived:
                self._count_down()

    async def _arrive(self, number: int) -> Any:
        self._arrived[number] = future = asyncio.get_running_loop().create_future()
        self._count_down()
        return await future

    def _count_down(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._all_here.set()
