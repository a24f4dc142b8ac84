"""Checks of the values that a program gives for an option: their type first, then their bounds.

A value of the wrong type is refused with the option's name and what to write instead, where Python would only say that it
cannot compare or measure it.
"""

from collections.abc import Collection, Mapping
from decimal import Decimal
from enum import StrEnum
from numbers import Real
from typing import Any, TypeVar, cast

from trellis.engine.errors import OptionInvalid

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)

SECONDS = "seconds"
CLAIMS_A_SECOND = "claims a second; 10 a minute is 10/60"
"""The unit of a rate, with an example, because `"10/m"` is how many other systems write it."""

VALUE_CHARS_SHOWN = 50
"""How much of a long text a refusal repeats."""


def check_number(option: str, value: Any, *, of: str = "") -> None:
    """Check that a value is a number; `of` is its unit. True and False are none. Raises OptionInvalid."""
    if isinstance(value, bool) or not isinstance(value, int | float | Real | Decimal):
        raise OptionInvalid(option=option, value=value, expected=f"it must be a number{of and f' of {of}'}")


def check_within(option: str, value: Any, low: float, high: float, *, of: str = "") -> None:
    """Check that a value is a number within bounds; `of` is its unit. Raises OptionInvalid."""
    check_number(option, value, of=of)
    if not low <= value <= high:  # also refuses NaN
        unit = of.partition(";")[0]
        raise OptionInvalid(
            option=option, value=value, expected=f"it must be from {low:g} to {high:g}{unit and f' {unit}'}"
        )


def check_whole(option: str, value: Any, low: int, high: int) -> None:
    """Check that a value is a whole number within bounds. Raises OptionInvalid."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionInvalid(option=option, value=value, expected=f"it must be a whole number from {low} to {high}")
    if not low <= value <= high:
        raise OptionInvalid(option=option, value=value, expected=f"it must be from {low} to {high}")


def check_listed(option: str, value: Any, expected: str) -> None:
    """Check that a value is a list, or alike; a text or a mapping is none. Raises OptionInvalid with `expected`."""
    if type(value) is list:  # nearly always, and the other questions take ten times as long
        return
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise OptionInvalid(option=option, value=cast("object", value), expected=expected)


def check_text(option: str, value: Any, expected: str = "it must be a text") -> None:
    """Check that a value is a text. Raises OptionInvalid with `expected` otherwise."""
    if not isinstance(value, str):
        raise OptionInvalid(option=option, value=value, expected=expected)


def check_bool(option: str, value: Any) -> None:
    """Check that a value is True or False: a text such as "no" counts as true in Python. Raises OptionInvalid."""
    if not isinstance(value, bool):
        raise OptionInvalid(option=option, value=value, expected="it must be True or False")


def check_choice(kind: type[ChoiceT], option: str, value: Any) -> ChoiceT:
    """The member of an enumeration that a value names. Raises OptionInvalid."""
    try:
        return kind(value)
    except ValueError:
        given = value[:VALUE_CHARS_SHOWN] if isinstance(value, str) else value
        raise OptionInvalid(option=option, value=given, expected=f"choose one of {', '.join(kind)}") from None
