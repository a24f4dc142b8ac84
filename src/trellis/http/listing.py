"""Listings of any length, fetched in the pages that a gateway gives."""

from typing import Any, TypeVar

import pydantic

from trellis.engine.errors import OptionInvalid
from trellis.http.calls import GatewayCalls
from trellis.http.errors import AnswerInvalid
from trellis.http.shapes import Page

LIMIT_DEFAULT = 50
LIMIT_MAX = 1_000_000
PAGE_MAX = 200

ItemT = TypeVar("ItemT", bound=pydantic.BaseModel)


async def listed(
    calls: GatewayCalls, item: type[ItemT], path: str, limit: int, cursor: str | None = None, /, **filters: Any
) -> Page[ItemT]:
    """At most `limit` items, and the cursor to go on with."""
    if not 1 <= limit <= LIMIT_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"it must be from 1 to {LIMIT_MAX}")
    items: list[ItemT] = []
    while True:
        wanted = min(PAGE_MAX, limit - len(items))
        page = await calls.get(Page[item], path, limit=wanted, cursor=cursor, **filters)
        items += page.items
        if page.next_cursor is not None and page.next_cursor == cursor:
            raise AnswerInvalid(request=f"GET {path}", reason="its next_cursor leads back to itself")
        cursor = page.next_cursor
        if cursor is None or len(items) >= limit:
            return Page[item](items=items, next_cursor=cursor)
