"""Text from handlers and people: makes it storable, or checks whether it is."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any


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
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def no_such_field(loc: Sequence[int | str], known: Iterable[str], *, separator: str = ".") -> str:
    """That the field at this place does not exist, with the known field closest to its name."""
    near = nearest(str(loc[-1]), known)
    return f"{separator.join(map(str, loc))}: there is no such field" + (f" (did you mean {near}?)" if near else "")


def is_storable(text: str) -> bool:
    """Whether every ledger stores this text unchanged."""
    return text == storable(text)
