"""Validates and evaluates five-field cron expressions in UTC.

An expression that can never be due is refused when it is written. The accepted syntax is a subset of `cronsim`'s, which
is consulted too: a valid expression always has a next instant.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cronsim import CronSim, CronSimError

CRON_CHARS_MAX = 200
EXPECTED = "five fields (minute hour day month weekday), such as 0 6 * * 1-5"


@dataclass(frozen=True, slots=True)
class _CronField:
    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_CRON_FIELDS = (
    _CronField("minute", 0, 59),
    _CronField("hour", 0, 23),
    _CronField("day", 1, 31),
    _CronField("month", 1, 12, _MONTHS),
    _CronField("weekday", 0, 7, _DAYS),
)
_DAYS_OF_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ANY_MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
_RANGE = re.compile(r"(\*|[0-9a-z]{1,3})(?:-([0-9a-z]{1,3}))?(?:/(\d{1,2}))?")


def cron_problem(expression: str) -> str | None:
    """What is wrong with an expression; None if it is valid."""
    if len(expression) > CRON_CHARS_MAX:
        return f"it has {len(expression)} characters and the limit is {CRON_CHARS_MAX}"
    fields = expression.lower().split()
    if len(fields) != len(_CRON_FIELDS):
        return f"it has {len(fields)} fields"
    values: list[set[int]] = []
    for part, field in zip(_CRON_FIELDS, fields, strict=True):
        found = _values(part, field)
        if found is None:
            return f"its {part.name} is {field!r}, which is not within {part.low}-{part.high}"
        values.append(found)
    _, _, days, months, _ = values
    if fields[4] == "*" and min(days) > max(_DAYS_OF_MONTH[month - 1] for month in months):
        return "none of its months has such a day"
    try:
        next_instant(expression, _ANY_MOMENT)
    except (CronSimError, StopIteration):
        return "no day fits all of its fields"
    return None


def next_instant(expression: str, after: datetime) -> datetime:
    """The first instant after `after`; only for a valid expression."""
    return next(CronSim(expression, after.astimezone(UTC)))


def latest_instant(expression: str, until: datetime) -> datetime:
    """The last instant up to and including `until`; only for a valid expression."""
    # In reverse, the simulation excludes its starting time, so it starts a microsecond later.
    return next(CronSim(expression, until.astimezone(UTC) + timedelta(microseconds=1), reverse=True))


def _values(part: _CronField, field: str) -> set[int] | None:
    found: set[int] = set()
    for item in field.split(","):
        matched = _RANGE.fullmatch(item)
        if matched is None:
            return None
        first, last, step = matched.groups()
        if first == "*":
            if last is not None:
                return None
            low, high = part.low, part.high
        else:
            low = _number(part, first)
            high = _number(part, last) if last is not None else (part.high if step else low)
        if not (part.low <= low <= high <= part.high) or (step is not None and int(step) == 0):
            return None
        found.update(range(low, high + 1, int(step or 1)))
    return found


def _number(part: _CronField, word: str) -> int:
    """The number of a word; -1, which is out of every range, if it has none."""
    if word.isdigit():
        return int(word)
    return part.words.index(word) + part.low if word in part.words else -1
