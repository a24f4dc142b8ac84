"""Calls the handlers of one application for one worker, on a ledger or on the bus.

A call runs inside the application's middleware, gets its resources, and happens on the event loop, on a thread or in a
process. A worker on a ledger calls plain handlers (`JobSpec.is_plain`) itself, because that is the path of most jobs.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from trellis.engine.clock import Clock
from trellis.engine.logs import log_of
from trellis.engine.retry_policy import error_text
from trellis.worker.app import App, HandlerKind, JobSpec
from trellis.worker.context import AttemptContext, Context, Item, SyncContext
from trellis.worker.held import AttemptState
from trellis.worker.middleware import BatchCall, BoundMiddleware, through
from trellis.worker.parameters import name_of, parameters_of
from trellis.worker.processes import Processes, check_importable
from trellis.worker.resources import OpenResources
from trellis.worker.threads import Threads, is_closed

ERROR_HOOK_S_MAX = 10.0
"""How long one error hook may take. The attempt ends without it then."""

_log = log_of("trellis.worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bound:
    """The functions of one job type with their resources filled in."""

    handler: Callable[..., Any]
    middleware: tuple[BoundMiddleware, ...]
    on_error: tuple[Callable[..., Any], ...]


class Handlers:
    """The handlers of one application in one worker, with its threads, processes and open resources."""

    def __init__(
        self,
        app: App,
        *,
        clock: Clock,
        threads: int,
        processes: int,
        resources: Mapping[Any, Any] | None = None,
    ) -> None:
        app.check()
        for spec in app:
            if spec.kind is HandlerKind.PROCESS:
                check_importable(spec)
        self._app = app
        self.threads = Threads(threads)
        self._processes = Processes(processes, clock)
        self._resources = OpenResources(app.hooks.every_resource(), self.threads, resources or {})
        self._bound: dict[str, _Bound] = {}

    async def open(self) -> None:
        """Opens the resources. Raises ResourceFailed."""
        await self._resources.open()
        self._bound = {spec.type: self._bind(spec) for spec in self._app}

    async def close(self) -> None:
        """Ends idle processes, closes the resources in reverse order, then ends the threads."""
        await self._processes.close()
        await self._resources.close()
        self.threads.close()

    async def call(self, spec: JobSpec, context: AttemptContext, state: AttemptState, payload: Any) -> Any:
        """Runs one attempt's handler inside its middleware and returns the result. Raises whatever one of them raises."""
        bound = self._bound[spec.type]
        handler = partial(self._call_handler, spec, bound, context, state, payload)
        return await through(bound.middleware, context, handler)()

    async def call_batch(self, spec: JobSpec, items: list[Item[Any]]) -> None:
        """Runs a batch handler inside the middleware of each of its jobs."""
        bound = self._bound[spec.type]
        if bound.middleware:
            await BatchCall(bound.middleware, items, bound.handler).run()
        else:
            await bound.handler(items)

    async def report_error(self, spec: JobSpec, context: AttemptContext, error: BaseException) -> None:
        """Calls the error hooks of a failed attempt. What a hook raises is logged."""
        task = asyncio.current_task()
        for hook in self._bound[spec.type].on_error:
            try:
                async with asyncio.timeout(ERROR_HOOK_S_MAX):
                    await self._call_hook(hook, context, error)
            except BaseException as problem:  # a hook must not change the outcome of a job
                if is_closed(task) or (isinstance(problem, asyncio.CancelledError) and task and task.cancelling()):
                    raise  # the worker ends
                name = name_of(cast("partial[Any]", hook).func)
                _log.warning("error_hook_failed", hook=name, error=error_text(problem), exc_info=problem)

    async def _call_handler(
        self, spec: JobSpec, bound: _Bound, context: AttemptContext, state: AttemptState, payload: Any
    ) -> Any:
        if spec.kind is HandlerKind.PROCESS:
            return await self._processes.run(spec, context, state, payload)
        name = spec.parameters.payload
        arguments = {} if name is None else {name: payload}
        if spec.kind is HandlerKind.ASYNC:
            return await bound.handler(context, **arguments)
        sync = SyncContext(cast("Context", context), asyncio.get_running_loop())
        state.in_thread = True
        try:
            return await self.threads.run(partial(bound.handler, sync, **arguments))
        finally:
            state.in_thread = False

    async def _call_hook(self, hook: Callable[..., Any], context: AttemptContext, error: BaseException) -> None:
        if inspect.iscoroutinefunction(cast("partial[Any]", hook).func):
            await cast("Awaitable[Any]", hook(context, error))
        else:
            await self.threads.run(
                partial(hook, SyncContext(cast("Context", context), asyncio.get_running_loop()), error)
            )

    def _bind(self, spec: JobSpec) -> _Bound:
        return _Bound(
            handler=partial(spec.handler, **self._values(spec.parameters.resources)),
            middleware=self._with_resources(spec.middleware),
            on_error=self._with_resources(spec.on_error),
        )

    def _with_resources(self, functions: Sequence[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
        known = self._resources.values
        sorted_ = ((one, parameters_of(one, given=2, takes_payload=False, known=known)) for one in functions)
        return tuple(partial(one, **self._values(parameters.resources)) for one, parameters in sorted_)

    def _values(self, needs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._resources.values[kind] for name, kind in needs.items()}
