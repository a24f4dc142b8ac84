"""Text from handlers and people: makes it storable, or checks whether it is."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

NAME_CHARS_COMPARED = 200
"""How much of a misspelt name is compared with the known ones: a request may hold a name of a million characters."""


def storable(text: str | None) -> str | None:
    """The text with NUL characters and lone surrogates, which databases refuse, replaced."""
    if text is None:
        return None
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def error_message(error: BaseException) -> str:
    """The error's message; empty if it has none or its `__str__` fails."""
    with suppress(Exception):
        return str(error).strip()
    return ""


def safe_repr(value: Any, how: Callable[[Any], str] = repr) -> str:
    """`repr` of any object, or a placeholder if its own code fails."""
    with suppress(Exception):
        return how(value)
    return f"<{type(value).__name__} that cannot be shown>"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a misspelt one, or None."""
    return next(iter(difflib.get_close_matches(name[:NAME_CHARS_COMPARED], list(known), n=1)), None)


def no_such(what: str, name: str, known: Iterable[str]) -> str:
    """That there is nothing of this name, such as a field, with the known name closest to it."""
    near = nearest(name, known)
    return f"there is no such {what}" + (f" (did you mean {near}?)" if near else "")


def no_such_field(loc: Sequence[int | str], known: Iterable[str], *, separator: str = ".") -> str:
    """That the field at this place does not exist, with the known field closest to its name."""
    return f"{separator.join(map(str, loc))}: {no_such('field', str(loc[-1]), known)}"


def is_storable(text: str) -> bool:
    """Whether every ledger stores this text unchanged."""
    return text == storable(text)
