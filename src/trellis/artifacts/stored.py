"""Models that are kept as bytes: the same model always gives the same ones, and what is read back is what was written.

Reading refuses whatever does not fit, with one kind of error for each kind of document, and never looks at more bytes than its bound.
"""

import json
from typing import Any, ClassVar, Self

import pydantic

from trellis.engine.errors import InputError
from trellis.engine.text import is_storable
from trellis.storage.documents import encode

PROBLEMS_MAX = 5


def _check_storable(text: str) -> str:
    if not is_storable(text):
        raise ValueError("it holds a zero byte or half a surrogate pair, which is no text")
    return text


STORABLE = pydantic.AfterValidator(_check_storable)
"""Text that every ledger keeps as it is. It comes after bounds, so that those speak of characters."""


def problems_of(error: pydantic.ValidationError) -> str:
    """What does not fit, in one line, without the values."""
    found = error.errors(include_url=False, include_input=False, include_context=False)[:PROBLEMS_MAX]
    return "; ".join(f"{'/'.join(map(str, one['loc'])) or 'all of it'}: {_plain_message(one['msg'])}" for one in found)


def _plain_message(message: str) -> str:
    return message.removeprefix("Value error, ")


class StoredInvalid(InputError):
    """This is no {what}: {problems}."""


class StoredModel(pydantic.BaseModel):
    """A model with a name for errors and a bound for its bytes."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    what: ClassVar[str]
    bytes_max: ClassVar[int]
    invalid: ClassVar[type[StoredInvalid]] = StoredInvalid

    @classmethod
    def read(cls, body: bytes) -> Self:
        """The model in these bytes; raises `invalid`."""
        if len(body) > cls.bytes_max:
            problems = f"it has {len(body)} bytes and the limit is {cls.bytes_max}"
            raise cls.invalid(what=cls.what, problems=problems)
        try:
            return cls.model_validate_json(body)
        except pydantic.ValidationError as error:
            raise cls.invalid(what=cls.what, problems=problems_of(error)) from None

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The model with these values, as they would come from JSON; raises `invalid`."""
        try:
            body = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError):
            raise cls.invalid(what=cls.what, problems="it holds something that JSON cannot") from None
        try:
            return cls.model_validate_json(body)
        except pydantic.ValidationError as error:
            raise cls.invalid(what=cls.what, problems=problems_of(error)) from None

    def to_bytes(self) -> bytes:
        """The one form in which it is kept; raises `invalid` when that is too large."""
        body = encode(self.model_dump(mode="json"))
        if len(body) > self.bytes_max:
            problems = f"it has {len(body)} bytes and the limit is {self.bytes_max}"
            raise self.invalid(what=self.what, problems=problems)
        return body
