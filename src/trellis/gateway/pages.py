"""Listings: a page of items and the cursor for the next one, never an offset."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Query

from trellis.http.shapes import Page

__all__ = ["LIMIT_DEFAULT", "LIMIT_MAX", "Cursor", "Limit", "Page", "page_document"]

LIMIT_DEFAULT = 50
LIMIT_MAX = 200

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="How many items at most.")]
Cursor = Annotated[str | None, Query(max_length=200, description="The `next_cursor` of the page before.")]


def page_document(items: Sequence[Mapping[str, Any]], next_cursor: str | None) -> dict[str, Any]:
    """As it is sent."""
    return {"items": list(items), "next_cursor": next_cursor}
