"""Calls a route's handler as FastAPI does, with everything that is the same for every request worked out once.

FastAPI walks the tree of a route's dependencies at every request, and asks of each again how it is called and which
parameters it takes. That is about half of the processor time of a small request. `request_plan` does it once per route.
It only covers what routes here use: coroutines, parameters from path, query and header, one JSON body.

Invariants:
- values are checked before anything is called. When one does not fit, nothing has happened yet, and FastAPI handles the
  request from the beginning: so every refusal is FastAPI's own;
- dependencies are called in FastAPI's order, each once per request; one that is `FromState` is looked up instead.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from fastapi import Request, Response
from fastapi._compat import ModelField
from fastapi.datastructures import DefaultPlaceholder
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import request_params_to_args
from fastapi.exceptions import ResponseValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams

Values = dict[str, Any]
_TEXT: tuple[Any, ...] = (str, str | None)


@dataclass(frozen=True, slots=True)
class _Text:
    """A parameter that is a text."""

    name: str
    sent_name: str
    """Its name in the request."""
    header: bytes
    """The same as a name of a header in the scope."""
    is_required: bool
    default: Any
    field: ModelField

    @classmethod
    def of(cls, field: ModelField) -> "_Text":
        is_required = field.field_info.is_required()
        sent_name = field.validation_alias or field.alias
        return cls(
            field.name,
            sent_name,
            sent_name.lower().encode("latin-1"),
            is_required,
            None if is_required else field.get_default(),
            field,
        )

    def take(self, given: Values, value: str | None) -> bool:
        """Add the value that was sent, or the default; False if it does not fit."""
        if value is None:
            given[self.name] = self.default
            return not self.is_required
        given[self.name], errors = self.field.validate(value)
        return not errors


class FromState:
    """A dependency: what the state of the application has under this path, such as `gateway.instance`."""

    def __init__(self, path: str) -> None:
        self.of = attrgetter(path)

    async def __call__(self, request: Request) -> Any:
        """The part of the application of this request."""
        return self.of(request.app.state)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters of one call from the path or the headers. Texts, which nearly all are, are read directly."""

    texts: tuple[_Text, ...]
    others: tuple[ModelField, ...]

    @classmethod
    def of(cls, fields: Sequence[ModelField]) -> "_Parameters":
        """The parameters of these fields."""
        texts = [one for one in fields if any(one.field_info.annotation == of for of in _TEXT) and not one.config]
        return cls(tuple(map(_Text.of, texts)), tuple(one for one in fields if one not in texts))

    @property
    def is_empty(self) -> bool:
        return not self.texts and not self.others

    def take_from_path(self, given: Values, request: Request) -> bool:
        """Add the values; False if one does not fit."""
        sent = request.path_params
        for one in self.texts:
            if not one.take(given, sent.get(one.sent_name)):
                return False
        return _take(given, self.others, sent)

    def take_from_headers(self, given: Values, request: Request) -> bool:
        """Add the values; False if one does not fit."""
        sent = request.scope["headers"]
        for one in self.texts:
            if not one.take(given, _header(sent, one.header)):
                return False
        return not self.others or _take(given, self.others, request.headers)


@dataclass(slots=True)
class _Call:
    """One dependency, or the handler itself: what it is called with."""

    call: Callable[..., Awaitable[Any]]
    path: "_Parameters"
    query: Sequence[ModelField]
    query_defaults: Values | None
    """The values without a query; None if one of them could be changed by a call."""
    headers: "_Parameters"
    body: Sequence[ModelField]
    request_name: str | None
    response_name: str | None
    of_state: Callable[[Any], Any] | None
    """How the state of the application has the result, of a call that has nothing else to do."""
    results: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """The parameters that are results of other calls: name, and number of the call."""

    @property
    def takes_values(self) -> bool:
        """Whether it takes anything from the request that is checked."""
        return not self.path.is_empty or bool(self.query) or not self.headers.is_empty or bool(self.body)

    def values(self, request: Request, body: Any) -> Values | None:
        """What the call takes from the request; None if FastAPI must say what is wrong."""
        given: Values = {}
        if not self.path.is_empty and not self.path.take_from_path(given, request):
            return None
        if self.query:
            if self.query_defaults is not None and not request.scope["query_string"]:
                given.update(self.query_defaults)
            elif not _take(given, self.query, request.query_params):
                return None
        if not self.headers.is_empty and not self.headers.take_from_headers(given, request):
            return None
        if self.body:
            (form,) = self.body
            given[form.name], errors = form.validate(body, loc=("body",))
            if errors:
                return None
        return given


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The calls of one route in their order. The last one is the handler."""

    route: APIRoute
    calls: tuple[_Call, ...]
    taking: tuple[tuple[int, _Call], ...]
    """The calls that take values from the request, each with its number."""

    async def respond(self, request: Request, body: Any) -> Response | None:
        """The response; None, before anything was called, if a value does not fit or an application replaces calls.

        `body` is the parsed JSON of a route that takes one.
        """
        app = request.scope["app"]
        if app.dependency_overrides:
            return None
        values: dict[int, Values] = {}
        for number, call in self.taking:
            taken = call.values(request, body)
            if taken is None:
                return None
            values[number] = taken
        around: Response | None = None
        results: list[Any] = []
        for number_of_call, call in enumerate(self.calls):
            if call.of_state is not None:
                results.append(call.of_state(app.state))
                continue
            given = values.get(number_of_call, {})
            for name, number in call.results:
                given[name] = results[number]
            if call.request_name is not None:
                given[call.request_name] = request
            if call.response_name is not None:
                around = around or _response_to_fill()
                given[call.response_name] = around
            results.append(await call.call(**given))
        returned = results[-1]
        return returned if isinstance(returned, Response) else self._response(returned, around)

    def _response(self, returned: Any, around: Response | None) -> Response:
        """The response of a handler that returned a value, as JSON of the type that the route declares."""
        of, route = self.route.response_field, self.route
        assert of is not None  # such a route has no plan
        value, errors = of.validate(returned, {}, loc=("response",))
        if errors:
            raise ResponseValidationError(errors=errors, body=returned)
        content = of.serialize_json(
            value,
            include=route.response_model_include,
            exclude=route.response_model_exclude,
            by_alias=route.response_model_by_alias,
            exclude_unset=route.response_model_exclude_unset,
            exclude_defaults=route.response_model_exclude_defaults,
            exclude_none=route.response_model_exclude_none,
        )
        status: Any = (around.status_code if around is not None else None) or route.status_code or 200
        response = Response(content, status_code=status, media_type="application/json")
        if around is not None:
            response.headers.raw.extend(around.headers.raw)
        return response


def request_plan(route: APIRoute) -> RequestPlan | None:
    """The plan of a route; None for a route of which only FastAPI knows how to call it."""
    returns = inspect.signature(route.endpoint, eval_str=True).return_annotation
    answers_itself = isinstance(returns, type) and issubclass(returns, Response)
    is_plain = isinstance(route.response_class, DefaultPlaceholder) and (route.status_code or 200) not in {204, 304}
    if not is_plain or (route.response_field is None and not answers_itself) or _embeds(route):
        return None
    calls: list[_Call] = []
    if _add(route.dependant, calls, {}) is None:
        return None
    return RequestPlan(route, tuple(calls), tuple(one for one in enumerate(calls) if one[1].takes_values))


def _add(dependant: Dependant, calls: list[_Call], known: dict[Callable[..., Any], int]) -> int | None:
    """Add the calls that a dependency needs and then its own; its number, or None if it is called in a special way."""
    call = dependant.call
    special = (
        dependant.cookie_params
        or dependant.websocket_param_name
        or dependant.background_tasks_param_name
        or dependant.security_scopes_param_name
        or dependant.own_oauth_scopes
        or not dependant.use_cache
        or (dependant.request_param_name and dependant.http_connection_param_name)
    )
    if special or call is None or not _is_coroutine(call):
        return None
    results: list[tuple[str, int]] = []
    for needed in dependant.dependencies:
        number = known.get(needed.call) if needed.call is not None else None
        if number is None:
            number = _add(needed, calls, known)
        if number is None:
            return None
        if needed.name is not None:
            results.append((needed.name, number))
    own = _Call(
        call=call,
        path=_Parameters.of(dependant.path_params),
        query=dependant.query_params,
        query_defaults=_query_defaults(dependant),
        headers=_Parameters.of(dependant.header_params),
        body=dependant.body_params,
        request_name=dependant.request_param_name or dependant.http_connection_param_name,
        response_name=dependant.response_param_name,
        of_state=call.of if isinstance(call, FromState) else None,
        results=results,
    )
    calls.append(own)
    known[call] = len(calls) - 1
    return known[call]


def _query_defaults(dependant: Dependant) -> Values | None:
    defaults, errors = request_params_to_args(dependant.query_params, QueryParams())
    is_shareable = all(isinstance(value, str | int | float | None) for value in defaults.values())
    return defaults if is_shareable and not errors else None


def _is_coroutine(call: Callable[..., Any]) -> bool:
    target: Any = call if inspect.isroutine(call) else type(call).__call__
    return inspect.iscoroutinefunction(target)


def _embeds(route: APIRoute) -> bool:
    """Whether the body has more than one part, each under its name. No route here has that."""
    form = route.body_field
    return form is not None and [*map(id, route.dependant.body_params)] != [id(form)]


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """The first header of this name, as the framework reads it; None if there is none."""
    for sent_name, value in headers:
        if sent_name == name:
            return value.decode("latin-1")
    return None


def _take(given: Values, wanted: Sequence[ModelField], sent: Mapping[str, Any]) -> bool:
    """Add the values of these parameters, read by FastAPI; False if one does not fit."""
    if not wanted:
        return True
    taken, errors = request_params_to_args(wanted, sent)
    given.update(taken)
    return not errors


def _response_to_fill() -> Response:
    """What a handler sets headers and status on. FastAPI gives the same to its handlers."""
    response = Response()
    del response.headers["content-length"]
    response.status_code = None  # type: ignore[assignment]
    return response
