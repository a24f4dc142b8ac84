"""Encodes payloads and results: JSON bytes in the ledger, the handler's own types in Python.

The types come from the handler's annotations. A payload that does not fit is refused before anything is written (at
submit) or before the handler runs (in the worker).
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast, get_args, get_origin

import pydantic
import pydantic_core

from trellis.engine.errors import PayloadInvalid, PayloadTooLarge, PermanentError, ResultInvalid
from trellis.engine.jobs import PAYLOAD_BYTES_MAX, RESULT_BYTES_MAX, JobId, ReasonCode
from trellis.engine.retry_policy import error_text
from trellis.engine.text import nearest, no_such_field
from trellis.worker.parameters import annotations_of, unreadable_annotations

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")

NULL = b"null"
PROBLEMS_SHOWN = 5
_UNFIT = re.compile(r"Expected `([^`]+)`.*?\[(?:field_name='([^']*)', )?input_value=.*?, input_type=(\w+)\]", re.DOTALL)
"""A value that does not have the declared type, in the message of pydantic's serializer."""
_MAY_HAVE_FLOATS = re.compile(r"'type': '(?:float|any)'|'extra_fields_behavior': 'allow'")
"""In the schema of a type of which some value may be NaN."""
_WRITES_NAN_ITSELF = re.compile(r"'ser_json_inf_nan'|'when_used': 'json")
"""In the schema of a type that says how it writes NaN, or writes JSON by a function of its own."""
_ALIAS = re.compile(r"'validation_alias': '([^']*)'")
_FIELD = re.compile(
    r"'([^']*)': \{'type': '(?:model|dataclass|typed-dict)-field'|'type': 'dataclass-field', 'name': '([^']*)'"
)
SEARCHED_AT_ONCE = 100
"""Bodies that are copied together for a search: at most so many times the largest payload."""
MASKED = b'"**********"'
"""What pydantic writes instead of a secret."""
NO_JSON_NUMBER = "NaN and infinity are no JSON numbers; give None or text instead"
ASTERISKS = "a SecretStr would be stored as asterisks; pass a reference"
_SECRETS = (pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret)
_EXTRA = frozenset({"extra_forbidden", "unexpected_keyword_argument"})


@dataclass(frozen=True, slots=True)
class UnreadablePayload:
    """Why a stored payload does not fit its handler."""

    reason_code: ReasonCode
    detail: str


@dataclass(frozen=True, kw_only=True)
class Undo(Generic[PayloadT, ResultT]):
    """The payload of a compensation: the succeeded job to undo, with its payload and result."""

    # A compensation may declare fewer fields than the job has.
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(extra="ignore")

    job_id: JobId
    """The job to undo."""
    payload: PayloadT
    """The payload of that job."""
    result: ResultT
    """The result of that job."""


class Codec:
    """Encodes and decodes the payload and result of one job type."""

    def __init__(self, type_: str, payload: Any, result: Any, *, takes_payload: bool) -> None:
        self._type = type_
        self._takes_payload = takes_payload
        self._payload = pydantic.TypeAdapter[Any](payload)
        self._result = pydantic.TypeAdapter[Any](result)
        schema = repr(self._payload.core_schema)
        self._validate: Callable[[bytes], Any] = self._payload.validator.validate_json
        if "alias" in schema:
            # What is stored names the fields of a model; what comes from elsewhere may name their aliases.
            self._validate = partial(self._payload.validator.validate_json, by_alias=True, by_name=True)
            fields = {name for names in _FIELD.findall(schema) for name in names if name}
            if not fields.isdisjoint(_ALIAS.findall(schema)):
                self._validate = self._read_names_first
        self._writes_nan_as_null = bool(_MAY_HAVE_FLOATS.search(schema)) and not _WRITES_NAN_ITSELF.search(schema)
        self._was_read_back = False

    def _read_names_first(self, body: bytes) -> Any:
        """Where an alias is the name of another field, a name is the field's own: that is how it was stored."""
        with suppress(pydantic.ValidationError):
            return self._payload.validator.validate_json(body, by_alias=False, by_name=True)
        return self._payload.validator.validate_json(body, by_alias=True, by_name=True)

    def accept(self, payload: Any) -> tuple[Any, bytes]:
        """Returns a caller's payload as the handler's type, and encoded. Raises PayloadInvalid or PayloadTooLarge."""
        if not self._takes_payload and payload is not None:
            raise PayloadInvalid(type=self._type, detail="its handler takes no payload")
        try:
            value = self._accepted(payload)
            body = self._payload.dump_json(value, warnings="error")
        except (pydantic.ValidationError, pydantic_core.PydanticSerializationError) as error:
            raise PayloadInvalid(type=self._type, detail=_explain(error)) from error
        if len(body) > PAYLOAD_BYTES_MAX:
            raise PayloadTooLarge(size=len(body), limit=PAYLOAD_BYTES_MAX)
        # Asked here, because a submit of many pays for each call that most payloads do not need.
        looks_changed = b"NaN" in body or b"Infinity" in body or MASKED in body
        if looks_changed or (self._writes_nan_as_null and NULL in body) or not self._was_read_back:
            self._refuse_changed(value, body)
        return value, body

    def _refuse_changed(self, value: Any, body: bytes) -> None:
        """Refuses a payload that its worker could not read, or would read as another. Raises PayloadInvalid.

        A type that cannot be read back is found with its first payload. Every payload is searched for what pydantic writes
        as something else: numbers that JSON does not have, and secrets.
        """
        _refuse_unwritten(self._type, body, lambda: self._as_python(value, body))
        if self._writes_nan_as_null and NULL in body:
            plain = self._as_python(value, body)
            if plain is not None and _may_have_nan(plain):
                _refuse_at(self._type, plain, _is_no_json_number, NO_JSON_NUMBER)
        if not self._was_read_back:
            try:
                self._validate(body)
            except pydantic.ValidationError as error:
                detail = f"its worker could not read what would be stored ({_explain(error)})"
                raise PayloadInvalid(type=self._type, detail=detail) from error
            self._was_read_back = True

    def _as_python(self, value: Any, body: bytes) -> Any:
        """The payload as lists, mappings and single values; if the type cannot write that, what its JSON says."""
        try:
            return self._payload.serializer.to_python(value, warnings=False)
        except Exception:  # noqa: BLE001 - a serializer of the type, which wrote the JSON
            return pydantic_core.from_json(body)

    def payload_bytes(self, payload: Any) -> bytes:
        """Encodes a payload that is in the handler's type already."""
        return self._payload.dump_json(payload)

    def _accepted(self, payload: Any) -> Any:
        """Validates the payload and refuses unknown fields, so that a misspelt name is noticed at submit.

        Unknown fields are accepted where an enclosing type configures `extra` itself.
        """
        try:
            return self._payload.validate_python(payload, extra="forbid")
        except pydantic.ValidationError as error:
            problems = error.errors(include_url=False, include_input=False, include_context=False)
        try:
            value = self._payload.validate_python(payload)
        except pydantic.ValidationError as error:
            raise PayloadInvalid(type=self._type, detail=_explain(error) + _misspelt(problems)) from error
        unknown = [problem["loc"] for problem in problems if problem["type"] in _EXTRA]
        messages = [
            no_such_field(loc, _fields_of(owners[-1]))
            for loc in unknown
            if not _decides_extra_fields(owners := _owners(value, loc))
        ]
        if messages:
            raise PayloadInvalid(type=self._type, detail="; ".join(messages[:PROBLEMS_SHOWN]))
        return value

    def read_payload(self, body: bytes) -> Any | UnreadablePayload:
        """Decodes a payload for the handler, or says why it does not fit."""
        try:
            return self._validate(body)
        except pydantic.ValidationError as error:
            broken = any(problem["type"] == "json_invalid" for problem in error.errors(include_url=False))
            reason = ReasonCode.PARSE_ERROR if broken else ReasonCode.VALIDATION_FAILED
            return UnreadablePayload(reason, _explain(error))

    def result_bytes(self, value: Any) -> bytes:
        """Encodes a handler's result. Raises ResultInvalid or PayloadTooLarge."""
        try:
            body = self._result.dump_json(value, warnings="error")
        except pydantic_core.PydanticSerializationError as error:
            raise ResultInvalid(type=self._type, detail=_explain(error)) from error
        if len(body) > RESULT_BYTES_MAX:
            raise PayloadTooLarge(size=len(body), limit=RESULT_BYTES_MAX)
        return body

    def read_result(self, body: bytes) -> Any:
        """Decodes a stored result as the handler's return type."""
        return read_as(self._result, body, self._type)


class Serializer(Protocol):
    """Encodes the payload and the result of one job type instead of pydantic. Every method may raise any Exception."""

    def dumps(self, value: Any) -> bytes:
        """Returns the value as JSON, in UTF-8."""
        ...

    def loads(self, body: bytes, annotation: Any, /) -> Any:
        """Returns the value of this JSON. `annotation` is that of the handler's payload or of its return value."""
        ...


class SerializerCodec(Codec):
    """Encodes and decodes the payload and result of one job type by the application's serializer."""

    def __init__(self, type_: str, payload: Any, result: Any, *, takes_payload: bool, serializer: Serializer) -> None:
        self._type = type_
        self._takes_payload = takes_payload
        self._payload_type = payload
        self._result_type = result
        self._serializer = serializer

    def accept(self, payload: Any) -> tuple[Any, bytes]:
        if not self._takes_payload:
            if payload is not None:
                raise PayloadInvalid(type=self._type, detail="its handler takes no payload")
            return None, NULL
        try:
            body = self.payload_bytes(payload)
            value = self._serializer.loads(body, self._payload_type)
        except PayloadTooLarge:
            raise
        except Exception as error:
            raise PayloadInvalid(type=self._type, detail=error_text(error)) from error
        return value, body

    def payload_bytes(self, payload: Any) -> bytes:
        return within_payload_limit(_json_of(self._serializer.dumps(payload)))

    def read_payload(self, body: bytes) -> Any | UnreadablePayload:
        if not self._takes_payload:
            return None
        try:
            return self._serializer.loads(body, self._payload_type)
        except Exception as error:  # noqa: BLE001 - whatever the serializer raises, this payload does not fit
            reason = ReasonCode.VALIDATION_FAILED if _is_json(body) else ReasonCode.PARSE_ERROR
            return UnreadablePayload(reason, error_text(error))

    def result_bytes(self, value: Any) -> bytes:
        try:
            body = _json_of(self._serializer.dumps(value))
        except Exception as error:
            raise ResultInvalid(type=self._type, detail=error_text(error)) from error
        if len(body) > RESULT_BYTES_MAX:
            raise PayloadTooLarge(size=len(body), limit=RESULT_BYTES_MAX)
        return body

    def read_result(self, body: bytes) -> Any:
        try:
            return self._serializer.loads(body, self._result_type)
        except Exception as error:
            raise ResultInvalid(type=self._type, detail=error_text(error)) from error


def _json_of(body: Any) -> bytes:
    """The bytes that a serializer returned. Raises ValueError or TypeError if they are no JSON."""
    if not isinstance(body, bytes):
        raise TypeError(f"its serializer must return bytes from dumps, not {type(body).__name__}")
    if not _is_json(body):
        raise ValueError("its serializer must return JSON from dumps: ledgers, HTTP and the console show it")
    return body


def _is_json(body: bytes) -> bool:
    try:
        pydantic_core.from_json(body)
    except ValueError:
        return False
    return True


def codec_for(
    type_: str,
    handler: Callable[..., Any],
    *,
    batch: bool,
    payload_name: str | None = None,
    serializer: Serializer | None = None,
) -> Codec:
    """Builds the codec from a handler's annotations. Raises OptionInvalid."""
    hints, takes_payload = annotations_of(handler), batch or payload_name is not None
    if batch:
        items = next(iter(inspect.signature(handler).parameters))
        payload, result = _item_payload(hints.get(items)), Any
    else:
        payload = hints.get(payload_name, Any) if payload_name is not None else Any
        result = hints.get("return", Any)
    if serializer is not None:
        return SerializerCodec(type_, payload, result, takes_payload=takes_payload, serializer=serializer)
    try:
        return Codec(type_, payload, result, takes_payload=takes_payload)
    except (NameError, pydantic.errors.PydanticUserError) as error:
        raise unreadable_annotations(handler, error) from error


def any_json_bytes(payload: Any, type_: str) -> bytes:
    """Encodes the payload of a type whose handler is not in this process. Raises PayloadInvalid or PayloadTooLarge."""
    return all_json_bytes((payload,), type_)[0]


def state_json_bytes(value: Any, what: str) -> bytes:
    """Encodes a checkpoint or progress of a job: as a payload, but NaN and infinity may be what there is to report."""
    return _encoded((value,), what)[0]


def all_json_bytes(payloads: Iterable[Any], type_: str) -> list[bytes]:
    """Encodes payloads as `any_json_bytes` does one. A call for each would take longer than the encoding."""
    payloads = tuple(payloads)
    bodies = _encoded(payloads, type_)
    # One search of many is five times as quick as one of each.
    parts = (b"".join(bodies[start : start + SEARCHED_AT_ONCE]) for start in range(0, len(bodies), SEARCHED_AT_ONCE))
    if any(_has_nan(part) or MASKED in part for part in parts):
        for payload, body in zip(payloads, bodies, strict=True):
            _refuse_unwritten(type_, body, lambda payload=payload: payload)
    return bodies


def _encoded(payloads: Iterable[Any], type_: str) -> list[bytes]:
    try:
        bodies = list(map(pydantic_core.to_json, payloads))
    except (pydantic_core.PydanticSerializationError, ValueError) as error:
        raise PayloadInvalid(type=type_, detail=_explain(error)) from error
    if bodies and (longest := max(map(len, bodies))) > PAYLOAD_BYTES_MAX:
        raise PayloadTooLarge(size=longest, limit=PAYLOAD_BYTES_MAX)
    return bodies


def step_result_bytes(value: Any, step: str) -> bytes:
    """Encodes the result of a step. Raises PermanentError: the step has run, and another attempt would run it again."""
    try:
        return within_payload_limit(pydantic_core.to_json(value))
    except (PayloadTooLarge, pydantic_core.PydanticSerializationError, ValueError) as error:
        detail = f"the step {step!r} has run, and its result cannot be stored: {_explain(error)}"
        raise PermanentError(detail, reason_code=ReasonCode.VALIDATION_FAILED) from error


def read_as(adapter: "pydantic.TypeAdapter[Any]", body: bytes, type_: str) -> Any:
    """Decodes stored bytes as a type. Raises ResultInvalid."""
    try:
        return adapter.validate_json(body, by_alias=True, by_name=True)
    except pydantic.ValidationError as error:
        raise ResultInvalid(type=type_, detail=_explain(error)) from error


def within_payload_limit(body: bytes) -> bytes:
    """Returns the bytes unchanged. Raises PayloadTooLarge."""
    if len(body) > PAYLOAD_BYTES_MAX:
        raise PayloadTooLarge(size=len(body), limit=PAYLOAD_BYTES_MAX)
    return body


def _refuse_unwritten(type_: str, body: bytes, payload: Callable[[], Any]) -> None:
    """Refuses bytes that are no JSON, for a number that it does not have, or asterisks in the place of a secret."""
    if _has_nan(body):
        _refuse_at(type_, pydantic_core.from_json(body), _is_no_json_number, NO_JSON_NUMBER)
    if MASKED in body:
        _refuse_at(type_, payload(), lambda one: isinstance(one, _SECRETS), ASTERISKS)


def _has_nan(body: bytes) -> bool:
    """Whether JSON has the words for what is no number in JSON. A text may have them, too."""
    return b"NaN" in body or b"Infinity" in body


def _may_have_nan(plain: Any) -> bool:
    """Whether to walk through a value: written by the library, which takes a tenth of that, it names what NaN is."""
    try:
        return _has_nan(pydantic_core.to_json(plain))
    except (pydantic_core.PydanticSerializationError, ValueError):
        return True


def _refuse_at(type_: str, value: Any, is_wrong: Callable[[Any], bool], why: str) -> None:
    place = _place_of(value, is_wrong)
    if place is not None:
        raise PayloadInvalid(type=type_, detail=f"{'.'.join(place) or 'payload'}: {why}")


def _place_of(value: Any, is_wrong: Callable[[Any], bool]) -> tuple[str, ...] | None:
    """Where a value has the first part of this kind; None if it has none."""
    if is_wrong(value):
        return ()
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = cast("dict[Any, Any]", value).items()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = enumerate(cast("Iterable[Any]", value))
    places = ((str(key), _place_of(one, is_wrong)) for key, one in inner)
    return next(((key, *place) for key, place in places if place is not None), None)


def _is_no_json_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _owners(value: Any, loc: tuple[int | str, ...]) -> list[Any]:
    """Returns the objects that enclose a field, outermost first, skipping location parts that name a union branch."""
    owners = [value]
    for part in loc[:-1]:
        inner: Any = None
        if isinstance(value, list | tuple | dict):
            with suppress(LookupError, TypeError):
                inner = cast("Any", value)[part]
        else:
            inner = getattr(value, str(part), None)
        if inner is not None:
            value = inner
            owners.append(inner)
    return owners


def _decides_extra_fields(owners: list[Any]) -> bool:
    """Whether an enclosing type configures itself how to treat unknown fields."""
    configs: list[Any] = [
        getattr(owner, "model_config", None) or getattr(owner, "__pydantic_config__", None) for owner in owners
    ]
    return any("extra" in config for config in configs if config)


def _misspelt(problems: Sequence[Any]) -> str:
    """Names each unknown field that is spelt like a missing one of the same object."""
    missing = [problem["loc"] for problem in problems if problem["type"].startswith("missing")]
    sentence = ""
    for loc in (problem["loc"] for problem in problems if problem["type"] in _EXTRA):
        siblings = [str(other[-1]) for other in missing if other[:-1] == loc[:-1]]
        if nearest(str(loc[-1]), siblings):
            sentence += f"; {no_such_field(loc, siblings)}"
    return sentence


def _fields_of(owner: Any) -> list[str]:
    kind = cast("type[Any]", type(owner))
    return list(getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", ()))


def _item_payload(hint: Any) -> Any:
    """Extracts the payload type: `list[Item[Document]]` gives Document."""
    inner = get_args(hint)[0] if get_args(hint) else Any
    return get_args(inner)[0] if get_origin(inner) is not None and get_args(inner) else Any


def _explain(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):
        unfit = [
            f"{field or 'the value'}: expected {expected}, got {kind}"
            for expected, field, kind in _UNFIT.findall(str(error))
        ]
        return "; ".join(unfit[:PROBLEMS_SHOWN]) or str(error).strip()
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    lines = [f"{'.'.join(str(part) for part in p['loc']) or 'payload'}: {p['msg']}" for p in problems[:PROBLEMS_SHOWN]]
    more = len(problems) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
