"""Text that comes from handlers and people: made fit to be stored, or told apart from what is fit."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Characters that count as printable and yet show nothing: fillers, joiners of marks and variation selectors."""


def visible(text: str) -> str:
    r"""The text with every character that cannot be seen as `\uXXXX`: controls, zero widths, changes of direction.

    Inside JSON that is the same value, and a line of a log cannot look like something that it is not.
    """
    if text.isprintable() and IGNORABLE.search(text) is None:
        return text
    return "".join(one if one.isprintable() and IGNORABLE.match(one) is None else _escaped(one) for one in text)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def storable(text: str | None) -> str | None:
    """Without what a database refuses: errors of handlers may hold NUL characters and halves of surrogate pairs."""
    if text is None:
        return None
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def words_of(error: BaseException) -> str:
    """What an error says of itself; empty for one that says nothing, or whose own code fails when it is asked."""
    with suppress(Exception):
        return str(error).strip()
    return ""


def told(value: Any, how: Callable[[Any], str] = repr) -> str:
    """Any object in words; a stand-in for one whose own code fails when it is asked."""
    with suppress(Exception):
        return how(value)
    return f"<{type(value).__name__} that cannot be shown>"


def is_storable(text: str) -> bool:
    """Whether every ledger keeps this text as it is."""
    return text == storable(text)
