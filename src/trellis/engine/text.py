"""Text from handlers and people: makes it storable, or checks whether it is."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

NAME_CHARS_COMPARED = 200
"""How much of a misspelt name is compared with the known ones: a request may hold a name of a million characters."""

_URL_PASSWORD = re.compile(r"(//[^/@:\s]*:)[^/@\s]*@")
_NAMED_SECRET = re.compile(
    r"""(?ix) ( (?: (password|passwd|pwd|api[_-]?key|access[_-]?key) | secret | token ) ["']? \s* )
    (?: ( [=:] \s* ) (["']) (?:(?!\4).)+ | ( = ) [^\s&"']+ | (?(2) ( : \s* ) [^\s&"']+ | (?!) ) )"""
)
"""A name with its value: in quotes, after an equals sign, or, where it is no word of prose, after a colon."""
_OPTION = re.compile(r"\?(?:application_name|connect_timeout|host|options|port|ssl\w*|target_session_attrs|user)=")
"""Where the options of an address begin. A password may have a `?` that should have been encoded."""
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+(?=\S*\d)[a-z0-9._~+/=-]{8,}")


def without_secrets(text: str) -> str:
    """The text with passwords of addresses, values named like a secret, and bearer tokens masked as `***`."""
    text = _BEARER.sub(r"\1 ***", _URL_PASSWORD.sub(r"\1***@", text))
    return _NAMED_SECRET.sub(_masked, text)


def masked_url(url: str) -> str:
    """The address with its password masked, also where the password has an @, / or # that should have been encoded."""
    scheme, separator, rest = without_secrets(url).partition("://")
    option = _OPTION.search(rest)
    end = option.start() if option is not None and "@" in rest[: option.start()] else len(rest)
    login, at, place = rest[:end].rpartition("@")
    user, colon, _ = login.partition(":")
    masked = f"{user}:***@{place}" if at and colon else rest[:end]
    return f"{scheme}{separator}{masked}{rest[end:]}"


def _masked(match: re.Match[str]) -> str:
    name, _, before_quote, quote, equals, colon = match.groups()
    return f"{name}{before_quote or ''}{quote or ''}{equals or ''}{colon or ''}***"


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


UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def counted(number: int, noun: str) -> str:
    """Formats a count: `1 job`, `2 jobs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Formats a duration with at most two units."""
    if abs(seconds) < 10:
        return f"{abs(seconds):.1f} s"
    left = round(abs(seconds))
    biggest = next(index for index, (size, _) in enumerate(UNITS) if left >= size)
    parts: list[str] = []
    for size, name in UNITS[biggest : biggest + 2]:
        whole, left = divmod(left, size)
        if whole:
            parts.append(f"{whole} {name}")
    return " ".join(parts)
