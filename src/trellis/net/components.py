"""Requests to another component of the instance at its one configured address, and its answers in problem documents."""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pydantic

from trellis.net.guard import FetchedResponse, GuardedClient, OutgoingPolicy
from trellis.net.targets import read_target

CONNECT_S = 5.0

ShapeT = TypeVar("ShapeT", bound=pydantic.BaseModel)


@dataclass(kw_only=True, slots=True)
class ComponentClient:
    """Sends requests to the component at `url`; no other address is ever asked. Size and time are bounded.

    `tls` verifies its certificate where the system's CAs do not. The client opens no connection before the first request.
    """

    url: str
    tls: ssl.SSLContext | None
    answer_bytes_max: int
    answer_s: float
    _client: GuardedClient | None = field(default=None, init=False)

    async def send(
        self, method: str, path: str, *, headers: Mapping[str, str], content: bytes | None = None
    ) -> FetchedResponse:
        """One request. Redirects are returned, not followed. Raises OutgoingError."""
        return await self._opened().send(method, self.url.rstrip("/") + path, headers=headers, content=content)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _opened(self) -> GuardedClient:
        """The client, created on first use. Raises UrlRefused."""
        if self._client is None:
            policy = OutgoingPolicy(
                origins=(read_target(self.url).origin,),
                public=False,
                answer_bytes_max=self.answer_bytes_max,
                connect_s=CONNECT_S,
                total_s=self.answer_s,
            )
            self._client = GuardedClient(policy, tls=self.tls)
        return self._client


class AnswerUnreadable(ValueError):
    """An answer does not have the shape that was expected. The text says where and why, without any value."""


def read_shape(shape: type[ShapeT], body: bytes) -> ShapeT:
    """The answer in this shape; raises AnswerUnreadable."""
    try:
        return shape.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "/".join(map(str, first["loc"])) or "the body"
        raise AnswerUnreadable(f"{where}: {first['msg']}") from None


def problem_fields(body: bytes) -> Mapping[str, Any]:
    """The fields of a problem document; empty if the body is none."""
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return cast("Mapping[str, Any]", fields) if isinstance(fields, Mapping) else {}


def problem_detail(body: bytes, chars_max: int) -> str:
    """`: ` and the detail of a problem document; empty if the body is none."""
    detail = problem_fields(body).get("detail")
    return f": {detail[:chars_max]}" if isinstance(detail, str) else ""
