"""Payloads in and results out: JSON bytes at the ledger, the handler's own types inside.

The types come from the handler's annotations. What does not fit is refused before anything is written (submit) or
before user code runs (worker).
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

import pydantic
import pydantic_core

from trellis.engine.errors import OptionInvalid, PayloadInvalid, PayloadTooLarge, ResultInvalid
from trellis.engine.jobs import PAYLOAD_BYTES_MAX, RESULT_BYTES_MAX, JobId, ReasonCode
from trellis.engine.text import nearest

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")

NULL = b"null"
PROBLEMS_SHOWN = 5
_EXTRA = frozenset({"extra_forbidden", "unexpected_keyword_argument"})


@dataclass(frozen=True, slots=True)
class UnreadablePayload:
    """The stored payload does not fit the handler."""

    reason_code: ReasonCode
    detail: str


@dataclass(frozen=True, kw_only=True)
class Undo(Generic[PayloadT, ResultT]):
    """What a compensation gets: the succeeded job it undoes, with what went in and what came out."""

    # It may name fewer fields than the job had: it takes what it needs.
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(extra="ignore")

    job_id: JobId
    """The job to undo."""
    payload: PayloadT
    """What it was given."""
    result: ResultT
    """What it returned."""


class Codec:
    """Payload and result of one job type."""

    def __init__(self, type_: str, payload: Any, result: Any, *, takes_payload: bool) -> None:
        self._type = type_
        self._takes_payload = takes_payload
        self._payload = pydantic.TypeAdapter[Any](payload)
        self._result = pydantic.TypeAdapter[Any](result)
        self._validate = self._payload.validator.validate_json

    def payload_bytes(self, payload: Any) -> bytes:
        """A caller's payload as it is stored; raises PayloadInvalid, PayloadTooLarge."""
        return self.accept(payload)[1]

    def accept(self, payload: Any) -> tuple[Any, bytes]:
        """A caller's payload as the handler's type, and as it is stored; raises PayloadInvalid, PayloadTooLarge."""
        if not self._takes_payload and payload is not None:
            raise PayloadInvalid(type=self._type, detail="its handler takes no payload")
        try:
            value = self._accepted(payload)
            body = self._payload.dump_json(value, warnings="error")
        except (pydantic.ValidationError, pydantic_core.PydanticSerializationError) as error:
            raise PayloadInvalid(type=self._type, detail=_explain(error)) from error
        return value, within_payload_limit(body)

    def _accepted(self, payload: Any) -> Any:
        """The payload as its type. A field that would be dropped is refused, unless a type around it says itself what
        becomes of such fields: a misspelt name is noticed here or never.
        """
        try:
            return self._payload.validate_python(payload, extra="forbid")
        except pydantic.ValidationError as error:
            problems = error.errors(include_url=False, include_input=False, include_context=False)
        value = self._payload.validate_python(payload)
        unknown = [problem["loc"] for problem in problems if problem["type"] in _EXTRA]
        told = [
            _no_such_field(loc, owners[-1])
            for loc in unknown
            if not _decides_extra_fields(owners := _owners(value, loc))
        ]
        if told:
            raise PayloadInvalid(type=self._type, detail="; ".join(told[:PROBLEMS_SHOWN]))
        return value

    def read_payload(self, body: bytes) -> Any | UnreadablePayload:
        """What the handler gets, or why it cannot get it."""
        try:
            return self._validate(body)
        except pydantic.ValidationError as error:
            broken = any(problem["type"] == "json_invalid" for problem in error.errors(include_url=False))
            reason = ReasonCode.PARSE_ERROR if broken else ReasonCode.VALIDATION_FAILED
            return UnreadablePayload(reason, _explain(error))

    def result_bytes(self, value: Any) -> bytes:
        """A handler's result as it is stored; raises ResultInvalid, PayloadTooLarge."""
        try:
            body = self._result.dump_json(value, warnings="error")
        except pydantic_core.PydanticSerializationError as error:
            raise ResultInvalid(type=self._type, detail=_explain(error)) from error
        if len(body) > RESULT_BYTES_MAX:
            raise PayloadTooLarge(size=len(body), limit=RESULT_BYTES_MAX)
        return body

    def read_result(self, body: bytes) -> Any:
        """A stored result as the handler's return type."""
        return read_as(self._result, body, self._type)


def codec_for(type_: str, handler: Callable[..., Any], *, batch: bool) -> Codec:
    """The codec that a handler's annotations describe."""
    parameters = list(inspect.signature(handler).parameters.values())
    takes_payload = batch or len(parameters) > 1
    try:
        hints = get_type_hints(handler, include_extras=True)
        if batch:
            payload, result = _item_payload(hints.get(parameters[0].name)), Any
        else:
            payload = hints.get(parameters[1].name, Any) if takes_payload else Any
            result = hints.get("return", Any)
        return Codec(type_, payload, result, takes_payload=takes_payload)
    except (NameError, pydantic.errors.PydanticUserError) as error:
        raise OptionInvalid(
            option=f"the annotations of {handler.__qualname__}",
            value=str(error),
            expected="every type must be importable from the handler's module and have a JSON form",
        ) from error


def any_json_bytes(payload: Any, type_: str) -> bytes:
    """The payload of a type whose handler this process does not know."""
    try:
        body = pydantic_core.to_json(payload)
    except (pydantic_core.PydanticSerializationError, ValueError) as error:
        raise PayloadInvalid(type=type_, detail=_explain(error)) from error
    return within_payload_limit(body)


def read_as(adapter: "pydantic.TypeAdapter[Any]", body: bytes, type_: str) -> Any:
    """Stored bytes as a type; raises ResultInvalid."""
    try:
        return adapter.validate_json(body)
    except pydantic.ValidationError as error:
        raise ResultInvalid(type=type_, detail=_explain(error)) from error


def within_payload_limit(body: bytes) -> bytes:
    """The same bytes; raises PayloadTooLarge."""
    if len(body) > PAYLOAD_BYTES_MAX:
        raise PayloadTooLarge(size=len(body), limit=PAYLOAD_BYTES_MAX)
    return body


def _owners(value: Any, loc: tuple[int | str, ...]) -> list[Any]:
    """What stands around a field, from the outside in; names that only say which kind of a union was tried are passed over."""
    found = [value]
    for part in loc[:-1]:
        inner: Any = None
        if isinstance(value, list | tuple | dict):
            with suppress(LookupError, TypeError):
                inner = cast("Any", value)[part]
        else:
            inner = getattr(value, str(part), None)
        if inner is not None:
            value = inner
            found.append(inner)
    return found


def _decides_extra_fields(owners: list[Any]) -> bool:
    """Whether a type around a field says itself what happens to fields that it does not have."""
    configs: list[Any] = [
        getattr(owner, "model_config", None) or getattr(owner, "__pydantic_config__", None) for owner in owners
    ]
    return any("extra" in config for config in configs if config)


def _no_such_field(loc: tuple[int | str, ...], owner: Any) -> str:
    kind = cast("type[Any]", type(owner))
    known: list[str] = list(getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", ()))
    near = nearest(str(loc[-1]), known)
    return f"{'.'.join(map(str, loc))}: there is no such field" + (f" (did you mean {near}?)" if near else "")


def _item_payload(hint: Any) -> Any:
    """`list[Item[Document]]` → Document."""
    inner = get_args(hint)[0] if get_args(hint) else Any
    return get_args(inner)[0] if get_origin(inner) is not None and get_args(inner) else Any


def _explain(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return str(error).strip()
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    lines = [f"{'.'.join(str(part) for part in p['loc']) or 'payload'}: {p['msg']}" for p in problems[:PROBLEMS_SHOWN]]
    more = len(problems) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
