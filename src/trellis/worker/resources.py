"""Resources of an application: what its handlers share in one worker, such as a pool of connections.

    @app.resource
    async def database(settings: Settings) -> AsyncIterator[Database]:
        async with connect(settings.url) as opened:
            yield opened

A worker opens every resource when it starts, before it claims a job, and closes them in reverse order when it has
drained. A resource gets others by the annotations of its parameters. All are opened and closed by one task, because some
libraries require that.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, cast, get_args, get_origin

from trellis.engine.errors import OptionInvalid, ResourceFailed
from trellis.engine.logs import log_of
from trellis.engine.retry_policy import error_text
from trellis.worker.parameters import annotations_of, name_of, parameters_of, type_name, unusable
from trellis.worker.threads import Threads

RESOURCES_MAX = 100
OPEN_S_MAX = 60.0
"""How long one resource may take to open. A worker that waits for ever looks alive and does nothing."""
CLOSE_S_MAX = 10.0
"""How long one resource may take to close. The next one is closed then all the same."""
EXPECTED = (
    "a resource is a generator function that yields it once (`-> AsyncIterator[Pool]`), a function that returns a"
    " context manager (`-> AbstractContextManager[Pool]`), or a class that is a context manager"
)

_log = log_of("trellis.worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    type: Any
    """The annotation by which handlers get it."""
    name: str
    factory: Callable[..., Any]
    """Returns a context manager, async or not, that yields the resource."""
    source: Callable[..., Any]
    """What the application registered. Its parameters say which resources it needs."""


def resource_of(source: Callable[..., Any]) -> Resource:
    """The resource that this function or class provides. Raises OptionInvalid."""
    if isinstance(source, type):
        if not (hasattr(source, "__aenter__") or hasattr(source, "__enter__")):
            raise unusable(source, EXPECTED)
        return Resource(type=source, name=name_of(source), factory=source, source=source)
    hint = annotations_of(source).get("return")
    arguments = get_args(hint)
    if inspect.iscoroutinefunction(source) or get_origin(hint) is None or not arguments:
        raise unusable(source, EXPECTED)
    factory = source
    if inspect.isasyncgenfunction(source):
        factory = asynccontextmanager(source)
    elif inspect.isgeneratorfunction(source):
        factory = contextmanager(source)
    return Resource(type=arguments[0], name=name_of(source), factory=factory, source=source)


def in_order(resources: Mapping[Any, Resource]) -> list[tuple[Resource, Mapping[str, Any]]]:
    """Each resource with the types that its parameters get, after those that it needs.

    Raises OptionInvalid for a parameter that is no resource, and for resources that need each other in a circle.
    """
    ordered: dict[Any, tuple[Resource, Mapping[str, Any]]] = {}

    def place(resource: Resource, above: tuple[Resource, ...]) -> None:
        if resource.type in ordered:
            return
        if resource in above:
            circle = (*above[above.index(resource) :], resource)
            raise OptionInvalid(
                option="resources",
                value=" -> ".join(one.name for one in circle),
                expected="they need each other in a circle, so none can be opened first",
            )
        needs = parameters_of(resource.source, given=0, takes_payload=False, known=resources).resources
        for needed in needs.values():
            place(resources[needed], (*above, resource))
        ordered[resource.type] = (resource, needs)

    for resource in resources.values():
        place(resource, ())
    return list(ordered.values())


class OpenResources:
    """The resources of one worker, from its start to the end of its drain.

    `replaced` are values to use instead of opening the resource of that type, for tests.
    """

    def __init__(self, resources: Mapping[Any, Resource], threads: Threads, replaced: Mapping[Any, Any]) -> None:
        for kind in replaced:
            if kind not in resources:
                names = ", ".join(type_name(one) for one in resources) or "none"
                raise OptionInvalid(
                    option="resources", value=type_name(kind), expected=f"no such resource; known: {names}"
                )
        self.values: dict[Any, Any] = dict(replaced)
        self._ordered = [one for one in in_order(resources) if one[0].type not in replaced]
        self._threads = threads
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Opens every resource. Raises ResourceFailed, after those that were open are closed again."""
        if not self._ordered:
            return
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(opened), name="resources")
        try:
            await asyncio.shield(opened)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Closes what is open, the last one first. Repeating this does nothing."""
        task, self._task = self._task, None
        if task is not None:
            self._stop.set()
            await task

    async def _live(self, opened: "asyncio.Future[None]") -> None:
        managers: list[tuple[Resource, Any]] = []
        try:
            for resource, needs in self._ordered:
                await self._enter(resource, needs, managers)
        except ResourceFailed as error:
            opened.set_exception(error)
        else:
            opened.set_result(None)
            await self._stop.wait()
        for resource, manager in reversed(managers):
            await self._exit(resource, manager)

    async def _enter(self, resource: Resource, needs: Mapping[str, Any], managers: list[tuple[Resource, Any]]) -> None:
        try:
            async with asyncio.timeout(OPEN_S_MAX):
                manager = resource.factory(**{name: self.values[kind] for name, kind in needs.items()})
                value = await self._call(manager, "enter", ())
        except Exception as error:
            took_long = isinstance(error, TimeoutError) and not str(error)
            detail = f"it took longer than {OPEN_S_MAX:g} s" if took_long else error_text(error)
            raise ResourceFailed(name=resource.name, type=type_name(resource.type), detail=detail) from error
        self.values[resource.type] = value
        managers.append((resource, manager))

    async def _exit(self, resource: Resource, manager: Any) -> None:
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._call(manager, "exit", (None, None, None))
        except Exception as error:  # noqa: BLE001 - the other resources are closed all the same
            _log.warning("resource_not_closed", resource=resource.name, error=error_text(error), exc_info=error)

    async def _call(self, manager: Any, verb: str, arguments: Sequence[Any]) -> Any:
        """Enters or exits a context manager; one that is not async does so on a thread, because it may block."""
        entered = getattr(manager, f"__a{verb}__", None)
        if entered is not None:
            return await cast("Awaitable[Any]", entered(*arguments))
        blocking = getattr(manager, f"__{verb}__", None)
        if blocking is None:
            raise TypeError(f"it gave {type(manager).__name__}, which is no context manager: {EXPECTED}")
        return await self._threads.run(lambda: blocking(*arguments))
