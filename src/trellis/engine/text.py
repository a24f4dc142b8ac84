"""Text that comes from handlers and people: made fit to be stored, or told apart from what is fit."""

import difflib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any


def storable(text: str | None) -> str | None:
    """Without what a database refuses: errors of handlers may hold NUL characters and halves of surrogate pairs."""
    if text is None:
        return None
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def error_message(error: BaseException) -> str:
    """What an error says of itself; empty for one that says nothing, or whose own code fails when it is asked."""
    with suppress(Exception):
        return str(error).strip()
    return ""


def safe_repr(value: Any, how: Callable[[Any], str] = repr) -> str:
    """Any object in words; a stand-in for one whose own code fails when it is asked."""
    with suppress(Exception):
        return how(value)
    return f"<{type(value).__name__} that cannot be shown>"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one was probably meant to be."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def is_storable(text: str) -> bool:
    """Whether every ledger keeps this text as it is."""
    return text == storable(text)
