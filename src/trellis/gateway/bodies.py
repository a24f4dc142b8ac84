"""Request bodies, read strictly: a bound on bytes, time and depth, UTF-8 JSON without NaN, and no name twice in one object.

What two readers could understand differently is refused before anybody reads it; and who may not, has nothing of it read at all.
"""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute

from trellis.engine.text import is_storable
from trellis.gateway.callers import Requires
from trellis.gateway.problems import Problem

BODY_BYTES_MAX = 1024 * 1024
LARGE_BODY_BYTES_MAX = 10 * 1024 * 1024
BODY_S = 30.0
"""How long a body may take to arrive."""
DEPTH_MAX = 32
NUMBER_CHARS_MAX = 100


class StrictRequest(Request):
    """A request whose body is bounded and whose JSON means one thing only."""

    def __init__(self, request: Request, bytes_max: int, body_s: float = BODY_S) -> None:
        super().__init__(request.scope, request.receive)
        self._bytes_max, self._body_s = bytes_max, body_s

    async def body(self) -> bytes:
        """The whole body; raises Problem 408, 413, 415."""
        if not hasattr(self, "_body"):
            media = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            announced = self.headers.get("content-length", "")
            if announced.isdigit() and int(announced) > self._bytes_max:
                raise too_large(self._bytes_max)
            body = await self._bounded()
            if body and media != "application/json" and not media.endswith("+json"):
                sent = f"The content type is {media[:100]}" if media else "The body has no content type"
                raise Problem("UNSUPPORTED_MEDIA_TYPE", f"{sent}; send application/json.")
            self._body = bytes(body)
        return self._body

    async def _bounded(self) -> bytearray:
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_s):
                async for part in self.stream():
                    body += part
                    if len(body) > self._bytes_max:
                        raise too_large(self._bytes_max)
        except TimeoutError:
            detail = f"The body did not arrive within {self._body_s:g} s; send it at once."
            raise Problem("REQUEST_TIMEOUT", detail) from None
        return body

    async def json(self) -> Any:
        """The value of the body; raises Problem 422."""
        if not hasattr(self, "_json"):
            self._json = parse(await self.body())
        return self._json


class StrictRoute(APIRoute):
    """A route whose body is read strictly."""

    body_bytes_max = BODY_BYTES_MAX
    body_s = BODY_S

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, on a strict request."""
        handle, takes_body = super().get_route_handler(), self.body_field is not None
        rules = [one.call for one in self.dependant.dependencies if isinstance(one.call, Requires)]

        async def strictly(request: Request) -> Response:
            _check_address(request)
            strict = StrictRequest(request, self.body_bytes_max, self.body_s)
            for rule in rules if takes_body else ():
                await rule.admit(strict)
            if takes_body and await strict.body():
                await strict.json()  # here, because FastAPI would hide what is wrong with it
            return await handle(strict)

        return strictly


class LargeBodyRoute(StrictRoute):
    """For artifacts and for proposals of memory and logic (D25)."""

    body_bytes_max = LARGE_BODY_BYTES_MAX


def too_large(bytes_max: int) -> Problem:
    """The refusal of a body over the limit."""
    return Problem(
        "PAYLOAD_TOO_LARGE", f"The body has more than {bytes_max} bytes; store the data elsewhere and refer to it."
    )


def parse(body: bytes) -> Any:
    """The JSON value; raises Problem, which says where."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem("VALIDATION_FAILED", f"The body is not UTF-8 (byte {error.start}).") from None
    try:
        value = json.loads(
            text, object_pairs_hook=_once, parse_constant=_refuse_constant, parse_int=_whole, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Problem("VALIDATION_FAILED", f"The body is no JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise _too_deep() from None
    _check_tree(value)
    return value


def _check_address(request: Request) -> None:
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise Problem("VALIDATION_FAILED", "The address holds a zero character (%00), which no name here has.")


def _check_tree(value: Any) -> None:
    """Depth and texts, level by level: no recursion that a body could exhaust."""
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX + 1):
        for one in level:
            _check_texts(one)
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return
    raise _too_deep()


def _check_texts(one: Any) -> None:
    texts: Iterable[Any] = (
        (one,) if isinstance(one, str) else cast("dict[str, Any]", one) if isinstance(one, dict) else ()
    )
    for text in texts:
        if not is_storable(text):
            detail = f"The text {text[:50]!r} holds a character that cannot be stored: U+0000 or half of a pair."
            raise Problem("VALIDATION_FAILED", detail)


def _inside(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return cast("dict[str, Any]", one).values()
    return cast("list[Any]", one) if isinstance(one, list) else ()


def _too_deep() -> Problem:
    return Problem("VALIDATION_FAILED", f"The body is nested deeper than {DEPTH_MAX} levels.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise Problem("VALIDATION_FAILED", f"The name {twice[:100]!r} comes twice in one object.")
    return made


def _refuse_constant(text: str) -> NoReturn:
    raise Problem("VALIDATION_FAILED", f"{text} is no JSON number.")


def _finite(text: str) -> float:
    number = float(text) if len(text) <= NUMBER_CHARS_MAX else math.inf
    if not math.isfinite(number):
        raise Problem("VALIDATION_FAILED", f"The number {text[:NUMBER_CHARS_MAX]} is too large or too long.")
    return number


def _whole(text: str) -> int:
    if len(text) > NUMBER_CHARS_MAX:
        raise Problem("VALIDATION_FAILED", f"A number has {len(text)} digits; the limit is {NUMBER_CHARS_MAX}.")
    return int(text)
