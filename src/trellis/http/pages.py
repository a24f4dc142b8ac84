"""Lists that are longer than one page."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from trellis.http.shapes import Page

ItemT = TypeVar("ItemT")

EVENTS_MAX = 1_000
"""Events of one answer, at most."""
PAGE_MAX = 200
"""Items of one page, at most. A longer list is read page by page."""


async def read_pages(
    read: Callable[[int, str | None], Awaitable[Page[ItemT]]], limit: int, cursor: str | None
) -> Page[ItemT]:
    """Up to `limit` items, and the cursor of the next ones. `read` takes the size of a page and its cursor."""
    items = list[ItemT]()
    while True:
        page = await read(min(PAGE_MAX, limit - len(items)), cursor)
        items += page.items
        cursor = page.next_cursor
        if cursor is None or len(items) >= limit:
            return Page(items=items, next_cursor=cursor)
