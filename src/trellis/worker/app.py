"""An application: job types with their handlers and options.

    app = App()

    @app.job("index.document", lease_s=60, max_attempts=5)
    async def index(ctx: Context, doc: Document) -> Indexed: ...

    @app.periodic("0 3 * * *", tz="Europe/Kyiv")
    @app.job("report.daily")
    async def report(ctx: Context) -> None: ...

A handler is `async def` (runs on the worker's event loop), `def` (runs on a bounded pool of threads), or, with
`batch=n`, an `async def` that takes a list of `Item`.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any, TypedDict, TypeVar, Unpack

from trellis.engine.errors import OptionInvalid, UnknownJobType
from trellis.engine.jobs import LEASE_S_DEFAULT, TYPE_PATTERN, Priority, TypeClaim, TypeOptions, heartbeat_for
from trellis.engine.option_values import SECONDS, check_number, check_text
from trellis.engine.retry_policy import OnExhausted, RetryPolicy, error_text
from trellis.engine.schedules import Misfire, Overlap, ScheduleSpec, checked_spec
from trellis.engine.text import nearest
from trellis.engine.uniqueness import OnConflict, UniqueRule, WhileHeld, check_declared_rule, checked_rule
from trellis.worker.options import KEY_LIMIT_MAX, HandlerRunner, JobOptions, OnLeaseDoubt, check_job_options
from trellis.worker.parameters import (
    ONE_PAYLOAD,
    Parameters,
    check_context_first,
    check_given,
    name_of,
    parameters_of,
    type_name,
    unusable,
)
from trellis.worker.payloads import Codec, Serializer, codec_for
from trellis.worker.resources import RESOURCES_MAX, Resource, in_order, resource_of

EnumT = TypeVar("EnumT", bound=StrEnum)
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])


class HandlerKind(Enum):
    """How the worker calls a handler."""

    ASYNC = "async"
    SYNC = "sync"
    BATCH = "batch"
    PROCESS = "process"


HOOKS_MAX = 50
"""How many middleware, and how many error hooks, one application may have."""


class AppHooks:
    """What one application has around its handlers, in the order of registration."""

    def __init__(self) -> None:
        self.middleware: list[Callable[..., Any]] = []
        self.on_error: list[Callable[..., Any]] = []
        self.resources: dict[Any, Resource] = {}
        self.included: list[AppHooks] = []
        """The hooks of the applications that this one includes."""

    def every_resource(self) -> Mapping[Any, Resource]:
        """The resources of the application and of all that it includes, by type. Raises OptionInvalid for two of a type."""
        merged, apps = dict[Any, Resource](), [self]
        for hooks in apps:
            _add_resources(merged, {kind: one for kind, one in hooks.resources.items() if merged.get(kind) is not one})
            apps += [one for one in hooks.included if one not in apps]
        return merged


class JobSettings(TypedDict, total=False):
    """The keyword arguments of `@app.job`; `JobOptions` says what each means."""

    lease_s: float
    heartbeat_s: float
    max_attempts: int
    retry: RetryPolicy
    on_exhausted: OnExhausted | str
    dlq_on_fail: bool
    max_deaths: int
    deadline_s: float | None
    timeout_s: float | None
    priority: Priority | str
    rate: float | None
    concurrency_key: Callable[[Any], str] | None
    """Returns the concurrency key of a payload. Jobs with the same key share `concurrency_limit` and `rate_per_key`."""
    concurrency_limit: int
    rate_per_key: float | None
    burst_per_key: int | None
    result_ttl_s: float | None
    compensation: str | None
    unique: str | Callable[[Any], str] | None
    """The unique key of the jobs of this type: `args` for the payload, a key, or a function of the payload."""
    while_: WhileHeld | str | None
    window_s: float | None
    on_conflict: OnConflict | str | None
    debounce_s: float | None
    debounce_max_s: float | None
    batch: int
    on_lease_doubt: OnLeaseDoubt | str
    runner: HandlerRunner | str | None
    serializer: Serializer | None
    """Encodes payload and result instead of pydantic; default: pydantic, by the handler's annotations."""


class JobSpec:
    """One registered job type."""

    def __init__(
        self,
        type_: str,
        handler: Callable[..., Any],
        options: JobOptions,
        concurrency_key: Callable[[Any], str] | None,
        serializer: Serializer | None = None,
        around: tuple[AppHooks, ...] = (),
        unique: str | Callable[[Any], str] | None = None,
    ) -> None:
        self.type = type_
        self.handler = handler
        self.options = options
        self.errors = options.errors
        self.concurrency_key = concurrency_key
        self.serializer = serializer
        self.around = around
        """The hooks of the applications that this type is part of, the including one first."""
        self._unique = unique
        self.unique_key = unique if callable(unique) else None
        self.unique_rule = _unique_rule(type_, options, unique)
        self.kind = _kind(handler, options)

    def within(self, hooks: AppHooks) -> "JobSpec":
        """This type as part of an application that includes its own."""
        around = (hooks, *self.around)
        return JobSpec(
            self.type, self.handler, self.options, self.concurrency_key, self.serializer, around, self._unique
        )

    @cached_property
    def parameters(self) -> Parameters:
        """Which parameters get the payload and the resources. Sorted on first use, when all resources are registered."""
        known = {kind for hooks in self.around for kind in hooks.every_resource()}
        return parameters_of(self.handler, given=1, takes_payload=self.kind is not HandlerKind.BATCH, known=known)

    @cached_property
    def takes_payload(self) -> bool:
        """Whether jobs of this type have a payload."""
        return self.kind is HandlerKind.BATCH or self.parameters.payload is not None

    @cached_property
    def codec(self) -> Codec:
        """Created on first use, so that annotations may name types defined further down."""
        is_batch = self.kind is HandlerKind.BATCH
        payload_name = None if is_batch else self.parameters.payload
        return codec_for(self.type, self.handler, batch=is_batch, payload_name=payload_name, serializer=self.serializer)

    @cached_property
    def middleware(self) -> tuple[Callable[..., Any], ...]:
        """The middleware around the handler, the outermost first."""
        return tuple(one for hooks in self.around for one in hooks.middleware)

    @cached_property
    def on_error(self) -> tuple[Callable[..., Any], ...]:
        """The hooks that are called when an attempt failed."""
        return tuple(one for hooks in self.around for one in hooks.on_error)

    @cached_property
    def is_plain(self) -> bool:
        """Whether a worker calls the handler alone: with neither middleware nor resources, in its own process."""
        return not (self.middleware or self.parameters.resources or self.kind is HandlerKind.PROCESS)

    @property
    def claim(self) -> TypeClaim:
        """What a worker claims from the ledger for this type."""
        return TypeClaim(type=self.type, lease_s=self.options.lease_s, heartbeat_s=self.options.heartbeat_s)

    @property
    def declared(self) -> TypeOptions:
        """The options that the ledger stores, for callers that submit without this application."""
        options = self.options
        return TypeOptions(
            type=self.type,
            priority=options.priority,
            max_attempts=options.max_attempts,
            max_deaths=options.max_deaths,
            deadline_s=options.deadline_s,
            concurrency_limit=options.concurrency_limit,
            keyed=self.concurrency_key is not None or options.rate_per_key is not None,
            compensation=options.compensation,
            unique=self.unique_rule,
            key_rate=options.key_rate,
        )

    def key_of(self, payload: Any) -> str | None:
        """Returns the concurrency key of a payload in the handler's type. Raises OptionInvalid if that fails."""
        return self._computed("concurrency_key", self.concurrency_key, payload)

    def unique_key_of(self, payload: Any) -> str | None:
        """Returns the unique key that the application computes for a payload. Raises OptionInvalid if that fails."""
        key = self._computed("unique", self.unique_key, payload)
        if key is None and self.unique_key is not None:
            raise OptionInvalid(option=f"unique of {self.type}", value=None, expected="its function must return a text")
        return key

    def _computed(self, option: str, function: Callable[[Any], Any] | None, payload: Any) -> str | None:
        if function is None:
            return None
        try:
            key: Any = function(payload)
        except Exception as error:
            expected = f"it must return a text for every payload; it raised {error_text(error)}"
            raise OptionInvalid(option=f"{option} of {self.type}", value=payload, expected=expected) from error
        if key is not None and not isinstance(key, str):
            expected = f"its function must return a text, not {type(key).__name__}"
            raise OptionInvalid(option=f"{option} of {self.type}", value=key, expected=expected)
        return key


@dataclass(frozen=True, slots=True)
class PeriodicHandler:
    """A schedule as `@app.periodic` gives it. Its job type is found when all handlers are registered."""

    handler: Callable[..., Any]
    spec: ScheduleSpec
    named: bool


class App:
    """A registry of job types. `testing=True` lifts the bounds on lease and heartbeat, for fast tests."""

    def __init__(self, *, testing: bool = False) -> None:
        self.testing = testing
        self._specs: dict[str, JobSpec] = {}
        self._periodic: list[PeriodicHandler] = []
        self.hooks = AppHooks()
        """Its middleware, error hooks and resources."""

    def job(self, type_: str, **settings: Unpack[JobSettings]) -> Callable[[HandlerT], HandlerT]:
        """Register a handler for a job type. Raises OptionInvalid."""
        if callable(type_):
            name = name_of(type_).rpartition(".")[2]
            raise unusable(type_, f'write @app.job("{name}"): the decorator takes the job type')
        checked_type(type_)
        key, serializer = settings.pop("concurrency_key", None), settings.pop("serializer", None)
        unique = settings.pop("unique", None)
        _check_key_function(key)
        options = _options(settings)
        check_job_options(options, testing=self.testing)
        _check_serializer(type_, serializer)

        def register(handler: HandlerT) -> HandlerT:
            self._add(JobSpec(type_, handler, options, key, serializer, (self.hooks,), unique))
            return handler

        return register

    def middleware(self, function: HandlerT) -> HandlerT:
        """Register an async function `(ctx, call_next)` around every handler of this application. Raises OptionInvalid.

        The first one registered is the outermost. `await call_next()` runs the rest and returns the handler's result. A
        middleware that returns a value replaces the result; one that returns None leaves it. What it raises is the
        outcome of the attempt. Further parameters get resources, by their annotations.
        """
        expected = "a middleware is `async def name(ctx, call_next)`"
        if not inspect.iscoroutinefunction(function):
            raise unusable(function, expected)
        check_given(function, 2, expected)
        _add_hook(self.hooks.middleware, function, "middleware")
        return function

    def on_error(self, function: HandlerT) -> HandlerT:
        """Register a function `(ctx, error)`, called for each failed attempt of this application's jobs.

        It may be async; otherwise it runs on a thread. It changes nothing: what it raises is logged. It is not called
        for a snooze, a cancelled job or an attempt that the worker released. Further parameters get resources, by their
        annotations. Raises OptionInvalid.
        """
        check_given(function, 2, "an error hook is `def name(ctx, error)` or `async def name(ctx, error)`")
        _add_hook(self.hooks.on_error, function, "error hook")
        return function

    def resource(self, source: HandlerT) -> HandlerT:
        """Register what handlers share in one worker, such as a pool of connections. Raises OptionInvalid.

        `source` is a generator function, async or not, that yields the resource once; a function that returns a context
        manager; or a class that is one. A worker opens all resources before it claims a job, and closes them in reverse
        order when it has drained. Handlers, middleware, error hooks and other resources get it by the annotation of a
        parameter: the type that the return annotation names.
        """
        resource = resource_of(source)
        _add_resources(self.hooks.resources, {resource.type: resource})
        return source

    def periodic(
        self,
        cron: str,
        *,
        tz: str = "UTC",
        name: str | None = None,
        payload: Any = None,
        misfire: Misfire | str = Misfire.ONCE,
        overlap: Overlap | str = Overlap.ALLOW,
        jitter_s: float = 0.0,
    ) -> Callable[[HandlerT], HandlerT]:
        """Submit a job of the handler's type at every instant of a cron expression. Raises OptionInvalid.

        A worker declares the schedule when it starts. `name` is the schedule's name; default: the job type. `misfire`
        says what happens to instants that no process was there to fire: `skip`, `once` or `all`. `overlap` says what
        happens while the job of an earlier instant has not ended: `allow`, `skip` or `queue`.
        """
        spec = ScheduleSpec(
            name=name or "unnamed",
            cron=cron,
            tz=tz,
            type="type",
            payload=payload,
            misfire=_member(Misfire, "misfire", misfire),
            overlap=_member(Overlap, "overlap", overlap),
            jitter_s=jitter_s,
        )
        checked = checked_spec(spec)

        def register(handler: HandlerT) -> HandlerT:
            self._periodic.append(PeriodicHandler(handler, checked, named=name is not None))
            return handler

        return register

    @property
    def periodic_handlers(self) -> Sequence["PeriodicHandler"]:
        """What `@app.periodic` registered, for an application that includes this one."""
        return tuple(self._periodic)

    def schedules(self) -> list[ScheduleSpec]:
        """The schedules of its job types. Raises OptionInvalid for one whose handler or payload does not fit."""
        specs = [self._schedule(one) for one in self._periodic]
        for spec in specs:
            if sum(other.name == spec.name for other in specs) > 1:
                raise OptionInvalid(option="name of a schedule", value=spec.name, expected="each has its own name")
        return specs

    def _schedule(self, periodic: "PeriodicHandler") -> ScheduleSpec:
        handler_spec = next((spec for spec in self if spec.handler is periodic.handler), None)
        if handler_spec is None:
            raise unusable(periodic.handler, "@app.periodic is for a handler that @app.job registers")
        if handler_spec.unique_key is not None:
            expected = "a schedule submits without the application: say unique='args', or give a key"
            raise OptionInvalid(option=f"unique of {handler_spec.type}", value="a function", expected=expected)
        payload, body = (
            handler_spec.codec.accept(periodic.spec.payload) if handler_spec.takes_payload else (None, b"null")
        )
        name = periodic.spec.name if periodic.named else handler_spec.type.lower()
        return checked_spec(
            replace(
                periodic.spec,
                name=name,
                type=handler_spec.type,
                payload=json.loads(body),
                concurrency_key=handler_spec.key_of(payload),
            )
        )

    def include(self, other: "App") -> None:
        """Add every job type, schedule and resource of another application.

        This application's middleware and error hooks apply to them too, around those of the other one.
        """
        self._periodic += other.periodic_handlers
        self.hooks.included.append(other.hooks)
        for spec in other:
            check_job_options(spec.options, testing=self.testing)
            self._add(spec.within(self.hooks))

    def spec(self, type_: str) -> JobSpec:
        """Return the registered type. Raises UnknownJobType, which lists the known ones."""
        try:
            return self._specs[type_]
        except KeyError:
            raise UnknownJobType(type=type_, known=", ".join(sorted(self._specs)) or "none") from None

    def check(self) -> None:
        """Check every handler's annotations and every reference between types. A worker does this before it claims."""
        if not self._specs:
            raise OptionInvalid(option="app", value="no job types", expected="register at least one with @app.job")
        known = self.hooks.every_resource()
        in_order(known)
        for spec in self:
            _ = spec.codec
            for function in (*spec.middleware, *spec.on_error):
                parameters_of(function, given=2, takes_payload=False, known=known)
            if spec.options.compensation is not None:
                self.spec(spec.options.compensation)
        self.schedules()

    def __iter__(self) -> Iterator[JobSpec]:
        return iter(self._specs.values())

    def __contains__(self, type_: str) -> bool:
        return type_ in self._specs

    def _add(self, spec: JobSpec) -> None:
        if spec.type in self._specs:
            raise OptionInvalid(option="job type", value=spec.type, expected="a type has one handler")
        self._specs[spec.type] = spec


def refuse_unknown(values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises OptionInvalid for an unknown option, with the nearest known name."""
    for name in sorted(set(values) - set(known)):
        hint = f"did you mean {near}?" if (near := nearest(name, known)) else f"choose of {', '.join(known)}"
        raise OptionInvalid(option=name, value=values[name], expected=f"there is no such option ({hint})")


_is_type = re.compile(TYPE_PATTERN).fullmatch


def checked_type(type_: str) -> str:
    """Returns the name unchanged. Raises OptionInvalid if it is no valid job type."""
    check_text("job type", type_)
    if not _is_type(type_):
        raise OptionInvalid(option="job type", value=type_, expected=f"it must match {TYPE_PATTERN}")
    return type_


def priority_of(value: Priority | str) -> Priority:
    """Returns a priority by name or value. Raises OptionInvalid."""
    if isinstance(value, Priority):
        return value
    try:
        return Priority[str(value).upper()]
    except KeyError:
        names = ", ".join(priority.name.lower() for priority in Priority)
        raise OptionInvalid(option="priority", value=value, expected=f"choose one of {names}") from None


_CHOICES: Mapping[str, type[StrEnum]] = {
    "on_exhausted": OnExhausted,
    "on_lease_doubt": OnLeaseDoubt,
    "runner": HandlerRunner,
    "while_": WhileHeld,
    "on_conflict": OnConflict,
}


def _options(settings: JobSettings) -> JobOptions:
    values: dict[str, Any] = dict(settings)
    known = list(JobSettings.__annotations__)
    refuse_unknown(values, known)
    lease_s = values.get("lease_s", LEASE_S_DEFAULT)
    check_number("lease_s", lease_s, of=SECONDS)
    values.setdefault("heartbeat_s", heartbeat_for(lease_s))
    if values.get("rate_per_key") is not None:
        values.setdefault("concurrency_limit", KEY_LIMIT_MAX)
    if "priority" in values:
        values["priority"] = priority_of(values["priority"])
    for name, kind in _CHOICES.items():
        if values.get(name) is not None:
            values[name] = _member(kind, name, values[name])
    return JobOptions(**values)


def _unique_rule(type_: str, options: JobOptions, unique: str | Callable[[Any], Any] | None) -> UniqueRule | None:
    """Returns the rule of these options, which must fit together. Raises OptionInvalid."""
    rule = checked_rule(
        unique=None if callable(unique) else unique,
        while_=options.while_,
        window_s=options.window_s,
        on_conflict=options.on_conflict,
        debounce_s=options.debounce_s,
        debounce_max_s=options.debounce_max_s,
        computed=callable(unique),
    )
    if rule is not None:
        check_declared_rule(rule, type_)
    return rule


def _member(kind: type[EnumT], option: str, value: str) -> EnumT:
    try:
        return kind(value)
    except ValueError:
        raise OptionInvalid(option=option, value=value, expected=f"choose one of {', '.join(kind)}") from None


def _kind(handler: Callable[..., Any], options: JobOptions) -> HandlerKind:
    is_async = inspect.iscoroutinefunction(handler)
    count = len(inspect.signature(handler).parameters)
    if options.runner is not None and (is_async or options.batch):
        raise unusable(handler, f"runner={options.runner.value!r} is for a `def` handler without batch")
    if options.batch:
        if not is_async or not count or _fillable(handler) > 1:
            raise unusable(handler, "a batch handler is `async def handler(items: list[Item[Payload]])`")
        return HandlerKind.BATCH
    if not count or _fillable(handler) > 2:
        raise unusable(
            handler, f"a handler takes (ctx) or (ctx, payload), and resources by their annotations; {ONE_PAYLOAD}"
        )
    check_context_first(handler)
    if inspect.isasyncgenfunction(handler):
        raise unusable(
            handler, "it has a `yield`, so it returns an async generator and never begins; return the result"
        )
    if options.runner is HandlerRunner.PROCESS:
        return HandlerKind.PROCESS
    return HandlerKind.ASYNC if is_async else HandlerKind.SYNC


def _fillable(handler: Callable[..., Any]) -> int:
    """How many parameters the worker must fill by position: the first, and those that cannot be a resource."""
    _, *others = inspect.signature(handler).parameters.values()
    return 1 + sum(one.annotation in {inspect.Parameter.empty, Any, "Any"} for one in others)


def _add_hook(hooks: list[Callable[..., Any]], function: Callable[..., Any], what: str) -> None:
    if function in hooks:
        raise OptionInvalid(option=what, value=name_of(function), expected="it is registered already")
    if len(hooks) >= HOOKS_MAX:
        raise OptionInvalid(option=what, value=len(hooks) + 1, expected=f"at most {HOOKS_MAX} of an application")
    hooks.append(function)


def _add_resources(known: dict[Any, Resource], new: Mapping[Any, Resource]) -> None:
    for kind, resource in new.items():
        if kind in known:
            raise OptionInvalid(
                option=f"resource {resource.name}",
                value=type_name(kind),
                expected=f"{known[kind].name} provides this type already; give one of them a type of its own",
            )
        known[kind] = resource
    if len(known) > RESOURCES_MAX:
        raise OptionInvalid(option="resources", value=len(known), expected=f"at most {RESOURCES_MAX}")


def _check_key_function(key: Any) -> None:
    if key is not None and not callable(key):
        expected = "it must be a function of the payload, such as lambda order: order.customer"
        raise OptionInvalid(option="concurrency_key", value=key, expected=expected)


def _check_serializer(type_: str, serializer: Any) -> None:
    if serializer is not None and not all(callable(getattr(serializer, name, None)) for name in ("dumps", "loads")):
        expected = "it needs the methods dumps(value) -> bytes and loads(body, annotation) -> value"
        raise OptionInvalid(option=f"serializer of {type_}", value=type(serializer).__name__, expected=expected)
