"""Validates and evaluates five-field cron expressions, in UTC or in another time zone.

An expression that can never be due is refused when it is written. The accepted syntax is a subset of `cronsim`'s, which
is consulted too: a valid expression always has a next instant.

Every instant that is returned is in UTC. When the clocks of a time zone change:
- An instant that does not exist, because the clocks skip it, is the first moment after the skipped time. Several
  skipped instants are one.
- An instant that happens twice, because the clocks are set back, is the first of the two.
- An expression for every hour (its hour field is `*`) goes by elapsed time: each hour that passes has its instants once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

CRON_CHARS_MAX = 200
ZONE_CHARS_MAX = 100
CLOCK_CHANGE = timedelta(hours=3)
"""More than any clock change of a time zone."""
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
        field_values = _values(part, field)
        if field_values is None:
            return f"its {part.name} is {field!r}, which is not within {part.low}-{part.high}"
        values.append(field_values)
    _, _, days, months, _ = values
    if fields[4] == "*" and min(days) > max(_DAYS_OF_MONTH[month - 1] for month in months):
        return "none of its months has such a day"
    try:
        next_instant(expression, _ANY_MOMENT)
    except (CronSimError, StopIteration):
        return "no day fits all of its fields"
    return None


def time_zone(name: str) -> tzinfo | None:
    """The time zone of this name in the tz database, such as Europe/Kyiv; None if there is none."""
    if name == "UTC":
        return UTC
    if not 1 <= len(name) <= ZONE_CHARS_MAX:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def next_instant(expression: str, after: datetime, zone: tzinfo = UTC) -> datetime:
    """The first instant after `after`; only for a valid expression."""
    local = after.astimezone(zone)
    # While the clocks show a repeated hour for the second time, the simulation begins with instants of the first time.
    return next(instant for instant in _simulated(expression, local, zone) if instant > after)


def next_instants(expression: str, after: datetime, count: int, zone: tzinfo = UTC) -> list[datetime]:
    """The first instants after `after`; only for a valid expression."""
    instants: list[datetime] = []
    for _ in range(count):
        after = next_instant(expression, after, zone)
        instants.append(after)
    return instants


def latest_instant(expression: str, until: datetime, zone: tzinfo = UTC) -> datetime:
    """The last instant up to and including `until`; only for a valid expression."""
    return next(instants_back(expression, until, zone))


def instants_back(expression: str, until: datetime, zone: tzinfo = UTC) -> Iterator[datetime]:
    """The instants up to and including `until`, the last one first; only for a valid expression."""
    # In reverse, the simulation excludes its starting time, so it starts a microsecond later. In a time zone it starts
    # after any repeated hour, so that the first of two equal times is not left out.
    start = until + (timedelta(microseconds=1) if zone is UTC else CLOCK_CHANGE)
    return (
        instant for instant in _simulated(expression, start.astimezone(zone), zone, reverse=True) if instant <= until
    )


def _simulated(expression: str, start: datetime, zone: tzinfo, *, reverse: bool = False) -> Iterator[datetime]:
    minute, hour, *days = expression.split()
    if zone is not UTC and hour != "*":
        # `cronsim` moves skipped instants and drops repeated ones only if neither field begins with a star.
        minute, hour = minute.replace("*", "0-59"), hour.replace("*", "0-23")
    for instant in CronSim(" ".join([minute, hour, *days]), start, reverse=reverse):
        yield instant.astimezone(UTC)


def _values(part: _CronField, field: str) -> set[int] | None:
    values: set[int] = set()
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
        values.update(range(low, high + 1, int(step or 1)))
    return values


def _number(part: _CronField, word: str) -> int:
    """The number of a word; -1, which is out of every range, if it has none."""
    if word.isdigit():
        return int(word)
    return part.words.index(word) + part.low if word in part.words else -1
