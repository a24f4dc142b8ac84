"""Fields taken out of a table one by one, each with what is expected of it.

A field that does not fit becomes a problem and yields a stand-in, so that every field is looked at. Whoever reads a table asks
`problems` before using anything: a stand-in never leaves a file that has problems.
"""

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import StrEnum
from typing import TypeVar

from trellis.agents.frontmatter import (
    FrontMatterProblem,
    ListValue,
    Scalar,
    ScalarKind,
    TableEntry,
    TableValue,
    quoted_for_message,
)

Choice = TypeVar("Choice", bound=StrEnum)

SUGGESTION_SIMILARITY_MIN = 0.7
"""How alike two words are (0 to 1) before one is suggested for the other."""
_WHOLE = re.compile(r"\d{1,9}")
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_STAND_IN_MOMENT = datetime(1970, 1, 1, tzinfo=UTC)


class FieldReader:
    """The fields of one table. `within` is the path that leads to it, such as `triggers.`."""

    def __init__(
        self,
        table: TableValue,
        problems: list[FrontMatterProblem],
        *,
        unread: frozenset[str] = frozenset(),
        within: str = "",
    ) -> None:
        self._table = table
        self._problems = problems
        self._unread = unread
        self._within = within
        self._asked: list[str] = []
        self._missing: dict[str, str] = {}

    def text(self, name: str, *, chars_max: int, lines: bool = False) -> str:
        """Text that is not blank, in one line unless `lines`."""
        value = self._scalar(name, f"text of 1 to {chars_max} characters", lines=lines)
        if value is None:
            return ""
        if value.kind is not ScalarKind.TEXT:
            self._wrong(name, value.line, f"{value.text} reads as {value.kind}", "text: put it in quotes")
        elif not value.text.strip() or len(value.text) > chars_max:
            self._wrong(
                name,
                value.line,
                f"{quoted_for_message(value.text)} does not fit",
                f"text of 1 to {chars_max} characters",
            )
        elif not lines and not value.text.isprintable():
            self._wrong(
                name, value.line, f"{quoted_for_message(value.text)} has a character without a shape", "plain text"
            )
        return value.text

    def matching(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        """Text of a certain form; a number without quotes is judged as it is written."""
        value = self._scalar(name, expected)
        if value is None:
            return ""
        if value.kind is ScalarKind.NOTHING or not pattern.fullmatch(value.text):
            self._wrong(name, value.line, f"{quoted_for_message(value.text)} does not fit", expected)
        return value.text

    def choice(self, name: str, choices: type[Choice], default: Choice | None = None) -> Choice:
        """One of the words of an enumeration."""
        stand_in = default or next(iter(choices))
        if default is not None and name not in self._table.entries:
            self._asked.append(name)
            return default
        value = self._scalar(name, f"one of {', '.join(choices)}")
        return stand_in if value is None else self._chosen(name, value, choices) or stand_in

    def choices(self, name: str, choices: type[Choice], *, required: bool = True) -> tuple[Choice, ...]:
        """Some of the words of an enumeration, each once."""
        expected = f"a list of {', '.join(choices)}"
        entry = self._entry(name, expected, required=required)
        if entry is None or (not required and _is_empty(entry)):
            return ()
        if not isinstance(entry.value, ListValue):
            self._wrong(name, entry.line, "this is no list", f"{expected}, such as [{next(iter(choices))}]")
            return ()
        if required and not entry.value.items:
            self._wrong(name, entry.line, "the list is empty", expected)
        found: list[Choice] = []
        for item in entry.value.items:
            if not isinstance(item, Scalar):
                self._wrong(name, item.line, "an item is no single word", f"one of {', '.join(choices)}")
                continue
            chosen = self._chosen(name, item, choices)
            if chosen in found:
                self._wrong(name, item.line, f"{quoted_for_message(item.text)} comes twice", "it once")
            elif chosen is not None:
                found.append(chosen)
        return tuple(found)

    def moment(self, name: str) -> datetime:
        """A moment of ISO 8601 with its offset; a day alone is its first moment in UTC."""
        expected = "a moment such as 2026-02-14T08:00:00Z"
        value = self._scalar(name, expected)
        if value is None:
            return _STAND_IN_MOMENT
        try:
            moment = datetime.fromisoformat(value.text)
        except ValueError:
            moment = None
        if moment is not None and _DAY.fullmatch(value.text):
            return moment.replace(tzinfo=UTC)
        if moment is None or moment.tzinfo is None:
            self._wrong(
                name, value.line, f"{quoted_for_message(value.text)} does not fit", f"{expected}, with Z or an offset"
            )
            return _STAND_IN_MOMENT
        return moment

    def whole(self, name: str, *, low: int, high: int, default: int) -> int:
        """A whole number between bounds."""
        value = self._optional(name, f"a whole number from {low} to {high}")
        if value is None:
            return default
        if not _WHOLE.fullmatch(value.text) or not low <= int(value.text) <= high:
            self._wrong(
                name,
                value.line,
                f"{quoted_for_message(value.text)} does not fit",
                f"a whole number from {low} to {high}",
            )
            return default
        return int(value.text)

    def number(self, name: str, *, low: float, high: float, default: float) -> float:
        """A number between bounds."""
        value = self._optional(name, f"a number from {low} to {high}")
        if value is None:
            return default
        number = float(value.text) if _NUMBER.fullmatch(value.text) else math.nan
        if not low <= number <= high:
            self._wrong(
                name, value.line, f"{quoted_for_message(value.text)} does not fit", f"a number from {low} to {high}"
            )
            return default
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._optional(name, "true or false")
        if value is None:
            return default
        if value.text not in {"true", "false"}:
            hint = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.text.lower())
            hint = hint or _nearest_name(value.text.lower(), ("true", "false"))
            self._wrong(name, value.line, f"{quoted_for_message(value.text)} does not fit", "true or false", hint)
        return value.text == "true"

    def optional_text(self, name: str, expected: str) -> tuple[str, int] | None:
        """Text and its line, or None if the field is left out or empty."""
        value = self._optional(name, expected)
        return None if value is None or value.kind is ScalarKind.NOTHING else (value.text, value.line)

    def form(self, name: str) -> "FieldReader":
        """The fields of a table inside this one; an empty one where it is left out."""
        entry = self._entry(name, "fields of its own", required=False)
        table = entry.value if entry else None
        if entry is not None and not isinstance(table, TableValue) and not _is_empty(entry):
            self._wrong(name, entry.line, "this is no table", "fields of its own, indented, one in each line")
        known = table if isinstance(table, TableValue) else TableValue(line=0, entries={})
        return FieldReader(known, self._problems, within=f"{self._within}{name}.")

    def close(self) -> None:
        """Every field that nobody asked for is unknown, and one that was asked for in vain is missing.

        A name that is nearly the missing one is one mistake, not two.
        """
        for name, entry in self._table.entries.items():
            if name not in self._asked:
                hint = _nearest_name(name.lower(), self._missing) or _nearest_name(name.lower(), self._asked)
                self._missing.pop(hint or "", None)
                self._wrong(name, entry.line, "there is no such field", f"one of {', '.join(self._asked)}", hint)
        for name, expected in self._missing.items():
            self._wrong(name, 1, "the field is missing", expected)

    def wrong(self, name: str, line: int, wrong: str, expected: str, suggestion: str | None = None) -> None:
        """A problem that the reader of the form found."""
        self._wrong(name, line, wrong, expected, suggestion)

    def line(self, name: str) -> int:
        """Where a field is, or 1."""
        entry = self._table.entries.get(name)
        return entry.line if entry else 1

    # --- inside ------------------------------------------------------------------------------------------------------

    def _chosen(self, name: str, value: Scalar, choices: type[Choice]) -> Choice | None:
        if value.text in set(choices):
            return choices(value.text)
        hint = _nearest_name(value.text.lower(), tuple(choices))
        self._wrong(
            name, value.line, f"{quoted_for_message(value.text)} is not known", f"one of {', '.join(choices)}", hint
        )
        return None

    def _entry(self, name: str, expected: str, *, required: bool = True) -> TableEntry | None:
        self._asked.append(name)
        entry = self._table.entries.get(name)
        if entry is None and required and name not in self._unread:
            self._missing[name] = expected
        return entry

    def _scalar(self, name: str, expected: str, *, lines: bool = False, required: bool = True) -> Scalar | None:
        entry = self._entry(name, expected, required=required)
        if entry is None:
            return None
        if not isinstance(entry.value, Scalar):
            what = "a list" if isinstance(entry.value, ListValue) else "a table"
            self._wrong(name, entry.line, f"this is {what}", expected)
            return None
        if required and entry.value.kind is ScalarKind.NOTHING:
            self._wrong(name, entry.line, "the field is empty", expected)
            return None
        if not lines and not entry.value.in_one_line:
            self._wrong(name, entry.line, "the value has several lines", f"{expected}, in one line")
            return None
        return entry.value

    def _optional(self, name: str, expected: str) -> Scalar | None:
        return self._scalar(name, expected, required=False)

    def _wrong(self, name: str, line: int, wrong: str, expected: str, suggestion: str | None = None) -> None:
        field = self._within + quoted_for_message(name).strip("'\"")
        self._problems.append(
            FrontMatterProblem(line=line, field=field, wrong=wrong, expected=expected, suggestion=suggestion)
        )


def _is_empty(entry: TableEntry) -> bool:
    return isinstance(entry.value, Scalar) and entry.value.kind is ScalarKind.NOTHING


def _nearest_name(word: str, known: Iterable[str]) -> str | None:
    words = [str(one) for one in known]
    return next(
        iter(get_close_matches(word.strip().replace(" ", "-"), words, n=1, cutoff=SUGGESTION_SIMILARITY_MIN)), None
    )
