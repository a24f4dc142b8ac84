"""What each parameter of a handler, middleware, error hook or resource gets: the payload, or a resource by its annotation."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, get_origin, get_type_hints

import pydantic

from trellis.engine.errors import OptionInvalid

ONE_PAYLOAD = "several values are one payload: put them into a dataclass"
_PLAIN_TYPES = (str, int, float, bool, bytes, list, tuple, dict, set)
_PLAIN_NAMES = frozenset(kind.__name__ for kind in _PLAIN_TYPES)
_CONTEXT_NAMES = frozenset({"ctx", "context"})
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """The parameters of one function after those that the worker gives by position."""

    payload: str | None
    """The name of the parameter for the payload; None if the function takes none."""
    resources: Mapping[str, Any]
    """The type of the resource that each other parameter gets, by the parameter's name."""


def parameters_of(
    function: Callable[..., Any], *, given: int, takes_payload: bool, known: Collection[Any]
) -> Parameters:
    """Sorts the parameters of a function. Raises OptionInvalid for one that neither is nor can be filled.

    The first `given` parameters get what the worker passes by position. Of the others, one whose annotation is a known
    resource type gets that resource; one more is the payload, where the function may take one.
    """
    hints = annotations_of(function)
    payload, resources = None, dict[str, Any]()
    for parameter in list(inspect.signature(function).parameters.values())[given:]:
        hint = hints.get(parameter.name)
        if _is_known(hint, known):
            resources[parameter.name] = hint
        elif takes_payload and payload is None:
            payload = parameter.name
        elif parameter.default is inspect.Parameter.empty and parameter.kind not in _UNNAMED:
            raise _unknown(function, parameter, known, payload)
    return Parameters(payload=payload, resources=resources)


def annotations_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The evaluated annotations of a function. Raises OptionInvalid for a name that its module does not have."""
    try:
        return get_type_hints(function.__init__ if isinstance(function, type) else function, include_extras=True)
    except NameError as error:
        raise unreadable_annotations(function, error) from error
    except TypeError as error:  # a partial, or an object that can be called
        raise unusable(
            function, "write it as a function (`def` or `async def`), whose annotations can be read"
        ) from error


def unreadable_annotations(function: Callable[..., Any], error: Exception) -> OptionInvalid:
    return OptionInvalid(
        option=f"the annotations of {name_of(function)}",
        value=str(error),
        expected="every type must be importable from the handler's module and have a JSON form",
    )


def check_given(function: Callable[..., Any], given: int, expected: str) -> None:
    """Raises OptionInvalid unless the function's first `given` parameters can be passed by position."""
    first = list(inspect.signature(function).parameters.values())[:given]
    if len(first) < given or any(parameter.kind not in _POSITIONAL for parameter in first):
        raise unusable(function, expected)


def check_context_first(handler: Callable[..., Any]) -> None:
    """Check that the first parameter of a handler is no payload. Raises OptionInvalid.

    Only what is certain is refused: an annotation with a plain type, a dataclass or a model of pydantic.
    """
    first = next(iter(inspect.signature(handler).parameters.values()))
    if first.name not in _CONTEXT_NAMES and _is_payload_type(first.annotation):
        shown = f"{first.name}: {type_name(first.annotation)}"
        raise unusable(handler, f"its first parameter is the context: write (ctx, {shown})")


def _is_payload_type(annotation: Any) -> bool:
    if isinstance(annotation, str):  # not evaluated: it may name a type that is defined further down
        return annotation.partition("[")[0] in _PLAIN_NAMES
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and (
        kind in _PLAIN_TYPES or is_dataclass(kind) or issubclass(kind, pydantic.BaseModel)
    )


def unusable(function: Callable[..., Any], expected: str) -> OptionInvalid:
    """The error for a function that cannot be what it is registered as."""
    return OptionInvalid(option="handler", value=name_of(function), expected=expected)


def name_of(function: Callable[..., Any]) -> str:
    """The name by which an author recognises a function of the application."""
    return getattr(function, "__qualname__", None) or repr(function)


def type_name(kind: Any) -> str:
    """The name of an annotation, as its author wrote it."""
    return getattr(kind, "__qualname__", None) or getattr(kind, "__name__", None) or str(kind)


def _is_known(hint: Any, known: Collection[Any]) -> bool:
    try:
        return hint in known
    except TypeError:  # an annotation that has no hash is no resource
        return False


def _unknown(
    function: Callable[..., Any], parameter: inspect.Parameter, known: Collection[Any], payload: str | None
) -> OptionInvalid:
    names = ", ".join(sorted(type_name(one) for one in known)) or "none"
    expected = f"annotate it with the type of a resource that @app.resource registers; known: {names}"
    if payload is not None:
        expected = f"a handler takes one payload: put {payload} and {parameter.name} into a dataclass, or {expected}"
    return OptionInvalid(
        option=f"parameter {parameter.name} of {name_of(function)}", value=str(parameter), expected=expected
    )
