"""Versions as HTTP names them: an ETag is a document's version, so a client can ask for news and decide about what it saw."""

from trellis.web.problems import Problem


def etag(version: int) -> str:
    """The strong ETag of a version."""
    return f'"{version}"'


def is_known(if_none_match: str | None, version: int) -> bool:
    """Whether the client has this version already."""
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
