"""Pages of listings, and versions of documents, as HTTP names them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Query

from trellis.http.shapes import Page
from trellis.http_server.problems import Problem

__all__ = ["LIMIT_DEFAULT", "LIMIT_MAX", "Cursor", "Limit", "Page", "page_document"]


# Listings: a page of items and the cursor of the next one, never an offset.

LIMIT_DEFAULT = 50
LIMIT_MAX = 200

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="How many items at most.")]
Cursor = Annotated[str | None, Query(max_length=200, description="The `next_cursor` of the page before.")]


def page_document(items: Sequence[Mapping[str, Any]], next_cursor: str | None) -> dict[str, Any]:
    """The page as the JSON document that is sent."""
    return {"items": list(items), "next_cursor": next_cursor}


# Versions: an ETag is a document's version, for conditional reads and for changes of the version a client has seen.


def etag(version: int) -> str:
    """The strong ETag of a version."""
    return f'"{version}"'


def is_known(if_none_match: str | None, version: int) -> bool:
    """Whether the client already has this version."""
    if if_none_match is None:
        return False
    return etag(version) in {one.strip().removeprefix("W/") for one in if_none_match.split(",")}


def expected(if_match: str | None) -> int | None:
    """The version that a change is meant for; None for any. Raises Problem."""
    if if_match is None or if_match.strip() == "*":
        return None
    text = if_match.strip().removeprefix('"').removesuffix('"')
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise Problem("VALIDATION_FAILED", 'If-Match must be the ETag of the document, such as "3", or *.')
    return int(text)
